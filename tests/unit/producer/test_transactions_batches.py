"""Records that fail within a transaction: it can only be aborted, quickly, and the next one works."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.producer_harness import TOPIC, Delivery
from support.scripted_broker import faults
from support.transaction_harness import ID, TransactionHarness
from support.transaction_steps import SHORT, SMALL, aborted_and_next_works, both_versions, warm

from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    CoordinatorLoadInProgressError,
    InvalidPidMappingError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    KafkaError,
    KafkaTimeoutError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RecordTooLargeError,
    RequestTimedOutError,
    SaslAuthenticationError,
    TopicAuthorizationError,
    TransactionAbortableError,
    TransactionalIdAuthorizationError,
    UnknownProducerIdError,
    UnknownTopicOrPartitionError,
    UnsupportedVersionError,
)
from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.protocol.versions import ApiKey


def send_all(harness: TransactionHarness, count: int) -> list[Delivery]:
    return [harness.send(b"%d" % index, partition=0) for index in range(count)]


@both_versions
@pytest.mark.parametrize(
    ("error_code", "error_class"),
    [
        (ErrorCode.topic_authorization_failed, TopicAuthorizationError),
        (ErrorCode.out_of_order_sequence_number, OutOfOrderSequenceError),
        (ErrorCode.invalid_producer_epoch, InvalidProducerEpochError),
        (ErrorCode.invalid_txn_state, InvalidTxnStateError),
        (ErrorCode.unknown_producer_id, UnknownProducerIdError),
        (ErrorCode.transaction_abortable, TransactionAbortableError),
        (ErrorCode.invalid_record, KafkaError),
        (ErrorCode.record_list_too_large, KafkaError),
        (ErrorCode.unknown_server_error, KafkaError),
    ],
)
def test_failed_batch_costs_only_its_transaction(version: int, error_code: int, error_class: type[KafkaError]) -> None:
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(error_code))
    refused = harness.send(b"refused", partition=0)
    harness.settle()
    assert isinstance(refused.error, error_class)
    assert TOPIC in str(refused.error)
    assert harness.state is State.ABORTABLE_ERROR
    with pytest.raises(error_class, match=rf"had an error before.*{TOPIC}"):
        harness.producer.commit_transaction()
    assert isinstance(harness.send(b"too late", partition=0).error, error_class)
    aborted_and_next_works(harness)


@both_versions
def test_removed_log_head_costs_the_transaction_without_a_retry(version: int) -> None:
    """UNKNOWN_PRODUCER_ID of brokers before 2.5. The Java client sends again under numbers from 0."""

    def head_is_gone(values: dict[str, Any]) -> dict[str, Any]:
        for topic in values["responses"]:
            for each in topic["partition_responses"]:
                each |= {"error_code": ErrorCode.unknown_producer_id, "base_offset": -1, "log_start_offset": 1_010}
        return values

    harness = warm(version)
    harness.cluster.requests.clear()
    harness.cluster.on(ApiKey.PRODUCE, faults.change(head_is_gone))
    refused = harness.send(b"refused", partition=0)
    harness.settle()
    assert isinstance(refused.error, UnknownProducerIdError)
    assert len(harness.cluster.requests_of(ApiKey.PRODUCE)) == 1
    aborted_and_next_works(harness)


@both_versions
@pytest.mark.parametrize(
    ("error_code", "is_fatal"),
    [
        (ErrorCode.invalid_txn_state, False),
        (ErrorCode.topic_authorization_failed, False),
        (ErrorCode.invalid_producer_id_mapping, True),
        (ErrorCode.transactional_id_authorization_failed, True),
        (ErrorCode.producer_fenced, True),
    ],
)
def test_an_error_says_whether_the_producer_can_go_on(version: int, error_code: int, is_fatal: bool) -> None:
    """Bug: only the class had `fatal`. A caller that retries unless `fatal` gave up after INVALID_TXN_STATE from a
    leader, and retried without end after INVALID_PRODUCER_ID_MAPPING.
    """
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(error_code))
    refused = harness.send(b"refused", partition=0)
    harness.settle()
    assert harness.producer.has_failed is is_fatal
    with pytest.raises(KafkaError, match="had an error before") as caught:
        harness.producer.commit_transaction()
    for error in (refused.error, caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert error is not None
        assert error.fatal is is_fatal


@pytest.mark.parametrize(("version", "asked"), [(1, 1), (2, 0)])
def test_version_1_abort_after_failed_batch_takes_new_epoch(version: int, asked: int) -> None:
    harness = warm(version)
    before = harness.manager.identity.producer
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError))
    harness.send(b"refused", partition=0)
    harness.settle()
    harness.producer.abort_transaction()
    requests = [exchange.request for exchange in harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)]
    assert [(each.producer_id, each.producer_epoch) for each in requests] == [before] * asked
    assert harness.manager.identity.producer == (before.producer_id, before.epoch + 1)
    harness.commit(b"next")
    assert harness.stored()[-1] == (before.epoch + 1, 0)
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == asked


@both_versions
def test_first_error_is_raised(version: int) -> None:
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError))
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TransactionAbortableError))
    first, second = send_all(harness, 2)
    harness.settle()
    assert isinstance(first.error, TopicAuthorizationError)
    assert isinstance(second.error, TransactionAbortableError)
    with pytest.raises(TopicAuthorizationError) as caught:
        harness.producer.commit_transaction()
    assert caught.value.error_code == ErrorCode.topic_authorization_failed


@both_versions
@pytest.mark.parametrize(
    ("error_code", "error_class"),
    [
        (ErrorCode.cluster_authorization_failed, ClusterAuthorizationError),
        (ErrorCode.invalid_producer_id_mapping, InvalidPidMappingError),
        (ErrorCode.transactional_id_authorization_failed, TransactionalIdAuthorizationError),
        (ErrorCode.sasl_authentication_failed, SaslAuthenticationError),
        (ErrorCode.producer_fenced, ProducerFencedError),
    ],
)
def test_permanent_error_about_the_producer_is_fatal(
    version: int, error_code: int, error_class: type[KafkaError]
) -> None:
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(error_code))
    refused = send_all(harness, 3)
    harness.settle()
    assert isinstance(refused[0].error, error_class)
    assert all(each.error is not None for each in refused)
    assert harness.producer.has_failed
    for call in (harness.producer.abort_transaction, harness.producer.commit_transaction):
        with pytest.raises(error_class):
            call()


@both_versions
def test_refused_transactional_id_is_named_instead_of_the_topic(version: int) -> None:
    """Bug: "Topic flights: Not authorized for the transactional id: grant WRITE and DESCRIBE on it." """
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TransactionalIdAuthorizationError))
    refused = harness.send(b"a", partition=0)
    harness.settle()
    assert str(refused.error) == f"transactional.id {ID}: {TransactionalIdAuthorizationError.sentence}"


@both_versions
def test_batches_behind_a_failed_one_fail_unsent(version: int) -> None:
    harness = warm(version, {"batch.size": "100", "linger.ms": "5000"})
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError))
    lingering = harness.send(b"lingering", partition=1)
    harness.send(b"x" * 200, partition=0)
    harness.settle()
    assert lingering.error is not None
    assert lingering.took_ms < 200
    harness.producer.flush()  # nothing to wait for
    assert harness.values(partition=1) == []
    aborted_and_next_works(harness)


@both_versions
def test_commit_raises_error_of_failed_batch(version: int) -> None:
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError))
    harness.send(b"refused", partition=0)
    with pytest.raises(TopicAuthorizationError, match=TOPIC):
        harness.producer.commit_transaction()
    harness.run_for(1_000)
    assert harness.cluster.requests_of(ApiKey.END_TXN) == []
    aborted_and_next_works(harness)


@both_versions
@pytest.mark.parametrize(
    "error_code",
    [
        ErrorCode.corrupt_message,
        ErrorCode.not_leader_or_follower,
        ErrorCode.request_timed_out,
        ErrorCode.not_enough_replicas,
        ErrorCode.concurrent_transactions,
    ],
)
def test_retriable_batch_does_not_cost_the_transaction(version: int, error_code: int) -> None:
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(error_code), skip=1, times=2)
    deliveries = send_all(harness, 6)
    harness.producer.commit_transaction()
    assert [each.error for each in deliveries] == [None] * 6
    assert harness.committed() == [b"warm-up", b"first", *(b"%d" % index for index in range(6))]
    assert harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID) == []


@both_versions
def test_later_batch_waits_until_the_gap_is_closed(version: int) -> None:
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(RequestTimedOutError))
    deliveries = send_all(harness, 4)  # the others get OUT_OF_ORDER_SEQUENCE
    harness.producer.commit_transaction()
    assert [each.error for each in deliveries] == [None] * 4
    assert harness.committed()[2:] == [b"%d" % index for index in range(4)]


@both_versions
@pytest.mark.parametrize("fault", [faults.close_after(), faults.lose_response(), faults.lose_request()])
def test_lost_answer_duplicates_nothing(version: int, fault: faults.Hook) -> None:
    harness = warm(version, {**SMALL, "request.timeout.ms": "1000"})
    harness.cluster.on(ApiKey.PRODUCE, fault, skip=1)
    send_all(harness, 4)
    harness.producer.commit_transaction()
    assert harness.committed()[2:] == [b"%d" % index for index in range(4)]


@both_versions
@pytest.mark.parametrize(
    "fault", [faults.lose_request(), faults.lose_response(), faults.fail_with(RequestTimedOutError)]
)
def test_a_batch_that_expires_costs_the_transaction(version: int, fault: faults.Hook) -> None:
    harness = warm(version, SHORT)
    harness.cluster.on(ApiKey.PRODUCE, fault, times=None)
    deliveries = send_all(harness, 3)
    with pytest.raises(KafkaTimeoutError, match=r"delivery\.timeout\.ms=4000"):
        harness.producer.commit_transaction()
    assert deliveries[0].took_ms in range(4_000, 4_400)
    # Bug: it was a KafkaTimeoutError again, so a caller retried without end
    with pytest.raises(TransactionAbortableError, match=r"delivery\.timeout\.ms=4000.* Only abort_transaction is left"):
        harness.producer.commit_transaction()
    harness.cluster.scripts.clear()
    harness.settle()
    assert all(each.error is not None for each in deliveries)
    aborted_and_next_works(harness)


def test_records_whose_partition_cannot_be_added_expire() -> None:
    harness = TransactionHarness(1, SHORT).started()
    harness.cluster.on(ApiKey.ADD_PARTITIONS_TO_TXN, faults.fail_with(CoordinatorLoadInProgressError), times=None)
    delivery = harness.send(b"a", partition=0)
    with pytest.raises(KafkaTimeoutError):
        harness.producer.commit_transaction()
    assert isinstance(delivery.error, KafkaTimeoutError)
    harness.cluster.scripts.clear()
    harness.producer.abort_transaction()
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


@both_versions
def test_abort_waits_for_batch_in_flight(version: int) -> None:
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.delay(500))
    delivery = harness.send(b"in flight", partition=0)
    harness.run_for(20)
    assert harness.cluster.requests_of(ApiKey.PRODUCE)
    began_ms = harness.now_ms
    harness.producer.abort_transaction()
    assert harness.now_ms - began_ms >= 450
    assert delivery.error is None
    harness.producer.begin_transaction()
    harness.producer.abort_transaction()
    aborted = harness.committed()
    assert aborted == [b"warm-up"]
    harness.commit(b"next")
    assert harness.committed() == [b"warm-up", b"next"]


@both_versions
@pytest.mark.parametrize("fault", [faults.close_before(), faults.close_after(), faults.fail_with(RequestTimedOutError)])
def test_batch_failed_during_abort_leaves_no_gap(version: int, fault: faults.Hook) -> None:
    harness = warm(version)
    harness.cluster.on(
        ApiKey.PRODUCE,
        lambda cluster, exchange, proceed: faults.delay(200)(
            cluster, exchange, lambda: fault(cluster, exchange, proceed)
        ),
    )
    delivery = harness.send(b"in flight", partition=0)
    harness.run_for(20)
    assert harness.cluster.requests_of(ApiKey.PRODUCE)
    harness.producer.abort_transaction()
    assert delivery.error is not None
    assert harness.state is State.READY
    for number in range(3):
        harness.commit(b"%d" % number)
    assert harness.committed() == [b"warm-up", b"0", b"1", b"2"]


@both_versions
def test_waiting_retry_at_abort_leaves_no_gap(version: int) -> None:
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(RequestTimedOutError), times=None)
    delivery = harness.send(b"retried", partition=0)
    harness.run_for(250)
    harness.producer.abort_transaction()
    assert delivery.error is not None
    harness.cluster.scripts.clear()
    harness.commit(b"next")
    assert harness.committed() == [b"warm-up", b"next"]


@both_versions
def test_a_batch_too_large_is_split_within_its_transaction(version: int) -> None:
    harness = warm(version, {"linger.ms": "5"})
    harness.cluster.topics[TOPIC].max_message_bytes = 400
    deliveries = [harness.send(b"%d" % index * 60, partition=0) for index in range(8)]
    harness.producer.commit_transaction()
    assert [each.error for each in deliveries] == [None] * 8
    assert harness.committed()[2:] == [b"%d" % index * 60 for index in range(8)]
    assert len(harness.cluster.requests_of(ApiKey.PRODUCE)) > 1
    harness.commit(b"next")
    assert harness.committed()[-1] == b"next"


@both_versions
def test_a_record_too_large_for_the_broker_costs_the_transaction(version: int) -> None:
    harness = warm(version)
    harness.cluster.topics[TOPIC].max_message_bytes = 400
    large = harness.send(b"x" * 500, partition=0)
    with pytest.raises(RecordTooLargeError):
        harness.producer.commit_transaction()
    assert isinstance(large.error, RecordTooLargeError)
    aborted_and_next_works(harness)


@both_versions
def test_each_call_of_a_transaction_raises_its_own_error(version: int) -> None:
    """Bug: it raised the error of the batch, which every future of the batch raised too: each raise made the traceback
    longer.
    """
    harness = warm(version)
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError))
    refused = harness.send(b"refused", partition=0)
    with pytest.raises(TopicAuthorizationError, match=TOPIC) as caught:
        harness.producer.commit_transaction()
    assert refused.error is not None
    assert refused.error is not caught.value
    assert refused.error.__traceback__ is None


def test_failed_batch_before_kafka_2_5_ends_the_producer() -> None:
    harness = TransactionHarness(1)
    harness.cluster.versions = {**harness.cluster.versions, ApiKey.INIT_PRODUCER_ID: (0, 2)}
    harness.started()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(TopicAuthorizationError))
    harness.send(b"refused", partition=0)
    harness.settle()
    harness.producer.abort_transaction()  # the transaction itself has ended normally
    harness.run_for(100)
    assert harness.producer.has_failed
    with pytest.raises(
        UnsupportedVersionError,
        match=r"make another: to go on .* after a transaction lost a batch needs Kafka 2\.5 or newer\. The node",
    ):
        harness.producer.begin_transaction()
    assert harness.coordinated.state == "CompleteAbort"


def test_abort_without_failed_batch_works_before_kafka_2_5() -> None:
    harness = TransactionHarness(1)
    harness.cluster.versions = {**harness.cluster.versions, ApiKey.INIT_PRODUCER_ID: (0, 2)}
    harness.started()
    harness.send(b"dropped", partition=0)
    harness.settle()
    harness.producer.abort_transaction()
    harness.commit(b"kept")
    assert harness.committed() == [b"kept"]


@both_versions
@pytest.mark.parametrize("late", [ApiKey.PRODUCE, ApiKey.METADATA])
def test_commit_fails_if_a_recreated_topic_lacks_a_batch(version: int, late: ApiKey) -> None:
    """Bug: the new topic had the second batch only, and both were acknowledged and committed."""
    harness = TransactionHarness(version, {"batch.size": "1"}, partitions=3, node_count=3).started()
    for partition in range(3):
        harness.send(b"warm-up", partition=partition)
    harness.settle()
    leader = harness.cluster.topics[TOPIC].partitions[0].leader_id
    create_again = faults.create_again(TOPIC, UnknownTopicOrPartitionError)
    harness.cluster.on(ApiKey.PRODUCE, create_again, node_id=leader)
    harness.cluster.on(late, faults.delay(300))
    first, second = send_all(harness, 2)
    harness.settle()
    assert isinstance(first.error, OutOfOrderSequenceError)
    assert second.error is None
    with pytest.raises(OutOfOrderSequenceError):
        harness.producer.commit_transaction()
    assert harness.committed() == []
