"""A metadata response of any version as one plain value, so that `Metadata` decides without knowing which fields a
version has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from spark_kafka_sink.common.cluster import NO_LEADER_EPOCH, NO_NODE_ID, Node, PartitionMetadata, TopicPartition
from spark_kafka_sink.protocol.messages import Message

_FIRST_VERSION_WITH_RELIABLE_EPOCHS: Final = 9
"""Before it a broker may answer with the epoch of a leader that it has not caught up with (KAFKA-7738)."""
_ZERO_ID: Final = UUID(int=0)


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """One topic of a response; `error_code` other than 0 means that `partitions` says nothing."""

    name: str
    error_code: int = 0
    topic_id: UUID | None = None
    is_internal: bool = False
    partitions: tuple[PartitionMetadata, ...] = ()


@dataclass(frozen=True, slots=True)
class MetadataResponse:
    """Brokers by id, and topics, with ids and epochs None where the version or the broker does not tell."""

    brokers: dict[int, Node]
    topics: tuple[TopicMetadata, ...] = ()
    cluster_id: str | None = None
    controller_id: int | None = None
    has_reliable_leader_epochs: bool = True
    error_code: int = 0

    @property
    def controller(self) -> Node | None:
        return self.brokers.get(self.controller_id) if self.controller_id is not None else None

    def error_codes(self) -> Iterator[tuple[str, int]]:
        """Topics that came with an error, with its code."""
        return ((topic.name, topic.error_code) for topic in self.topics if topic.error_code)

    @classmethod
    def from_entity(cls, entity: Message) -> MetadataResponse:
        """From kio's MetadataResponse of any version. Topics without a name (asked for by an id that is unknown) are
        left out.
        """
        brokers = {
            int(broker.node_id): Node(int(broker.node_id), broker.host, int(broker.port), getattr(broker, "rack", None))
            for broker in entity.brokers
        }
        return cls(
            brokers=brokers,
            topics=tuple(_topic(topic) for topic in entity.topics if topic.name is not None),
            cluster_id=getattr(entity, "cluster_id", None),
            controller_id=_known(getattr(entity, "controller_id", NO_NODE_ID), NO_NODE_ID),
            has_reliable_leader_epochs=entity.__version__ >= _FIRST_VERSION_WITH_RELIABLE_EPOCHS,
            error_code=int(getattr(entity, "error_code", 0)),
        )


def _known(value: int, unknown: int) -> int | None:
    return int(value) if value != unknown else None


def _topic(topic: Message) -> TopicMetadata:
    topic_id = getattr(topic, "topic_id", None)
    return TopicMetadata(
        name=str(topic.name),
        error_code=int(topic.error_code),
        topic_id=topic_id if topic_id is not None and topic_id != _ZERO_ID else None,
        is_internal=bool(getattr(topic, "is_internal", False)),
        partitions=tuple(_partition(str(topic.name), partition) for partition in topic.partitions),
    )


def _partition(topic: str, partition: Message) -> PartitionMetadata:
    return PartitionMetadata(
        topic_partition=TopicPartition(topic, int(partition.partition_index)),
        leader_id=_known(partition.leader_id, NO_NODE_ID),
        leader_epoch=_known(getattr(partition, "leader_epoch", NO_LEADER_EPOCH), NO_LEADER_EPOCH),
        replica_ids=tuple(map(int, partition.replica_nodes)),
        in_sync_replica_ids=tuple(map(int, partition.isr_nodes)),
        offline_replica_ids=tuple(map(int, getattr(partition, "offline_replicas", ()))),
        error_code=int(partition.error_code),
    )
