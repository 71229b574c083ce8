"""The answers of a cluster to the driver of an exactly-once write, case by case, for transaction versions 1 and 2.

The same cases run against real brokers and against the scripted one. So tests with the scripted one are valid for the
real ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pytest
from support.raw_transactions import LIMIT_MS, TIMEOUT_MS, RawTransactions

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.group_offsets import CommittedOffset
from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.admin.transaction_values import (
    EndTxnOutcome,
    EndTxnStatus,
    OpenRecords,
    TransactionDescription,
    TransactionState,
)
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    InvalidProducerEpochError,
    InvalidTransactionTimeoutError,
    KafkaTimeoutError,
    ProducerFencedError,
    UnknownTopicOrPartitionError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.protocol.fetch import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED, READ_UNCOMMITTED

OFFSETS_TOPIC: Final = "__consumer_offsets"
SHORT_TIMEOUT_MS: Final = 400


@dataclass
class Stage:
    """`driver` has never produced; `task` has its own connections. `place` is a partition of a new topic."""

    driver: ClusterClient
    task: RawTransactions
    place: TopicPartition
    pass_time: Callable[[int], None]
    id: str = field(default_factory=lambda: f"txn-{uuid.uuid4().hex[:8]}")

    @property
    def version(self) -> int:
        return self.task.version

    def timer(self, timeout_ms: int = LIMIT_MS) -> Timer:
        return self.driver.timer(timeout_ms)

    def written(self, *values: str, timeout_ms: int = TIMEOUT_MS) -> OpenTransaction:
        """Leave a transaction open with these values in it."""
        open_ = self.task.begin(self.id, timeout_ms)
        self.task.write(open_, self.place, *(values or ("value",)))
        return open_

    def end(self, transaction: OpenTransaction, *, committed: bool) -> EndTxnOutcome:
        (outcome,) = self.driver.transactions.end_txns([transaction], self.timer(), committed=committed)
        assert outcome.transaction == transaction
        return outcome

    def status(self, transaction: OpenTransaction, *, committed: bool) -> EndTxnStatus:
        return self.end(transaction, committed=committed).status

    def describe(self) -> TransactionDescription:
        found = self.driver.transactions.describe_transactions([self.id], self.timer())[self.id]
        assert found is not None
        return found

    def settled(self) -> TransactionDescription:
        """Return the description when the markers are written."""
        timer = self.timer()
        while (found := self.describe()).state.value.startswith("Prepare"):
            assert not timer.is_expired
            self.pass_time(20)
            timer.update()
        return found

    def values(self, isolation_level: int = READ_COMMITTED) -> list[str]:
        """Return all values of the place, which is new."""
        records = self.driver.topics.read_from(self.place, 0, self.timer(), isolation_level)
        return [(record.value or b"").decode() for record in records]


Case = Callable[[Stage], None]
CASES: list[Case] = []


def case(run: Case) -> Case:
    CASES.append(run)
    return run


@case
def a_client_without_records_commits_the_transaction_of_another(stage: Stage) -> None:
    open_ = stage.written("a", "b")
    assert stage.values() == []
    outcome = stage.end(open_, committed=True)
    next_epoch = open_.producer_epoch + (1 if stage.version == 2 else 0)
    assert outcome == EndTxnOutcome(open_, EndTxnStatus.DONE, ProducerIdAndEpoch(open_.producer_id, next_epoch))
    assert stage.settled().state is TransactionState.COMPLETE_COMMIT
    assert stage.values() == ["a", "b"]


@case
def the_same_commit_again_gets_the_same_answer(stage: Stage) -> None:
    open_ = stage.written()
    assert stage.end(open_, committed=True) == stage.end(open_, committed=True)
    stage.settled()
    again = stage.end(open_, committed=True)
    assert again == stage.end(open_, committed=True)
    assert again.status is EndTxnStatus.DONE
    assert stage.values() == ["value"]


@case
def an_abort_after_the_commit_is_an_invalid_state(stage: Stage) -> None:
    open_ = stage.written()
    assert stage.status(open_, committed=True) is EndTxnStatus.DONE
    stage.settled()
    outcome = stage.end(open_, committed=False)
    assert outcome.status is EndTxnStatus.INVALID_TXN_STATE
    assert stage.id in str(outcome.error)
    assert stage.values() == ["value"]


@case
def a_commit_after_the_abort_is_an_invalid_state(stage: Stage) -> None:
    open_ = stage.written()
    assert stage.status(open_, committed=False) is EndTxnStatus.DONE
    assert stage.settled().state is TransactionState.COMPLETE_ABORT
    assert stage.status(open_, committed=True) is EndTxnStatus.INVALID_TXN_STATE
    assert stage.status(open_, committed=False) is EndTxnStatus.DONE
    assert stage.values() == []
    assert stage.values(READ_UNCOMMITTED) == ["value"]


@case
def open_records_have_the_epoch_of_their_transaction(stage: Stage) -> None:
    stage.end(stage.written("earlier"), committed=True)
    stage.settled()
    open_ = stage.written("a", "b")
    found = stage.driver.topics.open_transactions([stage.place], stage.timer())
    (records,) = found[stage.place].values()
    assert list(found[stage.place]) == [open_.producer_id]
    assert records == OpenRecords(2, open_.producer_epoch)  # after the record and its marker
    stage.end(open_, committed=False)


@case
def a_transaction_without_records_that_times_out_takes_one_more_epoch(stage: Stage) -> None:
    """It was begun after a commit, by a driver, for an end marker."""
    open_ = stage.written(timeout_ms=SHORT_TIMEOUT_MS)
    ended = stage.end(open_, committed=True)
    stage.settled()
    stage.driver.writer.add_partitions({open_.with_producer(ended.producer): [stage.place]}, stage.timer())
    assert stage.describe().topic_partitions == {stage.place}
    timer = stage.timer()
    while (found := stage.settled()).state is TransactionState.ONGOING:
        assert not timer.is_expired
        stage.pass_time(20)
        timer.update()
    assert found.state is TransactionState.COMPLETE_ABORT
    assert found.producer == ProducerIdAndEpoch(open_.producer_id, ended.producer.epoch + 1)


@case
def the_epoch_that_a_commit_returns_serves_the_next_transaction(stage: Stage) -> None:
    open_ = stage.written("first")
    ended = stage.end(open_, committed=True)
    stage.settled()
    following = open_.with_producer(ended.producer)
    stage.task.write(following, stage.place, "second")
    assert stage.status(following, committed=True) is EndTxnStatus.DONE
    stage.settled()
    assert stage.values() == ["first", "second"]


@case
def a_newer_producer_fences_the_commit_and_aborts_what_was_open(stage: Stage) -> None:
    open_ = stage.written()
    newer = stage.task.begin(stage.id)
    assert newer.producer_epoch > open_.producer_epoch
    outcome = stage.end(open_, committed=True)
    assert outcome.status is EndTxnStatus.PRODUCER_FENCED
    assert isinstance(outcome.error, ProducerFencedError)
    with pytest.raises((ProducerFencedError, InvalidProducerEpochError)):
        stage.task.write(open_, stage.place, "late")
    assert stage.values() == []


@case
def a_commit_of_nothing_is_an_invalid_state(stage: Stage) -> None:
    empty = stage.task.begin(stage.id)
    assert stage.describe() == TransactionDescription(
        stage.id,
        TransactionState.EMPTY,
        empty.producer_id,
        empty.producer_epoch,
        TIMEOUT_MS,
        None,
        frozenset(),
    )
    assert stage.status(empty, committed=True) is EndTxnStatus.INVALID_TXN_STATE


@case
def an_abort_of_nothing_succeeds_only_under_version_2(stage: Stage) -> None:
    empty = stage.task.begin(stage.id)
    expected = EndTxnStatus.DONE if stage.version == 2 else EndTxnStatus.INVALID_TXN_STATE
    assert stage.status(empty, committed=False) is expected


@case
def a_commit_after_the_timeout_never_succeeds(stage: Stage) -> None:
    open_ = stage.written(timeout_ms=SHORT_TIMEOUT_MS)
    timer = stage.timer()
    while stage.describe().state is not TransactionState.COMPLETE_ABORT:
        assert not timer.is_expired
        stage.pass_time(100)
        timer.update()
    assert stage.describe().producer_epoch == open_.producer_epoch + 1
    expected = EndTxnStatus.INVALID_TXN_STATE if stage.version == 2 else EndTxnStatus.PRODUCER_FENCED
    assert stage.status(open_, committed=True) is expected
    assert stage.values() == []


@case
def another_producer_id_or_an_unknown_transactional_id_is_distinguished(stage: Stage) -> None:
    open_ = stage.written()
    outcomes = stage.driver.transactions.end_txns(
        [
            open_._replace(producer_id=open_.producer_id + 1),
            open_._replace(transactional_id=f"{stage.id}-unheard-of"),
            open_,
        ],
        stage.timer(),
        committed=False,
    )
    assert [outcome.status for outcome in outcomes] == [
        EndTxnStatus.INVALID_PID_MAPPING,
        EndTxnStatus.INVALID_PID_MAPPING,
        EndTxnStatus.DONE,
    ]


@case
def a_commit_retried_in_the_other_transaction_version_is_fenced(stage: Stage) -> None:
    if stage.version < 2:
        return  # version 5 may not be sent to a cluster whose transaction version is 1
    open_ = stage.written()
    assert stage.status(open_, committed=True) is EndTxnStatus.DONE
    stage.settled()
    following = open_._replace(producer_epoch=open_.producer_epoch + 1)
    stage.task.write(following, stage.place, "of the next")
    assert stage.status(open_._replace(transaction_version=1), committed=True) is EndTxnStatus.PRODUCER_FENCED
    assert stage.status(following, committed=False) is EndTxnStatus.DONE


@case
def a_marker_is_unstable_while_the_transaction_is_open_and_there_after_the_commit(stage: Stage) -> None:
    open_ = stage.written("row")
    group = f"{stage.id}/0"
    requested = {group: [stage.place, TopicPartition(stage.place.topic, 1)], f"{stage.id}/never": [stage.place]}
    stage.task.mark(open_, group, stage.place, 8, "rows=10")
    timer = stage.timer(300)
    with pytest.raises(KafkaTimeoutError, match=rf"'{group}'.*{stage.place}.*not ended"):
        stage.driver.groups.fetch_offsets(requested, timer)
    assert any(place.topic == OFFSETS_TOPIC for place in stage.describe().topic_partitions)
    assert stage.status(open_, committed=True) is EndTxnStatus.DONE
    found = stage.driver.groups.fetch_offsets(requested, stage.timer())
    assert found == {
        group: {stage.place: CommittedOffset(8, "rows=10"), requested[group][1]: None},
        f"{stage.id}/never": {stage.place: None},
    }


@case
def a_marker_of_an_aborted_transaction_is_not_there(stage: Stage) -> None:
    open_ = stage.task.begin(stage.id)
    stage.task.mark(open_, stage.id, stage.place, 8, "rows=10")
    assert stage.status(open_, committed=False) is EndTxnStatus.DONE
    found = stage.driver.groups.fetch_offsets({stage.id: [stage.place]}, stage.timer())
    assert found == {stage.id: {stage.place: None}}


@case
def a_marker_needs_a_topic_that_is_there(stage: Stage) -> None:
    open_ = stage.task.begin(stage.id)
    with pytest.raises(UnknownTopicOrPartitionError):
        stage.task.mark(open_, stage.id, TopicPartition("no-such-topic", 0), 8, "")


@case
def a_transaction_is_described_from_elsewhere_while_open_and_after(stage: Stage) -> None:
    open_ = stage.written()
    found = stage.describe()
    assert found.state is TransactionState.ONGOING
    assert (found.producer, found.timeout_ms) == (open_.producer, TIMEOUT_MS)
    assert found.start_time_ms is not None
    assert found.topic_partitions == {stage.place}
    stage.end(open_, committed=True)
    after = stage.settled()
    assert after.state is TransactionState.COMPLETE_COMMIT
    assert after.producer_epoch == open_.producer_epoch + (1 if stage.version == 2 else 0)
    assert after.topic_partitions == frozenset()
    unknown = f"{stage.id}-unheard-of"
    described = stage.driver.transactions.describe_transactions([unknown, stage.id], stage.timer())
    assert described == {unknown: None, stage.id: after}


@case
def transactions_are_listed_by_state_producer_and_age(stage: Stage) -> None:
    open_ = stage.written()
    other = RawTransactions(stage.task.coordinator, stage.version).begin(f"{stage.id}-idle")
    mine = {stage.id, other.transactional_id}

    def listed(**filters: object) -> set[str]:
        found = stage.driver.transactions.list_transactions(stage.timer(), **filters)  # type: ignore[arg-type]
        return {each.transactional_id for each in found} & mine

    assert listed() == mine
    assert listed(states=[TransactionState.ONGOING]) == {stage.id}
    assert listed(producer_ids=[other.producer_id]) == {other.transactional_id}
    assert listed(states=[TransactionState.ONGOING], longer_than_ms=3_600_000) == set()
    stage.pass_time(30)
    assert listed(states=[TransactionState.ONGOING], longer_than_ms=10) == {stage.id}
    (found,) = stage.driver.transactions.list_transactions(stage.timer(), producer_ids=[open_.producer_id])
    assert found[:3] == (stage.id, TransactionState.ONGOING, open_.producer_id)
    stage.end(open_, committed=False)


@case
def a_held_epoch_is_continued_only_if_it_is_the_last_one(stage: Stage) -> None:
    first = stage.task.begin(stage.id)
    held = first.producer
    transactions = stage.driver.transactions
    continued = transactions.init_producer_id(stage.id, TIMEOUT_MS, stage.timer(), held)
    assert continued == (first.producer_id, first.producer_epoch + 1)
    assert transactions.init_producer_id(stage.id, TIMEOUT_MS, stage.timer(), held) == continued
    stage.task.begin(stage.id)
    with pytest.raises(ProducerFencedError, match=stage.id):
        transactions.init_producer_id(stage.id, TIMEOUT_MS, stage.timer(), continued)


@case
def a_timeout_beyond_the_brokers_maximum_is_refused_with_what_to_change(stage: Stage) -> None:
    with pytest.raises(InvalidTransactionTimeoutError, match=rf"{stage.id}.*transaction\.max\.timeout\.ms"):
        stage.task.begin(stage.id, timeout_ms=16 * 60_000)


@case
def readers_of_the_tail_see_no_open_and_no_aborted_transaction(stage: Stage) -> None:
    topics, timer = stage.driver.topics, stage.timer()
    for number in range(6):
        open_ = stage.written(f"kept {number}")
        stage.end(open_, committed=True)
    for number in range(4):
        open_ = stage.written(f"dropped {number}", f"dropped {number} too")
        stage.end(open_, committed=False)
    stage.settled()
    end = topics.list_offsets([stage.place], LATEST_TIMESTAMP, timer)[stage.place]
    last = stage.written("open")
    assert topics.list_offsets([stage.place], LATEST_TIMESTAMP, timer) == {stage.place: end + 1}
    assert topics.list_offsets([stage.place], LATEST_TIMESTAMP, timer, READ_COMMITTED) == {stage.place: end}
    assert topics.list_offsets([stage.place], EARLIEST_TIMESTAMP, timer) == {stage.place: 0}
    kept = [f"kept {number}".encode() for number in range(6)]
    seen = topics.read_from(stage.place, 0, timer)
    assert [record.value for record in seen] == kept
    assert [record.value for record in topics.read_from(stage.place, seen[3].offset, timer)] == kept[-3:]
    assert topics.read_from(stage.place, 0, timer, READ_UNCOMMITTED)[-1].value == b"open"
    assert stage.status(last, committed=True) is EndTxnStatus.DONE
    stage.settled()
    assert topics.read_from(stage.place, 0, timer)[-1].value == b"open"
