"""Coordinators that move, load, vanish and refuse; lost answers."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.producer_harness import TOPIC
from support.scripted_broker import faults
from support.scripted_broker.dispatch import API_BY_KEY
from support.scripted_broker.exchange import Answer
from support.transaction_harness import GROUP, ID, PLACE, TransactionHarness
from support.transaction_steps import OFFSETS, STEPS, both_versions, every_request, finish

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    ConcurrentTransactionsError,
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    IllegalStateError,
    KafkaTimeoutError,
    NotCoordinatorError,
    ProducerFencedError,
    TopicAuthorizationError,
    UnknownServerError,
)
from spark_kafka_sink.producer.transactions import State
from spark_kafka_sink.protocol.versions import ApiKey

# ---- retries until success -------------------------------------------------------------------------------------------


@every_request
@pytest.mark.parametrize(
    "fault",
    [
        faults.fail_with(CoordinatorLoadInProgressError),
        faults.fail_with(CoordinatorNotAvailableError),
        faults.fail_with(NotCoordinatorError),
        faults.fail_with(ConcurrentTransactionsError),
        faults.fail_with(UnknownServerError),
        faults.close_before(),
        faults.close_after(),
        faults.lose_response(),
    ],
    ids=["loading", "not-available", "not-coordinator", "concurrent", "unknown", "cut-before", "cut-after", "silent"],
)
def test_every_request_is_sent_until_it_passes(step: str, fault: faults.Hook) -> None:
    version, api_key, run = STEPS[step]
    harness = TransactionHarness(version, {"request.timeout.ms": "1000"})
    harness.cluster.on(api_key, fault, times=3)
    run(harness)
    assert len(harness.cluster.requests_of(api_key)) >= 4
    finish(harness)


@every_request
@pytest.mark.parametrize(
    "fault",
    [faults.fail_with(CoordinatorNotAvailableError), faults.fail_with(NotCoordinatorError), faults.close_before()],
    ids=["not-available", "not-coordinator", "cut"],
)
def test_missing_coordinator_is_looked_up_again(step: str, fault: faults.Hook) -> None:
    version, api_key, run = STEPS[step]
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, fault)
    run(harness)
    key = GROUP if api_key == ApiKey.TXN_OFFSET_COMMIT else ID
    asked = [exchange.request.coordinator_keys for exchange in harness.cluster.requests_of(ApiKey.FIND_COORDINATOR)]
    assert asked.count((key,)) == 2


@every_request
@pytest.mark.parametrize("error_code", [ErrorCode.coordinator_load_in_progress, ErrorCode.concurrent_transactions])
def test_a_coordinator_that_is_loading_is_not_looked_up_again(step: str, error_code: int) -> None:
    version, api_key, run = STEPS[step]
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, faults.fail_with(error_code))
    run(harness)
    asked = [exchange.request.coordinator_keys for exchange in harness.cluster.requests_of(ApiKey.FIND_COORDINATOR)]
    assert asked.count((ID,)) == 1


@pytest.mark.parametrize(
    ("version", "api_key", "answer"),
    [
        (1, ApiKey.ADD_PARTITIONS_TO_TXN, {"throttle_time": 0, "results_by_topic_v3_and_below": []}),
        (1, ApiKey.TXN_OFFSET_COMMIT, {"throttle_time": 0, "topics": []}),
        (2, ApiKey.TXN_OFFSET_COMMIT, {"throttle_time": 0, "topics": []}),
    ],
)
def test_partition_missing_in_an_answer_is_requested_again(version: int, api_key: int, answer: dict[str, Any]) -> None:
    harness = TransactionHarness(version).started()
    harness.cluster.on(api_key, lambda *_: Answer(answer))
    delivery = harness.send(b"v", partition=0)
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.commit_transaction()
    assert len(harness.cluster.requests_of(api_key)) == 2
    assert delivery.error is None
    assert harness.committed() == [b"v"]
    assert harness.offsets()


@both_versions
def test_answer_without_a_producer_id_is_requested_again(version: int) -> None:
    """Bug: `init_transactions` took the answer as a success. Records then waited for an id until they expired."""
    harness = TransactionHarness(version)
    answer = {"throttle_time": 0, "error_code": 0, "producer_id": -1, "producer_epoch": -1}
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, lambda *_: Answer(answer))
    harness.producer.init_transactions()
    assert len(harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)) == 2
    finish(harness)


@pytest.mark.parametrize(
    ("version", "api_key", "topics", "partitions", "code"),
    [
        (
            1, ApiKey.ADD_PARTITIONS_TO_TXN, "results_by_topic_v3_and_below", "results_by_partition",
            "partition_error_code",
        ),
        (1, ApiKey.TXN_OFFSET_COMMIT, "topics", "partitions", "error_code"),
        (2, ApiKey.TXN_OFFSET_COMMIT, "topics", "partitions", "error_code"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("last", [0, 14])
def test_refusal_counts_of_a_partition_that_is_twice_in_an_answer(
    version: int, api_key: int, topics: str, partitions: str, code: str, last: int
) -> None:
    """Bug: the last code counted. Offsets that were refused before it were reported as committed."""
    both = [{"partition_index": 0, code: 14}, {"partition_index": 0, code: 0}]
    twice = {"name": TOPIC, partitions: both if last == 0 else both[::-1]}
    harness = TransactionHarness(version).started()
    harness.cluster.on(api_key, lambda *_: Answer({"throttle_time": 0, topics: [twice]}))
    delivery = harness.send(b"v", partition=0)
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.commit_transaction()
    assert len(harness.cluster.requests_of(api_key)) == 2
    assert delivery.error is None
    assert harness.committed() == [b"v"]
    assert harness.offsets()


@both_versions
def test_a_coordinator_that_moved_is_found_at_its_new_node(version: int) -> None:
    harness = TransactionHarness(version, node_count=3)
    harness.cluster.coordinators.update({ID: 1, GROUP: 2})
    harness.producer.init_transactions()
    harness.producer.begin_transaction()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.cluster.coordinators.update({ID: 2, GROUP: 0})
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.commit_transaction()
    assert [exchange.node_id for exchange in harness.cluster.requests_of(ApiKey.END_TXN)][-1] == 2
    finish(harness)


@both_versions
def test_a_coordinator_that_cannot_be_reached_is_looked_up_again(version: int) -> None:
    harness = TransactionHarness(version, {"max.block.ms": "30000"}, node_count=3)
    for partition in harness.cluster.topics[TOPIC].partitions:
        partition.leader_id = 0
    harness.cluster.coordinators.update({ID: 1, GROUP: 2})
    harness.producer.init_transactions()
    harness.producer.begin_transaction()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.network.stop(1)
    harness.network.cut(1)
    result = harness.manager.begin_commit()
    harness.run_for(3_000)
    assert not result.is_done
    harness.cluster.coordinators[ID] = 2
    harness.producer.commit_transaction()
    assert harness.committed() == [b"a"]


@both_versions
def test_concurrent_transactions_are_asked_again_after_20_ms(version: int) -> None:
    harness = TransactionHarness(version)
    harness.producer.init_transactions()
    harness.commit(b"a")
    harness.cluster.on(ApiKey.END_TXN, faults.fail_with(ConcurrentTransactionsError), times=2)
    harness.producer.begin_transaction()
    harness.send(b"b", partition=0)
    harness.producer.commit_transaction()
    times = [exchange.now_ms for exchange in harness.cluster.requests_of(ApiKey.END_TXN)][-3:]
    assert 20 <= times[1] - times[0] < 40
    assert 40 <= times[2] - times[1] < 60


@both_versions
def test_late_markers_delay_a_transaction_only_shortly(version: int) -> None:
    harness = TransactionHarness(version)
    harness.cluster.transactions.marker_delay_ms = 30
    harness.producer.init_transactions()
    began_ms = harness.now_ms
    for value in (b"a", b"b", b"c"):
        harness.commit(value)
    harness.run_for(200)
    harness.cluster.transactions.advance(harness.now_ms)
    assert harness.committed() == [b"a", b"b", b"c"]
    assert harness.now_ms - began_ms < 3 * 200 + 200


@both_versions
@pytest.mark.parametrize("runs_ms", [0, 20], ids=["before it is sent", "once it is refused"])
def test_transaction_begun_before_the_last_markers_can_be_aborted(version: int, runs_ms: int) -> None:
    harness = TransactionHarness(version)
    harness.cluster.transactions.marker_delay_ms = 100
    harness.producer.init_transactions()
    harness.commit(b"a")
    harness.producer.begin_transaction()
    harness.send(b"aborted", partition=0)
    harness.run_for(runs_ms)
    harness.producer.abort_transaction()
    harness.commit(b"b")
    harness.run_for(200)
    harness.cluster.transactions.advance(harness.now_ms)
    assert harness.committed() == [b"a", b"b"]


@both_versions
def test_a_lookup_is_repeated_until_there_is_a_coordinator(version: int) -> None:
    harness = TransactionHarness(version)
    harness.cluster.on(ApiKey.FIND_COORDINATOR, faults.fail_with(CoordinatorNotAvailableError), times=3)
    began_ms = harness.now_ms
    harness.producer.init_transactions()
    assert harness.now_ms - began_ms >= 500
    assert len(harness.cluster.requests_of(ApiKey.FIND_COORDINATOR)) == 4
    finish(harness)


# ---- the outcome of an end without an answer -------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("fault", [faults.close_after(), faults.close_before(), faults.fail_with(UnknownServerError)])
def test_unanswered_end_is_retried_with_the_same_outcome(version: int, committed: bool, fault: faults.Hook) -> None:
    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.cluster.on(ApiKey.END_TXN, fault, times=2)
    (harness.producer.commit_transaction if committed else harness.producer.abort_transaction)()
    asked = [exchange.request for exchange in harness.cluster.requests_of(ApiKey.END_TXN)]
    assert [each.committed for each in asked] == [committed] * 3
    assert len({(each.producer_id, each.producer_epoch) for each in asked}) == 1
    assert harness.committed() == ([b"a"] if committed else [])
    harness.commit(b"b")
    assert harness.committed()[-1] == b"b"


@pytest.mark.parametrize(
    "lost", [ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT, ApiKey.END_TXN]
)
@pytest.mark.parametrize("committed", [True, False])
def test_under_version_1_a_late_copy_meets_another_epoch(lost: int, committed: bool) -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(lost, faults.close_before())
    harness.send(b"a", partition=0)
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    (harness.producer.commit_transaction if committed else harness.producer.abort_transaction)()
    (asked,) = harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID)
    assert (asked.request.producer_id, asked.request.producer_epoch) == (1000, 0)
    assert harness.manager.identity.producer == (1000, 1)
    harness.producer.begin_transaction()
    harness.send(b"b", partition=0)
    harness.settle()
    late = harness.cluster.transactions.end(ID, 1000, 0, not committed, 1, harness.now_ms)
    assert late == 90
    harness.producer.commit_transaction()
    assert harness.committed() == ([b"a"] if committed else []) + [b"b"]


def test_version_1_late_offsets_meet_another_epoch() -> None:
    """A TxnOffsetCommit is in transit when its transaction is aborted. The connection is lost, and the request arrives
    in the next transaction.
    """
    harness = TransactionHarness(1, {"max.block.ms": "50"}).started()
    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, faults.lose_request())
    with pytest.raises(KafkaTimeoutError):
        harness.producer.send_offsets_to_transaction({PLACE: (700, None)}, GROUP)
    (late,) = harness.cluster.requests_of(ApiKey.TXN_OFFSET_COMMIT)
    result = harness.manager.begin_abort()
    harness.network.cut(0)
    harness.run_until(lambda: result.is_done)
    assert result.error is None
    result.is_reported = True
    assert harness.manager.identity.producer == (1000, 1)
    harness.run_for(500)
    harness.producer.begin_transaction()
    harness.send(b"b", partition=0)
    harness.producer.send_offsets_to_transaction({TopicPartition(TOPIC, 1): (9, None)}, GROUP)
    API_BY_KEY[ApiKey.TXN_OFFSET_COMMIT].respond(harness.cluster, late)
    harness.producer.commit_transaction()
    assert harness.offsets() == {(TOPIC, 1): (9, None, -1)}


def test_under_version_2_a_lost_answer_takes_no_further_epoch() -> None:
    harness = TransactionHarness(2).started()
    harness.cluster.on(ApiKey.END_TXN, faults.close_after())
    harness.send(b"a", partition=0)
    harness.producer.commit_transaction()
    assert harness.cluster.requests_of(ApiKey.INIT_PRODUCER_ID) == []
    assert harness.manager.identity.producer == (1000, 1)


def test_commit_succeeds_if_the_next_epoch_is_refused() -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(ApiKey.END_TXN, faults.close_after())
    harness.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ProducerFencedError))
    harness.send(b"a", partition=0)
    harness.producer.commit_transaction()
    assert harness.committed() == [b"a"]
    with pytest.raises(ProducerFencedError, match=ID):
        harness.producer.begin_transaction()


# ---- an abort during other requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [faults.delay(300), faults.close_after(), faults.close_before(), faults.fail_with(TopicAuthorizationError)]
)
def test_abort_during_add_partitions_leaves_nothing_open(fault: faults.Hook) -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(ApiKey.ADD_PARTITIONS_TO_TXN, fault)
    delivery = harness.send(b"a", partition=0)
    harness.run_for(20)
    assert harness.cluster.requests_of(ApiKey.ADD_PARTITIONS_TO_TXN)
    harness.producer.abort_transaction()
    assert delivery.error is not None
    assert harness.coordinated.state in {"CompleteAbort", "Empty"}
    assert harness.cluster.requests_of(ApiKey.PRODUCE) == []
    harness.run_for(2_000)
    finish(harness)


@pytest.mark.parametrize("fault", [faults.close_after(), faults.close_before()])
def test_abort_after_a_lost_answer_and_a_refusal_leaves_nothing_open(fault: faults.Hook) -> None:
    """Bug: a permission was taken away after the lost answer. The abort sent nothing, and the transaction stayed open
    at its coordinator, whose timeout then fenced the producer in a later one.
    """
    harness = TransactionHarness(1).started()
    harness.cluster.on(ApiKey.ADD_PARTITIONS_TO_TXN, fault)
    harness.cluster.on(ApiKey.ADD_PARTITIONS_TO_TXN, faults.fail_with(TopicAuthorizationError))
    delivery = harness.send(b"a", partition=0)
    harness.settle()
    assert isinstance(delivery.error, TopicAuthorizationError)
    harness.producer.abort_transaction()
    assert harness.coordinated.state in {"CompleteAbort", "Empty"}
    harness.run_for(2_000)
    finish(harness)


def test_abort_after_a_late_refusal_only_aborts() -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        lambda cluster, exchange, proceed: faults.delay(300)(
            cluster, exchange, lambda: faults.fail_with(TopicAuthorizationError)(cluster, exchange, proceed)
        ),
    )
    harness.send(b"a", partition=0)
    harness.run_for(20)
    assert harness.cluster.requests_of(ApiKey.ADD_PARTITIONS_TO_TXN)
    harness.producer.abort_transaction()
    assert harness.state is State.READY
    finish(harness)


@pytest.mark.parametrize(
    "fault", [faults.delay(6_000), faults.close_after(), faults.fail_with(CoordinatorLoadInProgressError)]
)
def test_abort_during_add_offsets_leaves_nothing_open(fault: faults.Hook) -> None:
    harness = TransactionHarness(1, {"max.block.ms": "50"}).started()
    harness.cluster.on(ApiKey.ADD_OFFSETS_TO_TXN, fault, times=1)
    harness.cluster.on(ApiKey.ADD_OFFSETS_TO_TXN, faults.fail_with(CoordinatorLoadInProgressError), times=3)
    with pytest.raises(KafkaTimeoutError):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    result = harness.manager.begin_abort()
    harness.run_until(lambda: result.is_done)
    assert result.error is None
    assert harness.coordinated.state in {"CompleteAbort", "Empty"}
    assert harness.cluster.requests_of(ApiKey.TXN_OFFSET_COMMIT) == []
    assert harness.offsets() == {}
    result.is_reported = True
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


def test_abort_does_not_wait_for_missing_group_coordinator() -> None:
    harness = TransactionHarness(2, {"max.block.ms": "500"}).started()
    harness.cluster.on(ApiKey.FIND_COORDINATOR, faults.fail_with(CoordinatorNotAvailableError), times=None)
    with pytest.raises(KafkaTimeoutError):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.abort_transaction()
    assert harness.state is State.READY


@both_versions
def test_an_abort_under_way_refuses_other_operations(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.cluster.on(ApiKey.END_TXN, faults.delay(6_000))
    with pytest.raises(KafkaTimeoutError, match="abort_transaction"):
        harness.producer.abort_transaction()
    for call in (harness.producer.commit_transaction, harness.producer.init_transactions):
        with pytest.raises(IllegalStateError, match="outcome of abort_transaction is open"):
            call()
    harness.producer.abort_transaction()
    finish(harness)


@both_versions
def test_offsets_that_an_abort_overtook_are_not_sent_again(version: int) -> None:
    harness = TransactionHarness(version, {"max.block.ms": "50"}).started()
    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, faults.close_before(), times=None)
    with pytest.raises(KafkaTimeoutError):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.cluster.scripts.clear()
    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, faults.lose_request(), times=None)
    harness.run_for(500)
    sent = len(harness.cluster.requests_of(ApiKey.TXN_OFFSET_COMMIT))
    harness.network.cut(0)
    result = harness.manager.begin_abort()
    harness.run_until(lambda: result.is_done)
    assert result.error is None
    assert len(harness.cluster.requests_of(ApiKey.TXN_OFFSET_COMMIT)) == sent
