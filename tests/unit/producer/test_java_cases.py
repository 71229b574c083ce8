"""Cases of the Java client's own tests that no other test here holds. Each docstring names the Java test
(org.apache.kafka.clients.producer).

Each test runs a whole producer in one thread against the scripted broker.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.producer_harness import TOPIC, Delivery, ProducerHarness
from support.scripted_broker import faults
from support.scripted_broker.exchange import Answer, Exchange
from support.transaction_harness import PRODUCE

from spark_kafka_sink.common.errors import KafkaError, NotLeaderOrFollowerError, ProducerClosedError
from spark_kafka_sink.producer.futures import RecordMetadata
from spark_kafka_sink.producer.transaction_manager import MAX_EPOCH, TransactionManager

METADATA, INIT_PRODUCER_ID = 3, 22
ONE_EACH = {"linger.ms": "0", "batch.size": "1"}
NOT_LEADER, OUT_OF_ORDER = 6, 45
OLD_ID, NEW_ID = 1000, 1001
SLOW_MS = 50
"""Partition 1 is answered this much later than partition 0."""


def idempotent(settings: dict[str, str] | None = None) -> ProducerHarness:
    """A producer without transactions. Two partitions with a leader each have acknowledged a record of it."""
    harness = ProducerHarness({**ONE_EACH, **(settings or {})}, topics={TOPIC: 2}, node_count=2)
    harness.warm_up()
    harness.cluster.requests.clear()
    return harness


def manager_of(harness: ProducerHarness) -> TransactionManager:
    manager = harness.producer._transaction_manager
    assert manager is not None
    return manager


def at_last_epoch() -> ProducerHarness:
    """As `idempotent`, and the next epoch takes a new producer id: 1001, after 1000."""
    harness = idempotent()
    manager = manager_of(harness)
    manager.producer = manager.producer._replace(epoch=MAX_EPOCH)
    harness.warm_up()
    harness.cluster.requests.clear()
    return harness


def answer(harness: ProducerHarness, hooks: dict[int, list[faults.Hook]]) -> None:
    """Let these hooks decide about the partitions' next batches, one hook for each batch."""

    def hook(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        (data,) = exchange.request.topic_data[0].partition_data
        waiting = hooks.get(int(data.index), [])
        answer = waiting.pop(0)(cluster, exchange, proceed) if waiting else proceed()
        return dataclasses.replace(answer, delay_ms=SLOW_MS * int(data.index))

    harness.cluster.on(PRODUCE, hook, times=None)


def stored(harness: ProducerHarness, partition: int) -> list[tuple[int, int, int]]:
    """(producer id, epoch, base sequence) of every batch in the partition's log."""
    headers = [batch.header for batch in harness.cluster.log(TOPIC, partition).batches]
    return [(header.producer_id, header.producer_epoch, header.base_sequence) for header in headers]


def send_to_both(harness: ProducerHarness, value: bytes) -> list[Delivery]:
    return [harness.send(value, partition=partition) for partition in (0, 1)]


# ---- an epoch that begins while another partition has a batch in flight ----------------------------------------------


def test_batch_that_fails_after_another_partitions_new_epoch_leaves_no_gap() -> None:
    """SenderTest.testEpochBumpOnOutOfOrderSequenceForNextBatchWhenBatchInFlightFails."""
    harness = idempotent({"retries": "1"})
    not_leader = faults.fail_with(NOT_LEADER)
    answer(harness, {0: [faults.fail_with(OUT_OF_ORDER)], 1: [not_leader, not_leader]})
    kept, given_up = send_to_both(harness, b"second")
    harness.settle()
    third = send_to_both(harness, b"third")
    harness.settle()
    assert isinstance(given_up.error, NotLeaderOrFollowerError)
    assert [each.error for each in (kept, *third)] == [None] * 3
    assert harness.values(partition=0) == [b"second", b"third"]
    assert harness.values(partition=1) == [b"third"]
    assert stored(harness, 0)[1] == (OLD_ID, 1, 0)
    _, (_, epoch, sequence) = stored(harness, 1)
    assert epoch > 0
    assert sequence == 0


@pytest.mark.parametrize(
    "fate",
    [
        pytest.param(None, id="TransactionManagerTest.testBatchCompletedAfterProducerReset"),
        pytest.param(faults.fail_with(NOT_LEADER), id="TransactionManagerTest.testBatchFailureAfterProducerReset"),
        pytest.param(faults.close_before(), id="SenderTest.testRetryWhenProducerIdChanges"),
        pytest.param(faults.close_after(), id="SenderTest.testRetryWhenProducerIdChanges, taken by the broker"),
    ],
)
def test_batch_in_flight_ends_under_its_old_producer_id(fate: faults.Hook | None) -> None:
    """Partition 0 needs a new producer id while a batch of partition 1 is in flight (the parameters: Java's tests).

    That batch keeps its numbers, so that the broker knows it when it comes again. The next one takes the new id.
    """
    harness = at_last_epoch()
    answer(harness, {0: [faults.fail_with(OUT_OF_ORDER)], 1: [] if fate is None else [fate]})
    send_to_both(harness, b"second")
    harness.run_until(lambda: manager_of(harness).producer == (NEW_ID, 0))
    assert not harness.deliveries[1].is_settled
    send_to_both(harness, b"third")
    harness.settle()
    assert [each.error for each in harness.deliveries] == [None] * 4
    for partition in (0, 1):
        assert harness.values(partition=partition) == [b"second", b"third"]
    assert stored(harness, 0)[2:] == [(NEW_ID, 0, 0), (NEW_ID, 0, 1)]
    assert stored(harness, 1)[2:] == [(OLD_ID, MAX_EPOCH, 1), (NEW_ID, 0, 0)]


def waits_for_new_id() -> ProducerHarness:
    """Partition 0 waits for a new producer id that comes in 30 ms. A batch of partition 1 is in flight."""
    harness = at_last_epoch()
    answer(harness, {0: [faults.fail_with(OUT_OF_ORDER)], 1: [faults.fail_with(NOT_LEADER)]})
    harness.cluster.on(INIT_PRODUCER_ID, faults.delay(30))
    send_to_both(harness, b"second")
    harness.run_until(lambda: harness.cluster.requests_of(INIT_PRODUCER_ID))
    return harness


def test_close_waits_for_new_producer_id_and_sends_the_rest() -> None:
    """SenderTest.testCloseWithProducerIdReset."""
    harness = waits_for_new_id()
    harness.close()
    assert [each.error for each in harness.deliveries] == [None, None]
    assert [harness.values(partition=partition) for partition in (0, 1)] == [[b"second"], [b"second"]]
    assert stored(harness, 0)[2:] == [(NEW_ID, 0, 0)]


def test_forced_close_does_not_wait_for_new_producer_id() -> None:
    """SenderTest.testForceCloseWithProducerIdReset."""
    harness = waits_for_new_id()
    began_ms = harness.now_ms
    harness.producer.sender.force_close()
    harness.producer.sender.run()
    assert harness.now_ms == began_ms
    assert [type(each.error) for each in harness.deliveries] == [ProducerClosedError] * 2
    assert not harness.accumulator.has_undrained
    assert harness.memory_in_use == 0


# ---- callbacks -------------------------------------------------------------------------------------------------------


def test_record_sent_in_callback_of_an_expired_one_arrives() -> None:
    """SenderTest.testAppendInExpiryCallback."""
    settings = {"linger.ms": "0", "delivery.timeout.ms": "4000", "request.timeout.ms": "1000"}
    harness = ProducerHarness(settings, node_count=2)
    harness.warm_up()
    harness.network.refusing.add(0)  # the leader; node 1 still answers for metadata
    harness.network.cut(0)
    expired: list[KafkaError] = []

    def send_again(metadata: RecordMetadata | None, error: KafkaError | None) -> None:
        assert error is not None
        expired.append(error)
        harness.send(b"%d" % len(expired), partition=0)

    for _ in range(10):
        harness.producer.send(TOPIC, b"first", partition=0, on_completion=send_again)
    harness.run_until(lambda: expired)
    harness.network.refusing.discard(0)
    harness.settle()
    assert len(expired) == 10
    assert [each.error for each in harness.deliveries] == [None] * 10
    assert harness.values() == [b"%d" % number for number in range(1, 11)]
    assert harness.memory_in_use == 0
