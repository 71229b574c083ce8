"""Internal errors of the producer while it settles an answer: every batch of the answer ends at once, with its
callbacks.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
from kio.schema.errors import ErrorCode
from support.producer_harness import TOPIC, Delivery, ProducerHarness
from support.scripted_broker import faults
from support.transaction_harness import TransactionHarness

from spark_kafka_sink.common.errors import IllegalStateError, InvalidRecordError, KafkaError
from spark_kafka_sink.producer import produce_response, producer_batch
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.produce_response import BatchOutcomes
from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.columns import RecordColumns

SETTINGS = {"linger.ms": "20", "delivery.timeout.ms": "120000", "request.timeout.ms": "5000"}
ONE_IN_FLIGHT = {**SETTINGS, "max.in.flight.requests.per.connection": "1"}
PLAIN = {**ONE_IN_FLIGHT, "enable.idempotence": "false"}
SPLIT, TAKEN, REFUSED, RETRIED, MOVED, DOUBLE, COLUMNS = range(7)
"""The partitions, by what their node says."""
CODES = {REFUSED: 87, RETRIED: 19, MOVED: 6, DOUBLE: 46}
OF_LOCKS = frozenset({"__enter__", "__exit__", "acquire", "release"})


def mixed_answer(values: dict[str, Any]) -> Mapping[str, Any]:
    for topic in values["responses"]:
        for each in topic["partition_responses"]:
            each["error_code"] = CODES.get(each["index"], each["error_code"])
            if each["index"] == REFUSED:
                each["record_errors"] = ({"batch_index": 0, "batch_index_error_message": "odd"},)
    return values


def raises(*_: object) -> None:
    raise ValueError("the callback's own")


def before_an_answer(settings: Mapping[str, str]) -> tuple[ProducerHarness, dict[int, list[Delivery]]]:
    """Return a harness that is about to send a request.

    Its first batch is too large, the second is appended, others are refused.
    """
    harness = ProducerHarness(settings, topics={TOPIC: 7})
    harness.warm_up()
    return harness, sends_for_a_mixed_answer(harness)


def sends_for_a_mixed_answer(harness: ProducerHarness) -> dict[int, list[Delivery]]:
    harness.cluster.topics[TOPIC].max_message_bytes = 500
    harness.cluster.on(ApiKey.PRODUCE, faults.change(mixed_answer))
    harness.cluster.requests.clear()
    places = (TAKEN, REFUSED, RETRIED, MOVED, DOUBLE)
    deliveries = {place: [harness.send(b"%d" % place, partition=place)] for place in places}
    deliveries[REFUSED].append(harness.send(b"beside it", partition=REFUSED))
    deliveries[SPLIT] = [harness.send(bytes(150), partition=SPLIT) for _ in range(4)]
    harness.producer.send(TOPIC, b"t", partition=TAKEN, on_completion=raises)
    harness.send_columns(RecordColumns.from_rows([b"c"] * 6, partitions=[COLUMNS] * 3 + [REFUSED] * 3))
    return deliveries


def assert_nothing_is_left(harness: ProducerHarness) -> None:
    assert_all_has_ended(harness)
    assert harness.producer.has_failed


def assert_all_has_ended(harness: ProducerHarness) -> None:
    for delivery in harness.deliveries:
        if isinstance(delivery, Delivery):
            assert len(delivery.calls) == 1
            assert delivery.future is not None
            assert delivery.future.done()
        else:
            assert delivery.settled_rows == delivery.num_rows
    assert harness.memory_in_use == 0
    assert not any(queue.is_muted for queue in harness.accumulator._queues.values())
    assert not harness.accumulator.has_incomplete
    harness.producer.flush(0)


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Exception) -> None:
    original = getattr(owner, name)

    def raises(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        raise fault

    monkeypatch.setattr(owner, name, raises)


@pytest.mark.parametrize("settings", [SETTINGS, ONE_IN_FLIGHT, PLAIN], ids=["idempotent", "one in flight", "plain"])
def test_no_memory_for_a_split_fails_only_its_batch(
    monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, str]
) -> None:
    """Bug: the other batches of the answer had no outcome until delivery.timeout.ms, and memory was lost."""
    harness, deliveries = before_an_answer(settings)
    raise_once(monkeypatch, producer_batch, "decode_batches", MemoryError("no more"))
    harness.settle(1_000)
    assert_nothing_is_left(harness)
    for delivery in deliveries[SPLIT]:
        assert type(delivery.error) is KafkaError
        assert isinstance(delivery.error.__cause__, MemoryError)
        for part in (f"{TOPIC}-{SPLIT}", "MemoryError: no more", "Close this producer"):
            assert part in str(delivery.error)
    assert deliveries[TAKEN][0].error is None
    assert deliveries[TAKEN][0].metadata == (TOPIC, TAKEN, 1, deliveries[TAKEN][0].metadata.timestamp_ms, -1, 1)
    assert deliveries[DOUBLE][0].error is None
    assert deliveries[REFUSED][0].error.error_code == ErrorCode.invalid_record
    assert deliveries[RETRIED][0].error is None
    rows_refused = 3
    failed = [each for each in harness.deliveries if isinstance(each, Delivery) and each.error is not None]
    assert harness.producer.metrics()["record-error-total"] == len(failed) + rows_refused


@pytest.mark.parametrize("settings", [SETTINGS, ONE_IN_FLIGHT, PLAIN], ids=["idempotent", "one in flight", "plain"])
def test_after_a_fault_later_records_are_still_written_once(
    monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, str]
) -> None:
    harness, _ = before_an_answer(settings)
    raise_once(monkeypatch, producer_batch, "decode_batches", MemoryError())
    harness.settle(1_000)
    later = [harness.send(b"later", partition=place) for place in range(4)]
    harness.settle(1_000)
    assert [delivery.error for delivery in later] == [None] * 4
    assert [harness.values(TOPIC, place).count(b"later") for place in range(4)] == [1] * 4
    assert_nothing_is_left(harness)


@pytest.mark.parametrize("settings", [SETTINGS, ONE_IN_FLIGHT, PLAIN], ids=["idempotent", "one in flight", "plain"])
def test_acknowledged_records_do_not_fail_with_a_fault(
    monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, str]
) -> None:
    """They are in the log: after a failure a caller would write them again."""
    harness, deliveries = before_an_answer(settings)

    monkeypatch.setattr(ProducerMetrics, "batch_acknowledged", Mock(side_effect=MemoryError("no more")))
    harness.settle(1_000)
    assert_nothing_is_left(harness)
    for place in (TAKEN, DOUBLE, RETRIED, MOVED):
        assert deliveries[place][0].error is None, place
    assert deliveries[TAKEN][0].metadata.offset == 1


@pytest.mark.parametrize("step", ["_outcomes", "_no_answer"])
def test_unreadable_response_fails_its_batches_at_once(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    harness, _ = before_an_answer(ONE_IN_FLIGHT)
    raise_once(monkeypatch, produce_response, step, ValueError("no such date"))
    harness.settle(1_000)
    assert_nothing_is_left(harness)
    errors = [delivery.error for delivery in harness.deliveries if isinstance(delivery, Delivery)]
    for error in errors:
        assert "could not read the answer of node 0: ValueError: no such date" in str(error)
        assert "may or may not be in the log" in str(error)


def test_fault_at_the_end_of_split_fails_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, deliveries = before_an_answer(ONE_IN_FLIGHT)
    raise_once(monkeypatch, ProducerMetrics, "batch_split", RuntimeError("count"))
    harness.settle(1_000)
    assert_nothing_is_left(harness)
    assert all("RuntimeError: count" in str(delivery.error) for delivery in deliveries[SPLIT])
    assert b"\0" * 150 not in harness.values(TOPIC, SPLIT)
    later = harness.send(b"later", partition=SPLIT)
    harness.settle(1_000)
    assert later.error is None, "no part of the split batch holds it back"
    assert harness.values(TOPIC, SPLIT).count(b"later") == 1


class Fault:
    """Raises `fault` at the begin of call number `number` within the next call of `name` of `owner`, which is call 1.

    Counts calls of Python functions, with `in_c` also calls of C functions.
    """

    def __init__(self, owner: Any, name: str, number: int, fault: type[Exception], in_c: bool = False) -> None:
        self.where = ""
        self._left = number
        self._fault = fault
        self._events = {"call", "c_call"} if in_c else {"call"}
        original = getattr(owner, name)

        def first(*arguments: Any) -> Any:
            setattr(owner, name, original)
            before = sys.getprofile()
            gc.disable()  # calls in a garbage collection, as by hypothesis, do not count
            sys.setprofile(self._on_call)
            try:
                return original(*arguments)
            finally:
                sys.setprofile(before)
                gc.enable()

        setattr(owner, name, first)

    def _on_call(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        is_of_tests = "/tests/" in code.co_filename or "monkeypatch" in code.co_filename
        # A lack of memory does not prevent the release of a lock.
        if event not in self._events or is_of_tests or (event == "c_call" and called.__name__ in OF_LOCKS):
            return
        self._left -= 1
        if self._left == 0:
            of_c = f", as it calls {called.__name__}" if event == "c_call" else ""
            self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}{of_c}"
            raise self._fault("here")


@pytest.fixture
def no_log() -> Iterator[None]:
    """Count only calls of loggers: an error while a line is formatted is handled by logging."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


COMPRESSED = {**ONE_IN_FLIGHT, "compression.type": "lz4"}


@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize(
    ("settings", "fault", "in_c"),
    [
        pytest.param(ONE_IN_FLIGHT, MemoryError, True, marks=pytest.mark.slow),
        pytest.param(ONE_IN_FLIGHT, IllegalStateError, False, marks=pytest.mark.slow),
        (COMPRESSED, MemoryError, False),
        (PLAIN, MemoryError, False),
    ],
    ids=["memory", "state", "compressed", "plain"],
)
def test_fault_while_a_response_settles_leaves_nothing_behind(
    settings: Mapping[str, str], fault: type[Exception], in_c: bool
) -> None:
    """Every record has its outcome at once, its callback was called once, all memory is free, and the producer reports
    the failure.
    """
    places: list[str] = []
    while not places or places[-1]:
        harness, deliveries = before_an_answer(settings)
        injected = Fault(BatchOutcomes, "handle_response", len(places) + 1, fault, in_c)
        harness.run_for(2_000)
        places.append(injected.where)
        if injected.where:
            print(injected.where)  # shows the place of the failure
            assert_nothing_is_left(harness)
            harness.close()
            assert harness.memory_in_use == 0
    assert deliveries[TAKEN][0].error is None, "the last run is without a fault"
    assert not harness.producer.has_failed
    assert len(places) > (700 if in_c else 300)
    assert len([where for where in places if where.endswith(" BatchOutcomes._settle")]) == 7


@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize("fault", [MemoryError, IllegalStateError])
@pytest.mark.parametrize("settings", [ONE_IN_FLIGHT, PLAIN], ids=["idempotent", "plain"])
@pytest.mark.parametrize("is_in_flight", [False, True], ids=["queued", "in flight"])
def test_fault_while_a_batch_expires_leaves_nothing_behind(
    settings: Mapping[str, str], fault: type[Exception], is_in_flight: bool
) -> None:
    places: list[str] = []
    while not places or places[-1]:
        limits = {"delivery.timeout.ms": "6000", "request.timeout.ms": "5980"}
        harness = ProducerHarness({**settings, **limits}, topics={TOPIC: 2})
        harness.warm_up()
        if is_in_flight:
            harness.network.held.add(0)
        else:
            harness.network.refusing.add(0)
            harness.network.cut(0)
        for partition in (0, 1):
            harness.send(b"v", partition=partition)
        harness.send_columns(RecordColumns.from_rows([b"c"] * 2, partitions=[0, 1]))
        injected = Fault(BatchOutcomes, "expire", len(places) + 1, fault)
        deadline_ms = harness.now_ms + 20_000
        while harness.now_ms < deadline_ms and not harness.producer.sender.has_failed_turn:
            harness.turn_of_thread()
        places.append(injected.where)
        for _ in range(5):
            harness.turn_of_thread()
        if injected.where:
            print(injected.where)  # shows the place of the failure
            assert_nothing_is_left(harness)
    assert len(places) > 20


@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize("fault", [MemoryError, IllegalStateError])
def test_fault_while_sending_fails_drained_batches_at_once(fault: type[Exception]) -> None:
    """Bug: the records waited for delivery.timeout.ms, and their memory for the close."""
    places: list[str] = []
    while not places or places[-1]:
        harness = ProducerHarness({**ONE_IN_FLIGHT, "linger.ms": "0"}, topics={TOPIC: 2})
        harness.warm_up()
        for partition in (0, 1):
            harness.send(b"v", partition=partition)
        harness.send_columns(RecordColumns.from_rows([b"c"] * 2, partitions=[0, 1]))
        injected = Fault(harness.producer.sender, "_send_producer_data", len(places) + 1, fault)
        deadline_ms = harness.now_ms + 2_000
        while harness.now_ms < deadline_ms and harness.accumulator.has_incomplete:
            harness.turn_of_thread()
        places.append(injected.where)
        if injected.where:
            print(injected.where)  # shows the place of the failure
            assert_all_has_ended(harness)
            errors = [delivery.error for delivery in harness.deliveries if isinstance(delivery, Delivery)]
            is_of_encoding = any("could not be encoded" in str(error) for error in errors)  # fails only one batch
            assert harness.producer.has_failed is not is_of_encoding
    assert len(places) > 50


# ---- in a transaction ------------------------------------------------------------------------------------------------

both_versions = pytest.mark.parametrize("version", [1, 2])


def in_a_transaction(version: int) -> TransactionHarness:
    return TransactionHarness(version, SETTINGS, partitions=7).started()


def assert_every_call_raises_at_once(harness: TransactionHarness, *calls: str) -> None:
    for call in calls:
        began_ms = harness.now_ms
        with pytest.raises(KafkaError, match=r"internal error|failed to handle"):
            getattr(harness.producer, call)()
        assert harness.now_ms - began_ms < 1_000, call


@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize(
    ("version", "fault"), [pytest.param(1, MemoryError, marks=pytest.mark.slow), (2, IllegalStateError)]
)
def test_transaction_with_fault_in_any_call_is_not_committed(version: int, fault: type[Exception]) -> None:
    """Its commit does not wait for an outcome that never comes either."""
    places: list[str] = []
    while not places or places[-1]:
        harness = in_a_transaction(version)
        sends_for_a_mixed_answer(harness)
        injected = Fault(BatchOutcomes, "handle_response", len(places) + 1, fault)
        harness.run_for(2_000)
        places.append(injected.where)
        if injected.where:
            print(injected.where)  # shows the place of the failure
            assert_nothing_is_left(harness)
            began_ms = harness.now_ms
            with pytest.raises(KafkaError):
                harness.producer.commit_transaction()
            assert harness.now_ms - began_ms < 1_000
            harness.close()
            assert not any(harness.committed(place) for place in range(7))
            assert harness.memory_in_use == 0
    assert len(places) > 300


@both_versions
def test_split_without_memory_requires_an_abort(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    harness = in_a_transaction(version)
    harness.cluster.topics[TOPIC].max_message_bytes = 500
    for _ in range(4):
        harness.send(bytes(150), partition=SPLIT)
    raise_once(monkeypatch, producer_batch, "decode_batches", MemoryError("no more"))
    harness.settle(1_000)
    assert_nothing_is_left(harness)
    assert harness.state is State.ABORTABLE_ERROR
    assert_every_call_raises_at_once(harness, "commit_transaction")
    harness.producer.abort_transaction()
    assert not harness.coordinated.partitions


@both_versions
def test_impossible_state_in_a_refused_batch_is_fatal(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Bug: each commit timed out, and each abort said that the state does not allow it."""
    harness = in_a_transaction(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(InvalidRecordError))
    harness.send(b"v", partition=0)
    raise_once(monkeypatch, harness.manager, "_to_abortable", IllegalStateError("cannot become one"))
    assert_every_call_raises_at_once(harness, "commit_transaction")
    assert harness.state is State.FATAL_ERROR
    assert_nothing_is_left(harness)
    assert_every_call_raises_at_once(harness, "commit_transaction", "abort_transaction", "begin_transaction")
    assert harness.committed() == []


@both_versions
def test_impossible_state_in_an_answer_is_fatal(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Also if every batch of the answer could be settled."""
    harness = in_a_transaction(version)
    harness.send(b"v", partition=0)
    raise_once(monkeypatch, BatchOutcomes, "_note_answer", IllegalStateError("cannot be"))
    assert_every_call_raises_at_once(harness, "commit_transaction", "abort_transaction")
    assert harness.state is State.FATAL_ERROR
    assert_nothing_is_left(harness)
    assert harness.committed() == []


@both_versions
def test_impossible_state_at_the_end_of_a_commit_is_fatal(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    harness = in_a_transaction(version)
    harness.send(b"v", partition=0)
    raise_once(monkeypatch, harness.manager, "_on_end", IllegalStateError("cannot become one"))
    assert_every_call_raises_at_once(harness, "commit_transaction")
    assert harness.state is State.FATAL_ERROR
    assert harness.producer.has_failed
    assert_every_call_raises_at_once(harness, "commit_transaction", "abort_transaction")


@both_versions
def test_impossible_state_in_a_turn_is_fatal(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    harness = in_a_transaction(version)
    harness.send(b"v", partition=0)
    raise_once(monkeypatch, harness.manager, "_enqueue_new_partitions", IllegalStateError("cannot become one"))
    harness.turn_of_thread()
    assert harness.state is State.FATAL_ERROR
    assert_every_call_raises_at_once(harness, "commit_transaction", "abort_transaction")
    harness.settle(1_000)
    assert_nothing_is_left(harness)


def test_fault_in_the_producer_id_answer_fails_waiting_records(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ProducerHarness(SETTINGS)
    delivery = harness.send(b"v")
    raise_once(monkeypatch, harness.identity, "_restart_partitions", MemoryError("no more"))
    harness.settle(1_000)
    assert "MemoryError: no more" in str(delivery.error)
    assert_nothing_is_left(harness)
