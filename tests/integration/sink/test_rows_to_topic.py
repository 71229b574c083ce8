"""A DataFrame is written by rows and by columns, and a real broker returns the same records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from support.topic_frames import topic_frame

from spark_kafka_sink.local import Admin, EmbeddedKafka
from spark_kafka_sink.sink import kafka_sink as kafka_sink_module
from spark_kafka_sink.sink.arrow_batches import LastWrite, batch_limits
from spark_kafka_sink.sink.kafka_sink import KafkaSink
from spark_kafka_sink.sink.producer_pool import process_pool

Write = Callable[[DataFrame, KafkaSink], None]


@pytest.fixture(params=["foreach", "foreachPartition", "foreachBatch", "write", "write_batch"])
def write(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Write:
    """Each way to hand rows to the sink."""

    def as_stream(frame: DataFrame, sink: KafkaSink) -> None:
        frame.write.parquet(str(tmp_path / "rows"))
        stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "rows")).writeStream
        if request.param == "foreach":
            stream = stream.foreach(sink)
        elif request.param == "write_batch":
            stream = stream.foreachBatch(sink.write_batch)  # type: ignore[arg-type]
        else:
            stream = stream.foreachBatch(lambda batch, _: batch.foreachPartition(sink.write_partition))
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        stream.trigger(availableNow=True).start().awaitTermination()

    def as_batch(frame: DataFrame, sink: KafkaSink) -> None:
        frame.foreachPartition(sink.write_partition)

    def as_columns(frame: DataFrame, sink: KafkaSink) -> None:
        assert sink.write(frame).records == frame.count()

    return {"foreachPartition": as_batch, "write": as_columns}.get(request.param, as_stream)


def sink_of(kafka: Admin | EmbeddedKafka, **options: str) -> KafkaSink:
    return KafkaSink({"kafka.bootstrap.servers": kafka.bootstrap_servers}, **options)


def rows_with_every_column(spark: SparkSession, topic: str) -> DataFrame:
    return spark.range(5_000).selectExpr(
        "if(id % 7 = 0, null, encode(concat('key-', id % 50), 'utf-8')) AS key",
        "if(id % 11 = 0, null, encode(concat('värde ', id), 'utf-8')) AS value",
        f"'{topic}' AS topic",
        "CAST(id % 4 AS INT) AS partition",
        "CASE id % 3 WHEN 0 THEN null WHEN 1 THEN array()"
        " ELSE array(named_struct('key', 'n', 'value', encode(CAST(id AS STRING), 'utf-8')),"
        " named_struct('key', 'ü', 'value', CAST(null AS BINARY))) END AS headers",
        "timestamp_millis(1356998400000 + id * 7919) AS timestamp",
        "id AS ignored",
    )


def test_every_column_arrives_unchanged(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], write: Write
) -> None:
    topic = new_topic(partitions=4)
    frame = rows_with_every_column(spark, topic)
    write(frame, sink_of(kafka_broker))
    columns = ("key", "value", "topic", "partition", "headers", "timestamp_ms")
    sent = frame.withColumns(
        {
            "timestamp_ms": F.unix_millis("timestamp"),
            "headers": F.coalesce(
                "headers",
                F.expr("filter(headers, h -> false)"),
                F.array().cast("array<struct<key:string,value:binary>>"),
            ),
        }
    ).select(*columns)
    got = topic_frame(spark, kafka_broker.bootstrap_servers, topic, *columns)
    assert_df_equality(sent, got, ignore_row_order=True, ignore_nullable=True)


def test_strings_arrive_as_utf8_with_the_current_time(
    spark: SparkSession, kafka_broker: Admin, topic: str, write: Write
) -> None:
    before = time.time_ns() // 1_000_000
    frame = spark.range(500).selectExpr("concat('ключ', id) AS key", "concat('значение', id) AS value")
    write(frame, sink_of(kafka_broker, topic=topic))
    got = topic_frame(spark, kafka_broker.bootstrap_servers, topic)
    text = got.select(F.decode("key", "utf-8").alias("key"), F.decode("value", "utf-8").alias("value"))
    assert_df_equality(frame, text, ignore_row_order=True, ignore_nullable=True)
    earliest, latest = got.agg(F.min("timestamp_ms"), F.max("timestamp_ms")).first()
    assert before <= earliest <= latest <= time.time_ns() // 1_000_000


@pytest.mark.parametrize("kind", ["TIMESTAMP_LTZ", "TIMESTAMP_NTZ"])
def test_write_accepts_timestamps_if_the_session_type_has_no_zone(
    spark: SparkSession, kafka_broker: Admin, topic: str, kind: str
) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    session.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    frame = session.sql(f"SELECT 'v' AS value, {kind} '2026-01-01 09:00:00' AS timestamp")
    assert sink_of(kafka_broker, topic=topic).write(frame).records == 1
    assert topic_frame(spark, kafka_broker.bootstrap_servers, topic).first().timestamp_ms == 1_767_225_600_000


def test_each_row_goes_to_the_topic_that_it_names(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], write: Write
) -> None:
    topics = [new_topic(partitions=n) for n in (1, 2, 3)]
    names = ", ".join(f"'{topic}'" for topic in topics)
    frame = spark.range(3_000).selectExpr(
        "encode(CAST(id AS STRING), 'utf-8') AS value", f"element_at(array({names}), CAST(id % 3 + 1 AS INT)) AS topic"
    )
    write(frame, sink_of(kafka_broker))
    for topic in topics:
        got = topic_frame(spark, kafka_broker.bootstrap_servers, topic, "value", "topic")
        assert_df_equality(frame.where(F.col("topic") == topic), got, ignore_row_order=True, ignore_nullable=True)


def test_the_topic_option_wins_over_the_column(spark: SparkSession, kafka_broker: Admin, topic: str) -> None:
    frame = spark.range(10).selectExpr("CAST(id AS STRING) AS value", "'missing-topic' AS topic")
    frame.foreachPartition(sink_of(kafka_broker, topic=topic).write_partition)
    assert topic_frame(spark, kafka_broker.bootstrap_servers, topic).count() == 10


def test_rows_of_one_key_stay_in_order_on_one_partition(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=4)
    frame = spark.range(0, 30_000, 1, 1).selectExpr("CAST(id % 97 AS STRING) AS key", "CAST(id AS STRING) AS value")
    frame.foreachPartition(sink_of(kafka_broker, topic=topic).write_partition)
    seen: dict[bytes, tuple[int, int]] = {}
    for row in topic_frame(spark, kafka_broker.bootstrap_servers, topic).orderBy("partition", "offset").collect():
        partition, last = seen.get(bytes(row.key), (row.partition, -1))
        assert row.partition == partition
        assert int(row.value) > last
        seen[bytes(row.key)] = (partition, int(row.value))
    assert len(seen) == 97


@pytest.mark.parametrize("acks", ["0", "1"])
def test_weaker_acks_are_accepted(spark: SparkSession, kafka_broker: Admin, topic: str, acks: str) -> None:
    sink = sink_of(kafka_broker, topic=topic, **{"kafka.acks": acks})
    spark.range(1_000).selectExpr("CAST(id AS STRING) AS value").foreachPartition(sink.write_partition)
    deadline = time.monotonic() + 20  # with acks=0 there is no response, so rows may arrive after the task's end
    while topic_frame(spark, kafka_broker.bootstrap_servers, topic, "value").distinct().count() < 1_000:
        assert time.monotonic() < deadline


def test_large_and_small_values_mixed_arrive(spark: SparkSession, kafka_broker: Admin, topic: str) -> None:
    frame = spark.range(60).selectExpr(
        "CAST(id AS STRING) AS key", "encode(repeat('x', if(id % 2 = 0, 900000, 10)), 'utf-8') AS value"
    )
    frame.foreachPartition(sink_of(kafka_broker, topic=topic).write_partition)
    sizes = topic_frame(spark, kafka_broker.bootstrap_servers, topic).groupBy(F.length("value").alias("size")).count()
    assert {(row["size"], row["count"]) for row in sizes.collect()} == {(900_000, 30), (10, 30)}


def test_consecutive_tasks_of_a_worker_share_one_producer(spark: SparkSession, kafka_broker: Admin, topic: str) -> None:
    sink = sink_of(kafka_broker, topic=topic)

    def task(rows: Iterator[Row]) -> Iterator[tuple[int, int]]:
        sink.write_partition(rows)
        for entry in process_pool()._ready.values():
            if entry.producer.config.client_id == "shared":  # type: ignore[attr-defined]
                yield os.getpid(), id(entry.producer)

    sink = sink_of(kafka_broker, topic=topic, **{"kafka.client.id": "shared"})
    frame = spark.range(0, 1_000, 1, 10).selectExpr("CAST(id AS STRING) AS value")
    found = frame.rdd.mapPartitions(task).collect() + frame.rdd.mapPartitions(task).collect()  # type: ignore[arg-type]
    assert len(found) == 20
    workers = {process_id for process_id, _ in found}
    assert len(set(found)) == len(workers) <= 2


def test_writes_continue_after_a_killed_worker(spark: SparkSession, kafka_broker: Admin, topic: str) -> None:
    sink = sink_of(kafka_broker, topic=topic)

    def killed(rows: Iterator[Row]) -> None:
        def source() -> Iterator[Row]:
            for number, row in enumerate(rows):
                if number == 15_000:
                    os.kill(os.getpid(), 9)
                yield row

        sink.write_partition(source())

    frame = spark.range(0, 20_000, 1, 1).selectExpr("CAST(id AS STRING) AS value")
    with pytest.raises(Exception, match="Python worker exited unexpectedly"):
        frame.foreachPartition(killed)
    frame.foreachPartition(sink.write_partition)
    got = topic_frame(spark, kafka_broker.bootstrap_servers, topic, "value")
    assert got.distinct().count() == 20_000


def test_batch_size_follows_sizes_of_last_write(
    spark: SparkSession, kafka_broker: Admin, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[LastWrite | None] = []

    @contextmanager
    def limits(frame: DataFrame, last: LastWrite | None, formatted: Collection[str]) -> Iterator[DataFrame]:
        known.append(last)
        with batch_limits(frame, last, formatted) as given:
            yield given

    monkeypatch.setattr(kafka_sink_module, "batch_limits", limits)
    small = spark.range(101_000).selectExpr("rpad(CAST(id AS STRING), 100, 'x') AS value")
    large = spark.range(50).selectExpr("rpad(CAST(id AS STRING), 9000, 'x') AS value")
    for frame in (small, small.where("1 = 0"), small, large, small):
        sink_of(kafka_broker, topic=topic).write(frame)  # a new sink each time, as in a function for foreachBatch
    assert known[0] is None
    assert known[1] == known[2]  # the bytes of record offsets depend on their batches
    means = [(last.records, last.bytes / last.records) for last in known if last is not None]
    assert [records for records, _ in means] == [101_000, 101_000, 101_000, 50]
    assert all(100 < mean < 120 for _, mean in means[:-1])
    assert 9_000 < means[-1][1] < 9_100
    assert topic_frame(spark, kafka_broker.bootstrap_servers, topic).count() == 303_050
