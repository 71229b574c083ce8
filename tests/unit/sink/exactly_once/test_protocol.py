"""Batches that a driver refuses to decide, empty batches, and foreign transactions that a driver aborts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import PLACE, CoordinatorBench
from support.driver_steps import CONFIG, driver_of, refused_to_task_0, task_outcome
from support.scripted_broker import faults

from spark_kafka_sink.admin.transaction_values import EndTxnOutcome
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    BrokerError,
    IllegalStateError,
    InvalidPidMappingError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    ProtocolError,
    error_for_code,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchChangedError,
    BatchStart,
    Decision,
    TaskOutcome,
    TaskTransaction,
    TransactionLostError,
)
from spark_kafka_sink.sink.exactly_once.protocol import Committed, ExactlyOnceDriver


@pytest.fixture
def bench() -> CoordinatorBench:
    return CoordinatorBench()


@pytest.fixture
def driver(bench: CoordinatorBench) -> ExactlyOnceDriver:
    return driver_of(bench, "P")


def outcome(driver: ExactlyOnceDriver, partition: int) -> TaskOutcome:
    written = TaskTransaction(OpenTransaction(f"P/{partition}", 9, 0, 2), partition, 1)
    return TaskOutcome(driver.begin(), 4, "q", partition, 1, written)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"batch_id": 5}, "do not agree on batch_id"),
        ({"query_id": "another"}, "do not agree on query_id"),
        ({"was_skipped": True, "written": None}, "do not agree on was_skipped"),
        ({"partition": 0}, r"Two tasks wrote one partition: \[0, 0\]"),
    ],
)
def test_tasks_of_two_batches_are_not_decided(driver: ExactlyOnceDriver, changed: dict[str, Any], text: str) -> None:
    first = outcome(driver, 0)
    second = replace(first, partition=1)
    with pytest.raises(IllegalStateError, match=text):
        driver.commit([first, replace(second, **changed)])
    assert driver.begin().last_batch_id is None


def test_tasks_of_two_starts_are_not_decided(driver: ExactlyOnceDriver) -> None:
    with pytest.raises(IllegalStateError, match="do not agree on batch_start"):
        driver.commit([outcome(driver, 0), outcome(driver, 1)])
    assert driver.begin().last_batch_id is None


@pytest.mark.parametrize("version", [2, 1])
def test_only_the_first_empty_batch_is_decided(version: int) -> None:
    """Otherwise a later batch would be the first one in the decision topic."""
    bench = CoordinatorBench(version=version)
    driver = driver_of(bench, "P")
    assert driver.commit([]) == Committed(None, False, None)
    empty = replace(outcome(driver, 0), rows=0, written=None)
    committed = driver.commit([empty])
    assert committed.decision is not None
    assert (committed.decision.batch_id, committed.decision.is_finished) == (4, True)
    assert committed.driver is not None
    batch_start = driver.begin(committed.driver.producer, committed.decision)
    assert (
        batch_start.last_batch_id,
        batch_start.is_written_already(4, "q"),
        batch_start.is_written_already(5, "q"),
    ) == (
        4,
        True,
        False,
    )
    assert driver.commit([replace(empty, batch_start=batch_start, batch_id=5)]) == Committed(None, False, None)
    assert driver.begin().last_batch_id == 4


def test_batch_write_without_rows_leaves_no_decision(driver: ExactlyOnceDriver) -> None:
    empty = replace(outcome(driver, 0), rows=0, written=None, query_id="")
    assert driver.commit([empty]) == Committed(None, False, None)
    assert driver.begin().last_batch_id is None


@pytest.mark.parametrize(("age_ms", "is_decided"), [(47_000, True), (49_000, False)])
def test_too_old_transaction_is_not_decided(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, age_ms: int, is_decided: bool
) -> None:
    reported = task_outcome(bench, driver.begin())
    bench.rig.clock.sleep_ms(age_ms)
    if is_decided:
        assert driver.commit([reported]).decision is not None
        return
    with pytest.raises(IllegalStateError, match=r"open for 49\d{3} ms, more than 80 %.*timeout\.ms \(now 60000\)"):
        driver.commit([reported])
    assert bench.state("P/0") == "Ongoing"
    assert driver.begin().last_batch_id is None


@pytest.mark.parametrize(
    ("offset", "metadata", "is_lost"),
    [(5, None, False), (4, None, True), (6, None, True), (5, "another's", True)],
    ids=["its own", "of the batch before", "of the batch after", "of another task"],
)
def test_forgotten_transaction_counts_if_its_marker_was_committed(
    bench: CoordinatorBench,
    driver: ExactlyOnceDriver,
    monkeypatch: pytest.MonkeyPatch,
    offset: int,
    metadata: str | None,
    is_lost: bool,
) -> None:
    def unreachable(*_: object) -> None:
        raise KafkaTimeoutError("P/driver is not there.")

    reported = task_outcome(bench, driver.begin())
    assert reported.written is not None
    open_ = reported.written.transaction
    bench.raw.mark(open_, "P/0", reported.batch_start.place, offset, metadata or reported.written.marker_text)
    with monkeypatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, "_note_finished", unreachable)
        with pytest.raises(KafkaTimeoutError, match="is committed"):
            driver.commit([reported])
    del bench.cluster.transactions.transactions["P/0"]
    if is_lost:
        with pytest.raises(TransactionLostError, match=r"rows are missing in Kafka, 1 of 1 \(partition 0: 1 rows"):
            driver.begin()
    else:
        assert driver.begin().last_batch_id == 4


@pytest.mark.parametrize(
    "error_code",
    [ErrorCode.coordinator_not_available, ErrorCode.transactional_id_authorization_failed],
    ids=["away", "not authorized"],
)
def test_batch_with_an_unfinished_commit_is_not_noted(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, error_code: int
) -> None:
    """After the note no start would commit the batch, and its rows would end by timeout."""

    reported = task_outcome(bench, driver.begin(), timeout_ms=900_000)
    script = bench.cluster.on(ApiKey.END_TXN, refused_to_task_0(error_code), times=None)
    for step in (lambda: driver.commit([reported]), driver.begin):
        with pytest.raises(KafkaError, match=r"Batch 4 of P is decided, and its commit did not end: .*'P/0'.*finished"):
            step()
    assert bench.state("P/0") == "Ongoing"
    bench.cluster.scripts.remove(script)
    assert driver.begin().last_batch_id == 4
    assert bench.state("P/0") == "CompleteCommit"


@pytest.mark.parametrize(
    ("is_driver", "error_code"),
    [
        (True, ErrorCode.transactional_id_authorization_failed),
        (False, ErrorCode.transactional_id_authorization_failed),
        (False, ErrorCode.coordinator_not_available),
    ],
    ids=["the decision", "refused", "away"],
)
@pytest.mark.parametrize("query_id", ["q", ""], ids=["stream", "batch write"])
def test_error_of_undecided_write_advises_no_second_write(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, query_id: str, is_driver: bool, error_code: int
) -> None:
    """Bug: a second write got new names, and its rows were added to those that the operator had finished."""
    reported = replace(task_outcome(bench, driver.begin(), timeout_ms=900_000), query_id=query_id)
    refusal = faults.fail_with(error_code) if is_driver else refused_to_task_0(error_code)
    bench.cluster.on(ApiKey.END_TXN, refusal, times=1 if is_driver else None)
    with pytest.raises(
        KafkaError, match="is not known" if is_driver else "is decided, and its commit did not"
    ) as caught:
        driver.commit([reported])
    typed = "python -m spark_kafka_sink.transactions finish --prefix=P --bootstrap-servers HOST:PORT"
    assert ("start" in str(caught.value).replace("--bootstrap", "")) is (query_id != "")
    assert ("Do not write it again" in str(caught.value)) is (query_id == "")
    assert (typed in str(caught.value)) is (query_id == "")
    assert caught.value.retriable is (
        query_id != "" and (is_driver or error_code == ErrorCode.coordinator_not_available)
    )
    assert isinstance(caught.value.__cause__, KafkaError)


def test_error_code_without_class_is_kept_in_longer_text(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise error_for_code(ErrorCode.throttling_quota_exceeded)

    reported = task_outcome(bench, driver.begin())
    script = bench.cluster.on(ApiKey.END_TXN, refused_to_task_0(ErrorCode.throttling_quota_exceeded), times=None)
    with pytest.raises(BrokerError, match="its commit did not end") as commit:
        driver.commit([reported])
    assert commit.value.error_code == ErrorCode.throttling_quota_exceeded
    bench.cluster.scripts.remove(script)
    monkeypatch.setattr(ExactlyOnceDriver, "_note_finished", refused)
    with pytest.raises(BrokerError, match="is committed: its rows count") as note:
        driver.begin()
    assert note.value.error_code == ErrorCode.throttling_quota_exceeded


def test_driver_fenced_while_writing_decides_nothing(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken_over(self: KafkaDriverCluster, *given: Any) -> None:
        write(self, *given)
        driver_of(bench, "P").begin()
        bench.cluster.requests.clear()

    write = KafkaDriverCluster.write_decision
    reported = task_outcome(bench, driver.begin())
    monkeypatch.setattr(KafkaDriverCluster, "write_decision", taken_over)
    with pytest.raises(ProducerFencedError, match=r"Another driver runs.*batch 4 is not decided here"):
        driver.commit([reported])
    assert bench.asked(ApiKey.END_TXN) == []


@pytest.mark.parametrize(
    ("error_code", "kind", "text"),
    [
        (ErrorCode.producer_fenced, ProducerFencedError, "Whether batch 4 is decided is not known: "),
        (ErrorCode.invalid_producer_id_mapping, ProducerFencedError, "Whether batch 4 is decided is not known: "),
        (
            ErrorCode.invalid_txn_state,
            IllegalStateError,
            "Batch 4 is not decided: .* timed out while the decision was written",
        ),
        (
            ErrorCode.transactional_id_authorization_failed,
            KafkaTimeoutError,
            "Whether batch 4 is decided is not known: ",
        ),
    ],
    ids=["fenced", "forgotten", "timed out", "not authorized"],
)
def test_refused_decision_commit_reports_the_known_state(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, error_code: int, kind: type[KafkaError], text: str
) -> None:
    reported = task_outcome(bench, driver.begin())
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(error_code))
    with pytest.raises(kind, match=text):
        driver.commit([reported])
    assert bench.state("P/0") == "Ongoing"


def test_forgotten_id_of_the_driver_names_the_setting(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    reported = task_outcome(bench, driver.begin())
    del bench.cluster.transactions.transactions["P/driver"]
    with pytest.raises(
        InvalidPidMappingError, match=r"4 is not decided: .* P/driver\. Raise .*id\.expiration\.ms above"
    ):
        driver.commit([reported])


def test_refusal_after_a_lost_answer_does_not_say_that_the_batch_is_not_decided(
    bench: CoordinatorBench, driver: ExactlyOnceDriver
) -> None:
    """Bug: the answer to the commit of the decision was lost, and the node that was asked again did not know better.
    The batch was called not decided, so who wrote it again wrote it twice.
    """
    reported = task_outcome(bench, driver.begin())
    bench.cluster.on(ApiKey.END_TXN, faults.lose_response())
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(ErrorCode.invalid_txn_state))
    with pytest.raises(KafkaTimeoutError, match="Whether batch 4 is decided is not known: "):
        driver.commit([reported])
    assert driver_of(bench, "P").begin().last_batch_id == 4


@pytest.mark.parametrize(
    ("query_id", "advice"),
    [
        ("query-1", "The next start of the query finds out, and finishes or repeats it.$"),
        ("", "Do not write it again before it is known.*finish.*another write under the prefix may have this number"),
    ],
    ids=["query", "batch write"],
)
def test_decision_that_timed_out_under_version_1_names_no_successor(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, query_id: str, advice: str
) -> None:
    """Bug: a driver that was stopped until its decision timed out said that a newer driver finishes or repeats the
    batch. There was none, so the rows of a batch write stayed away.
    """
    reported = replace(task_outcome(bench, driver.begin()), query_id=query_id)
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(ErrorCode.producer_fenced))  # a timeout takes the next epoch
    with pytest.raises(ProducerFencedError, match=f"timed out while the decision was written.*{advice}"):
        driver.commit([reported])


def test_transactions_of_other_prefixes_are_not_aborted() -> None:
    bench = CoordinatorBench()
    others = ["axb/0", "a.b/0/1", "a.bb/0", "a.b/x", "x/a.b/0", "a.b/0.", "a.b/"]
    for name in others:
        bench.raw.write(bench.raw.begin(name), TopicPartition("t", 0), "row")
    driver = driver_of(bench, "a.b")
    driver.commit([task_outcome(bench, driver.begin())])
    assert driver.abort(driver.begin(), [])
    assert {bench.state(name) for name in others} == {"Ongoing"}


@pytest.mark.parametrize("version", [2, 1])
def test_transaction_of_attempt_with_same_id_is_aborted(version: int) -> None:
    bench = CoordinatorBench(version=version)
    driver = driver_of(bench, "P")
    reported = task_outcome(bench, driver.begin())
    bench.raw.write(bench.raw.begin("P/0"), TopicPartition("t", 0), "row")
    with pytest.raises(IllegalStateError, match="a late attempt of the task took its place"):
        driver.commit([reported])
    assert bench.state("P/0") == "Ongoing"
    assert driver.abort(reported.batch_start, [reported])
    assert bench.state("P/0") == "CompleteAbort"


@pytest.mark.parametrize("version", [2, 1])
def test_task_with_aborted_transaction_is_not_decided(version: int) -> None:
    """Under version 1 of transactions the epoch does not show the abort. A decision would lose the task's rows."""
    bench = CoordinatorBench(version=version)
    driver = driver_of(bench, "P")
    reported = task_outcome(bench, driver.begin())
    assert reported.written is not None
    bench.end([reported.written.transaction], committed=False)
    with pytest.raises(IllegalStateError, match=r"Batch 4 is not decided: .*is CompleteAbort in epoch [01]\."):
        driver.commit([reported])
    driver.abort(reported.batch_start, [reported])
    assert driver.begin().last_batch_id is None


@pytest.mark.parametrize(("query_id", "smaller"), [("q", "batches smaller"), ("", "the write smaller")])
def test_error_of_timed_out_transaction_names_the_timeout(query_id: str, smaller: str) -> None:
    """Bug: the error of a batch that always took longer than its timeout only said that the batch must run again."""
    bench = CoordinatorBench()
    driver = driver_of(bench, "P")
    reported = replace(task_outcome(bench, driver.begin()), query_id=query_id)
    assert reported.written is not None
    bench.end([reported.written.transaction], committed=False)  # as the coordinator does after the timeout
    with pytest.raises(IllegalStateError, match=rf"kafka\.transaction\.timeout\.ms \(now 60000\).* make {smaller}"):
        driver.commit([reported])


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("step", ["begin", "abort"])
def test_driver_fenced_while_listing_aborts_nothing(step: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CoordinatorBench(version=version)
    driver = driver_of(bench, "P")
    batch_start = driver.begin()
    list_ids = KafkaDriverCluster.list_ids

    def be_taken_over(*arguments: Any) -> list[str]:
        monkeypatch.undo()
        task_outcome(bench, driver_of(bench, "P").begin())
        return list_ids(*arguments)

    monkeypatch.setattr(KafkaDriverCluster, "list_ids", be_taken_over)
    if step == "begin":
        driver.begin()
    else:
        driver.abort(batch_start, [])
    assert bench.state("P/0") == "Ongoing"


@pytest.mark.parametrize("version", [2, 1])
def test_late_attempt_is_aborted_after_commit(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the driver took the transaction for the task's own. It stayed open until its timeout if the attempt died."""
    bench = CoordinatorBench(version=version)
    driver = driver_of(bench, "P")
    reported = task_outcome(bench, driver.begin())
    end_all = KafkaDriverCluster.end

    def end(self: KafkaDriverCluster, ended: Sequence[OpenTransaction], *, committed: bool) -> list[EndTxnOutcome]:
        outcomes = end_all(self, ended, committed=committed)
        if committed and ended[0].transactional_id == "P/0":
            bench.raw.write(bench.raw.begin("P/0"), TopicPartition("t", 0), "late")
        return outcomes

    monkeypatch.setattr(KafkaDriverCluster, "end", end)
    assert driver.commit([reported]).decision is not None
    assert bench.state("P/0") == "CompleteAbort"


def test_batch_decided_while_it_is_fenced_is_not_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: under version 1 the fence does not end the driver's transaction, and a decided batch was lost. When a query
    is stopped, Spark calls abort while commit runs.
    """
    bench = CoordinatorBench(version=1)
    driver = driver_of(bench, "P")
    reported = task_outcome(bench, driver.begin())
    fence = KafkaDriverCluster.init_producer_id

    def decide_first(*arguments: Any) -> ProducerIdAndEpoch:
        with monkeypatch.context() as slow:
            slow.setattr(ExactlyOnceDriver, "finish", Mock(side_effect=KafkaTimeoutError))
            with pytest.raises(KafkaTimeoutError):
                driver.commit([reported])
        return fence(*arguments)

    with monkeypatch.context() as other:
        other.setattr(KafkaDriverCluster, "init_producer_id", decide_first)
        assert not driver.abort(reported.batch_start, [reported])
    assert driver.begin().last_batch_id == 4
    assert bench.state("P/0") == "CompleteCommit"


@pytest.mark.parametrize(
    "error_code",
    [ErrorCode.coordinator_not_available, ErrorCode.transactional_id_authorization_failed],
    ids=["away", "not authorized"],
)
def test_failed_abort_is_logged_and_returns_false(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, caplog: pytest.LogCaptureFixture, error_code: int
) -> None:
    reported = task_outcome(bench, driver.begin(), timeout_ms=900_000)
    script = bench.cluster.on(ApiKey.END_TXN, refused_to_task_0(error_code), times=None)
    assert not driver.abort(reported.batch_start, [reported])
    assert len(re.findall("'P/0'.* stays open until its timeout: ", caplog.text)) >= 1
    bench.cluster.scripts.remove(script)
    caplog.clear()
    assert driver.begin().last_batch_id is None
    assert bench.state("P/0") == "CompleteAbort"
    assert "stays open" not in caplog.text


def test_transaction_forgotten_during_describe_is_ignored(
    driver: ExactlyOnceDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaDriverCluster, "list_ids", lambda *_: ["P/9"])
    assert driver.begin().last_batch_id is None


def test_last_decision_is_read_again_after_a_new_epoch(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    driver.commit([task_outcome(bench, driver.begin())])
    assert driver.begin(None, Decision(3, "q", 0, 1, 1, (), True)).last_batch_id == 4


@pytest.mark.parametrize("version", [2, 1])
def test_failed_note_says_that_batch_is_committed(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CoordinatorBench(version=version)
    one = ExactlyOnceDriver("P", KafkaDriverCluster(bench.coordinator, CONFIG, "P"), lambda: 0)
    batch_start = one.begin()
    open_ = bench.raw.begin("P/0")
    bench.raw.write(open_, PLACE, "row")
    write = KafkaDriverCluster.write_decision

    def slowly(self: KafkaDriverCluster, driver: OpenTransaction, decision: Decision, sequence: int) -> int:
        offset = write(self, driver, decision, sequence)
        if decision.is_finished:
            bench.rig.clock.advance(90_000)  # longer than the driver's own transaction may take
        return offset

    monkeypatch.setattr(KafkaDriverCluster, "write_decision", slowly)
    with pytest.raises(KafkaError, match=r"Batch 4 of P is committed.*not be written again.*P/driver") as refusal:
        one.commit([TaskOutcome(batch_start, 4, "q", 0, 1, TaskTransaction(open_, 0, 1))])
    assert "not decided" not in str(refusal.value)
    assert "repeats" not in str(refusal.value)
    assert not refusal.value.retriable, "who writes again what failed for now would have each row twice"
    assert refusal.value.__cause__ is not None
    monkeypatch.undo()
    assert one.begin().last_batch_id == 4


def test_batch_whose_listing_fails_is_finished_by_the_next_start(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = task_outcome(bench, driver.begin())
    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "list_ids", Mock(side_effect=KafkaTimeoutError("node 0 has not answered.")))
        with pytest.raises(KafkaTimeoutError, match="Batch 4 of P is decided, and its commit did not end: node 0"):
            driver.commit([reported])
    assert bench.state("P/0") == "CompleteCommit"
    assert driver.begin().last_batch_id == 4


def decided(bench: CoordinatorBench, topic: str | None, fingerprint: int | None) -> BatchStart:
    """Batch 4 of three rows, decided by a release with or without fingerprints, and the start of its successor."""
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    own = OpenTransaction.of("P/driver", cluster.init_producer_id("P/driver", None), 2)
    cluster.write_decision(own, Decision(4, "q", 0, 1, 3, (), True, fingerprint=fingerprint, topic=topic), 0)
    cluster.end([own], committed=True)
    return ExactlyOnceDriver("P", cluster, lambda: 0).begin()


def skipped(batch_start: BatchStart, rows: int, fingerprint: int) -> list[TaskOutcome]:
    """The messages of two tasks that dropped their rows."""
    halves = ((rows // 2, 7), (rows - rows // 2, (fingerprint - 7) % 2**64))
    return [
        TaskOutcome(batch_start, 4, "q", index, count, None, was_skipped=True, fingerprint=part)
        for index, (count, part) in enumerate(halves)
    ]


@pytest.mark.parametrize(
    ("rows", "fingerprint", "topic", "what"),
    [
        (3, 12, "orders", ""),
        (5, 12, "orders", "with 3 rows, and now it comes with 5"),
        (0, 12, "orders", "with 3 rows, and now it comes with 0"),
        (3, 13, "orders", "with 3 rows, and now it comes with as many rows, but their content differs"),
        (3, 12, "other", "for topic='orders', and now it comes for topic='other'"),
        (3, 12, None, "for topic='orders', and now it comes for the topics that its rows name"),
    ],
)
def test_decided_batch_is_skipped_only_with_its_rows(rows: int, fingerprint: int, topic: str | None, what: str) -> None:
    bench = CoordinatorBench()
    batch_start = decided(bench, "orders", 12)
    driver = ExactlyOnceDriver("P", KafkaDriverCluster(bench.coordinator, CONFIG, "P"), lambda: 0, topic=topic)
    if not what:
        assert driver.commit(skipped(batch_start, rows, fingerprint)).was_skipped
        return
    with pytest.raises(
        BatchChangedError, match=re.escape(f"Batch 4 of transactional.id.prefix='P' was committed {what}")
    ):
        driver.commit(skipped(batch_start, rows, fingerprint))
    assert not BatchChangedError.retriable
    assert BatchChangedError.fatal


@pytest.mark.parametrize("rows", [3, 5])
def test_version_1_decision_is_compared_by_row_count(rows: int) -> None:
    bench = CoordinatorBench()
    batch_start = decided(bench, None, None)
    driver = ExactlyOnceDriver("P", KafkaDriverCluster(bench.coordinator, CONFIG, "P"), lambda: 0, topic="orders")
    with nullcontext() if rows == 3 else pytest.raises(BatchChangedError, match="with 3 rows, and now it comes with 5"):
        driver.commit(skipped(batch_start, rows, 99))


def test_decision_holds_fingerprint_and_topic_of_its_batch() -> None:
    bench = CoordinatorBench()
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    driver = ExactlyOnceDriver("P", cluster, lambda: 0, topic="orders")
    batch_start = driver.begin()
    open_ = bench.raw.begin("P/0")
    bench.raw.write(open_, PLACE, "rows")
    written = TaskOutcome(batch_start, 4, "q", 0, 3, TaskTransaction(open_, 0, 3), fingerprint=2**64 - 1)
    driver.commit([written, TaskOutcome(batch_start, 4, "q", 1, 0, None, fingerprint=3)])
    topic_id = str(bench.cluster.topics[cluster.place.topic].id)
    expected = Decision(4, "q", 0, 2, 3, (), True, fingerprint=2, topic="orders", topic_id=topic_id)
    assert cluster.last_decision() == expected


def test_decision_on_a_transaction_of_another_prefix_is_not_followed() -> None:
    """Bug: a foreign record made the driver commit a transaction of another application."""
    bench = CoordinatorBench()
    stranger = bench.raw.begin("payments/0")
    bench.raw.write(stranger, PLACE, "a row")
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, "P")
    own = OpenTransaction.of("P/driver", cluster.init_producer_id("P/driver", None), 2)
    cluster.write_decision(own, Decision(4, "q", 0, 1, 1, (TaskTransaction(stranger, 0, 1),)), 0)
    cluster.end([own], committed=True)
    with pytest.raises(
        ProtocolError, match=r"__spark_kafka_sink_decisions-\d+, offset 0, 'P': .* of 'P'.*'payments/0'"
    ):
        ExactlyOnceDriver("P", cluster, lambda: 0).begin()
    assert bench.state("payments/0") == "Ongoing"
