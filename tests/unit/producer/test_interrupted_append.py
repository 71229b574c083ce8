"""Ctrl-C, or lack of memory, in the middle of a send: no batch is left that can neither be sent nor expire.

And in a call that ends a transaction: no state is left without a request that ends it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from threading import Condition, Lock, Thread
from types import FrameType
from typing import Any, Self

import pytest
from support.buffer_memory import give_back
from support.fake_clock import FakeClock
from support.producer_harness import TOPIC, ProducerHarness
from support.transaction_harness import GROUP, TransactionHarness
from support.transaction_steps import OFFSETS

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.buffer_pool import BufferPool, Grant
from spark_kafka_sink.producer.futures import BatchResult
from spark_kafka_sink.producer.operations import OperationResult
from spark_kafka_sink.producer.record_accumulator import IncompleteBatches, PartitionQueue
from spark_kafka_sink.producer.transaction_requests import GroupMetadata
from spark_kafka_sink.producer.transactions import State, TransactionManager
from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.columns import RecordColumns

INTERRUPTIBLE = {
    *("RecordAccumulator._reserve_runs", "RecordAccumulator._fit", "RecordAccumulator._fill_runs"),
    *("ProducerBatch.reserve_run", "ProducerBatch.fill_run", "PartitionQueues.__missing__"),
    *("RecordAccumulator._open_new_batch", "ProducerBatch.append_row", "FutureRecordMetadata.bind"),
}
"""Functions of the producer in which the interrupt comes."""
VALUES = [b"%02d" % index + bytes(60) for index in range(9)]
COLUMNS = RecordColumns.from_rows(VALUES, partitions=[index % 3 for index in range(len(VALUES))])


class Interrupt:
    """Raises KeyboardInterrupt before line number `at` of those functions, while it is active."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.where: str | None = None

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        gc.disable()  # an interrupt in a garbage collection, as in a function of hypothesis, is lost
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_qualname in INTERRUPTIBLE else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        # Nothing interrupts the end of a with block before its lock is free, but a trace function would.
        if event == "line" and not (frame.f_code.co_name == "_fill_runs" and self._in_fill(frame)):
            if self._left == 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self._left -= 1
        return self._line

    @staticmethod
    def _in_fill(frame: FrameType) -> bool:
        return "chunks" in frame.f_locals


class CallInterrupt(Interrupt):
    """Raises KeyboardInterrupt at the begin of call number `at` of any Python function, as CPython does, while it is
    active.
    """

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not self.__exit__.__code__:
            if self._left == 0:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self._left -= 1


def is_owned(condition: Any) -> bool:
    """Return whether this thread holds the lock of the condition."""
    return bool(condition._is_owned())


def lingering() -> ProducerHarness:
    """Return a harness with records waiting in the batches that the rows will join."""
    harness = ProducerHarness({"linger.ms": "60000", "batch.size": "300"}, topics={TOPIC: 3})
    harness.warm_up()
    for partition in range(2):
        harness.send(b"first", partition=partition)
    return harness


def test_interrupt_at_any_place_ends_everything_and_frees_memory() -> None:
    for at in count():
        harness = lingering()
        interrupt = Interrupt(at)
        try:
            with interrupt:
                harness.producer.send_columns(TOPIC, COLUMNS)
        except KeyboardInterrupt:
            pass
        if interrupt.where is None:
            break
        for batch in harness.accumulator._incomplete:
            assert batch.is_filled, interrupt.where
            assert batch.record_count > 0, interrupt.where
        after = [harness.send(b"after", partition=partition) for partition in range(3)]
        harness.flush()
        assert not harness.accumulator.has_incomplete, interrupt.where
        assert [each.error for each in after] == [None] * 3, interrupt.where
        assert harness.memory_in_use == 0, interrupt.where
        assert not harness.accumulator.has_undrained, interrupt.where
        for partition in range(3):
            sent = [value for value in harness.values(partition=partition) if value not in {b"first", b"after"}]
            assert sent == VALUES[partition::3][: len(sent)], interrupt.where
    assert at > 100, "the interrupts come where rows are taken over"


def check_others_are_sent(harness: ProducerHarness, has_before: bool, where: str | None) -> None:
    """Send records after an interrupted one: they, and the one before it, are in the log, and nothing waits."""
    after = [harness.send(b"after", key=key) for key in (b"1", None)]
    harness.flush(limit_ms=1_000)
    assert not harness.accumulator.has_incomplete, where
    assert [each.error for each in after] == [None, None], where
    sent = [value.rstrip(b"\0") for value in harness.values() if value]
    assert sent == [b"before"] * has_before + [b"after"] * 2, where


@pytest.mark.parametrize("before", ["nothing", "a row", "columns", "a full batch"])
def test_interrupted_send_keeps_records_before_and_after_it(before: str) -> None:
    for at in count():
        harness = ProducerHarness({"linger.ms": "60000", "batch.size": "300"})
        harness.warm_up()
        if before in {"a row", "a full batch"}:
            harness.send(b"before" + bytes(200 if before == "a full batch" else 0), key=b"key")
        elif before == "columns":
            harness.send_columns(RecordColumns.from_rows([b"before"]))
        in_use = harness.memory_in_use
        interrupt = Interrupt(at)
        try:
            with interrupt:
                harness.send(b"interrupted" + bytes(60), key=b"key")
        except KeyboardInterrupt:
            assert harness.memory_in_use == in_use, interrupt.where
        if interrupt.where is None:
            break
        check_others_are_sent(harness, before != "nothing", interrupt.where)
    assert at > 10, "too few places for an interrupt"


@pytest.mark.parametrize("undoing", [IncompleteBatches, PartitionQueue])
@pytest.mark.parametrize("before", ["nothing", "a row", "a full batch"])
def test_second_interrupt_of_a_send_leaves_no_rest_of_a_record(
    undoing: type[Any], before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = undoing.forget_uncounted
    calls: list[object] = []

    def interrupted_once(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        undo(*arguments)

    monkeypatch.setattr(undoing, "forget_uncounted", interrupted_once)
    undone = 0
    for at in count():
        calls.clear()
        harness = ProducerHarness({"linger.ms": "60000", "batch.size": "300"})
        harness.warm_up()
        if before != "nothing":
            harness.send(b"before" + bytes(200 if before == "a full batch" else 0), key=b"key")
        interrupt = Interrupt(at)
        with suppress(KeyboardInterrupt), interrupt:
            harness.send(b"interrupted" + bytes(60), key=b"key")
        if interrupt.where is None:
            break
        undone += len(calls) > 1
        check_others_are_sent(harness, before != "nothing", interrupt.where)
    assert undone > 10, "too few places for two interrupts"


@pytest.mark.parametrize("call", ["send", "send_columns", "partitions_for"])
def test_interrupted_call_leaves_no_lock_taken(call: str) -> None:
    arguments = {"send": (TOPIC, b"1"), "send_columns": (TOPIC, COLUMNS), "partitions_for": (TOPIC,)}[call]
    harness = lingering()
    for at in count():
        interrupt = CallInterrupt(at)
        try:
            with interrupt:
                getattr(harness.producer, call)(*arguments)
        except KeyboardInterrupt:
            pass
        if interrupt.where is None:
            break
        assert not is_owned(harness.metadata.condition), interrupt.where
        assert not harness.accumulator._lock.locked(), interrupt.where
        assert not is_owned(Condition(harness.accumulator.pool._lock)), interrupt.where
    assert at > 5, "the interrupts come where functions begin"


class InterruptedLock:
    """Raises Ctrl-C when a lock is released for the first time, which is just after memory was taken."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_interrupted = False

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["send", "send_columns"])
def test_interrupted_send_gives_back_its_memory(call: str) -> None:
    arguments = {"send": (TOPIC, b"1"), "send_columns": (TOPIC, COLUMNS)}[call]
    harness = lingering()
    in_use = harness.memory_in_use
    pool: Any = harness.accumulator.pool
    pool._lock = lock = InterruptedLock(pool._lock)
    with pytest.raises(KeyboardInterrupt):
        getattr(harness.producer, call)(*arguments)
    assert lock.is_interrupted
    assert harness.memory_in_use == in_use


def test_interrupted_send_columns_gives_back_its_memory() -> None:
    for at in count():
        harness = lingering()
        interrupt = CallInterrupt(at)
        with suppress(KeyboardInterrupt), interrupt:
            harness.producer.send_columns(TOPIC, COLUMNS)
        harness.flush()
        assert not harness.accumulator.has_incomplete, interrupt.where
        assert harness.memory_in_use == 0, interrupt.where
        if interrupt.where is None:
            break
    assert at > 20, "the interrupts come where functions begin"


def test_interrupted_wait_for_memory_does_not_block_others() -> None:
    for at in count():
        gate = Lock()
        gate.acquire()
        pool = BufferPool(10, SystemClock(), gate.release)
        pool.allocate(10, 0, Grant())

        def give(gate: Lock = gate, pool: BufferPool = pool) -> None:
            gate.acquire()
            give_back(pool, 10)

        giver = Thread(target=give)
        giver.start()
        interrupt = CallInterrupt(at)
        grant = Grant()
        with suppress(KeyboardInterrupt), interrupt:
            pool.allocate(5, 10_000, grant)
        with suppress(RuntimeError):  # open before
            gate.release()
        giver.join()
        assert pool.queued == 0, interrupt.where
        pool.take_back(grant)
        assert pool.available_memory == 10, interrupt.where
        pool.allocate(1, 0, Grant())
        if interrupt.where is None:
            break
    assert at > 5, "the interrupts come where functions begin"


def test_interrupted_wait_for_a_batch_raises() -> None:
    for at in count():
        result = BatchResult(TopicPartition(TOPIC, 0))
        interrupt = CallInterrupt(at)
        with suppress(KeyboardInterrupt), interrupt:
            result.wait(0.001)
        if interrupt.where is None:
            break
        assert result._waiting == [], interrupt.where


def test_interrupted_wait_for_a_transaction_frees_its_lock() -> None:
    result = OperationResult("commit_transaction")
    result.finish()
    for at in count():
        interrupt = CallInterrupt(at)
        try:
            with interrupt:
                result.wait(FakeClock(), 1_000)
        except KeyboardInterrupt:
            pass
        if interrupt.where is None:
            break
        assert not is_owned(result._condition), interrupt.where


def test_failed_encoding_wakes_the_sender_for_later_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = lingering()
    woken: list[bool] = []

    def encode(block: Block, runs: object) -> None:
        for _ in range(3):  # as another thread could
            harness.send(bytes(150), partition=2)
        harness.turn(0)  # sends nothing, and would now sleep
        monkeypatch.setattr(harness.client, "wakeup", lambda: woken.append(True))
        raise MemoryError

    monkeypatch.setattr(Block, "encode", encode)
    with pytest.raises(MemoryError):
        harness.producer.send_columns(TOPIC, COLUMNS)
    check = harness.accumulator.ready(harness.metadata.fetch(), lambda _: None, lambda queued: queued, harness.now_ms)
    assert check.ready_nodes
    assert woken


@pytest.mark.parametrize("call", ["send", "send_columns"])
def test_interrupted_call_wakes_the_sender_for_appended_records(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    arguments = {"send": (TOPIC, b"1"), "send_columns": (TOPIC, COLUMNS)}[call]
    for at in count():
        harness = ProducerHarness(topics={TOPIC: 3})
        harness.warm_up()
        woken: list[bool] = []
        monkeypatch.setattr(harness.client, "wakeup", lambda woken=woken: woken.append(True))
        interrupt = CallInterrupt(at)
        with suppress(KeyboardInterrupt), interrupt:
            getattr(harness.producer, call)(*arguments)
        assert woken or not harness.accumulator.has_undrained, interrupt.where
        if interrupt.where is None:
            break
    assert at > 20, "the interrupts come in every function"


@pytest.mark.parametrize("call", ["send", "send_columns"])
def test_no_transaction_waits_for_an_interrupted_call(call: str) -> None:
    arguments = {"send": (TOPIC, b"1"), "send_columns": (TOPIC, COLUMNS)}[call]
    joined = 0
    for at in count():
        harness = TransactionHarness(2, partitions=3).started()
        interrupt = CallInterrupt(at)
        with suppress(KeyboardInterrupt), interrupt:
            getattr(harness.producer, call)(*arguments)
        joined += not harness.manager._current.is_empty
        assert not harness.manager.sends, interrupt.where
        if interrupt.where is None:
            break
    assert joined > 5, "the interrupts come after it has joined, too"


BEGINS: dict[str, Callable[[TransactionManager], object]] = {
    "commit_transaction": TransactionManager.begin_commit,
    "abort_transaction": TransactionManager.begin_abort,
    "send_offsets_to_transaction": lambda manager: manager.begin_send_offsets(OFFSETS, GroupMetadata(GROUP)),
}


@pytest.mark.parametrize("call", BEGINS)
@pytest.mark.parametrize("version", [1, 2])
def test_interrupted_call_leaves_a_transaction_that_can_be_aborted(call: str, version: int) -> None:
    """Bug: Ctrl-C between the new state and the request of its end. The transaction never ended, and close hung."""
    for at in count():
        harness = TransactionHarness(version).started()
        harness.send(b"first", partition=0)
        interrupt = CallInterrupt(at)
        with suppress(KeyboardInterrupt), interrupt:
            BEGINS[call](harness.manager)
        if interrupt.where is None:
            break
        assert not is_owned(harness.manager._lock), interrupt.where
        if harness.state is State.ABORTABLE_ERROR:
            with pytest.raises(KafkaError, match=f"{call} was interrupted by KeyboardInterrupt"):
                harness.producer.commit_transaction()
        harness.producer.abort_transaction()
        harness.commit(b"next")
        assert harness.committed() == [b"next"], interrupt.where
    assert at > 5, "the interrupts come where functions begin"


@pytest.mark.parametrize("version", [1, 2])
def test_interrupted_init_transactions_may_be_called_again(version: int) -> None:
    """Bug: Ctrl-C between the new state and the request: no later call of init_transactions could succeed."""
    for at in count():
        harness = TransactionHarness(version)
        harness.producer.partitions_for(TOPIC)
        interrupt = CallInterrupt(at)
        with suppress(KeyboardInterrupt), interrupt:
            harness.manager.begin_initialize()
        harness.producer.init_transactions()
        harness.commit(b"first")
        assert harness.committed() == [b"first"], interrupt.where
        if interrupt.where is None:
            break
    assert at > 5, "the interrupts come where functions begin"


def test_batch_without_its_bytes_does_not_wake_the_sender() -> None:
    harness = lingering()
    harness.clock.advance(7)
    harness.send(b"later", partition=2)
    batches = list(harness.accumulator._incomplete)
    due_ms = harness.accumulator.next_expiry_ms()
    for batch in batches[:2]:
        batch._empty_places = 1
    assert harness.accumulator.next_expiry_ms() == due_ms + 7
    batches[2]._empty_places = 1
    assert harness.accumulator.next_expiry_ms() == FOREVER_MS


def test_second_interrupt_leaves_no_batch_without_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it came while the first one was handled. The batch stayed, and later records of its partition waited behind
    it without end.
    """
    harness = ProducerHarness({"linger.ms": "0", "delivery.timeout.ms": "5000", "request.timeout.ms": "1000"})
    harness.warm_up()
    drop = harness.accumulator._drop_unfilled

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt_once(*given: Any) -> None:
        monkeypatch.setattr(harness.accumulator, "_drop_unfilled", drop)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Block, "encode", interrupt)
        monkeypatch.setattr(harness.accumulator, "_drop_unfilled", interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            harness.producer.send_columns(TOPIC, RecordColumns.from_rows([b"a", b"b"]))
    later = harness.send(b"later")
    harness.settle()
    assert later.error is None
    assert harness.memory_in_use == 0


def test_records_in_a_batch_with_failed_rows_get_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = lingering()
    first = harness.deliveries[0]

    def breaks(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(Block, "encode", breaks)
    with pytest.raises(MemoryError):
        harness.send_columns(COLUMNS)
    assert isinstance(first.error, KafkaError)
    assert "MemoryError: no more" in str(first.error)
    assert harness.memory_in_use == 0


def test_ctrl_c_in_a_callback_is_raised_after_all_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: Ctrl-C was logged as the callback's failure and lost. The Sender's thread gets no Ctrl-C."""
    harness = lingering()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def breaks(*_: object) -> None:
        raise MemoryError("no more")

    future = harness.producer.send(TOPIC, b"second", partition=0, on_completion=interrupted)
    harness.send(b"third", partition=0)
    monkeypatch.setattr(Block, "encode", breaks)
    with pytest.raises(KeyboardInterrupt):
        harness.send_columns(COLUMNS.slice(0, 3))
    assert future.done()
    assert [type(each.error) for each in harness.deliveries[:3]] == [KafkaError] * 3
    assert all(each.is_settled for each in harness.deliveries)
    assert harness.memory_in_use == 0


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_transaction_that_lost_a_record_is_not_committed(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    harness = TransactionHarness(2, {"linger.ms": "1000"}).started()
    harness.send(b"zero", partition=0)
    harness.settle()
    first = harness.send(b"first", partition=0)

    def breaks(*_: object) -> None:
        raise error("no more")

    monkeypatch.setattr(Block, "encode", breaks)
    with pytest.raises(error):
        harness.send_columns(COLUMNS.slice(0, 1))
    assert first.error is not None
    with pytest.raises(KafkaError, match=f"{error.__name__}: no more"):
        harness.producer.commit_transaction()
    harness.producer.abort_transaction()
    assert harness.committed() == []


def test_a_transaction_whose_send_was_interrupted_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = TransactionHarness(2).started()
    harness.send(b"first", partition=0)

    def breaks(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(harness.accumulator.pool, "allocate", breaks)
        with pytest.raises(KeyboardInterrupt):
            harness.send(b"lost", partition=0)
    with pytest.raises(KafkaError, match="KeyboardInterrupt"):
        harness.producer.commit_transaction()


def test_batches_linger_again_after_a_flush_that_was_interrupted() -> None:
    harness = lingering()

    def interrupted() -> None:
        raise KeyboardInterrupt

    harness.client.wakeup = interrupted
    with pytest.raises(KeyboardInterrupt):
        harness.producer.flush()
    del harness.client.wakeup
    harness.clock.advance(7)
    harness.turn(0)
    assert harness.accumulator.has_undrained
