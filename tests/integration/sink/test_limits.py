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


def rows_of(spark: SparkSession, rows: int) -> DataFrame:
    """Rows for two tasks. Their values have 100 bytes, so that all records are of about one size."""
    return spark.range(rows).selectExpr("format_string('%0100d', id) AS value").repartition(2)


def options_of(kafka: Admin, topic: str, **limit: int) -> dict[str, str]:
    (what, most), *_ = limit.items()
    servers = {"kafka.bootstrap.servers": kafka.bootstrap_servers}
    return {**servers, "topic": topic, f"write.max.{what}.per.second": str(most)}


def times_of(kafka: Admin, topic: str, rows: int) -> list[int]:
    """Return the times of the records in ms, ascending. Each row must be there once."""
    await_markers(kafka.bootstrap_servers)
    records = read_topic(kafka.bootstrap_servers, topic, 2)
    assert sorted(int(record.value() or b"-1") for record in records) == [*range(rows)]
    return sorted(record.timestamp()[1] for record in records)


def records_of_windows(times: list[int]) -> list[int]:
    """Return the number of records in each window of ten seconds that begins with a record and is over before the last
    one.
    """
    full = [begin for begin in times if begin + WINDOW_MS <= times[-1]]
    assert len(full) > RATE // 2
    return [bisect_left(times, begin + WINDOW_MS) - bisect_left(times, begin) for begin in full]


@pytest.mark.parametrize("write", [foreach_batch, pytest.param(format_of_a_stream, marks=FORMAT.needed)])
def test_any_ten_seconds_have_the_limit_of_records_within_five_percent(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, write: Write
) -> None:
    topic = new_topic(partitions=2)
    write(rows_of(spark, ROWS), options_of(kafka_broker, topic, records=RATE), tmp_path)
    windows = records_of_windows(times_of(kafka_broker, topic, ROWS))
    assert min(windows) >= 0.95 * RATE * 10
    assert max(windows) <= 1.05 * RATE * 10


def test_any_ten_seconds_have_the_limit_of_bytes_within_five_percent(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str]
) -> None:
    topic, limit = new_topic(partitions=2), 110 * RATE
    report = KafkaSink(options_of(kafka_broker, topic, bytes=limit)).write(rows_of(spark, ROWS))
    windows = records_of_windows(times_of(kafka_broker, topic, ROWS))
    size = report.bytes / report.records
    assert 100 < size < 120
    assert min(windows) * size >= 0.95 * limit * 10
    assert max(windows) * size <= 1.05 * limit * 10


@pytest.mark.parametrize("write", [foreach, foreach_partition])
def test_rows_one_by_one_keep_the_limit_too(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, write: Write
) -> None:
    topic, rows = new_topic(partitions=2), 5 * RATE
    write(rows_of(spark, rows), options_of(kafka_broker, topic, records=RATE), tmp_path)
    times = times_of(kafka_broker, topic, rows)
    # Tasks that do not share the limit need half of the time. A task may wait for its producer and for metadata after
    # its first permission: then its first record is late, and what follows comes closer.
    assert times[-1] - times[0] >= 5_000 - 250 - 2 * 100 - 1_000
