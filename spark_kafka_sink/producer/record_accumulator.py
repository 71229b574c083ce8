"""Records on their way to becoming batches: a queue per partition, and the rules of when a batch goes.

Application threads append; the Sender thread asks what is ready and drains it. One lock guards all queues and is held
only to decide: memory is waited for, blocks are encoded and callbacks run outside it. Reference:
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
    """Called under the accumulator's lock; must not call back into the accumulator."""

    @property
    def is_completing(self) -> bool:
        """A transaction is ending, so that nothing lingers."""
        ...

    def must_wait(self, batch: ProducerBatch) -> bool:
        """The batch may not be sent yet, for the sake of order."""
        ...

    def on_drain(self, batch: ProducerBatch) -> None:
        """The batch is about to be sent: give it its sequence if it has none."""
        ...

    def on_split_part(self, part: ProducerBatch) -> None:
        """A part of a split batch is queued with the sequence that its records had."""
        ...


class NoDrainRules:
    """Without idempotence every batch goes as it comes."""

    is_completing = False

    def must_wait(self, batch: ProducerBatch) -> bool:  # noqa: ARG002
        return False

    def on_drain(self, batch: ProducerBatch) -> None:
        """Nothing to give it."""

    def on_split_part(self, part: ProducerBatch) -> None:
        """Nothing to keep of it."""


class PartitionQueue:
    """Batches in the order in which they are to be sent: those that came back first, the one still filling last."""

    __slots__ = ("batches", "is_muted", "topic_partition")

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self.batches: deque[ProducerBatch] = deque()
        self.is_muted = False

    @property
    def open_batch(self) -> ProducerBatch | None:
        """The batch that takes records, if there is one."""
        last = self.batches[-1] if self.batches else None
        return last if last is not None and last.is_open else None

    @property
    def is_full(self) -> bool:
        """There is a batch to send that will grow no more."""
        return len(self.batches) > 1 or (bool(self.batches) and self.batches[0].is_full)

    def forget_uncounted(self) -> None:
        """An append of a row ended early: nothing is left of it, nor of a batch that it made."""
        if self.batches and self.batches[-1].record_count == 0:
            self.batches.pop()
        elif self.batches:
            self.batches[-1].forget_uncounted()

    def put_back(self, batch: ProducerBatch) -> None:
        """Queue a batch that came back, before all that were first sent later. Batches never sent have no ordinal and
        come last.
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
    """A queue for each partition that is asked for by `[...]`; none is made by `get`."""

    def __missing__(self, topic_partition: TopicPartition) -> PartitionQueue:
        queue = self[topic_partition] = PartitionQueue(topic_partition)
        return queue

    def let_go(self, idle: Iterable[TopicPartition]) -> None:
        """Forget these queues, which are empty, of topics that metadata has forgotten: a producer that writes to ever
        new topics would look at them all in every turn. A batch that comes back has one made for it.
        """
        for topic_partition in idle:
            del self[topic_partition]


class IncompleteBatches:
    """In the order in which they were made, so that the first is the first to expire."""

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
        """`parts` stand for `batch` from now on. They are as old as it was, and so break the order."""
        self.remove(batch)
        for part in parts:
            self._batches[part] = None
            self._parts.add(part)

    def remove(self, batch: ProducerBatch) -> None:
        self._batches.pop(batch, None)
        self._parts.discard(batch)

    def remove_empty(self, topic_partition: TopicPartition) -> None:
        """The partition's batch that an append made and put nothing into, for it ended early."""
        empty = [each for each in self._batches if each.record_count == 0 and each.topic_partition == topic_partition]
        for batch in empty:
            del self._batches[batch]

    def next_expiry_ms(self) -> int:
        """When the first batch that has not ended reaches delivery.timeout.ms. One that is still being filled does not
        expire; the thread that fills it wakes the Sender.
        """
        first_ms: int | None = None
        for batch in self._batches:
            if _can_expire(batch) and (first_ms is None or batch.created_ms < first_ms):
                first_ms = batch.created_ms
                if not self._parts:
                    break
        return FOREVER_MS if first_ms is None else first_ms + self._delivery_timeout_ms

    def expired(self, now_ms: int) -> list[ProducerBatch]:
        """Those that have reached it and not ended, queued or in flight."""
        if now_ms < self.next_expiry_ms():
            return []
        return [
            batch
            for batch in self._batches
            if _can_expire(batch) and batch.has_reached_delivery_timeout(self._delivery_timeout_ms, now_ms)
        ]


def _can_expire(batch: ProducerBatch) -> bool:
    """One with an outcome only waits for the end of its request, or a fault kept it from giving its memory back."""
    return batch.is_filled and not (batch.is_done and batch.is_in_flight)


@dataclass(slots=True)
class ReadyCheck:
    """What can be sent, and when to look again."""

    ready_nodes: dict[int, Node] = field(default_factory=dict)
    next_check_delay_ms: int = FOREVER_MS
    waiting_nodes: set[int] = field(default_factory=set)
    """Leaders of partitions that have batches queued, to be sent now or later."""
    unknown_leader_topics: set[str] = field(default_factory=set)
    queue_sizes: dict[str, dict[int, int]] = field(default_factory=dict)
    """Topic → partition with a leader → batches queued: the load by which KIP-794 chooses."""

    def consider(self, leader: Node, queue: PartitionQueue, in_a_hurry: bool, linger_ms: int, now_ms: int) -> None:
        """Count `leader` as ready when the first batch of `queue` is to go now, else note when it will be."""
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


class RecordAccumulator:
    """Queues of batches by topic-partition."""

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
        self._drain_index: dict[int, int] = {}
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
        """Add one record of at most `size` encoded bytes; its time starts when it has its memory. True when the Sender
        is to look at it: there is a new batch, or a full one.

        Raises BufferExhaustedError when memory stays short for `max_block_ms`, ProducerClosedError once closed.
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
                    self._incomplete.remove_empty(topic_partition)
                    self._queues[topic_partition].forget_uncounted()
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

        Room is taken first for every run of rows, then the block is encoded once, then each run gets its slice. All
        rows of the block share its memory, given back when the last batch with rows of it has ended. Raises as
        `append_row` does.
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
            self._drop_unfilled(allocation, cause)
            raise
        finally:
            try:
                allocation.release(grant)
            except BaseException:  # Ctrl-C in there
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
        """Take room for every run; returns the runs, and for each its batch, place and reserved bytes. Caller holds
        the lock.
        """
        if self._closed:
            raise ProducerClosedError("The producer was closed while records were being sent.")
        runs: RunTable[int] = array("q")
        places: list[tuple[ProducerBatch, int, int]] = []
        for partition, start, end in groups:
            queue = self._queues[TopicPartition(topic, partition)]
            while start < end:
                batch, stop, size = queue.open_batch, end, block.size(start, end)
                if batch is None or size > batch.room:
                    stop = start if batch is None else block.last_fitting(start, end, batch.room)
                    if batch is None or stop == start:
                        batch = self._open_new_batch(queue, block.timestamp_ms(start), now_ms)
                        stop = max(start + 1, block.last_fitting(start, end, batch.room))
                    size = block.size(start, stop)
                runs.extend((start, stop, batch.record_count, batch.base_timestamp_ms))
                places.append((batch, batch.reserve_run(stop - start, size, allocation, on_completion), size))
                start = stop
        return runs, places

    def _fill_runs(self, block: Block, runs: RunTable[int], places: list[tuple[ProducerBatch, int, int]]) -> None:
        chunks, latest = block.encode(runs)
        with self._lock:
            for (batch, place, size), chunk, latest_ms in zip(places, chunks, latest, strict=True):
                batch.fill_run(place, chunk, latest_ms, block.largest_record, size)

    def room(self, topic_partition: TopicPartition) -> int:
        """The bytes that the partition's open batch has room for; 0 where no batch is open."""
        with self._lock:
            queue = self._queues.get(topic_partition)
            batch = None if queue is None else queue.open_batch
            return 0 if batch is None else batch.room

    def _open_new_batch(self, queue: PartitionQueue, base_timestamp_ms: int, now_ms: int) -> ProducerBatch:
        previous = queue.open_batch
        if previous is not None:
            previous.close_for_appends()
        capacity = self.sizes.capacity(queue.topic_partition.topic) + HEADER_SIZE
        batch = ProducerBatch(queue.topic_partition, base_timestamp_ms, capacity, now_ms)
        self._incomplete.add(batch)  # first: what is queued alone would have no end
        queue.batches.append(batch)
        return batch

    # ---- ready and drain: the Sender thread ------------------------------------------------------------------------

    def ready(self, cluster: Cluster, leader_epoch_of: LeaderEpochs, now_ms: int) -> ReadyCheck:
        """Which nodes have a batch to be sent now.

        A leader's partition is sendable when its first batch is full, has lingered, or when memory is exhausted, a
        flush or close is in progress, or a transaction is ending; and it is neither muted nor backing off.
        """
        check = ReadyCheck()
        leaders, ready_nodes = cluster.leaders, check.ready_nodes
        sizes: dict[int, int] = {}
        sizes_of: str | None = None
        idle: list[TopicPartition] = []
        with self._lock:
            hurry = self.pool.queued > 0 or self._closed or bool(self._flushes) or self._rules.is_completing
            for topic_partition, queue in self._queues.items():  # of every partition in every turn: no call to spare
                topic, partition = topic_partition
                leader = leaders.get(topic_partition)
                batches = queue.batches
                if leader is not None:
                    if topic is not sizes_of:
                        sizes, sizes_of = check.queue_sizes.setdefault(topic, {}), topic
                    sizes[partition] = len(batches)
                if not batches:
                    if leader is None and not queue.is_muted:
                        idle.append(topic_partition)
                    continue
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
            self._queues.let_go(idle)
        return check

    def drain(
        self, cluster: Cluster, nodes: Iterable[Node], max_size: int, leader_epoch_of: LeaderEpochs, now_ms: int
    ) -> dict[int, list[ProducerBatch]]:
        """For each node up to `max_size` expected bytes, at least one batch; closed, in order, with their sequences."""
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
        """Start after the partition at which the last drain stopped, so that none starves. Caller holds the lock."""
        partitions = cluster.partitions_for_node(node.id)
        batches: list[ProducerBatch] = []
        size = 0
        first = self._drain_index.get(node.id, 0) % len(partitions) if partitions else 0
        for index in (*range(first, len(partitions)), *range(first)):
            topic_partition = partitions[index]
            queue = self._queues.get(topic_partition)
            if queue is None or queue.is_muted or not queue.batches:
                continue
            batch = queue.batches[0]
            batch.maybe_update_leader_epoch(leader_epoch_of(topic_partition))
            if not batch.is_filled or (batch.attempts and batch.is_backing_off(now_ms)):
                continue
            batch_size = self.sizes.on_wire(batch)
            if batches and size + batch_size > max_size:
                self._drain_index[node.id] = index
                return batches
            if self._rules.must_wait(batch):
                continue
            batch.is_in_flight = True
            queue.batches.popleft()
            batch.close_for_appends()
            self._rules.on_drain(batch)
            batch.drained_ms = now_ms
            size += batch_size
            batches.append(batch)
        return batches

    def reenqueue(self, batch: ProducerBatch, error: KafkaError, now_ms: int) -> None:
        """Queue a batch again after an attempt that failed with `error`, in its place by sequence."""
        retry_at_ms = now_ms + self._retry_backoff.backoff_ms(batch.attempts)
        with self._lock:
            batch.mark_attempt(error, now_ms, retry_at_ms)
            self._queues[batch.topic_partition].put_back(batch)
        batch.is_in_flight = False

    def split_and_reenqueue(self, batch: ProducerBatch, now_ms: int) -> list[ProducerBatch]:
        """Replace a batch that the broker finds too large by parts of at most half its size, in its place."""
        self.sizes.refused(batch.topic_partition.topic)
        parts = split_batch(batch, now_ms)
        with self._lock:
            memory = SharedAllocation(lambda: batch.give_memory_back(self.pool), holder=parts[0])
            for part in parts:
                part.share_memory(memory)
            batch.forget_records()
            self._incomplete.replace(batch, parts)
            queue = self._queues[batch.topic_partition]
            for part in reversed(parts):
                queue.put_back(part)
            for part in parts:
                self._rules.on_split_part(part)
        batch.result.mark_done()
        batch.is_in_flight = False
        return parts

    def mute(self, topic_partition: TopicPartition) -> None:
        """Drain nothing more of the partition until `unmute`."""
        with self._lock:
            self._queues[topic_partition].is_muted = True

    def unmute(self, topic_partition: TopicPartition) -> None:
        with self._lock:
            self._queues[topic_partition].is_muted = False

    # ---- expiry, flush, close --------------------------------------------------------------------------------------

    def expired_batches(self, now_ms: int) -> list[ProducerBatch]:
        """Batches whose delivery.timeout.ms is over; those that are not in flight are taken from their queues."""
        with self._lock:
            expired = self._incomplete.expired(now_ms)
            if expired:
                self._unqueue(dict.fromkeys(expired))
        return expired

    def next_expiry_ms(self) -> int:
        """When the next incomplete batch reaches its delivery timeout: queued or in flight."""
        with self._lock:
            return self._incomplete.next_expiry_ms()

    def _unqueue(self, batches: Mapping[ProducerBatch, None]) -> None:
        """Take `batches` from their queues and close them. Caller holds the lock."""
        for queue in {batch.topic_partition: self._queues[batch.topic_partition] for batch in batches}.values():
            kept = [batch for batch in queue.batches if batch not in batches]
            queue.batches.clear()
            queue.batches.extend(kept)
        for batch in batches:
            batch.close_for_appends()

    def deallocate(self, batch: ProducerBatch) -> None:
        """The batch has ended and is not on the wire: give its memory back. May be called again after a fault."""
        with self._lock:
            batch.forget_records()
        batch.give_memory_back(self.pool)
        batch.is_in_flight = False
        with self._lock:
            self._incomplete.remove(batch)

    def batches_in_flight(self) -> set[ProducerBatch]:
        """Those that were drained and have not come back."""
        with self._lock:
            return {batch for batch in self._incomplete if batch.is_in_flight}

    @property
    def has_undrained(self) -> bool:
        with self._lock:
            return any(queue.batches for queue in self._queues.values())

    @property
    def has_incomplete(self) -> bool:
        return len(self._incomplete) > 0

    def flush(self, begun: Callable[[], None], wait: Callable[[ProducerBatch], bool]) -> bool:
        """From now until it returns lingering batches go at once, which `begun` is told. Let `wait` wait for each batch
        that is incomplete now, and for the parts of those that were split; False once it says False.
        """
        flush = object()
        try:
            self._flushes.add(flush)  # without the lock: Ctrl-C in a wait for it would leave the flush in there
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
        """Fail everything that has not been acknowledged, on the wire or not."""
        with self._lock:
            batches = dict.fromkeys(self._incomplete)
        self._drop(batches, error)

    def abort_undrained(self, error: KafkaError) -> None:
        """Fail what has not been sent, as a transaction does that is aborted."""
        with self._lock:
            batches = dict.fromkeys(each for each in self._incomplete if not (each.is_in_flight or each.has_sequence))
        self._drop(batches, error)

    def give_up(self, batch: ProducerBatch, error: KafkaError) -> None:
        """Fail `batch` and the parts that took its place, those that have not ended, and give their memory back."""
        self._drop(dict.fromkeys((batch, *batch.split_parts)), error)

    def _drop_unfilled(self, allocation: SharedAllocation, cause: BaseException) -> None:
        """The append that holds `allocation` ended early: what it left without bytes can neither go nor expire."""
        with self._lock:
            unfilled = (each for each in self._incomplete if each.record_count == 0 or each.wants_bytes_of(allocation))
            batches = dict.fromkeys(unfilled)
        why = f"The send_columns call whose rows shared a batch with these ended with {type(cause).__name__}: {cause}"
        self._drop(batches, KafkaError(why), Exception)  # on the caller's thread, whose Ctrl-C it is

    def _drop(self, batches: dict[ProducerBatch, None], error: KafkaError, harmless: Harmless = BaseException) -> None:
        """What a callback raises that is not `harmless` is raised when all have ended."""
        try:
            self._drop_once(batches, error, harmless)
        except BaseException:
            self._drop_once(batches, error, BaseException)  # what a fault kept from it
            raise

    def _drop_once(self, batches: dict[ProducerBatch, None], error: KafkaError, harmless: Harmless) -> None:
        with self._lock:
            self._unqueue(batches)
        with ExitStack() as last_first:
            for batch in reversed(batches):
                last_first.callback(self.deallocate, batch)
                last_first.callback(batch.fail, error, harmless=harmless)

    def close(self) -> None:
        """Refuse appends from now on; what is queued goes without lingering."""
        with self._lock:
            self._closed = True
        self.pool.close()
