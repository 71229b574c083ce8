"""All ways to write rows to Kafka: Spark's own sink, and every interface of this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from spark_kafka_sink import KafkaSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Write = Callable[["DataFrame", dict[str, str]], None]


def through_spark(frame: DataFrame, options: dict[str, str]) -> None:
    frame.write.format("kafka").options(**options).mode("append").save()


def _through_format(frame: DataFrame, options: dict[str, str]) -> None:
    frame.write.format("kafka_sink").options(**options).mode("append").save()


def _through_write(frame: DataFrame, options: dict[str, str]) -> None:
    KafkaSink(options).write(frame)


def _through_rows(frame: DataFrame, options: dict[str, str]) -> None:
    frame.foreachPartition(KafkaSink(options).write_partition)


BATCH_WAYS: dict[str, Write] = {
    "format": _through_format,
    "write": _through_write,
    "foreachPartition": _through_rows,
}


def stream_through(
    form: str, frame: DataFrame, options: dict[str, str], checkpoint: Path, output_mode: str = "append"
) -> None:
    """Stream all available rows; `form` is a format, "foreach" or "foreachBatch"."""
    writer = frame.writeStream.outputMode(output_mode).option("checkpointLocation", str(checkpoint))
    if form == "foreach":
        writer = writer.foreach(KafkaSink(options))
    elif form == "foreachBatch":
        writer = writer.foreachBatch(KafkaSink(options).write_batch)
    else:
        writer = writer.format(form).options(**options)
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(60), "the stream did not end within 60 s"
    finally:
        query.stop()
