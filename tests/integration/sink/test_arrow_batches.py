"""The size of Spark's Arrow batches under `KafkaSink.write`, the limits that set it, and padding, which changes no
record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import udtf
from support.pyspark_capabilities import BYTE_LIMIT

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.sink.arrow_batches import (
    BYTES,
    IS_RECORD,
    RECORDS,
    LastWrite,
    PaddedRows,
    batch_limits,
    padded,
    without_padding,
)
from spark_kafka_sink.sink.schema import by_position, projection

MIB = 1 << 20


class TableInPython:
    def eval(self, number: int) -> Iterator[tuple[str]]:
        yield (str(number),)


def large_write(mean_bytes: float) -> LastWrite:
    return LastWrite(1_000_000, int(mean_bytes * 1_000_000))


def batches(
    df: DataFrame, last: LastWrite | None = None, formatted: tuple[str, ...] = ()
) -> list[tuple[int, int, int]]:
    """The rows, records and bytes of each Arrow batch of `df` in a task."""
    with batch_limits(df, last, formatted) as limited:
        return measured(limited)


def measured(limited: DataFrame) -> list[tuple[int, int, int]]:
    def measure(given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in given:
            records = without_padding(batch).num_rows
            yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows], "records": [records], "bytes": [batch.nbytes]})

    return [tuple(row) for row in limited.mapInArrow(measure, "rows BIGINT, records BIGINT, bytes BIGINT").collect()]


def values(spark: SparkSession, rows: int, value: str) -> DataFrame:
    return spark.range(0, rows, 1, 1).selectExpr(f"{value} AS value")


@pytest.mark.parametrize(
    ("rows", "value", "most_batches", "has_padding"),
    [
        (30_000, "rpad(cast(id AS STRING), 100, 'x')", 5, False),
        (20_000, "rpad(cast(id AS STRING), 511, 'x')", 3, False),
        (20_000, "rpad(cast(id AS STRING), 512, 'x')", 6, True),
        (20_000, "rpad(cast(id AS STRING), 1000, 'x')", 7, True),
        (40, "rpad(cast(id AS STRING), 900000, 'x')", 11, True),
        (9_000, "if(id % 500 = 0, rpad(cast(id AS STRING), 900000, 'x'), cast(id AS STRING))", 8, True),
    ],
)
@pytest.mark.parametrize("columns", [["value"], ["value", "CAST(NULL AS array<string>) AS headers"]])
def test_batch_holds_four_megabytes_and_one_row(
    spark: SparkSession, rows: int, value: str, most_batches: int, has_padding: bool, columns: list[str]
) -> None:
    found = batches(values(spark, rows, value).selectExpr(*columns))
    assert any(size != records for size, records, _ in found) == has_padding
    assert sum(records for _, records, _ in found) == rows
    assert len([records for _, records, _ in found if records]) <= most_batches
    assert max(size for _, _, size in found) <= 4 * MIB + 900_000


@pytest.mark.parametrize("mean_bytes", [1, 119, 400, 2_000, 900_000])
@pytest.mark.parametrize(
    ("rows", "value"),
    [
        (40_000, "cast(id AS STRING)"),
        (40_000, "rpad(cast(id AS STRING), 118, 'x')"),
        (20_000, "rpad(cast(id AS STRING), 499, 'x')"),
        (20, "rpad(cast(id AS STRING), 900000, 'x')"),
        (9_000, "if(id % 500 = 0, rpad(cast(id AS STRING), 900000, 'x'), cast(id AS STRING))"),
    ],
)
def test_a_wrong_guess_of_the_records_size_changes_no_limit(
    spark: SparkSession, mean_bytes: float, rows: int, value: str
) -> None:
    found = batches(values(spark, rows, value), large_write(mean_bytes))
    assert sum(records for _, records, _ in found) == rows
    assert max(size for _, _, size in found) <= 4 * MIB + 900_000


HEADERS = "array(named_struct('key', 'h', 'value', CAST('v' AS BINARY))) AS headers"


@pytest.mark.parametrize(
    ("size", "counts", "columns"),
    [(100, [22_543, 22_543, 14_914], ["value"]), (1_000, [2_765] * 21 + [1_935], ["value", HEADERS])],
)
def test_records_of_known_size_need_no_padding(
    spark: SparkSession, size: int, counts: list[int], columns: list[str]
) -> None:
    frame = values(spark, 60_000, f"rpad(cast(id AS STRING), {size}, 'x')").selectExpr(*columns)
    with batch_limits(frame, large_write(1.1 * size)):
        assert spark.sparkContext.getLocalProperty(BYTES) == str(2**31 - 1)
    assert [rows for rows, records, _ in batches(frame, large_write(1.1 * size)) if rows == records] == counts


@BYTE_LIMIT.needed
@pytest.mark.parametrize("size", [300, 1_000, 900_000])
def test_after_a_write_of_large_records_spark_measures_its_buffers(spark: SparkSession, size: int) -> None:
    frame = values(spark, 9_000_000 // size, f"rpad(cast(id AS STRING), {size}, 'x')")
    with batch_limits(frame, large_write(size)) as limited:
        assert limited is frame
    found = batches(frame, large_write(size))
    assert sum(rows for rows, _, _ in found) == 9_000_000 // size
    assert all(3_000_000 < taken <= 4 * MIB + size for _, _, taken in found[:-1])


@BYTE_LIMIT.needed
def test_after_a_small_write_spark_measures_its_buffers(spark: SparkSession) -> None:
    frame, last = values(spark, 40, "rpad(cast(id AS STRING), 900000, 'x')"), LastWrite(1_000, 100_000)
    with batch_limits(frame, last) as limited:
        assert limited is frame
    assert max(size for _, _, size in batches(frame, last)) <= 4 * MIB + 900_000


def test_padding_of_a_huge_row_ends_one_batch(spark: SparkSession) -> None:
    found = batches(values(spark, 1, "rpad('x', 20000000, 'y')"))
    assert sum(rows for rows, _, _ in found) == 1 + 3_900_000 // 512


def test_known_sizes_do_not_change_generated_code(spark: SparkSession) -> None:
    """New code is slow until the JVM has compiled it."""

    def code(last: LastWrite | None) -> str:
        frame = values(spark, 10, "cast(id AS STRING)").selectExpr("value", "value AS key")
        with batch_limits(frame, last) as limited:
            plan = limited.mapInArrow(lambda given: given, limited.schema)._jdf.queryExecution().executedPlan()
        debug: Any = spark._jvm.org.apache.spark.sql.execution.debug.package
        stages = debug.codegenStringSeq(plan)
        return "".join(stages.apply(index)._2() for index in range(stages.length()))

    assert "GeneratedIterator" in code(None)
    assert {code(large_write(mean_bytes)) for mean_bytes in (50, 130, 255)} == {code(None)}


def test_keys_topics_and_headers_count_too(spark: SparkSession) -> None:
    long = "rpad(cast(id AS STRING), 100000, 'x')"
    headers = "array(named_struct('key', 'h', 'value', CAST({} AS BINARY))) AS headers"
    for column in (f"{long} AS key", f"{long} AS topic", f"{long} AS value"):
        found = batches(spark.range(0, 200, 1, 1).selectExpr(column, headers.format(long)))
        assert sum(records for _, records, _ in found) == 200
        assert max(size for _, _, size in found) <= 4 * MIB + 200_000, column


def test_padding_does_not_change_rows(spark: SparkSession) -> None:
    size = "CAST(CASE WHEN id % 7 = 0 THEN 20000 WHEN id % 3 = 0 THEN id % 2000 ELSE 10 END AS INT)"
    rows = spark.range(0, 9_000, 1, 1).selectExpr(
        f"if(id % 11 = 0, NULL, CAST(rpad(cast(id AS STRING), {size}, 'v') AS BINARY)) AS value",
        "if(id % 5 = 0, NULL, concat('k', id)) AS key",
        "if(id % 13 = 0, NULL, CAST(id % 4 AS INT)) AS partition",
        "if(id % 2 = 0, NULL, array(named_struct("
        "'key', 'h', 'value', if(id % 3 = 0, NULL, encode(cast(id AS STRING), 'utf-8'))))) AS headers",
        "if(id % 17 = 0, NULL, timestamp_millis(1700000000000 + id)) AS timestamp",
    )
    chosen = rows.toDF(*by_position(rows.schema)).selectExpr(*projection(rows.schema, "t"))

    def as_they_are(given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in map(without_padding, given):
            yield batch.select([name for name in batch.schema.names if name != IS_RECORD])

    with batch_limits(chosen) as limited:
        assert IS_RECORD in limited.columns
        came = limited.mapInArrow(as_they_are, chosen.schema).collect()
    assert came == chosen.collect()


def struct_of(fields: int, size: int) -> str:
    texts = (f"'c{at}', rpad(cast(id AS STRING), {size}, 'x')" for at in range(fields))
    return f"named_struct({', '.join(texts)})"


@pytest.mark.parametrize(
    ("rows", "value"),
    [
        (400, struct_of(1_000, 10)),
        (40, f"named_struct('a', id, 'b', named_struct('c', {struct_of(600, 400)}))"),
        (200, f"array({struct_of(1_000, 5)}, {struct_of(1_000, 5)})"),
    ],
    ids=["flat", "nested", "array"],
)
def test_a_struct_of_a_thousand_texts_is_planned(spark: SparkSession, rows: int, value: str) -> None:
    """Bug: the sum of the sizes of so many fields took more than the stack of the JVM, at each try."""
    found = batches(values(spark, rows, value), None, ("value",))
    assert sum(records for _, records, _ in found) == rows
    assert max(size for _, _, size in found) <= 9 * MIB  # Spark before 4.1 counts no bytes, and padding has fields, too


@pytest.mark.parametrize(
    "value",
    [
        "named_struct('id', {}, 'ID', cast(id AS STRING))",
        "named_struct('o', named_struct('x', 1, 'i', named_struct('Id', {}, 'iD', id)))",
        "named_struct('id', {}, '\u0130d', cast(id AS STRING))",
    ],
    ids=["texts", "at depth", "Turkish"],
)
def test_fields_that_differ_only_in_case_are_padded(spark: SparkSession, value: str) -> None:
    """Bug: SQL could not tell them apart, and no write of such a struct was planned. Where Spark counts bytes, none of
    the rows is padded.
    """
    frame = values(spark, 9_000, value.format("rpad(cast(id AS STRING), 1000, 'x')"))
    found = batches(frame, None, ("value",))
    assert sum(records for _, records, _ in found) == 9_000
    assert max(size for _, _, size in found) <= 5 * MIB
    as_before = measured(padded(frame, PaddedRows(512, 7_617), ("value",)))
    assert sum(records for _, records, _ in as_before) == 9_000
    assert all(rows > records for rows, records, _ in as_before)


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    names = []

    def set_for_the_test(name: str, value: str) -> None:
        names.append(name)
        spark.conf.set(name, value)

    yield set_for_the_test
    for name in names:
        spark.conf.unset(name)


def test_row_limit_of_the_user_stays(spark: SparkSession, conf: Callable[[str, str], None]) -> None:
    conf(RECORDS, "77")
    found = batches(values(spark, 200, "rpad('x', 1000, 'y')"), large_write(100))
    assert [(rows, records) for rows, records, _ in found] == [(77, 77), (77, 77), (46, 46)]
    assert max(records for _, records, _ in batches(values(spark, 20, "rpad('x', 900000, 'y')"))) == 5


@BYTE_LIMIT.needed
def test_byte_limit_of_the_user_stays(spark: SparkSession, conf: Callable[[str, str], None]) -> None:
    conf(BYTES, "10000")
    found = batches(values(spark, 100, "rpad('x', 1000, 'y')"), large_write(100))
    assert {rows == records for rows, records, _ in found} == {True}
    assert max(rows for rows, _, _ in found) <= 10


def sizes_before(df: DataFrame) -> DataFrame:
    """One row with the number of rows and bytes of each Arrow batch of `df` that a Python function gets."""

    def measure(given: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in given:
            yield pa.RecordBatch.from_pydict({"value": [f"{batch.num_rows} {batch.nbytes}"]})

    return df.mapInArrow(measure, "value STRING")


@pytest.mark.parametrize(
    "come",
    [lambda df: df, lambda df: df.selectExpr("upper(value) AS value"), lambda df: df.localCheckpoint(eager=False)],
    ids=["at once", "by a projection", "from an RDD"],
)
@pytest.mark.parametrize("last", [None, large_write(1), LastWrite(10, 10)], ids=["unknown", "small", "few"])
def test_python_function_before_write_gets_no_larger_batches(
    spark: SparkSession, come: Callable[[DataFrame], DataFrame], last: LastWrite | None
) -> None:
    """Bug: the function got its rows without a limit of bytes: 4,000 of 700 KB in one batch, which killed the JVM."""
    for rows, value in ((1_500, "rpad('x', 100000, 'y')"), (15_000, "'x'")):
        df = come(sizes_before(values(spark, rows, value)))
        with batch_limits(df, last) as limited:
            found = limited.mapInArrow(lambda given: map(without_padding, given), "value STRING").collect()
        sizes = [tuple(map(int, row["value"].split())) for row in found]
        assert sum(count for count, _ in sizes) == rows
        assert max(count for count, _ in sizes) <= 10_000
        assert max(size for _, size in sizes) <= 64 * MIB + 200_000


def test_rows_are_counted_without_an_earlier_python_function(spark: SparkSession) -> None:
    numbers = spark.range(3)
    spark.udf.register("in_python", str)
    spark.udtf.register("table_in_python", udtf(TableInPython, returnType="value STRING"))  # type: ignore[arg-type]
    numbers.createOrReplaceTempView("numbers")
    try:
        for query, is_counted in {
            "SELECT to_json(struct(id)) AS value FROM numbers": True,
            "SELECT CAST(count(*) AS STRING) AS value FROM numbers JOIN numbers AS others USING (id)": True,
            "SELECT in_python(id) AS value FROM numbers": False,
            "SELECT (SELECT max(in_python(id)) FROM numbers) AS value": False,
            "SELECT value FROM numbers, LATERAL table_in_python(id)": False,
        }.items():
            with batch_limits(spark.sql(query)) as limited:
                assert (IS_RECORD in limited.columns) == is_counted, query
    finally:
        spark.catalog.dropTempView("numbers")
        spark.sql("DROP TEMPORARY FUNCTION in_python")
        spark.sql("DROP TEMPORARY FUNCTION table_in_python")


@pytest.mark.parametrize(
    ("come", "is_counted"),
    [
        (lambda stream: stream.selectExpr("CAST(value AS STRING) AS value"), True),
        (lambda stream: stream.groupBy("value").count().selectExpr("CAST(count AS STRING) AS value"), True),
        (lambda stream: sizes_before(stream), False),
        (lambda stream: sizes_before(stream).groupBy("value").count().selectExpr("value"), False),
    ],
    ids=["stateless", "stateful", "by Python", "by Python, stateful"],
)
def test_rows_of_stream_without_python_functions_are_counted(
    spark: SparkSession, tmp_path: Path, come: Callable[[DataFrame], DataFrame], is_counted: bool
) -> None:
    """To Spark the batch itself is an RDD, which shows no plan."""
    spark.range(10).selectExpr("id AS value").write.parquet(str(tmp_path / "in"))
    stream = come(spark.readStream.schema("value BIGINT").parquet(str(tmp_path / "in")))
    seen: list[bool] = []

    def look(batch: DataFrame, _id: int) -> None:
        of_other_rdd = batch.sparkSession.sparkContext.parallelize([("x",)]).toDF(["value"])
        for df in (batch, batch.selectExpr("upper(value) AS value"), batch.unionAll(of_other_rdd)):
            with batch_limits(df) as limited:
                seen.append(IS_RECORD in limited.columns)
        batch.collect()  # a stream ends if its state is not written

    query = stream.writeStream.outputMode("update").foreachBatch(look).trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    assert seen == [is_counted] * 3


@pytest.mark.parametrize("returned", ["double", "string", "boolean", "array<boolean>", "int"])
@pytest.mark.parametrize(
    "name",
    [
        "least",
        "array",
        "array_repeat",
        "concat",
        "if",
        "coalesce",
        "octet_length",
        "explode_outer",
        "spark_partition_id",
    ],
)
def test_function_of_the_user_with_a_name_of_spark_loses_no_record(
    spark: SparkSession, name: str, returned: str
) -> None:
    """Bug: before Spark 4.2, or with sessionOrder=first, a `least` that gave null lost all rows, without an error.
    Others failed the write with an error of Spark about SQL that the user had not written.
    """
    session = spark.newSession()
    session.conf.set("spark.sql.functionResolution.sessionOrder", "first")
    session.udf.register(name, lambda *_: None, returned)
    df = session.range(0, 300, 1, 2).selectExpr("CAST(id AS STRING) AS key", "rpad('x', 2000, 'y') AS value")
    assert sum(records for _, records, _ in batches(df)) == 300


def test_setting_with_which_spark_doubles_rows_fails_the_write(spark: SparkSession) -> None:
    """Bug: Spark 4.1 and 4.2 handed over the tasks' reports twice, so a report counted 200 records of 100."""
    df = values(spark.newSession(), 300, "'x'")
    df.sparkSession.conf.set("spark.sql.execution.arrow.maxRecordsPerOutputBatch", "2")
    if spark.version.startswith(("4.1.", "4.2.")):
        with pytest.raises(ConfigError, match="maxRecordsPerOutputBatch=2"), batch_limits(df):
            pass
    else:
        assert sum(records for _, records, _ in batches(df)) == 300


def test_names_of_fields_that_are_patterns_do_not_fail_the_write(spark: SparkSession) -> None:
    """Bug: [WRONG_NUM_ARGS] of octet_length."""
    df = values(spark.newSession(), 300, "named_struct('b.c', 'x')")
    df.sparkSession.conf.set("spark.sql.parser.quotedRegexColumnNames", "true")
    assert sum(records for _, records, _ in batches(df, formatted=("value",))) == 300


def test_no_setting_remains_or_reaches_other_threads(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.setLocalProperty(RECORDS, "5")
    seen: list[str | None] = []
    try:
        with batch_limits(values(spark, 1, "'x'")):
            assert context.getLocalProperty(BYTES) == str(2**31 - 1)
            assert context.getLocalProperty(RECORDS) == str(3_900_000 // 512)
            assert spark.conf.get(BYTES, None) is None
            other = threading.Thread(target=lambda: seen.append(context.getLocalProperty(BYTES)))
            other.start()
            other.join()
        assert context.getLocalProperty(RECORDS) == "5"
        assert context.getLocalProperty(BYTES) is None
    finally:
        context.setLocalProperty(RECORDS, None)
    assert seen == [None]


@pytest.mark.parametrize("last", [None, large_write(1), LastWrite(10, 10)], ids=["unknown", "small", "few"])
def test_batches_of_large_rows_are_small_behind_a_python_function(
    spark: SparkSession, conf: Callable[[str, str], None], last: LastWrite | None
) -> None:
    """Spark before 4.1 counts no bytes: padding is the only limit, under Spark's limit of rows or the user's."""
    large = values(spark, 60, "rpad(cast(id AS STRING), 900000, 'x')").mapInArrow(lambda given: given, "value STRING")
    for most in (None, "1000"):
        if most is not None:
            conf(RECORDS, most)
        found = batches(large, last)
        assert sum(records for _, records, _ in found) == 60
        assert max(size for _, _, size in found) <= 6 * MIB + 900_000
