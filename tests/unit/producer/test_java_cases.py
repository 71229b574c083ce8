"""Cases of the Java client's own tests that are in no other test here.

Each docstring names the Java test (org.apache.kafka.clients.producer). Each test runs a whole producer in one thread
against the scripted broker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.producer_harness import ONE_EACH, TOPIC, Delivery, ProducerHarness
from support.scripted_broker import faults
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.versions import VersionRanges
from support.transaction_harness import GROUP, TransactionHarness
from support.transaction_steps import OFFSETS, SMALL, aborted_and_next_works, both_versions, warm

from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    KafkaError,
    KafkaTimeoutError,
    NotLeaderOrFollowerError,
    OutOfOrderSequenceError,
    ProducerClosedError,
    TopicAuthorizationError,
    TransactionAbortableError,
    UnsupportedVersionError,
)
from spark_kafka_sink.producer.futures import RecordMetadata
from spark_kafka_sink.producer.idempotence import MAX_EPOCH
from spark_kafka_sink.producer.transaction_requests import GroupMetadata
from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.protocol.versions import ApiKey

OLD_ID, NEW_ID = 1000, 1001
SLOW_MS = 50
"""Partition 1 is answered this much later than partition 0."""


def idempotent(settings: dict[str, str] | None = None) -> ProducerHarness:
    """Return a producer without transactions. Two partitions, with one leader each, have acknowledged one record."""
    harness = ProducerHarness({**ONE_EACH, **(settings or {})}, topics={TOPIC: 2}, node_count=2)
    harness.warm_up()
    harness.cluster.requests.clear()
    return harness


def at_last_epoch() -> ProducerHarness:
    """Like `idempotent`, and the next epoch takes a new producer id: 1001, after 1000."""
    harness = idempotent()
    identity = harness.identity
    identity.producer = identity.producer._replace(epoch=MAX_EPOCH)
    harness.warm_up()
    harness.cluster.requests.clear()
    return harness


def answer(harness: ProducerHarness, hooks: dict[int, list[faults.Hook]]) -> None:
    """Let these hooks handle the partitions' next batches, one hook for each batch."""

    def hook(cluster: Any, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        (data,) = exchange.request.topic_data[0].partition_data
        waiting = hooks.get(int(data.index), [])
        answer = waiting.pop(0)(cluster, exchange, proceed) if waiting else proceed()
        return dataclasses.replace(answer, delay_ms=SLOW_MS * int(data.index))

    harness.cluster.on(ApiKey.PRODUCE, hook, times=None)


def stored(harness: ProducerHarness, partition: int) -> list[tuple[int, int, int]]:
    """Return (producer id, epoch, base sequence) of every batch in the partition's log."""
    headers = [batch.header for batch in harness.cluster.log(TOPIC, partition).batches]
    return [(header.producer_id, header.producer_epoch, header.base_sequence) for header in headers]


def send_to_both(harness: ProducerHarness, value: bytes) -> list[Delivery]:
    return [harness.send(value, partition=partition) for partition in (0, 1)]


# ---- an epoch that begins while another partition has a batch in flight ----------------------------------------------


def test_batch_failed_after_new_epoch_leaves_no_gap() -> None:
    """SenderTest.testEpochBumpOnOutOfOrderSequenceForNextBatchWhenBatchInFlightFails."""
    harness = idempotent({"retries": "1"})
    not_leader = faults.fail_with(NotLeaderOrFollowerError)
    answer(harness, {0: [faults.fail_with(OutOfOrderSequenceError)], 1: [not_leader, not_leader]})
    kept, given_up = send_to_both(harness, b"second")
    harness.settle()
    harness.cluster.requests.clear()
    third = send_to_both(harness, b"third")
    harness.settle()
    assert len(harness.cluster.requests_of(ApiKey.PRODUCE)) == 2, "no broker refused them"
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
        pytest.param(
            faults.fail_with(NotLeaderOrFollowerError), id="TransactionManagerTest.testBatchFailureAfterProducerReset"
        ),
        pytest.param(faults.close_before(), id="SenderTest.testRetryWhenProducerIdChanges"),
        pytest.param(faults.close_after(), id="SenderTest.testRetryWhenProducerIdChanges, taken by the broker"),
    ],
)
def test_batch_in_flight_ends_under_its_old_producer_id(fate: faults.Hook | None) -> None:
    """Partition 0 needs a new producer id while a batch of partition 1 is in flight (the parameters: Java's tests).

    That batch keeps its numbers, so that the broker recognizes its retry. The next batch gets the new id.
    """
    harness = at_last_epoch()
    answer(harness, {0: [faults.fail_with(OutOfOrderSequenceError)], 1: [] if fate is None else [fate]})
    send_to_both(harness, b"second")
    harness.run_until(lambda: harness.identity.producer == (NEW_ID, 0))
    assert not harness.deliveries[1].is_settled
    send_to_both(harness, b"third")
    harness.settle()
    assert [each.error for each in harness.deliveries] == [None] * 4
    for partition in (0, 1):
        assert harness.values(partition=partition) == [b"second", b"third"]
    assert stored(harness, 0)[2:] == [(NEW_ID, 0, 0), (NEW_ID, 0, 1)]
    assert stored(harness, 1)[2:] == [(OLD_ID, MAX_EPOCH, 1), (NEW_ID, 0, 0)]


def waits_for_new_id() -> ProducerHarness:
    """Let partition 0 wait for a new producer id, which comes in 30 ms, while a batch of partition 1 is in flight."""
    harness = at_last_epoch()
    answer(harness, {0: [faults.fail_with(OutOfOrderSequenceError)], 1: [faults.fail_with(NotLeaderOrFollowerError)]})
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.delay(30))
    send_to_both(harness, b"second")
    harness.run_until(lambda: harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID))
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
    harness.network.refusing.add(0)  # the leader; node 1 still answers Metadata requests
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


# ---- a producer id while the connection is busy, throttled or refused ------------------------------------------------


def one_at_a_time(harness: ProducerHarness) -> list[int]:
    """Return a list with the highest number of requests in flight, updated in every turn."""
    most = [0]

    def look() -> None:
        most[0] = max(most[0], harness.client.in_flight_request_count())

    harness.on_turn = look
    return most


def first_record(harness: ProducerHarness) -> None:
    harness.send(b"first")
    harness.settle()


@pytest.mark.parametrize(
    ("make", "begin"),
    [
        pytest.param(
            lambda settings: ProducerHarness({**ONE_EACH, **settings}),
            first_record,
            id="SenderTest.testIdempotentInitProducerIdWithMaxInFlightOne",
        ),
        pytest.param(
            lambda settings: TransactionHarness(2, settings),
            lambda harness: harness.producer.init_transactions(),
            id="SenderTest.testInitProducerIdWithMaxInFlightOne",
        ),
    ],
)
def test_producer_id_comes_though_metadata_takes_the_only_request(
    make: Callable[[dict[str, str]], ProducerHarness], begin: Callable[[ProducerHarness], None]
) -> None:
    """The parameters name the Java tests. With one request in flight, the request for the id waits for the metadata."""
    harness = make({"max.in.flight.requests.per.connection": "1"})
    harness.cluster.on(ApiKey.METADATA, faults.delay(500))
    most = one_at_a_time(harness)
    begin(harness)
    (metadata,) = harness.cluster.requests_of(ApiKey.METADATA)[:1]
    (asked,) = harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)
    assert asked.now_ms >= metadata.now_ms + 500
    assert harness.identity.producer.is_valid
    assert most == [1]


@both_versions
def test_init_transactions_waits_until_its_broker_ends_the_throttle(version: int) -> None:
    """KafkaProducerTest.testInitTransactionWhileThrottled."""
    harness = TransactionHarness(version, {"max.block.ms": "10000"})
    harness.producer.partitions_for(TOPIC)
    harness.cluster.throttle_ms = 5_000  # the node's first answer, to ApiVersions, says so
    began_ms = harness.now_ms
    harness.producer.init_transactions()
    assert 5_000 <= harness.now_ms - began_ms < 5_100
    assert [each.now_ms - began_ms >= 5_000 for each in harness.cluster.requests_of(ApiKey.FIND_COORDINATOR)] == [True]
    harness.cluster.throttle_ms = 0
    harness.commit(b"a")
    assert harness.committed() == [b"a"]


@both_versions
def test_init_transactions_works_once_the_cluster_grants_it(version: int) -> None:
    """KafkaProducerTest.testClusterAuthorizationFailure."""
    harness = TransactionHarness(version)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ClusterAuthorizationError))
    with pytest.raises(ClusterAuthorizationError):
        harness.producer.init_transactions()
    assert not harness.producer.has_failed
    harness.producer.init_transactions()
    harness.commit(b"a")
    assert harness.committed() == [b"a"]


# ---- brokers without a feature -------------------------------------------------------------------------------------


def without(api_key: int, versions: VersionRanges) -> VersionRanges:
    return {key: value for key, value in versions.items() if key != api_key}


def test_records_fail_with_brokers_of_the_old_record_format() -> None:
    """RecordAccumulatorTest.testIdempotenceWithOldMagic: brokers before Kafka 0.11 do not support such batches."""
    harness = ProducerHarness(ONE_EACH)
    harness.cluster.versions = {**harness.cluster.versions, ApiKey.PRODUCE: (0, 2)}
    deliveries = [harness.send(b"%d" % number) for number in range(3)]
    harness.settle()
    assert [type(each.error) for each in deliveries] == [UnsupportedVersionError] * 3
    assert all("Kafka 0.11 or newer" in str(each.error) for each in deliveries)
    assert all(each.took_ms < 1_000 for each in deliveries if each.settled_ms is not None)
    assert harness.cluster.requests_of(ApiKey.PRODUCE) == []
    assert harness.producer.has_failed
    assert harness.memory_in_use == 0


@both_versions
@pytest.mark.parametrize(
    "api_key",
    [
        pytest.param(ApiKey.FIND_COORDINATOR, id="testUnsupportedFindCoordinator"),
        pytest.param(ApiKey.INIT_PRODUCER_ID, id="testUnsupportedInitTransactions"),
    ],
)
def test_init_transactions_fails_for_good_with_brokers_too_old(version: int, api_key: int) -> None:
    """The parameters name the tests of TransactionManagerTest."""
    harness = TransactionHarness(version)
    harness.cluster.versions = without(api_key, harness.cluster.versions)
    began_ms = harness.now_ms
    for _ in range(2):
        with pytest.raises(UnsupportedVersionError, match=r"Kafka 0\.11 or newer"):
            harness.producer.init_transactions()
    assert harness.state is State.FATAL_ERROR
    assert harness.producer.has_failed
    assert harness.now_ms - began_ms < 1_000


def test_offsets_of_a_group_member_need_brokers_that_fence_members() -> None:
    """TransactionManagerTest.testSendOffsetWithGroupMetadataFailAsAutoDowngradeTxnCommitNotEnabled.

    Without the member, a consumer that has lost its partitions could still commit their offsets (KIP-447).
    """
    harness = TransactionHarness(1)
    harness.cluster.versions = {**harness.cluster.versions, ApiKey.TXN_OFFSET_COMMIT: (0, 2)}
    harness.started()
    with pytest.raises(UnsupportedVersionError, match=r"with a group's member needs Kafka 2\.5 or newer\. The node"):
        harness.producer.send_offsets_to_transaction(OFFSETS, GroupMetadata(GROUP, 3, "member-1"))
    assert harness.state is State.FATAL_ERROR
    with pytest.raises(UnsupportedVersionError):
        harness.producer.commit_transaction()
    assert harness.offsets() == {}


@both_versions
def test_offsets_topic_in_too_old_a_format_is_fatal(version: int) -> None:
    """TransactionManagerTest.testUnsupportedForMessageFormatInTxnOffsetCommit and
    testHandlingOfUnsupportedForMessageFormatErrorOnTxnOffsetCommit.
    """
    harness = TransactionHarness(version).started()
    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, faults.fail_with(ErrorCode.unsupported_for_message_format))
    calls: tuple[Callable[[], None], ...] = (
        lambda: harness.producer.send_offsets_to_transaction(OFFSETS, GROUP),
        harness.producer.commit_transaction,
        harness.producer.abort_transaction,
    )
    for call in calls:
        with pytest.raises(KafkaError, match="UNSUPPORTED_FOR_MESSAGE_FORMAT") as caught:
            call()
        assert caught.value.error_code == ErrorCode.unsupported_for_message_format
        assert harness.state is State.FATAL_ERROR
    assert len(harness.cluster.requests_of(ApiKey.TXN_OFFSET_COMMIT)) == 1
    assert harness.offsets() == {}


# ---- transactions that are lost --------------------------------------------------------------------------------------


@both_versions
def test_abortable_answer_of_a_group_lookup_costs_only_the_transaction(version: int) -> None:
    """TransactionManagerTest.testTransactionAbortableExceptionInFindCoordinator."""
    harness = warm(version)
    harness.cluster.on(ApiKey.FIND_COORDINATOR, faults.fail_with(TransactionAbortableError))
    with pytest.raises(TransactionAbortableError):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    assert harness.state is State.ABORTABLE_ERROR
    with pytest.raises(TransactionAbortableError):
        harness.producer.commit_transaction()
    aborted_and_next_works(harness)
    assert harness.offsets() == {}


@both_versions
@pytest.mark.parametrize(
    "error_code",
    [
        pytest.param(ErrorCode.request_timed_out, id="testRecoveryFromAbortableErrorProduceRequestInRetry"),
        pytest.param(ErrorCode.not_leader_or_follower, id="resendFailedProduceRequestAfterAbortableError"),
    ],
)
def test_waiting_retry_ends_after_its_transaction_is_lost(version: int, error_code: int) -> None:
    """The parameters name the tests of TransactionManagerTest. Partition 1 is refused while partition 0 waits."""
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(error_code))
    retried = harness.send(b"retried", partition=0)
    harness.run_until(lambda: harness.cluster.requests_of(ApiKey.PRODUCE))
    harness.run_for(5)
    harness.cluster.on(
        ApiKey.ADD_PARTITIONS_TO_TXN if version == 1 else ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError)
    )
    refused = harness.send(b"refused", partition=1)
    harness.run_until(lambda: harness.state is State.ABORTABLE_ERROR)
    assert not retried.is_settled
    harness.settle()
    assert retried.error is None
    assert isinstance(refused.error, TopicAuthorizationError)
    assert harness.committed(1) == []
    aborted_and_next_works(harness)


@both_versions
@pytest.mark.parametrize("error_code", [ErrorCode.invalid_txn_state, ErrorCode.invalid_producer_id_mapping])
def test_refusal_that_comes_after_the_expiry_is_not_fatal(version: int, error_code: int) -> None:
    """SenderTest.testReceiveFailedBatchTwiceWithTransactions, and the same with an error that is fatal before the
    expiry.
    """
    harness = warm(version, {**SMALL, "delivery.timeout.ms": "4000", "request.timeout.ms": "4000"})
    not_leader, refusal = faults.fail_with(NotLeaderOrFollowerError), faults.fail_with(error_code)

    def after(delay_ms: int, hook: faults.Hook) -> faults.Hook:
        return lambda *about: dataclasses.replace(hook(*about), delay_ms=delay_ms)

    harness.cluster.on(ApiKey.PRODUCE, after(500, not_leader))
    harness.cluster.on(ApiKey.PRODUCE, after(3_800, refusal))
    late = harness.send(b"late", partition=0)
    harness.settle()
    harness.run_for(1_000)
    assert isinstance(late.error, KafkaTimeoutError)
    assert late.settled_ms == late.sent_ms + 4_000, "the second answer comes 400 ms after that"
    assert len(harness.cluster.requests_of(ApiKey.PRODUCE)) == 2
    assert not harness.client.has_in_flight_requests()
    assert len(late.calls) == 1
    assert harness.producer.metrics()["record-error-total"] == 1
    assert harness.state is State.ABORTABLE_ERROR
    with pytest.raises(TransactionAbortableError, match="not acknowledged within"):
        harness.producer.commit_transaction()
    aborted_and_next_works(harness)


def test_batch_that_expires_before_its_retry_loses_the_commit() -> None:
    """TransactionManagerTest.testTransitionToFatalErrorWhenRetriedBatchIsExpired.

    Brokers before Kafka 2.5 give no other epoch, so the producer ends. In Java it ends at the expiry, here after the
    abort.
    """
    settings = {**SMALL, "delivery.timeout.ms": "4000", "request.timeout.ms": "1000", "max.block.ms": "20000"}
    harness = TransactionHarness(1, settings)
    harness.cluster.versions = {**harness.cluster.versions, ApiKey.INIT_PRODUCER_ID: (0, 1), ApiKey.PRODUCE: (0, 7)}
    harness.started()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(NotLeaderOrFollowerError))
    expired = harness.send(b"expired", partition=0)
    harness.run_until(lambda: harness.cluster.requests_of(ApiKey.PRODUCE))
    harness.run_for(5)
    harness.network.stop(0)
    with pytest.raises(KafkaError, match="not acknowledged within"):
        harness.producer.commit_transaction()
    assert isinstance(expired.error, KafkaTimeoutError)
    assert len(harness.cluster.requests_of(ApiKey.PRODUCE)) == 1
    harness.network.start(0)
    harness.producer.abort_transaction()
    harness.run_for(100)
    with pytest.raises(UnsupportedVersionError):
        harness.producer.begin_transaction()
    assert harness.producer.has_failed
    assert harness.committed() == []
    assert harness.memory_in_use == 0
