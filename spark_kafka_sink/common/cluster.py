"""The cluster as last heard of: frozen values, safe to hand from thread to thread.

`Cluster` is a snapshot with its indexes built once; a metadata update makes a new one. Mirrors
org.apache.kafka.common.Cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

from spark_kafka_sink.common.peer_text import one_line

NO_NODE_ID = -1
NO_LEADER_EPOCH = -1


class TopicPartition(NamedTuple):
    """A partition's name; hashable and cheap, the key of every per-partition table."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{one_line(self.topic)}-{self.partition}"


@dataclass(frozen=True, slots=True)
class Node:
    """A broker. Ids of bootstrap addresses are negative: -1, -2, …"""

    id: int
    host: str
    port: int
    rack: str | None = None
    id_string: str = field(init=False, repr=False, compare=False)
    """The id under which connections to this node are kept."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id_string", str(self.id))

    def __str__(self) -> str:
        return f"{one_line(self.host)}:{self.port} (id {self.id})"


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """A partition as a metadata response tells of it: by node ids, with the leader's epoch (KIP-320)."""

    topic_partition: TopicPartition
    leader_id: int | None
    leader_epoch: int | None = None
    replica_ids: tuple[int, ...] = ()
    in_sync_replica_ids: tuple[int, ...] = ()
    offline_replica_ids: tuple[int, ...] = ()
    error_code: int = 0


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition with its nodes resolved. `leader` is None while there is none, or while the leader's address is not
    known.
    """

    topic: str
    partition: int
    leader: Node | None
    replicas: tuple[Node, ...] = ()
    in_sync_replicas: tuple[Node, ...] = ()
    offline_replicas: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """An immutable view of nodes and partitions; the indexes are computed at first use and then kept."""

    cluster_id: str | None = None
    nodes: tuple[Node, ...] = ()
    partitions: tuple[PartitionInfo, ...] = ()
    invalid_topics: frozenset[str] = frozenset()
    unauthorized_topics: frozenset[str] = frozenset()
    controller: Node | None = None
    topic_ids: Mapping[str, UUID] = field(default_factory=dict)
    is_bootstrap_configured: bool = False

    @classmethod
    def empty(cls) -> Cluster:
        """A cluster of which nothing is known."""
        return cls()

    @classmethod
    def bootstrap(cls, addresses: Iterable[tuple[str, int]]) -> Cluster:
        """Nodes -1, -2, … at `addresses`; no topic is known from it."""
        nodes = tuple(Node(-1 - index, host, port) for index, (host, port) in enumerate(addresses))
        return cls(nodes=nodes, is_bootstrap_configured=True)

    def take_indexes(self, one: Cluster, other: Cluster) -> None:
        """Put the indexes of this view together from those of two of the same nodes, each with topics of its own. For
        whoever made it.
        """
        for name in ("_info_by_topic_partition", "leaders", "_partitions_by_topic", "_available_partitions_by_topic"):
            vars(self)[name] = getattr(one, name) | getattr(other, name)

    @cached_property
    def _info_by_topic_partition(self) -> dict[TopicPartition, PartitionInfo]:
        return {TopicPartition(info.topic, info.partition): info for info in self.partitions}

    @cached_property
    def _partitions_by_topic(self) -> dict[str, tuple[PartitionInfo, ...]]:
        found: dict[str, list[PartitionInfo]] = {}
        for info in sorted(self.partitions, key=lambda info: info.partition):
            found.setdefault(info.topic, []).append(info)
        return {topic: tuple(infos) for topic, infos in found.items()}

    @cached_property
    def _available_partitions_by_topic(self) -> dict[str, tuple[PartitionInfo, ...]]:
        return {
            topic: tuple(info for info in infos if info.leader is not None)
            for topic, infos in self._partitions_by_topic.items()
        }

    @cached_property
    def _partitions_by_node(self) -> dict[int, tuple[TopicPartition, ...]]:
        found: dict[int, list[TopicPartition]] = {node.id: [] for node in self.nodes}
        for place, leader in self.leaders.items():
            found.setdefault(leader.id, []).append(place)
        return {node_id: tuple(places) for node_id, places in found.items()}

    @cached_property
    def leaders(self) -> Mapping[TopicPartition, Node]:
        """Who leads, for the partitions that have a leader."""
        return {place: info.leader for place, info in self._info_by_topic_partition.items() if info.leader is not None}

    @cached_property
    def topics(self) -> frozenset[str]:
        """Topics with at least one known partition."""
        return frozenset(self._partitions_by_topic)

    def partition_info(self, topic_partition: TopicPartition) -> PartitionInfo | None:
        return self._info_by_topic_partition.get(topic_partition)

    def leader_for(self, topic_partition: TopicPartition) -> Node | None:
        return self.leaders.get(topic_partition)

    def partitions_for_topic(self, topic: str) -> tuple[PartitionInfo, ...]:
        """All partitions of the topic by number, or () where it is not known."""
        return self._partitions_by_topic.get(topic, ())

    def available_partitions_for_topic(self, topic: str) -> tuple[PartitionInfo, ...]:
        """The partitions that have a leader."""
        return self._available_partitions_by_topic.get(topic, ())

    def partitions_for_node(self, node_id: int) -> tuple[TopicPartition, ...]:
        """The partitions that the node leads."""
        return self._partitions_by_node.get(node_id, ())

    def partition_count_for_topic(self, topic: str) -> int | None:
        """How many partitions the topic has, or None where it is not known."""
        infos = self._partitions_by_topic.get(topic)
        return len(infos) if infos is not None else None
