"""The cluster as of the last metadata: immutable values, safe to share between threads.

`Cluster` is a snapshot whose indexes are built once; a metadata update makes a new one. Mirrors
org.apache.kafka.common.Cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

from spark_kafka_sink.common.texts import one_line

NO_NODE_ID = -1
NO_LEADER_EPOCH = -1


class TopicPartition(NamedTuple):
    """A partition's name: hashable and cheap, the key of every table of partitions."""

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
    """The id of connections to this node."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id_string", str(self.id))

    def __str__(self) -> str:
        return f"{one_line(self.host)}:{self.port} (id {self.id})"


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """A partition in a metadata response: with the ids of its nodes and the epoch of its leader (KIP-320)."""

    topic_partition: TopicPartition
    leader_id: int | None
    leader_epoch: int | None = None
    replica_ids: tuple[int, ...] = ()
    in_sync_replica_ids: tuple[int, ...] = ()
    offline_replica_ids: tuple[int, ...] = ()
    error_code: int = 0


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition with its nodes.

    `leader` is None without a leader, or while the address of the leader is not known.
    """

    topic: str
    partition: int
    leader: Node | None
    replicas: tuple[Node, ...] = ()
    in_sync_replicas: tuple[Node, ...] = ()
    offline_replicas: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """An immutable view of nodes and partitions. The indexes are built at first use and kept."""

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
        """Return a cluster without nodes and topics."""
        return cls()

    @classmethod
    def bootstrap(cls, addresses: Iterable[tuple[str, int]]) -> Cluster:
        """Return a cluster with nodes -1, -2, … at `addresses`, without topics."""
        nodes = tuple(Node(-1 - index, host, port) for index, (host, port) in enumerate(addresses))
        return cls(nodes=nodes, is_bootstrap_configured=True)

    def take_indexes(self, one: Cluster, other: Cluster) -> None:
        """Build the indexes of this view from those of two views of the same nodes, each with its own topics.

        Only for the code that made this view.
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
    def leaders(self) -> Mapping[TopicPartition, Node]:
        """The leader of each partition that has one."""
        return {place: info.leader for place, info in self._info_by_topic_partition.items() if info.leader is not None}

    @cached_property
    def topics(self) -> frozenset[str]:
        """The topics with at least one known partition."""
        return frozenset(self._partitions_by_topic)

    def partition_info(self, topic_partition: TopicPartition) -> PartitionInfo | None:
        return self._info_by_topic_partition.get(topic_partition)

    def leader_for(self, topic_partition: TopicPartition) -> Node | None:
        return self.leaders.get(topic_partition)

    def partitions_for_topic(self, topic: str) -> tuple[PartitionInfo, ...]:
        """Return all partitions of the topic by number, or () if the topic is not known."""
        return self._partitions_by_topic.get(topic, ())

    def available_partitions_for_topic(self, topic: str) -> tuple[PartitionInfo, ...]:
        """Return the partitions that have a leader."""
        return self._available_partitions_by_topic.get(topic, ())

    def partition_count_for_topic(self, topic: str) -> int | None:
        """Return the number of partitions, or None if the topic is not known."""
        infos = self._partitions_by_topic.get(topic)
        return len(infos) if infos is not None else None
