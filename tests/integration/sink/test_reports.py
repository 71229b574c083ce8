"""Reports of batches that Spark runs reach the user's process, with the offsets that librdkafka reads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from support.librdkafka import read_topic, text_of
from support.pyspark_capabilities import FORMAT
from support.reported_offsets import check_report

from spark_kafka_sink import BatchReport, KafkaSink, ReportListener
from spark_kafka_sink.local import Admin

PARTITIONS = 3
START_S = 120


class Reports:
    """A listener of the session, and what it got."""

    def __init__(self, spark: SparkSession) -> None:
        self.got: list[BatchReport] = []
        self.listener = ReportListener(self.got.append)
        self._spark = spark
        spark.streams.addListener(self.listener)

    def delivered(self, count: int) -> list[BatchReport]:
        """Deliver what waits, and return all reports. Spark's thread may do it at the same time: it calls the listener
        for a query of an earlier test too, which has ended a moment ago.
        """
        deadline = time.monotonic() + START_S
        self.listener.deliver()
        while len(self.got) < count:
            assert time.monotonic() < deadline, f"{len(self.got)} of {count} reports"
            time.sleep(0.05)
        return self.got

    def close(self) -> None:
        self._spark.streams.removeListener(self.listener)
        self.listener.close()


@pytest.fixture
def reports(spark: SparkSession) -> Iterator[Reports]:
    made = Reports(spark)
    yield made
    made.close()


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Callable[..., DataFrame]:
    """`stream(3)`: a stream of three micro-batches; the values of number n begin with `n/`."""

    def make(batches: int) -> DataFrame:
        for number in range(batches):
            rows = spark.range(0, 100, 1, 3).selectExpr(f"concat('{number}/', id) AS value")
            rows.coalesce(1).write.mode("append").parquet(str(tmp_path / "rows" / f"{number}"))
        frame = spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1)
        return frame.parquet(str(tmp_path / "rows" / "*"))

    return make


def ended(query: StreamingQuery) -> StreamingQuery:
    assert query.awaitTermination(START_S)
    return query


def by_batch(kafka: Admin, topic: str, reported: list[BatchReport]) -> None:
    """Compare each report with the records that have the number of one file."""
    records = read_topic(kafka.bootstrap_servers, topic, PARTITIONS)
    by_file: dict[str, list[object]] = {}
    for record in records:
        by_file.setdefault(text_of(record).partition("/")[0], []).append(record)
    assert len(by_file) == len(reported)
    ordered = sorted(by_file.values(), key=lambda found: min(record.timestamp()[1] for record in found))  # type: ignore[attr-defined]
    for report, found in zip(reported, ordered, strict=True):
        check_report(report, topic, found)  # type: ignore[arg-type]


@FORMAT.needed
@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_listener_gets_the_report_of_each_micro_batch(
    kafka_broker: Admin,
    new_topic: Callable[..., str],
    stream: Callable[..., DataFrame],
    reports: Reports,
    tmp_path: Path,
    guarantee: str,
) -> None:
    topic = new_topic(PARTITIONS)
    writer = stream(3).writeStream.format("kafka_sink").queryName("orders into Kafka")
    options = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "delivery.guarantee": guarantee}
    options |= {"topic": topic, "checkpointLocation": str(tmp_path / "checkpoint")}
    query = ended(writer.options(**options).trigger(availableNow=True).start())
    reports.listener.deliver()
    assert [report.batch_id for report in reports.got] == [0, 1, 2]
    for report in reports.got:
        assert (report.query_id, report.run_id, report.query_name) == (query.id, query.runId, "orders into Kafka")
        assert (report.outcome, report.guarantee, report.records) == ("complete", guarantee, 100)
        assert report.tasks == 1
        assert report.ended_ms - report.began_ms == sum(report.durations_ms.values()) > 0
        assert list(report.durations_ms)[:2] == ["plan", "tasks"]
        assert ("decide" in report.durations_ms) is (guarantee == "exactly-once")
        assert 0 < sum(report.task_durations_ms.values()) < report.ended_ms - report.began_ms
    by_batch(kafka_broker, topic, reports.got)
    assert os.listdir(str(reports.listener._box)) == []


@FORMAT.needed
def test_listener_gets_the_report_of_a_batch_write(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], reports: Reports
) -> None:
    topic = new_topic(PARTITIONS)
    frame = spark.range(0, 100, 1, 2).selectExpr("CAST(id AS STRING) AS value")
    writer = frame.write.format("kafka_sink").mode("append").option("topic", topic)
    writer.option("kafka.bootstrap.servers", kafka_broker.bootstrap_servers).save()
    (report,) = reports.delivered(1)
    assert (report.query_id, report.batch_id, report.tasks, report.outcome) == (None, None, 2, "complete")
    check_report(report, topic, read_topic(kafka_broker.bootstrap_servers, topic, PARTITIONS))


@FORMAT.needed
def test_listener_gets_the_report_of_a_failed_batch(
    kafka_broker: Admin, topic: str, stream: Callable[..., DataFrame], reports: Reports, tmp_path: Path
) -> None:
    options = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": topic}
    options |= {"checkpointLocation": str(tmp_path / "checkpoint"), "kafka.max.request.size": "20"}
    query = stream(1).writeStream.format("kafka_sink").options(**options).start()
    with pytest.raises(Exception, match="RecordTooLargeError"):
        query.awaitTermination(START_S)
    reports.listener.deliver()
    ((batch_id, outcome, records),) = [(each.batch_id, each.outcome, each.records) for each in reports.got]
    assert (batch_id, outcome, records) == (0, "failed", 0)


def test_foreach_batch_reports_to_a_function(
    kafka_broker: Admin, new_topic: Callable[..., str], stream: Callable[..., DataFrame], tmp_path: Path
) -> None:
    topic = new_topic(PARTITIONS)
    got: list[BatchReport] = []
    sink = KafkaSink({"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": topic}, on_report=got.append)
    writer = stream(2).writeStream.foreachBatch(sink.write_batch)  # type: ignore[arg-type]
    writer = writer.queryName("by foreachBatch")
    query = ended(writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start())
    assert [report.batch_id for report in got] == [0, 1]
    for report in got:
        assert (report.query_id, report.run_id, report.query_name) == (query.id, query.runId, "by foreachBatch")
    by_batch(kafka_broker, topic, got)
