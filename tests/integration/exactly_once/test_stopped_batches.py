"""A user stops a query during a batch, and readers of the topic do not wait for its transactions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from support.exactly_once_streams import Stream, open_transactions, register_format, visible_values
from support.librdkafka import produce
from support.pyspark_capabilities import FORMAT

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.readwriter import DataStreamWriter

LIMIT_S = 240.0
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
    spark: SparkSession, servers: str, three_partitions: str, tmp_path: Path, small_batches: None, held_tasks: int
) -> None:
    """Bug: all readers of the topic waited until the open transactions of the stopped tasks timed out."""
    stream = Stream(servers, three_partitions, tmp_path, "format")
    stream.write_files(0, 2)  # one task for each file
    register_format(spark)

    def writer_of(tasks: int) -> DataStreamWriter:
        rows = spark.readStream.schema("key STRING, value STRING").json(str(stream.source))
        padded = rows.selectExpr("key", "value", f"repeat('x', {PADDING}) AS padding")
        writer = held(padded, tmp_path, tasks).writeStream.format("kafka_sink").options(**stream.options)
        return writer.option("checkpointLocation", str(stream.checkpoint))

    def is_in_mid_batch() -> bool:
        tracker = spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        finished = [stage.numCompletedTasks for stage in stages if stage is not None]
        return finished == [2 - held_tasks] and len(open_transactions(servers, stream.prefix)) == 2

    query = writer_of(held_tasks).start()
    try:
        await_true(lambda: is_in_mid_batch() or not query.isActive, "nothing is open")
        assert query.isActive, query.exception()
        query.stop()
        assert open_transactions(servers, stream.prefix) == []
        produce(servers, three_partitions, ["1000"] * 30)  # by another producer, into all partitions
        assert visible_values(servers, three_partitions) == [1000] * 30
    finally:
        query.stop()
        (tmp_path / "go").touch()
    writer_of(0).trigger(availableNow=True).start().awaitTermination()
    assert visible_values(servers, three_partitions) == [*range(2 * stream.rows), *[1000] * 30]
    assert open_transactions(servers, stream.prefix) == []
