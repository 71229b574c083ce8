"""The topics that the benchmark's contenders write to: made beforehand, and counted afterwards. Without TLS."""

from __future__ import annotations

import random
from typing import Protocol

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.client.connect import consumer_network_client
from spark_kafka_sink.client.topic_reader import TopicReader
from spark_kafka_sink.client.topics_metadata import TopicsMetadata
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.protocol.requests import LATEST_TIMESTAMP


class Broker(Protocol):
    """EmbeddedKafka; without TLS an Admin does too."""

    @property
    def bootstrap_servers(self) -> str: ...

    def secured_servers(self, listener: str) -> str: ...

    def create_topic(self, name: str, partitions: int = 1) -> None: ...

    def delete_topic(self, name: str) -> None: ...


def warm_topic(broker: Broker, topic: str, partitions: int) -> None:
    """Create a topic and write every partition once: the first append to one opens its files."""
    broker.create_topic(topic, partitions=partitions)
    producer = KafkaProducer({"bootstrap.servers": broker.bootstrap_servers, "client.id": "benchmark"})
    try:
        sent = [producer.send(topic, b"first", partition=partition) for partition in range(partitions)]
        producer.flush()
        for future in sent:
            future.result()
    finally:
        producer.close()


def count_records(servers: str, topic: str) -> int:
    config = ProducerConfig.from_mapping({"bootstrap.servers": servers, "client.id": "benchmark"})
    clock, rng = SystemClock(), random.Random()
    backoff_ms, backoff_max_ms = config.retry_backoff_ms, config.retry_backoff_max_ms
    metadata = TopicsMetadata([topic], backoff_ms, backoff_max_ms, config.metadata_max_age_ms, rng)
    client = consumer_network_client(config, metadata, clock, rng)
    try:
        reader = TopicReader(client, metadata, clock, backoff_ms)
        return sum(reader.offsets(reader.partitions(topic), LATEST_TIMESTAMP).values())
    finally:
        client.close()
