"""The limits of a query on a real broker: the tasks of Spark share one, whatever interface they write by.

The time of a record is that of its append by the producer, so the topic itself shows the rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.exactly_once_streams import await_markers
from support.librdkafka import read_topic
from support.pyspark_capabilities import FORMAT

from spark_kafka_sink.local import Admin
from spark_kafka_sink.sink.kafka_sink import KafkaSink

RATE: Final = 200
ROWS: Final = 2_400
WINDOW_MS: Final = 10_000

Write = Callable[[DataFrame, dict[str, str], Path], None]


def by_stream(frame: DataFrame, folder: Path) -> Any:
    """Return the writer of a stream of the rows: one micro-batch of two tasks."""
    frame.write.parquet(str(folder / "rows"))
    reader = frame.sparkSession.readStream.schema(frame.schema)
    stream = reader.parquet(str(folder / "rows")).repartition(2).writeStream
    return stream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)


def foreach_batch(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    by_stream(frame, folder).foreachBatch(KafkaSink(options).write_batch).start().awaitTermination()


def format_of_a_stream(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    options = {**options, "delivery.guarantee": "exactly-once"}
    by_stream(frame, folder).format("kafka_sink").options(**options).start().awaitTermination()


def foreach(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    by_stream(frame, folder).foreach(KafkaSink(options)).start().awaitTermination()


def foreach_partition(frame: DataFrame, options: dict[str, str], folder: Path) -> None:
    frame.foreachPartition(KafkaSink(options).write_partition)


def times_of(spark: SparkSession, kafka: Admin, topic: str, write: Write, rows: int, folder: Path) -> list[int]:
    """Write `rows` rows by two tasks, and return the times of their records, in ms."""
    frame = spark.range(rows).selectExpr("CAST(id AS STRING) AS value").repartition(2)
    options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": topic}
    write(frame, {**options, "write.max.records.per.second": str(RATE)}, folder)
    await_markers(kafka.bootstrap_servers)
    records = read_topic(kafka.bootstrap_servers, topic, 2)
    assert sorted(int(record.value() or b"-1") for record in records) == [*range(rows)]
    return sorted(record.timestamp()[1] for record in records)


@pytest.mark.parametrize("write", [foreach_batch, pytest.param(format_of_a_stream, marks=FORMAT.needed)])
def test_any_ten_seconds_have_the_limit_within_five_percent(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, write: Write
) -> None:
    times = times_of(spark, kafka_broker, new_topic(partitions=2), write, ROWS, tmp_path)
    full = [begin for begin in times if begin + WINDOW_MS <= times[-1]]
    windows = [bisect_left(times, begin + WINDOW_MS) - bisect_left(times, begin) for begin in full]
    assert len(windows) > RATE // 2
    assert min(windows) >= 0.95 * RATE * 10
    assert max(windows) <= 1.05 * RATE * 10


@pytest.mark.parametrize("write", [foreach, foreach_partition])
def test_rows_one_by_one_keep_the_limit_too(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, write: Write
) -> None:
    times = times_of(spark, kafka_broker, new_topic(partitions=2), write, 2 * RATE, tmp_path)
    assert times[-1] - times[0] >= 2_000 - 250 - 2 * 100
