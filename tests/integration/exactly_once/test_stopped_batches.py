"""A user stops a query during a batch, and readers of the topic do not wait for its transactions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from support.exactly_once_streams import Stream, open_transactions, register_format, visible_values
from support.librdkafka import produce
from support.pyspark_capabilities import FORMAT

from spark_kafka_sink.local import Admin

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.readwriter import DataStreamWriter

LIMIT_S = 240.0
ATTEMPTS = 3
ROWS_A_BATCH = 5
PADDING = 400_000  # bytes a row: the sink joins its first Arrow batches up to 3.9 MB, Spark up to 64 KiB


def await_true(what: Callable[[], bool], text: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, text
        time.sleep(0.02)


def held(rows: DataFrame, folder: Path, tasks: int) -> DataFrame:
    """The `rows`; the first `tasks` tasks hold back all but their first 20 rows until the file `go` exists."""

    def hold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        is_held = context.partitionId() < tasks
        for number, batch in enumerate(batches):
            while is_held and number * ROWS_A_BATCH >= 20 and not (folder / "go").exists():
                time.sleep(0.02)
            yield batch

    return rows.mapInArrow(hold, rows.schema)


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Spark hands over rows before the task that makes them has ended."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    was = spark.conf.get(name)
    spark.conf.set(name, str(ROWS_A_BATCH))
    yield
    spark.conf.set(name, was)


@FORMAT.needed
@pytest.mark.parametrize("held_tasks", [2, 1], ids=["no task has finished", "one task has finished"])
def test_stop_during_a_batch_leaves_nothing_open(
    spark: SparkSession, servers: str, tmp_path: Path, small_batches: None, held_tasks: int
) -> None:
    """Bug: all readers of the topic waited until the open transactions of the stopped tasks timed out.

    In 2 or 3 of a hundred stops Spark's call of `abort` does not reach the sink, and then only the next start aborts.
    Spark interrupts the thread of a query that is stopped, which is the likely cause.
    """
    register_format(spark)
    left = []
    for attempt in range(ATTEMPTS):
        topic = f"stopped-{uuid.uuid4().hex[:8]}"
        Admin(servers).create_topic(topic, 3)
        left = stopped(spark, Stream(servers, topic, tmp_path / str(attempt), "format"), held_tasks)
        if not left:
            break
    assert left == []


def stopped(spark: SparkSession, stream: Stream, held_tasks: int) -> list[str]:
    """Stop a query in the middle of a batch, and return the transactions that are open then. Check that readers see
    each row once when it has run again, and rows of other producers at once if nothing is open.
    """
    stream.write_files(0, 2)  # one task for each file

    def writer_of(tasks: int) -> DataStreamWriter:
        rows = spark.readStream.schema("key STRING, value STRING").json(str(stream.source))
        padded = rows.selectExpr("key", "value", f"repeat('x', {PADDING}) AS padding")
        writer = held(padded, stream.folder, tasks).writeStream.format("kafka_sink").options(**stream.options)
        return writer.option("checkpointLocation", str(stream.checkpoint))

    def is_in_mid_batch() -> bool:
        tracker = spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        finished = [stage.numCompletedTasks for stage in stages if stage is not None]
        return finished == [2 - held_tasks] and len(open_transactions(stream.servers, stream.prefix)) == 2

    query = writer_of(held_tasks).start()
    try:
        await_true(lambda: is_in_mid_batch() or not query.isActive, "nothing is open")
        assert query.isActive, query.exception()
        query.stop()
        left = open_transactions(stream.servers, stream.prefix)
        produce(stream.servers, stream.topic, ["1000"] * 30)  # by another producer, into all partitions
        assert left or visible_values(stream.servers, stream.topic) == [1000] * 30
    finally:
        query.stop()
        (stream.folder / "go").touch()
    writer_of(0).trigger(availableNow=True).start().awaitTermination()
    assert visible_values(stream.servers, stream.topic) == [*range(2 * stream.rows), *[1000] * 30]
    assert open_transactions(stream.servers, stream.prefix) == []
    return left
