"""A task's effect on Spark's own connection."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from spark_kafka_sink.sink.worker import acknowledge_now


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux delays acknowledgements by 40 ms")
def test_sparks_connection_to_the_worker_is_acknowledged(spark: SparkSession) -> None:
    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        acknowledged = acknowledge_now()  # as at the start of each delivery
        yield pa.record_batch({"rows": [sum(batch.num_rows for batch in batches)], "acknowledged": [acknowledged]})

    (found,) = spark.range(0, 10, 1, 1).mapInArrow(count, "rows BIGINT, acknowledged BIGINT").collect()

    assert found.rows == 10
    assert found.acknowledged >= 1
