"""Idempotence: producer id, sequences, five in flight, and what each error does to them. Whole producers against a
broker that checks sequences as a real one does.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.producer_harness import ONE_EACH, TOPIC, Delivery, ProducerHarness, warm
from support.scripted_broker import faults
from support.scripted_broker.batches import check_batch
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.partition_log import PartitionLog
from support.scripted_broker.versions import KAFKA_4_1

from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    ConcurrentTransactionsError,
    CoordinatorLoadInProgressError,
    InvalidPidMappingError,
    InvalidRecordError,
    InvalidRequestError,
    KafkaError,
    KafkaTimeoutError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OutOfOrderSequenceError,
    RequestTimedOutError,
    SaslAuthenticationError,
    TopicAuthorizationError,
    UnknownProducerIdError,
    UnknownServerError,
    UnknownTopicOrPartitionError,
)
from spark_kafka_sink.common.open_transaction import NO_PRODUCER, ProducerIdAndEpoch
from spark_kafka_sink.producer.futures import RecordMetadata
from spark_kafka_sink.producer.idempotence import MAX_EPOCH, PartitionSequences, ProducerIdentity
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.protocol.versions import ApiKey

LOADING = "The coordinator is still loading its state."
PLACE = TopicPartition(TOPIC, 0)
SHORT = {**ONE_EACH, "delivery.timeout.ms": "10000", "request.timeout.ms": "3000"}


def send_all(harness: ProducerHarness, count: int, start: int = 0) -> list[Delivery]:
    return [harness.send(b"%d" % index) for index in range(start, start + count)]


def stored(harness: ProducerHarness, partition: int = 0) -> list[tuple[int, int]]:
    """Return (epoch, base sequence) of every batch in the log."""
    log = harness.cluster.log(TOPIC, partition)
    return [(batch.header.producer_epoch, batch.header.base_sequence) for batch in log.batches]


def attempts(harness: ProducerHarness) -> list[tuple[int, int]]:
    """Return (epoch, base sequence) of every batch that was sent to the broker."""
    headers = [
        check_batch(bytes(data.records))
        for exchange in harness.cluster.requests_of(ApiKey.PRODUCE)
        for topic in exchange.request.topic_data
        for data in topic.partition_data
    ]
    return [(header.producer_epoch, header.base_sequence) for header in headers]


def values(count: int) -> list[bytes]:
    return [b"%d" % index for index in range(count)]


def errors(deliveries: list[Delivery]) -> list[KafkaError | None]:
    return [delivery.error for delivery in deliveries]


# ---- the producer id -------------------------------------------------------------------------------------------------


def test_one_producer_id_is_requested_for_all_batches() -> None:
    harness = ProducerHarness(ONE_EACH, topics={TOPIC: 2}, node_count=2)
    for index in range(6):
        harness.send(b"v", partition=index % 2)
    harness.settle()
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == 1
    assert stored(harness, 0) == stored(harness, 1) == [(0, 0), (0, 1), (0, 2)]
    ids = {batch.header.producer_id for index in (0, 1) for batch in harness.cluster.log(TOPIC, index).batches}
    assert ids == {1000}
    assert "producer id 1000, epoch 0" in repr(harness.identity)


def test_without_idempotence_there_is_no_id_and_no_sequence() -> None:
    harness = ProducerHarness({**ONE_EACH, "enable.idempotence": "false"})
    send_all(harness, 2)
    harness.settle()
    assert harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID) == []
    assert stored(harness) == [(-1, -1), (-1, -1)]


@pytest.mark.parametrize(
    "fault",
    [
        faults.fail_with(CoordinatorLoadInProgressError),
        faults.fail_with(ConcurrentTransactionsError),
        faults.close_before(),
    ],
)
def test_producer_id_is_requested_until_it_comes(fault: faults.Hook) -> None:
    harness = ProducerHarness(ONE_EACH)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, fault, times=3)
    delivery = harness.send(b"v")
    start_ms = harness.now_ms
    harness.settle()
    assert delivery.error is None
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == 4
    assert harness.now_ms - start_ms >= 500  # 100, 200, 400 ms, each minus 20 %


def test_ungranted_producer_id_is_requested_with_the_next_send() -> None:
    """Java's SenderTest.testClusterAuthorizationExceptionInInitProducerIdRequest."""
    harness = ProducerHarness(ONE_EACH)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ClusterAuthorizationError), times=2)
    for asked in (1, 2):
        refused = send_all(harness, 3)
        harness.settle(2_000)
        for delivery in refused:
            assert isinstance(delivery.error, ClusterAuthorizationError)
            assert not delivery.error.fatal
        harness.run_for(60_000)
        assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == asked, "nothing waits for it"
        assert harness.memory_in_use == 0
        assert not harness.producer.has_failed
    granted = send_all(harness, 2)
    harness.settle(2_000)
    assert errors(granted) == [None] * 2
    assert harness.values() == values(2)


def test_ungranted_producer_id_is_not_requested_too_often() -> None:
    harness = ProducerHarness(ONE_EACH)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ClusterAuthorizationError), times=None)
    until_ms = harness.now_ms + 10_000
    while harness.now_ms < until_ms:
        harness.send(b"v")
        harness.run_for(5)
    harness.settle(2_000)
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) < 20
    assert all(isinstance(delivery.error, ClusterAuthorizationError) for delivery in harness.deliveries)


def test_producer_id_refused_before_any_send_fails_no_send() -> None:
    harness = ProducerHarness(ONE_EACH)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ClusterAuthorizationError))
    harness.run_for(1_000)
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == 1
    delivery = harness.send(b"v")
    harness.settle(1_000)
    assert delivery.error is None


def test_refused_renewal_of_the_producer_id_keeps_sent_batches() -> None:
    """Its retries keep their numbers, so that no record is duplicated, and wait until the right is granted again."""
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response())
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ClusterAuthorizationError), times=3)
    (sent,) = send_all(harness, 1)
    harness.run_until(lambda: len(attempts(harness)) == 1)
    identity = harness.identity
    identity.producer = NO_PRODUCER  # as after the last epoch
    harness.settle()
    assert sent.error is None
    assert harness.values() == values(1)
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) >= 4


def test_other_refusal_of_producer_id_is_fatal() -> None:
    harness = ProducerHarness(ONE_EACH)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(InvalidRequestError))
    delivery = harness.send(b"v")
    harness.settle()
    assert delivery.error.error_code == ErrorCode.invalid_request
    assert harness.producer.has_failed


def test_answer_without_a_producer_id_is_retried_after_the_backoff() -> None:
    """No broker does this. The producer must neither send under the id -1 nor ask in a loop."""

    def without_id(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        return Answer({**(proceed().values or {}), "producer_id": -1, "producer_epoch": -1})

    harness = ProducerHarness(ONE_EACH)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, without_id, times=3)
    start_ms = harness.now_ms
    delivery = harness.send(b"v")
    harness.settle()
    assert delivery.error is None
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == 4
    assert harness.now_ms - start_ms >= 500  # 100, 200, 400 ms, each minus 20 %


def test_authentication_failure_without_producer_id_is_fatal() -> None:
    harness = ProducerHarness(ONE_EACH)
    refusal = SaslAuthenticationError("wrong password")
    harness.client.authentication_error = lambda node: refusal
    delivery = harness.send(b"v")
    harness.settle()
    assert delivery.error is refusal


def test_producer_id_after_a_refusal_of_another_node_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bug: the answer raised IllegalStateError. Its traceback hid the refusal from the operator."""
    harness = ProducerHarness(ONE_EACH)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.delay(500))
    delivery = harness.send(b"v")
    harness.run_until(lambda: harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID))
    refusal = SaslAuthenticationError("wrong password")
    harness.client.ready = lambda *_: False
    harness.client.authentication_error = lambda node: refusal
    harness.run_for(1_000)
    assert not harness.client.has_in_flight_requests()
    assert delivery.error is refusal
    assert harness.identity.last_error is refusal
    assert "failed" not in caplog.text


def test_without_any_node_a_turn_asks_for_no_producer_id() -> None:
    harness = ProducerHarness(ONE_EACH)
    harness.client.least_loaded_node = lambda now_ms: None
    harness.turn(5)
    assert harness.identity.is_initializing
    assert harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID) == []


def test_records_expire_without_a_producer_id_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    harness = ProducerHarness(SHORT)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(CoordinatorLoadInProgressError), times=None)
    delivery = harness.send(b"v")
    harness.settle()
    assert isinstance(delivery.error, KafkaTimeoutError)
    assert delivery.took_ms <= 10_100
    assert str(delivery.error).endswith("has no producer id; the last answer was: " + LOADING)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings[:2] == [f"No producer id: attempt {number} was refused: {LOADING}" for number in (5, 10)]


def test_refusal_of_a_granted_producer_id_explains_no_later_error() -> None:
    harness = ProducerHarness(SHORT)
    identity = harness.identity
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(CoordinatorLoadInProgressError))
    harness.run_until(lambda: identity.reason_to_wait(PLACE))
    harness.run_until(lambda: identity.producer.is_valid)
    identity.producer = NO_PRODUCER  # the next one is requested, and has no answer yet
    assert identity.reason_to_wait(PLACE) is None


# ---- five in flight, in order ----------------------------------------------------------------------------------------


def test_five_requests_are_in_flight_and_arrive_in_order() -> None:
    harness = warm(ONE_EACH)
    harness.network.held.add(0)
    deliveries = send_all(harness, 8)
    harness.run_for(300)
    assert len(attempts(harness)) == 5
    harness.network.held.clear()
    harness.settle()
    assert harness.values() == values(8)
    assert errors(deliveries) == [None] * 8


def test_nothing_follows_a_partitions_first_batch_until_it_is_acknowledged() -> None:
    harness = ProducerHarness(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.delay(500))
    deliveries = send_all(harness, 4)
    harness.run_for(300)
    assert attempts(harness) == [(0, 0)]
    harness.settle()
    assert errors(deliveries) == [None] * 4
    assert stored(harness) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_no_new_batch_follows_a_retry_to_a_recreated_topic() -> None:
    """The leader has no state of the producer then, as before the first batch. It would append a later batch before the
    refused one, and append it again after a lost response.
    """
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, forget_and_refuse, times=1)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotLeaderOrFollowerError), times=1)
    harness.cluster.on(ApiKey.PRODUCE, faults.close_after(), times=1)
    first = harness.send(b"0")
    harness.run_until(lambda: len(attempts(harness)) == 1)
    behind_it = harness.send(b"1")
    harness.settle()
    assert errors([first, behind_it]) == [None, None]
    assert harness.values() == values(2)


def to_a_leader_without_state(harness: ProducerHarness) -> None:
    """Move the leader to node 1, which has the log without the producer: a replica whose retained log never had it, or
    one that was elected although it was not in sync.
    """
    harness.cluster.move_leader(TOPIC, 0, 1)
    harness.cluster.log(TOPIC, 0).forget_producers()
    harness.metadata.request_update()


def test_first_batch_to_a_new_leader_goes_alone() -> None:
    """Bug: a leader that did not know the producer refused the first of several batches in flight, and appended the
    second one. The first then came after it.
    """
    harness = warm(ONE_EACH, node_count=2)
    to_a_leader_without_state(harness)
    harness.run_for(500)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotEnoughReplicasError))
    deliveries = send_all(harness, 4)
    harness.settle()
    assert errors(deliveries) == [None] * 4
    assert harness.values() == values(4)


def test_first_batch_after_a_long_pause_goes_alone() -> None:
    """Bug: a leader that had forgotten the producer refused the first of several batches in flight, and appended the
    second one. The first then came after it.
    """
    harness = warm(ONE_EACH)
    harness.run_for(610_000)
    harness.cluster.log(TOPIC, 0).forget_producers()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotEnoughReplicasError))
    deliveries = send_all(harness, 4)
    harness.settle()
    assert errors(deliveries) == [None] * 4
    assert harness.values() == values(4)


def test_no_batch_goes_to_a_new_leader_while_the_old_one_may_refuse_an_earlier_one() -> None:
    """Bug: while a batch was in flight to the old leader, the new one, which did not know the producer, appended a
    later batch. The earlier one then came after it.
    """
    refuse = faults.fail_with(NotLeaderOrFollowerError)
    harness = warm(ONE_EACH, topics={TOPIC: 2}, node_count=2)
    harness.cluster.on(ApiKey.PRODUCE, lambda *request: dataclasses.replace(refuse(*request), delay_ms=800))
    deliveries = [harness.send(b"0", partition=0)]
    harness.run_for(20)
    to_a_leader_without_state(harness)
    harness.run_for(200)
    deliveries += [harness.send(b"%d" % index, partition=0) for index in range(1, 4)]
    harness.settle()
    assert errors(deliveries) == [None] * 4
    assert harness.values() == values(4)


@pytest.mark.parametrize("is_answer_lost", [False, True])
def test_first_batch_to_a_recreated_topic_goes_alone(is_answer_lost: bool) -> None:
    """Bug: the leader of the new topic refused the first of several batches in flight, and appended the second one. The
    first then came after it, and the second again if its answer was lost.
    """
    harness = warm(ONE_EACH)
    harness.cluster.delete_topic(TOPIC)
    harness.cluster.create_topic(TOPIC)
    harness.metadata.request_update()
    harness.run_for(500)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(UnknownTopicOrPartitionError))
    if is_answer_lost:
        harness.cluster.on(ApiKey.PRODUCE, faults.close_after())
    deliveries = send_all(harness, 4)
    harness.settle()
    assert errors(deliveries) == [None] * 4
    assert harness.values() == values(4)


def lose_answer(harness: ProducerHarness) -> None:
    harness.cluster.on(ApiKey.PRODUCE, faults.close_after())


def delay_answer(harness: ProducerHarness) -> None:
    harness.cluster.on(ApiKey.PRODUCE, faults.delay(300))


def delay_metadata(harness: ProducerHarness) -> None:
    harness.cluster.on(ApiKey.METADATA, faults.delay(300))


def fill_with_others(harness: ProducerHarness) -> None:
    """Others write to the new topic first, so that offsets say nothing. The answer comes after the new metadata."""

    def fill(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        cluster.log(TOPIC, 0).log_start_offset = 1_000
        return dataclasses.replace(proceed(), delay_ms=300)

    harness.cluster.on(ApiKey.PRODUCE, fill)


@pytest.mark.parametrize("trouble", [lose_answer, delay_answer, delay_metadata, fill_with_others])
@pytest.mark.parametrize("refusal", [UnknownTopicOrPartitionError, NotLeaderOrFollowerError])
def test_batch_that_a_recreated_topic_lacks_is_not_acknowledged(
    refusal: type[KafkaError], trouble: Callable[[ProducerHarness], None]
) -> None:
    """Bug: the leader of the new topic took the second batch. The first one was then out of order, and the producer
    concluded from the acknowledgement of the second that the first was in the log.
    """
    harness = warm(ONE_EACH, topics={TOPIC: 3}, node_count=3)
    harness.run_for(2_000)
    leader = harness.cluster.topics[TOPIC].partitions[0].leader_id
    harness.cluster.on(ApiKey.PRODUCE, faults.create_again(TOPIC, refusal), node_id=leader)
    trouble(harness)
    deliveries = [harness.send(b"%d" % index, partition=0) for index in range(3)]
    harness.settle()
    assert errors(deliveries) == [None] * 3
    assert set(harness.values()) == set(values(3))
    assert len(harness.values()) == 3


def numbered(*record_counts: int) -> tuple[PartitionSequences, list[ProducerBatch]]:
    entry = PartitionSequences(PLACE)
    batches = [ProducerBatch(PLACE, 0, 1_000, 0) for _ in record_counts]
    for batch, records in zip(batches, record_counts, strict=True):
        for _ in range(records):
            batch.append_row(None, b"v", (), 0, 50, None)
        entry.take(batch, False)
    return entry, batches


@pytest.mark.parametrize(
    ("acknowledged", "base_offset", "are_overtaken"),
    [
        (None, 5, [False, False]),  # there is room for three and two records
        (None, 4, [True, True]),
        (100, 108, [False, False]),
        (100, 107, [True, True]),  # behind 103 there is no room for five
        (100, 0, [True, True]),
    ],
)
def test_offset_shows_whether_older_batches_are_in_the_log(
    acknowledged: int | None, base_offset: int, are_overtaken: list[bool]
) -> None:
    entry, (before, first, second, third, fourth) = numbered(3, 3, 2, 1, 1)
    if acknowledged is not None:
        entry.note_place(before, acknowledged)
    entry.remove(before)
    entry.note_place(third, base_offset)
    entry.acknowledge(third)
    assert [first.is_overtaken, second.is_overtaken] == are_overtaken
    assert [entry.has_taken(each) for each in (first, second)] == [not each for each in are_overtaken]
    assert not fourth.is_overtaken
    entry.start_at_beginning(ProducerIdAndEpoch(7, 1), False)
    assert not first.is_overtaken, "it is sent under a new number"


def test_older_batch_may_be_acknowledged_behind_newer_ones() -> None:
    """The leader answers a retry with the offset of the first attempt."""
    entry, (first, second, third, fourth) = numbered(2, 2, 2, 2)
    for batch, offset in ((second, 12), (first, 10), (fourth, 16)):
        entry.note_place(batch, offset)
        entry.remove(batch)
    assert not third.is_overtaken


def test_recreated_topic_gets_batches_in_flight_together_after_the_first() -> None:
    harness = warm(ONE_EACH)
    harness.cluster.delete_topic(TOPIC)
    harness.cluster.create_topic(TOPIC)
    harness.metadata.request_update()
    harness.run_for(500)
    send_all(harness, 1)
    harness.settle()
    harness.network.held.add(0)
    send_all(harness, 5, start=1)
    harness.run_for(200)
    assert len(attempts(harness)) == 6
    harness.network.held.clear()
    harness.settle()
    assert harness.values() == values(6)


def test_retry_with_later_batches_in_flight_blocks_new_batches() -> None:
    harness = warm(ONE_EACH)
    identity = harness.identity
    first, behind_it, new = (ProducerBatch(PLACE, 0, 100, harness.now_ms) for _ in range(3))
    for batch in (first, behind_it, new):
        batch.leader_epoch = 0
    for batch in (first, behind_it):
        batch.append_row(None, b"v", (), 0, 50, None)
        identity.on_drain(batch)
    assert not identity.must_wait(new)
    first.mark_attempt(UnknownServerError(), harness.now_ms, harness.now_ms + 100)
    assert identity.must_wait(new)


def forget_and_refuse(cluster: ScriptedCluster, exchange: Exchange, proceed: Callable[[], Answer]) -> Answer:
    """Delete the topic and create it again."""
    cluster.delete_topic(TOPIC)
    cluster.create_topic(TOPIC)
    return faults.fail_with(UnknownTopicOrPartitionError)(cluster, exchange, proceed)


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize(
    "error_code",
    [
        ErrorCode.corrupt_message,
        ErrorCode.not_leader_or_follower,
        ErrorCode.request_timed_out,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
    ],
)
def test_any_of_five_batches_fails_and_all_arrive_in_order(which: int, error_code: int) -> None:
    """Rows 16, 23, 26 with five in flight: batches after the failed one get OUT_OF_ORDER_SEQUENCE and wait; no new
    epoch begins for that (row 27).
    """
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(error_code), skip=which)
    deliveries = send_all(harness, 7)
    harness.settle()
    assert errors(deliveries) == [None] * 7
    assert harness.values() == values(7)
    assert stored(harness) == [(0, index) for index in range(8)]
    assert harness.memory_in_use == 0


@pytest.mark.parametrize("fault", [faults.close_after(), faults.close_before(), faults.lose_response()])
def test_broker_drops_duplicates_after_a_lost_connection(fault: faults.Hook) -> None:
    harness = warm(SHORT)
    harness.cluster.on(ApiKey.PRODUCE, fault, skip=2)
    deliveries = send_all(harness, 8)
    harness.settle()
    assert errors(deliveries) == [None] * 8
    assert harness.values() == values(8)
    assert {epoch for epoch, _ in stored(harness)} == {0}


# ---- a leader that was restarted, and knows only the last batch of each producer -------------------------------------


def restarted(harness: ProducerHarness, log: PartitionLog | None = None) -> None:
    """Restart the leader while the answers to batches are lost, and go on until all have ended."""
    harness.run_for(50)
    (log or harness.cluster.log(TOPIC, 0)).restart_leader()
    harness.settle()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_unanswered_batches_are_written_once_by_a_restarted_leader(count: int) -> None:
    """Bug: the leader refused all but the last batch as out of order. The producer took that for a loss, and sent them
    again under a new epoch: every row was there twice.
    """
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), times=count)
    deliveries = send_all(harness, count)
    restarted(harness)
    deliveries += send_all(harness, 2, start=count)
    harness.settle()
    assert errors(deliveries) == [None] * (count + 2)
    assert harness.values() == values(count + 2)
    assert {epoch for epoch, _ in stored(harness)} == {0}
    assert harness.memory_in_use == 0


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("refusal", [TopicAuthorizationError, InvalidRecordError])
def test_unanswered_batches_are_not_written_again_after_the_last_was_refused(
    count: int, refusal: type[KafkaError]
) -> None:
    """Bug: the restarted leader knew only the last batch, and refused it for another reason when it was sent again. The
    older ones got a new epoch: they were acknowledged, and there twice.
    """
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), times=count)
    deliveries = send_all(harness, count)
    harness.run_for(50)
    harness.cluster.log(TOPIC, 0).restart_leader()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(refusal), skip=count - 1)
    harness.settle()
    assert harness.values() == values(count)
    assert [type(error) for error in errors(deliveries)] == [OutOfOrderSequenceError] * (count - 1) + [refusal]
    assert all("may or may not be in the log" in str(error) for error in errors(deliveries)[:-1])
    later = send_all(harness, 2, start=count)
    harness.settle()
    assert errors(later) == [None, None]
    assert harness.values() == values(count + 2)
    assert harness.memory_in_use == 0


def test_unanswered_batches_are_not_written_again_after_the_last_was_split() -> None:
    """Bug: as above. The topic's limit was lowered meanwhile, so that the last batch was too large."""
    harness = warm({"linger.ms": "5", "batch.size": "600"})
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), times=2)
    deliveries = [harness.send(b"0")]
    harness.run_for(6)
    deliveries += [harness.send(b"%d" % number + b"x" * 150) for number in (1, 2)]
    harness.run_for(50)
    harness.cluster.log(TOPIC, 0).restart_leader()
    harness.cluster.topics[TOPIC].max_message_bytes = 300
    harness.settle()
    assert [(value or b"")[:1] for value in harness.values()] == [b"0", b"1", b"2"]
    assert all(isinstance(error, OutOfOrderSequenceError) for error in errors(deliveries))


def test_doubt_about_older_batches_lasts_as_long_as_one_is_in_flight() -> None:
    """The leader may have the first and the second. The second has failed, and the third was never appended."""
    harness = warm(ONE_EACH)
    identity, gap = harness.identity, OutOfOrderSequenceError()
    first, second, third = made = [ProducerBatch(PLACE, 0, 100, harness.now_ms) for _ in range(3)]
    for batch in made:
        batch.append_row(None, b"v", (), 0, 50, None)
        identity.on_drain(batch)
    first.may_be_in_log = second.may_be_in_log = True
    identity.handle_failed_batch(second, TopicAuthorizationError())
    assert identity.can_retry(first, gap, -1), "the third may say what the leader has"
    assert not identity.can_retry(third, gap, -1), "under new numbers the first would be there twice"
    identity.handle_failed_batch(third, gap)
    assert identity.sequences[PLACE].is_in_doubt
    identity.handle_failed_batch(first, gap)
    assert not identity.sequences[PLACE].is_in_doubt


def test_callbacks_keep_the_order_of_the_records_after_a_restart_of_the_leader() -> None:
    """The leader acknowledges the last batch first."""
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), times=5)
    called: list[tuple[bytes, int]] = []
    for value in values(5):

        def note(made: RecordMetadata, error: KafkaError | None, value: bytes = value) -> None:
            assert error is None
            called.append((value, made.offset))

        harness.producer.send(TOPIC, value, on_completion=note)
    restarted(harness)
    harness.run_for(60_000)
    assert called == [*((value, -1) for value in values(4)), (b"4", 5)]


@pytest.mark.parametrize("written", [1, 2, 3, 4])
def test_restarted_leader_gets_the_batches_that_it_never_had(written: int) -> None:
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), times=written)
    harness.cluster.on(ApiKey.PRODUCE, faults.close_before(), skip=written)
    deliveries = send_all(harness, 5)
    restarted(harness)
    assert errors(deliveries) == [None] * 5
    assert harness.values() == values(5)
    assert {epoch for epoch, _ in stored(harness)} == {0}


def test_leader_that_has_lost_all_unanswered_batches_gets_them_in_a_new_epoch() -> None:
    """The last acknowledged batch is lost with them, as after an unclean election."""
    harness = warm(ONE_EACH)
    acknowledged = send_all(harness, 1, start=9)
    harness.settle()
    log = harness.cluster.log(TOPIC, 0)
    before = copy.deepcopy(log.producers)
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), times=5)
    deliveries = send_all(harness, 5)
    harness.run_for(50)
    del log.batches[1:]
    log.producers = before
    for state in log.producers.values():
        state.last_sequence -= 1
        state.batches.pop()
    harness.settle()
    assert errors(acknowledged + deliveries) == [None] * 6
    assert harness.values() == values(5)
    assert [epoch for epoch, _ in stored(harness)] == [0, *[1] * 5]


def test_batch_before_an_acknowledged_one_is_in_the_log_of_a_restarted_leader() -> None:
    """The leader said of the first that it has too few replicas after the append, and acknowledged the second."""
    harness = warm(ONE_EACH)
    log = harness.cluster.log(TOPIC, 0)

    def appended(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        proceed()
        return faults.fail_with(NotEnoughReplicasAfterAppendError)(cluster, exchange, proceed)

    harness.cluster.on(ApiKey.PRODUCE, appended)
    deliveries = send_all(harness, 2)
    harness.run_for(20)
    assert [delivery.is_settled for delivery in deliveries] == [False, True]
    restarted(harness, log)
    assert errors(deliveries) == [None, None]
    assert harness.values() == values(2)


def test_batches_behind_an_expired_one_are_written_once_by_a_restarted_leader() -> None:
    harness = warm(SHORT)
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_response(), times=5)
    first = harness.send(b"0")
    harness.clock.advance(2_000)
    others = send_all(harness, 4, start=1)
    harness.run_for(50)
    harness.cluster.log(TOPIC, 0).restart_leader()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotEnoughReplicasError), times=1)
    harness.network.held.add(0)
    harness.run_for(8_000)
    harness.network.held.clear()
    harness.settle()
    assert isinstance(first.error, KafkaTimeoutError)
    assert harness.values() == values(5)
    assert errors(others) == [None] * 4


def test_leader_that_knows_no_producer_gets_the_oldest_batch_first() -> None:
    """The restarted leader refuses the first; then a leader without state takes over. It would take any batch."""
    harness = warm(ONE_EACH, node_count=2)
    harness.cluster.on(ApiKey.PRODUCE, faults.close_before(), times=5)
    deliveries = send_all(harness, 5)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(OutOfOrderSequenceError), skip=5)
    while len(attempts(harness)) < 7:  # the warm one, five, and the first again
        harness.turn(1)
    harness.turn(1)
    to_a_leader_without_state(harness)
    harness.settle()
    assert errors(deliveries) == [None] * 5
    assert harness.values() == values(5)


def test_retries_go_one_by_one() -> None:
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(RequestTimedOutError), times=5)
    send_all(harness, 5)
    harness.run_for(5)
    assert len(attempts(harness)) == 5
    harness.network.held.add(0)
    harness.run_for(1_000)
    assert attempts(harness)[5:] == [(0, 1)]
    harness.network.held.clear()
    harness.settle()
    assert harness.values() == values(5)


def test_leaders_that_move_under_load_lose_nothing() -> None:
    harness = warm(ONE_EACH, node_count=3)
    rng = random.Random(7)
    deliveries = []
    for index in range(60):
        deliveries.append(harness.send(b"%d" % index))
        if index % 10 == 5:
            harness.cluster.move_leader(TOPIC, 0, rng.randrange(3))
        harness.turn(1)
    harness.settle()
    assert errors(deliveries) == [None] * 60
    assert harness.values() == values(60)


# ---- row 27: OUT_OF_ORDER_SEQUENCE -----------------------------------------------------------------------------------


def test_out_of_order_head_begins_new_epoch_without_loss() -> None:
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(OutOfOrderSequenceError))
    deliveries = send_all(harness, 3)
    harness.settle()
    assert errors(deliveries) == [None] * 3
    assert harness.values() == values(3)
    assert [epoch for epoch, _ in stored(harness)] == [0, 1, 1, 1]
    assert stored(harness)[1:] == [(1, 0), (1, 1), (1, 2)]


def test_out_of_order_for_good_fails_at_the_delivery_timeout() -> None:
    harness = warm(SHORT)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(OutOfOrderSequenceError), times=None)
    delivery = harness.send(b"v")
    harness.settle()
    assert isinstance(delivery.error, (KafkaTimeoutError, OutOfOrderSequenceError))
    assert delivery.took_ms <= 11_000
    assert harness.identity.producer.epoch <= 2  # one that did not help, one after the batch was given up
    harness.cluster.scripts.clear()
    later = harness.send(b"later")
    harness.settle()
    assert later.error is None
    assert harness.values() == [b"later"]


def test_gap_among_renumbered_batches_begins_a_new_epoch() -> None:
    """After the new epoch the first of them is given up, which leaves a gap before the others."""
    harness = warm(SHORT)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(OutOfOrderSequenceError))
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(InvalidRecordError), skip=2)
    deliveries = send_all(harness, 3)
    start_ms = harness.now_ms
    harness.settle()
    assert deliveries[0].error is not None
    assert errors(deliveries[1:]) == [None, None]
    assert harness.values() == values(3)[1:]
    assert harness.now_ms - start_ms < 2_000


def test_gap_after_data_loss_in_the_new_epoch_begins_another() -> None:
    """The first batch with a new number is acknowledged, and the next leader does not have it."""
    harness = warm(SHORT)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(OutOfOrderSequenceError))
    log = harness.cluster.log(TOPIC, 0)

    def lose_the_last(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        if stored(harness)[-1:] == [(1, 0)] and len(kept) == 1:
            kept.append(log.batches.pop())
            log.producers.update(known)
        else:
            known.update(copy.deepcopy(log.producers))
        return proceed()

    known: dict[int, Any] = {}
    kept = log.batches[:1]
    deliveries = send_all(harness, 3)
    harness.cluster.on(ApiKey.PRODUCE, lose_the_last, times=None)
    harness.settle()
    assert len(kept) == 2
    assert errors(deliveries) == [None] * 3
    assert harness.values() == values(3)[1:]
    assert [epoch for epoch, _ in stored(harness)] == [0, 2, 2]


def test_drained_partitions_go_on_in_the_new_epoch() -> None:
    harness = warm(ONE_EACH, topics={TOPIC: 2})
    first = harness.send(b"a", partition=1)
    harness.settle()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(OutOfOrderSequenceError))
    harness.send(b"b", partition=0)
    harness.settle()
    later = [harness.send(b"%d" % index, partition=1) for index in range(3)]
    harness.settle()
    assert first.error is None
    assert errors(later) == [None] * 3
    assert stored(harness, 1) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_batches_of_older_epoch_finish_before_new_ones() -> None:
    harness = warm(ONE_EACH, topics={TOPIC: 2}, node_count=2)
    slow = faults.delay(1_000)

    def by_partition(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        indexes = [data.index for topic in exchange.request.topic_data for data in topic.partition_data]
        return (slow if indexes == [1] else faults.fail_with(OutOfOrderSequenceError))(cluster, exchange, proceed)

    harness.cluster.on(ApiKey.PRODUCE, by_partition, times=2)
    old = harness.send(b"old", partition=1)
    harness.run_for(5)
    harness.send(b"x", partition=0)
    harness.run_for(5)
    new = harness.send(b"new", partition=1)
    harness.settle()
    assert errors([old, new]) == [None, None]
    assert stored(harness, 1) == [(0, 0), (0, 1), (1, 0)]


# ---- row 29: the broker lost its producer state ----------------------------------------------------------------------


def unknown_producer(log_start_offset: int) -> faults.Hook:
    def hook(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        answer = dict(faults.fail_with(UnknownProducerIdError)(cluster, exchange, proceed).values or {})
        for topic in answer["responses"]:
            for each in topic["partition_responses"]:
                each["log_start_offset"] = log_start_offset
        return Answer(answer)

    return hook


def test_unknown_producer_id_begins_new_epoch_and_retries() -> None:
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, unknown_producer(5))
    deliveries = send_all(harness, 3)
    harness.settle()
    assert errors(deliveries) == [None] * 3
    assert harness.values() == values(3)
    assert stored(harness)[1:] == [(1, 0), (1, 1), (1, 2)]


def test_unknown_producer_id_without_log_start_is_only_retried() -> None:
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, unknown_producer(-1))
    delivery = harness.send(b"v")
    harness.settle()
    assert delivery.error is None
    assert stored(harness) == [(0, 0), (0, 1)]


def test_several_unknown_producer_ids_begin_one_new_epoch() -> None:
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, unknown_producer(5), times=5)
    deliveries = send_all(harness, 5)
    harness.settle()
    assert errors(deliveries) == [None] * 5
    assert harness.values() == values(5)
    assert harness.identity.producer.epoch == 1


def test_an_expired_producer_id_is_not_noticed() -> None:
    """The broker forgets the producer between two batches and accepts any sequence from it."""
    harness = warm(ONE_EACH)
    harness.cluster.log(TOPIC, 0).forget_producers()
    deliveries = send_all(harness, 4)
    harness.settle()
    assert errors(deliveries) == [None] * 4
    assert harness.values() == values(4)


# ---- row 30: expiry in flight, wrap ----------------------------------------------------------------------------------


def test_expired_batch_in_flight_holds_later_batches_back() -> None:
    """The request never arrived: the numbers are a gap, and a new epoch begins."""
    harness = warm({**SHORT, "request.timeout.ms": "9000"})
    harness.cluster.on(ApiKey.PRODUCE, faults.lose_request(), times=2)
    first = harness.send(b"lost")
    harness.settle()
    assert isinstance(first.error, KafkaTimeoutError)
    deliveries = send_all(harness, 3)
    harness.settle()
    assert errors(deliveries) == [None] * 3
    assert harness.values() == values(3)
    assert stored(harness)[1:] == [(1, 0), (1, 1), (1, 2)]


def test_no_new_batch_follows_batches_behind_an_abandoned_one() -> None:
    harness = warm(ONE_EACH)
    send_all(harness, 1)  # which is acknowledged, so the producer does not wait for it
    harness.settle()
    identity = harness.identity
    given_up, behind_it, new = (ProducerBatch(PLACE, 0, 100, harness.now_ms) for _ in range(3))
    for batch in (given_up, behind_it, new):
        batch.leader_epoch = 0
    for batch in (given_up, behind_it):
        batch.append_row(None, b"v", (), 0, 50, None)
        assert not identity.must_wait(batch)
        identity.on_drain(batch)
    identity.handle_failed_batch(given_up, KafkaTimeoutError("late"))
    identity.maybe_resolve_sequences()
    assert identity.must_wait(new)
    identity.handle_completed_batch(behind_it)
    identity.maybe_resolve_sequences()
    assert not identity.must_wait(new)


def test_expired_batch_that_was_written_needs_no_new_epoch() -> None:
    harness = warm({**SHORT, "request.timeout.ms": "9000"})
    harness.network.held.add(0)
    first = harness.send(b"written")
    harness.clock.advance(1_500)
    harness.turn(1)
    harness.turn(1)
    second = harness.send(b"second")
    third_sent: list[Delivery] = []
    harness.selector.at(first.sent_ms + 10_200, lambda: third_sent.append(harness.send(b"third")))
    harness.selector.at(first.sent_ms + 10_400, harness.network.held.clear)
    harness.settle()
    harness.settle()
    assert isinstance(first.error, KafkaTimeoutError)
    assert errors([second, *third_sent]) == [None, None]
    assert harness.values() == [b"written", b"second", b"third"]
    assert {epoch for epoch, _ in stored(harness)} == {0}


def test_batches_behind_an_expired_one_arrive_once_in_order() -> None:
    """The first was refused again and again; the second is refused for the gap."""
    harness = warm(SHORT)
    rejected = {b"0"}

    def refuse_the_first(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        (data,) = exchange.request.topic_data[0].partition_data
        is_first = any(value + b"\x00" == bytes(data.records)[-2:] for value in rejected)
        return faults.fail_with(NotEnoughReplicasError)(cluster, exchange, proceed) if is_first else proceed()

    harness.cluster.on(ApiKey.PRODUCE, refuse_the_first, times=None)
    first = harness.send(b"0")
    harness.clock.advance(3_000)
    others = send_all(harness, 4, start=1)
    harness.settle()
    assert isinstance(first.error, KafkaTimeoutError)
    assert errors(others) == [None] * 4
    assert harness.values() == values(5)[1:]
    assert harness.memory_in_use == 0


def test_error_at_delivery_timeout_leaves_no_gap() -> None:
    """The answer and the expiry come in one poll: the answer is read first, but the batch counts as abandoned."""
    harness = warm(SHORT)
    deadline_ms = harness.now_ms + 10_000
    late = faults.fail_with(NotEnoughReplicasError)

    def answer_late(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        return dataclasses.replace(late(cluster, exchange, proceed), delay_ms=max(0, deadline_ms - exchange.now_ms - 1))

    first = harness.send(b"first")
    harness.clock.advance(8_000)
    harness.cluster.on(ApiKey.PRODUCE, answer_late)
    harness.settle()
    assert first.settled_ms == deadline_ms
    assert isinstance(first.error, KafkaTimeoutError)
    assert "failed attempts" not in str(first.error)  # the expired batch was not a retry
    start_ms = harness.now_ms
    second = harness.send(b"second")
    harness.settle()
    assert second.error is None
    assert harness.now_ms - start_ms < 2_000
    assert harness.values() == [b"second"]


def test_late_acknowledgement_does_not_count_in_a_newer_epoch() -> None:
    harness = warm({**SHORT, "request.timeout.ms": "9000"})
    identity = harness.identity
    send_all(harness, 5)
    harness.settle()
    harness.network.held.add(0)
    first = harness.send(b"late")
    harness.clock.advance(1_500)
    harness.turn(1)
    harness.turn(1)
    harness.selector.at(first.sent_ms + 10_100, harness.selector.wakeup)  # a turn that sees that nothing is in flight
    harness.selector.at(first.sent_ms + 10_300, harness.network.held.clear)
    harness.run_until(lambda: harness.memory_in_use == 0)
    assert isinstance(first.error, KafkaTimeoutError)
    entry = identity.sequences[PLACE]
    assert entry.producer.epoch == 1
    assert not entry.has_acknowledged
    harness.deliveries.clear()
    deliveries = [harness.send(b"a"), harness.send(b"b")]
    harness.settle()
    assert errors(deliveries) == [None, None]
    assert entry.last_acked_sequence == 1


def test_exhausted_retries_leave_no_gap() -> None:
    harness = warm({**ONE_EACH, "retries": "1"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(RequestTimedOutError), times=2)
    first = harness.send(b"first")
    harness.settle()
    assert first.error is not None
    start_ms = harness.now_ms
    second = harness.send(b"second")
    harness.settle()
    assert second.error is None
    assert harness.now_ms - start_ms < 1_000


def test_batch_expired_before_send_begins_no_new_epoch() -> None:
    harness = warm(SHORT)
    harness.network.stop(0)
    unsent = harness.send(b"unsent")
    harness.settle()
    assert isinstance(unsent.error, KafkaTimeoutError)
    harness.network.start(0)
    delivery = harness.send(b"v")
    harness.settle()
    assert delivery.error is None
    assert harness.identity.producer.epoch == 0


def test_sequences_wrap() -> None:
    harness = warm(ONE_EACH)
    entry = harness.identity.sequences[PLACE]
    log = harness.cluster.log(TOPIC, 0)
    entry.next_sequence = 2**31 - 3
    entry.last_acked_sequence = 2**31 - 4
    log.forget_producers()
    deliveries = send_all(harness, 8)
    harness.settle()
    assert errors(deliveries) == [None] * 8
    assert [sequence for _, sequence in stored(harness)][1:] == [2**31 - 3, 2**31 - 2, 2**31 - 1, 0, 1, 2, 3, 4]
    assert entry.last_acked_sequence == 4
    assert harness.values() == values(8)


def test_retries_keep_their_order_across_the_wrap() -> None:
    harness = warm(ONE_EACH)
    entry = harness.identity.sequences[PLACE]
    harness.cluster.log(TOPIC, 0).forget_producers()
    entry.next_sequence = 2**31 - 2
    entry.last_acked_sequence = 2**31 - 3
    send_all(harness, 1)
    harness.settle()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(RequestTimedOutError))
    deliveries = send_all(harness, 4, start=1)
    harness.settle()
    assert errors(deliveries) == [None] * 4
    assert harness.values() == values(5)


# ---- final failures
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error_code",
    [
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_timestamp,
        ErrorCode.invalid_record,
        ErrorCode.unknown_server_error,
    ],
)
def test_abandoned_batch_leaves_no_gap_and_later_ones_arrive_once(error_code: int) -> None:
    harness = warm(ONE_EACH)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(error_code))
    deliveries = send_all(harness, 5)
    harness.settle()
    assert deliveries[0].error is not None
    assert errors(deliveries[1:]) == [None] * 4
    assert harness.values() == values(5)[1:]
    later = send_all(harness, 3, start=5)
    harness.settle()
    assert errors(later) == [None] * 3


def test_error_that_may_hide_a_success_duplicates_nothing() -> None:
    """UNKNOWN_SERVER_ERROR for the first, which was written. The second was written too, and its answer was lost."""
    harness = warm(SHORT)

    def written_but_refused(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        proceed()
        return faults.fail_with(UnknownServerError)(cluster, exchange, proceed)

    harness.cluster.on(ApiKey.PRODUCE, written_but_refused)
    harness.cluster.on(ApiKey.PRODUCE, faults.close_after())
    deliveries = send_all(harness, 3)
    harness.settle()
    assert isinstance(deliveries[0].error, UnknownServerError)
    assert errors(deliveries[1:]) == [None, None]
    assert harness.values() == values(3)
    harness.cluster.requests.clear()
    harness.network.held.add(0)
    send_all(harness, 4)
    harness.run_for(100)
    assert len(attempts(harness)) == 4  # all is settled: batches may be in flight together again


# ---- row 19: a topic that vanishes -----------------------------------------------------------------------------------


def test_sequences_outlive_a_topic_that_vanishes_and_returns() -> None:
    harness = warm({**ONE_EACH, "metadata.max.idle.ms": "5000", "metadata.max.age.ms": "6000"})
    send_all(harness, 3)
    harness.settle()
    topic = harness.cluster.topics[TOPIC]
    topic.is_visible = False
    harness.run_for(20_000)
    assert harness.metadata.fetch().partition_count_for_topic(TOPIC) is None
    topic.is_visible = True
    deliveries = send_all(harness, 3, start=3)
    harness.settle()
    assert errors(deliveries) == [None] * 3
    assert harness.values() == values(6)
    assert stored(harness) == [(0, index) for index in range(7)]
    assert harness.cluster.log(TOPIC, 0).duplicates == 0


@pytest.mark.parametrize("metadata_version", [13, 9], ids=["topic ids", "brokers before 2.8"])
def test_recreated_topic_is_written_to(metadata_version: int) -> None:
    """Row 18: another id, fewer partitions, a lower leader epoch."""
    cluster = ScriptedCluster(versions={**KAFKA_4_1, ApiKey.METADATA: (0, metadata_version)})
    harness = warm(ONE_EACH, topics={TOPIC: 3}, cluster=cluster)
    for _ in range(4):
        harness.cluster.move_leader(TOPIC, 0, 0)
    harness.metadata.request_update()
    harness.run_for(500)
    harness.cluster.delete_topic(TOPIC)
    delivery = harness.send(b"between", partition=0)
    harness.run_for(300)
    harness.cluster.create_topic(TOPIC, 1)
    harness.settle()
    later = harness.send(b"later", partition=0)
    harness.settle()
    assert errors([delivery, later]) == [None, None]
    assert harness.values() == [b"between", b"later"]


# ---- the last epoch
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusals", [0, 1])
def test_exhausted_epochs_request_a_new_producer_id(refusals: int) -> None:
    harness = warm(ONE_EACH, topics={TOPIC: 2})
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(CoordinatorLoadInProgressError), times=refusals)
    identity = harness.identity
    identity.producer = identity.producer._replace(epoch=MAX_EPOCH)
    send_all(harness, 1)  # is sent in the last epoch
    harness.settle()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(OutOfOrderSequenceError))
    deliveries = [harness.send(b"%d" % index, partition=0) for index in range(3)]
    harness.settle()
    assert errors(deliveries) == [None] * 3
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == 1 + refusals
    assert identity.producer == (1001, 0)
    assert not identity.is_initializing
    log = harness.cluster.log(TOPIC, 0)
    assert [(each.header.producer_id, each.header.producer_epoch) for each in log.batches[-3:]] == [(1001, 0)] * 3


def test_producer_id_that_brokers_no_longer_know_is_replaced() -> None:
    """Bug: the producer only began a new epoch of the id, so every later batch failed (seen of Azure Event Hubs)."""
    harness = warm(ONE_EACH, topics={TOPIC: 2})
    old = harness.identity.producer
    harness.cluster.requests.clear()

    def unknown(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        is_old = check_batch(exchange.request.topic_data[0].partition_data[0].records).producer_id == old.producer_id
        return faults.fail_with(InvalidPidMappingError)(cluster, exchange, proceed) if is_old else proceed()

    harness.cluster.on(ApiKey.PRODUCE, unknown, times=None)
    refused = [harness.send(b"refused", partition=partition) for partition in (0, 1)]
    harness.settle()
    assert [type(error) for error in errors(refused)] == [InvalidPidMappingError] * 2
    assert not any(error is not None and error.fatal for error in errors(refused))
    later = [harness.send(b"later %d" % number, partition=number % 2) for number in range(6)]
    harness.settle()
    assert errors(later) == [None] * 6
    assert harness.identity.producer.producer_id != old.producer_id
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == 1
    assert harness.values(partition=1)[-3:] == [b"later 1", b"later 3", b"later 5"]


# ---- after a fatal error ---------------------------------------------------------------------------------------------


def test_fatal_error_ends_requests_for_a_producer_id() -> None:
    identity = ProducerIdentity(ExponentialBackoff(100, 2, 1_000, 0, random.Random(1)))
    error = KafkaError("over")
    identity.fail(error)
    identity.bump_epoch_if_needed(lambda: True)
    assert identity.next_request(0, lambda: False) is None
    assert identity.has_fatal_error
    assert error.fatal


def test_last_fatal_error_is_raised() -> None:
    identity = ProducerIdentity(ExponentialBackoff(100, 2, 1_000, 0, random.Random(1)))
    identity.fail(KafkaError("over"))
    identity.fail(KafkaError("again"))
    assert str(identity.last_error) == "again"
