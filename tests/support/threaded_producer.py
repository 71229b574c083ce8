"""A producer with its own thread, whose only broker is a closed port."""

from __future__ import annotations

import random
import threading
from typing import Final

from spark_kafka_sink.client.factory import bootstrap
from spark_kafka_sink.client.metadata_view import MetadataResponse, TopicMetadata
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.cluster import Node, PartitionMetadata, TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata

_SETTINGS: Final = {"bootstrap.servers": "127.0.0.1:1", "max.block.ms": "50"}
_THREAD: Final = "kafka-producer-network-thread"
EXPIRES_AT_ONCE: Final = {"linger.ms": "0", "request.timeout.ms": "1", "delivery.timeout.ms": "1"}
"""Records fail on the Sender's thread after a millisecond."""


def threaded(**settings: str) -> KafkaProducer:
    """Return a producer that knows no topic."""
    return KafkaProducer({**_SETTINGS, **settings})


def threaded_with_topic(topic: str, **settings: str) -> KafkaProducer:
    """Return a producer that knows `topic`, with one partition: its records get into batches."""
    config = ProducerConfig.from_mapping({**_SETTINGS, **settings})
    clock, rng = SystemClock(), random.Random(1)
    metadata = ProducerMetadata.of(config, clock, rng)
    bootstrap(metadata, config)
    metadata.add(topic, clock.now_ms())
    partition = PartitionMetadata(TopicPartition(topic, 0), 0, 0)
    response = MetadataResponse({0: Node(0, "127.0.0.1", 1)}, (TopicMetadata(topic, partitions=(partition,)),), "c", 0)
    _, version, _ = metadata.new_metadata_request_and_version(clock.now_ms())
    metadata.update(version, response, False, clock.now_ms())
    return KafkaProducer(config, clock=clock, rng=rng, metadata=metadata)


def producer_threads() -> list[threading.Thread]:
    """Return the threads of all producers of this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(_THREAD)]


def sender_thread(producer: KafkaProducer) -> threading.Thread:
    """Return the thread of this producer. It must be alive."""
    (thread,) = (each for each in producer_threads() if each.name == f"{_THREAD}-{producer.client_id}")
    return thread
