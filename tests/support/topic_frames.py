"""A topic as a DataFrame, in the columns that the sink accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.pyspark_capabilities import RELEASE

from jobs.read_topic import read_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TYPES = {
    "topic": "STRING",
    "partition": "INT",
    "offset": "BIGINT",
    "timestamp_ms": "BIGINT",
    "key": "BINARY",
    "value": "BINARY",
    "headers": "ARRAY<STRUCT<key: STRING, value: BINARY>>",
}
COLUMNS = ("topic", "partition", "offset", "timestamp_ms", "key", "value", "headers")


def topic_frame(spark: SparkSession, bootstrap_servers: str, topic: str, *columns: str) -> DataFrame:
    """Return the records of `topic`, with COLUMNS or the named ones; `timestamp_ms` is a long."""
    records = read_topic(bootstrap_servers, topic)
    timestamps = records["timestamp"].cast("int64")
    table = records.drop_columns(["timestamp"]).append_column("timestamp_ms", timestamps)
    if RELEASE >= (4, 0):
        frame = spark.createDataFrame(table)
    else:  # it takes no Arrow table
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        frame = spark.createDataFrame(list(rows), ", ".join(f"{name} {TYPES[name]}" for name in table.column_names))
    return frame.select(*(columns or COLUMNS))
