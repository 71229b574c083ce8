"""Writes whose tasks have almost nothing to do: fewer tasks, and the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.functions import array, col, concat, expr, lit, rand, udf
from pyspark.sql.types import StructType
from support.exactly_once_streams import await_markers
from support.librdkafka import read_topic
from support.pyspark_capabilities import FORMAT

from spark_kafka_sink.common.batch_report import BatchReport
from spark_kafka_sink.local import Admin
from spark_kafka_sink.sink import kafka_sink, small_tasks
from spark_kafka_sink.sink.kafka_sink import KafkaSink
from spark_kafka_sink.sink.small_tasks import (
    MOST_BYTES,
    RanTasks,
    SmallTasks,
    Source,
    may_follow_tasks,
    source_of,
    with_fewer_tasks,
)

PARTITIONS = 60
FEWER, ONE_EACH = 4, 2
"""Two for each slot of local[2], and one after a write with two."""

ONCE = {"delivery.guarantee": "exactly-once", "transactional.id.prefix": "small-tasks"}


class WithoutDurations(SmallTasks):
    """Learns as if fewer tasks were never slower: on a busy machine they are, by chance."""

    def learn(self, source: Source, ran: RanTasks) -> None:
        super().learn(source, ran._replace(duration_ms=0))


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And any task is small: on a busy machine, and when Spark has just started, each takes long."""
    monkeypatch.setattr(kafka_sink, "_small_tasks", WithoutDurations())
    monkeypatch.setattr(small_tasks, "SMALL_MS", 60_000)


@pytest.fixture(params=[{}, ONCE], ids=["at least once", "exactly once"])
def sink(request: pytest.FixtureRequest, kafka_broker: Admin, new_topic: Callable[..., str]) -> Any:
    """A sink, its reports, and a reader of its topic's values."""
    topic, reports = new_topic(partitions=2), list[BatchReport]()
    servers = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": topic}

    def values() -> list[bytes]:
        await_markers(kafka_broker.bootstrap_servers)
        return sorted(record.value() or b"" for record in read_topic(kafka_broker.bootstrap_servers, topic, 2))

    own = {name: value if name != "transactional.id.prefix" else topic for name, value in request.param.items()}
    return KafkaSink({**servers, **own}, on_report=reports.append), reports, values


def rows_of(spark: SparkSession, first: int, rows: int) -> DataFrame:
    return spark.range(first, first + rows, 1, PARTITIONS).selectExpr("CAST(id AS STRING) AS value")


def run_query(stream: DataFrame, write_batch: Callable[[DataFrame, int], object], folder: Path) -> None:
    """Write what is there now. The next call for this folder goes on where this one ended."""
    query = (
        stream.writeStream.outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .foreachBatch(write_batch)  # type: ignore[arg-type]
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_second_write_of_small_tasks_has_fewer_and_the_same_rows(spark: SparkSession, sink: Any) -> None:
    kafka_sink_of_topic, reports, values = sink
    for turn in range(5):
        kafka_sink_of_topic.write(rows_of(spark, turn * 300, 300))
    assert [report.tasks for report in reports] == [PARTITIONS, FEWER, ONE_EACH, 1, 1]
    assert values() == sorted(b"%d" % number for number in range(1_500))


def test_write_of_many_more_rows_is_followed_by_one_with_all_tasks(spark: SparkSession, sink: Any) -> None:
    kafka_sink_of_topic, reports, values = sink
    for rows in (100, 20_000, 20_000):
        kafka_sink_of_topic.write(rows_of(spark, 0, rows))
    assert [report.tasks for report in reports] == [PARTITIONS, FEWER, PARTITIONS]
    assert len(values()) == 40_100


def test_write_that_spark_takes_for_large_keeps_its_tasks(spark: SparkSession, sink: Any) -> None:
    kafka_sink_of_topic, reports, _ = sink
    kafka_sink_of_topic.write(rows_of(spark, 0, 100))
    many = spark.range(0, MOST_BYTES, 1, PARTITIONS)  # Spark expects eight bytes of each, and sees no filter's effect
    kafka_sink_of_topic.write(many.where("id % 10000019 = 0").selectExpr("CAST(id AS STRING) AS value"))
    assert FEWER < reports[1].tasks <= PARTITIONS
    unknown = spark.sparkContext.parallelize([("a",)] * 100, PARTITIONS).toDF("value STRING")
    kafka_sink_of_topic.write(rows_of(spark, 0, 100))
    kafka_sink_of_topic.write(unknown)
    assert reports[3].tasks == PARTITIONS


@pytest.mark.parametrize(
    ("change", "tasks"),
    [
        (lambda rows: rows.coalesce(1).select("value"), 1),
        (lambda rows: rows.withColumn("other", lit(1)).coalesce(1).select("value"), 1),
        (lambda rows: rows.select("value").coalesce(1).where("value <> ''"), 1),
        (lambda rows: rows.select("value").repartition(3), 3),
        (lambda rows: rows.select("value").coalesce(10), FEWER),
        (lambda rows: rows.select("value").repartition(10), FEWER),
        (lambda rows: rows.select("value").repartition(3).repartition(10), FEWER),
    ],
    ids=[
        *("coalesce", "then a column less", "then a filter", "repartition"),
        *("coalesce to more", "repartition to more", "repartition twice"),
    ],
)
def test_partitions_that_the_user_made_fewer_stay(
    spark: SparkSession, change: Callable[[DataFrame], DataFrame], tasks: int
) -> None:
    """Bug: Spark keeps only the last of two coalesce steps. Several tasks wrote `rows.coalesce(1)`, and the order of
    the rows was lost.
    """
    rows = change(rows_of(spark, 0, 100))
    assert with_fewer_tasks(rows, rows, Source("orders", None, slots=2), FEWER).rdd.getNumPartitions() == tasks


def test_write_that_fills_a_cache_keeps_its_tasks_in_spark_4_2(spark: SparkSession) -> None:
    """Bug: Spark 4.2 counts cached rows by the number of the task. After a write with fewer tasks, and lost blocks, a
    query on the cached rows found none of them.
    """
    rows = rows_of(spark, 0, 100).persist()
    try:
        records = rows.selectExpr("value", "value AS key")
        assert may_follow_tasks(records) == spark.version.startswith("4.2.")
        rows.count()
        assert not may_follow_tasks(records)
    finally:
        rows.unpersist()


def _users_functions() -> tuple[
    Callable[[object], str], Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
]:
    """Return functions that make ids as users do: unique as long as each partition has a task of its own. They are
    inside this one, so that Spark gives them to a worker by value. It cannot import this file.
    """

    def id_in_task(value: object) -> str:
        task = TaskContext.get()
        assert task is not None
        return f"{task.partitionId()}-{value}"

    def with_row_numbers(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pylist([{"value": id_in_task(number)} for number in range(batch.num_rows)])

    return id_in_task, with_row_numbers


id_in_task, with_row_numbers = _users_functions()


def by_scala(column: str) -> Column:
    """Return the column as text, by functions that Spark has in Scala."""
    return vector_to_array(array_to_vector(array(col(column).cast("double"))))[0].cast("string")


@pytest.mark.parametrize(
    ("change", "slots"),
    [
        (lambda rows: rows.select(udf(id_in_task, useArrow=False)(rand(7)).alias("value")), None),
        (lambda rows: rows.select(udf(id_in_task, useArrow=False)("id").alias("value")), None),
        (lambda rows: rows.mapInArrow(with_row_numbers, "value STRING"), None),
        (lambda rows: rows.select(by_scala("id").alias("value")), None),
        (lambda rows: rows.select(rand(7).cast("string").alias("value")), 2),
    ],
    ids=["function of random numbers", "function", "function of batches", "function in Scala", "random numbers"],
)
def test_values_by_the_number_of_a_task_keep_the_tasks(
    spark: SparkSession, tmp_path: Path, change: Callable[[DataFrame], DataFrame], slots: int | None
) -> None:
    """Bug: Spark computes arguments of a Python function by the number of the task. So all partitions of a task had the
    same random numbers, and the same ids of `monotonically_increasing_id()`.
    """
    spark.range(5).write.parquet(str(tmp_path / "rows"))
    rows = change(spark.read.parquet(str(tmp_path / "rows")))
    found = [source_of(rows, "orders").slots]
    stream = change(spark.readStream.schema("id LONG").parquet(str(tmp_path / "rows")))
    run_query(stream, lambda rows, _: found.append(source_of(rows, "orders").slots), tmp_path)
    assert found == [slots, slots]


def by_reflection(column: str) -> Column:
    return concat(expr("reflect('org.apache.spark.TaskContext', 'getPartitionId')"), lit("-"), col(column))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: rows.select(by_reflection("id").alias("value")), True),
        pytest.param(
            lambda rows: rows.where(expr("try_reflect('java.util.UUID', 'randomUUID') > 'a'")),
            True,
            marks=FORMAT.needed,
        ),
        (lambda rows: rows.selectExpr("to_json(struct(*)) AS value").distinct(), False),
        (lambda rows: rows.selectExpr("url_decode(CAST(id AS STRING)) AS value", "uuid() AS key"), False),
        (lambda rows: rows.selectExpr("try_divide(id, 2) AS value", '\'{"class":"Mine"}\' AS key'), False),
        (lambda rows: rows.groupBy((col("id") % 3).alias("id")).count(), False),
    ],
    ids=["reflect", "try_reflect", "structs", "functions of Spark", "a text that looks like a class", "groups"],
)
def test_functions_in_java_keep_the_tasks(
    spark: SparkSession, tmp_path: Path, change: Callable[[DataFrame], DataFrame], expected: bool
) -> None:
    spark.range(5).write.parquet(str(tmp_path / "rows"))
    found = [may_follow_tasks(change(spark.read.parquet(str(tmp_path / "rows"))))]

    def look(rows: DataFrame, _: int) -> None:
        found.append(may_follow_tasks(rows))
        rows.collect()  # else a query with state fails: its state was not stored

    run_query(change(spark.readStream.schema("id LONG").parquet(str(tmp_path / "rows"))), look, tmp_path)
    assert found == [expected, expected]


@FORMAT.needed
def test_source_in_python_keeps_the_tasks(spark: SparkSession, tmp_path: Path) -> None:
    """Bug: rows of a stream whose source made ids by `TaskContext.partitionId()` had equal ids in later batches."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition, SimpleDataSourceStreamReader

    class Reader(DataSourceReader):
        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            yield (1,)

    class StreamReader(SimpleDataSourceStreamReader):
        def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's
            return {"at": 0}

        def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[int]], dict[str, int]]:
            return iter([(1,)]), {"at": 1}

        def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[tuple[int]]:  # noqa: N802
            return iter([(1,)])

    class Counting(DataSource):
        @classmethod
        def name(cls) -> str:
            return "counting"

        def schema(self) -> str:
            return "id LONG"

        def reader(self, schema: StructType) -> DataSourceReader:
            return Reader()

        def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:  # noqa: N802
            return StreamReader()

    spark.dataSource.register(Counting)
    found = [may_follow_tasks(spark.read.format("counting").load())]
    stream = spark.readStream.format("counting").load()
    run_query(stream, lambda rows, _: found.append(may_follow_tasks(rows)), tmp_path)
    assert found == [True, True]


def test_ids_made_by_java_stay_unique(spark: SparkSession, sink: Any) -> None:
    """Bug: Spark has no pattern for `reflect` in a plan. After a write of small tasks it gave the same number of a task
    for several partitions, so that different rows got the same id; and a batch that came again had other rows.
    """
    sink_of_topic, reports, values = sink
    tasks = 3 * FEWER
    rows = spark.range(0, tasks, 1, tasks).select(lit("same").alias("id")).select(by_reflection("id").alias("value"))
    for _ in range(2):
        sink_of_topic.write(rows)
    assert values() == sorted([b"%d-same" % task for task in range(tasks)] * 2)
    assert [report.tasks for report in reports] == [tasks, tasks]


def test_ids_of_the_number_of_the_task_stay_unique(spark: SparkSession, sink: Any) -> None:
    """Bug: after a write of small tasks, a Python function had the same `TaskContext.partitionId()` for several
    partitions, so that different rows got the same id.
    """
    sink_of_topic, reports, values = sink
    tasks = 3 * FEWER
    rows = spark.range(0, 2 * tasks, 1, tasks).mapInArrow(with_row_numbers, "value STRING")
    for _ in range(2):
        sink_of_topic.write(rows)
    once = [f"{task}-{number}".encode() for task in range(tasks) for number in range(2)]
    assert values() == sorted(once * 2)
    assert [report.tasks for report in reports] == [tasks, tasks]


def test_stream_with_state_has_fewer_tasks_and_the_same_sums(spark: SparkSession, sink: Any, tmp_path: Path) -> None:
    """A task has the state of several partitions then. The query stops and starts in between."""
    kafka_sink_of_topic, reports, values = sink
    spark.conf.set("spark.sql.shuffle.partitions", "20")
    try:
        for start in range(2):
            for file in range(2 + start):
                rows = spark.range(start * 2 + file + 1).selectExpr("id", "id % 7 AS customer")
                rows.repartition(1).write.mode("append").parquet(str(tmp_path / "rows"))
            stream = spark.readStream.schema("id LONG, customer LONG").option("maxFilesPerTrigger", 1)
            sums = stream.parquet(str(tmp_path / "rows")).groupBy("customer").count()
            counts = sums.selectExpr("concat_ws(':', customer, count) AS value")
            run_query(counts, kafka_sink_of_topic.write_batch, tmp_path)
    finally:
        spark.conf.unset("spark.sql.shuffle.partitions")
    assert [report.tasks for report in reports] == [20, FEWER, ONE_EACH, ONE_EACH, ONE_EACH]
    assert [report.batch_id for report in reports] == [*range(5)]
    # batch n has the customers 0 to n, each for the (n - customer + 1)th time
    assert values() == sorted(b"%d:%d" % (each, batch - each + 1) for batch in range(5) for each in range(batch + 1))


def test_stream_without_state_gets_a_single_task(spark: SparkSession, sink: Any, tmp_path: Path) -> None:
    kafka_sink_of_topic, reports, values = sink
    for file in range(5):
        rows_of(spark, file * 100, 100).coalesce(1).write.mode("append").parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "rows"))
    run_query(stream.repartition(20), kafka_sink_of_topic.write_batch, tmp_path)
    assert [report.tasks for report in reports] == [20, FEWER, ONE_EACH, 1, 1]
    assert values() == sorted(b"%d" % number for number in range(500))


def test_stream_with_state_in_rocksdb_keeps_its_tasks(spark: SparkSession, sink: Any, tmp_path: Path) -> None:
    """Bug: the second batch failed, because Spark's RocksDB store takes the state of one partition in a task."""
    kafka_sink_of_topic, reports, values = sink
    store = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    settings = {"spark.sql.shuffle.partitions": "6", "spark.sql.streaming.stateStore.providerClass": store}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        for file in range(2):
            rows = spark.range(file * 10, file * 10 + 20).selectExpr("id", "id AS customer")
            rows.repartition(1).write.mode("append").parquet(str(tmp_path / "rows"))
        stream = spark.readStream.schema("id LONG, customer LONG").option("maxFilesPerTrigger", 1)
        first = stream.parquet(str(tmp_path / "rows")).dropDuplicates(["customer"]).groupBy("customer").count()
        run_query(first.selectExpr("CAST(customer AS STRING) AS value"), kafka_sink_of_topic.write_batch, tmp_path)
    finally:
        for name in settings:
            spark.conf.unset(name)
    assert [report.tasks for report in reports] == [6, 6]
    assert values() == sorted(b"%d" % customer for customer in range(30))
