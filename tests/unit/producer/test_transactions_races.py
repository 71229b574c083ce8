"""The application's thread acts after the Sender has taken the next request and before it is sent."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import pytest
from support.producer_harness import TOPIC
from support.scripted_broker import faults
from support.transaction_harness import GROUP, PLACE, TransactionHarness
from support.transaction_steps import OFFSETS

from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import (
    BufferExhaustedError,
    ConcurrentTransactionsError,
    IllegalStateError,
    KafkaError,
    ProducerClosedError,
    TopicAuthorizationError,
    TransactionAbortedError,
)
from spark_kafka_sink.producer import kafka_producer
from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.columns import RecordColumns


def come_in_between(harness: TransactionHarness, act: Callable[[], object]) -> list[State]:
    """Run `act` once on another thread, when the Sender has found the node of a request ready.

    Return the state after `act`, once it has run.
    """
    ready = harness.client.ready
    left: list[State] = []

    def ready_and_late(node: Node, now_ms: int) -> bool:
        is_ready = ready(node, now_ms)
        if is_ready and not left:
            left.append(harness.state)
            worker = threading.Thread(target=act)
            worker.start()
            worker.join()
            left[:] = [harness.state]
        return is_ready

    harness.client.ready = ready_and_late
    return left


def ends_in_peace(harness: TransactionHarness) -> None:
    assert not harness.producer.has_failed
    assert harness.cluster.requests_of(ApiKey.ADD_PARTITIONS_TO_TXN) == []
    harness.producer.begin_transaction()
    harness.send(b"next", partition=0)
    harness.producer.commit_transaction()
    assert harness.committed() == [b"next"]
    assert not harness.producer.has_failed


def test_abort_cancels_request_before_it_is_sent() -> None:
    harness = TransactionHarness(1).started()
    left = come_in_between(harness, harness.manager.begin_abort)
    delivery = harness.send(b"a", partition=0)
    harness.settle()
    assert left == [State.ABORTING]
    assert type(delivery.error) is TransactionAbortedError
    assert "was aborted" in str(delivery.error)
    harness.producer.abort_transaction()  # waits for the current request
    assert harness.state is State.READY
    ends_in_peace(harness)


def test_records_dropped_by_an_abort_have_the_earlier_error() -> None:
    harness = TransactionHarness(2).started()
    delivery = harness.send(b"a", partition=0)
    harness.manager.handle_refused_record(TopicAuthorizationError("of another record"), None)
    harness.manager.begin_abort()  # before the Sender's next turn
    harness.settle()
    assert isinstance(delivery.error, TopicAuthorizationError)
    harness.producer.abort_transaction()
    ends_in_peace(harness)


def test_abort_cancels_request_of_unreachable_node() -> None:
    harness = TransactionHarness(1).started()
    left = come_in_between(harness, harness.manager.begin_abort)
    ready, has_failed = harness.client.ready, harness.client.connection_failed
    lost: list[Node | None] = []

    def ready_until_then(node: Node, now_ms: int) -> bool:
        is_ready = ready(node, now_ms)
        if left and not lost:
            lost.append(node)
            return False
        return is_ready

    def has_failed_once(node: Node) -> bool:
        if lost == [node]:
            lost.append(None)
            return True
        return has_failed(node)

    harness.client.ready = ready_until_then
    harness.client.connection_failed = has_failed_once
    harness.send(b"a", partition=0)
    harness.settle()
    assert left == [State.ABORTING]
    assert len(lost) == 2
    harness.producer.abort_transaction()
    ends_in_peace(harness)


def test_refused_record_cancels_request_before_it_is_sent() -> None:
    harness = TransactionHarness(1, {"max.request.size": "1000"}).started()
    left = come_in_between(harness, lambda: harness.producer.send(TOPIC, b"x" * 2_000, partition=0))
    delivery = harness.send(b"a", partition=0)
    harness.settle()
    assert left == [State.ABORTABLE_ERROR]
    assert "max.request.size" in str(delivery.error)
    harness.producer.abort_transaction()
    ends_in_peace(harness)


def test_abort_cancels_lookup_before_it_is_sent() -> None:
    harness = TransactionHarness(2, {"max.block.ms": "50"}).started()
    left = come_in_between(harness, harness.manager.begin_abort)
    with pytest.raises(KafkaError, match="aborted"):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    assert left == [State.ABORTING]
    assert harness.cluster.requests_of(ApiKey.FIND_COORDINATOR) == []
    harness.producer.abort_transaction()
    ends_in_peace(harness)


def send_by(harness: TransactionHarness, append: str, value: bytes) -> None:
    if append == "append_row":
        harness.producer.send(TOPIC, value, partition=0)
    else:
        harness.producer.send_columns(TOPIC, RecordColumns.from_rows([value], partitions=[0]))


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("call", ["append_row", "append_block"])
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_transaction_ends_after_sends_that_joined(version: int, call: str, end: str) -> None:
    harness = TransactionHarness(version).started()
    harness.send(b"first", partition=0)
    harness.settle()
    append = getattr(harness.accumulator, call)

    def late(*arguments: object) -> object:
        getattr(harness.manager, f"begin_{end}")()  # as another thread
        harness.run_for(500)
        assert harness.cluster.requests_of(ApiKey.END_TXN) == []
        return append(*arguments)

    setattr(harness.accumulator, call, late)
    send_by(harness, call, b"late")
    setattr(harness.accumulator, call, append)
    getattr(harness.producer, f"{end}_transaction")()
    expected = [b"first", b"late"] if end == "commit" else []
    assert harness.committed() == expected
    harness.commit(b"next")
    assert harness.committed() == [*expected, b"next"]


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_overtaken_send_columns_is_in_transaction_wholly_or_not(
    monkeypatch: pytest.MonkeyPatch, version: int, end: str
) -> None:
    def then_ends(*arguments: object) -> None:
        monkey.undo()
        harness.accumulator.append_block(*arguments)  # type: ignore[arg-type]
        getattr(harness.manager, f"begin_{end}")()  # as another thread
        harness.run_for(500)

    harness = TransactionHarness(version).started()
    monkeypatch.setattr(kafka_producer, "MAX_BLOCK_ROWS", 1)
    two_blocks = RecordColumns.from_rows([b"first", b"second"])
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(harness.accumulator, "append_block", then_ends)
        with contextlib.nullcontext() if end == "commit" else pytest.raises(IllegalStateError, match="is aborting"):
            harness.producer.send_columns(TOPIC, two_blocks)
    getattr(harness.producer, f"{end}_transaction")()
    harness.commit(b"next")
    partitions = range(len(harness.producer.partitions_for(TOPIC)))
    committed = {value for partition in partitions for value in harness.committed(partition)}
    assert committed == ({b"first", b"second", b"next"} if end == "commit" else {b"next"})


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["append_row", "append_block"])
def test_no_transaction_waits_for_a_send_that_has_failed(
    monkeypatch: pytest.MonkeyPatch, call: str, error: type[BaseException]
) -> None:
    def breaks(*_: object) -> None:
        raise error

    harness = TransactionHarness(2).started()
    harness.send(b"first", partition=0)
    with monkeypatch.context() as patch:
        patch.setattr(harness.accumulator, call, breaks)
        with pytest.raises(error):
            send_by(harness, call, b"lost")
    harness.producer.abort_transaction()
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("error", [BufferExhaustedError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["append_row", "append_block"])
def test_commit_fails_with_failed_send_that_joined_before(
    monkeypatch: pytest.MonkeyPatch, call: str, error: type[BaseException], version: int
) -> None:
    def breaks(*_: object) -> None:
        harness.manager.begin_commit()  # as another thread
        harness.run_for(500)
        raise error

    harness = TransactionHarness(version).started()
    harness.send(b"first", partition=0)
    with monkeypatch.context() as patch:
        patch.setattr(harness.accumulator, call, breaks)
        is_reported_by_future = (call, error) == ("append_row", BufferExhaustedError)
        with contextlib.nullcontext() if is_reported_by_future else pytest.raises(error):
            send_by(harness, call, b"lost")
    with pytest.raises(KafkaError, match=r"BufferExhausted|interrupted by"):
        harness.producer.commit_transaction()
    assert harness.state is State.ABORTABLE_ERROR
    assert harness.committed() == []
    harness.producer.abort_transaction()
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


def test_no_transaction_waits_for_a_send_that_came_too_late() -> None:
    """Otherwise threads that try again and again would prevent its end."""
    harness = TransactionHarness(2).started()
    harness.manager.begin_commit()
    with pytest.raises(IllegalStateError):
        harness.manager.add_partition(PLACE, "a send")
    assert not harness.manager.sends


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("call", ["append_row", "append_block"])
def test_a_commit_fails_with_a_send_that_a_close_ends(monkeypatch: pytest.MonkeyPatch, call: str, version: int) -> None:
    """Some of its rows may be in the transaction."""

    def late(*arguments: object) -> object:
        harness.manager.begin_commit()  # as another thread
        harness.producer.close()
        return append(*arguments)

    harness = TransactionHarness(version).started()
    harness.send(b"first", partition=0)
    harness.settle()
    append = getattr(harness.accumulator, call)
    monkeypatch.setattr(harness.accumulator, call, late)
    with pytest.raises(ProducerClosedError):
        send_by(harness, call, b"lost")
    harness.producer.sender.run()
    assert harness.coordinated.state == "CompleteAbort"
    assert harness.committed() == []


def test_log_handler_may_use_the_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: lines were logged under the manager's lock. A handler that sends through the producer needs that lock, and
    an application thread that logs has the handler's own lock then: the two threads waited for each other forever.
    """
    harness = TransactionHarness(1)
    held_during: list[str] = []
    lines: list[str] = []

    class Sending(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            sender = threading.Thread(target=harness.manager.request_delay_ms, args=(0,), daemon=True)
            sender.start()
            sender.join(5)
            if sender.is_alive():
                held_during.append(lines[-1])

    log = logging.getLogger("spark_kafka_sink.producer")
    monkeypatch.setattr(log, "handlers", [Sending()])
    monkeypatch.setattr(log, "level", logging.DEBUG)
    harness.started()
    harness.cluster.on(ApiKey.ADD_PARTITIONS_TO_TXN, faults.fail_with(ConcurrentTransactionsError), times=6)
    harness.send(b"a", partition=0)
    harness.settle()
    harness.manager.abort_open_transaction()  # as the Sender does when the producer closes
    harness.settle()
    for text in ("producer id", "sending AddPartitionsToTxn", "attempt 5 was refused", "aborting the open transaction"):
        assert any(text in line for line in lines), (text, lines)
    assert held_during == []


def test_log_lines_name_the_transactional_id_of_the_task(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: they named the id that the producer was made with, which all tasks of a pool share and no broker sees."""
    harness = TransactionHarness(1)
    harness.producer.init_transactions()
    with caplog.at_level(logging.DEBUG, "spark_kafka_sink.producer"):
        harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ConcurrentTransactionsError), times=5)
        harness.producer.init_transactions("orders-task-3")
    told = [line for line in caplog.messages if "attempt 5 was refused" in line or "producer id" in line]
    assert [line.partition(": ")[0] for line in told] == ["orders-task-3"] * 2
