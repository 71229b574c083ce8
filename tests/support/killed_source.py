"""The data source of killed_spark.py, which PySpark 3.5 cannot import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.killed_spark import KilledDriver, by_halves, hold

from spark_kafka_sink.sink.data_source import KafkaSinkDataSource, KafkaStreamWriter, TaskWritten
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class KilledSource(KafkaSinkDataSource):
    """`format("kafka_sink")` with a `KilledDriver` and tasks that stop. It has another name, because Spark 4.0 refuses
    to register one that it has found by itself.
    """

    @classmethod
    def name(cls) -> str:
        return "killed_kafka_sink"

    def streamWriter(self, schema: StructType, overwrite: bool) -> KafkaStreamWriter:  # noqa: N802 - Spark's
        made = super().streamWriter(schema, overwrite)
        return KilledWriter(made._config, made._prefix)


class KilledWriter(KafkaStreamWriter):
    @contextmanager
    def _driver(self) -> Iterator[ExactlyOnceDriver]:
        with super()._driver() as made:
            yield KilledDriver(made.prefix, made._cluster, made._wall_ms, topic=made.topic)

    def write(self, iterator: Iterator[Any]) -> TaskWritten:
        report = super().write(iterator)
        hold("prepared")
        return report

    def _write_arrow(self, delivery: TaskDelivery, batches: Iterator[pa.RecordBatch]) -> None:
        super()._write_arrow(delivery, by_halves(batches))
