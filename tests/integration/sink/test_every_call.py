"""Every call that writes, at least once and exactly once: a topic gets each row. docs/pyspark-versions.md shows these
results for each PySpark.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.exactly_once_streams import PARTITIONS, visible_values
from support.pyspark_capabilities import FAILURES, FORMAT

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.local import Admin

ROWS = 2_000
Call = Callable[[SparkSession, dict[str, Any], Path], object]


def rows_of(spark: SparkSession) -> DataFrame:
    return spark.range(0, ROWS, 1, 3).selectExpr("CAST(id % 10 AS STRING) AS key", "CAST(id AS STRING) AS value")


def run(spark: SparkSession, folder: Path, start: Callable[[Any], Any]) -> None:
    """Run a query over the rows, in one batch."""
    rows_of(spark).write.parquet(str(folder / "rows"))
    stream = spark.readStream.schema("key STRING, value STRING").parquet(str(folder / "rows"))
    query = start(
        stream.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    )
    query.start().awaitTermination()


CALLS: dict[str, Call] = {
    "writeStream.format": lambda spark, options, folder: run(
        spark, folder, lambda writer: writer.format("kafka_sink").options(**options)
    ),
    "writeStream.foreachBatch": lambda spark, options, folder: run(
        spark, folder, lambda writer: writer.foreachBatch(KafkaSink(options).write_batch)
    ),
    "writeStream.foreach": lambda spark, options, folder: run(
        spark, folder, lambda writer: writer.foreach(KafkaSink(options))
    ),
    "write.format": lambda spark, options, folder: (
        rows_of(spark).write.format("kafka_sink").options(**options).mode("append").save()
    ),
    "sink.write": lambda spark, options, folder: KafkaSink(options).write(rows_of(spark)),
    "foreachPartition": lambda spark, options, folder: rows_of(spark).foreachPartition(
        KafkaSink(options).write_partition
    ),
}
WITHOUT_A_DRIVER = ("writeStream.foreach", "foreachPartition")


def marked(call: str) -> Any:
    return pytest.param(call, marks=FORMAT.needed) if call.endswith("format") else call


@pytest.mark.parametrize("call", [marked(call) for call in CALLS])
def test_at_least_once_writes_every_row(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, call: str
) -> None:
    topic = new_topic(PARTITIONS)
    CALLS[call](spark, {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": topic}, tmp_path)
    assert visible_values(kafka_broker.bootstrap_servers, topic) == list(range(ROWS))


def exactly_once(broker: Admin, topic: str) -> dict[str, Any]:
    return {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "topic": topic,
        "delivery.guarantee": "exactly-once",
    }


@pytest.mark.parametrize("call", [marked(call) for call in CALLS if call not in WITHOUT_A_DRIVER])
def test_exactly_once_writes_every_row(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, call: str
) -> None:
    topic = new_topic(PARTITIONS)
    CALLS[call](spark, exactly_once(kafka_broker, topic), tmp_path)
    assert visible_values(kafka_broker.bootstrap_servers, topic) == list(range(ROWS))


@pytest.mark.parametrize("call", WITHOUT_A_DRIVER)
def test_exactly_once_is_refused_without_a_driver(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, call: str
) -> None:
    topic = new_topic(PARTITIONS)
    with pytest.raises(FAILURES, match="nothing on the driver"):
        CALLS[call](spark, exactly_once(kafka_broker, topic), tmp_path)
    assert visible_values(kafka_broker.bootstrap_servers, topic) == []


@pytest.mark.parametrize("call", [marked(call) for call in CALLS if call != "foreachPartition"])
def test_setting_with_which_spark_doubles_rows_is_refused(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, call: str
) -> None:
    """Bug: Spark 4.1 and 4.2 handed over rows of Python functions twice, and only `write` refused that, in 4.2."""
    topic, session = new_topic(PARTITIONS), spark.newSession()
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerOutputBatch", "3")
    options = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": topic}
    if not spark.version.startswith(("4.1.", "4.2.")):
        CALLS[call](session, options, tmp_path)
        assert visible_values(kafka_broker.bootstrap_servers, topic) == list(range(ROWS))
        return
    with pytest.raises((*FAILURES, ConfigError), match=r"maxRecordsPerOutputBatch=3: .* hand over rows .* twice"):
        CALLS[call](session, options, tmp_path)
    assert visible_values(kafka_broker.bootstrap_servers, topic) == []


if not FORMAT.is_there:

    def test_spark_without_data_sources_does_not_find_the_format(spark: SparkSession) -> None:
        """This text is Spark's. docs/troubleshooting.md says what to use."""
        with pytest.raises(FAILURES, match="DATA_SOURCE_NOT_FOUND"):
            rows_of(spark).write.format("kafka_sink").option("topic", "orders").mode("append").save()
        with pytest.raises(ImportError, match=r"These calls work: writeStream\.foreachBatch\(sink\.write_batch\)"):
            import_module("spark_kafka_sink.sink.data_source")
