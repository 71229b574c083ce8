"""Records and offsets that reach no batch or request, and the order of records and ends."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from support.producer_harness import TOPIC
from support.transaction_harness import GROUP, ID, PLACE, TransactionHarness
from support.transaction_steps import aborted_and_next_works, both_versions, warm

from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    BufferExhaustedError,
    InvalidTopicError,
    KafkaError,
    RecordTooLargeError,
    SerializationError,
    TransactionAbortableError,
    TransactionAbortedError,
)
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.transaction_requests import GroupMetadata
from spark_kafka_sink.producer.transactions import State, TransactionManager
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.columns import RecordColumns

SEND = "a send"

# ---- records that reach no batch
# --------------------------------------------------------------------------------------


@both_versions
def test_commit_fails_after_record_refused_at_once(version: int) -> None:
    harness = warm(version, {"max.request.size": "1000"})
    large = harness.send(b"x" * 2_000, partition=0)
    assert isinstance(large.error, RecordTooLargeError)
    with pytest.raises(RecordTooLargeError, match=r"max\.request\.size"):
        harness.producer.commit_transaction()
    aborted_and_next_works(harness)


@both_versions
def test_commit_fails_after_record_for_invalid_topic(version: int) -> None:
    harness = warm(version)
    assert isinstance(harness.send(b"v", "no such name").error, InvalidTopicError)
    with pytest.raises(InvalidTopicError, match="no such name"):
        harness.producer.commit_transaction()
    aborted_and_next_works(harness)


@both_versions
def test_commit_fails_after_record_without_memory(version: int) -> None:
    harness = warm(version, {"buffer.memory": "4000", "batch.size": "1000", "max.block.ms": "300"})
    harness.network.held.add(0)
    deliveries = [harness.send(b"x" * 900, partition=0) for _ in range(8)]
    assert any(isinstance(each.error, BufferExhaustedError) for each in deliveries)
    assert isinstance(deliveries[-1].error, TransactionAbortableError)
    harness.network.held.clear()
    with pytest.raises(TransactionAbortableError, match=r"buffer\.memory=4000 stayed full"):
        harness.producer.commit_transaction()
    aborted_and_next_works(harness)


@both_versions
def test_columns_that_were_taken_in_part_are_not_committed(version: int) -> None:
    harness = warm(version, {"max.request.size": "1000"})
    rows = pa.array([b"small", b"x" * 2_000])
    with pytest.raises(RecordTooLargeError):
        harness.producer.send_columns(TOPIC, RecordColumns(rows, partition=pa.array([0, 0], pa.int32())))
    with pytest.raises(RecordTooLargeError, match="had an error before"):
        harness.producer.commit_transaction()
    aborted_and_next_works(harness)


@both_versions
def test_misuse_does_not_cost_the_transaction(version: int) -> None:
    harness = warm(version)
    with pytest.raises(KafkaError):
        harness.send(3.5, partition=0)  # type: ignore[arg-type]
    harness.producer.commit_transaction()
    assert harness.committed() == [b"warm-up", b"first"]


@both_versions
@pytest.mark.parametrize(
    ("offsets", "group"),
    [
        ({PLACE: 5}, GROUP),
        ({PLACE: (5, "\ud800")}, GROUP),
        ({TopicPartition("half a pair \ud800", 0): (5, None)}, GROUP),
        ({TopicPartition(TOPIC, 2**31): (5, None)}, GROUP),
        ({PLACE: (5, None)}, None),
        ({PLACE: (5, None)}, ""),
        ({PLACE: (5, None)}, "half a pair \ud800"),
        ({PLACE: (5, None)}, "x" * 32_768),
        ({PLACE: (5, None)}, GroupMetadata(GROUP, 2**31)),
        ({PLACE: (5, None)}, GroupMetadata(GROUP, 1, "half a pair \ud800")),
        ({PLACE: (5, None)}, GroupMetadata(GROUP, 1, "member", "half a pair \ud800")),
    ],
)
def test_invalid_offsets_or_group_are_refused_without_harm(version: int, offsets: Any, group: Any) -> None:
    harness = TransactionHarness(version).started()
    before_ms = harness.now_ms
    with pytest.raises(SerializationError):
        harness.producer.send_offsets_to_transaction(offsets, group)
    assert harness.now_ms == before_ms
    harness.producer.send_offsets_to_transaction({PLACE: (5, None)}, GROUP)
    harness.producer.commit_transaction()
    assert harness.offsets()[TOPIC, 0].offset == 5


# ---- the order of records and ends -----------------------------------------------------------------------------------


def manager_in_transaction(version: int) -> TransactionManager:
    harness = TransactionHarness(version).started()
    return harness.manager


def test_record_between_two_checks_goes_before_end() -> None:
    """A record is appended and a commit begins between two checks of the Sender."""
    harness = TransactionHarness(2).started()
    manager, accumulator = harness.manager, harness.accumulator

    def send_and_commit() -> bool:
        return accumulator.has_incomplete

    before = accumulator.has_incomplete
    harness.send(b"a", partition=0)
    manager.begin_commit()
    assert not before
    assert manager.next_request(harness.now_ms, send_and_commit) is None
    harness.run_until(lambda: harness.state is State.READY)
    assert harness.calls() == [ApiKey.PRODUCE, ApiKey.END_TXN]


@both_versions
def test_a_batch_of_no_transaction_waits(version: int) -> None:
    manager = manager_in_transaction(version)
    batch = ProducerBatch(TopicPartition(TOPIC, 1), 0, 1_000, 0)
    assert manager.must_wait(batch)
    manager.add_partition(batch.topic_partition, SEND)
    assert manager.must_wait(batch) is (version == 1)
    manager._current.confirm_added(frozenset({batch.topic_partition}))
    assert not manager.must_wait(batch)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_whether_something_is_lost_or_completing_follows_from_the_state(state: State) -> None:
    manager = manager_in_transaction(2)
    manager.add_partition(PLACE, SEND)
    batch = ProducerBatch(PLACE, 0, 1_000, 0)
    manager.machine.state, manager.machine.error = state, KafkaError("why")
    is_lost = state in {State.ABORTABLE_ERROR, State.ABORTING}
    assert (manager.lost_transaction is not None) is is_lost
    assert manager.must_wait(batch) is (is_lost or state is State.FATAL_ERROR)
    assert manager.is_completing is (state in {State.COMMITTING, State.ABORTING})
    if is_lost:
        assert manager.lost_transaction is manager.last_error
    if state is State.ABORTING:
        manager.machine.error = None
        assert isinstance(manager.lost_transaction, TransactionAbortedError)
        assert ID in str(manager.lost_transaction)


def test_producer_id_is_sent_with_its_records() -> None:
    manager = TransactionManager(ID, 1_000, ExponentialBackoff(1, 2, 3, 0, None), lambda name: 0, tuple)  # type: ignore[arg-type]
    assert manager.transactional_id == ID
    assert manager.identity.is_transactional
