"""Rows 19, 23, 27, 29, 30 and the scripted halves of 32 and 34: a broker refuses records, and the producer keeps the
state of its sequences, over real sockets.
"""

from __future__ import annotations

import time

import pytest
from kio.schema.errors import ErrorCode
from support.history import Outcome
from support.lateness import Stopwatch
from support.scripted_broker import faults
from support.scripted_stage import Scripted, Start

from spark_kafka_sink.common.errors import (
    CorruptMessageError,
    KafkaError,
    KafkaTimeoutError,
    NotEnoughReplicasError,
    OutOfOrderSequenceError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
)
from spark_kafka_sink.protocol.versions import ApiKey

pytestmark = pytest.mark.quick


def test_row_19_topic_vanishes_and_returns(scripted: Start, seed: int) -> None:
    stage = scripted()
    producer = stage.producer(
        **{"metadata.max.age.ms": 50, "metadata.max.idle.ms": 5_000, "max.block.ms": 10_000, "request.timeout.ms": 200}
    )
    for _ in range(3):
        stage.deliver(producer, 7)
        with stage.server.lock:
            stage.cluster.topics["t"].is_visible = False
            stage.on(ApiKey.PRODUCE, faults.fail_with(UnknownTopicOrPartitionError), times=2)
            asked = stage.requests(ApiKey.METADATA)
            waiting = stage.send(producer, 3)  # before the producer hears of it: else a send waits for max.block.ms
        deadline = time.monotonic() + 10
        while stage.requests(ApiKey.METADATA) < asked + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with stage.server.lock:
            stage.cluster.topics["t"].is_visible = True
        producer.flush(20)
        assert all(record.outcome is Outcome.YES for record in waiting)
    assert stage.cluster.log("t", 0).duplicates == 0
    stage.check()


def test_row_23_corrupt_message_always(scripted: Start, seed: int) -> None:
    stage = scripted()
    producer = stage.producer(**{"delivery.timeout.ms": 1_500})
    stage.deliver(producer)
    stage.on(ApiKey.PRODUCE, faults.fail_with(CorruptMessageError), times=None)
    with Stopwatch() as watch, pytest.raises(KafkaTimeoutError) as caught:
        producer.send("t", b"v", partition=0).result(5)
    stage.note(f"after {watch.took_s:.2f} s: {caught.value}")
    assert watch.took_s >= 1.4
    assert watch.own_s <= 1.65


ONE_A_BATCH = {"batch.size": 1}


def epochs(stage: Scripted) -> set[int]:
    with stage.server.lock:
        return {batch.header.producer_epoch for batch in stage.cluster.log("t", 0).batches}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "error_code",
    [ErrorCode.out_of_order_sequence_number, ErrorCode.unknown_producer_id],
    ids=["out_of_order_sequence", "unknown_producer_id"],
)
def test_row_27_and_29_abort_a_transaction(scripted: Start, seed: int, error_code: int, version: int) -> None:
    stage = scripted(finalized_features={"transaction.version": version})
    producer = stage.producer(**{"transactional.id": "id"})
    producer.init_transactions()
    producer.begin_transaction()
    stage.on(ApiKey.PRODUCE, faults.fail_with(error_code))
    lost = producer.send("t", b"lost", partition=0)
    with pytest.raises(OutOfOrderSequenceError):
        producer.commit_transaction()
    with pytest.raises(OutOfOrderSequenceError):
        lost.result(0)
    producer.abort_transaction()
    producer.begin_transaction()
    producer.send("t", b"kept", partition=0)
    producer.commit_transaction()
    with stage.server.lock:
        assert [record.value for record in stage.cluster.log("t", 0).committed_records()] == [b"kept"]


def test_row_29_producer_id_forgotten(scripted: Start, seed: int) -> None:
    """Retention deleted the producer's records, and the leader forgot its state: the producer continues in any case."""
    stage = scripted()
    producer = stage.producer(**ONE_A_BATCH)
    stage.deliver(producer, 3)
    with stage.server.lock:
        stage.cluster.log("t", 0).forget_producers()
    stage.deliver(producer, 3)
    stage.check()


def test_row_30_batch_in_flight_expires(scripted: Start, seed: int) -> None:
    """The batch's outcome is unknown. No batch follows until its request has ended, and the next one has a new
    epoch.
    """
    stage = scripted()
    producer = stage.producer(**ONE_A_BATCH, **{"request.timeout.ms": 600, "delivery.timeout.ms": 700})
    stage.deliver(producer, 2)
    lost = stage.on(ApiKey.PRODUCE, faults.lose_response(), times=None)
    doomed = stage.send(producer, 2)
    producer.flush(5)
    with stage.server.lock:
        lost.times = 0
    assert [record.outcome for record in doomed] == [Outcome.NO] * 2
    stage.deliver(producer, 5)
    assert len(epochs(stage)) == 2
    stage.check()


def test_row_30_sequences_wrap(scripted: Start, seed: int) -> None:
    stage = scripted()
    producer = stage.producer(**ONE_A_BATCH)
    stage.deliver(producer)
    identity = producer._identity
    assert identity is not None
    with stage.server.lock:
        (state,) = stage.cluster.log("t", 0).producers.values()
        state.last_sequence = 2**31 - 4
        state.batches.clear()
        (sequences,) = identity.sequences.values()
        sequences.next_sequence, sequences.last_acked_sequence = 2**31 - 3, 2**31 - 4
    stage.on(ApiKey.PRODUCE, faults.fail_with(NotEnoughReplicasError), skip=2)
    stage.deliver(producer, 8)
    with stage.server.lock:
        bases = [batch.header.base_sequence for batch in stage.cluster.log("t", 0).batches]
    assert bases == [0, *range(2**31 - 3, 2**31), *range(5)]
    stage.check()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "error_code",
    [
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.not_coordinator,
        ErrorCode.concurrent_transactions,
    ],
)
@pytest.mark.parametrize("api_key", [ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.END_TXN])
def test_row_32_coordinator_in_trouble(scripted: Start, seed: int, api_key: int, error_code: int, version: int) -> None:
    """Not available, loading, not the coordinator, busy: the producer retries, in bounded time."""
    stage = scripted(2, finalized_features={"transaction.version": version})
    stage.on(api_key, faults.fail_with(error_code), times=3)
    producer = stage.producer(**{"transactional.id": "id"})
    with Stopwatch() as watch:
        producer.init_transactions()
        for number in range(2):
            producer.begin_transaction()
            producer.send("t", f"{number}", partition=0)
            producer.commit_transaction()
    stage.note(f"{watch.took_s:.3f} s")
    assert watch.own_s < 3
    with stage.server.lock:
        assert [record.value for record in stage.cluster.log("t", 0).committed_records()] == [b"0", b"1"]


def test_row_34_end_of_a_transaction_unknown_server_error(scripted: Start, seed: int) -> None:
    """The next transaction begins only when the outcome of this one is known."""
    stage = scripted(finalized_features={"transaction.version": 2})
    producer = stage.producer(**{"transactional.id": "id", "max.block.ms": 800})
    producer.init_transactions()
    producer.begin_transaction()
    producer.send("t", b"v", partition=0)
    stage.on(ApiKey.END_TXN, faults.fail_with(UnknownServerError), times=None)
    with pytest.raises(KafkaError) as caught:
        producer.commit_transaction()
    stage.note(f"{type(caught.value).__name__}: {caught.value}")
    with pytest.raises(KafkaError):
        producer.begin_transaction()
