"""Transactions in unexpected states: the driver ends some of them, and counts some as committed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import PLACE, CoordinatorBench
from support.driver_steps import CONFIG, driver_of, marked_task, refused_to_task_0, task_outcome
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.transaction_coordinator import MAX_EPOCH

from spark_kafka_sink.admin.transaction_values import TransactionDescription, TransactionState
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
    SslAuthenticationError,
)
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import TransactionLostError
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver

each_version = pytest.mark.parametrize("version", [2, 1])


@pytest.fixture
def bench() -> CoordinatorBench:
    return CoordinatorBench()


@pytest.fixture
def driver(bench: CoordinatorBench) -> ExactlyOnceDriver:
    return driver_of(bench, "P")


# ---- the last decision -----------------------------------------------------------------------------------------------


def test_begin_without_known_decision_reads_it(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    """A driver that assumed that there is none would write a batch again."""
    next_ = driver.commit([task_outcome(bench, driver.begin())]).driver
    assert next_ is not None
    assert driver.begin(next_.producer).last_batch_id == 4


def test_next_batch_start_names_the_last_decision(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    """By it a driver knows a repeated batch, and a query that does not own the prefix."""
    committed = driver.commit([replace(task_outcome(bench, driver.begin()), query_id="another")])
    assert not committed.was_skipped
    batch_start = driver.begin()
    assert (batch_start.last_batch_id, batch_start.last_query_id, batch_start.last_rows) == (4, "another", 1)


def test_begin_with_known_decision_does_not_read_it(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    committed = driver.commit([task_outcome(bench, driver.begin())])
    assert committed.driver is not None
    bench.cluster.requests.clear()
    assert driver.begin(committed.driver.producer, committed.decision).last_batch_id == 4
    assert bench.asked(ApiKey.FETCH) == []


# ---- batches that are not decided ------------------------------------------------------------------------------------


def test_task_with_forgotten_transaction_is_not_decided(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    outcome = task_outcome(bench, driver.begin())
    del bench.cluster.transactions.transactions["P/0"]
    with pytest.raises(IllegalStateError, match=r"Batch 4 is not decided: .* of partition 0 is unknown\. "):
        driver.commit([outcome])
    assert driver.begin().last_batch_id is None


def test_driver_forgotten_by_its_coordinator_decides_nothing(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgotten(self: KafkaDriverCluster, *given: Any) -> None:
        write(self, *given)
        del bench.cluster.transactions.transactions["P/driver"]

    write = KafkaDriverCluster.write_decision
    outcome = task_outcome(bench, driver.begin())
    monkeypatch.setattr(KafkaDriverCluster, "write_decision", forgotten)
    with pytest.raises(ProducerFencedError, match="batch 4 is not decided here"):
        driver.commit([outcome])
    assert bench.state("P/0") == "Ongoing"


@each_version
def test_driver_with_deciding_successor_ends_nothing(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken_over(self: KafkaDriverCluster, *given: Any) -> None:
        write(self, *given)
        bench.raw.write(driver_of(bench, "P").begin().driver, PLACE, "another decision")
        bench.cluster.requests.clear()

    bench = CoordinatorBench(version=version)
    driver = driver_of(bench, "P")
    write = KafkaDriverCluster.write_decision
    outcome = task_outcome(bench, driver.begin())
    monkeypatch.setattr(KafkaDriverCluster, "write_decision", taken_over)
    with pytest.raises(ProducerFencedError, match=r"Another driver runs.*batch 4 is not decided here"):
        driver.commit([outcome])
    assert bench.asked(ApiKey.END_TXN) == []


# ---- decided batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize(
    "error_code",
    [ErrorCode.invalid_txn_state, ErrorCode.invalid_producer_id_mapping, ErrorCode.producer_fenced],
    ids=["another state", "forgotten", "another epoch"],
)
def test_late_commit_counts_if_marker_was_committed(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, error_code: int, is_marked: bool
) -> None:
    outcome = task_outcome(bench, driver.begin())
    assert outcome.written is not None
    if is_marked:
        marking = bench.raw.begin("P/0 by another name")
        bench.raw.mark(marking, "P/0", outcome.batch_start.place, 5, outcome.written.marker_text)
        bench.commit(marking)
    bench.cluster.on(ApiKey.END_TXN, refused_to_task_0(error_code), times=None)
    if is_marked:
        assert driver.commit([outcome]).decision is not None
    else:
        text = (
            r"rows may be missing in Kafka, 1 of 1 .*deleted with the consumer groups .* write by hand what is missing"
        )
        with pytest.raises(TransactionLostError, match=text):
            driver.commit([outcome])


@pytest.mark.parametrize("error_code", [ErrorCode.invalid_txn_state, ErrorCode.producer_fenced])
def test_coordinator_that_was_replaced_does_not_make_a_decided_batch_lost(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, error_code: int
) -> None:
    """Bug: a coordinator that was cut off refused the commit by an older epoch, and knew no marker. The error said that
    the rows are gone and to write them by hand, and the next start committed them.
    """
    driver.commit([marked_task(bench, driver.begin(), batch_id=0, value="a")])
    outcome = marked_task(bench, driver.begin(), batch_id=1, value="b")
    asked = iter([True])

    def older(values: dict[str, Any]) -> dict[str, Any]:
        states = [
            each | {"producer_epoch": each["producer_epoch"] - 1, "transaction_state": "CompleteCommit"}
            if each["transactional_id"] == "P/0" and next(asked, False)
            else each
            for each in values["transaction_states"]
        ]
        return values | {"transaction_states": states}

    def refuse(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        is_task = exchange.request.transactional_id == "P/0"
        if not is_task or not next(refused, False):
            return proceed()
        bench.cluster.on(ApiKey.DESCRIBE_TRANSACTIONS, faults.change(older), times=None)
        return faults.fail_with(error_code)(cluster, exchange, proceed)

    refused = iter([True])
    bench.cluster.on(ApiKey.END_TXN, refuse, times=None)
    assert driver.commit([outcome]).decision is not None
    assert (next(refused, None), next(asked, None)) == (None, None)
    assert bench.values() == ["a", "b"]


def test_loss_to_an_operators_abort_names_that_cause(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    """Bug: the error named only a timeout and expired markers."""
    outcome = task_outcome(bench, driver.begin())
    bench.cluster.on(ApiKey.END_TXN, refused_to_task_0(ErrorCode.producer_fenced), times=None)
    with pytest.raises(TransactionLostError, match="or an operator or a late task aborted them"):
        driver.commit([outcome])


@pytest.mark.parametrize(("topic", "flag"), [("mine", " --decision-topic=mine"), (CONFIG.decision_topic, "")])
def test_commands_in_errors_name_another_decision_topic(bench: CoordinatorBench, topic: str, flag: str) -> None:
    """Bug: the printed commands read the default topic, found no decision, and aborted a decided batch."""
    cluster = KafkaDriverCluster(bench.coordinator, replace(CONFIG, decision_topic=topic), "P")
    driver = ExactlyOnceDriver("P", cluster, lambda: 0)
    outcome = task_outcome(bench, driver.begin())
    bench.cluster.on(ApiKey.END_TXN, refused_to_task_0(ErrorCode.invalid_producer_id_mapping), times=None)
    typed = f"transactions {{}} --prefix=P{flag} --bootstrap-servers HOST:PORT. "
    with pytest.raises(TransactionLostError, match=re.escape(typed.format("accept"))):
        driver.commit([outcome])
    batch_start = replace(outcome.batch_start, last_batch_id=4, last_query_id="another")
    with pytest.raises(IllegalStateError, match=re.escape(typed.format("forget").rstrip())):
        batch_start.is_written_already(5, "q")


@pytest.mark.parametrize("what", ["markers", "describe"])
@pytest.mark.parametrize("kind", [KafkaTimeoutError, SslAuthenticationError])
def test_unreadable_markers_error_says_batch_is_decided(
    bench: CoordinatorBench,
    driver: ExactlyOnceDriver,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[KafkaError],
    what: str,
) -> None:
    """Bug: the error was that of one request. It did not say that the rows count, nor until when they must be
    committed.
    """
    outcome = task_outcome(bench, driver.begin())
    bench.cluster.on(ApiKey.END_TXN, refused_to_task_0(ErrorCode.invalid_producer_id_mapping), times=None)
    ask = getattr(KafkaDriverCluster, what)
    asked = []

    def in_vain(*given: Any, **named: Any) -> Any:
        asked.append(given[1])
        if what == "markers" or asked.count(["P/driver"]) == 2:  # the first time before any task is committed
            raise kind("P/0 cannot be asked.")
        return ask(*given, **named)

    monkeypatch.setattr(KafkaDriverCluster, what, in_vain)
    text = r"^Batch 4 of P is decided, and its commit did not end: P/0 cannot be asked\. It is finished when .* started"
    with pytest.raises(kind, match=text) as caught:
        driver.commit([outcome])
    assert str(caught.value.__cause__) == "P/0 cannot be asked."


def test_start_with_failed_note_says_batch_is_committed(
    bench: CoordinatorBench, driver: ExactlyOnceDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = task_outcome(bench, driver.begin())
    with monkeypatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, "finish", Mock(side_effect=KafkaTimeoutError("P/0 is not there.")))
        with pytest.raises(KafkaTimeoutError):
            driver.commit([outcome])
    monkeypatch.setattr(KafkaDriverCluster, "write_decision", Mock(side_effect=KafkaTimeoutError("no leader")))
    with pytest.raises(KafkaError, match=r"Batch 4 of P is committed: .* must not be written again\..* no leader"):
        driver.begin()
    assert bench.state("P/0") == "CompleteCommit"


# ---- aborts ----------------------------------------------------------------------------------------------------------


def test_task_without_rows_is_fenced_by_next_driver(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    late = bench.raw.begin("P/0")
    driver.begin()
    with pytest.raises(KafkaError):
        bench.raw.write(late, PLACE, "late")
    assert bench.state("P/0") == "CompleteAbort"


@each_version
def test_abort_ignores_tasks_without_rows(version: int) -> None:
    bench = CoordinatorBench(version=version)
    driver = driver_of(bench, "P")
    outcome = task_outcome(bench, driver.begin())
    empty = replace(outcome, partition=1, rows=0, written=None)
    assert driver.abort(outcome.batch_start, [empty, outcome])
    assert bench.state("P/0") == "CompleteAbort"


@each_version
def test_abort_after_decision_changes_nothing(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CoordinatorBench(version=version)
    driver = driver_of(bench, "P")
    outcome = task_outcome(bench, driver.begin())
    with monkeypatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, "finish", Mock(side_effect=KafkaTimeoutError("P/0 is not there.")))
        with pytest.raises(KafkaTimeoutError):
            driver.commit([outcome])
    epoch = bench.cluster.transactions.transactions["P/driver"].epoch
    assert not driver.abort(outcome.batch_start, [outcome])
    assert bench.cluster.transactions.transactions["P/driver"].epoch == epoch
    assert bench.state("P/0") == "Ongoing"
    assert driver.begin().last_batch_id == 4
    assert bench.state("P/0") == "CompleteCommit"


def test_abort_of_only_the_note_returns_false(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under version 1 the note is written in the epoch of the decision."""
    bench = CoordinatorBench(version=1)
    driver = driver_of(bench, "P")
    outcome = task_outcome(bench, driver.begin())
    write = KafkaDriverCluster.write_decision

    def and_stop(self: KafkaDriverCluster, *given: Any) -> int:
        offset = write(self, *given)
        if given[1].is_finished:
            raise KafkaTimeoutError("stopped")
        return offset

    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "write_decision", and_stop)
        with pytest.raises(KafkaTimeoutError, match="is committed"):
            driver.commit([outcome])
    assert not driver.abort(outcome.batch_start, [outcome])
    assert driver.begin().last_batch_id == 4


def test_driver_fenced_while_aborting_aborts_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = CoordinatorBench(version=1)
    driver = driver_of(bench, "P")
    outcome = task_outcome(bench, driver.begin())
    describe = KafkaDriverCluster.describe

    def be_taken_over(*arguments: Any) -> Any:
        monkeypatch.undo()
        driver_of(bench, "P").begin()
        return describe(*arguments)

    monkeypatch.setattr(KafkaDriverCluster, "describe", be_taken_over)
    assert not driver.abort(outcome.batch_start, [outcome])


def test_abort_with_last_epoch_ends_open_transactions() -> None:
    """Under version 1 the driver calls InitProducerId before it reads, and then has a different producer id."""
    bench = CoordinatorBench(version=1)
    driver = driver_of(bench, "P")
    first = driver.begin().driver
    bench.cluster.transactions.transactions["P/driver"].epoch = MAX_EPOCH - 1
    batch_start = driver.begin()
    assert (batch_start.driver.producer_id, batch_start.driver.producer_epoch) == (first.producer_id, MAX_EPOCH)
    task_outcome(bench, batch_start)
    assert driver.abort(batch_start, [])
    assert bench.cluster.transactions.transactions["P/driver"].producer_id != first.producer_id
    assert bench.state("P/0") == "CompleteAbort"


def test_refused_abort_is_requested_only_once(bench: CoordinatorBench, driver: ExactlyOnceDriver) -> None:
    outcome = task_outcome(bench, driver.begin())
    bench.cluster.on(ApiKey.END_TXN, refused_to_task_0(ErrorCode.transactional_id_authorization_failed), times=None)
    bench.cluster.requests.clear()
    assert not driver.abort(outcome.batch_start, [outcome])
    asked = [exchange.request.transactional_id for exchange in bench.asked(ApiKey.END_TXN)]
    assert asked == ["P/driver", "P/0"]


# ---- logs ------------------------------------------------------------------------------------------------------------


def test_finished_transactions_listed_as_empty_are_not_logged(
    bench: CoordinatorBench,
    driver: ExactlyOnceDriver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver aborts them anyway: a transaction that has begun and has no partition yet looks the same."""
    batch_start = driver.begin()
    left = bench.raw.begin("P/7", timeout_ms=60_000)
    found = TransactionDescription(
        "P/7", TransactionState.EMPTY, left.producer_id, left.producer_epoch, 60_000, None, frozenset()
    )
    described = KafkaDriverCluster.describe

    def describe(
        cluster: KafkaDriverCluster, transactional_ids: Iterable[str], _given: object = None, **_named: object
    ) -> dict[str, TransactionDescription | None]:
        return {name: found if name == "P/7" else described(cluster, [name])[name] for name in transactional_ids}

    monkeypatch.setattr(KafkaDriverCluster, "list_ids", lambda cluster, states: ["P/7"])
    monkeypatch.setattr(KafkaDriverCluster, "describe", describe)
    with caplog.at_level(logging.INFO):
        driver.commit([task_outcome(bench, batch_start)])
        assert "open transactions" not in caplog.text
        found = found._replace(state=TransactionState.ONGOING)
        driver.begin()
    assert "P: aborting 1 open transactions" in caplog.text
