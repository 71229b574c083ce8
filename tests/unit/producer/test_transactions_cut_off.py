"""Coordinators: those that are known, and a broker that was one before it was cut off from its controllers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.cut_off import cut_off, names
from support.scripted_broker.exchange import Answer, Exchange
from support.transaction_harness import GROUP, ID, PLACE, TransactionHarness
from support.transaction_steps import OFFSETS

from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import (
    ConcurrentTransactionsError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    KafkaTimeoutError,
    ProducerFencedError,
)
from spark_kafka_sink.producer.transaction_requests import Coordinators
from spark_kafka_sink.producer.transactions import PreparedTransaction
from spark_kafka_sink.protocol.metadata import GROUP as GROUP_TYPE
from spark_kafka_sink.protocol.metadata import TRANSACTION
from spark_kafka_sink.protocol.versions import ApiKey

KEY = (TRANSACTION, ID)
NODES = [Node(number, f"host-{number}", 9092) for number in range(3)]
BEFORE, NOW = 1, 2
"""The coordinator that is cut off, and the one that was elected after that."""


# ---- what is known ---------------------------------------------------------------------------------------------------


def test_every_broker_is_asked_once() -> None:
    brokers = NODES[:2]
    known = Coordinators(lambda: brokers)
    known.use({KEY: NODES[0]})
    for _ in range(2):
        broker = known.broker_to_ask(KEY)
        assert broker is not None
        known.confirm(KEY, broker)
    assert known.broker_to_ask(KEY) is None
    brokers = NODES
    assert known.broker_to_ask(KEY) == NODES[2]


def test_a_forgotten_coordinator_must_be_confirmed_again() -> None:
    known = Coordinators(lambda: NODES[:1])
    known.use({KEY: NODES[0], (GROUP_TYPE, ID): NODES[0]})
    known.confirm(KEY, NODES[0])
    known.forget(KEY)
    assert (known.get(KEY), known.get((GROUP_TYPE, ID))) == (None, NODES[0])
    known.use({KEY: NODES[0]})
    assert known.broker_to_ask(KEY) == NODES[0]


# ---- transaction.version 1 and a coordinator that is cut off ---------------------------------------------------------


def with_two_transactions(committed: bool, **settings: Any) -> TransactionHarness:
    """The first one has ended at node BEFORE, which is then cut off. The second one is open at node NOW."""
    harness = TransactionHarness(1, settings, node_count=3)
    for partition in harness.cluster.topics[PLACE.topic].partitions:
        partition.leader_id = 0
    harness.cluster.coordinators.update({ID: BEFORE, GROUP: 0})
    harness.producer.init_transactions()
    harness.producer.begin_transaction()
    harness.send(b"first", partition=0)
    (harness.producer.commit_transaction if committed else harness.producer.abort_transaction)()
    harness.cluster.coordinators[ID] = NOW
    cut_off(harness.cluster, ID, BEFORE)
    harness.network.cut(BEFORE)
    harness.producer.begin_transaction()
    harness.send(b"second", partition=0)
    harness.settle()
    assert harness.coordinated.state == "Ongoing"
    return harness


def lose_the_end(harness: TransactionHarness) -> None:
    """The right coordinator cuts the connection, and the next lookup names the other one."""
    harness.cluster.on(ApiKey.END_TXN, faults.close_before(), node_id=NOW)
    harness.cluster.scripts.insert(0, harness.cluster.on(ApiKey.FIND_COORDINATOR, names(ID, BEFORE)))


def resumed(harness: TransactionHarness) -> tuple[TransactionHarness, PreparedTransaction]:
    prepared = harness.producer.prepare_transaction()
    driver = TransactionHarness(1, beside=harness)
    driver.producer.resume_transaction(prepared)
    driver.cluster.scripts.insert(0, driver.cluster.on(ApiKey.FIND_COORDINATOR, names(ID, BEFORE)))
    return driver, prepared


def test_a_commit_goes_only_where_its_records_were_added() -> None:
    """Bug: the broker that was cut off answered with success. The rows were lost without an error."""
    harness = with_two_transactions(committed=True)
    lose_the_end(harness)
    harness.producer.commit_transaction()
    assert harness.committed() == [b"first", b"second"]
    assert [each.node_id for each in harness.cluster.requests_of(ApiKey.END_TXN)] == [BEFORE, NOW, NOW]


def test_a_commit_goes_only_where_its_offsets_were_added() -> None:
    harness = with_two_transactions(committed=True)
    harness.producer.abort_transaction()
    harness.producer.begin_transaction()
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    lose_the_end(harness)
    harness.producer.commit_transaction()
    assert harness.offsets()


def test_parts_are_added_again_at_a_coordinator_that_has_moved() -> None:
    harness = with_two_transactions(committed=True)
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.cluster.scripts.clear()
    harness.cluster.coordinators[ID] = 0
    harness.cluster.requests.clear()
    harness.producer.commit_transaction()
    assert harness.committed() == [b"first", b"second"]
    assert harness.offsets()
    asked = {each.api_key: each.node_id for each in harness.cluster.requests if each.api_key in range(24, 27)}
    assert asked == {ApiKey.ADD_PARTITIONS_TO_TXN: 0, ApiKey.ADD_OFFSETS_TO_TXN: 0, ApiKey.END_TXN: 0}


def test_a_commit_that_has_taken_effect_is_not_lost_when_its_coordinator_moves() -> None:
    harness = with_two_transactions(committed=True)
    harness.cluster.scripts.clear()

    def then_move(cluster: ScriptedCluster, exchange: Exchange, proceed: Callable[[], Answer]) -> Answer:
        answer = faults.close_after()(cluster, exchange, proceed)
        cluster.coordinators[ID] = 0
        return answer

    harness.cluster.on(ApiKey.END_TXN, then_move)
    harness.producer.commit_transaction()
    harness.commit(b"third")
    assert harness.committed() == [b"first", b"second", b"third"]
    assert harness.coordinated.state == "CompleteCommit"


def test_a_prepared_transaction_that_another_aborted_is_not_begun_again_by_its_commit() -> None:
    """Bug: after a move of the coordinator the parts were added again, and the commit of nothing was a success."""
    harness = with_two_transactions(committed=True)
    harness.cluster.scripts.clear()
    prepared = harness.producer.prepare_transaction()
    other = TransactionHarness(1, beside=harness)
    other.producer.resume_transaction(prepared)
    other.producer.abort_transaction()
    harness.clock.advance_to(other.now_ms)
    harness.cluster.coordinators[ID] = 0
    with pytest.raises(InvalidTxnStateError):
        harness.producer.commit_transaction()
    assert harness.committed() == [b"first"]


def test_aborted_rows_are_not_in_the_next_transaction() -> None:
    """Bug: the broker that was cut off answered the abort with success, and the next commit had these rows too."""
    harness = with_two_transactions(committed=False)
    lose_the_end(harness)
    harness.producer.abort_transaction()
    harness.commit(b"third")
    assert harness.committed() == [b"third"]


def test_an_abort_does_not_need_a_topic_that_is_gone() -> None:
    harness = with_two_transactions(committed=True)
    harness.cluster.scripts.clear()
    harness.cluster.coordinators[ID] = 0
    harness.cluster.delete_topic(PLACE.topic)
    harness.producer.abort_transaction()
    assert harness.coordinated.state in {"CompleteAbort", "Empty"}


def test_offsets_that_are_refused_where_brokers_disagree_are_sent_again() -> None:
    """Bug: a group's coordinator that is cut off knew an older epoch of the transaction. The producer called itself
    fenced, and the query ended, although no other one had taken over.
    """
    harness = TransactionHarness(1, {"max.block.ms": "30000"}, node_count=3).started()
    harness.cluster.coordinators[GROUP] = NOW
    harness.cluster.on(ApiKey.FIND_COORDINATOR, names(GROUP, BEFORE))
    harness.cluster.on(ApiKey.FIND_COORDINATOR, names(GROUP, BEFORE), times=None, node_id=BEFORE)
    refuse = faults.fail_with(InvalidProducerEpochError)
    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, refuse, times=None, node_id=BEFORE)
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.commit_transaction()
    assert harness.offsets()
    asked = [each.node_id for each in harness.cluster.requests_of(ApiKey.TXN_OFFSET_COMMIT)]
    assert (asked[0], asked[-1]) == (BEFORE, NOW)


@pytest.mark.parametrize("version", [1, 2])
def test_offsets_of_a_fenced_producer_are_refused_once_more_and_fail(version: int) -> None:
    harness = TransactionHarness(version, node_count=3).started()
    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, faults.fail_with(InvalidProducerEpochError), times=None)
    with pytest.raises(ProducerFencedError, match="A newer producer with the same transactional id has taken over"):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    assert len(harness.cluster.requests_of(ApiKey.TXN_OFFSET_COMMIT)) == 2


def test_a_coordinator_that_refuses_for_long_is_looked_up_again() -> None:
    """Bug: a group's coordinator that was cut off refused the offsets for as long as it was asked."""
    harness = TransactionHarness(2, node_count=3).started()
    harness.cluster.coordinators[GROUP] = NOW
    harness.cluster.on(ApiKey.FIND_COORDINATOR, names(GROUP, BEFORE))
    refuse = faults.fail_with(ConcurrentTransactionsError)
    harness.cluster.on(ApiKey.TXN_OFFSET_COMMIT, refuse, times=None, node_id=BEFORE)
    harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    harness.producer.commit_transaction()
    assert harness.offsets()


@pytest.mark.parametrize("committed", [True, False])
def test_a_resumed_transaction_ends_only_where_all_brokers_say(committed: bool) -> None:
    """Bug: the broker that was cut off answered with success. The rows were lost without an error."""
    driver, _ = resumed(with_two_transactions(committed))
    end = driver.producer.commit_transaction if committed else driver.producer.abort_transaction
    with pytest.raises(KafkaTimeoutError, match=r"Broker \d names node \d as the coordinator, another one named"):
        end()
    assert driver.coordinated.state == "Ongoing"
    driver.cluster.scripts.clear()
    end()
    assert driver.committed() == ([b"first", b"second"] if committed else [])
    assert driver.coordinated.state == ("CompleteCommit" if committed else "CompleteAbort")


def test_a_resumed_transaction_waits_for_a_broker_until_metadata_leaves_it_out() -> None:
    harness = with_two_transactions(committed=True)
    driver, _ = resumed(harness)
    driver.cluster.scripts.clear()
    driver.network.refusing.add(BEFORE)
    result = driver.manager.begin_commit()
    driver.run_for(2_000)
    assert not result.is_done  # it may be alive for others
    driver.network.stop(BEFORE)
    driver.producer.commit_transaction()
    assert driver.committed() == [b"first", b"second"]
