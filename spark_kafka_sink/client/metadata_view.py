"""The cluster as brokers describe it, in immutable values: one response of any version, and the view that all responses
together make. Any thread may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Self
from uuid import UUID

from spark_kafka_sink.common.cluster import (
    NO_LEADER_EPOCH,
    NO_NODE_ID,
    Cluster,
    Node,
    PartitionInfo,
    PartitionMetadata,
    TopicPartition,
)
from spark_kafka_sink.protocol.versions import Message

_FIRST_VERSION_WITH_RELIABLE_EPOCHS: Final = 9
"""Before this version a broker may return an epoch that it has not caught up with (KAFKA-7738)."""
_ZERO_ID: Final = UUID(int=0)
_NO_LEADER: Final = 5


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """One topic of a response. If `error_code` is not 0, `partitions` has no meaning."""

    name: str
    error_code: int = 0
    topic_id: UUID | None = None
    partitions: tuple[PartitionMetadata, ...] = ()
    has_gaps: bool = False
    """A partition below the highest one is missing, so the number of partitions is not known. Keys would go to wrong
    partitions. It counts as LEADER_NOT_AVAILABLE.
    """


@dataclass(frozen=True, slots=True)
class MetadataResponse:
    """Brokers by id, and topics. Ids and epochs are None if the version or the broker does not give them."""

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
        """Convert kio's MetadataResponse of any version. Topics without a name, which were requested by an unknown id,
        are left out.
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
    error_code = int(topic.error_code)
    partitions = tuple(_partition(str(topic.name), partition) for partition in topic.partitions)
    numbers = {partition.topic_partition.partition for partition in partitions}
    has_gaps = not error_code and len(numbers) != max(numbers, default=-1) + 1
    return TopicMetadata(
        name=str(topic.name),
        error_code=_NO_LEADER if has_gaps else error_code,
        topic_id=topic_id if topic_id is not None and topic_id != _ZERO_ID else None,
        partitions=partitions,
        has_gaps=has_gaps,
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


class _Replicas(dict[tuple[int, ...], tuple[Node, ...]]):
    """Return the nodes of ids. A broker that is down is not in `nodes`; it gets an empty address. Each list of ids is
    looked up once, because many partitions have the same list.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        super().__init__()
        self._nodes = nodes

    def __missing__(self, ids: tuple[int, ...]) -> tuple[Node, ...]:
        found = self[ids] = tuple(self._nodes.get(node_id) or Node(node_id, "", -1) for node_id in ids)
        return found


def _partition_infos(partitions: Iterable[PartitionMetadata], nodes: Mapping[int, Node]) -> tuple[PartitionInfo, ...]:
    replicas = _Replicas(nodes)
    return tuple(
        PartitionInfo(
            topic=metadata.topic_partition.topic,
            partition=metadata.topic_partition.partition,
            leader=nodes.get(metadata.leader_id) if metadata.leader_id is not None else None,
            replicas=replicas[metadata.replica_ids],
            in_sync_replicas=replicas[metadata.in_sync_replica_ids],
            offline_replicas=replicas[metadata.offline_replica_ids],
        )
        for metadata in partitions
    )


@dataclass(frozen=True)
class MetadataCache:
    """The last known brokers, partitions and topic ids (org.apache.kafka.clients.MetadataSnapshot). `cluster` is the
    view of them.
    """

    cluster_id: str | None = None
    nodes: Mapping[int, Node] = field(default_factory=dict)
    partitions: Mapping[TopicPartition, PartitionMetadata] = field(default_factory=dict)
    unauthorized_topics: frozenset[str] = frozenset()
    invalid_topics: frozenset[str] = frozenset()
    controller: Node | None = None
    topic_ids: Mapping[str, UUID] = field(default_factory=dict)
    is_bootstrap: bool = False

    @classmethod
    def bootstrap(cls, addresses: Iterable[tuple[str, int]]) -> Self:
        """Return a cache with only the nodes -1, -2, … at `addresses` (host, port)."""
        nodes = Cluster.bootstrap(addresses).nodes
        return cls(nodes={node.id: node for node in nodes}, is_bootstrap=True)

    @cached_property
    def cluster(self) -> Cluster:
        """The same as an indexed `Cluster`, made at first use."""
        return self._cluster(_partition_infos(self.partitions.values(), self.nodes))

    def _cluster(self, partitions: tuple[PartitionInfo, ...]) -> Cluster:
        return Cluster(
            cluster_id=self.cluster_id,
            nodes=tuple(self.nodes.values()),
            partitions=partitions,
            invalid_topics=self.invalid_topics,
            unauthorized_topics=self.unauthorized_topics,
            controller=self.controller,
            topic_ids=self.topic_ids,
            is_bootstrap_configured=self.is_bootstrap,
        )

    def leader_epoch(self, topic_partition: TopicPartition) -> int | None:
        """Return the cached leader epoch, or None if the partition or its epoch is not known."""
        metadata = self.partitions.get(topic_partition)
        return metadata.leader_epoch if metadata is not None else None

    def merge_with(self, newer: MetadataCache, retain: Callable[[str], bool]) -> MetadataCache:
        """Return this cache with `newer` laid over it, as after a partial update.

        Nodes, controller and cluster id come from `newer`. `retain(topic)` decides for each topic of this cache whether
        it stays.
        """
        known_topics = self._all_topics()
        kept = {topic for topic in known_topics if retain(topic)}
        partitions = {known: metadata for known, metadata in self.partitions.items() if known.topic in kept}
        partitions.update(newer.partitions)
        topic_ids = {topic: topic_id for topic, topic_id in self.topic_ids.items() if topic in kept}
        topic_ids.update(newer.topic_ids)
        merged = MetadataCache(
            cluster_id=newer.cluster_id,
            nodes=newer.nodes,
            partitions=partitions,
            unauthorized_topics=newer.unauthorized_topics | (self.unauthorized_topics & kept),
            invalid_topics=newer.invalid_topics | (self.invalid_topics & kept),
            controller=newer.controller,
            topic_ids=topic_ids,
        )
        if len(kept) == len(known_topics) and newer.nodes == self.nodes:
            # Only new topics, as after single sends. Copying the indexes takes a fifth of the time of building the view
            # of all topics again.
            vars(merged)["cluster"] = merged._cluster(self.cluster.partitions + newer.cluster.partitions)
            merged.cluster.take_indexes(self.cluster, newer.cluster)
        return merged

    def _all_topics(self) -> set[str]:
        named = {known.topic for known in self.partitions}
        return named.union(self.topic_ids, self.unauthorized_topics, self.invalid_topics)
