"""Coordinators that move, load, vanish and refuse; answers that are lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.producer_harness import TOPIC
from support.scripted_broker import faults
from support.transaction_harness import (
    ADD_OFFSETS,
    ADD_PARTITIONS,
    END_TXN,
    FIND_COORDINATOR,
    GROUP,
    ID,
    INIT_PRODUCER_ID,
    PLACE,
    PRODUCE,
    TXN_OFFSET_COMMIT,
    TransactionHarness,
)

from spark_kafka_sink.common.errors import (
    GroupAuthorizationError,
    IllegalStateError,
    InvalidPidMappingError,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    SaslAuthenticationError,
    TopicAuthorizationError,
    TransactionalIdAuthorizationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.producer.transaction_manager import State

both_versions = pytest.mark.parametrize("version", [1, 2])
OFFSETS = {PLACE: (7, None)}

Step = Callable[[TransactionHarness], None]
STEPS: dict[str, tuple[int, int, Step]] = {
    "init": (2, INIT_PRODUCER_ID, lambda harness: harness.producer.init_transactions()),
    "partitions": (1, ADD_PARTITIONS, lambda harness: whole_transaction(harness)),
    "group": (1, ADD_OFFSETS, lambda harness: whole_transaction(harness)),
    "offsets-1": (1, TXN_OFFSET_COMMIT, lambda harness: whole_transaction(harness)),
    "offsets-2": (2, TXN_OFFSET_COMMIT, lambda harness: whole_transaction(harness)),
    "end-1": (1, END_TXN, lambda harness: whole_transaction(harness)),
    "end-2": (2, END_TXN, lambda harness: whole_transaction(harness)),
}
every_request = pytest.mark.parametrize("step", STEPS)


def whole_transaction(harness: TransactionHarness) -> None:
    if harness.state is State.UNINITIALIZED:
        harness.producer.init_transactions()
    harness.producer.begin_transaction()
    harness.send(b"a", partition=0)
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.commit_transaction()


def finish(harness: TransactionHarness) -> None:
    """Everything in its place, whatever happened on the way, and the next transaction works."""
    if harness.committed() == []:
        whole_transaction(harness)
    assert harness.committed() == [b"a"]
    assert harness.offsets() == {(TOPIC, 0): (7, None, -1)}
    harness.commit(b"b")
    assert harness.committed() == [b"a", b"b"]
    assert harness.memory_in_use == 0


# ---- retried until they pass -----------------------------------------------------------------------------------------


@every_request
@pytest.mark.parametrize(
    "fault",
    [
        faults.fail_with(14),
        faults.fail_with(15),
        faults.fail_with(16),
        faults.fail_with(51),
        faults.fail_with(-1),
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
@pytest.mark.parametrize("error_code", [15, 16])
def test_the_coordinator_is_looked_up_again_when_it_is_not_there(step: str, error_code: int) -> None:
    version, api_key, run = STEPS[step]
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, faults.fail_with(error_code))
    run(harness)
    key = GROUP if api_key == TXN_OFFSET_COMMIT else ID
    asked = [exchange.request.coordinator_keys for exchange in harness.cluster.requests_of(FIND_COORDINATOR)]
    assert asked.count((key,)) == 2


@every_request
@pytest.mark.parametrize("error_code", [14, 51])
def test_a_coordinator_that_is_loading_is_not_looked_up_again(step: str, error_code: int) -> None:
    version, api_key, run = STEPS[step]
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, faults.fail_with(error_code))
    run(harness)
    asked = [exchange.request.coordinator_keys for exchange in harness.cluster.requests_of(FIND_COORDINATOR)]
    assert asked.count((ID,)) == 1


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
    assert [exchange.node_id for exchange in harness.cluster.requests_of(END_TXN)][-1] == 2
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
    harness.cluster.on(END_TXN, faults.fail_with(51), times=2)
    harness.producer.begin_transaction()
    harness.send(b"b", partition=0)
    harness.producer.commit_transaction()
    times = [exchange.now_ms for exchange in harness.cluster.requests_of(END_TXN)][-3:]
    assert 20 <= times[1] - times[0] < 40
    assert 40 <= times[2] - times[1] < 60


@both_versions
def test_markers_that_come_late_do_not_hold_a_transaction_up_for_long(version: int) -> None:
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
def test_a_lookup_is_repeated_until_there_is_a_coordinator(version: int) -> None:
    harness = TransactionHarness(version)
    harness.cluster.on(FIND_COORDINATOR, faults.fail_with(15), times=3)
    began_ms = harness.now_ms
    harness.producer.init_transactions()
    assert harness.now_ms - began_ms >= 500
    assert len(harness.cluster.requests_of(FIND_COORDINATOR)) == 4
    finish(harness)


# ---- the outcome of an end that was not answered ---------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("fault", [faults.close_after(), faults.close_before(), faults.fail_with(-1)])
def test_an_end_without_an_answer_is_sent_again_with_the_same_outcome(
    version: int, committed: bool, fault: faults.Hook
) -> None:
    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.cluster.on(END_TXN, fault, times=2)
    (harness.producer.commit_transaction if committed else harness.producer.abort_transaction)()
    asked = [exchange.request for exchange in harness.cluster.requests_of(END_TXN)]
    assert [each.committed for each in asked] == [committed] * 3
    assert len({(each.producer_id, each.producer_epoch) for each in asked}) == 1
    assert harness.committed() == ([b"a"] if committed else [])
    harness.commit(b"b")
    assert harness.committed()[-1] == b"b"


@pytest.mark.parametrize("lost", [ADD_PARTITIONS, ADD_OFFSETS, TXN_OFFSET_COMMIT, END_TXN])
@pytest.mark.parametrize("committed", [True, False])
def test_under_version_1_a_copy_that_comes_late_meets_another_epoch(lost: int, committed: bool) -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(lost, faults.close_before())
    harness.send(b"a", partition=0)
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    (harness.producer.commit_transaction if committed else harness.producer.abort_transaction)()
    (asked,) = harness.cluster.requests_of(INIT_PRODUCER_ID)
    assert (asked.request.producer_id, asked.request.producer_epoch) == (1000, 0)
    assert harness.manager.producer == (1000, 1)
    harness.producer.begin_transaction()
    harness.send(b"b", partition=0)
    harness.settle()
    late = harness.cluster.transactions.end(ID, 1000, 0, not committed, 1, harness.now_ms)
    assert late == 90
    harness.producer.commit_transaction()
    assert harness.committed() == ([b"a"] if committed else []) + [b"b"]


def test_under_version_2_a_lost_answer_takes_no_further_epoch() -> None:
    harness = TransactionHarness(2).started()
    harness.cluster.on(END_TXN, faults.close_after())
    harness.send(b"a", partition=0)
    harness.producer.commit_transaction()
    assert harness.cluster.requests_of(INIT_PRODUCER_ID) == []
    assert harness.manager.producer == (1000, 1)


def test_a_commit_has_succeeded_though_the_epoch_after_it_is_refused() -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(END_TXN, faults.close_after())
    harness.cluster.on(INIT_PRODUCER_ID, faults.fail_with(90))
    harness.send(b"a", partition=0)
    harness.producer.commit_transaction()
    assert harness.committed() == [b"a"]
    with pytest.raises(ProducerFencedError, match=ID):
        harness.producer.begin_transaction()


# ---- refusals --------------------------------------------------------------------------------------------------------


@every_request
@pytest.mark.parametrize(
    ("error_code", "error_class"), [(90, ProducerFencedError), (47, ProducerFencedError), (48, InvalidTxnStateError)]
)
def test_a_coordinator_that_fences_is_believed(step: str, error_code: int, error_class: type[KafkaError]) -> None:
    version, api_key, run = STEPS[step]
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, faults.fail_with(error_code))
    with pytest.raises(error_class, match=TOPIC if api_key == ADD_PARTITIONS else f"{GROUP}|{ID}"):
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
        with pytest.raises(error_class, match="met an error before"):
            call()
    assert harness.memory_in_use == 0
    assert isinstance(harness.send(b"more").error, error_class)


@every_request
def test_an_id_that_is_not_granted_is_fatal_and_a_refused_init_may_be_repeated(step: str) -> None:
    version, api_key, run = STEPS[step]
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, faults.fail_with(53))
    with pytest.raises(TransactionalIdAuthorizationError):
        run(harness)
    assert harness.producer.has_failed is (step != "init")
    if step == "init":
        finish(harness)


@both_versions
def test_an_id_that_may_not_be_looked_up_is_named(version: int) -> None:
    harness = TransactionHarness(version)
    harness.cluster.on(FIND_COORDINATOR, faults.fail_with(53))
    with pytest.raises(TransactionalIdAuthorizationError, match=rf"transactional\.id {ID}: "):
        harness.producer.init_transactions()
    finish(harness)


@both_versions
def test_a_time_out_beyond_the_brokers_is_fatal_and_says_what_to_change(version: int) -> None:
    harness = TransactionHarness(version, {"transaction.timeout.ms": "900001"})
    with pytest.raises(InvalidTransactionTimeoutError, match=rf"{ID}.*transaction\.max\.timeout\.ms"):
        harness.producer.init_transactions()
    assert harness.producer.has_failed


@pytest.mark.parametrize(
    ("version", "api_key", "error_code", "error_class", "place"),
    [
        (1, ADD_PARTITIONS, 29, TopicAuthorizationError, f"{TOPIC}-0"),
        (1, ADD_OFFSETS, 30, GroupAuthorizationError, f"group {GROUP}"),
        (1, TXN_OFFSET_COMMIT, 30, GroupAuthorizationError, f"group {GROUP}"),
        (2, TXN_OFFSET_COMMIT, 30, GroupAuthorizationError, f"group {GROUP}"),
        (2, TXN_OFFSET_COMMIT, 29, TopicAuthorizationError, f"{TOPIC}-0"),
        (1, TXN_OFFSET_COMMIT, 22, KafkaError, f"group {GROUP}"),
        (2, TXN_OFFSET_COMMIT, 25, KafkaError, f"group {GROUP}"),
        (2, TXN_OFFSET_COMMIT, 82, KafkaError, f"group {GROUP}"),
        (1, ADD_PARTITIONS, 49, InvalidPidMappingError, f"{TOPIC}-0"),
        (1, ADD_OFFSETS, 49, InvalidPidMappingError, GROUP),
        (2, END_TXN, 120, KafkaError, ID),
        (1, END_TXN, 49, InvalidPidMappingError, ID),
    ],
)
def test_what_costs_the_transaction_is_named_and_aborted(
    version: int, api_key: int, error_code: int, error_class: type[KafkaError], place: str
) -> None:
    harness = TransactionHarness(version)
    harness.cluster.on(api_key, faults.fail_with(error_code))
    with pytest.raises(error_class, match=place) as caught:
        whole_transaction(harness)
    assert caught.value.error_code == error_code
    with pytest.raises(error_class, match=rf"met an error before.*{place}"):
        harness.producer.commit_transaction()
    with pytest.raises(error_class, match=place):
        harness.producer.begin_transaction()
    assert isinstance(harness.send(b"too late").error, error_class)
    harness.producer.abort_transaction()
    assert harness.committed() == []
    finish(harness)


def test_a_group_whose_coordinator_may_not_be_known_costs_the_transaction() -> None:
    harness = TransactionHarness(2).started()
    harness.cluster.on(FIND_COORDINATOR, faults.fail_with(30))
    with pytest.raises(GroupAuthorizationError, match=f"group {GROUP}"):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.abort_transaction()
    finish(harness)


@pytest.mark.parametrize("error_code", [49, 59])
def test_under_version_1_a_producer_id_that_is_not_known_is_followed_by_another_epoch(error_code: int) -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(ADD_PARTITIONS, faults.fail_with(error_code))
    harness.send(b"a", partition=0)
    with pytest.raises(KafkaError):
        harness.producer.commit_transaction()
    harness.producer.abort_transaction()
    assert harness.calls() == [ADD_PARTITIONS, INIT_PRODUCER_ID]
    assert harness.manager.producer == (1000, 1)
    harness.commit(b"b")
    assert harness.committed() == [b"b"]


@both_versions
def test_the_gravest_of_several_errors_counts(version: int) -> None:
    harness = TransactionHarness(version).started()

    def two_errors(values: dict[str, object]) -> dict[str, object]:
        partitions = [{"partition_index": 0, "error_code": 3}, {"partition_index": 1, "error_code": 30}]
        return {"topics": [{"name": TOPIC, "partitions": partitions}]}

    harness.cluster.on(TXN_OFFSET_COMMIT, faults.change(two_errors))
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
def test_a_producer_that_is_fenced_while_it_sends_hears_of_it(version: int) -> None:
    old = TransactionHarness(version).started()
    old.send(b"old", partition=0)
    old.settle()
    new = TransactionHarness(version, beside=old)
    new.producer.init_transactions()
    refused = old.send(b"more", partition=0)
    old.settle()
    assert refused.error is not None
    assert old.state is State.ABORTABLE_ERROR  # a leader's word is not the coordinator's
    with pytest.raises(ProducerFencedError, match=ID):
        old.producer.abort_transaction()
    assert old.producer.has_failed


@both_versions
def test_a_transaction_that_outlived_its_time_out_is_not_committed(version: int) -> None:
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
    harness.cluster.versions = {key: value for key, value in harness.cluster.versions.items() if key != END_TXN}
    harness.producer.init_transactions()
    harness.producer.begin_transaction()
    harness.send(b"a", partition=0)
    with pytest.raises(UnsupportedVersionError):
        harness.producer.commit_transaction()
    assert harness.producer.has_failed


def test_a_node_that_refuses_us_is_fatal() -> None:
    harness = TransactionHarness(2)
    refusal = SaslAuthenticationError("wrong password")
    harness.client.authentication_error = lambda node: refusal
    with pytest.raises(SaslAuthenticationError):
        harness.producer.init_transactions()
    assert harness.producer.has_failed


# ---- an abort in the midst of things ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [faults.delay(300), faults.close_after(), faults.close_before(), faults.fail_with(29)]
)
def test_an_abort_while_a_partition_is_being_added_leaves_nothing_open(fault: faults.Hook) -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(ADD_PARTITIONS, fault)
    delivery = harness.send(b"a", partition=0)
    harness.run_for(20)
    assert harness.cluster.requests_of(ADD_PARTITIONS)
    harness.producer.abort_transaction()
    assert delivery.error is not None
    assert harness.coordinated.state in {"CompleteAbort", "Empty"}
    assert harness.cluster.requests_of(PRODUCE) == []
    harness.run_for(2_000)
    finish(harness)


def test_an_abort_after_a_refusal_that_comes_late_is_no_more_than_an_abort() -> None:
    harness = TransactionHarness(1).started()
    harness.cluster.on(
        ADD_PARTITIONS,
        lambda cluster, exchange, proceed: faults.delay(300)(
            cluster, exchange, lambda: faults.fail_with(29)(cluster, exchange, proceed)
        ),
    )
    harness.send(b"a", partition=0)
    harness.run_for(20)
    assert harness.cluster.requests_of(ADD_PARTITIONS)
    harness.producer.abort_transaction()
    assert harness.state is State.READY
    finish(harness)


@pytest.mark.parametrize("fault", [faults.delay(6_000), faults.close_after(), faults.fail_with(14)])
def test_an_abort_while_a_group_is_being_added_leaves_nothing_open(fault: faults.Hook) -> None:
    harness = TransactionHarness(1, {"max.block.ms": "50"}).started()
    harness.cluster.on(ADD_OFFSETS, fault, times=1)
    harness.cluster.on(ADD_OFFSETS, faults.fail_with(14), times=3)
    with pytest.raises(KafkaTimeoutError):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    result = harness.manager.begin_abort()
    harness.run_until(lambda: result.is_done)
    assert result.error is None
    assert harness.coordinated.state in {"CompleteAbort", "Empty"}
    assert harness.cluster.requests_of(TXN_OFFSET_COMMIT) == []
    assert harness.offsets() == {}
    result.is_heard = True
    harness.commit(b"next")
    assert harness.committed() == [b"next"]


def test_an_abort_does_not_wait_for_a_group_whose_coordinator_is_not_found() -> None:
    harness = TransactionHarness(2, {"max.block.ms": "500"}).started()
    harness.cluster.on(FIND_COORDINATOR, faults.fail_with(15), times=None)
    with pytest.raises(KafkaTimeoutError):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.abort_transaction()
    assert harness.state is State.READY


@both_versions
def test_an_abort_under_way_refuses_other_operations(version: int) -> None:
    harness = TransactionHarness(version).started()
    harness.send(b"a", partition=0)
    harness.settle()
    harness.cluster.on(END_TXN, faults.delay(6_000))
    with pytest.raises(KafkaTimeoutError, match="abort_transaction"):
        harness.producer.abort_transaction()
    for call in (harness.producer.commit_transaction, harness.producer.init_transactions):
        with pytest.raises(IllegalStateError, match="outcome of abort_transaction is open"):
            call()
    harness.producer.abort_transaction()
    finish(harness)
