"""A real Kafka on this machine, for demos and tests: `with EmbeddedKafka() as kafka: ...`.

Needs Java 17 or newer and the extra `local`.
"""

from __future__ import annotations

from spark_kafka_sink.local.admin import Admin, PartitionDescription, TopicDescription
from spark_kafka_sink.local.cluster import EmbeddedKafka
from spark_kafka_sink.local.jars import fetch_jars
from spark_kafka_sink.local.schema_registry import SchemaRegistry
from spark_kafka_sink.local.security import BrokerSecurity

__all__ = [
    "Admin",
    "BrokerSecurity",
    "EmbeddedKafka",
    "PartitionDescription",
    "SchemaRegistry",
    "TopicDescription",
    "fetch_jars",
]
