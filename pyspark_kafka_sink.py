"""Where Spark finds `format("kafka_sink")` without registration: it looks for a `DefaultSource` in every top-level
module whose name begins with `pyspark_`.
"""

from __future__ import annotations

from spark_kafka_sink.sink.data_source import KafkaSinkDataSource as DefaultSource

__all__ = ["DefaultSource"]
