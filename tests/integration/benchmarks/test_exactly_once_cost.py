"""The job that measures exactly-once delivery, and the figures in the documentation."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.sink.data_source import KafkaSinkDataSource

ROOT = Path(__file__).resolve().parents[3]
JOB = ROOT / "benchmarks" / "exactly_once_cost.py"
PAGE = ROOT / "docs" / "exactly-once.md"
PHASES = ("begin", "tasks", "commit")
WARM_UP = 2
FEW, MORE = 2, 3
"""Tasks of a batch."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    figures = tmp_path_factory.mktemp("cost") / "figures.json"
    settings = {
        "--tasks": f"{FEW},{MORE}",
        "--warm-up": str(WARM_UP),
        "--batches": "3",
        "--rounds": "1",
        "--fingerprint-rows": "20000",
        "--json": str(figures),
    }
    command = [sys.executable, str(JOB), *(part for setting in settings.items() for part in setting)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "A batch: requests by api" in job.stdout
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def steady(measured: dict[str, Any], tasks: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = measured["batches"][str(tasks)][WARM_UP:]
    assert len(found) == 3
    return found


LOOKS = 4
"""ListOffsets of a commit whose end markers are written when it looks first. Each further look is one more, and after
the second one there is a DescribeTransactions.
"""
DESCRIPTIONS = 2
"""DescribeTransactions of such a commit: before the decision and after it."""


def requests(batches: list[dict[str, Any]]) -> list[float]:
    """The requests of begin, the tasks, and commit, without further looks for end markers."""

    def count(name: str, phase: dict[str, Any]) -> int:
        asked: dict[str, int] = {api: counted["requests"] for api, counted in phase.items()}
        least = {"ListOffsets": LOOKS, "DescribeTransactions": DESCRIPTIONS} if name == "commit" else {}
        return sum(asked.values()) - sum(asked[api] - count for api, count in least.items())

    return [median(count(name, batch["phases"][name]) for batch in batches) for name in PHASES]


def stated() -> dict[int, list[int]]:
    """The figures of the page by number of tasks: the requests of begin, of the tasks, of commit, and their sum."""
    row = r"^\| (\d+) \| (\d+) \+ ([\d,]+) \+ (\d+) = ([\d,]+) \|"
    found = re.findall(row, PAGE.read_text(), re.MULTILINE)
    return {int(tasks): [int(cell.replace(",", "")) for cell in cells] for tasks, *cells in found}


def test_requests_of_a_batch_match_the_page(measured: dict[str, Any]) -> None:
    few, more = (requests(steady(measured, tasks)) for tasks in (FEW, MORE))
    page = stated()
    assert list(page) == [2, 50, 200]
    for tasks, (*phases, total) in page.items():
        expected = [first + (tasks - FEW) * (second - first) for first, second in zip(few, more, strict=True)]
        assert phases == expected
        assert total == sum(expected)


def test_apis_of_a_batch_are_counted_by_phase(measured: dict[str, Any]) -> None:
    batch = steady(measured, FEW)[-1]
    apis = {
        name: {api: counted["requests"] for api, counted in phase.items()} for name, phase in batch["phases"].items()
    }
    assert apis["tasks"] == {"DescribeTransactions": 4, "InitProducerId": 2, "Produce": 2, "TxnOffsetCommit": 2}
    assert apis["commit"]["EndTxn"] == FEW + 2
    rows = batch["phases"]["tasks"]["Produce"]
    assert rows["bytes_up"] > FEW * 64 * 120  # the size of keys and values
    assert 0 < rows["bytes_down"] < rows["bytes_up"]


def test_first_batch_of_a_prefix_makes_a_few_more_requests(measured: dict[str, Any]) -> None:
    """The query follows another one in the same process."""
    first, *_, last = measured["batches"][str(MORE)]
    begin, later = (
        Counter({api: counted["requests"] for api, counted in batch["phases"]["begin"].items()})
        for batch in (first, last)
    )
    more = begin - later
    assert more.pop("Fetch", 0) in (0, 1)  # if the first query has the same partition of the decision topic
    assert more == Counter(DescribeConfigs=1, DescribeTransactions=1, FindCoordinator=1, ListOffsets=2, Produce=2)
    assert first["phases"]["tasks"]["FindCoordinator"]["requests"] == 2


def test_each_task_writes_one_control_record_per_partition(measured: dict[str, Any]) -> None:
    for tasks in (FEW, MORE):
        for batch in steady(measured, tasks):
            assert batch["gained"]["control records in the topic"] in range(tasks * 14, tasks * 16 + 1)
            assert batch["gained"]["decision topic"] == 5
            assert batch["gained"]["__consumer_offsets"] == 2 * tasks


def test_latencies_and_the_fingerprint_are_measured(measured: dict[str, Any]) -> None:
    latency = measured["latency_ms"][str(MORE)]
    assert {name: len(times) for name, times in latency.items()} == {"begin": 3, "task": 3 * MORE, "commit": 3}
    assert all(0 < time < 10_000 for times in latency.values() for time in times)
    small, large = measured["fingerprint_ns"]
    assert (small["value_bytes"], small["rows"], large["value_bytes"], large["rows"]) == (100, 20_000, 1000, 4_000)
    for each in (small, large):
        assert len(each["elapsed"]) == len(each["processor"]) == 1
        assert 0 < each["alone"][0] < each["alone_by_numpy"][0]


def batches_of_spark(spark: SparkSession, stage: Any, form: str, folder: Path) -> Iterator[Counter[str]]:
    """The requests of a query's consecutive batches of two tasks; each file of rows is a batch."""
    source, checkpoint = folder / "rows", folder / "checkpoint"
    source.mkdir()
    options = {
        "kafka.bootstrap.servers": stage.proxied,
        "topic": stage.new_topic(16),
        "delivery.guarantee": "exactly-once",
    }
    writer = spark.readStream.schema("value STRING").text(str(source)).repartition(2).writeStream
    if form == "format":
        spark.dataSource.register(KafkaSinkDataSource)
        writer = writer.format("kafka_sink").options(**options)
    else:
        writer = writer.foreachBatch(KafkaSink(options).write_batch)  # type: ignore[arg-type]
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        before: Counter[str] = Counter()
        for number in range(16):
            (folder / "new").write_text("\n".join(map(str, range(128))))
            (folder / "new").rename(source / f"{number}.txt")
            deadline = time.monotonic() + 60
            while not (checkpoint / "commits" / str(number)).exists():
                assert query.exception() is None
                assert time.monotonic() < deadline, f"batch {number} does not end"
                time.sleep(0.05)
            after = Counter({api: counted.requests for api, counted in stage.counts().items()})
            yield after - before
            before = after
    finally:
        query.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "fewer"),
    [
        ("format", {}),
        (
            "foreachBatch",
            {"DescribeProducers": 1, "Fetch": 1, "ListOffsets": 1, "ListTransactions": 1, "Metadata": 2, "Produce": 1},
        ),
    ],
)
def test_requests_of_a_spark_query_match_the_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, fewer: dict[str, int]
) -> None:
    """They match once each Python worker has looked up the coordinators of both tasks."""
    monkeypatch.syspath_prepend(str(JOB.parent))
    with importlib.import_module("exactly_once").stage_of(1, 2) as stage:
        last = list(batches_of_spark(spark, stage, form, tmp_path))[-7:]
    least = {api: min(batch[api] for batch in last) for api in ("ListOffsets", "DescribeTransactions")}
    found = [
        batch.total() - batch["FindCoordinator"] - sum(batch[api] - count for api, count in least.items())
        for batch in last
    ]
    assert median(found) == stated()[2][-1] - sum(fewer.values())
    assert least["ListOffsets"] == LOOKS + 2 - fewer.get("ListOffsets", 0)
    apis = {api: median(batch[api] for batch in last) for api in ("Fetch", "EndTxn", "ListTransactions")}
    expected = {"Fetch": 1, "EndTxn": 4, "ListTransactions": 2}
    assert apis == {api: count - fewer.get(api, 0) for api, count in expected.items()}
