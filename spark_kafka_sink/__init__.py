"""A PySpark sink for Kafka, in Python, with its own producer.

The public names are listed here and loaded when they are first used, so that a process pays only for what it needs:
the embedded broker does without Spark, and a Spark worker without the broker.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from spark_kafka_sink.common.version import VERSION

if TYPE_CHECKING:
    from spark_kafka_sink.common.batch_report import BatchReport as BatchReport
    from spark_kafka_sink.common.errors import ConfigError as ConfigError
    from spark_kafka_sink.common.errors import KafkaError as KafkaError
    from spark_kafka_sink.common.errors import SchemaError as SchemaError
    from spark_kafka_sink.producer.futures import RecordMetadata as RecordMetadata
    from spark_kafka_sink.producer.kafka_producer import KafkaProducer as KafkaProducer
    from spark_kafka_sink.record.columns import RecordColumns as RecordColumns
    from spark_kafka_sink.sink.data_source import KafkaSinkDataSource as KafkaSinkDataSource
    from spark_kafka_sink.sink.kafka_sink import KafkaSink as KafkaSink
    from spark_kafka_sink.sink.report_listener import ReportListener as ReportListener

_HOMES = {
    # Spark
    "KafkaSink": "spark_kafka_sink.sink.kafka_sink",
    "KafkaSinkDataSource": "spark_kafka_sink.sink.data_source",
    "BatchReport": "spark_kafka_sink.common.batch_report",
    "ReportListener": "spark_kafka_sink.sink.report_listener",
    # producer
    "KafkaProducer": "spark_kafka_sink.producer.kafka_producer",
    "RecordColumns": "spark_kafka_sink.record.columns",
    "RecordMetadata": "spark_kafka_sink.producer.futures",
    # errors: the whole tree is in spark_kafka_sink.common.errors
    "ConfigError": "spark_kafka_sink.common.errors",
    "KafkaError": "spark_kafka_sink.common.errors",
    "SchemaError": "spark_kafka_sink.common.errors",
}

__all__ = [*_HOMES]
__version__ = VERSION


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
