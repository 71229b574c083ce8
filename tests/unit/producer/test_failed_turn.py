"""A turn of the Sender that fails by an internal error: calls that time out afterwards get the cause."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
from support.producer_harness import TOPIC, ProducerHarness
from support.threaded_producer import sender_thread
from support.transaction_harness import TransactionHarness

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import BufferExhaustedError, KafkaError, KafkaTimeoutError, ProducerClosedError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.producer.operations import OperationResult
from spark_kafka_sink.record.columns import RecordColumns

SETTINGS = {
    "linger.ms": "0",
    "buffer.memory": "1000",
    "max.block.ms": "2000",
    "request.timeout.ms": "10",
    "delivery.timeout.ms": "10",
}
FAULT = "'NoneType' object has no attribute 'topic'"


def breaks(timeout_ms: int, now_ms: int) -> NoReturn:
    raise AttributeError(FAULT)


def broken(harness: ProducerHarness) -> ProducerHarness:
    """Make each turn fail from now on, as the Sender's thread would see it."""
    harness.client.poll = breaks
    harness.clock.on_wait = lambda _: harness.turn_of_thread()
    harness.turn_of_thread()
    return harness


def with_a_record_on_its_way() -> ProducerHarness:
    harness = ProducerHarness(SETTINGS)
    harness.warm_up()
    harness.network.stalled.add(0)
    harness.send(bytes(700))
    return harness


def assert_reported(error: BaseException | None) -> None:
    assert isinstance(error, KafkaTimeoutError)
    assert isinstance(error.__cause__, AttributeError)
    assert str(error).endswith(f" ms ago a turn of its Sender thread failed with AttributeError: {FAULT}")


@pytest.mark.parametrize("call", ["send", "send_columns", "partitions_for"])
def test_in_a_wait_for_metadata(call: str) -> None:
    harness = broken(ProducerHarness(SETTINGS))
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: harness.producer.send(TOPIC, b"v").result(0),
        "send_columns": lambda: harness.send_columns(RecordColumns.from_rows([b"v"])),
        "partitions_for": lambda: harness.producer.partitions_for(TOPIC),
    }
    with pytest.raises(
        KafkaTimeoutError, match=r"^No broker of bootstrap\.servers=.* within max\.block\.ms=2000"
    ) as caught:
        calls[call]()
    assert_reported(caught.value)


def test_in_a_wait_for_memory() -> None:
    harness = broken(with_a_record_on_its_way())
    error = harness.send(bytes(700)).error
    assert isinstance(error, BufferExhaustedError)
    assert_reported(error)
    with pytest.raises(BufferExhaustedError, match=r"^buffer\.memory=1000 stayed full") as caught:
        harness.send_columns(RecordColumns.from_rows([bytes(700)]))
    assert_reported(caught.value)


@pytest.mark.parametrize("timeout", [0, None])
def test_in_a_flush(timeout: float | None) -> None:
    """Also in a flush without a limit, because no thread enforces delivery.timeout.ms."""
    harness = broken(with_a_record_on_its_way())
    with pytest.raises(KafkaTimeoutError, match=r"^Records were still on their way") as caught:
        harness.producer.flush(timeout)
    assert_reported(caught.value)


def test_in_a_wait_for_a_transaction() -> None:
    harness = TransactionHarness(2).started()
    harness.send()
    broken(harness)
    with pytest.raises(KafkaTimeoutError, match="did not end within") as caught:
        harness.producer.commit_transaction()
    assert_reported(caught.value)


def test_errors_without_a_failed_turn_get_no_hint() -> None:
    harness = ProducerHarness(SETTINGS)
    late, refusal = KafkaTimeoutError("late"), KafkaError("no")
    assert harness.producer.sender.explained(late) is late
    assert str(late) == "late"
    broken(harness)
    assert str(harness.producer.sender.explained(refusal)) == "no"
    assert refusal.__cause__ is None


def exits(*_: object) -> NoReturn:
    raise SystemExit("enough")


def test_a_callback_that_exits_ends_no_turn() -> None:
    harness = ProducerHarness(SETTINGS)
    harness.producer.send(TOPIC, b"a", on_completion=exits)
    later = harness.send(b"b")
    harness.settle()
    assert later.error is None


def test_ctrl_c_in_callback_of_refused_send_reaches_caller() -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    harness = ProducerHarness({**SETTINGS, "max.request.size": "100"})
    with pytest.raises(KeyboardInterrupt):
        harness.producer.send(TOPIC, bytes(500), on_completion=interrupted)


def test_a_thread_that_is_made_to_exit_settles_everything_before() -> None:
    harness = ProducerHarness(SETTINGS)
    harness.warm_up()
    harness.network.stalled.add(0)
    delivery = harness.send(bytes(400))
    harness.client.poll = lambda timeout_ms, now_ms: exits()
    with pytest.raises(SystemExit):
        harness.producer.sender.run()
    assert isinstance(delivery.error, ProducerClosedError)
    assert "was ended by SystemExit" in str(delivery.error)
    assert harness.memory_in_use == 0
    assert harness.selector.connection_ids == []
    with pytest.raises(ProducerClosedError):
        harness.send(b"later")
    with pytest.raises(ProducerClosedError):
        harness.producer.partitions_for("another")
    harness.producer.flush()


def test_transaction_fails_after_the_end_of_the_thread() -> None:
    harness = TransactionHarness(2).started()
    harness.send(b"a")
    harness.run_for(10)
    harness.client.poll = lambda timeout_ms, now_ms: exits()
    result = harness.manager.begin_commit()
    assert not result.is_done
    with pytest.raises(SystemExit):
        harness.producer.sender.run()
    assert isinstance(result.error, ProducerClosedError)


@pytest.mark.parametrize("call", ["commit_transaction", "abort_transaction", "prepare_transaction"])
def test_transaction_does_not_wait_for_ended_thread(call: str) -> None:
    harness = TransactionHarness(2).started()
    harness.client.poll = lambda timeout_ms, now_ms: exits()
    with pytest.raises(SystemExit):
        harness.producer.sender.run()
    began_ms = harness.now_ms
    with pytest.raises(ProducerClosedError, match="was ended by SystemExit"):
        getattr(harness.producer, call)()
    assert harness.now_ms == began_ms


@pytest.mark.parametrize("call", ["init_transactions", "commit_transaction"])
def test_transactional_call_ends_when_another_thread_closes(call: str) -> None:
    harness = TransactionHarness(2)
    if call == "commit_transaction":
        harness.started()
    manager = harness.manager
    begin = manager.begin_commit if call == "commit_transaction" else manager.begin_initialize

    def after_the_close(*arguments: Any) -> OperationResult:
        harness.producer.close()
        harness.producer.sender.run()
        return begin(*arguments)

    setattr(manager, begin.__name__, after_the_close)
    began_ms = harness.now_ms
    with pytest.raises(ProducerClosedError, match="was closed"):
        getattr(harness.producer, call)()
    assert harness.now_ms == began_ms


def test_flush_does_not_wait_for_ended_thread() -> None:
    harness = with_a_record_on_its_way()
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    harness.producer._thread = gone
    with pytest.raises(KafkaTimeoutError, match="still on their way"):
        harness.producer.flush()


class Watched(SystemClock):
    """Sleeps only after a failed turn of the Sender."""

    def __init__(self) -> None:
        self.slept = threading.Event()

    def sleep_ms(self, duration_ms: int) -> None:
        assert duration_ms == 100, "retry.backoff.ms"
        self.slept.set()


def test_failed_turn_is_logged_and_producer_not_reused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Watched()
    with caplog.at_level(logging.ERROR), KafkaProducer({"bootstrap.servers": "127.0.0.1:1"}, clock=clock) as producer:
        producer.sender.run_once = partial(breaks, 0, 0)
        producer.sender.wakeup()
        assert clock.slept.wait(5)
        del producer.sender.run_once
        assert producer.has_failed
        thread = sender_thread(producer)
    assert not thread.is_alive()
    assert FAULT in caplog.text
