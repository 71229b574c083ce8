"""A fault of the producer's own while an answer is settled: every batch of the answer ends at once, and is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import pytest
from support.producer_harness import TOPIC, Delivery, ProducerHarness
from support.scripted_broker import faults
from support.transaction_harness import TransactionHarness

from spark_kafka_sink.client.seams import ClientResponse
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError
from spark_kafka_sink.producer import batch_split, produce_response
from spark_kafka_sink.producer.transaction_manager import State

PRODUCE = 0
SETTINGS = {"linger.ms": "20", "delivery.timeout.ms": "120000", "request.timeout.ms": "5000"}
ONE_IN_FLIGHT = {**SETTINGS, "max.in.flight.requests.per.connection": "1"}
PLAIN = {**ONE_IN_FLIGHT, "enable.idempotence": "false"}
SPLIT, TAKEN, REFUSED, RETRIED = range(4)
"""The partitions, by what their node says."""
TELLS_OUTCOMES = frozenset({"fire", "exception", "metadata", "error_of", "offset_of", "mark_done"})
GIVES_MEMORY_BACK = frozenset({"deallocate", "_give_back", "take_memory", "release", "_notify_first"})
READS = frozenset({"_answered", "_no_answer", "_outcomes", "_refusal", "_to_epoch_ms"})
NOT_FAULTED = frozenset({"handle_response", "_settle_at_once", "__init__"}) | TELLS_OUTCOMES | GIVES_MEMORY_BACK


def mixed_answer(values: dict[str, Any]) -> Mapping[str, Any]:
    for topic in values["responses"]:
        for each in topic["partition_responses"]:
            each["error_code"] = {REFUSED: 87, RETRIED: 19}.get(each["index"], each["error_code"])
    return values


def before_an_answer(settings: Mapping[str, str]) -> tuple[ProducerHarness, dict[int, list[Delivery]]]:
    """One request is about to go: its first batch is too large, the second is taken, others are refused."""
    harness = ProducerHarness(settings, topics={TOPIC: 4})
    harness.warm_up()
    return harness, sends_for_a_mixed_answer(harness)


def sends_for_a_mixed_answer(harness: ProducerHarness) -> dict[int, list[Delivery]]:
    harness.cluster.topics[TOPIC].max_message_bytes = 500
    harness.cluster.on(PRODUCE, faults.change(mixed_answer))
    harness.cluster.requests.clear()
    deliveries = {place: [harness.send(b"%d" % place, partition=place)] for place in (TAKEN, REFUSED, RETRIED)}
    deliveries[SPLIT] = [harness.send(bytes(150), partition=SPLIT) for _ in range(4)]
    return deliveries


def assert_nothing_is_left(harness: ProducerHarness) -> None:
    assert all(len(delivery.calls) == 1 for delivery in harness.deliveries)
    assert all(delivery.future is not None and delivery.future.done() for delivery in harness.deliveries)
    assert harness.memory_in_use == 0
    assert not any(queue.is_muted for queue in harness.accumulator._queues.values())
    assert harness.producer.has_failed


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Exception) -> None:
    original = getattr(owner, name)

    def raises(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        raise fault

    monkeypatch.setattr(owner, name, raises)


@pytest.mark.parametrize("settings", [SETTINGS, ONE_IN_FLIGHT, PLAIN], ids=["idempotent", "one in flight", "plain"])
def test_no_memory_for_a_split_costs_its_batch_only(
    monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, str]
) -> None:
    """Bug: the other batches of the answer had no outcome until delivery.timeout.ms, and memory was lost."""
    harness, deliveries = before_an_answer(settings)
    raise_once(monkeypatch, batch_split, "decode_batches", MemoryError("no more"))
    harness.settle(1_000)
    assert_nothing_is_left(harness)
    for delivery in deliveries[SPLIT]:
        assert type(delivery.error) is KafkaError
        assert isinstance(delivery.error.__cause__, MemoryError)
        for part in (f"{TOPIC}-{SPLIT}", "MemoryError: no more", "Close this producer"):
            assert part in str(delivery.error)
    assert deliveries[TAKEN][0].error is None
    assert deliveries[TAKEN][0].metadata == (TOPIC, TAKEN, 1, deliveries[TAKEN][0].metadata.timestamp_ms, -1, 1)
    assert deliveries[REFUSED][0].error.error_code == 87
    assert deliveries[RETRIED][0].error is None


@pytest.mark.parametrize("settings", [SETTINGS, ONE_IN_FLIGHT, PLAIN], ids=["idempotent", "one in flight", "plain"])
def test_after_a_fault_later_records_are_still_written_once(
    monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, str]
) -> None:
    harness, _ = before_an_answer(settings)
    raise_once(monkeypatch, batch_split, "decode_batches", MemoryError())
    harness.settle(1_000)
    later = [harness.send(b"later", partition=place) for place in range(4)]
    harness.settle(1_000)
    assert [delivery.error for delivery in later] == [None] * 4
    assert [harness.values(TOPIC, place).count(b"later") for place in range(4)] == [1] * 4
    assert_nothing_is_left(harness)


@pytest.mark.parametrize("step", ["_outcomes", "_no_answer"])
def test_an_answer_that_cannot_be_read_fails_its_batches_at_once(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    harness, _ = before_an_answer(ONE_IN_FLIGHT)
    raise_once(monkeypatch, produce_response, step, ValueError("no such date"))
    harness.settle(1_000)
    assert_nothing_is_left(harness)
    for delivery in harness.deliveries:
        assert "could not read the answer of node 0: ValueError: no such date" in str(delivery.error)
        assert "in the log is not known" in str(delivery.error)


def test_a_fault_at_the_end_of_a_split_fails_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, deliveries = before_an_answer(ONE_IN_FLIGHT)
    raise_once(monkeypatch, harness.producer._metrics, "batch_split", RuntimeError("count"))
    harness.settle(1_000)
    assert_nothing_is_left(harness)
    assert all("RuntimeError: count" in str(delivery.error) for delivery in deliveries[SPLIT])
    assert b"\0" * 150 not in harness.values(TOPIC, SPLIT)


class Fault:
    """Raises `fault` where function number `number` of the producer's is called while the next answer is settled."""

    def __init__(self, harness: ProducerHarness, number: int, fault: type[Exception]) -> None:
        self.where = ""
        self._left = number
        self._fault = fault
        self._outcomes = harness.producer.sender._outcomes
        self._outcomes.handle_response = self._handle  # type: ignore[method-assign]

    def _handle(self, response: ClientResponse, batches: Any) -> None:
        del self._outcomes.handle_response
        before = sys.getprofile()
        sys.setprofile(self._on_call)
        try:
            self._outcomes.handle_response(response, batches)
        finally:
            sys.setprofile(before)

    def _on_call(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_own = "spark_kafka_sink/producer/" in code.co_filename and not code.co_name.startswith("<")
        if event != "call" or not is_own or code.co_name in NOT_FAULTED:
            return
        self._left -= 1
        if self._left == 0:
            self.where = code.co_qualname
            raise self._fault("here")


@pytest.mark.parametrize("settings", [SETTINGS, ONE_IN_FLIGHT, PLAIN], ids=["idempotent", "one in flight", "plain"])
@pytest.mark.parametrize("fault", [MemoryError, IllegalStateError])
def test_a_fault_in_any_call_leaves_nothing_behind(settings: Mapping[str, str], fault: type[Exception]) -> None:
    met: list[str] = []
    while not met or met[-1]:
        harness, deliveries = before_an_answer(settings)
        injected = Fault(harness, len(met) + 1, fault)
        harness.run_for(2_000)
        met.append(injected.where)
        if injected.where:
            print(injected.where)  # shown where the test fails
            assert_nothing_is_left(harness)
            assert (deliveries[TAKEN][0].error is None) is (injected.where not in READS)
    assert len(met) > 60
    assert met.count("BatchOutcomes._settle") == 4


# ---- in a transaction ------------------------------------------------------------------------------------------------

both_versions = pytest.mark.parametrize("version", [1, 2])


def in_a_transaction(version: int) -> TransactionHarness:
    return TransactionHarness(version, SETTINGS, partitions=4).started()


def assert_every_call_raises_at_once(harness: TransactionHarness, *calls: str) -> None:
    for call in calls:
        began_ms = harness.now_ms
        with pytest.raises(KafkaError, match=r"fault of its own|failed to handle"):
            getattr(harness.producer, call)()
        assert harness.now_ms - began_ms < 1_000, call


@both_versions
@pytest.mark.parametrize("fault", [MemoryError, IllegalStateError])
def test_a_transaction_with_a_fault_in_any_call_is_not_committed(version: int, fault: type[Exception]) -> None:
    """Nor does its commit wait for what never comes."""
    met: list[str] = []
    while not met or met[-1]:
        harness = in_a_transaction(version)
        sends_for_a_mixed_answer(harness)
        injected = Fault(harness, len(met) + 1, fault)
        harness.run_for(2_000)
        met.append(injected.where)
        if injected.where:
            print(injected.where)  # shown where the test fails
            assert_nothing_is_left(harness)
            began_ms = harness.now_ms
            with pytest.raises(KafkaError):
                harness.producer.commit_transaction()
            assert harness.now_ms - began_ms < 1_000
            harness.close()
            assert not any(harness.committed(place) for place in range(4))
    assert len(met) > 60


@both_versions
def test_no_memory_for_a_split_leaves_the_transaction_to_be_aborted(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    harness = in_a_transaction(version)
    harness.cluster.topics[TOPIC].max_message_bytes = 500
    for _ in range(4):
        harness.send(bytes(150), partition=SPLIT)
    raise_once(monkeypatch, batch_split, "decode_batches", MemoryError("no more"))
    harness.settle(1_000)
    assert_nothing_is_left(harness)
    assert harness.state is State.ABORTABLE_ERROR
    assert_every_call_raises_at_once(harness, "commit_transaction")
    harness.producer.abort_transaction()
    assert not harness.coordinated.partitions


@both_versions
def test_a_state_that_cannot_be_in_a_refused_batch_is_fatal(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Bug: each commit timed out, and each abort said that the state forbids it."""
    harness = in_a_transaction(version)
    harness.cluster.on(PRODUCE, faults.fail_with(87))
    harness.send(b"v", partition=0)
    raise_once(monkeypatch, harness.manager, "_to_abortable", IllegalStateError("cannot become one"))
    assert_every_call_raises_at_once(harness, "commit_transaction")
    assert harness.state is State.FATAL_ERROR
    assert_nothing_is_left(harness)
    assert_every_call_raises_at_once(harness, "commit_transaction", "abort_transaction", "begin_transaction")
    assert harness.committed() == []


@both_versions
def test_a_state_that_cannot_be_at_the_end_of_a_commit_is_fatal(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    harness = in_a_transaction(version)
    harness.send(b"v", partition=0)
    raise_once(monkeypatch, harness.manager, "_on_end", IllegalStateError("cannot become one"))
    assert_every_call_raises_at_once(harness, "commit_transaction")
    assert harness.state is State.FATAL_ERROR
    assert harness.producer.has_failed
    assert_every_call_raises_at_once(harness, "commit_transaction", "abort_transaction")


@both_versions
def test_a_state_that_cannot_be_in_a_turn_is_fatal(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    harness = in_a_transaction(version)
    harness.send(b"v", partition=0)
    raise_once(monkeypatch, harness.manager, "_enqueue_new_partitions", IllegalStateError("cannot become one"))
    harness.producer.sender._run_safely()
    assert harness.state is State.FATAL_ERROR
    assert_every_call_raises_at_once(harness, "commit_transaction", "abort_transaction")
    harness.settle(1_000)
    assert_nothing_is_left(harness)


def test_a_fault_in_the_answer_with_a_producer_id_fails_what_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = ProducerHarness(SETTINGS)
    delivery = harness.send(b"v")
    raise_once(monkeypatch, harness.producer._transaction_manager, "_restart_partitions", MemoryError("no more"))
    harness.settle(1_000)
    assert "MemoryError: no more" in str(delivery.error)
    assert_nothing_is_left(harness)
