"""The topics that the benchmark's contenders write to: made beforehand, and counted afterwards. Without TLS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from read_topic import topic_reader

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.protocol.fetch import LATEST_TIMESTAMP


class Broker(Protocol):
    """EmbeddedKafka; without TLS an Admin does too."""

    @property
    def bootstrap_servers(self) -> str: ...

    def secured_servers(self, listener: str) -> str: ...

    def create_topic(
        self, name: str, partitions: int = 1, *, config: Mapping[str, str | int] | None = None
    ) -> None: ...

    def delete_topic(self, name: str) -> None: ...


KEPT: Final = {"segment.bytes": 64 << 20, "retention.bytes": 64 << 20}
"""Of each partition, by the broker that the benchmark starts: what a process writes in a minute, several gigabytes,
would have the kernel slow its writers down until the disk has caught up, and disks would be compared. With 200
partitions none comes to a segment, and nothing is deleted: with segments that are small enough for it so many begin
that a producer makes half of its rate.
"""


def warm_topic(broker: Broker, topic: str, partitions: int) -> None:
    """Create a topic and write every partition once: the first append to one opens its files."""
    broker.create_topic(topic, partitions=partitions, config=KEPT)
    producer = KafkaProducer({"bootstrap.servers": broker.bootstrap_servers, "client.id": "benchmark"})
    try:
        sent = [producer.send(topic, b"first", partition=partition) for partition in range(partitions)]
        producer.flush()
        for future in sent:
            future.result()
    finally:
        producer.close()


def count_records(servers: str, topic: str) -> int:
    with topic_reader(servers, topic, "benchmark") as reader:
        return sum(reader.offsets(reader.partitions(topic), LATEST_TIMESTAMP).values())
