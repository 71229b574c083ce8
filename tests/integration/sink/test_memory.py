"""A worker never needs more than buffer.memory and 150 MB, for any number of rows, any size of values, and any slow
broker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.spark_workers import python_workers

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.sink.kafka_sink import KafkaSink

LARGE, SMALL = (240, 900_000), (3_000_000, 100)
"""The number of rows, and the bytes of a value."""
STALL_S = 6
REST_OF_A_WORKER = 150_000_000
WORKERS_OF = "WORKERS_OF"

Write = Callable[[KafkaSink, DataFrame], object]


def peak_bytes(workers_of: str) -> list[int]:
    """The peak memory of the workers with this variable in their environment, measured from outside. Spark uses
    different workers for functions of rows and for functions of Arrow batches, and a task of this test would run in new
    ones.
    """
    workers = [each for each in python_workers(os.getpid()) if each.environ().get(WORKERS_OF) == workers_of]
    texts = [Path(f"/proc/{each.pid}/status").read_text() for each in workers]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("VmHWM:")]
    return [int(line.split()[1]) * 1024 for line in lines]


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
def test_workers_of_a_stalled_broker_keep_within_their_memory(
    spark: SparkSession,
    own_kafka: Callable[..., EmbeddedKafka],
    write: Write,
    values: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, value_bytes = values
    # A different environment means different workers, so earlier tests do not count.
    workers_of = str(uuid4())
    monkeypatch.setitem(spark.sparkContext.environment, WORKERS_OF, workers_of)
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
    peaks = peak_bytes(workers_of)
    assert peaks
    limit = ProducerConfig.from_mapping({"bootstrap.servers": "unused:1"}).buffer_memory + REST_OF_A_WORKER
    assert max(peaks) <= limit, f"workers peaked at {[round(peak / 1e6) for peak in peaks]} MB of {limit / 1e6:.0f}"
