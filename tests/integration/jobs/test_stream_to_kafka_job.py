"""The job as users run it: in a separate process, by python and by spark-submit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.librdkafka import read_values

from jobs.read_topic import read_topic
from spark_kafka_sink.local import Admin

ROOT = Path(__file__).resolve().parents[3]
JOB = ROOT / "jobs" / "stream_to_kafka.py"
SESSION = ["--spark", "master=local[2]", "--spark", "ui.enabled=false", "--spark", "sql.shuffle.partitions=2"]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the job with these arguments; kill all of its remaining processes after the test."""
    running: list[subprocess.Popen[str]] = []
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start(*arguments: str, by: tuple[str, ...] = (sys.executable,)) -> subprocess.Popen[str]:
        job = subprocess.Popen(
            [*by, str(JOB), *SESSION, "--checkpoint", str(tmp_path / "checkpoint"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PATH": path},
            start_new_session=True,
        )
        running.append(job)
        return job

    yield start
    for job in running:
        if job.poll() is None:
            kill_all(job)
        job.communicate()


def kill_all(job: subprocess.Popen[str]) -> None:
    """SIGKILL for the Python of the driver and its JVM. The workers end when their JVM is gone."""
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def orders(folder: Path, files: int = 4, rows: int = 500) -> Path:
    """CSV files of numbered orders; Spark reads them in the order of their modification times."""
    folder.mkdir()
    for file in range(files):
        lines = [f"{n},customer-{n % 37},{n / 100}\n" for n in range(file * rows, (file + 1) * rows)]
        path = folder / f"{file:02}.csv"
        path.write_text("".join(lines))
        os.utime(path, (1_700_000_000 + file,) * 2)
    return folder


def flags(kafka: Admin, topic: str, source: Path) -> list[str]:
    return [
        *("--bootstrap-servers", kafka.bootstrap_servers, "--topic", topic),
        *("--source", "csv", "--schema", "number INT, customer STRING, amount DOUBLE", "--path", str(source)),
        *("--key", "customer", "--value", "CAST(number AS STRING)"),
    ]


def test_files_are_streamed_in_reported_batches(
    kafka_broker: Admin, topic: str, tmp_path: Path, start_job: Callable[..., subprocess.Popen[str]]
) -> None:
    source = orders(tmp_path / "in")
    job = start_job(
        *flags(kafka_broker, topic, source),
        *("--headers", "array(named_struct('key', 'amount', 'value', encode(CAST(amount AS STRING), 'utf-8')))"),
        *("--interface", "foreach", "--source-option", "maxFilesPerTrigger=2"),
    )
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    lines = out.splitlines()
    assert lines[0].startswith(f"{source} -> KafkaSink(topic='{topic}', ")
    assert lines[0].endswith(") by foreach")
    assert re.fullmatch(r" +batch +rows +seconds +records/s", lines[1])
    assert [re.split(r" +", line.strip())[:2] for line in lines[2:4]] == [["0", "1,000"], ["1", "1,000"]]
    assert len({len(line) for line in lines[1:4]}) == 1
    assert lines[4].startswith("2,000 rows in 2 batches, ")

    got = read_topic(kafka_broker.bootstrap_servers, topic).to_pylist()
    assert sorted(int(row["value"]) for row in got) == list(range(2_000))
    row = next(row for row in got if row["value"] == b"150")
    assert (row["key"], row["headers"]) == (b"customer-2", [{"key": "amount", "value": b"1.5"}])


@pytest.mark.parametrize("interface", ["foreachBatch", "foreach"])
def test_all_columns_become_json_by_the_option_of_the_format(
    kafka_broker: Admin, topic: str, tmp_path: Path, start_job: Callable[..., subprocess.Popen[str]], interface: str
) -> None:
    source = orders(tmp_path / "in", files=1, rows=50)
    given = dict(zip(*[iter(flags(kafka_broker, topic, source))] * 2, strict=True))
    del given["--value"]
    job = start_job(
        *(part for flag in given.items() for part in flag),
        *("--option", "value.format=json", "--interface", interface),
    )
    _, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    got = [json.loads(row["value"]) for row in read_topic(kafka_broker.bootstrap_servers, topic).to_pylist()]
    assert sorted(got, key=lambda row: int(row["number"])) == [
        {"number": n, "customer": f"customer-{n % 37}", "amount": n / 100} for n in range(50)
    ]


def test_spark_submit_job_keeps_the_order_of_each_key(
    kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, start_job: Callable[..., subprocess.Popen[str]]
) -> None:
    topic = new_topic(partitions=3)
    source = orders(tmp_path / "in")
    settings = tmp_path / "job.properties"
    settings.write_text("interface = foreachPartition\norder.by = number\nkafka.compression.type = zstd\n")
    job = start_job(
        *(
            "--properties",
            str(settings),
            *flags(kafka_broker, topic, source),
            "--source-option",
            "maxFilesPerTrigger=3",
        ),
        by=("spark-submit", "--master", "local[2]"),
    )
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert "2,000 rows in 2 batches" in out
    numbers: dict[bytes, list[int]] = {}
    for row in read_topic(kafka_broker.bootstrap_servers, topic).to_pylist():
        numbers.setdefault(row["key"], []).append(int(row["value"]))
    assert numbers == {b"customer-%d" % k: list(range(k, 2_000, 37)) for k in range(37)}


def test_sigterm_stops_after_the_batch_and_next_start_continues(
    kafka_broker: Admin, topic: str, tmp_path: Path, start_job: Callable[..., subprocess.Popen[str]]
) -> None:
    arguments = [
        *("--bootstrap-servers", kafka_broker.bootstrap_servers, "--topic", topic),
        *("--source", "rate", "--source-option", "rowsPerSecond=200", "--value", "CAST(value AS STRING)"),
        *("--trigger", "500 milliseconds"),
    ]

    def run_until_batches(count: int) -> str:
        job = start_job(*arguments)
        assert job.stdout is not None
        lines = [job.stdout.readline() for _ in range(2 + count)]
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        assert "stream_to_kafka.py" not in err  # a stack trace of the job; PySpark's daemon may print one too
        return "".join(lines) + out

    first = run_until_batches(2)
    assert "Stopping after the current batch" in first
    second = run_until_batches(1)
    done = sum(int(count.replace(",", "")) for count in re.findall(r"^([\d,]+) rows in", first + second, re.MULTILINE))
    values = {int(value) for value in read_topic(kafka_broker.bootstrap_servers, topic)["value"].to_pylist()}
    # The stop may end the next batch at its begin, with some tasks' rows written: the next start writes it again.
    lost = set(range(done)) - values
    assert done > 0
    assert not lost, (
        f"{len(lost)} of {done} rows of finished batches are not there: {sorted(lost)[:5]}\n{first}{second}"
    )


def test_signal_before_the_query_runs_ends_the_job(
    kafka_broker: Admin, topic: str, start_job: Callable[..., subprocess.Popen[str]]
) -> None:
    job = start_job(
        *("--bootstrap-servers", kafka_broker.bootstrap_servers, "--topic", topic, "--source", "rate"),
        *("--trigger", "500 milliseconds"),
    )
    assert job.stdout is not None
    job.stdout.readline()
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert out == "Stopped before the query was started\n"


@pytest.mark.parametrize("interface", ["format", pytest.param("foreachBatch", marks=pytest.mark.slow)])
def test_killed_job_continues_and_readers_see_each_row_once(
    kafka_broker: Admin,
    new_topic: Callable[..., str],
    tmp_path: Path,
    start_job: Callable[..., subprocess.Popen[str]],
    interface: str,
) -> None:
    topic = new_topic(partitions=3)
    source = orders(tmp_path / "in", files=12)
    chosen = ["--order-by", "number"] if interface == "foreachBatch" else []
    arguments = [
        *(*flags(kafka_broker, topic, source), "--delivery-guarantee", "exactly-once", *chosen),
        *("--source-option", "maxFilesPerTrigger=1"),
    ]
    killed = start_job(*arguments)
    assert killed.stdout is not None
    first = [killed.stdout.readline() for _ in range(5)]  # the third batch is finished, and the next one begins
    assert first[0].endswith(f") by {interface}\n")
    kill_all(killed)
    seen = values_of(kafka_broker, topic)
    assert len(seen) == len(set(seen)) < 6_000

    out, err = start_job(*arguments).communicate(timeout=120)
    assert out.startswith(first[0]), err
    assert "batches, " in out, err
    assert sorted(values_of(kafka_broker, topic)) == list(range(6_000))


def values_of(kafka: Admin, topic: str) -> list[int]:
    """The values that an independent consumer with isolation.level=read_committed sees."""
    return [int(value) for value in read_values(kafka.bootstrap_servers, topic, 3)]


def test_old_file_is_written_and_columns_in_another_order_are_refused(
    kafka_broker: Admin, topic: str, tmp_path: Path, start_job: Callable[..., subprocess.Popen[str]]
) -> None:
    """Bug: by Spark's defaults the job left out the old file, and wrote names as amounts, and ended with 0."""
    source = tmp_path / "in"
    source.mkdir()

    def run(name: str, text: str, age_days: int) -> tuple[int, str]:
        (source / name).write_text(text)
        os.utime(source / name, (time.time() - age_days * 86_400,) * 2)
        job = start_job(*flags(kafka_broker, topic, source), "--source-option", "header=true")
        _, err = job.communicate(timeout=120)
        return job.returncode, err

    header = "number,customer,amount\n"
    assert run("new.csv", header + "1,ann,1.5\n", 0)[0] == 0
    assert run("old.csv", header + "2,bob,2.5\n", 8)[0] == 0
    code, err = run("other.csv", "number,amount,customer\n3,3.5,eve\n", 0)
    assert code == 1
    assert "other.csv" in err.strip().splitlines()[-1]
    got = read_topic(kafka_broker.bootstrap_servers, topic).to_pylist()
    assert sorted((row["key"], row["value"]) for row in got) == [(b"ann", b"1"), (b"bob", b"2")]


@pytest.mark.parametrize(
    "interface", ["format", pytest.param("foreachBatch", marks=pytest.mark.slow), "foreachPartition"]
)
def test_failed_job_prints_one_paragraph_with_the_cause(
    kafka_broker: Admin, topic: str, tmp_path: Path, start_job: Callable[..., subprocess.Popen[str]], interface: str
) -> None:
    source = orders(tmp_path / "in", files=1)
    job = start_job(
        *(*flags(kafka_broker, topic, source), "--interface", interface),
        *("--value", "if(number = 77, repeat('x', 2000000), 'ok')"),
    )
    out, err = job.communicate(timeout=120)
    assert job.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("stream_to_kafka: RecordTooLargeError: ")
    assert topic in last
    assert "raise max.request.size" in last
    assert "\tat org.apache" not in out + err
    assert "Traceback" not in out + err
