"""The benchmark as users run it: a process for each contender, with its own topics. Here it has one tiny cell."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from jobs.read_topic import read_topic
from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import Admin, EmbeddedKafka

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CELL = "keyed-lz4-4-100"
RECORDS = 10_000
TINY = [
    "--cells",
    CELL,
    "--records",
    str(RECORDS),
    "--rounds",
    "1",
    "--runs",
    "1",
    "--warm-up",
    "0",
    "--timeout",
    "100",
]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("benchmark")


class ReadingAdmin(Admin):
    """Read each topic before its deletion."""

    def __init__(self, bootstrap_servers: str) -> None:
        super().__init__(bootstrap_servers)
        self.read: dict[str, pa.Table] = {}

    def delete_topic(self, name: str) -> None:
        self.read[name] = read_topic(self.bootstrap_servers, name)
        super().delete_topic(name)


@pytest.mark.slow
def test_contenders_write_each_row_once_and_figures_are_saved(
    benchmark: ModuleType, kafka_broker: Admin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = benchmark.parse_arguments(
        [*TINY, "--contenders", "jvm,write", "--json", str(tmp_path / "figures.json"), "--option", "linger.ms=7"]
    )
    admin = ReadingAdmin(kafka_broker.bootstrap_servers)
    benchmark.save(benchmark.measure(admin, settings, tmp_path), settings)

    rows = rows_of_the_cell(RECORDS)
    assert [name.split("-")[4] for name in admin.read] == [
        "jvm",
        "jvm",
        "write",
    ]  # the first contender warms up the broker
    for records in admin.read.values():
        assert set(records["partition"].to_pylist()) == {0, 1, 2, 3}
        pairs = list(zip(records["key"].to_pylist(), records["value"].to_pylist(), strict=True))
        assert pairs.count((None, b"first")) == 4
        sent = [pair for pair in pairs if pair != (None, b"first")]
        assert sorted(sent) == sorted(rows * 2)  # the warm-up run and the timed one

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["settings"] == {
        "records": RECORDS,
        "rounds": 1,
        "runs": 1,
        "warm_up": 0.0,
        "cores": 2,
        "security": ["PLAINTEXT"],
        "option": {"linger.ms": "7"},
    }
    jvm, ours = figures["rates"]
    for name, rate in (("jvm", jvm), ("write", ours)):
        assert (rate["contender"], rate["cell"], rate["records"]) == (name, CELL, RECORDS)
        assert rate["records_found"] == rate["records_expected"] == 2 * RECORDS
        (run,) = rate["runs"]
        assert 0 < run["cpu_s"] <= run["seconds"] * 64
        assert rate["records_per_s"] == pytest.approx(RECORDS / run["seconds"])
        assert rate["cpu_s_per_million"] == pytest.approx(run["cpu_s"] / RECORDS * 1e6)
    assert jvm["rate_ratio"] == jvm["cpu_ratio"] == 1
    assert ours["rate_ratio"] == pytest.approx(ours["records_per_s"] / jvm["records_per_s"])
    assert jvm["worker_peak_bytes"] == 0
    assert 30e6 < ours["worker_peak_bytes"] < 1e9
    assert "KafkaSink.write" in capsys.readouterr().out


def rows_of_the_cell(count: int) -> list[tuple[bytes, bytes]]:
    """Return key and value of the first rows of CELL."""
    filling = ',"customer":{"name":"Ada Example","street":"12 Some Street","town":"Elsewhere"},"items":[{"sku"'
    return [
        (
            f"customer-{10_000_000_000 + n * 31 % 100_003}".encode(),
            f'{{"id":{1_000_000_000 + n},"amount":{100_000 + n * 7919 % 99_991}{filling}'[:100].encode(),
        )
        for n in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["avro", "json"])
def test_contenders_of_structs_write_what_sparks_functions_make(
    benchmark: ModuleType, kafka_broker: Admin, tmp_path: Path, format_: str
) -> None:
    admin = ReadingAdmin(kafka_broker.bootstrap_servers)
    names = ["jvm", "write_struct", "format_struct", "confluent_serializer"]
    cell = f"flights-{format_}-lz4-4"
    settings = benchmark.parse_arguments([*TINY, "--cells", cell, "--contenders", ",".join(names)])
    assert benchmark.measure(admin, settings, tmp_path)["failures"] == []

    values = {name.split("-")[4]: sorted_values(records) for name, records in admin.read.items()}
    assert list(values) == names
    jvm, others = values["jvm"], values["confluent_serializer"]
    assert len(jvm) == 2 * RECORDS
    assert values["write_struct"] == values["format_struct"] == jvm
    # the first file of eight, with the registry's prefix or with other white space
    read = json.loads if format_ == "json" else lambda value: value.removeprefix(b"\0\0\0\0\1")
    assert len(others) == 2 * RECORDS // 8
    assert {repr(read(value)) for value in others} <= {repr(read(value)) for value in jvm}


@pytest.mark.slow
def test_text_of_flights_is_the_same_for_every_sink(benchmark: ModuleType, kafka_broker: Admin, tmp_path: Path) -> None:
    admin = ReadingAdmin(kafka_broker.bootstrap_servers)
    chosen = ["--cells", "flights-text-lz4-4", "--contenders", "jvm,write"]
    assert benchmark.measure(admin, benchmark.parse_arguments([*TINY, *chosen]), tmp_path)["failures"] == []
    *_, jvm, ours = (sorted_values(records) for records in admin.read.values())
    assert ours == jvm
    assert len(jvm) == 2 * RECORDS
    assert jvm[0].startswith(b"2013.0,1.0,1.0,")


@pytest.mark.slow
def test_small_tasks_are_written_at_least_once_and_exactly_once(
    benchmark: ModuleType, kafka_broker: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = ReadingAdmin(kafka_broker.bootstrap_servers)
    assigned = []
    run_process = benchmark.run_process

    def spy(work: Any, *others: Any) -> Any:
        assigned.append((work.records, work.cores))
        return run_process(work, *others)

    monkeypatch.setattr(benchmark, "run_process", spy)
    names = ["write", "format", "write_once", "format_once"]
    chosen = ["--cells", "keyed-none-4-100-5x20-3slots", "--contenders", ",".join(names)]
    results = benchmark.measure(admin, benchmark.parse_arguments([*TINY, *chosen]), tmp_path)
    assert results["failures"] == []
    assert [rate["contender"] for rate in results["rates"]] == names
    assert {rate["records_found"] for rate in results["rates"]} == {200}  # the warm-up run and the timed one
    assert assigned == [(100, 3)] * 5  # the first contender warms up the broker
    for records in admin.read.values():
        pairs = zip(records["key"].to_pylist(), records["value"].to_pylist(), strict=True)
        assert sorted(pair for pair in pairs if pair != (None, b"first")) == sorted(rows_of_the_cell(100) * 2)


@pytest.mark.slow
def test_watched_contender_writes_each_row_once_and_its_receivers_hear_of_it(
    benchmark: ModuleType, kafka_broker: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = tmp_path / "heard"
    monkeypatch.setenv("WATCHED_LOG", str(heard))
    admin = Admin(kafka_broker.bootstrap_servers)
    results = benchmark.measure(admin, benchmark.parse_arguments([*TINY, "--contenders", "write_watched"]), tmp_path)
    assert results["failures"] == []
    assert {rate["records_found"] for rate in results["rates"]} == {2 * RECORDS}
    paths = set(heard.read_text().split())
    assert paths == {"/v1/traces", "/v1/metrics", "/api/v1/lineage"}


def sorted_values(records: pa.Table) -> list[bytes]:
    return sorted(value for value in records["value"].to_pylist() if value != b"first")


TABLES = "table_write,table_produce_batch,table_produce_batch_errors_only"


@pytest.mark.slow
@pytest.mark.parametrize("contenders", [TABLES, "confluent_batch,confluent_batch_errors_only"])
def test_contenders_of_arrow_batches_write_each_row_once(
    benchmark: ModuleType, kafka_broker: Admin, tmp_path: Path, contenders: str
) -> None:
    admin = ReadingAdmin(kafka_broker.bootstrap_servers)
    results = benchmark.measure(admin, benchmark.parse_arguments([*TINY, "--contenders", contenders]), tmp_path)
    assert results["failures"] == []
    names = contenders.split(",")
    assert [name.split("-")[4] for name in admin.read] == [names[0], *names]  # the first one warms up the broker
    for name, records in admin.read.items():
        count = RECORDS if name.split("-")[4] == "table_write" else RECORDS // 4
        pairs = zip(records["key"].to_pylist(), records["value"].to_pylist(), strict=True)
        assert sorted(pair for pair in pairs if pair != (None, b"first")) == sorted(rows_of_the_cell(count) * 2)
    assert all(rate["worker_peak_bytes"] == 0 for rate in results["rates"]) is (contenders == TABLES)


@pytest.mark.slow
def test_tls_contenders_are_compared_with_plaintext(
    benchmark: ModuleType,
    own_kafka: Callable[..., EmbeddedKafka],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    security = benchmark.secured_listener(tmp_path)
    kafka = own_kafka(security=security, tuned_for="throughput")
    assigned = []
    run_process = benchmark.run_process

    def spy(work: Any, *others: Any) -> Any:
        assigned.append((work.contender, work.servers))
        return run_process(work, *others)

    monkeypatch.setattr(benchmark, "run_process", spy)
    chosen = ["--contenders", "write,jvm,confluent", "--security", "SSL,PLAINTEXT"]
    results = benchmark.measure(kafka, benchmark.parse_arguments([*TINY, *chosen]), tmp_path, security.truststore)

    assert results["failures"] == []
    pair = (kafka.secured_servers("SSL"), kafka.bootstrap_servers)
    expected = [(name, servers) for name in ("write", "write", "jvm", "confluent") for servers in pair]
    assert assigned == expected
    rates = {(rate["contender"], rate["security"]): rate for rate in results["rates"]}
    for name in ("write", "jvm", "confluent"):
        tls, plain = rates[name, "SSL"], rates[name, "PLAINTEXT"]
        assert tls["records_found"] == tls["records_expected"] > 0
        assert tls["plaintext_ratio"] == pytest.approx(tls["records_per_s"] / plain["records_per_s"])
        assert tls["rate_ratio"] == pytest.approx(tls["records_per_s"] / rates["jvm", "SSL"]["records_per_s"])
        assert "plaintext_ratio" not in plain
    shown = capsys.readouterr().out
    assert "100 B, TLS" in shown
    assert "x PLAINTEXT" in shown


@pytest.mark.parametrize(
    ("warm_up_s", "warm_ups"), [(20.0, 3), (0.0, 1)], ids=["as long as asked for", "at least once"]
)
def test_contender_warms_up_before_it_is_timed(
    benchmark: ModuleType,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    warm_up_s: float,
    warm_ups: int,
) -> None:
    contenders = importlib.import_module("contenders")
    clock = [100.0]
    written = []

    def write(df: DataFrame, _work: Any) -> None:
        written.append(df.count())
        clock[0] += 8

    monkeypatch.setattr(contenders.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(contenders, "CONTENDERS", {"write": contenders.Contender("", write)})
    work = benchmark.Assignment("write", CELL, "", "topic", records=7, runs=2, warm_up_s=warm_up_s, cores=1)
    contenders.measure_rate(spark, work)
    assert written == [7] * (warm_ups + 2)
    *timed, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["seconds"] for line in timed] == [8, 8]
    assert last["warm_ups"] == warm_ups


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (
            """print('{"seconds": 1, "cpu_s": 1}'); print('{"worker_peak_bytes": 0, "warm_ups": 1}')""",
            "its topic contains 0 records of 20,000",
        ),
        ("import sys; sys.exit('no memory left')", "ended with code 1. The end of its log:\nno memory left"),
        ("import time; time.sleep(60)", "was not done after 2 s"),
    ],
    ids=["loses records", "fails", "hangs"],
)
def test_failed_contender_is_reported_and_left_out(
    benchmark: ModuleType,
    kafka_broker: Admin,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str,
    complaint: str,
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    monkeypatch.setattr(benchmark, "WORKER", worker)
    settings = benchmark.parse_arguments([*TINY, "--contenders", "write", "--timeout", "2"])
    results = benchmark.measure(kafka_broker, settings, tmp_path)
    (failure,) = results["failures"]
    assert failure.startswith(f"write in {CELL}")
    assert complaint in failure
    assert [rate["records_found"] for rate in results["rates"]] in ([], [0])


@pytest.mark.parametrize(
    ("compiling_s", "processes"),
    [((900.0, 900.0, 0.0), [4, 2]), ((900.0,) * 20, [9, 9])],
    ids=["until its compilers rest", "not forever"],
)
def test_broker_is_warmed_up_before_each_cell(
    benchmark: ModuleType,
    kafka_broker: Admin,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    compiling_s: tuple[float, ...],
    processes: list[int],
) -> None:
    started = []

    def run_process(work: Any, *_: Any) -> Any:
        started.append(work.cell)
        raise benchmark.MeasurementError("nothing was written")

    monkeypatch.setattr(benchmark, "run_process", run_process)
    cells = [CELL, "keyed-none-4-100"]
    settings = benchmark.parse_arguments([*TINY, "--contenders", "write", "--cells", ",".join(cells)])
    results = benchmark.measure(
        kafka_broker, settings, tmp_path, compiled_s=lambda: {1: sum(compiling_s[: len(started)])}
    )
    assert [started.count(cell) for cell in cells] == processes  # the last one of each is the timed run
    assert len(results["failures"]) == 2


def test_failed_topic_deletion_fails_only_its_process(
    benchmark: ModuleType, kafka_broker: Admin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: the job ended, and lost the figures of an hour."""

    class StubbornAdmin(Admin):
        def delete_topic(self, name: str) -> None:
            super().delete_topic(name)
            if "-hand_over-" in name:
                raise LocalBrokerError("it is still shown after 30 s")

    reported = [{"seconds": 1.0, "cpu_s": 1.0}, {"worker_peak_bytes": 0, "warm_ups": 1}]
    monkeypatch.setattr(benchmark, "run_process", lambda *_: reported)
    settings = benchmark.parse_arguments([*TINY, "--contenders", "hand_over,noop_source"])
    results = benchmark.measure(StubbornAdmin(kafka_broker.bootstrap_servers), settings, tmp_path)
    assert results["failures"] == [f"hand_over in {CELL}, its topic: it is still shown after 30 s"]
    assert [rate["contender"] for rate in results["rates"]] == ["noop_source"]


def test_broker_is_warmed_up_by_a_contender_that_writes(
    benchmark: ModuleType, kafka_broker: Admin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: the first contender warmed up the broker, even hand_over, which does not write. The next one had a cold
    broker.
    """
    started = []

    def run_process(work: Any, *_: Any) -> Any:
        started.append(work.contender)
        raise benchmark.MeasurementError("nothing was written")

    monkeypatch.setattr(benchmark, "run_process", run_process)
    settings = benchmark.parse_arguments([*TINY, "--contenders", "hand_over,write"])
    benchmark.measure(kafka_broker, settings, tmp_path)
    assert started == ["write", "hand_over", "write"]


def test_compilers_of_a_broker_have_used_time(benchmark: ModuleType, own_kafka: Callable[..., EmbeddedKafka]) -> None:
    kafka = own_kafka()
    assert 0 < sum(benchmark.compiler_seconds(kafka.node_pid(kafka.node_ids[0])).values()) < 60


def test_time_of_an_ended_compiler_stays_in_the_sum(benchmark: ModuleType) -> None:
    """Bug: the sum lacked the time of ended compilers, so that compilers at work seemed to rest."""
    assert benchmark.seconds_since({1: 5.0, 2: 9.0}, {1: 5.5, 3: 1.5}) == 2.0


@pytest.mark.parametrize(
    ("contender", "cell", "records"),
    [
        ("write", "keyed-none-4-100", 1_000_000),
        ("confluent", "keyed-none-4-100", 250_000),
        ("write", "keyed-none-4-1000", 200_000),
    ],
)
def test_large_values_and_slow_contenders_write_fewer_records(
    benchmark: ModuleType, contender: str, cell: str, records: int
) -> None:
    assert benchmark.CONTENDERS[contender].records(benchmark.cell_of(cell), 1_000_000) == records


@pytest.mark.parametrize("cell", ["keyed-lz4-4", "keyed-lz5-4-100", "keyed-none-0-100", "keyed-none-4-x"])
def test_unknown_cell_is_refused(benchmark: ModuleType, cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(["--cells", cell])
    assert "--cells" in capsys.readouterr().err


def test_sigterm_also_ends_the_contenders_process() -> None:
    command = [sys.executable, str(BENCHMARKS / "benchmark.py"), *TINY, "--contenders", "hand_over", "--warm-up", "90"]
    contender = None
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            contender = wait_for(lambda: contender_of(job.pid))
            job.send_signal(signal.SIGTERM)
            assert job.wait(60) == 128 + signal.SIGTERM
            wait_for(lambda: not is_contender(contender))
        finally:
            job.kill()
            if contender is not None and is_contender(contender):
                os.kill(contender, signal.SIGKILL)


def wait_for(found: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


def contender_of(process_id: int) -> int | None:
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return next(filter(is_contender, children), None)


def is_contender(process_id: int) -> bool:
    try:
        return "contenders.py" in Path(f"/proc/{process_id}/cmdline").read_text()
    except OSError:
        return False
