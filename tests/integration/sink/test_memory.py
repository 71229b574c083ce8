"""A worker takes never more than buffer.memory and 150 MB: however many rows, however large the values, however slow
the broker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.sink.foreach import KafkaSink

LARGE, SMALL = (240, 900_000), (3_000_000, 100)
"""Rows, and bytes of a value."""
STALL_S = 6
REST_OF_A_WORKER = 150_000_000

Write = Callable[[KafkaSink, DataFrame], object]


def peak_bytes(_rows: Iterator[Row]) -> Iterator[int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    yield next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def by_rows(sink: KafkaSink, frame: DataFrame) -> None:
    frame.foreachPartition(sink.write_partition)


def by_columns(sink: KafkaSink, frame: DataFrame) -> None:
    sink.write(frame)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "values"),
    [
        pytest.param(by_rows, LARGE, id="rows-large"),
        pytest.param(by_columns, LARGE, id="columns-large"),
        pytest.param(by_columns, SMALL, id="columns-small"),
    ],
)
def test_a_stalled_broker_leaves_workers_within_buffer_memory_and_150_mb(
    spark: SparkSession,
    own_kafka: Callable[..., EmbeddedKafka],
    write: Write,
    values: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, value_bytes = values
    # Workers of another environment are other workers: what ran in these tests' before does not count.
    monkeypatch.setitem(spark.sparkContext.environment, "WORKERS_OF", str(uuid4()))
    kafka = own_kafka()
    kafka.create_topic("large", 4)
    sink = KafkaSink({"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": "large"})
    write(sink, spark.range(0, 8, 1, 2).selectExpr("CAST(id AS STRING) AS value"))
    (node_id,) = kafka.node_ids
    kafka.suspend_node(node_id)
    resume = threading.Timer(STALL_S, kafka.resume_node, [node_id])
    resume.start()
    try:
        value = f"rpad(CAST(id AS STRING), {value_bytes}, 'abcdefgh')"
        write(sink, spark.range(0, rows, 1, 2).selectExpr(f"{value} AS value"))
    finally:
        resume.join()
    peaks = spark.range(0, 2, 1, 2).rdd.mapPartitions(peak_bytes).collect()
    limit = ProducerConfig.from_mapping({"bootstrap.servers": "unused:1"}).buffer_memory + REST_OF_A_WORKER
    assert max(peaks) <= limit, f"workers peaked at {[round(peak / 1e6) for peak in peaks]} MB of {limit / 1e6:.0f}"
