"""Undeliverable rows fail the task within its limit, with an error that names the object and the setting to change."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from support.pyspark_capabilities import FAILURES
from support.topic_frames import topic_frame

from spark_kafka_sink.local import Admin, EmbeddedKafka
from spark_kafka_sink.sink.kafka_sink import KafkaSink


def sink_of(bootstrap_servers: str, **options: str) -> KafkaSink:
    return KafkaSink({"kafka.bootstrap.servers": bootstrap_servers}, **options)


def numbers(spark: SparkSession, *more: str, count: int = 100) -> DataFrame:
    return spark.range(count).selectExpr("CAST(id AS STRING) AS value", *more)


def failure_of(frame: DataFrame, sink: KafkaSink) -> str:
    """The last line of the task's Python traceback."""
    with pytest.raises(FAILURES) as caught:
        frame.foreachPartition(sink.write_partition)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("spark_kafka_sink.")]
    assert lines, str(caught.value)
    return lines[-1].removeprefix("spark_kafka_sink.common.errors.")


def test_a_value_over_max_request_size_is_refused(spark: SparkSession, kafka_broker: Admin, topic: str) -> None:
    frame = spark.range(1).selectExpr("repeat('x', 2000000) AS value")
    text = failure_of(frame, sink_of(kafka_broker.bootstrap_servers, topic=topic))
    assert text.startswith("RecordTooLargeError: ")
    assert topic in text
    assert "max.request.size=1048576: raise max.request.size" in text


def test_too_large_value_fails_the_task(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(config={"max.message.bytes": 5_000})
    frame = spark.range(10).selectExpr("repeat('x', 6000) AS value")
    text = failure_of(frame, sink_of(kafka_broker.bootstrap_servers, topic=topic))
    assert text.startswith("RecordTooLargeError: ")
    assert f"{topic}-0" in text
    assert "max.message.bytes" in text


def test_bad_row_fails_only_its_own_task(spark: SparkSession, kafka_broker: Admin, topic: str) -> None:
    sink = sink_of(kafka_broker.bootstrap_servers, topic=topic)
    frame = spark.range(20_000).selectExpr("if(id = 15000, repeat('x', 2000000), CAST(id AS STRING)) AS value")
    assert failure_of(frame, sink).startswith("RecordTooLargeError: ")
    numbers(spark).foreachPartition(sink.write_partition)
    got = topic_frame(spark, kafka_broker.bootstrap_servers, topic, "value")
    assert got.where("CAST(CAST(value AS STRING) AS INT) < 100").distinct().count() == 100


def test_missing_topic_fails_within_max_block_ms(spark: SparkSession, own_kafka: Callable[..., EmbeddedKafka]) -> None:
    kafka = own_kafka(properties={"auto.create.topics.enable": "false"})
    sink = sink_of(kafka.bootstrap_servers, topic="missing-topic", **{"kafka.max.block.ms": "1500"})
    started = time.monotonic()
    text = failure_of(numbers(spark), sink)
    assert time.monotonic() - started < 30  # the default of max.block.ms is 60 s
    assert text.startswith("KafkaTimeoutError: Topic missing-topic is not in the metadata within max.block.ms=1500")
    assert "create it" in text


def test_a_wrong_address_fails_within_max_block_ms(spark: SparkSession) -> None:
    sink = sink_of("127.0.0.1:1", topic="orders", **{"kafka.max.block.ms": "1500"})
    started = time.monotonic()
    text = failure_of(numbers(spark), sink)
    assert time.monotonic() - started < 30  # the default of max.block.ms is 60 s
    assert text.startswith("KafkaTimeoutError: ")
    assert "bootstrap.servers=127.0.0.1:1" in text


def test_a_host_name_that_does_not_exist_is_named(spark: SparkSession) -> None:
    text = failure_of(numbers(spark), sink_of("no-such-host.invalid:9092", topic="orders"))
    assert "no-such-host.invalid" in text


def test_a_partition_that_the_topic_lacks_is_named(spark: SparkSession, kafka_broker: Admin, topic: str) -> None:
    sink = sink_of(kafka_broker.bootstrap_servers, topic=topic, **{"kafka.max.block.ms": "1000"})
    text = failure_of(numbers(spark, "7 AS partition"), sink)
    assert f"Partition 7 of topic {topic} with 1 partitions" in text


@pytest.mark.parametrize(
    ("columns", "options", "text"),
    [
        (["'k' AS key"], {"topic": "orders"}, "SchemaError: Required attribute 'value' not found"),
        (["'v' AS value"], {}, "SchemaError: topic option required when no 'topic' attribute is present"),
        (["'v' AS value", "CAST(null AS STRING) AS topic"], {}, "SchemaError: [KAFKA_NULL_TOPIC_IN_DATA]"),
        (["id AS value"], {"topic": "orders"}, "SchemaError: value attribute unsupported type int. value must be"),
        (["'v' AS value", "'no topic at all' AS topic"], {}, "InvalidTopicError: "),
    ],
)
def test_rows_that_cannot_be_records_are_refused(
    spark: SparkSession, kafka_broker: Admin, columns: list[str], options: dict[str, str], text: str
) -> None:
    sink = sink_of(kafka_broker.bootstrap_servers, **options)
    assert failure_of(spark.range(1).selectExpr(*columns), sink).startswith(text)


def test_an_error_upstream_is_the_one_that_fails_the_task(spark: SparkSession, kafka_broker: Admin, topic: str) -> None:
    sink = sink_of(kafka_broker.bootstrap_servers, topic=topic)

    def task(rows: Iterator[Row]) -> None:
        def broken() -> Iterator[Row]:
            yield from rows
            raise ZeroDivisionError("upstream broke")

        sink.write_partition(broken())

    with pytest.raises(FAILURES, match="ZeroDivisionError: upstream broke"):
        numbers(spark).foreachPartition(task)


def test_a_failed_delivery_fails_the_streaming_query(
    spark: SparkSession, kafka_broker: Admin, topic: str, tmp_path: Path
) -> None:
    numbers(spark, "if(id = 60, repeat('x', 2000000), 'k') AS key").write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema("value STRING, key STRING").parquet(str(tmp_path / "rows")).writeStream
    query = (
        stream.foreach(sink_of(kafka_broker.bootstrap_servers, topic=topic))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match=r"spark_kafka_sink\.common\.errors\.RecordTooLargeError"):
        query.awaitTermination()


@pytest.mark.parametrize("interface", ["foreach", pytest.param("foreachPartition", marks=pytest.mark.slow)])
def test_broker_restart_during_a_stream_loses_no_row(
    spark: SparkSession, own_kafka: Callable[..., EmbeddedKafka], tmp_path: Path, interface: str
) -> None:
    kafka = own_kafka()
    kafka.create_topic("orders", partitions=4)
    spark.range(0, 30_000, 1, 30).selectExpr(
        "CAST(id % 50 AS STRING) AS key", "CAST(id AS STRING) AS value"
    ).write.json(str(tmp_path / "rows"))
    source = spark.readStream.schema("key STRING, value STRING").option("maxFilesPerTrigger", 1)
    stream = source.json(str(tmp_path / "rows")).writeStream
    sink = sink_of(kafka.bootstrap_servers, topic="orders")
    if interface == "foreach":
        stream = stream.foreach(sink)
    else:
        stream = stream.foreachBatch(lambda batch, _: batch.foreachPartition(sink.write_partition))
    query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    while (query.lastProgress or {"batchId": 0})["batchId"] < 2:
        assert query.isActive, query.exception()
        time.sleep(0.02)

    kafka.suspend_node(1)  # records sent now have no response when the broker dies
    time.sleep(1)
    kafka.kill_node(1)
    time.sleep(5)
    assert query.isActive, query.exception()
    done_while_down = query.lastProgress["batchId"]
    kafka.start_node(1)
    assert query.awaitTermination(60)
    assert done_while_down < 28

    got = topic_frame(spark, kafka.bootstrap_servers, "orders", "partition", "offset", "key", "value")
    assert got.count() == got.select("value").distinct().count() == 30_000


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda sink: sink, "'KafkaSink' object is not callable"),
        (lambda sink: sink.write, "KafkaSink.write() takes 2 positional arguments but 3 were given"),
    ],
    ids=["sink", "write"],
)
def test_wrong_method_for_foreach_batch_fails_as_the_page_says(
    spark: SparkSession, tmp_path: Path, given: Callable[[KafkaSink], Any], text: str
) -> None:
    """docs/troubleshooting.md has these texts of Python, which this package cannot change: a sink that is callable
    would be a function of one row for `foreach(sink)`.
    """
    numbers(spark, count=1).write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema("value STRING").parquet(str(tmp_path / "rows")).writeStream
    query = stream.foreachBatch(given(sink_of("127.0.0.1:1", topic="orders"))).trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match=re.escape(text)):
        query.awaitTermination()
