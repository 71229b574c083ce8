"""A topic as a DataFrame, in the columns that the sink accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.read_topic import read_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ("topic", "partition", "offset", "timestamp_ms", "key", "value", "headers")


def topic_frame(spark: SparkSession, bootstrap_servers: str, topic: str, *columns: str) -> DataFrame:
    """Return the records of `topic`, with COLUMNS or the named ones; `timestamp_ms` is a long."""
    records = read_topic(bootstrap_servers, topic)
    timestamps = records["timestamp"].cast("int64")
    table = records.drop_columns(["timestamp"]).append_column("timestamp_ms", timestamps)
    return spark.createDataFrame(table).select(*(columns or COLUMNS))
