"""Spark's limits of an Arrow batch, as `KafkaSink.write` changes them and puts them back."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from spark_kafka_sink.sink.arrow_batches import batches_by_size

BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def batch_rows(spark: SparkSession, rows: int, value_bytes: int) -> list[int]:
    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})

    values = spark.range(0, rows, 1, 1).selectExpr(f"rpad('x', {value_bytes}, 'y') AS value")
    return [row["rows"] for row in values.mapInArrow(count, "rows BIGINT").collect()]


def test_bytes_bound_a_batch_of_large_values_and_of_small_ones(spark: SparkSession) -> None:
    with batches_by_size(spark):
        assert max(batch_rows(spark, 40, 900_000)) <= 5
        assert max(batch_rows(spark, 60_000, 100)) > 30_000


def test_a_limit_that_somebody_set_stays_and_ours_go(spark: SparkSession) -> None:
    spark.conf.set(RECORDS, "77")
    try:
        with batches_by_size(spark), batches_by_size(spark):
            assert spark.conf.get(RECORDS) == "77"
            assert spark.conf.get(BYTES, None) is not None
    finally:
        spark.conf.unset(RECORDS)
    assert spark.conf.get(BYTES, None) is None
    assert spark.conf.get(RECORDS, None) is None
