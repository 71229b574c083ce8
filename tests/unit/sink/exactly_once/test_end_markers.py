"""End markers that a coordinator leaves out (KAFKA-20734), on scripted nodes. Crashes: test_model.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import PLACE, CoordinatorBench
from support.driver_steps import CONFIG, driver_of, task_outcome
from support.scripted_broker import faults
from support.scripted_broker.cluster import NO_LEADER

from spark_kafka_sink.admin.transaction_values import PartitionEnds
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    KafkaTimeoutError,
    ProducerFencedError,
    TopicAuthorizationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.end_markers import EndMarkers
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchStart,
    TaskOutcome,
    TaskTransaction,
    TransactionLostError,
)
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest) -> CoordinatorBench:
    made = CoordinatorBench(version=request.param)
    made.cluster.transactions.leaves_out_markers = True
    return made


@pytest.fixture(autouse=True)
def _each_warning_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_warned", set())


@contextmanager
def without_leader(bench: CoordinatorBench) -> Iterator[None]:
    bench.cluster.move_leader("t", 0, NO_LEADER)
    yield
    bench.cluster.move_leader("t", 0, 0)


def ended_without_leader(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, *, stays_away: bool = False
) -> list[str]:
    """Let the topic have no leader while the task's transactions are committed for the first time. Return the ids."""
    real = KafkaDriverCluster.end
    done: list[str] = []

    def end(self: KafkaDriverCluster, transactions: Any, *, committed: bool) -> Any:
        names = [each.transactional_id for each in transactions if not each.transactional_id.endswith("/driver")]
        if not names or done or not committed:
            return real(self, transactions, committed=committed)
        done.extend(names)
        bench.cluster.move_leader("t", 0, NO_LEADER)
        try:
            return real(self, transactions, committed=committed)
        finally:
            if not stays_away:
                bench.cluster.move_leader("t", 0, 0)

    monkeypatch.setattr(KafkaDriverCluster, "end", end)
    return done


def reported(bench: CoordinatorBench, batch_start: BatchStart) -> TaskOutcome:
    """The outcome of a task of one row, with the row's offset."""
    first = bench.cluster.log("t", 0).next_offset
    return replace(task_outcome(bench, batch_start), offsets={PLACE.topic: [[PLACE.partition, first, first + 1, 1]]})


def refuses(error: Any) -> faults.Hook:
    return faults.fail_with(error)


def count_ends(bench: CoordinatorBench, name: str) -> int:
    return sum(each.request.transactional_id == name for each in bench.asked(ApiKey.END_TXN))


@pytest.mark.parametrize("may_read", [True, False], ids=["READ", "no READ"])
def test_committed_rows_can_be_read(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, may_read: bool
) -> None:
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    if not may_read:
        bench.cluster.on(ApiKey.DESCRIBE_PRODUCERS, refuses(TopicAuthorizationError), times=None)
    ended_without_leader(bench, monkeypatch)
    assert driver.commit([outcome]).decision is not None
    assert bench.values() == ["row"]
    assert ("end markers are missing in t-0" in caplog.text) is may_read
    assert ("Grant READ on topics" in caplog.text) is not may_read


def test_batch_without_faults_writes_no_marker_twice(bench: CoordinatorBench, caplog: pytest.LogCaptureFixture) -> None:
    driver = driver_of(bench, "P")
    driver.commit([reported(bench, driver.begin())])
    assert (bench.values(), count_ends(bench, "P/0"), caplog.text) == (["row"], 1, "")


def test_markers_that_come_late_are_waited_for(bench: CoordinatorBench) -> None:
    bench.cluster.transactions.marker_delay_ms = 300
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    driver.commit([outcome])
    assert (bench.values(), bench.state("P/0"), count_ends(bench, "P/0")) == (["row"], "CompleteCommit", 1)


def test_open_transaction_of_another_producer_is_not_waited_for(bench: CoordinatorBench) -> None:
    foreign = bench.raw.begin("other", timeout_ms=900_000)
    bench.raw.write(foreign, PLACE, "foreign")
    driver = driver_of(bench, "P")
    started_ms = bench.rig.now_ms
    driver.commit([reported(bench, driver.begin())])
    assert bench.rig.now_ms - started_ms < 1_000
    assert count_ends(bench, "P/0") == 1
    assert bench.state("other") == "Ongoing"
    bench.commit(foreign)
    assert bench.values() == ["foreign", "row"]


def test_partition_that_stays_without_a_leader_fails_the_decided_batch(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    ended_without_leader(bench, monkeypatch, stays_away=True)
    with pytest.raises(KafkaTimeoutError, match=r"Batch 4 of P is decided, and its commit did not end: .*t-0"):
        driver.commit([outcome])
    bench.cluster.move_leader("t", 0, 0)
    again = driver_of(bench, "P").begin()
    assert (again.last_batch_id, bench.values()) == (4, ["row"])


def test_partition_without_a_leader_is_not_decided(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    with without_leader(bench), pytest.raises(KafkaTimeoutError, match="t-0"):
        driver.commit([outcome])
    assert driver_of(bench, "P").begin().last_batch_id is None


def test_aborted_rows_are_not_committed_with_the_next_batch(bench: CoordinatorBench) -> None:
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    with without_leader(bench):
        driver.abort(outcome.batch_start, [outcome])
    outcome = reported(bench, driver.begin())
    with pytest.raises(IllegalStateError, match=r"earlier transaction of P/0, too. They are open in t-0 from offset 0"):
        driver.commit([outcome])
    driver.abort(outcome.batch_start, [outcome])
    driver.commit([reported(bench, driver.begin())])
    assert bench.values() == ["row"]


def created_again(bench: CoordinatorBench) -> None:
    bench.cluster.delete_topic(PLACE.topic)
    bench.cluster.create_topic(PLACE.topic)


def wrote_before(bench: CoordinatorBench) -> None:
    """Let the partition have rows of an earlier batch."""
    earlier = bench.raw.begin("earlier")
    bench.raw.write(earlier, PLACE, "1", "2", "3")
    bench.commit(earlier)


def of_second_task(bench: CoordinatorBench, batch_start: BatchStart) -> TaskOutcome:
    open_ = bench.raw.begin("P/1")
    first = bench.cluster.log("t", 0).next_offset
    bench.raw.write(open_, PLACE, "second")
    written = TaskTransaction(open_, 1, 1)
    offsets = {PLACE.topic: [[PLACE.partition, first, first + 1, 1]]}
    return TaskOutcome(batch_start, 4, "q", 1, 1, written, offsets=offsets)


def test_tasks_cannot_have_the_same_offset(bench: CoordinatorBench) -> None:
    """Bug: an empty topic was deleted and created again between two tasks. Their rows had the same offset, and the
    batch was committed with those of the second.
    """
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcomes = [reported(bench, batch_start)]
    created_again(bench)
    outcomes.append(of_second_task(bench, batch_start))
    with pytest.raises(IllegalStateError, match="not decided: t-0 has lost rows of the batch"):
        driver.commit(outcomes)
    driver.abort(batch_start, outcomes)
    assert bench.values() == []


def test_rows_that_went_in_the_middle_of_a_task_are_lost(bench: CoordinatorBench) -> None:
    """Bug: a topic was deleted and created again while a task wrote to it. The task's transaction is open in the new
    topic too, and the batch was committed with the rows there.
    """
    wrote_before(bench)
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcome = reported(bench, batch_start)
    assert outcome.written is not None
    end = bench.cluster.log("t", 0).next_offset
    created_again(bench)
    bench.raw.write(outcome.written.transaction, PLACE, "later")
    outcome = replace(outcome, offsets={PLACE.topic: [[PLACE.partition, 0, end, 2]]})
    with pytest.raises(IllegalStateError, match="not decided: t-0 has lost rows of P/0"):
        driver.commit([outcome])


def test_partition_that_its_coordinator_lost_is_not_committed(bench: CoordinatorBench) -> None:
    """Bug: __transaction_state was set back, and a task wrote in the epoch of an earlier attempt. The leader took the
    rows for those of that attempt, and these were committed.
    """
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcome = reported(bench, batch_start)
    bench.cluster.transactions.transactions["P/0"].partitions.discard(PLACE)
    with pytest.raises(IllegalStateError, match="coordinator of P/0 does not know that it has written into t-0"):
        driver.commit([outcome])
    assert driver.abort(batch_start, [outcome])


def test_rows_of_an_earlier_attempt_in_the_same_epoch_are_not_committed(bench: CoordinatorBench) -> None:
    """Bug: __transaction_state was set back, and a task got the epoch of an earlier attempt. That attempt had written
    into a partition that the batch wrote, too, by another task. Its rows were taken for rows of the batch without their
    end marker, and were committed.
    """
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcomes = [of_first_task_elsewhere(bench, batch_start)]
    assert outcomes[0].written is not None
    bench.raw.write(outcomes[0].written.transaction, PLACE, "earlier")
    bench.cluster.transactions.transactions["P/0"].partitions.discard(PLACE)
    outcomes.append(of_second_task(bench, batch_start))
    with pytest.raises(IllegalStateError, match="coordinator of P/0 does not know that it has written into t-0"):
        driver.commit(outcomes)
    assert driver.abort(batch_start, outcomes)
    batch_start = driver.begin()
    driver.commit([of_first_task_elsewhere(bench, batch_start), of_second_task(bench, batch_start)])
    assert bench.values() == ["second"]


def test_older_transaction_that_is_being_ended_is_named(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers wait for its end marker. If its coordinator has lost records, it may never write it."""
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    older = bench.raw.begin("P/0.1")
    bench.raw.write(older, PLACE, "older")
    held = bench.cluster.transactions.transactions["P/0.1"]
    held.state, held.markers_due_ms = "PrepareAbort", bench.rig.now_ms + 3_600_000
    driver.commit([reported(bench, batch_start)])
    assert "readers wait in t-0 until the coordinators of P/0.1 have written end markers" in caplog.text


def test_decision_that_is_taken_for_an_earlier_one_is_noticed() -> None:
    """Bug: the coordinator of a driver was set back, and gave it the epoch of the batch before. Under version 1 the
    leader took the decision for that batch's, and this batch was committed without a decision.
    """
    bench = CoordinatorBench(version=1)
    driver = driver_of(bench, "P")
    driver.begin()
    before = copy.deepcopy(bench.cluster.transactions.transactions["P/driver"])
    driver.commit([reported(bench, driver.begin())])
    bench.cluster.transactions.transactions["P/driver"] = before
    batch_start = driver.begin()
    outcome = reported(bench, batch_start)
    with pytest.raises(IllegalStateError, match=r"has taken its decision for the one at offset \d"):
        driver.commit([outcome])
    assert driver.abort(batch_start, [outcome])
    driver.commit([reported(bench, driver.begin())])
    assert len(bench.values()) == 2


@pytest.mark.parametrize(("before", "others"), [(0, 0), (0, 2), (1, 2)])
def test_topic_created_again_after_the_tasks_has_none_of_their_rows(
    bench: CoordinatorBench, before: int, others: int
) -> None:
    """Bug: a topic was deleted and created again after the tasks. The batch was committed without rows. Readers of the
    new topic are where the batch began if that was empty before, or behind it if others have written.
    """
    for _ in range(before):
        wrote_before(bench)
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcome = reported(bench, batch_start)
    created_again(bench)
    for _ in range(others):
        wrote_before(bench)
    with pytest.raises(IllegalStateError, match="not decided: t-0 has lost rows of P/0"):
        driver.commit([outcome])
    driver.abort(batch_start, [outcome])


def unclean_election(bench: CoordinatorBench, log_end: int) -> None:
    """Elect a leader whose log ends there, and which knows no producer of later rows."""
    log = bench.cluster.log("t", 0)
    log.batches = [batch for batch in log.batches if batch.next_offset <= log_end]
    log.open_transactions = {owner: first for owner, first in log.open_transactions.items() if first < log_end}
    known = {batch.header.producer_id for batch in log.batches}
    log.producers = {owner: state for owner, state in log.producers.items() if owner in known}
    bench.cluster.move_leader("t", 0, 1)


@pytest.mark.parametrize("kept", [0, 1], ids=["all of the batch", "its tail"])
def test_rows_that_an_unclean_election_loses_are_noticed(bench: CoordinatorBench, kept: int) -> None:
    """Bug: the new leader's log ended where the batch began. That is where readers wait for an open transaction, too:
    the batch was committed without its rows, and without an error.
    """
    wrote_before(bench)
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    assert outcome.written is not None
    first = outcome.offsets["t"][0][1]
    bench.raw.write(outcome.written.transaction, PLACE, "second")
    unclean_election(bench, first + kept)
    outcome = replace(outcome, offsets={PLACE.topic: [[PLACE.partition, first, first + 2, 2]]})
    with pytest.raises(IllegalStateError, match="not decided: t-0 has lost rows of P/0"):
        driver.commit([outcome])


def test_older_end_from_a_leader_that_was_frozen_is_not_believed(bench: CoordinatorBench) -> None:
    """Bug: it led the partition no longer, and answered from its memory. The batch failed, as if its rows were lost."""

    def older(values: dict[str, Any]) -> dict[str, Any]:
        partition = values["topics"][0]["partitions"][0] | {"offset": 0}
        return values | {"topics": [{"name": "t", "partitions": [partition]}]}

    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    bench.cluster.on(ApiKey.LIST_OFFSETS, faults.change(older), times=4)  # two looks at both ends
    driver.commit([outcome])
    assert bench.values() == ["row"]


def test_first_rows_of_a_task_that_an_unclean_election_loses_are_noticed(bench: CoordinatorBench) -> None:
    """Bug: other producers had written as many rows as were lost, so that the offsets of the task fitted."""
    wrote_before(bench)
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    assert outcome.written is not None
    first = outcome.offsets["t"][0][1]
    unclean_election(bench, first)
    wrote_before(bench)
    end = bench.cluster.log("t", 0).next_offset + 1
    bench.raw.write(outcome.written.transaction, PLACE, "second")
    outcome = replace(outcome, offsets={PLACE.topic: [[PLACE.partition, first, end, 2]]})
    with pytest.raises(IllegalStateError, match="not decided: t-0 has lost rows of P/0"):
        driver.commit([outcome])


@pytest.mark.parametrize("others", [None, 0, 2], ids=["after the tasks", "between them", "with others' rows"])
def test_batch_whose_rows_went_with_their_topic_is_not_decided(bench: CoordinatorBench, others: int | None) -> None:
    """Bug: the topic was deleted and created again during a batch. The batch was committed without the rows that were
    written before, and without an error.
    """
    wrote_before(bench)
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcomes = [reported(bench, batch_start)]
    created_again(bench)
    if others is not None:
        for _ in range(others):
            wrote_before(bench)
        outcomes.append(of_second_task(bench, batch_start))
    with pytest.raises(IllegalStateError, match="not decided: t-0 has lost rows of P/0 that it had acknowledged"):
        driver.commit(outcomes)
    driver.abort(batch_start, outcomes)
    again = driver_of(bench, "P")
    batch_start = again.begin()
    again.commit([reported(bench, batch_start)])
    assert bench.values()[-1:] == ["row"]


def test_batch_whose_topic_was_deleted_is_refused_and_written_again(bench: CoordinatorBench) -> None:
    """Bug: it was committed with a warning. If the topic was created again later, its rows were missing there."""
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcomes = [reported(bench, batch_start)]
    bench.cluster.delete_topic("t")
    with pytest.raises(IllegalStateError, match=r"not decided: t-0 has lost rows of the batch .* create it\), or"):
        driver.commit(outcomes)
    driver.abort(batch_start, outcomes)
    bench.cluster.create_topic("t")
    driver.commit([reported(bench, driver.begin())])
    assert bench.values() == ["row"]


def test_topic_that_goes_between_two_looks_at_it_is_noticed(bench: CoordinatorBench) -> None:
    def delete_after_it(cluster: Any, _exchange: Any, proceed: faults.Proceed) -> Any:
        answer = proceed()
        cluster.delete_topic("t")
        return answer

    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    bench.cluster.on(ApiKey.LIST_OFFSETS, delete_after_it)
    with pytest.raises(IllegalStateError, match="not decided: t-0 has lost rows of the batch"):
        driver.commit([outcome])


def in_partition_2(bench: CoordinatorBench, batch_start: BatchStart) -> TaskOutcome:
    """The outcome of a task that wrote a row to t-0 and one to t-2."""
    outcome = reported(bench, batch_start)
    assert outcome.written is not None
    place = TopicPartition("t", 2)
    first = bench.cluster.log(*place).next_offset
    bench.raw.write(outcome.written.transaction, place, "far")
    return replace(outcome, offsets={"t": [*outcome.offsets["t"], [2, first, first + 1, 1]]})


def with_one_partition(topic: dict[str, Any]) -> dict[str, Any]:
    """Return the answer on a topic, with its first partition only."""
    return {**topic, "partitions": topic["partitions"][:1]}


def known_to(bench: CoordinatorBench, partitions: int) -> None:
    """Let the driver know this number of partitions of the topic."""
    count = bench.coordinator.creation.count("t", bench.timer())
    if count < partitions:
        bench.cluster.add_partitions("t", partitions - count)
    assert bench.coordinator.creation.count("t", bench.timer()) == partitions


@pytest.mark.parametrize("is_lost", [False, True])
def test_partitions_that_the_driver_does_not_know_yet_are_checked(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture, is_lost: bool
) -> None:
    """Bug: tasks learn of added partitions before the driver. It checked no partition of the topic then, and said that
    the topic had as many partitions as before.
    """
    known_to(bench, 3)
    driver = driver_of(bench, "P")
    outcome = in_partition_2(bench, driver.begin())
    first_only = faults.change(lambda values: {**values, "topics": [*map(with_one_partition, values["topics"])]})
    bench.cluster.on(ApiKey.METADATA, first_only)
    assert bench.coordinator.creation.count("t", bench.timer()) == 1
    if is_lost:
        bench.cluster.delete_topic("t")
        bench.cluster.create_topic("t", 3)
        with pytest.raises(IllegalStateError, match=r"not decided: t-\d has lost rows"):
            driver.commit([outcome])
    else:
        assert driver.commit([outcome]).decision is not None
    assert caplog.text == ""


@pytest.mark.parametrize("known", [3, 0], ids=["the driver knows the old topic", "the driver does not know the topic"])
def test_topic_created_again_with_fewer_partitions_has_none_of_their_rows(bench: CoordinatorBench, known: int) -> None:
    """Bug: the partition was not in the topic, so that no partition was asked: the batch was committed without its
    rows, and without an error. If the driver knew the old topic, it asked for the partition for a minute.
    """
    known_to(bench, 3)
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcome = in_partition_2(bench, batch_start)
    if not known:
        bench.coordinator.creation.forget("t")
        bench.coordinator.creation.count("decisions", bench.timer())
    created_again(bench)
    started_ms = bench.rig.now_ms
    with pytest.raises(IllegalStateError, match="not decided: t-2 has lost rows of the batch that it had acknowledged"):
        driver.commit([outcome])
    assert bench.rig.now_ms - started_ms < 25_000
    driver.abort(batch_start, [outcome])


@pytest.mark.parametrize("is_apart", [True, False], ids=["rows of others between", "no gap"])
def test_partitions_are_asked_for_rows_only_if_there_is_a_gap(bench: CoordinatorBench, is_apart: bool) -> None:
    wrote_before(bench)
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    outcomes = [reported(bench, batch_start)]
    if is_apart:
        wrote_before(bench)
    outcomes.append(of_second_task(bench, batch_start))
    asked = len(bench.asked(ApiKey.DESCRIBE_PRODUCERS))
    driver.commit(outcomes)
    assert len(bench.asked(ApiKey.DESCRIBE_PRODUCERS)) - asked == is_apart
    assert sorted(bench.values())[-2:] == ["row", "second"]


def test_rows_that_timed_out_are_not_called_lost(bench: CoordinatorBench) -> None:
    """The batch is refused with the timeout as the reason. Another producer's open rows are before them."""
    wrote_before(bench)
    bench.raw.write(bench.raw.begin("other"), PLACE, "other")
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    assert outcome.written is not None
    bench.end([outcome.written.transaction], committed=False)
    with pytest.raises(IllegalStateError, match="It timed out, or a late attempt"):
        driver.commit([outcome])


def test_aborted_rows_of_another_attempt_do_not_stop_readers(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    """The next batch of the query ends them: its rows are behind them."""
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    lost = bench.raw.begin("P/0.1")
    bench.raw.write(lost, PLACE, "lost")
    with without_leader(bench):
        driver.abort(batch_start, [])
    driver.commit([reported(bench, driver.begin())])
    assert bench.values() == ["row"]
    assert "end markers are missing in t-0" in caplog.text


@pytest.mark.parametrize("state", ["Empty", "Ongoing"])
def test_rows_of_another_attempt_that_its_coordinator_has_forgotten_do_not_stop_readers(
    bench: CoordinatorBench, state: str
) -> None:
    """Bug: its coordinator had lost records of __transaction_state, so the end of that transaction wrote no marker into
    the partition. The batch was reported as written, and no reader saw it, or anything after it.
    """
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    dead = bench.raw.begin("P/0.1")
    bench.raw.write(dead, PLACE, "dead")
    held = bench.cluster.transactions.transactions["P/0.1"]
    held.state = state
    held.partitions.clear()
    driver.commit([reported(bench, batch_start)])
    assert bench.values() == ["row"]


def marked(bench: CoordinatorBench, outcome: TaskOutcome) -> TaskOutcome:
    assert outcome.written is not None
    name, place = outcome.written.transaction.transactional_id, outcome.batch_start.place
    bench.raw.mark(outcome.written.transaction, name, place, 5, outcome.written.marker_text)
    return outcome


def dies_between_the_two_requests_for_a_marker(bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*given: Any) -> None:
        add(*given)
        raise KafkaTimeoutError("The driver is gone.")

    driver = driver_of(bench, "P")
    outcome = marked(bench, reported(bench, driver.begin()))
    add = KafkaDriverCluster.add_partitions
    ended_without_leader(bench, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "add_partitions", die)
        with pytest.raises(KafkaTimeoutError, match="is decided"):
            driver.commit([outcome])
    assert bench.state("P/0") == "Ongoing"


def test_driver_that_died_between_the_two_requests_for_a_marker(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2: the next driver must not take that transaction for one of a late attempt, and abort it."""
    dies_between_the_two_requests_for_a_marker(bench, monkeypatch)
    assert driver_of(bench, "P").begin().last_batch_id == 4
    assert bench.values() == ["row"]


def test_transaction_for_a_marker_that_timed_out_may_have_lost_rows(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor of a driver that died comes too late. Version 1 does not show that."""
    dies_between_the_two_requests_for_a_marker(bench, monkeypatch)
    bench.rig.clock.sleep_ms(100_000)
    if bench.raw.version == 1:
        assert driver_of(bench, "P").begin().last_batch_id == 4
        return
    for _ in range(2):  # until an operator has accepted it
        with pytest.raises(
            TransactionLostError, match=r"rows of 1 of its 1 transactions may be missing.* 'P/0' .*accept"
        ):
            driver_of(bench, "P").begin()


@pytest.mark.parametrize("who", ["late task", "next driver"])
def test_transaction_for_a_marker_that_another_party_ends(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Bug: a late task aborted what was begun for the marker of committed rows, which were lost without an error. A
    successor of the driver commits it instead.
    """

    def taken(*given: Any) -> None:
        add(*given)
        monkeypatch.setattr(KafkaDriverCluster, "add_partitions", add)
        if who == "late task":
            bench.raw.begin("P/0")
        else:
            driver_of(bench, "P").begin()

    driver = driver_of(bench, "P")
    outcome = marked(bench, reported(bench, driver.begin()))
    add = KafkaDriverCluster.add_partitions
    ended_without_leader(bench, monkeypatch)
    monkeypatch.setattr(KafkaDriverCluster, "add_partitions", taken)
    with pytest.raises(TransactionLostError if who == "late task" else ProducerFencedError):
        driver.commit([outcome])
    assert bench.values() == ([] if who == "late task" else ["row"])


@pytest.mark.parametrize("topic", ["t", "u"], ids=["same partition", "elsewhere"])
def test_committed_rows_that_are_open_together_with_those_of_a_late_task(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    """Bug: one marker ends both. The abort of the late attempt aborted the rows of the batch, without an error."""
    bench.cluster.create_topic("u", 1)
    driver = driver_of(bench, "P")
    outcome = marked(bench, reported(bench, driver.begin()))
    ended_without_leader(bench, monkeypatch)

    def write_late(*_: object) -> None:
        bench.raw.write(bench.raw.begin("P/0"), TopicPartition(topic, 0), "late")
        raise KafkaTimeoutError("The driver is gone.")

    with monkeypatch.context() as patch:
        patch.setattr(EndMarkers, "complete", write_late)
        with pytest.raises(KafkaTimeoutError, match="is decided"):
            driver.commit([outcome])
    if topic == "u":
        assert driver_of(bench, "P").begin().last_batch_id == 4
        assert bench.values() == ["row"]
        return
    with pytest.raises(TransactionLostError, match="may be missing"):
        driver_of(bench, "P").begin()
    assert bench.state("P/0") == "Ongoing"


# ---- aborted rows that are still open, and the next batches have other layouts ---------------------------------------


def of_first_task_elsewhere(bench: CoordinatorBench, batch_start: BatchStart) -> TaskOutcome:
    bench.cluster.create_topic("u", 1)
    open_ = bench.raw.begin("P/0")
    bench.raw.write(open_, TopicPartition("u", 0), "elsewhere")
    return TaskOutcome(batch_start, 4, "q", 0, 1, TaskTransaction(open_, 0, 1), offsets={"u": [[0, 0, 1, 1]]})


def left_open(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    """Abort a row of task 0, without its marker."""
    outcome = reported(bench, driver.begin())
    with without_leader(bench):
        driver.abort(outcome.batch_start, [outcome])


def test_aborted_rows_of_a_task_that_wrote_elsewhere_afterwards_stay_aborted(bench: CoordinatorBench) -> None:
    """Bug: another task wrote to their partition. They were open there before its rows, and were committed together
    with the batch, because their task belongs to it.
    """
    driver = driver_of(bench, "P")
    left_open(bench, driver)
    batch_start = driver.begin()
    driver.commit([of_first_task_elsewhere(bench, batch_start), of_second_task(bench, batch_start)])
    assert bench.values() == ["second"]


def test_aborted_rows_of_a_task_that_committed_elsewhere_since_stay_aborted(bench: CoordinatorBench) -> None:
    """Bug: the last transaction of their task was committed, and so were they, by a batch without that task."""
    driver = driver_of(bench, "P")
    left_open(bench, driver)
    driver.commit([of_first_task_elsewhere(bench, driver.begin())])
    assert bench.values() == []
    driver.commit([replace(of_second_task(bench, driver.begin()), batch_id=5)])
    assert bench.values() == ["second"]


def test_driver_that_died_while_it_ended_aborted_rows(bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next driver must not take that transaction for the marker of a commit."""

    def die(*given: Any) -> None:
        add(*given)
        raise KafkaTimeoutError("The driver is gone.")

    driver = driver_of(bench, "P")
    left_open(bench, driver)
    batch_start = driver.begin()
    outcomes = [marked(bench, of_first_task_elsewhere(bench, batch_start)), of_second_task(bench, batch_start)]
    add = KafkaDriverCluster.add_partitions
    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "add_partitions", die)
        with pytest.raises(KafkaTimeoutError, match="is decided"):
            driver.commit(outcomes)
    assert bench.state("P/0") == "Ongoing"
    assert driver_of(bench, "P").begin().last_batch_id == 4
    assert bench.values() == ["second"]


def test_owner_is_not_looked_for_behind_a_decision_without_its_marker(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: foreachBatch looks for it before its driver begins and writes the marker. Each start waited in vain."""
    driver = driver_of(bench, "P")
    outcome = marked(bench, reported(bench, driver.begin()))
    place = outcome.batch_start.place
    end = KafkaDriverCluster.end

    def die(self: KafkaDriverCluster, *given: Any, **named: Any) -> Any:
        bench.cluster.move_leader(*place, NO_LEADER)
        end(self, *given, **named)
        bench.cluster.move_leader(*place, 0)
        raise KafkaTimeoutError("The driver is gone.")

    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "end", die)
        with pytest.raises(KafkaTimeoutError):
            driver.commit([outcome])
    started_ms = bench.rig.now_ms
    other = driver_of(bench, "P")
    other.check_owner(4, "q")
    assert bench.rig.now_ms - started_ms < 1_000
    assert other.begin().last_batch_id == 4
    with pytest.raises(IllegalStateError, match="belongs to"):
        other.check_owner(5, "another")


def test_note_that_ends_between_two_questions_misses_no_marker(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a start right after a batch said that a broker had left out an end marker, and wrote it once more."""
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    write, look = KafkaDriverCluster.write_decision, KafkaDriverCluster.open_transactions
    notes: list[OpenTransaction] = []

    def write_note(self: KafkaDriverCluster, *given: Any) -> int:
        if given[1].is_finished:
            notes.append(given[0])
            patch.setattr(KafkaDriverCluster, "end", Mock(side_effect=KafkaTimeoutError("gone")))
        return write(self, *given)

    def end_after(self: KafkaDriverCluster, places: Any) -> Any:
        seen = look(self, places)
        bench.end([notes.pop()] if notes else [])
        return seen

    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "write_decision", write_note)
        with pytest.raises(KafkaTimeoutError, match="gone"):
            driver.commit([outcome])
    bench.cluster.requests.clear()
    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "open_transactions", end_after)
        assert not driver._end_markers.complete_last_decision("P/driver", bench.raw.version)
    assert (notes, bench.asked(ApiKey.ADD_PARTITIONS_TO_TXN)) == ([], [])
    assert "is missing in" not in caplog.text


@pytest.mark.parametrize("is_held", [True, False], ids=["one process", "another process"])
def test_note_without_its_marker_does_not_stop_later_starts(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """Bug: the driver began its next batch and died. Then no broker knew how the note had ended, and each start waited
    for it in vain.
    """
    driver = driver_of(bench, "P")
    outcome = marked(bench, reported(bench, driver.begin()))
    place = outcome.batch_start.place
    write, end = KafkaDriverCluster.write_decision, KafkaDriverCluster.end

    def end_without_leader(self: KafkaDriverCluster, *given: Any, **named: Any) -> Any:
        bench.cluster.move_leader(*place, NO_LEADER)
        ended = end(self, *given, **named)
        bench.cluster.move_leader(*place, 0)
        return ended

    def write_note(self: KafkaDriverCluster, *given: Any) -> int:
        if given[1].is_finished:
            monkeypatch.setattr(KafkaDriverCluster, "end", end_without_leader)
        return write(self, *given)

    monkeypatch.setattr(KafkaDriverCluster, "write_decision", write_note)
    committed = driver.commit([outcome])
    monkeypatch.undo()
    assert committed.driver is not None
    if is_held:
        driver.begin(committed.driver.producer, committed.decision)
    assert driver_of(bench, "P").begin().last_batch_id == 4
    assert bench.values() == ["row"]


@pytest.mark.parametrize(
    ("hide", "text"),
    [
        (lambda bench: bench.cluster.delete_topic("t"), "Topic 't' is not in the cluster any more"),
        (
            lambda bench: bench.cluster.on(ApiKey.LIST_OFFSETS, refuses(TopicAuthorizationError), times=None),
            "Not authorized",
        ),
    ],
    ids=["deleted", "no DESCRIBE"],
)
def test_topic_that_the_driver_cannot_see_is_named(
    bench: CoordinatorBench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hide: Callable[[CoordinatorBench], None],
    text: str,
) -> None:
    """The rows of a deleted topic are gone, and the batch is not held up for them."""
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    decide = KafkaDriverCluster.write_decision

    def hidden(self: KafkaDriverCluster, *given: Any) -> int:
        offset = decide(self, *given)
        if not given[1].is_finished:
            monkeypatch.setattr(KafkaDriverCluster, "unreadable", after)
        return offset

    def after(self: KafkaDriverCluster, ends: Any, names: Any) -> Any:
        if PLACE not in ends:
            return ()
        hide(bench)
        return unreadable(self, ends, names)

    unreadable = KafkaDriverCluster.unreadable
    monkeypatch.setattr(KafkaDriverCluster, "write_decision", hidden)
    driver.commit([outcome])
    assert "can read the rows of a batch was not checked (transactional.id.prefix='P')" in caplog.text
    assert text in caplog.text


def without_topics(values: Any) -> Any:
    """Return the descriptions of transactions for one who may not describe their topics."""
    return {"transaction_states": [each | {"topics": ()} for each in values["transaction_states"]]}


def test_topics_that_the_driver_may_not_describe_do_not_end_later_requests(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Metadata names only the topics that are written. Without the permission the batch is committed all the same."""

    def refuse(cluster: Any, exchange: Any, proceed: faults.Proceed) -> Any:
        asked = {topic.name for topic in exchange.request.topics or ()}
        if "t" not in asked:
            return proceed()
        return faults.change(refused)(cluster, exchange, proceed)

    def refused(values: Any) -> Any:
        topics = [
            topic
            | ({"error_code": ErrorCode.topic_authorization_failed, "partitions": ()} if topic["name"] == "t" else {})
            for topic in values["topics"]
        ]
        return values | {"topics": topics}

    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    bench.cluster.on(ApiKey.METADATA, refuse, times=None)
    bench.cluster.on(ApiKey.DESCRIBE_TRANSACTIONS, faults.change(without_topics), times=None)
    bench.coordinator.creation.forget("t")
    assert driver.commit([outcome]).decision is not None
    assert "was not checked" in caplog.text
    assert driver.begin().last_batch_id == 4


def test_permission_that_is_taken_away_after_the_first_look_is_no_lost_record(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: brokers leave out a topic without DESCRIBE, and the batch failed: records of __transaction_state were lost,
    it said.
    """

    def taken_away(self: KafkaDriverCluster, *given: Any) -> int:
        bench.cluster.on(ApiKey.DESCRIBE_TRANSACTIONS, faults.change(without_topics), times=None)
        bench.cluster.on(ApiKey.LIST_OFFSETS, faults.fail_with(TopicAuthorizationError), times=2)
        return write(self, *given)

    driver, write = driver_of(bench, "P"), KafkaDriverCluster.write_decision
    outcome = reported(bench, driver.begin())
    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "write_decision", taken_away)
        patch.setattr(KafkaDriverCluster, "_log_end", lambda self: 0)
        assert driver.commit([outcome]).decision is not None
    assert "was not checked" in caplog.text


def test_many_topics_are_looked_up_together(bench: CoordinatorBench) -> None:
    """A batch with a column `topic` may have thousands."""
    names = [f"many-{number}" for number in range(30)]
    for name in names:
        bench.cluster.create_topic(name, 1)
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    before = len(bench.asked(ApiKey.METADATA))
    ends = cluster.ends({TopicPartition(name, 0): 0 for name in names})
    assert list(ends.values()) == [PartitionEnds(0, 0)] * 30
    assert len(bench.asked(ApiKey.METADATA)) - before <= 2


def test_nodes_without_describe_producers(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy in front of the brokers may not have it."""

    def unsupported(*_: object) -> None:
        raise UnsupportedVersionError("The node does not support DESCRIBE_PRODUCERS.")

    monkeypatch.setattr(bench.coordinator.topics, "open_transactions", unsupported)
    driver = driver_of(bench, "P")
    outcome = reported(bench, driver.begin())
    ended_without_leader(bench, monkeypatch)
    driver.commit([outcome])
    assert bench.values() == ["row"]
    assert "The driver cannot read t, so that" in caplog.text


def test_fenced_driver_writes_no_marker(bench: CoordinatorBench) -> None:
    """The decision of a driver that was fenced meanwhile is not committed by its marker."""
    one, other = driver_of(bench, "P"), driver_of(bench, "P")
    batch_start = one.begin()
    other.begin()
    markers = ExactlyOnceDriver("P", KafkaDriverCluster(bench.coordinator, CONFIG, "P"), lambda: 0)._end_markers
    old = OpenTransaction.of("P/driver", batch_start.driver.producer, bench.raw.version)
    assert markers.complete_decision(old, -1) == old
    assert bench.state("P/driver") == "Empty"


@pytest.mark.parametrize("query_id", ["q", ""], ids=["stream", "write"])
def test_decision_whose_marker_cannot_be_written_may_be_aborted(
    bench: CoordinatorBench, monkeypatch: pytest.MonkeyPatch, query_id: str
) -> None:
    """The error must not say that the batch is decided: no task is committed yet."""

    def fail(*_: object) -> None:
        raise KafkaTimeoutError("The marker is missing.")

    driver = driver_of(bench, "P")
    outcome = replace(reported(bench, driver.begin()), query_id=query_id)
    monkeypatch.setattr(EndMarkers, "complete_decision", fail)
    with pytest.raises(KafkaTimeoutError, match="Whether batch 4 is decided is not known: The marker") as error:
        driver.commit([outcome])
    assert error.value.retriable is bool(query_id)
    assert bench.state("P/0") == "Ongoing"
