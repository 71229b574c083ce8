from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import PLACE, CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.versions import KAFKA_3_0

from spark_kafka_sink.admin.coordinator_calls import Outcome
from spark_kafka_sink.admin.transaction_values import EndTxnOutcome, EndTxnStatus, TransactionState
from spark_kafka_sink.admin.transactions import end_txn_outcome
from spark_kafka_sink.common.errors import (
    BrokerError,
    ConcurrentTransactionsError,
    InvalidPidMappingError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    TransactionAbortableError,
    TransactionalIdAuthorizationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.protocol.versions import ApiKey


@pytest.fixture
def bench() -> CoordinatorBench:
    return CoordinatorBench()


@pytest.mark.parametrize(("is_in_doubt", "status"), [(True, EndTxnStatus.UNRESOLVED), (False, EndTxnStatus.REFUSED)])
def test_refusal_after_a_lost_response_is_in_doubt(is_in_doubt: bool, status: EndTxnStatus) -> None:
    open_ = OpenTransaction("id", 5, 3, 2)
    error = UnsupportedVersionError("a coordinator of an older release by then")
    outcome = end_txn_outcome(open_, Outcome(None, error, is_in_doubt))
    assert outcome == EndTxnOutcome(open_, status, open_.producer, error, is_in_doubt)


# ---- producer ids --------------------------------------------------------------------------------------------------


def test_first_epoch_is_zero_and_each_call_gives_the_next(bench: CoordinatorBench) -> None:
    transactions = bench.coordinator.transactions
    first = transactions.init_producer_id("id", 60_000, bench.timer())
    assert first == (1000, 0)
    assert transactions.init_producer_id("id", 50_000, bench.timer()) == (1000, 1)
    assert transactions.init_producer_id("other", 60_000, bench.timer()) == (1001, 0)
    asked = bench.asked(ApiKey.INIT_PRODUCER_ID)[1].request
    assert (asked.transactional_id, asked.producer_id, asked.producer_epoch) == ("id", -1, -1)
    assert bench.cluster.transactions.transactions["id"].timeout_ms == 50_000


def test_open_transaction_is_aborted_and_waited_for(bench: CoordinatorBench) -> None:
    bench.cluster.transactions.marker_delay_ms = 300
    (open_,) = bench.open("id")
    started_ms = bench.rig.now_ms
    given = bench.coordinator.transactions.init_producer_id("id", 60_000, bench.timer())
    assert given == (open_.producer_id, open_.producer_epoch + 2)
    assert 300 <= bench.rig.now_ms - started_ms <= 700
    assert bench.cluster.log("t", 0).committed_records() == []


def test_answer_without_a_producer_id_does_not_count(bench: CoordinatorBench) -> None:
    """Bug: an answer without an id and without an error was a success, so an old producer counted as fenced."""
    bench.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.change(lambda values: values | {"producer_id": -1}))
    assert bench.coordinator.transactions.init_producer_id("id", 60_000, bench.timer()) == (1000, 1)


def test_endless_open_transaction_is_reported_at_the_limit(bench: CoordinatorBench) -> None:
    bench.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ConcurrentTransactionsError), times=None)
    with pytest.raises(KafkaTimeoutError, match=r"'id'.*1500 ms.*previous transaction"):
        bench.coordinator.transactions.init_producer_id("id", 60_000, bench.timer(1_500))


def test_many_ids_fenced_at_once_have_separate_outcomes(bench: CoordinatorBench) -> None:
    opened = bench.open("a", "b", "c")
    bench.cluster.on(
        ApiKey.INIT_PRODUCER_ID, faults.fail_with(TransactionalIdAuthorizationError), times=None, node_id=1
    )
    found = bench.coordinator.transactions.init_producer_ids("abc", 60_000, bench.timer())
    assert list(found) == ["a", "b", "c"]
    assert found["a"].get() == (opened[0].producer_id, opened[0].producer_epoch + 2)
    with pytest.raises(TransactionalIdAuthorizationError, match=r"'b'.*broker-1.*grant WRITE"):
        found["b"].get()
    assert [bench.state(each) for each in "abc"] == ["Empty", "Ongoing", "Empty"]


@pytest.mark.parametrize("error_code", [ErrorCode.invalid_producer_epoch, ErrorCode.producer_fenced])
def test_both_codes_of_fencing_become_one_error(bench: CoordinatorBench, error_code: int) -> None:
    bench.cluster.on(ApiKey.INIT_PRODUCER_ID, faults.fail_with(error_code))
    with pytest.raises(ProducerFencedError, match=r"'id'.*newer producer"):
        bench.coordinator.transactions.init_producer_id("id", 60_000, bench.timer(), ProducerIdAndEpoch(1000, 0))


# ---- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error_code", "status", "error_type"),
    [
        (ErrorCode.invalid_producer_epoch, EndTxnStatus.PRODUCER_FENCED, InvalidProducerEpochError),
        (ErrorCode.invalid_txn_state, EndTxnStatus.INVALID_TXN_STATE, InvalidTxnStateError),
        (ErrorCode.invalid_producer_id_mapping, EndTxnStatus.INVALID_PID_MAPPING, InvalidPidMappingError),
        (ErrorCode.producer_fenced, EndTxnStatus.PRODUCER_FENCED, ProducerFencedError),
        (ErrorCode.transactional_id_authorization_failed, EndTxnStatus.REFUSED, TransactionalIdAuthorizationError),
        (ErrorCode.transaction_abortable, EndTxnStatus.REFUSED, TransactionAbortableError),
        (ErrorCode.non_empty_group, EndTxnStatus.REFUSED, BrokerError),
    ],
)
@pytest.mark.parametrize("committed", [True, False])
def test_each_answer_has_its_own_outcome(
    bench: CoordinatorBench, error_code: int, status: EndTxnStatus, error_type: type[KafkaError], committed: bool
) -> None:
    (open_,) = bench.open("id")
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(error_code))
    (outcome,) = bench.end([open_], committed=committed)
    assert outcome.status is status
    assert type(outcome.error) is error_type
    assert outcome.error is not None
    assert outcome.error.error_code == error_code
    what = "Commit" if committed else "Abort"
    assert f"{what} of transactional id 'id' (producer id 1000, epoch 0, transaction version 2)" in str(outcome.error)
    assert outcome.producer == open_.producer
    assert len(bench.asked(ApiKey.END_TXN)) == 1


def test_decided_answer_after_a_lost_one_keeps_its_meaning(bench: CoordinatorBench) -> None:
    (open_,) = bench.open("id")
    bench.cluster.on(ApiKey.END_TXN, faults.close_before())
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(ProducerFencedError))
    assert bench.commit(open_).status is EndTxnStatus.PRODUCER_FENCED


@pytest.mark.parametrize(("version", "request_version", "bump"), [(1, 4, 0), (2, 5, 1)])
def test_transaction_ends_in_the_version_it_began_under(version: int, request_version: int, bump: int) -> None:
    bench = CoordinatorBench(version=version)
    (open_,) = bench.open("id")
    outcome = bench.commit(open_)
    assert (outcome.status, outcome.producer.epoch) == (EndTxnStatus.DONE, open_.producer_epoch + bump)
    assert [exchange.version for exchange in bench.asked(ApiKey.END_TXN)] == [request_version]


def test_producer_id_zero_has_a_next_epoch_too(bench: CoordinatorBench) -> None:
    bench.cluster.next_producer_id = 0
    (open_,) = bench.open("id")
    outcome = bench.commit(open_)
    assert outcome.producer == (0, open_.producer_epoch + 1)


def test_last_epoch_is_followed_by_another_producer_id(bench: CoordinatorBench) -> None:
    (open_,) = bench.open("id")
    held = bench.cluster.transactions.transactions["id"]
    held.epoch = 2**15 - 2
    last = open_._replace(producer_epoch=held.epoch)
    outcome = bench.commit(last)
    assert outcome.status is EndTxnStatus.DONE
    assert outcome.producer == (1001, 0)
    assert bench.commit(last) == outcome
    following = OpenTransaction("id", 1001, 0, 2)
    bench.raw.write(following, PLACE, "more")
    assert bench.commit(following).status is EndTxnStatus.DONE


# ---- describe and list ---------------------------------------------------------------------------------------------


def test_describe_without_permission_names_the_grant(bench: CoordinatorBench) -> None:
    bench.open("a", "b")
    bench.cluster.on(ApiKey.DESCRIBE_TRANSACTIONS, faults.fail_with(TransactionalIdAuthorizationError), node_id=1)
    with pytest.raises(TransactionalIdAuthorizationError, match=r"'b'.*grant DESCRIBE"):
        bench.coordinator.transactions.describe_transactions(["a", "b"], bench.timer())


def test_state_that_is_new_to_us_is_unknown(bench: CoordinatorBench) -> None:
    bench.open("id")

    def rename(values: dict[str, Any]) -> dict[str, Any]:
        states = [state | {"transaction_state": "Dreaming"} for state in values["transaction_states"]]
        return values | {"transaction_states": states}

    bench.cluster.on(ApiKey.DESCRIBE_TRANSACTIONS, faults.change(rename))
    found = bench.coordinator.transactions.describe_transactions(["id"], bench.timer())["id"]
    assert found is not None
    assert found.state is TransactionState.UNKNOWN


def test_state_before_the_begin_is_not_believed_after_it(bench: CoordinatorBench) -> None:
    (open_,) = bench.open("id")

    def before(values: dict[str, Any]) -> dict[str, Any]:
        return values | {
            "transaction_states": [each | {"transaction_state": "Empty"} for each in values["transaction_states"]]
        }

    for have_begun, state in ((False, TransactionState.EMPTY), (True, TransactionState.ONGOING)):
        bench.cluster.on(ApiKey.DESCRIBE_TRANSACTIONS, faults.change(before))
        given = {"id": open_.producer}
        found = bench.coordinator.transactions.describe_transactions(
            ["id"], bench.timer(), given, have_begun=have_begun
        )
        assert found["id"] is not None
        assert found["id"].state is state


def test_older_epoch_of_a_node_that_was_frozen_is_not_believed(bench: CoordinatorBench) -> None:
    """Bug: it coordinated the id no longer, and answered from its memory. A task then blamed another driver."""
    (open_,) = bench.open("id")

    def older(values: dict[str, Any]) -> dict[str, Any]:
        states = [state | {"producer_epoch": open_.producer_epoch - 1} for state in values["transaction_states"]]
        return values | {"transaction_states": states}

    bench.cluster.on(ApiKey.DESCRIBE_TRANSACTIONS, faults.change(older), times=2)
    describe = bench.coordinator.transactions.describe_transactions
    found = describe(["id"], bench.timer())["id"]
    assert found is not None
    assert found.producer_epoch == open_.producer_epoch - 1, "nobody has said what was given out"
    found = describe(["id"], bench.timer(), {"id": open_.producer})["id"]
    assert found is not None
    assert found.producer == open_.producer
    bench.cluster.on(ApiKey.DESCRIBE_TRANSACTIONS, faults.change(older), times=None)
    with pytest.raises(KafkaTimeoutError, match=r"'id'.*Its state is older than what was done in epoch 0"):
        describe(["id"], bench.timer(2_000), {"id": open_.producer})


def test_contradictory_description_is_requested_again(bench: CoordinatorBench) -> None:
    """Bug: the last state of an id counted, so a transaction that was open could be taken as ended."""
    bench.open("id")

    def contradict(values: dict[str, Any]) -> dict[str, Any]:
        (state,) = values["transaction_states"]
        return values | {"transaction_states": [state, state | {"transaction_state": "Empty"}]}

    bench.cluster.on(ApiKey.DESCRIBE_TRANSACTIONS, faults.change(contradict))
    found = bench.coordinator.transactions.describe_transactions(["id"], bench.timer())["id"]
    assert found is not None
    assert found.state is TransactionState.ONGOING
    assert len(bench.asked(ApiKey.DESCRIBE_TRANSACTIONS)) == 2


def listed(bench: CoordinatorBench, timeout_ms: int = 60_000, **filters: Any) -> list[tuple[str, int]]:
    found = bench.coordinator.transactions.list_transactions(bench.timer(timeout_ms), **filters)
    return [(each.transactional_id, each.coordinator.id) for each in found]


def test_listing_joins_the_answers_of_all_brokers(bench: CoordinatorBench) -> None:
    bench.open("c", "b", "a", "d")
    assert listed(bench) == [("a", 2), ("b", 1), ("c", 0), ("d", 0)]
    assert sorted(exchange.node_id for exchange in bench.asked(ApiKey.LIST_TRANSACTIONS)) == [0, 1, 2]


@pytest.mark.parametrize("error_code", [ErrorCode.coordinator_load_in_progress, ErrorCode.coordinator_not_available])
def test_only_the_broker_that_is_loading_is_asked_again(bench: CoordinatorBench, error_code: int) -> None:
    bench.open("a", "b", "c")
    bench.cluster.on(ApiKey.LIST_TRANSACTIONS, faults.fail_with(error_code), node_id=1)
    assert len(listed(bench)) == 3
    assert sorted(exchange.node_id for exchange in bench.asked(ApiKey.LIST_TRANSACTIONS)) == [0, 1, 1, 2]


def test_listing_skips_a_dead_broker_and_finds_its_transactions_elsewhere(bench: CoordinatorBench) -> None:
    """The other brokers, which answered before, report it."""

    def notice() -> None:
        bench.cluster.live_node_ids.discard(1)
        bench.cluster.coordinators["b"] = 2

    bench.open("a", "b", "c")
    bench.rig.network.stop(1)
    bench.cluster.live_node_ids.add(1)  # the cluster has not noticed yet
    bench.rig.selector.at(bench.rig.now_ms + 9_000, notice)
    started_ms = bench.rig.now_ms
    assert listed(bench) == [("a", 0), ("b", 2), ("c", 2)]
    assert 9_000 <= bench.rig.now_ms - started_ms <= 13_000


@pytest.mark.parametrize("delay_ms", [2_500, 8_000])
def test_broker_that_answers_slowly_is_waited_for(bench: CoordinatorBench, delay_ms: int) -> None:
    bench.open("a", "b", "c")
    bench.cluster.on(ApiKey.LIST_TRANSACTIONS, faults.delay(delay_ms), node_id=1, times=None)
    assert listed(bench) == [("a", 0), ("b", 1), ("c", 2)]


def test_listing_asks_for_brokers_without_their_topics(bench: CoordinatorBench) -> None:
    bench.open("a")
    before = len(bench.asked(ApiKey.METADATA))
    assert listed(bench) == [("a", 0)]
    (asked,) = bench.asked(ApiKey.METADATA)[before:]
    assert asked.request.topics == ()


def test_listing_asks_a_broker_that_has_joined_since_the_last_metadata(bench: CoordinatorBench) -> None:
    bench.cluster.live_node_ids.discard(2)
    assert bench.coordinator.creation.count(PLACE.topic, bench.timer())
    bench.cluster.live_node_ids.add(2)
    bench.open("a", "b", "c")
    assert listed(bench) == [("a", 0), ("b", 1), ("c", 2)]


@pytest.mark.parametrize(
    ("fault", "limit_ms"),
    [
        (faults.delay(2_400), 2_500),
        (faults.fail_with(ErrorCode.rebootstrap_required), 100),
        (faults.change(lambda body: {**body, "brokers": ()}), 100),
    ],
    ids=["slow", "refuses", "names none"],
)
def test_if_one_broker_does_not_name_the_others_metadata_is_updated(
    bench: CoordinatorBench, fault: faults.Hook, limit_ms: int
) -> None:
    bench.open("a", "b", "c")
    assert listed(bench) == [("a", 0), ("b", 1), ("c", 2)]
    before, started_ms = len(bench.asked(ApiKey.METADATA)), bench.rig.now_ms
    bench.cluster.on(ApiKey.METADATA, fault)
    assert listed(bench) == [("a", 0), ("b", 1), ("c", 2)]
    assert bench.rig.now_ms - started_ms <= limit_ms
    topics = [exchange.request.topics for exchange in bench.asked(ApiKey.METADATA)[before:]]
    assert topics[0] == ()
    assert topics[1] != ()


def test_listing_without_one_broker_raises_its_name(bench: CoordinatorBench) -> None:
    bench.cluster.on(ApiKey.LIST_TRANSACTIONS, faults.lose_response(), node_id=1, times=None)
    started_ms = bench.rig.now_ms
    with pytest.raises(KafkaTimeoutError, match=r"ListTransactions of node broker-1"):
        listed(bench, 5_000)
    assert 5_000 <= bench.rig.now_ms - started_ms <= 5_500


def test_without_any_broker_the_list_ends_at_its_limit(bench: CoordinatorBench) -> None:
    bench.rig.network.refusing.update({0, 1, 2})
    with pytest.raises(KafkaTimeoutError, match=r"2000 ms.*Connection refused"):
        listed(bench, 2_000)


def test_listing_after_rebootstrap_asks_all_brokers(bench: CoordinatorBench) -> None:
    """Not the bootstrap addresses, which may all be one broker."""
    bench.open("a", "b", "c")
    bench.cluster.on(ApiKey.METADATA, faults.delay(50))
    bench.rig.selector.at(bench.rig.now_ms + 10, bench.rig.metadata.rebootstrap)
    assert listed(bench) == [("a", 0), ("b", 1), ("c", 2)]


def test_filter_on_a_too_old_broker_is_refused(bench: CoordinatorBench) -> None:
    bench.cluster.versions = KAFKA_3_0
    assert listed(bench, states=[TransactionState.ONGOING]) == []
    with pytest.raises(UnsupportedVersionError, match="duration_filter"):
        listed(bench, longer_than_ms=5)


def test_state_that_a_broker_does_not_know_is_refused(bench: CoordinatorBench) -> None:
    with pytest.raises(UnsupportedVersionError, match=r"broker-\d.*Unknown"):
        listed(bench, states=[TransactionState.UNKNOWN])


def test_listing_before_kafka_3_0_names_release_and_node_once(bench: CoordinatorBench) -> None:
    bench.cluster.versions = {
        key: value for key, value in bench.cluster.versions.items() if key != ApiKey.LIST_TRANSACTIONS
    }
    with pytest.raises(UnsupportedVersionError) as refused:
        bench.coordinator.transactions.list_transactions(bench.timer())
    text = str(refused.value)
    assert "exactly-once needs Kafka 3.0 or newer. The node does not support LIST_TRANSACTIONS" in text
    assert text.count("broker-") == 1
    assert "Node " not in text
