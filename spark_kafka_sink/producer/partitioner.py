"""The partition of a record without its own partition.

With a key: murmur2, as in every Java client. Without: the uniform sticky partitioner (KIP-480, KIP-794). It stays with
a partition for the bytes of a batch, and longer while the open batch of the partition has room, up to twice these
bytes, because leaving in the middle of a batch leaves a small batch. Then it chooses another partition, more often one
with a short queue. Application threads choose; the Sender thread reports the loads. Reference:
org.apache.kafka.clients.producer.internals.BuiltInPartitioner.
"""

from __future__ import annotations

import random
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import accumulate
from operator import attrgetter

from spark_kafka_sink.common.cluster import Cluster, TopicPartition
from spark_kafka_sink.producer.producer_batch import BatchSizes
from spark_kafka_sink.record.block import RowSizes
from spark_kafka_sink.record.partitioning import partition_for_key

RoomOf = Callable[[TopicPartition], int]
"""Return the bytes that the open batch of a partition has room for, or 0 without an open batch."""


class PartitionLoads:
    """Cumulative frequencies of the partitions of a topic. A long queue makes a partition less frequent."""

    def __init__(self, queue_sizes: Mapping[int, int]) -> None:
        self.partitions: Sequence[int] = sorted(queue_sizes)
        longest = max(queue_sizes.values()) + 1
        self._cumulative = list(accumulate(longest - queue_sizes[partition] for partition in self.partitions))

    def draw(self, rng: random.Random) -> int:
        return self.partitions[bisect_right(self._cumulative, rng.randrange(self._cumulative[-1]))]


class StickyPartitioner:
    """The choice for one topic."""

    def __init__(self, topic: str, sizes: BatchSizes, is_adaptive: bool, rng: random.Random, room_of: RoomOf) -> None:
        self._topic = topic
        self._sizes = sizes
        self._room_of = room_of
        self._is_adaptive = is_adaptive
        self._rng = rng
        self._lock = threading.Lock()
        self._loads: PartitionLoads | None = None
        self._partition: int | None = None
        self._bytes = 0

    def update_loads(self, queue_sizes: Mapping[int, int], available_count: int) -> None:
        """Set the queue sizes of partitions whose brokers keep up; `available_count` partitions have a leader.

        Loads count only if they differ, or if a partition is to be skipped. Sender thread.
        """
        differs = len(set(queue_sizes.values())) > 1 or 0 < len(queue_sizes) < available_count
        use = self._is_adaptive and differs and available_count > 1
        self._loads = PartitionLoads(queue_sizes) if use else None

    def take(self, size: int, cluster: Cluster, partition_count: int) -> int:
        """Return the partition of a record of `size` bytes."""
        with self._lock:
            partition = self._current(cluster, partition_count, size, self._sizes.capacity(self._topic), {})
            self._bytes += size
            return partition

    def assign(self, rows: RowSizes, cluster: Cluster, partition_count: int) -> list[tuple[int, int, int]]:
        """Cut rows into (partition, first row, end row), each with rows for the room of a batch."""
        groups: list[tuple[int, int, int]] = []
        rooms: dict[int, int] = {}
        start, sticky_bytes = 0, self._sizes.capacity(self._topic)
        with self._lock:
            while start < rows.num_rows:
                first = rows.size(start, start + 1)
                partition = self._current(cluster, partition_count, first, sticky_bytes, rooms)
                room = self._room(partition, rooms)
                if room < first:
                    room = sticky_bytes  # of the next batch
                limit = min(room, 2 * sticky_bytes - self._bytes)
                end = max(start + 1, rows.last_fitting(start, rows.num_rows, limit))
                size = rows.size(start, end)
                rooms[partition] = room - size
                self._bytes += size
                if groups and groups[-1][0] == partition:
                    groups[-1] = (partition, groups[-1][1], end)
                else:
                    groups.append((partition, start, end))
                start = end
        return groups

    def _current(
        self, cluster: Cluster, partition_count: int, size: int, sticky_bytes: int, rooms: dict[int, int]
    ) -> int:
        """Return the partition for the next `size` bytes.

        It changes if the partition has had its bytes or has lost its leader. The caller holds the lock.
        """
        partition = self._partition
        if (
            partition is None
            or self._has_had_its_bytes(partition, size, sticky_bytes, rooms)
            or not self._has_leader(cluster, partition)
        ):
            partition = self._partition = self._choose(cluster, partition_count)
            self._bytes = 0
        return partition

    def _has_had_its_bytes(self, partition: int, size: int, sticky_bytes: int, rooms: dict[int, int]) -> bool:
        if not self._bytes or self._bytes + size <= sticky_bytes:
            return False
        return self._bytes >= 2 * sticky_bytes or self._room(partition, rooms) < size

    def _room(self, partition: int, rooms: dict[int, int]) -> int:
        """Return the room of the open batch. `rooms` has it after groups that are assigned and not appended yet."""
        if (room := rooms.get(partition)) is None:
            room = rooms[partition] = self._room_of(TopicPartition(self._topic, partition))
        return room

    def _has_leader(self, cluster: Cluster, partition: int) -> bool:
        """Return whether the partition has a leader, or exists and no partition has a leader."""
        available = cluster.available_partitions_for_topic(self._topic)
        infos = cluster.partitions_for_topic(self._topic)
        return partition < len(infos) and (not available or infos[partition].leader is not None)

    def _choose(self, cluster: Cluster, partition_count: int) -> int:
        available = cluster.available_partitions_for_topic(self._topic)
        if not available:
            return self._rng.randrange(partition_count)
        loads = self._loads
        if loads is not None:
            chosen = loads.draw(self._rng)
            if cluster.leader_for(TopicPartition(self._topic, chosen)) is not None:
                return chosen
        # Not by trying each partition: with thousands that would cost more than a small batch.
        own = -1 if self._partition is None else self._partition
        place = bisect_left(available, own, key=attrgetter("partition"))
        is_there = place < len(available) and available[place].partition == own
        if not is_there or len(available) == 1:
            return self._rng.choice(available).partition
        drawn = self._rng.randrange(len(available) - 1)  # of the other partitions
        return available[drawn + (drawn >= place)].partition


class Partitioners(dict[str, StickyPartitioner]):
    """The choice for each topic that is asked for by `[...]`."""

    def __init__(
        self,
        sizes: BatchSizes,
        is_adaptive: bool,
        rng: random.Random,
        room_of: RoomOf,
        ignores_keys: bool = False,
    ) -> None:
        super().__init__()
        self._ignores_keys = ignores_keys
        self._room_of = room_of
        self._sizes = sizes
        self._is_adaptive = is_adaptive
        self._rng = rng
        self.skips_nodes = False
        """Whether a node was unavailable in the last turn of the Sender, which sets it."""

    def __missing__(self, topic: str) -> StickyPartitioner:
        # if several threads ask at once, the first one is kept
        made = StickyPartitioner(topic, self._sizes, self._is_adaptive, self._rng, self._room_of)
        return self.setdefault(topic, made)

    def choose(self, topic: str, cluster: Cluster, key: bytes | None, size: int) -> int:
        """Return the partition of a record of `size` bytes."""
        count = cluster.partition_count_for_topic(topic) or 1
        if key is not None and not self._ignores_keys:
            return partition_for_key(key, count)
        return self[topic].take(size, cluster, count)

    def loaded(self, queued: Set[str]) -> set[str]:
        """Return the topics in which the choice depends on the loads of the partitions now. Those are among `queued`,
        the topics with queued batches, unless a node is to be skipped. Sender thread.
        """
        if not self._is_adaptive:
            return set()
        return set(self) if self.skips_nodes else {topic for topic in queued if topic in self}

    def update_loads(self, topic: str, queue_sizes: Mapping[int, int], available_count: int) -> None:
        """As `StickyPartitioner.update_loads`. Ignores topics without a partitioner."""
        if (partitioner := self.get(topic)) is not None:
            partitioner.update_loads(queue_sizes, available_count)


class NodeAvailability:
    """The brokers that keep taking requests (partitioner.availability.timeout.ms). Sender thread.

    A node with records to send is unavailable if it was not ready for `timeout_ms`; 0 turns this off.
    """

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._waiting_since_ms: dict[int, int] = {}

    def update(self, node_id: int, is_ready: bool, now_ms: int) -> None:
        """Note whether a node with records to send takes a request now."""
        if is_ready:
            self._waiting_since_ms.pop(node_id, None)
        else:
            self._waiting_since_ms.setdefault(node_id, now_ms)

    def keep(self, waiting: Set[int]) -> None:
        """Forget all other nodes: no records wait for them, so they may be tried again."""
        if self._waiting_since_ms:
            for node_id in self._waiting_since_ms.keys() - waiting:
                del self._waiting_since_ms[node_id]

    def unavailable(self, now_ms: int) -> Set[int]:
        if self._timeout_ms == 0 or not self._waiting_since_ms:
            return frozenset()
        return {
            node_id for node_id, since_ms in self._waiting_since_ms.items() if now_ms - since_ms >= self._timeout_ms
        }
