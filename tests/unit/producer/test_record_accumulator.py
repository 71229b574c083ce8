"""Queues of batches: what an append makes, what is ready, what is drained in which order, and returned batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from support.buffer_memory import give_back
from support.fake_clock import FakeClock
from support.scripted_broker.batches import check_batch, read_records

from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.cluster import Cluster, Node, PartitionInfo, TopicPartition
from spark_kafka_sink.common.errors import (
    BufferExhaustedError,
    KafkaError,
    NotLeaderOrFollowerError,
    ProducerClosedError,
    RecordTooLargeError,
)
from spark_kafka_sink.producer.buffer_pool import BufferPool, Grant
from spark_kafka_sink.producer.futures import FutureRecordMetadata, RecordThunk, RunMetadata
from spark_kafka_sink.producer.producer_batch import LEAST_SHARE, BatchSizes, ProducerBatch
from spark_kafka_sink.producer.record_accumulator import (
    DrainRules,
    LeaderEpochs,
    NoDrainRules,
    ReadyCheck,
    RecordAccumulator,
)
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import record_size_upper_bound

TOPIC = "flights"
NODES = (Node(0, "a", 1), Node(1, "b", 1))
LINGER_MS = 10
DELIVERY_TIMEOUT_MS = 3_000
RETRY_BACKOFF_MS = 100
ONE_RECORD = 100
"""The bytes that `append` counts for a record here."""


def place(partition: int) -> TopicPartition:
    return TopicPartition(TOPIC, partition)


def cluster_of(*leaders: int | None) -> Cluster:
    """Partitions 0, 1, … of the topic with these leaders."""
    infos = tuple(
        PartitionInfo(TOPIC, index, None if leader is None else NODES[leader]) for index, leader in enumerate(leaders)
    )
    return Cluster(nodes=NODES, partitions=infos)


def no_epochs(topic_partition: TopicPartition) -> int | None:
    return None


class Rules(NoDrainRules):
    """Drain rules that a test sets."""

    def __init__(self) -> None:
        self.waiting: set[TopicPartition] = set()
        self.is_completing = False
        self.drained: list[ProducerBatch] = []

    def must_wait(self, batch: ProducerBatch) -> bool:
        return batch.topic_partition in self.waiting

    def on_drain(self, batch: ProducerBatch) -> None:
        self.drained.append(batch)


class Rig:
    def __init__(
        self,
        batch_size: int = 1_000,
        memory: int = 100_000,
        rules: DrainRules | None = None,
        delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS,
        retry_backoff: ExponentialBackoff | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.pool = BufferPool(memory, self.clock)
        self.accumulator = RecordAccumulator(
            sizes=BatchSizes(batch_size),
            linger_ms=LINGER_MS,
            delivery_timeout_ms=delivery_timeout_ms,
            retry_backoff=retry_backoff
            or ExponentialBackoff(RETRY_BACKOFF_MS, 2, RETRY_BACKOFF_MS, 0, random.Random(1)),
            pool=self.pool,
            drain_rules=rules or NoDrainRules(),
        )

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def append(self, partition: int = 0, size: int = ONE_RECORD, value: bytes = b"v") -> FutureRecordMetadata:
        self.result, future = self.append_with_result(partition, size, value)
        return future

    def append_with_result(
        self, partition: int = 0, size: int = ONE_RECORD, value: bytes = b"v", max_block_ms: int = 0
    ) -> tuple[bool, FutureRecordMetadata]:
        future = FutureRecordMetadata(0, -1, -1)
        thunk = RecordThunk(future, None)
        result = self.accumulator.append_row(
            place(partition), None, value, (), 5, size, thunk, max_block_ms, self.now_ms
        )
        return result, future

    def ready(self, cluster: Cluster, epochs: LeaderEpochs = no_epochs) -> ReadyCheck:
        return self.accumulator.ready(cluster, epochs, lambda queued: queued, self.now_ms)

    def drain(
        self,
        cluster: Cluster,
        max_size: int = 1_000_000,
        nodes: Sequence[Node] = NODES,
        epochs: LeaderEpochs = no_epochs,
    ) -> dict[int, list[ProducerBatch]]:
        drained = self.accumulator.drain(cluster, nodes, max_size, epochs, self.now_ms)
        for batches in drained.values():
            for batch in batches:
                batch.seal(codec_for("none"))
        return drained

    def drain_one(self, cluster: Cluster | None = None) -> ProducerBatch:
        (batches,) = self.drain(cluster or cluster_of(0)).values()
        (batch,) = batches
        return batch


# ---- append ----------------------------------------------------------------------------------------------------------


def test_records_share_a_batch_until_it_has_no_room() -> None:
    rig = Rig(batch_size=250)
    results = [rig.append_with_result()[0] for _ in range(3)]
    assert results == [True, False, True]
    first = rig.drain_one()
    assert first.record_count == 2
    assert not first.is_open
    assert rig.drain_one().record_count == 1


def test_a_batch_takes_exactly_batch_size_bytes_of_records() -> None:
    rig = Rig(batch_size=200)
    rig.append()
    result, _ = rig.append_with_result()
    assert result  # full
    rig.append()
    assert [rig.drain_one().record_count for _ in range(2)] == [2, 1]


def test_record_larger_than_batch_size_gets_own_batch() -> None:
    rig = Rig(batch_size=250)
    rig.append()
    result, _ = rig.append_with_result(size=900, value=bytes(800))
    assert result
    rig.append()
    batches = [rig.drain_one() for _ in range(3)]
    assert [batch.record_count for batch in batches] == [1, 1, 1]
    assert batches[1].wire_size > 800


def test_memory_of_records_returns_with_their_batch() -> None:
    rig = Rig()
    rig.append()
    rig.append(partition=1)
    assert rig.pool.available_memory == rig.pool.total_memory - 2 * ONE_RECORD
    batch = rig.drain_one(cluster_of(0, None))
    batch.complete(0, None)
    rig.accumulator.deallocate(batch)
    assert rig.pool.available_memory == rig.pool.total_memory - ONE_RECORD
    rig.accumulator.deallocate(batch)  # once only
    assert rig.pool.available_memory == rig.pool.total_memory - ONE_RECORD


def test_without_memory_an_append_fails_and_leaves_no_batch() -> None:
    rig = Rig(memory=150)
    rig.append()
    with pytest.raises(BufferExhaustedError):
        rig.append()
    assert rig.drain_one().record_count == 1
    assert not rig.accumulator.has_undrained


def test_age_of_a_batch_begins_with_its_memory() -> None:
    """Otherwise its linger and its delivery timeout would run while there is nothing to send."""
    rig = Rig(memory=150, batch_size=1)
    rig.append()
    first = rig.drain_one()

    def answer(timeout_ms: int) -> None:
        rig.clock.advance(2_000)
        first.complete(0, None)
        rig.accumulator.deallocate(first)

    rig.clock.on_wait = answer
    rig.append_with_result(max_block_ms=60_000)
    assert rig.drain_one().created_ms == rig.now_ms
    block = Block(RecordColumns.from_rows([b"x"]), 0, 1)
    rig2 = Rig(memory=block.size(0, 1) + 10)
    rig2.accumulator.pool.allocate(20, 0, Grant())

    def give_back_later(timeout_ms: int) -> None:
        rig2.clock.advance(2_000)
        give_back(rig2.pool, 20)

    rig2.clock.on_wait = give_back_later
    rig2.accumulator.append_block(TOPIC, block, block.groups, None, 60_000, rig2.now_ms)
    assert rig2.drain_one().created_ms == rig2.now_ms


def test_closed_accumulator_accepts_nothing_and_keeps_no_memory() -> None:
    rig = Rig()
    rig.accumulator.close()
    with pytest.raises(ProducerClosedError):
        rig.append()
    block = Block(RecordColumns.from_rows([b"x"]), 0, 1)
    with pytest.raises(ProducerClosedError):
        rig.accumulator.append_block(TOPIC, block, block.groups, None, 0, rig.now_ms)
    assert rig.pool.available_memory == rig.pool.total_memory


def test_close_between_memory_and_lock_returns_memory() -> None:
    class LateClose(BufferPool):
        def allocate(self, size: int, max_block_ms: int, grant: Grant) -> int:
            waited_ms = super().allocate(size, max_block_ms, grant)
            rig.accumulator.close()
            return waited_ms

    rig = Rig()
    rig.accumulator.pool = LateClose(1_000, rig.clock)
    with pytest.raises(ProducerClosedError):
        rig.append()
    assert rig.accumulator.pool.available_memory == 1_000
    block = Block(RecordColumns.from_rows([b"x"]), 0, 1)
    rig = Rig()
    rig.accumulator.pool = LateClose(1_000, rig.clock)
    with pytest.raises(ProducerClosedError):
        rig.accumulator.append_block(TOPIC, block, block.groups, None, 0, rig.now_ms)
    assert rig.accumulator.pool.available_memory == 1_000


# ---- blocks ----------------------------------------------------------------------------------------------------------


def append_block(
    rig: Rig, values: list[bytes], partitions: list[int], runs: list[tuple[RunMetadata, object]] | None
) -> Block:
    block = Block(RecordColumns.from_rows(values), np.array(partitions, np.int32), 77)
    callback = None if runs is None else lambda run, error: runs.append((run, error))
    rig.accumulator.append_block(TOPIC, block, block.groups, callback, 0, rig.now_ms)
    return block


def test_room_is_that_of_the_batch_that_takes_records() -> None:
    rig = Rig(batch_size=3 * ONE_RECORD)
    assert rig.accumulator.room(place(0)) == 0
    rig.append()
    assert rig.accumulator.room(place(0)) == 2 * ONE_RECORD
    for _ in range(3):
        rig.append()
    assert rig.ready(cluster_of(0)).queue_sizes == {TOPIC: {0: 2}}
    assert rig.accumulator.room(place(0)) == 2 * ONE_RECORD, "of the second batch: the first is closed"
    assert rig.accumulator.room(place(1)) == 0
    rig.drain(cluster_of(0))
    rig.clock.advance(LINGER_MS)
    rig.drain(cluster_of(0))
    assert rig.accumulator.room(place(0)) == 0


def test_a_block_fills_batches_of_each_partition_in_order() -> None:
    rig = Rig(batch_size=300)
    values = [b"%02d" % index + bytes(40) for index in range(20)]
    partitions = [index % 2 for index in range(20)]
    append_block(rig, values, partitions, None)
    logs: dict[int, list[bytes | None]] = {0: [], 1: []}
    batches = 0
    while drained := rig.drain(cluster_of(0, 1)):
        for (batch,) in drained.values():
            batches += 1
            assert batch.wire_size <= 300 + HEADER_SIZE
            logs[batch.topic_partition.partition] += [r.value for r in read_records(batch.sealed_bytes())]
    assert logs == {0: values[0::2], 1: values[1::2]}
    assert batches > 4


def test_rows_that_do_not_fit_into_the_open_batch_go_into_the_next() -> None:
    rig = Rig(batch_size=300)
    values = [b"%02d" % index + bytes(40) for index in range(7)]
    append_block(rig, values[:2], [0, 0], None)
    append_block(rig, values[2:], [0] * 5, None)
    batches = [rig.drain_one(), rig.drain_one()]
    assert [[r.value for r in read_records(batch.sealed_bytes())] for batch in batches] == [values[:4], values[4:]]


def test_block_and_records_share_a_batch_in_append_order() -> None:
    rig = Rig()
    rig.append(value=b"first")
    append_block(rig, [b"second", b"third"], [0, 0], None)
    rig.append(value=b"fourth")
    batch = rig.drain_one()
    assert [r.value for r in read_records(batch.sealed_bytes())] == [b"first", b"second", b"third", b"fourth"]
    assert check_batch(batch.sealed_bytes()).max_timestamp == 77


def test_row_larger_than_a_batch_gets_its_own_batch() -> None:
    rig = Rig(batch_size=100)
    append_block(rig, [b"a", bytes(500), b"b"], [0, 0, 0], None)
    counts = [rig.drain_one().record_count for _ in range(3)]
    assert counts == [1, 1, 1]


def test_memory_of_a_block_goes_back_with_its_last_batch() -> None:
    rig = Rig()
    runs: list[tuple[RunMetadata, object]] = []
    block = append_block(rig, [b"a", b"b", b"c"], [0, 1, 1], runs)
    assert rig.pool.available_memory == rig.pool.total_memory - block.size(0, 3)
    batches = [batch for batches in rig.drain(cluster_of(0, 1)).values() for batch in batches]
    batches[0].complete(100, None)
    rig.accumulator.deallocate(batches[0])
    assert rig.pool.available_memory < rig.pool.total_memory
    batches[1].complete(200, None)
    rig.accumulator.deallocate(batches[1])
    assert rig.pool.available_memory == rig.pool.total_memory
    assert [(run.partition, run.base_offset, run.record_count) for run, _ in runs] == [(0, 100, 1), (1, 200, 2)]


def test_rows_of_several_blocks_in_a_batch_are_reported_once() -> None:
    rig = Rig()
    reported: list[tuple[int, int, int]] = []

    def callback(run: RunMetadata, _error: object) -> None:
        reported.append((run.partition, run.base_offset, run.record_count))

    for partitions in ([0, 1], [1, 1, 0], [1]):
        block = Block(RecordColumns.from_rows([b"v"] * len(partitions)), np.array(partitions, np.int32), 77)
        rig.accumulator.append_block(TOPIC, block, block.groups, callback, 0, rig.now_ms)
    for batch in (batch for batches in rig.drain(cluster_of(0, 1)).values() for batch in batches):
        batch.complete(100, None)
    assert sorted(reported) == [(0, 100, 2), (1, 100, 4)]


def test_unfilled_batch_is_not_ready_drained_or_expired() -> None:
    rig = Rig(batch_size=60)
    seen: list[object] = []
    block = Block(RecordColumns.from_rows([b"a" * 50]), 0, 1)
    older = rig.append(partition=1)
    rig.clock.advance(1)

    class Watched:
        """A block that the test inspects from the Sender's side during its encoding."""

        def __getattr__(self, name: str) -> object:
            return getattr(block, name)

        def encode(self, runs: Any) -> object:
            rig.clock.advance(DELIVERY_TIMEOUT_MS)
            seen.append(rig.ready(cluster_of(0)).ready_nodes)
            seen.append(rig.drain(cluster_of(0)))
            (expired,) = rig.accumulator.expired_batches(rig.now_ms)
            seen.append(expired.topic_partition)
            expired.fail(KafkaError("late"))
            rig.accumulator.deallocate(expired)
            seen.append(rig.accumulator.next_expiry_ms())
            return block.encode(runs)

    rig.accumulator.append_block(TOPIC, cast(Block, Watched()), block.groups, None, 0, rig.now_ms)
    assert seen == [{}, {}, place(1), FOREVER_MS]
    assert older.done()
    assert set(rig.ready(cluster_of(0)).ready_nodes) == {0}
    assert rig.drain_one().record_count == 1


def test_rows_that_cannot_be_encoded_fail_and_leave_nothing_behind() -> None:
    rig = Rig()
    block = Block(RecordColumns.from_rows([b"a"]), 0, 1)
    runs: list[tuple[RunMetadata, KafkaError | None]] = []

    class Broken:
        def __getattr__(self, name: str) -> object:
            return getattr(block, name)

        def encode(self, runs: object) -> object:
            raise MemoryError("no more")

    with pytest.raises(MemoryError):
        rig.accumulator.append_block(
            TOPIC, cast(Block, Broken()), block.groups, lambda *call: runs.append(call), 0, rig.now_ms
        )
    ((run, error),) = runs
    assert run.base_offset == -1
    assert "no more" in str(error)
    assert rig.pool.available_memory == rig.pool.total_memory
    assert not rig.accumulator.has_incomplete
    assert not rig.accumulator.has_undrained


# ---- ready -----------------------------------------------------------------------------------------------------------


def test_a_batch_lingers_before_its_node_is_ready() -> None:
    rig = Rig()
    rig.append()
    check = rig.ready(cluster_of(0))
    assert check.ready_nodes == {}
    assert check.next_check_delay_ms == LINGER_MS
    rig.clock.advance(LINGER_MS - 1)
    check = rig.ready(cluster_of(0))
    assert check.ready_nodes == {}
    assert check.next_check_delay_ms == 1
    rig.clock.advance(1)
    assert set(rig.ready(cluster_of(0)).ready_nodes) == {0}


@pytest.mark.parametrize("first", [0, 1])
def test_the_next_check_is_for_whichever_partition_is_due_first(first: int) -> None:
    rig = Rig()
    cluster = cluster_of(0, 1)
    order = (first, 1 - first)
    for partition in (0, 1):  # queues are looked at in this order
        rig.accumulator.mute(place(partition))
        rig.accumulator.unmute(place(partition))
    for partition in order:
        rig.append(partition)
        rig.clock.advance(4)
    assert rig.ready(cluster).next_check_delay_ms == LINGER_MS - 8
    rig.clock.advance(LINGER_MS)
    batches = [batch for drained in rig.drain(cluster).values() for batch in drained]
    for batch in sorted(batches, key=lambda batch: order.index(batch.topic_partition.partition)):
        rig.accumulator.reenqueue(batch, NotLeaderOrFollowerError(), rig.now_ms)
        rig.clock.advance(4)
    assert rig.ready(cluster).next_check_delay_ms == RETRY_BACKOFF_MS - 8


def test_nothing_queued_means_nothing_to_check() -> None:
    rig = Rig()
    assert rig.ready(cluster_of(0)).next_check_delay_ms == FOREVER_MS
    rig.append()
    rig.drain_one()
    check = rig.ready(cluster_of(0))
    assert (check.ready_nodes, check.next_check_delay_ms) == ({}, FOREVER_MS)


def test_a_full_batch_does_not_linger() -> None:
    rig = Rig(batch_size=2 * ONE_RECORD)
    rig.append()
    assert rig.ready(cluster_of(0)).ready_nodes == {}
    rig.append()
    assert rig.ready(cluster_of(0)).ready_nodes == {0: NODES[0]}


def while_memory_is_waited_for(rig: Rig, rules: Rules, look: Callable[[], None]) -> None:
    rig.clock.on_wait = lambda timeout_ms: [look(), rig.clock.advance(timeout_ms)]
    with pytest.raises(BufferExhaustedError):
        rig.pool.allocate(rig.pool.total_memory, 5, Grant())


def during_a_flush(rig: Rig, rules: Rules, look: Callable[[], None]) -> None:
    rig.accumulator.flush(look, lambda batch: True)


def after_a_close(rig: Rig, rules: Rules, look: Callable[[], None]) -> None:
    rig.accumulator.close()
    look()


def at_the_end_of_a_transaction(rig: Rig, rules: Rules, look: Callable[[], None]) -> None:
    rules.is_completing = True
    look()


@pytest.mark.parametrize(
    "hurry", [while_memory_is_waited_for, during_a_flush, after_a_close, at_the_end_of_a_transaction]
)
def test_nothing_lingers_during_flush_close_or_full_memory(
    hurry: Callable[[Rig, Rules, Callable[[], None]], None],
) -> None:
    rules = Rules()
    rig = Rig(rules=rules)
    rig.append()
    assert rig.ready(cluster_of(0)).ready_nodes == {}
    seen: list[set[int]] = []
    hurry(rig, rules, lambda: seen.append(set(rig.ready(cluster_of(0)).ready_nodes)))
    assert seen == [{0}]


def test_lingering_begins_again_when_the_flush_is_over() -> None:
    rig = Rig()
    rig.append()
    assert not rig.accumulator.flush(lambda: None, lambda batch: False)
    assert rig.ready(cluster_of(0)).ready_nodes == {}


def test_batches_without_a_leader_are_reported_by_topic() -> None:
    rig = Rig(batch_size=1)
    rig.append(partition=0)
    rig.append(partition=1)
    check = rig.ready(cluster_of(0, None))
    assert set(check.ready_nodes) == {0}
    assert check.unknown_leader_topics == {TOPIC}
    assert rig.ready(Cluster.empty()).unknown_leader_topics == {TOPIC}


def test_a_muted_partition_is_neither_ready_nor_drained() -> None:
    rig = Rig(batch_size=1)
    rig.append()
    rig.accumulator.mute(place(0))
    assert rig.ready(cluster_of(0)).ready_nodes == {}
    assert rig.drain(cluster_of(0)) == {}
    rig.accumulator.unmute(place(0))
    assert set(rig.ready(cluster_of(0)).ready_nodes) == {0}
    assert rig.drain_one().record_count == 1


def test_loads_count_batches_of_partitions_with_leader() -> None:
    rig = Rig(batch_size=1)
    for partition in (0, 0, 1, 2):
        rig.append(partition)
    rig.drain(cluster_of(None, 0, None), nodes=NODES[:1])
    assert rig.ready(cluster_of(0, 0, None)).queue_sizes == {TOPIC: {0: 2, 1: 0}}


def test_loads_are_counted_by_topic_in_whatever_order_partitions_come() -> None:
    rig = Rig(batch_size=1)
    places = [TopicPartition("".join(topic), partition) for partition in (0, 1) for topic in ("ab", "cd")]
    for number, each in enumerate(places):
        for _ in range(number + 1):
            thunk = RecordThunk(FutureRecordMetadata(0, -1, -1), None)
            rig.accumulator.append_row(each, None, b"v", (), 5, ONE_RECORD, thunk, 0, rig.now_ms)
    infos = tuple(PartitionInfo(topic, partition, NODES[0]) for topic, partition in places)
    check = rig.ready(Cluster(nodes=NODES, partitions=infos))
    assert check.queue_sizes == {"ab": {0: 1, 1: 3}, "cd": {0: 2, 1: 4}}
    assert check.waiting_nodes == {0}


def test_loads_are_counted_for_topics_that_use_them_and_once_more_when_no_batch_waits() -> None:
    rig = Rig(batch_size=1)
    rig.append(0)
    check = rig.accumulator.ready(cluster_of(0), no_epochs, lambda queued: queued - {TOPIC}, rig.now_ms)
    assert check.queue_sizes == {}
    assert rig.ready(cluster_of(0)).queue_sizes == {TOPIC: {0: 1}}
    rig.drain_one(cluster_of(0))
    assert rig.ready(cluster_of(0)).queue_sizes == {TOPIC: {0: 0}}
    assert rig.ready(cluster_of(0)).queue_sizes == {}
    check = rig.accumulator.ready(cluster_of(0), no_epochs, lambda _: {TOPIC}, rig.now_ms)
    assert check.queue_sizes == {TOPIC: {0: 0}}


def test_turn_looks_only_at_partitions_with_batches() -> None:
    """Bug: each turn of the Sender looked at all partitions that were ever written to: with 17 topics of 200 partitions
    it took two thirds longer than with one.
    """
    rig = Rig(batch_size=1, memory=1_000_000)
    cluster = cluster_of(*[0] * 1_000)
    for partition in range(1_000):
        rig.append(partition)
    while rig.drain(cluster):
        pass
    rig.ready(cluster)
    rig.append(500)
    looked_at: list[TopicPartition] = []

    class Leaders(dict[TopicPartition, Node]):
        def get(self, key: TopicPartition, default: Any = None) -> Any:
            looked_at.append(key)
            return super().get(key, default)

    vars(cluster)["leaders"] = Leaders(cluster.leaders)
    assert set(rig.ready(cluster).ready_nodes) == {0}
    assert rig.drain_one(cluster).topic_partition == place(500)
    assert set(looked_at) == {place(500)}


def test_nodes_with_waiting_batches_are_reported_ready_or_not() -> None:
    rig = Rig(batch_size=1)
    for partition in (0, 0, 1, 2):
        rig.append(partition)
    rig.accumulator.mute(place(2))
    check = rig.ready(cluster_of(0, 0, 1))
    assert set(check.ready_nodes) == {0}
    assert check.waiting_nodes == {0, 1}


# ---- drain -----------------------------------------------------------------------------------------------------------


def test_batch_of_an_interrupted_append_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: Ctrl-C came when a new batch was queued and had no records. The Sender drained it before the interrupted
    thread could drop it, and the producer failed.
    """
    rig = Rig(batch_size=1)
    drained: list[object] = []
    drop = RecordAccumulator._drop_unfilled

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    def drop_after_a_turn(*arguments: Any) -> None:
        drained.append(rig.drain(cluster_of(0)))
        drop(*arguments)

    monkeypatch.setattr(ProducerBatch, "reserve_run", interrupt)
    monkeypatch.setattr(RecordAccumulator, "_drop_unfilled", drop_after_a_turn)
    with pytest.raises(KeyboardInterrupt):
        append_block(rig, [b"v"], [0], None)
    assert drained == [{}]
    assert not rig.accumulator.has_incomplete
    assert not rig.accumulator.has_undrained


def test_drain_takes_one_batch_of_each_partition() -> None:
    rig = Rig(batch_size=1)
    for partition in (0, 0, 1, 2):
        rig.append(partition)
    drained = rig.drain(cluster_of(0, 0, 1))
    assert {node: [batch.topic_partition for batch in batches] for node, batches in drained.items()} == {
        0: [place(0), place(1)],
        1: [place(2)],
    }
    for batches in drained.values():
        for batch in batches:
            assert batch.is_in_flight
            assert batch.drained_ms == rig.now_ms
            assert not batch.is_open


def test_drain_stops_at_max_request_size_after_one_batch() -> None:
    rig = Rig(batch_size=1)
    for partition in range(3):
        rig.append(partition)
    size = HEADER_SIZE + ONE_RECORD
    assert len(rig.drain(cluster_of(0, 0, 0), max_size=2 * size)[0]) == 2
    assert len(rig.drain(cluster_of(0, 0, 0), max_size=1)[0]) == 1


def compressible(rig: Rig, rounds: int = 20) -> None:
    """Let the rig learn that its topic's batches compress to almost nothing."""
    batch = ProducerBatch(place(0), 0, 10**6, 0)
    batch.append_row(None, bytes(5_000), (), 0, 5_000, None)
    batch.seal(codec_for("zstd"))
    for _ in range(rounds):
        rig.accumulator.sizes.learn(batch)


def test_drain_counts_the_expected_compressed_size() -> None:
    rig = Rig(batch_size=1_000)
    for partition in range(4):
        rig.append(partition, 900)
    compressible(rig)
    expected = int((900 + HEADER_SIZE) * LEAST_SHARE)
    drained = rig.accumulator.drain(cluster_of(0, 0, 0, 0), NODES, 3 * expected, no_epochs, rig.now_ms)
    assert len(drained[0]) == 3


def test_batches_grow_with_compression_until_one_is_too_large() -> None:
    rig = Rig(batch_size=1_000)
    compressible(rig)
    for _ in range(40):
        rig.append()
    batch = rig.drain_one()
    assert batch.record_count == int(1_000 / LEAST_SHARE) // ONE_RECORD
    rig.accumulator.split_and_reenqueue(batch, rig.now_ms)
    for _ in range(20):
        rig.append(partition=1)
    (another,) = (each for each in rig.drain(cluster_of(0, 0))[0] if each.topic_partition == place(1))
    assert another.record_count == 1_000 // ONE_RECORD


def test_drains_go_round_so_that_no_partition_starves() -> None:
    rig = Rig(batch_size=1)
    for _ in range(4):
        for partition in range(3):
            rig.append(partition)
    order = [rig.drain(cluster_of(0, 0, 0), max_size=1)[0][0].topic_partition.partition for _ in range(7)]
    assert order == [0, 1, 2, 0, 1, 2, 0]


def test_a_partition_without_batches_does_not_break_the_round() -> None:
    rig = Rig(batch_size=1)
    for partition in (0, 0, 2, 2):
        rig.append(partition)
    order = [rig.drain(cluster_of(0, 0, 0), max_size=1)[0][0].topic_partition.partition for _ in range(4)]
    assert order == [0, 2, 0, 2]
    assert rig.drain(cluster_of(0, 0, 0)) == {}
    assert rig.drain(cluster_of(1), nodes=NODES[:1]) == {}  # it leads no partition any more


def test_node_that_leads_no_partition_is_drained_of_nothing() -> None:
    """RecordAccumulatorTest.testDrainWithANodeThatDoesntHostAnyPartitions."""
    rig = Rig(batch_size=1)
    rig.append(0)
    leads_nothing = NODES[1:]
    assert rig.drain(cluster_of(0), nodes=leads_nothing) == {}
    assert rig.drain(cluster_of(0), nodes=(*leads_nothing, NODES[0])).keys() == {0}
    assert rig.drain(cluster_of(0), nodes=leads_nothing) == {}


@pytest.mark.parametrize("compressible_percent", [1, 10, 50, 90, 99])
def test_few_batches_are_too_large_at_any_compression_ratio(compressible_percent: int) -> None:
    """RecordAccumulatorTest.testSplitFrequency: fewer than one batch in ten exceeds batch.size."""
    rig, codec, rng = Rig(batch_size=1_024), codec_for("gzip"), random.Random(compressible_percent)
    sizes: list[int] = []

    def drain() -> None:
        if not rig.ready(cluster_of(0)).ready_nodes:
            return
        for batch in rig.accumulator.drain(cluster_of(0), NODES, 1_000_000, no_epochs, rig.now_ms).get(0, ()):
            batch.seal(codec)
            rig.accumulator.sizes.learn(batch)
            sizes.append(batch.wire_size)
            batch.complete(0, None)
            rig.accumulator.deallocate(batch)

    for _ in range(1_000):
        if rng.randrange(100) < compressible_percent:
            value = b"".join(rng.randrange(1_000).to_bytes(4, "big") for _ in range(25))
        else:
            value = rng.randbytes(100)
        rig.append(size=record_size_upper_bound(None, value, ()), value=value)
        drain()
    rig.clock.advance(LINGER_MS)
    drain()
    too_large = sum(size > 1_024 + HEADER_SIZE for size in sizes)
    assert len(sizes) > 50
    assert too_large / len(sizes) < 0.1


def test_batch_held_back_by_rules_blocks_no_other_partition() -> None:
    rules = Rules()
    rig = Rig(batch_size=1, rules=rules)
    rig.append(0)
    rig.append(1)
    rules.waiting.add(place(0))
    (batch,) = rig.drain(cluster_of(0, 0))[0]
    assert batch.topic_partition == place(1)
    assert rules.drained == [batch]
    rules.waiting.clear()
    assert rig.drain_one(cluster_of(0, 0)).topic_partition == place(0)


# ---- returned batches ------------------------------------------------------------------------------------------------


def test_retry_waits_for_backoff_and_does_not_linger() -> None:
    rig = Rig()
    rig.append()
    rig.clock.advance(LINGER_MS)
    batch = rig.drain_one()
    error = NotLeaderOrFollowerError("moved")
    rig.accumulator.reenqueue(batch, error, rig.now_ms)
    assert (batch.attempts, batch.last_error, batch.is_in_flight) == (1, error, False)
    check = rig.ready(cluster_of(0))
    assert (check.ready_nodes, check.next_check_delay_ms) == ({}, RETRY_BACKOFF_MS)
    assert rig.drain(cluster_of(0)) == {}
    rig.clock.advance(RETRY_BACKOFF_MS)
    assert set(rig.ready(cluster_of(0)).ready_nodes) == {0}
    assert rig.drain_one() is batch


def test_a_retry_goes_at_once_when_the_leader_has_changed() -> None:
    rig = Rig(batch_size=1)
    rig.append()
    (batches,) = rig.drain(cluster_of(0), epochs=lambda tp: 3).values()
    rig.accumulator.reenqueue(batches[0], NotLeaderOrFollowerError(), rig.now_ms)
    assert rig.ready(cluster_of(1), epochs=lambda tp: 3).ready_nodes == {}
    assert set(rig.ready(cluster_of(1), epochs=lambda tp: 4).ready_nodes) == {1}
    assert rig.drain(cluster_of(1), epochs=lambda tp: 4)[1] == batches


def test_the_backoff_grows_with_the_attempts() -> None:
    rig = Rig(batch_size=1, retry_backoff=ExponentialBackoff(100, 2, 1_000, 0, random.Random(1)))
    rig.append()
    pauses = []
    for _ in range(5):
        batch = rig.drain_one()
        rig.accumulator.reenqueue(batch, NotLeaderOrFollowerError(), rig.now_ms)
        pauses.append(rig.ready(cluster_of(0)).next_check_delay_ms)
        rig.clock.advance(pauses[-1])
    assert pauses == [100, 200, 400, 800, 1_000]


def test_returned_batch_goes_before_batches_never_sent() -> None:
    rig = Rig(batch_size=1)
    rig.append(value=b"a")
    first = rig.drain_one()
    rig.append(value=b"b")
    rig.accumulator.reenqueue(first, NotLeaderOrFollowerError(), rig.now_ms)
    rig.clock.advance(RETRY_BACKOFF_MS)
    assert rig.drain_one() is first


def test_split_parts_take_place_and_memory_of_batch() -> None:
    rig = Rig(batch_size=10_000)
    values = [b"%d" % index * 20 for index in range(6)]
    size = record_size_upper_bound(None, values[0])
    for value in values:
        rig.append(size=size, value=value)
    batch = rig.drain_one()
    rig.append(value=b"later")
    parts = rig.accumulator.split_and_reenqueue(batch, rig.now_ms)
    assert len(parts) == 2
    assert batch.result.is_done
    assert rig.pool.available_memory == rig.pool.total_memory - 6 * size - ONE_RECORD
    sent = []
    for _ in range(3):
        part = rig.drain_one()
        sent += [record.value for record in read_records(part.sealed_bytes())]
        part.complete(0, None)
        rig.accumulator.deallocate(part)
    assert sent == [*values, b"later"]
    assert rig.pool.available_memory == rig.pool.total_memory
    assert not rig.accumulator.has_incomplete


def test_first_batch_expires_first_after_split_parts_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each turn of the Sender asks for it; a search through all 10,000 batches takes milliseconds."""
    rig = Rig(batch_size=10_000)
    for _ in range(2):
        rig.append()
    for part in rig.accumulator.split_and_reenqueue(rig.drain_one(), rig.now_ms):
        assert rig.drain_one() is part
        part.complete(0, None)
        rig.accumulator.deallocate(part)
    for partition in range(50):
        rig.append(partition)
    looked_at: list[ProducerBatch] = []
    monkeypatch.setattr(ProducerBatch, "is_filled", property(lambda self: looked_at.append(self) or True))
    assert rig.accumulator.next_expiry_ms() == rig.now_ms + DELIVERY_TIMEOUT_MS
    assert len(looked_at) == 1


def test_empty_queue_of_a_forgotten_topic_is_removed() -> None:
    rig = Rig(batch_size=1)
    for partition in range(4):
        rig.append(partition)
    in_flight = rig.drain_one(cluster_of(0, None, None, None))  # partition 0; those of 1 to 3 wait
    rig.ready(cluster_of(None, 0, 0))
    assert set(rig.ready(cluster_of(0, 0, 0, 0)).queue_sizes[TOPIC]) == {1, 2, 3}
    rig.accumulator.reenqueue(in_flight, NotLeaderOrFollowerError(), rig.now_ms)
    rig.append(0)
    rig.clock.advance(2 * RETRY_BACKOFF_MS)
    assert rig.drain_one(cluster_of(0)) is in_flight
    assert rig.drain_one(cluster_of(0)) is not in_flight


def test_muted_partition_without_batches_keeps_its_queue() -> None:
    rig = Rig(batch_size=1)
    rig.append(0)
    rig.drain_one(cluster_of(0))
    rig.accumulator.mute(place(0))
    rig.ready(cluster_of(None))
    rig.append(0)
    assert rig.drain(cluster_of(0)) == {}
    rig.accumulator.unmute(place(0))
    assert rig.ready(cluster_of(0)).queue_sizes == {TOPIC: {0: 1}}
    rig.drain_one(cluster_of(0))
    assert rig.ready(cluster_of(0)).queue_sizes == {TOPIC: {0: 0}}  # for a leader that accepts all the load counts


# ---- expiry ----------------------------------------------------------------------------------------------------------


def test_queued_and_in_flight_batches_expire() -> None:
    rig = Rig(batch_size=1)
    rig.append(0)
    in_flight = rig.drain_one()
    rig.append(0)
    rig.clock.advance(1)
    rig.append(1)
    assert rig.accumulator.next_expiry_ms() == rig.now_ms - 1 + DELIVERY_TIMEOUT_MS
    rig.clock.advance(DELIVERY_TIMEOUT_MS - 2)
    assert rig.accumulator.expired_batches(rig.now_ms) == []
    rig.clock.advance(1)
    expired = rig.accumulator.expired_batches(rig.now_ms)
    assert expired[0] is in_flight
    assert [batch.topic_partition for batch in expired] == [place(0), place(0)]
    assert not any(batch.is_open for batch in expired)
    assert rig.accumulator.has_undrained  # partition 1's
    assert rig.drain_one(cluster_of(0, 0)).topic_partition == place(1)
    for batch in expired:
        batch.fail(KafkaError("late"))
    assert rig.accumulator.expired_batches(rig.now_ms) == expired[1:], "its memory is not given back yet"
    rig.accumulator.deallocate(expired[1])
    assert rig.accumulator.expired_batches(rig.now_ms) == []
    assert rig.accumulator.next_expiry_ms() == rig.now_ms + 1


def test_batches_expiring_together_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Sender holds the lock: a search for each of 32,000 batches among all of them took 6.5 s."""
    rig = Rig(batch_size=1)
    for _ in range(500):
        rig.append(0)
    rig.clock.advance(DELIVERY_TIMEOUT_MS)
    compared: list[object] = []
    monkeypatch.setattr(ProducerBatch, "__eq__", lambda self, other: compared.append(other) or self is other)
    assert len(rig.accumulator.expired_batches(rig.now_ms)) == 500
    assert len(compared) < 500
    assert not rig.accumulator.has_undrained


@pytest.mark.parametrize("is_muted", [False, True])
def test_batch_expires_at_the_longest_delivery_timeout(is_muted: bool) -> None:
    """RecordAccumulatorTest.testExpiredBatchSingleMaxValue: Kafka's largest int, 24.8 days."""
    longest_ms = 2**31 - 1
    rig = Rig(delivery_timeout_ms=longest_ms)
    rig.append(0)
    rig.clock.advance(LINGER_MS)
    assert rig.ready(cluster_of(0)).ready_nodes.keys() == {0}
    if is_muted:
        rig.accumulator.mute(place(0))
    rig.clock.advance(longest_ms - LINGER_MS - 1)
    assert rig.accumulator.expired_batches(rig.now_ms) == []
    assert rig.accumulator.next_expiry_ms() == rig.now_ms + 1
    rig.clock.advance(1)
    (expired,) = rig.accumulator.expired_batches(rig.now_ms)
    expired.fail(KafkaError("late"))
    assert not rig.ready(cluster_of(0)).ready_nodes
    assert not rig.accumulator.has_undrained


def test_expired_batch_in_flight_does_not_expire_again() -> None:
    rig = Rig(batch_size=1)
    rig.append(0)
    in_flight = rig.drain_one()
    rig.clock.advance(100)
    rig.append(1)
    rig.clock.advance(DELIVERY_TIMEOUT_MS - 100)
    (expired,) = rig.accumulator.expired_batches(rig.now_ms)
    assert expired is in_flight
    in_flight.fail(KafkaError("late"))
    rig.clock.advance(100)
    (expired,) = rig.accumulator.expired_batches(rig.now_ms)
    assert expired.topic_partition == place(1)


def test_parts_of_a_split_batch_expire_when_it_would_have() -> None:
    rig = Rig(batch_size=10_000)
    for value in (b"a", b"b"):
        rig.append(value=value)
    created_ms = rig.now_ms
    batch = rig.drain_one()
    rig.clock.advance(500)
    rig.append(1)
    rig.accumulator.split_and_reenqueue(batch, rig.now_ms)
    assert rig.accumulator.next_expiry_ms() == created_ms + DELIVERY_TIMEOUT_MS


# ---- flush, abort, close ---------------------------------------------------------------------------------------------


def test_flush_waits_for_present_batches_and_their_parts() -> None:
    rig = Rig(batch_size=10_000)
    for value in (b"a", b"b"):
        rig.append(0, value=value)
    batch = rig.drain_one()
    waited: list[ProducerBatch] = []

    def wait(pending: ProducerBatch) -> bool:
        waited.append(pending)
        if pending is batch:
            rig.accumulator.split_and_reenqueue(batch, rig.now_ms)
            rig.append(1)  # after the flush began, so the flush ignores it
        return True

    assert rig.accumulator.flush(lambda: None, wait)
    assert waited[0] is batch
    assert set(waited[1:]) == set(batch.split_parts)
    assert len(waited) == 3


def test_abort_fails_queued_and_in_flight_batches() -> None:
    rig = Rig(batch_size=1)
    futures = [rig.append(), rig.append()]
    rig.drain_one()
    rig.accumulator.abort_incomplete(KafkaError("the end"))
    for future in futures:
        with pytest.raises(KafkaError, match="the end"):
            future.result(0)
    assert rig.pool.available_memory == rig.pool.total_memory
    assert not rig.accumulator.has_incomplete
    assert not rig.accumulator.has_undrained


def test_abort_of_undrained_batches_keeps_sent_ones() -> None:
    rig = Rig(batch_size=1)
    sent, retried, queued = rig.append(0), rig.append(1), rig.append(0)
    (first, second) = rig.drain(cluster_of(0, 0))[0]
    second.set_producer_state(7, 0, 0, False)
    rig.accumulator.reenqueue(second, NotLeaderOrFollowerError(), rig.now_ms)
    rig.accumulator.abort_undrained(KafkaError("rolled back"))
    assert not sent.done()
    assert not retried.done()
    with pytest.raises(KafkaError, match="rolled back"):
        queued.result(0)
    assert first.topic_partition == place(0)


def test_repr_shows_queued_and_incomplete_batches() -> None:
    rig = Rig(batch_size=1)
    rig.append()
    rig.append()
    rig.drain_one()
    assert repr(rig.accumulator) == "RecordAccumulator(1 batches queued, 2 incomplete)"


def test_more_than_all_memory_is_too_large() -> None:
    rig = Rig(memory=50)
    with pytest.raises(RecordTooLargeError):
        rig.append()
