"""Refusals of coordinators: fatal, or the end of one transaction, with the name of the resource."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
from kio.schema.errors import ErrorCode
from support.producer_harness import TOPIC
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.transaction_harness import GROUP, ID, PLACE, TransactionHarness
from support.transaction_steps import OFFSETS, STEPS, both_versions, every_request, finish, whole_transaction

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    CommitFailedError,
    ConcurrentTransactionsError,
    GroupAuthorizationError,
    InvalidPidMappingError,
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    KafkaError,
    KafkaTimeoutError,
    NotCoordinatorError,
    ProducerFencedError,
    SaslAuthenticationError,
    TopicAuthorizationError,
    TransactionAbortableError,
    TransactionalIdAuthorizationError,
    UnsupportedVersionError,
    error_for_code,
)
from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.protocol.versions import ApiKey

# ---- answers that ask to wait ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api_key", "code"),
    [
        (ApiKey.ADD_PARTITIONS_TO_TXN, ErrorCode.concurrent_transactions),
        (ApiKey.FIND_COORDINATOR, ErrorCode.coordinator_not_available),
    ],
)
def test_records_expired_before_add_partitions_name_the_reason(
    api_key: int, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    harness = TransactionHarness(1, {"delivery.timeout.ms": "4000", "request.timeout.ms": "1000"}).started()
    harness.cluster.on(ApiKey.ADD_PARTITIONS_TO_TXN, faults.fail_with(NotCoordinatorError))
    harness.cluster.on(api_key, faults.fail_with(code), times=None)
    delivery = harness.send(b"a", partition=0)
    harness.settle()
    said = str(error_for_code(code))
    assert re.search(f"the partition is not in the transaction yet; the last answer was: .*{said}", str(delivery.error))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(re.match(f"{ID}: attempt 5 was refused: .*{said}", text) for text in warnings), warnings
    harness.cluster.scripts.clear()
    harness.producer.abort_transaction()
    finish(harness)


def test_past_refusal_explains_no_later_error(caplog: pytest.LogCaptureFixture) -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(ApiKey.ADD_PARTITIONS_TO_TXN, faults.fail_with(ConcurrentTransactionsError))
    harness.send(b"a", partition=0)
    harness.run_until(lambda: harness.manager.reason_to_wait(PLACE))
    harness.settle()
    assert harness.manager.reason_to_wait(PLACE) is None
    assert harness.manager.reason_to_wait(TopicPartition(TOPIC, 1)) is None  # it is not in the transaction either
    assert "was refused" not in caplog.text


@pytest.mark.parametrize("first_attempt", [None, faults.close_before(), faults.close_after()])
def test_abort_does_not_wait_for_deleted_partition(first_attempt: faults.Hook | None) -> None:
    """The coordinator would always refuse it. An attempt without a response may have begun the transaction."""
    settings = {"delivery.timeout.ms": "4000", "request.timeout.ms": "1000"}
    harness = TransactionHarness(1, settings, partitions=2).started()

    def make_anew(cluster: ScriptedCluster, exchange: Exchange, proceed: Callable[[], Answer]) -> Answer:
        answer = first_attempt(cluster, exchange, proceed) if first_attempt is not None else None
        cluster.delete_topic(TOPIC)
        cluster.create_topic(TOPIC, 1)
        return answer or proceed()

    harness.cluster.on(ApiKey.ADD_PARTITIONS_TO_TXN, make_anew)
    deliveries = [harness.send(b"%d" % partition, partition=partition) for partition in (0, 1)]
    harness.settle()
    assert all(isinstance(delivery.error, KafkaTimeoutError) for delivery in deliveries)
    harness.producer.abort_transaction()
    assert not harness.coordinated.partitions
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


# ---- refusals --------------------------------------------------------------------------------------------------------


@every_request
@pytest.mark.parametrize(
    ("error_code", "error_class"),
    [
        (ErrorCode.producer_fenced, ProducerFencedError),
        (ErrorCode.invalid_producer_epoch, ProducerFencedError),
        (ErrorCode.invalid_txn_state, InvalidTxnStateError),
    ],
)
def test_fencing_by_a_coordinator_is_fatal(step: str, error_code: int, error_class: type[KafkaError]) -> None:
    version, api_key, run = STEPS[step]
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, faults.fail_with(error_code), times=None)
    with pytest.raises(error_class, match=TOPIC if api_key == ApiKey.ADD_PARTITIONS_TO_TXN else f"{GROUP}|{ID}"):
        run(harness)
    harness.run_for(100)
    assert harness.producer.has_failed
    calls = (
        harness.producer.init_transactions,
        harness.producer.begin_transaction,
        harness.producer.commit_transaction,
        harness.producer.abort_transaction,
    )
    for call in calls:
        with pytest.raises(error_class, match="had an error before"):
            call()
    assert harness.memory_in_use == 0
    assert isinstance(harness.send(b"more").error, error_class)


@every_request
def test_unauthorized_id_is_fatal_and_init_may_be_retried(step: str) -> None:
    version, api_key, run = STEPS[step]
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, faults.fail_with(TransactionalIdAuthorizationError))
    with pytest.raises(TransactionalIdAuthorizationError) as caught:
        run(harness)
    assert harness.producer.has_failed is caught.value.fatal is (step != "init")
    if step == "init":
        finish(harness)


@both_versions
def test_init_without_cluster_right_may_be_retried(version: int) -> None:
    harness = TransactionHarness(version)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ClusterAuthorizationError))
    with pytest.raises(ClusterAuthorizationError) as caught:
        harness.producer.init_transactions()
    assert not caught.value.fatal
    assert not harness.producer.has_failed
    finish(harness)


@both_versions
def test_id_without_lookup_permission_is_named(version: int) -> None:
    harness = TransactionHarness(version)
    harness.cluster.on(ApiKey.FIND_COORDINATOR, faults.fail_with(TransactionalIdAuthorizationError))
    with pytest.raises(TransactionalIdAuthorizationError, match=rf"transactional\.id {ID}: "):
        harness.producer.init_transactions()
    finish(harness)


@both_versions
def test_timeout_above_the_brokers_limit_is_fatal_with_the_remedy(version: int) -> None:
    harness = TransactionHarness(version, {"transaction.timeout.ms": "900001"})
    with pytest.raises(InvalidTransactionTimeoutError, match=rf"{ID}.*transaction\.max\.timeout\.ms"):
        harness.producer.init_transactions()
    assert harness.producer.has_failed


@pytest.mark.parametrize(
    ("version", "api_key", "error_code", "error_class", "place"),
    [
        (1, ApiKey.ADD_PARTITIONS_TO_TXN, ErrorCode.topic_authorization_failed, TopicAuthorizationError, f"{TOPIC}-0"),
        (1, ApiKey.ADD_OFFSETS_TO_TXN, ErrorCode.group_authorization_failed, GroupAuthorizationError, f"group {GROUP}"),
        (1, ApiKey.TXN_OFFSET_COMMIT, ErrorCode.group_authorization_failed, GroupAuthorizationError, f"group {GROUP}"),
        (2, ApiKey.TXN_OFFSET_COMMIT, ErrorCode.group_authorization_failed, GroupAuthorizationError, f"group {GROUP}"),
        (2, ApiKey.TXN_OFFSET_COMMIT, ErrorCode.topic_authorization_failed, TopicAuthorizationError, f"{TOPIC}-0"),
        (1, ApiKey.TXN_OFFSET_COMMIT, ErrorCode.illegal_generation, CommitFailedError, f"group {GROUP}"),
        (2, ApiKey.TXN_OFFSET_COMMIT, ErrorCode.unknown_member_id, CommitFailedError, f"group {GROUP}"),
        (2, ApiKey.TXN_OFFSET_COMMIT, ErrorCode.fenced_instance_id, KafkaError, f"group {GROUP}"),
        (
            1,
            ApiKey.TXN_OFFSET_COMMIT,
            ErrorCode.offset_metadata_too_large,
            KafkaError,
            f"group {GROUP}, .*offset.metadata.max.bytes",
        ),
        (
            2,
            ApiKey.TXN_OFFSET_COMMIT,
            ErrorCode.invalid_commit_offset_size,
            KafkaError,
            f"group {GROUP}, .*__consumer_offsets",
        ),
        (2, ApiKey.END_TXN, ErrorCode.transaction_abortable, KafkaError, ID),
    ],
)
def test_abortable_error_is_named_and_aborted(
    version: int, api_key: int, error_code: int, error_class: type[KafkaError], place: str
) -> None:
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, faults.fail_with(error_code))
    with pytest.raises(error_class, match=place) as caught:
        whole_transaction(harness)
    assert caught.value.error_code == error_code
    with pytest.raises(error_class, match=rf"had an error before.*{place}") as again:
        harness.producer.commit_transaction()
    assert again.value.error_code == error_code
    with pytest.raises(error_class, match=place):
        harness.producer.begin_transaction()
    assert isinstance(harness.send(b"too late").error, error_class)
    harness.producer.abort_transaction()
    assert harness.committed() == []
    finish(harness)


def test_refused_abort_is_fatal() -> None:
    harness = TransactionHarness(2).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.cluster.on(ApiKey.END_TXN, faults.fail_with(TransactionAbortableError))
    with pytest.raises(KafkaError, match=ID):
        harness.producer.abort_transaction()
    assert harness.producer.has_failed


@both_versions
def test_producer_with_a_forgotten_id_can_do_no_more(version: int) -> None:
    """As Java's since 4.0 (KAFKA-18019). Bug: a fenced producer took another id once the coordinator had forgotten all,
    and wrote again what the newer producer had written.
    """
    harness = TransactionHarness(version).started()
    del harness.cluster.transactions.transactions[ID]
    with pytest.raises(
        InvalidPidMappingError, match=r"transactional\.id\.expiration\.ms.*Make another producer"
    ) as forgotten:
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    assert forgotten.value.fatal
    with pytest.raises(InvalidPidMappingError):
        harness.producer.abort_transaction()
    assert harness.producer.has_failed
    assert ApiKey.INIT_PRODUCER_ID not in harness.calls()


@both_versions
@pytest.mark.parametrize("is_fenced", [True, False])
def test_refusal_after_a_lost_answer_does_not_call_the_commit_failed(version: int, is_fenced: bool) -> None:
    """Bug: the error said only that the broker might have aborted the transaction. Readers saw it."""

    def lost(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        answer = faults.close_after()(cluster, exchange, proceed)
        if is_fenced:
            cluster.transactions.init_producer_id(ID, 60_000, (-1, -1), exchange.now_ms)
        else:
            del cluster.transactions.transactions[ID]
        return answer

    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.cluster.on(ApiKey.END_TXN, lost)
    with pytest.raises(KafkaError, match="may have ended as it asked: look whether its records can be read") as refused:
        harness.producer.commit_transaction()
    assert refused.value.fatal
    assert harness.committed() == [b"a"]


def test_forgotten_resumed_transaction_is_not_aborted_by_another_id() -> None:
    task = TransactionHarness(2).started()
    task.send(b"a", partition=0)
    task.settle()
    driver = TransactionHarness(2, beside=task)
    driver.producer.resume_transaction(task.producer.prepare_transaction())
    driver.cluster.on(ApiKey.END_TXN, faults.fail_with(InvalidPidMappingError))
    with pytest.raises(InvalidPidMappingError):
        driver.producer.abort_transaction()
    assert driver.producer.has_failed


def test_unauthorized_group_lookup_costs_the_transaction() -> None:
    harness = TransactionHarness(2).started()
    harness.cluster.on(ApiKey.FIND_COORDINATOR, faults.fail_with(GroupAuthorizationError))
    with pytest.raises(GroupAuthorizationError, match=f"group {GROUP}"):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.abort_transaction()
    finish(harness)


def test_version_1_unknown_producer_id_takes_another_epoch() -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(ApiKey.ADD_PARTITIONS_TO_TXN, faults.fail_with(ErrorCode.unknown_producer_id))
    harness.send(b"a", partition=0)
    with pytest.raises(KafkaError):
        harness.producer.commit_transaction()
    harness.producer.abort_transaction()
    assert harness.calls() == [ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.INIT_PRODUCER_ID]
    assert harness.manager.identity.producer == (1000, 1)
    harness.commit(b"b")
    assert harness.committed() == [b"b"]


@both_versions
def test_most_severe_of_several_errors_counts(version: int) -> None:
    harness = TransactionHarness(version).started()

    def two_errors(values: dict[str, object]) -> dict[str, object]:
        partitions = [
            {"partition_index": 0, "error_code": ErrorCode.unknown_topic_or_partition},
            {"partition_index": 1, "error_code": ErrorCode.group_authorization_failed},
        ]
        return {"topics": [{"name": TOPIC, "partitions": partitions}]}

    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, faults.change(two_errors))
    with pytest.raises(GroupAuthorizationError, match=f"{TOPIC}-1"):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.abort_transaction()


@both_versions
def test_a_second_producer_fences_the_first(version: int) -> None:
    old = TransactionHarness(version).started()
    old.send(b"old", partition=0)
    old.settle()
    new = TransactionHarness(version, beside=old)
    new.producer.init_transactions()
    with pytest.raises(ProducerFencedError, match=ID):
        old.producer.commit_transaction()
    assert old.producer.has_failed
    new.commit(b"new")
    assert new.committed() == [b"new"]


@both_versions
def test_producer_fenced_while_sending_gets_the_error(version: int) -> None:
    old = TransactionHarness(version).started()
    old.send(b"old", partition=0)
    old.settle()
    new = TransactionHarness(version, beside=old)
    new.producer.init_transactions()
    refused = old.send(b"more", partition=0)
    old.settle()
    assert refused.error is not None
    assert old.state is State.ABORTABLE_ERROR  # this error of a leader is not that of the coordinator
    with pytest.raises(ProducerFencedError, match=ID):
        old.producer.abort_transaction()
    assert old.producer.has_failed


@both_versions
def test_transaction_past_its_timeout_is_not_committed(version: int) -> None:
    harness = TransactionHarness(version, {"transaction.timeout.ms": "1000"}).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.run_for(1_500)
    with pytest.raises((ProducerFencedError, InvalidTxnStateError), match=ID):
        harness.producer.commit_transaction()
    assert harness.committed() == []
    assert harness.producer.has_failed


def test_a_broker_too_old_for_transactions_is_fatal() -> None:
    harness = TransactionHarness(1)
    harness.cluster.versions = {key: value for key, value in harness.cluster.versions.items() if key != ApiKey.END_TXN}
    harness.producer.init_transactions()
    harness.producer.begin_transaction()
    harness.send(b"a", partition=0)
    with pytest.raises(UnsupportedVersionError):
        harness.producer.commit_transaction()
    assert harness.producer.has_failed


@pytest.mark.parametrize("api_key", [ApiKey.PRODUCE, ApiKey.TXN_OFFSET_COMMIT])
def test_transaction_of_version_2_is_not_written_in_a_version_of_1(api_key: ApiKey) -> None:
    """Bug: behind a proxy that hides the newest versions, brokers of version 2 got requests of version 1. These add
    nothing to the transaction: the broker refused each one, or wrote records that no commit made visible.
    """
    harness = TransactionHarness(2)
    harness.cluster.versions = {**harness.cluster.versions, api_key: (0, 11 if api_key is ApiKey.PRODUCE else 4)}
    harness.producer.init_transactions()
    harness.producer.begin_transaction()
    harness.send(b"a", partition=0)
    end = harness.producer.commit_transaction
    if api_key is ApiKey.TXN_OFFSET_COMMIT:
        end = partial(harness.producer.send_offsets_to_transaction, OFFSETS, GROUP)
    with pytest.raises(UnsupportedVersionError, match=r"transaction\.version=2 needs Kafka 4\.0 or newer"):
        end()
    assert harness.cluster.requests_of(api_key) == []
    assert harness.producer.has_failed


def test_a_node_that_refuses_us_is_fatal() -> None:
    harness = TransactionHarness(2)
    refusal = SaslAuthenticationError("wrong password")
    harness.client.authentication_error = lambda node: refusal
    with pytest.raises(SaslAuthenticationError):
        harness.producer.init_transactions()
    assert harness.producer.has_failed


# ---- TRANSACTION_ABORTABLE for a producer id -------------------------------------------------------------------------


@both_versions
def test_init_refused_as_abortable_works_after_an_abort(version: int) -> None:
    """Java's TransactionManagerTest.testTransactionAbortableExceptionInInitProducerId."""
    harness = TransactionHarness(version)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(TransactionAbortableError))
    with pytest.raises(TransactionAbortableError, match=ID) as caught:
        harness.producer.init_transactions()
    assert not caught.value.fatal
    assert harness.state is State.ABORTABLE_ERROR
    assert not harness.producer.has_failed
    for call in (harness.producer.begin_transaction, harness.producer.commit_transaction):
        with pytest.raises(TransactionAbortableError, match="had an error before"):
            call()
    harness.producer.abort_transaction()
    harness.commit(b"v")
    assert harness.committed() == [b"v"]
    assert not harness.cluster.requests_of(ApiKey.END_TXN)[:-1], "there was nothing to abort"


@both_versions
def test_abort_after_a_refused_init_retries_until_it_works(version: int) -> None:
    harness = TransactionHarness(version)
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(TransactionAbortableError), times=3)
    with pytest.raises(TransactionAbortableError):
        harness.producer.init_transactions()
    for _ in range(3):
        harness.producer.abort_transaction()
        if harness.state is State.ABORTABLE_ERROR:
            with pytest.raises(TransactionAbortableError):
                harness.producer.begin_transaction()
    harness.commit(b"v")
    assert harness.committed() == [b"v"]
    harness.close()


def test_producer_closes_after_a_commit_of_unknown_outcome_whose_next_epoch_is_refused() -> None:
    """Bug: the end of the Sender raised IllegalStateError, because the caller of the commit had stopped waiting."""
    harness = TransactionHarness(1).started()
    harness.cluster.on(ApiKey.END_TXN, faults.close_after())
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(TransactionAbortableError))
    harness.send(b"v", partition=0)
    harness.settle()
    result = harness.manager.begin_commit()
    harness.run_until(lambda: harness.state is State.ABORTABLE_ERROR)
    assert result.is_done
    harness.close()
    assert harness.committed() == [b"v"]


def test_finished_abort_succeeds_though_the_next_epoch_is_refused() -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(ApiKey.PRODUCE, faults.fail_with(InvalidRecordError))
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(TransactionAbortableError))
    refused = harness.send(b"refused", partition=0)
    harness.settle()
    harness.producer.abort_transaction()
    assert refused.error is not None
    assert harness.state is State.ABORTABLE_ERROR
    with pytest.raises(TransactionAbortableError):
        harness.producer.begin_transaction()
    harness.producer.abort_transaction()
    harness.commit(b"v")
    assert harness.committed() == [b"v"]


@both_versions
def test_errors_of_an_old_epoch_name_the_timeout_too(version: int) -> None:
    """Bug: after transaction.timeout.ms they only said that the epoch is old, or that a newer producer took over."""
    harness = TransactionHarness(version, {"transaction.timeout.ms": "1000"}).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.run_for(1_500)
    refused = harness.send(b"too late", partition=0)
    harness.settle()
    assert isinstance(refused.error, InvalidProducerEpochError)
    assert "open longer than transaction.timeout.ms" in str(refused.error)

    old = TransactionHarness(version).started()
    old.send(b"old", partition=0)
    old.settle()
    TransactionHarness(version, beside=old).producer.init_transactions()
    with pytest.raises(ProducerFencedError, match=r"Or its transaction was open longer than transaction\.timeout\.ms"):
        old.producer.commit_transaction()
