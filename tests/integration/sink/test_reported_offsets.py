"""Random batches with failures: the offsets of the reports are those that librdkafka reads.

Tasks fail in the middle and are run again, connections break before and after answers, batches are too large and are
split, batches are aborted, rows go to the dead letters, and another producer writes in between. The driver and the
tasks run in this process, without Spark.
"""

from __future__ import annotations

import pickle
import random
import secrets
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pyarrow as pa
import pytest
from confluent_kafka import Message
from pyspark import TaskContext
from pyspark.sql.types import IntegerType, StringType, StructField, StructType
from support.exactly_once_streams import await_markers
from support.fault_stage import FaultStage
from support.librdkafka import read_topic, text_of
from support.reported_offsets import check_partitions, offsets_by_partition
from support.tcp_proxy import TcpProxy, Way

from spark_kafka_sink import BatchReport, KafkaSinkDataSource
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.sink import data_source
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.reports import left_reports
from spark_kafka_sink.sink.worker import REPORTS

PARTITIONS: Final = 4
NO_PARTITION: Final = 99
"""Its rows go to the dead letters."""
SCHEMA: Final = StructType([StructField("value", StringType()), StructField("partition", IntegerType())])


class BrokenTaskError(Exception):
    """The error of a task whose rows end early."""


@dataclass
class Expected:
    """What a batch must report."""

    is_complete: bool
    is_exactly_once: bool
    tasks: list[str] = field(default_factory=list)
    """The tags of the attempts that count."""


class Batches:
    """Runs batches through the data source, as Spark does, and keeps what their reports must say."""

    def __init__(self, stage: FaultStage, folder: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.topic = stage.new_topic(PARTITIONS, **{"max.message.bytes": 2_000})[0][0]
        self.dead = stage.new_topic(2)[0][0]
        self.expected: list[Expected] = []
        self.pool = ProducerPool(KafkaProducer, SystemClock())
        self._proxy: TcpProxy = stage.proxies[1]
        self._rng = rng
        self._box = folder / REPORTS / "box"
        self._box.mkdir(parents=True)
        self._ids = {True: 0, False: 0}
        self._task_context: Any = None
        self._other = KafkaProducer({"bootstrap.servers": stage.direct, "linger.ms": 0})
        self._options = {
            "kafka.bootstrap.servers": stage.proxied,
            "topic": self.topic,
            "errors.tolerance": "all",
            "errors.deadletterqueue.topic.name": self.dead,
            "kafka.linger.ms": "1",
            "kafka.request.timeout.ms": "2000",
            "kafka.retry.backoff.ms": "20",
            "kafka.reconnect.backoff.ms": "10",
            "kafka.reconnect.backoff.max.ms": "50",
        }
        monkeypatch.setenv("SPARK_LOCAL_DIRS", str(folder))
        monkeypatch.setattr(TaskContext, "get", lambda: self._task_context)
        monkeypatch.setattr(data_source, "process_pool", lambda: self.pool)

    def close(self) -> None:
        self._other.close(10)
        for *_, producer in self.pool.producers():
            producer.close(10)

    def reports(self) -> list[BatchReport]:
        return list(left_reports(self._box))

    def run(self) -> BatchReport:
        """Run one batch. Return its report."""
        rng, number = self._rng, len(self.expected)
        is_exactly_once = rng.random() < 0.25
        expected = Expected(rng.random() < 0.95, is_exactly_once)
        self.expected.append(expected)
        self._break_connections()
        planned = self._writer(is_exactly_once)
        planned = pickle.loads(pickle.dumps(planned))
        batch_id = self._ids[is_exactly_once]
        tasks = [f"b{number}-t{task}" for task in range(rng.randint(1, 3))]
        seeds = [rng.random() for _ in tasks]

        messages = [
            self._task(planned, tag, partition, batch_id, random.Random(seed), expected)
            for partition, (tag, seed) in enumerate(zip(tasks, seeds, strict=True))
        ]
        if expected.is_complete:
            self._writer(is_exactly_once).commit(messages, batch_id)
            self._ids[is_exactly_once] += 1
        else:
            messages[rng.randrange(len(messages))] = None
            expected.tasks = [tag for tag, message in zip(sorted(expected.tasks), messages, strict=True) if message]
            self._writer(is_exactly_once).abort(messages, batch_id)
        (report,) = self.reports()
        return report

    def _writer(self, is_exactly_once: bool) -> Any:
        more = {"delivery.guarantee": "exactly-once", "transactional.id.prefix": self.topic} if is_exactly_once else {}
        return KafkaSinkDataSource({**self._options, **more}).streamWriter(SCHEMA, False)

    def _task(
        self, planned: Any, tag: str, partition: int, batch_id: int, rng: random.Random, expected: Expected
    ) -> Any:
        """Run the attempts of a task until one ends. Return its message."""
        for attempt in range(10):
            properties = {
                "streaming.sql.batchId": str(batch_id),
                "sql.streaming.queryId": f"query of {expected.is_exactly_once}",
                "spark.jobGroup.id": "run",
            }
            self._task_context = SimpleNamespace(
                partitionId=lambda: partition,
                attemptNumber=lambda attempt=attempt: attempt,
                getLocalProperty=properties.get,
            )
            is_broken = rng.random() < 0.2
            with suppress(BrokenTaskError):
                message = planned.write(self._among_others(_rows(f"{tag}-a{attempt}", rng, is_broken=is_broken)))
                expected.tasks.append(f"{tag}-a{attempt}")
                return message
        raise AssertionError("ten attempts broke")

    def _among_others(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Let another producer write behind each Arrow batch."""
        for batch in rows:
            yield batch
            self._other.send(self.topic, "other/", partition=self._rng.randrange(PARTITIONS))
            self._other.flush(10)

    def _break_connections(self) -> None:
        rng = self._rng
        fault = rng.random()
        if fault < 0.05:
            self._proxy.cut(reset=rng.random() < 0.5)
        elif fault < 0.3:
            self._proxy.cut_after(rng.randint(1, 6_000), rng.choice((Way.UP, Way.DOWN)))


def _rows(tag: str, rng: random.Random, *, is_broken: bool) -> Iterator[pa.RecordBatch]:
    """Yield up to three Arrow batches of rows that name the task's attempt."""
    places = [*range(PARTITIONS), None]
    for part in range(rng.randint(0, 3)):
        count = rng.randint(1, 40)
        values = [f"{tag}/{part}.{row}/" + "." * rng.choice((0, 20, 200)) for row in range(count)]
        partitions = rng.choices(places, k=count)
        if rng.random() < 0.1:
            partitions[rng.randrange(count)] = NO_PARTITION
        yield pa.record_batch({"value": pa.array(values), "partition": pa.array(partitions, pa.int32())})
    if is_broken:
        raise BrokenTaskError


def by_attempt(messages: list[Message]) -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        found[text_of(message).partition("/")[0]].append(message)
    return found


def check(batches: Batches, reports: list[BatchReport], servers: str, where: str) -> None:
    """Compare every report with what librdkafka reads."""
    await_markers(servers)
    rows, letters = (
        by_attempt(read_topic(servers, topic, partitions, isolation_level="read_uncommitted", timeout_s=120))
        for topic, partitions in ((batches.topic, PARTITIONS), (batches.dead, 2))
    )
    visible = by_attempt(read_topic(servers, batches.topic, PARTITIONS, timeout_s=120))
    for number, (report, expected) in enumerate(zip(reports, batches.expected, strict=True)):
        what = f"{where}, batch {number}: {report}"
        assert report.outcome == ("complete" if expected.is_complete else "failed"), what
        counted = expected.tasks if expected.is_complete or not expected.is_exactly_once else []
        assert report.tasks == len(counted), what
        for reported, topic, read in (
            (report.partitions, batches.topic, rows),
            (report.dead_letter_partitions, batches.dead, letters),
        ):
            found = [message for tag in counted for message in read.get(tag, ())]
            check_partitions(reported, topic, offsets_by_partition(found), what)
        assert sum(len(visible[tag]) for tag in counted) == report.records, what


def run_batches(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = secrets.randbelow(2**32)
    rng = random.Random(seed)
    where = f"seed {seed}"
    print(where)
    with FaultStage(1) as stage:
        batches = Batches(stage, tmp_path, rng, monkeypatch)
        try:
            reports = [batches.run() for _ in range(count)]
        finally:
            stage.heal()
            batches.close()
        check(batches, reports, stage.direct, where)
    unknown = sum(each.records_without_offset for report in reports for each in report.partitions)
    retries = sum(report.retries for report in reports)
    records = sum(report.records for report in reports)
    print(f"{count} batches, {records} records, {retries} retries, {unknown} records without offset")
    assert unknown < records / 100, where
    assert records > 10 * count, where
    assert any(report.retries for report in reports), where
    assert any(report.dead_letters for report in reports), where


def test_offsets_of_random_batches_are_those_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_batches(60, tmp_path, monkeypatch)


@pytest.mark.slow
def test_offsets_of_a_thousand_random_batches_are_those_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_batches(1_000, tmp_path, monkeypatch)
