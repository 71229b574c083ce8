"""Records on their way into batches: a queue for each partition, and the rules of when a batch is sent.

Application threads append; the Sender thread asks for ready nodes and drains batches. One lock guards all queues, and
is held only for decisions: waiting for memory, encoding and callbacks happen outside it. Reference:
org.apache.kafka.clients.producer.internals.RecordAccumulator.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.cluster import Cluster, Node, TopicPartition
from spark_kafka_sink.common.errors import KafkaError, ProducerClosedError
from spark_kafka_sink.producer.buffer_pool import BufferPool, Grant, SharedAllocation
from spark_kafka_sink.producer.futures import Harmless, Headers, RecordThunk, RunCallback
from spark_kafka_sink.producer.producer_batch import BatchSizes, ProducerBatch, split_batch
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.block import Block, RunTable


class DrainRules(Protocol):
    """The seam between batches and their sequence numbers.

    The accumulator calls it under its lock. It must not call the accumulator.
    """

    @property
    def is_completing(self) -> bool:
        """Whether a transaction is ending, so that batches do not linger."""
        ...

    def must_wait(self, batch: ProducerBatch) -> bool:
        """Return whether the batch must wait, to keep the order."""
        ...

    def batch_in_turn(self, first: ProducerBatch) -> ProducerBatch:
        """Return the batch to send again next. `first` is the first one in its queue, and was sent before."""
        ...

    def on_drain(self, batch: ProducerBatch) -> None:
        """Give the batch, which is about to be sent, its sequence if it has none."""
        ...

    def on_split_part(self, part: ProducerBatch) -> None:
        """Note a part of a split batch, which is queued with the sequence of its records."""
        ...


class NoDrainRules:
    """The rules without idempotence: no batch waits."""

    is_completing = False

    def must_wait(self, batch: ProducerBatch) -> bool:  # noqa: ARG002
        return False

    def batch_in_turn(self, first: ProducerBatch) -> ProducerBatch:
        return first

    def on_drain(self, batch: ProducerBatch) -> None:
        """Do nothing."""

    def on_split_part(self, part: ProducerBatch) -> None:
        """Do nothing."""


class PartitionQueue:
    """The batches of a partition in the order of sending: retries first, the open batch last."""

    __slots__ = ("batches", "is_muted", "topic_partition")

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self.batches: deque[ProducerBatch] = deque()
        self.is_muted = False

    @property
    def open_batch(self) -> ProducerBatch | None:
        """The batch that takes records, or None."""
        last = self.batches[-1] if self.batches else None
        return last if last is not None and last.is_open else None

    @property
    def is_full(self) -> bool:
        """Whether there is a batch that takes no more records."""
        return len(self.batches) > 1 or (bool(self.batches) and self.batches[0].is_full)

    def forget_uncounted(self) -> None:
        """Remove the rest of an append that ended early, and a batch that it made."""
        if self.batches and self.batches[-1].record_count == 0:
            self.batches.pop()
        elif self.batches:
            self.batches[-1].forget_uncounted()

    def take(self, batch: ProducerBatch) -> None:
        """Remove a batch, nearly always the first one."""
        if self.batches[0] is batch:
            self.batches.popleft()
        else:
            self.batches.remove(batch)

    def put_back(self, batch: ProducerBatch) -> None:
        """Queue a batch again, before all batches that were first sent later.

        Batches that were never sent have no ordinal and come last.
        """
        if not batch.ordinal:
            self.batches.appendleft(batch)
            return
        earlier: list[ProducerBatch] = []
        while self.batches and self.batches[0].ordinal and self.batches[0].ordinal < batch.ordinal:
            earlier.append(self.batches.popleft())
        self.batches.appendleft(batch)
        self.batches.extendleft(reversed(earlier))


class PartitionQueues(dict[TopicPartition, PartitionQueue]):
    """A queue for each partition that is asked for by `[...]`. `get` makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: dict[TopicPartition, PartitionQueue] = {}
        """All queues with batches, and maybe others: those that were drained last come last. The Sender looks only at
        these in its turns, because a producer may have written to thousands of other partitions before.
        """
        self._cluster: Cluster | None = None
        self._asked: set[str] = set()
        """The topics that `sizes` was asked for last."""

    def __missing__(self, topic_partition: TopicPartition) -> PartitionQueue:
        queue = self[topic_partition] = PartitionQueue(topic_partition)
        return queue

    def append(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        self.queued[queue.topic_partition] = queue  # first, because Ctrl-C may come in between
        queue.batches.append(batch)

    def put_back(self, batch: ProducerBatch) -> None:
        queue = self.queued[batch.topic_partition] = self[batch.topic_partition]
        queue.put_back(batch)

    def drop_emptied(self, emptied: Iterable[TopicPartition]) -> None:
        """Note that these queues have no batches."""
        for topic_partition in emptied:
            del self.queued[topic_partition]

    def move_back(self, drained: Iterable[TopicPartition]) -> None:
        """Note that these queues were drained, so that the next turn is that of the others."""
        for topic_partition in drained:
            self.queued[topic_partition] = self.queued.pop(topic_partition)

    def forget_idle(self, cluster: Cluster) -> None:
        """Forget the empty queues of topics that metadata has forgotten, if `cluster` is new.

        Else a producer that writes to ever new topics would keep them all. A batch that is queued again gets a new
        queue.
        """
        if cluster is self._cluster:
            return
        self._cluster, leaders = cluster, cluster.leaders
        idle = [
            each for each, queue in self.items() if each not in leaders and not queue.batches and not queue.is_muted
        ]
        for topic_partition in idle:
            del self[topic_partition]

    def sizes(self, topics: set[str], cluster: Cluster) -> dict[str, dict[int, int]]:
        """Return the batches of each partition with a leader of `topics`, and of the topics that were asked for last:
        they may have none now.
        """
        before, self._asked = self._asked, topics
        found: dict[str, dict[int, int]] = {}
        for topic in before | topics:
            numbers = [info.partition for info in cluster.available_partitions_for_topic(topic)]
            queues = zip(numbers, (self.get((topic, each)) for each in numbers), strict=True)  # type: ignore[call-overload]
            found[topic] = {number: len(queue.batches) for number, queue in queues if queue is not None}
        return found


class IncompleteBatches:
    """The batches that have not ended, for flush, expiry and close. Guarded by the lock of the accumulator.

    They are in the order of creation, so that the first is the first to expire.
    """

    def __init__(self, delivery_timeout_ms: int) -> None:
        self._delivery_timeout_ms = delivery_timeout_ms
        self._batches: dict[ProducerBatch, None] = {}
        self._parts: set[ProducerBatch] = set()

    def __iter__(self) -> Iterator[ProducerBatch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: ProducerBatch) -> None:
        self._batches[batch] = None

    def replace(self, batch: ProducerBatch, parts: Iterable[ProducerBatch]) -> None:
        """Replace `batch` by `parts`, which are as old as the batch, and so break the order."""
        self.remove(batch)
        for part in parts:
            self._batches[part] = None
            self._parts.add(part)

    def remove(self, batch: ProducerBatch) -> None:
        self._batches.pop(batch, None)
        self._parts.discard(batch)

    def forget_uncounted(self, queue: PartitionQueue) -> None:
        """Remove the rest of an append to `queue` that ended early, and a batch that it made. May be called again."""
        empty = [each for each in self._batches if each.record_count == 0]
        made = [each for each in empty if each.topic_partition == queue.topic_partition]
        for batch in made:
            del self._batches[batch]
        queue.forget_uncounted()

    def unfilled(self, allocation: SharedAllocation) -> dict[ProducerBatch, None]:
        """Return the batches without records, and those that lack the bytes of rows in this memory."""
        return {each: None for each in self._batches if each.record_count == 0 or each.lacks_bytes_of(allocation)}

    def next_expiry_ms(self) -> int:
        """Return when the first batch that has not ended reaches delivery.timeout.ms.

        A batch that is being filled does not expire; the thread that fills it wakes the Sender.
        """
        first_ms: int | None = None
        for batch in self._batches:
            if _can_expire(batch) and (first_ms is None or batch.created_ms < first_ms):
                first_ms = batch.created_ms
                if not self._parts:
                    break
        return FOREVER_MS if first_ms is None else first_ms + self._delivery_timeout_ms

    def expired(self, now_ms: int) -> list[ProducerBatch]:
        """Return the batches that have reached it and have not ended, queued or in flight."""
        if now_ms < self.next_expiry_ms():
            return []
        return [
            batch
            for batch in self._batches
            if _can_expire(batch) and batch.has_reached_delivery_timeout(self._delivery_timeout_ms, now_ms)
        ]


def _can_expire(batch: ProducerBatch) -> bool:
    """Return whether the batch can expire.

    A batch with an outcome waits only for the end of its request, or a fault kept its memory.
    """
    return batch.is_filled and not (batch.is_done and batch.is_in_flight)


@dataclass(slots=True)
class ReadyCheck:
    """The nodes to send to now, and when to check again. Made under the lock of the accumulator."""

    ready_nodes: dict[int, Node] = field(default_factory=dict)
    next_check_delay_ms: int = FOREVER_MS
    waiting_nodes: set[int] = field(default_factory=set)
    """The leaders of partitions with queued batches."""
    unknown_leader_topics: set[str] = field(default_factory=set)
    queue_sizes: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Topic → partition with a leader → queued batches: the load for KIP-794. Only the topics that `ready` was
    asked for, now or in the last check.
    """

    def consider(self, leader: Node, queue: PartitionQueue, in_a_hurry: bool, linger_ms: int, now_ms: int) -> None:
        """Add `leader` to the ready nodes if the first batch of `queue` goes now, else note when it will go."""
        batch = queue.batches[0]
        if batch.is_backing_off(now_ms):
            self.next_check_delay_ms = min(self.next_check_delay_ms, batch.retry_at_ms - now_ms)
            return
        lingered_ms = batch.waited_ms(now_ms)
        if in_a_hurry or queue.is_full or lingered_ms >= linger_ms:
            self.ready_nodes[leader.id] = leader
        else:
            self.next_check_delay_ms = min(self.next_check_delay_ms, linger_ms - lingered_ms)


LeaderEpochs = Callable[[TopicPartition], int | None]
LoadedTopics = Callable[[set[str]], set[str]]
"""Takes the topics with queued batches. Returns the topics whose loads are to be counted."""


class RecordAccumulator:
    """The queues of batches, by topic-partition."""

    def __init__(
        self,
        *,
        sizes: BatchSizes,
        linger_ms: int,
        delivery_timeout_ms: int,
        retry_backoff: ExponentialBackoff,
        pool: BufferPool,
        drain_rules: DrainRules,
    ) -> None:
        self.sizes = sizes
        self.pool = pool
        self._linger_ms = linger_ms
        self._retry_backoff = retry_backoff
        self._rules = drain_rules
        self._lock = threading.Lock()
        self._queues = PartitionQueues()
        self._incomplete = IncompleteBatches(delivery_timeout_ms)
        self._flushes: set[object] = set()
        self._closed = False

    def __repr__(self) -> str:
        with self._lock:
            queued = sum(len(queue.batches) for queue in self._queues.values())
            return f"RecordAccumulator({queued} batches queued, {len(self._incomplete)} incomplete)"

    # ---- append: application threads -------------------------------------------------------------------------------

    def append_row(
        self,
        topic_partition: TopicPartition,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int,
        size: int,
        thunk: RecordThunk,
        max_block_ms: int,
        now_ms: int,
    ) -> bool:
        """Add one record of at most `size` encoded bytes. Its time starts when it has its memory.

        Returns True if the Sender must look: there is a new batch, or a full one. Raises BufferExhaustedError if memory
        is short for `max_block_ms`, and ProducerClosedError after a close.
        """
        grant = Grant()
        try:
            now_ms += self.pool.allocate(size, max_block_ms, grant)
            with self._lock:
                try:
                    queue = self._queues[topic_partition]
                    if self._closed:
                        raise ProducerClosedError("The producer was closed while a record was being sent.")
                    batch = queue.open_batch
                    created = batch is None or not batch.has_room_for(size)
                    if batch is None or created:
                        batch = self._open_new_batch(queue, timestamp_ms, now_ms)
                    batch.append_row(key, value, headers, timestamp_ms, size, thunk, grant)
                except BaseException:
                    try:
                        self._incomplete.forget_uncounted(self._queues[topic_partition])
                    except BaseException:  # Ctrl-C came once more
                        self._incomplete.forget_uncounted(self._queues[topic_partition])
                        raise
                    raise
                return created or queue.is_full
        except BaseException:
            self.pool.take_back(grant)
            raise

    def append_block(
        self,
        topic: str,
        block: Block,
        groups: Iterable[tuple[int, int, int]],
        on_completion: RunCallback | None,
        max_block_ms: int,
        now_ms: int,
    ) -> None:
        """Add the rows of `block`; `groups` are (partition, first row, end row), ascending by row.

        Room for every run of rows is reserved first. Then the block is encoded once, and each run gets its slice. All
        rows of the block share its memory, which is given back when the last batch with rows of it has ended. Raises as
        `append_row`.
        """
        block_size = block.size(0, block.num_rows)
        grant = Grant()
        allocation = SharedAllocation(lambda: self.pool.take_back(grant), holder=grant)
        try:
            now_ms += self.pool.allocate(block_size, max_block_ms, grant)
            with self._lock:
                runs, places = self._reserve_runs(topic, block, groups, allocation, on_completion, now_ms)
            self._fill_runs(block, runs, places)
        except BaseException as cause:
            try:
                self._drop_unfilled(allocation, cause)
            except BaseException:  # Ctrl-C came once more
                self._drop_unfilled(allocation, cause)
                raise
            raise
        finally:
            try:
                allocation.release(grant)
            except BaseException:  # Ctrl-C came
                allocation.release(grant)
                raise

    def _reserve_runs(
        self,
        topic: str,
        block: Block,
        groups: Iterable[tuple[int, int, int]],
        allocation: SharedAllocation,
        on_completion: RunCallback | None,
        now_ms: int,
    ) -> tuple[RunTable[int], list[tuple[ProducerBatch, int, int]]]:
        """Reserve room for every run. Return the runs, and for each its batch, place and reserved bytes.

        The caller holds the lock.
        """
        if self._closed:
            raise ProducerClosedError("The producer was closed while records were being sent.")
        runs: RunTable[int] = array("q")
        places: list[tuple[ProducerBatch, int, int]] = []
        known, ends = self._queues.get, block.ends
        for partition, start, end in groups:  # for every partition of every block: avoid calls
            queue = known((topic, partition)) or self._queues[TopicPartition(topic, partition)]  # type: ignore[call-overload]
            while start < end:
                batch = queue.batches[-1] if queue.batches else None
                stop, size = end, ends[end] - ends[start]
                if batch is None or size > batch.room:
                    batch, stop = self._fit(queue, block, start, end, now_ms)
                    size = ends[stop] - ends[start]
                runs.extend((start, stop, batch.record_count, batch.base_timestamp_ms))
                places.append((batch, batch.reserve_run(stop - start, size, allocation, on_completion), size))
                start = stop
        return runs, places

    def _fit(self, queue: PartitionQueue, block: Block, start: int, end: int, now_ms: int) -> tuple[ProducerBatch, int]:
        """Return the batch for row `start`, and the end of the rows that fit into it, at most `end`."""
        batch = queue.open_batch
        if batch is not None and (stop := block.last_fitting(start, end, batch.room)) > start:
            return batch, stop
        batch = self._open_new_batch(queue, block.timestamp_ms(start), now_ms)
        return batch, max(start + 1, block.last_fitting(start, end, batch.room))

    def _fill_runs(self, block: Block, runs: RunTable[int], places: list[tuple[ProducerBatch, int, int]]) -> None:
        chunks, latest = block.encode(runs)
        with self._lock:
            for (batch, place, size), chunk, latest_ms in zip(places, chunks, latest, strict=True):
                batch.fill_run(place, chunk, latest_ms, block.largest_record, size)

    def room(self, topic_partition: TopicPartition) -> int:
        """Return the room of the open batch of the partition, or 0 without an open batch."""
        with self._lock:
            queue = self._queues.get(topic_partition)
            return 0 if queue is None or queue.open_batch is None else queue.open_batch.room

    def _open_new_batch(self, queue: PartitionQueue, base_timestamp_ms: int, now_ms: int) -> ProducerBatch:
        if (previous := queue.open_batch) is not None:
            previous.close_for_appends()
        capacity = self.sizes.capacity(queue.topic_partition.topic) + HEADER_SIZE
        batch = ProducerBatch(queue.topic_partition, base_timestamp_ms, capacity, now_ms)
        self._incomplete.add(batch)  # first, because a batch that is only queued would never end
        self._queues.append(queue, batch)
        return batch

    # ---- ready and drain: the Sender thread ------------------------------------------------------------------------

    def ready(self, cluster: Cluster, leader_epoch_of: LeaderEpochs, loaded: LoadedTopics, now_ms: int) -> ReadyCheck:
        """Return the nodes that have a batch to send now, and the loads of the topics `loaded`.

        A partition can be sent to its leader if its first batch is full or has lingered, memory is exhausted, a flush
        or close is in progress, or a transaction is ending. It must be neither muted nor backing off.
        """
        check = ReadyCheck()
        leaders, ready_nodes = cluster.leaders, check.ready_nodes
        topics: set[str] = set()
        emptied: list[TopicPartition] = []
        with self._lock:
            hurry = self.pool.queued > 0 or self._closed or bool(self._flushes) or self._rules.is_completing
            for topic_partition, queue in self._queues.queued.items():  # for many partitions in every turn: avoid calls
                batches = queue.batches
                if not batches:
                    emptied.append(topic_partition)
                    continue
                topic = topic_partition[0]
                topics.add(topic)
                leader = leaders.get(topic_partition)
                if leader is None:
                    check.unknown_leader_topics.add(topic)
                    continue
                if leader.id in ready_nodes:
                    continue
                check.waiting_nodes.add(leader.id)
                batch = batches[0]
                batch.maybe_update_leader_epoch(leader_epoch_of(topic_partition))
                if batch.is_filled and not queue.is_muted:
                    check.consider(leader, queue, hurry, self._linger_ms, now_ms)
            self._queues.drop_emptied(emptied)
            self._queues.forget_idle(cluster)
            check.queue_sizes = self._queues.sizes(loaded(topics), cluster)
        return check

    def drain(
        self, cluster: Cluster, nodes: Iterable[Node], max_size: int, leader_epoch_of: LeaderEpochs, now_ms: int
    ) -> dict[int, list[ProducerBatch]]:
        """Return the batches of each node, one or up to `max_size` expected bytes: closed, in order, with sequences."""
        drained: dict[int, list[ProducerBatch]] = {}
        for node in nodes:
            with self._lock:
                batches = self._drain_node(cluster, node, max_size, leader_epoch_of, now_ms)
            if batches:
                drained[node.id] = batches
        return drained

    def _drain_node(
        self, cluster: Cluster, node: Node, max_size: int, leader_epoch_of: LeaderEpochs, now_ms: int
    ) -> list[ProducerBatch]:
        """Drain one node, first the partition that has waited longest. The caller holds the lock."""
        leaders, node_id = cluster.leaders, node.id
        batches: list[ProducerBatch] = []
        size = 0
        for topic_partition, queue in self._queues.queued.items():
            leader = leaders.get(topic_partition)
            if leader is None or leader.id != node_id or queue.is_muted or not queue.batches:
                continue
            batch = queue.batches[0]
            batch.maybe_update_leader_epoch(leader_epoch_of(topic_partition))
            if batch.attempts:
                batch = self._rules.batch_in_turn(batch)
            if not batch.is_filled or (batch.attempts and batch.is_backing_off(now_ms)):
                continue
            batch_size = self.sizes.on_wire(batch)
            if batches and size + batch_size > max_size:
                break
            if self._rules.must_wait(batch):
                continue
            batch.is_in_flight = True
            queue.take(batch)
            batch.close_for_appends()
            self._rules.on_drain(batch)
            batch.drained_ms = now_ms
            size += batch_size
            batches.append(batch)
        self._queues.move_back(batch.topic_partition for batch in batches)
        return batches

    def reenqueue(self, batch: ProducerBatch, error: KafkaError, now_ms: int) -> None:
        """Queue a batch again after an attempt that failed with `error`, in its place by sequence."""
        retry_at_ms = now_ms + self._retry_backoff.backoff_ms(batch.attempts)
        with self._lock:
            batch.mark_attempt(error, now_ms, retry_at_ms)
            self._queues.put_back(batch)
        batch.is_in_flight = False

    def withdraw(self, batch: ProducerBatch) -> None:
        """Remove a batch that was queued again, and need not be sent again."""
        with self._lock:
            self._queues[batch.topic_partition].take(batch)

    def split_and_reenqueue(self, batch: ProducerBatch, now_ms: int) -> list[ProducerBatch]:
        """Replace a batch that is too large for the broker by parts of at most half its size, in its place."""
        self.sizes.refused(batch.topic_partition.topic)
        parts = split_batch(batch, now_ms)
        with self._lock:
            memory = SharedAllocation(lambda: batch.give_memory_back(self.pool), holder=parts[0])
            for part in parts:
                part.share_memory(memory)
            batch.forget_records()
            self._incomplete.replace(batch, parts)
            for part in reversed(parts):
                self._queues.put_back(part)
            for part in parts:
                self._rules.on_split_part(part)
        batch.result.mark_done()
        batch.is_in_flight = False
        return parts

    def mute(self, topic_partition: TopicPartition) -> None:
        """Drain no batch of the partition until `unmute`."""
        with self._lock:
            self._queues[topic_partition].is_muted = True

    def unmute(self, topic_partition: TopicPartition) -> None:
        with self._lock:
            self._queues[topic_partition].is_muted = False

    # ---- expiry, flush, close --------------------------------------------------------------------------------------

    def expired_batches(self, now_ms: int) -> list[ProducerBatch]:
        """Return the batches whose delivery.timeout.ms is over. Those that are not in flight leave their queues."""
        with self._lock:
            if expired := self._incomplete.expired(now_ms):
                self._unqueue(dict.fromkeys(expired))
        return expired

    def next_expiry_ms(self) -> int:
        """Return when the next batch, queued or in flight, reaches its delivery timeout."""
        with self._lock:
            return self._incomplete.next_expiry_ms()

    def _unqueue(self, batches: Mapping[ProducerBatch, None]) -> None:
        """Remove `batches` from their queues and close them. The caller holds the lock."""
        for queue in {batch.topic_partition: self._queues[batch.topic_partition] for batch in batches}.values():
            kept = [batch for batch in queue.batches if batch not in batches]
            queue.batches.clear()
            queue.batches.extend(kept)
        for batch in batches:
            batch.close_for_appends()

    def deallocate(self, batch: ProducerBatch) -> None:
        """Give back the memory of a batch that has ended and is not in flight. May be called again."""
        with self._lock:
            batch.forget_records()
        batch.give_memory_back(self.pool)
        batch.is_in_flight = False
        with self._lock:
            self._incomplete.remove(batch)

    def batches_in_flight(self) -> set[ProducerBatch]:
        """Return the batches that were drained and have not come back."""
        with self._lock:
            return {batch for batch in self._incomplete if batch.is_in_flight}

    @property
    def has_undrained(self) -> bool:
        with self._lock:
            return any(queue.batches for queue in self._queues.queued.values())

    @property
    def has_incomplete(self) -> bool:
        return len(self._incomplete) > 0

    def flush(self, begun: Callable[[], None], wait: Callable[[ProducerBatch], bool]) -> bool:
        """Let batches go without lingering until this returns. Call `begun`, then `wait` for each incomplete batch,
        also for the parts of split ones. Returns False as soon as `wait` returns False.
        """
        flush = object()
        try:
            self._flushes.add(flush)  # without the lock: Ctrl-C in a wait for it would leave the flush in the set
            begun()
            with self._lock:
                pending = list(self._incomplete)
            while pending:
                batch = pending.pop()
                if not wait(batch):
                    return False
                pending.extend(batch.split_parts)
            return True
        finally:
            self._flushes.discard(flush)

    def abort_incomplete(self, error: KafkaError) -> None:
        """Fail all records that are not acknowledged, in flight or not."""
        with self._lock:
            batches = dict.fromkeys(self._incomplete)
        self._drop(batches, error)

    def abort_undrained(self, error: KafkaError) -> None:
        """Fail all records that were not sent, for a transaction that is aborted."""
        with self._lock:
            batches = dict.fromkeys(each for each in self._incomplete if not (each.is_in_flight or each.has_sequence))
        self._drop(batches, error)

    def give_up(self, batch: ProducerBatch, error: KafkaError) -> None:
        """Fail `batch` and its parts, if they have not ended, and give their memory back."""
        self._drop(dict.fromkeys((batch, *batch.split_parts)), error)

    def _drop_unfilled(self, allocation: SharedAllocation, cause: BaseException) -> None:
        """Drop the batches without bytes after an append that ended early. They could neither be sent nor expire."""
        with self._lock:
            batches = self._incomplete.unfilled(allocation)
        why = f"The send_columns call whose rows shared a batch with these ended with {type(cause).__name__}: {cause}"
        self._drop(batches, KafkaError(why), Exception)  # on the thread of the caller, so Ctrl-C is raised

    def _drop(self, batches: dict[ProducerBatch, None], error: KafkaError, harmless: Harmless = BaseException) -> None:
        """Fail `batches`. An exception of a callback that is not `harmless` is raised when all have ended."""
        try:
            self._drop_once(batches, error, harmless)
        except BaseException:
            self._drop_once(batches, error, BaseException)  # the steps that a fault skipped
            raise

    def _drop_once(self, batches: dict[ProducerBatch, None], error: KafkaError, harmless: Harmless) -> None:
        with self._lock:
            self._unqueue(batches)
        with ExitStack() as last_first:
            for batch in reversed(batches):
                last_first.callback(self.deallocate, batch)
                last_first.callback(batch.fail, error, harmless=harmless)

    def close(self) -> None:
        """Refuse appends from now on. Queued batches go without lingering."""
        with self._lock:
            self._closed = True
        self.pool.close()
