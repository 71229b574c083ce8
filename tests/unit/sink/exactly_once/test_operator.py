"""`python -m spark_kafka_sink.transactions` and the driver's cluster, on scripted nodes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import CoordinatorBench
from support.operator_bench import CONFIG, PREFIX, WALL_MS, OperatorBench, other_topic
from support.scripted_broker import faults
from support.scripted_broker.cluster import NO_LEADER, ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange

from spark_kafka_sink.admin.transaction_values import TransactionState
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    InvalidProducerEpochError,
    InvalidTransactionTimeoutError,
    KafkaTimeoutError,
    ProducerFencedError,
    RecordTooLargeError,
    SslAuthenticationError,
    TopicAuthorizationError,
    TransactionalIdAuthorizationError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module
from spark_kafka_sink.sink.exactly_once import operator
from spark_kafka_sink.sink.exactly_once.advice import operator_command
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchChangedError,
    Decision,
    FirstUse,
    TaskOutcome,
    TransactionLostError,
    first_use_key,
    task_id,
)
from spark_kafka_sink.sink.exactly_once.operator import Operator, _parser, main
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver
from spark_kafka_sink.sink.exactly_once.write_names import pool_name
from spark_kafka_sink.sink.options import SinkConfig


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest) -> OperatorBench:
    return OperatorBench(request.param)


def test_a_batch_is_decided_committed_and_noted(bench: OperatorBench) -> None:
    committed = bench.driver.commit(bench.batch(0))
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]
    last = bench.cluster_of_driver.last_decision()
    assert last is not None
    assert (last.batch_id, last.is_finished, last.rows, last.tasks) == (0, True, 2, ())
    assert committed.decision is not None
    bench.operator.show(None)
    said = bench.said()
    assert "orders: batch 0 of query q, 2 rows, decided 2023-11-14 22:13:20+00:00: committed.\n" in said
    assert "No decision" not in said


def test_open_transaction_is_shown_with_age_and_timeout(bench: OperatorBench) -> None:
    """The operator sees by these which transaction is stuck, and how long it can still be finished."""
    bench.raw.write(bench.raw.begin("orders/0", timeout_ms=900_000), TopicPartition("t", 0), "row")
    started_ms = bench.rig.now_ms
    Operator(bench.coordinator, CONFIG, bench.out, lambda: started_ms + 1_123_400).show(PREFIX)
    assert re.search(
        r"^transactional id +state +age +timeout\norders/0 +Ongoing +1,123 s +900 s$", bench.said(), re.MULTILINE
    )


@pytest.mark.parametrize("committed", [True, False])
def test_ending_transaction_is_shown_as_open(bench: OperatorBench, committed: bool) -> None:
    open_ = bench.raw.begin("orders/0")
    bench.raw.write(open_, TopicPartition("t", 0), "row")
    bench.cluster.transactions.marker_delay_ms = 1_000_000
    bench.end([open_], committed=committed)
    bench.operator.show(PREFIX)
    assert re.search(f"^orders/0 +Prepare{'Commit' if committed else 'Abort'} ", bench.said(), re.MULTILINE)


@pytest.mark.parametrize("prefix", [None, PREFIX])
def test_cluster_without_decisions_is_shown_as_empty(bench: OperatorBench, prefix: str | None) -> None:
    options = {"kafka.bootstrap.servers": "h:1", "topic": "t", "delivery.guarantee": "exactly-once"}
    config = SinkConfig.from_options({**options, "decision.topic": "there-is-none"})
    Operator(bench.coordinator, config, bench.out, lambda: WALL_MS).show(prefix)
    of = "" if prefix is None else " of orders"
    assert bench.said() == f"No decision{of} in there-is-none.\nNo transaction is open.\n"


def test_foreign_records_hide_no_decision(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    stranger = bench.raw.begin("stranger")
    bench.raw.write(stranger, bench.cluster_of_driver.place, "a record without a key")
    bench.commit(stranger)
    bench.operator.show(None)
    assert "orders: batch 0 of query q, 2 rows" in bench.said()


def test_accept_without_a_decision_is_refused(bench: OperatorBench) -> None:
    bench.driver.begin()
    with pytest.raises(IllegalStateError, match="No batch of orders is decided"):
        bench.operator.accept(PREFIX)


@pytest.mark.parametrize(
    "arguments", [[], *([name, "--yes"] for name in ("finish", "abort", "accept", "forget", "adopt"))]
)
def test_a_command_and_a_prefix_must_be_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--bootstrap-servers", "h:1"] if arguments else [])
    assert "required: " + ("--prefix" if arguments else "command") in capsys.readouterr().err


def test_a_decided_batch_is_shown_and_finished(bench: OperatorBench) -> None:
    bench.decide(0)
    assert bench.values() == []
    bench.operator.show(PREFIX)
    text = bench.said()
    assert "batch 0 of query q, 2 rows, decided 2023-11-14 22:13:20+00:00: its 2 transactions are not known" in text
    assert "orders/0" in text
    assert "Ongoing" in text
    with pytest.raises(IllegalStateError, match="decided, and can only be finished"):
        bench.operator.abort(PREFIX)
    with pytest.raises(IllegalStateError, match="can only be finished"):
        bench.operator.forget(PREFIX)
    bench.operator.finish(PREFIX)
    assert bench.said() == "Batch 0 is committed; nothing of orders is open.\n"
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]
    bench.operator.show(PREFIX)
    assert "No transaction is open." in bench.said()


def test_unreadable_decision_does_not_hide_others(bench: OperatorBench) -> None:
    """Bug: the command showed only the error, also for other prefixes."""
    bench.driver.commit(bench.batch(0))
    other = KafkaDriverCluster(bench.coordinator, CONFIG, "newer")
    driver = bench.raw.begin("newer/driver")
    content = b'{"version":3,"checksum":0}'
    bench.coordinator.writer.write(driver, other.place, b"newer", content, 0, bench.coordinator.timer(1_000))
    other.end([driver], committed=True)
    bench.operator.show(None)
    text = bench.said()
    assert "orders: batch 0 of query q, 2 rows, decided 2023-11-14 22:13:20+00:00: committed.\n" in text
    assert f"newer: {other.place}, offset " in text
    assert "the decision of 'newer' has version 3, and only versions up to 2 are known here" in text
    assert "No transaction is open." in text
    bench.operator.show(PREFIX)
    assert "version 2" not in bench.said()


def test_decisions_behind_an_open_transaction_are_announced(bench: OperatorBench) -> None:
    """Bug: the command showed the decision before it as the last and as committed, while the query went on."""
    batch_start = bench.driver.begin()
    bench.operator.show(PREFIX)
    assert "not shown yet" not in bench.said()
    driver = bench.raw.begin("other/driver")
    end = bench.cluster.log(*batch_start.place).next_offset
    bench.coordinator.writer.write(driver, batch_start.place, b"other", b"{}", 0, bench.coordinator.timer(1_000))
    bench.driver.commit([bench.task(batch_start, 0, 0)])
    hidden = (
        f"{batch_start.place}: what was decided from offset {end} on is not shown yet,"
        " because a transaction is open there.\n"
    )
    for prefix in (None, PREFIX):
        bench.operator.show(prefix)
        assert bench.said().startswith(hidden)
    bench.operator.show("elsewhere")
    assert "not shown yet" not in bench.said()
    bench.end([driver], committed=False)
    bench.operator.show(PREFIX)
    assert bench.said().startswith("orders: batch 0 of query q, 1 rows, ")


@pytest.mark.parametrize("command", ["finish", "abort", "accept", "forget"])
def test_no_command_makes_a_decision_topic_that_is_missing(bench: OperatorBench, command: str) -> None:
    """Bug: without the query's --decision-topic the command created the default topic, found no decision in it, and
    aborted a decided batch.
    """
    bench.decide(0)
    made = len(bench.asked(ApiKey.CREATE_TOPICS))
    operator = Operator(bench.coordinator, other_topic("there-is-none"), bench.out, lambda: WALL_MS)
    with pytest.raises(IllegalStateError, match=r"no topic there-is-none, .*nothing was changed.*--decision-topic"):
        getattr(operator, command)(PREFIX)
    assert len(bench.asked(ApiKey.CREATE_TOPICS)) == made
    assert [bench.state(f"orders/{number}") for number in range(2)] == ["Ongoing"] * 2
    bench.operator.finish(PREFIX)
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]


def test_finish_is_refused_if_topic_has_no_decision(bench: OperatorBench) -> None:
    """Bug: the command aborted rows of a decided batch and called the batch undecided, because the decision was in
    another topic.
    """
    bench.decide(0)
    others = other_topic("others")
    KafkaDriverCluster(bench.coordinator, others, "another prefix")
    operator = Operator(bench.coordinator, others, bench.out, lambda: WALL_MS)
    text = "No decision of orders is in others, and 2 of its transactions are open.*with --decision-topic.*Else abort"
    with pytest.raises(IllegalStateError, match=text):
        operator.finish(PREFIX)
    assert [bench.state(f"orders/{number}") for number in range(2)] == ["Ongoing"] * 2
    with pytest.raises(IllegalStateError, match="is decided in others: there is nothing to accept"):
        operator.accept(PREFIX)
    bench.operator.finish(PREFIX)
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]


def test_finish_does_not_wait_for_a_dead_driver(bench: OperatorBench) -> None:
    """Otherwise it would wait until that driver's transaction timed out, and then refuse anyway."""
    batch_start = bench.batch(0)[0].batch_start
    bench.raw.write(batch_start.driver, batch_start.place, "half a decision")
    started_ms = bench.rig.now_ms
    with pytest.raises(IllegalStateError, match="No decision of orders"):
        bench.operator.finish(PREFIX)
    assert bench.rig.now_ms - started_ms < 10_000


def test_abort_does_not_wait_for_a_dead_driver(bench: OperatorBench) -> None:
    """Bug: it read the last decision before it ended that of the dead driver, which took a minute."""
    batch_start = bench.batch(0)[0].batch_start
    bench.raw.write(batch_start.driver, batch_start.place, "half a decision")
    started_ms = bench.rig.now_ms
    bench.operator.abort(PREFIX)
    assert bench.rig.now_ms - started_ms < 10_000
    assert bench.values() == []
    assert "Aborted (2): orders/0, orders/1." in bench.said()


def test_finish_accepts_a_prefix_without_decision_or_open_transaction(bench: OperatorBench) -> None:
    bench.driver.begin()
    bench.operator.finish(PREFIX)
    assert bench.said() == "Nothing was decided; nothing of orders is open.\n"


def test_an_undecided_batch_is_aborted(bench: OperatorBench) -> None:
    bench.batch(0)
    bench.operator.abort(PREFIX)
    assert bench.said() == "Nothing was decided; nothing of orders is open.\nAborted (2): orders/0, orders/1.\n"
    assert [bench.state(f"orders/{number}") for number in range(2)] == ["CompleteAbort"] * 2
    assert bench.values() == []


def test_transaction_that_could_not_be_aborted_is_reported_open(bench: OperatorBench) -> None:
    bench.batch(0)
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(TransactionalIdAuthorizationError))
    bench.operator.abort(PREFIX)
    left = r"Nothing was decided; open until they time out \(1\): orders/[01]\.\nAborted \(1\): orders/[01]\.\n"
    assert re.fullmatch(left, bench.said())
    bench.operator.abort(PREFIX)
    ended = r"Nothing was decided; nothing of orders is open\.\nAborted \(1\): orders/[01]\.\n"
    assert re.fullmatch(ended, bench.said())


def test_finish_leaves_other_prefixes_unchanged(bench: OperatorBench) -> None:
    (other,) = bench.open("orders/eu/0")
    (longer,) = bench.open("orders/0x")
    bench.batch(0)
    bench.operator.abort(PREFIX)
    assert [bench.state(each.transactional_id) for each in (other, longer)] == ["Ongoing"] * 2


def test_lost_batch_is_an_error_until_accepted(bench: OperatorBench) -> None:
    outcomes = bench.decide(0)
    lost = outcomes[1].written
    assert lost is not None
    bench.end([lost.transaction], committed=False)  # as its timeout would
    for _ in range(2):
        with pytest.raises(TransactionLostError, match=r"Batch 0 .*'orders'.*1 of its 2 .*partition 1: 1 rows.*accept"):
            bench.driver.begin()
    with pytest.raises(IllegalStateError):
        bench.operator.forget(PREFIX)
    bench.operator.accept(PREFIX)
    assert bench.said().startswith("Batch 0 is closed: 1 of 2 transactions are known to be committed.")
    bench.operator.show(PREFIX)
    assert ": closed by accept. The query goes on after it, whatever its rows are then.\n" in bench.said()
    assert bench.driver.begin().last_batch_id == 0
    assert bench.values() == ["row 0.0"]
    assert bench.driver.begin().last_is_accepted


def test_changed_batch_stops_the_query_until_it_is_accepted(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    changed = TaskOutcome(bench.driver.begin(), 0, "q", 0, 2, None, was_skipped=True, fingerprint=1)
    with pytest.raises(BatchChangedError, match=r"content differs.*accept --prefix=orders"):
        bench.driver.commit([changed])
    bench.operator.accept(PREFIX)
    assert bench.said().startswith("Batch 0 stays as it was committed. The query goes on after it")
    assert bench.driver.commit([replace(changed, batch_start=bench.driver.begin())]).was_skipped
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]


def test_changed_batch_is_written_beside_the_first_one_after_forget(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    bench.operator.forget(PREFIX)
    bench.driver.commit(bench.batch(0))
    assert sorted(bench.values()) == ["row 0.0", "row 0.0", "row 0.1", "row 0.1"]


@pytest.mark.parametrize(
    "error_code",
    [ErrorCode.coordinator_not_available, ErrorCode.transactional_id_authorization_failed],
    ids=["away", "not authorized"],
)
def test_accept_is_refused_while_rows_may_be_committed(bench: OperatorBench, error_code: int) -> None:
    bench.decide(0)

    def refuse(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        if exchange.request.transactional_id != "orders/1":
            return proceed()
        return faults.fail_with(error_code)(cluster, exchange, proceed)

    bench.cluster.transactions.transactions["orders/1"].timeout_ms = 900_000
    script = bench.cluster.on(ApiKey.END_TXN, refuse, times=None)
    with pytest.raises(IllegalStateError, match=r"Batch 0 stays as it is.*'orders/1'.*Accept it when"):
        bench.operator.accept(PREFIX)
    bench.cluster.scripts.remove(script)
    bench.operator.accept(PREFIX)
    assert bench.said().startswith("Batch 0 is closed: 2 of 2 transactions are known to be committed.")
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]
    bench.operator.show(PREFIX)
    assert "22:13:20+00:00: committed.\n" in bench.said()


def test_accept_is_refused_while_a_coordinator_refuses_logins(bench: OperatorBench) -> None:
    """Bug: accept closed the batch, and the next start aborted transactions that could have been committed."""
    bench.cluster.coordinators |= {"orders/0": 2, "orders/1": 2}
    bench.decide(0)
    bench.rig.network.refused_logins[2] = SslAuthenticationError("Node 2's certificate has expired.")
    bench.client.disconnect_async(bench.rig.node(2))
    bench.client.poll(bench.timer(0))
    bench.rig.clock.sleep_ms(2_000)
    with pytest.raises(IllegalStateError, match=r"Batch 0 stays as it is.*certificate has expired"):
        bench.operator.accept(PREFIX)
    bench.rig.network.refused_logins.clear()
    bench.rig.clock.sleep_ms(2_000)
    bench.operator.finish(PREFIX)
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]


def test_a_forgotten_prefix_is_free_for_another_query(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(5))
    assert bench.driver.begin().last_batch_id == 5
    bench.operator.forget(PREFIX)
    assert bench.said().endswith("orders is free.\n")
    batch_start = bench.driver.begin()
    assert batch_start.last_batch_id is None
    assert not batch_start.is_written_already(0, "another query")
    bench.operator.show(PREFIX)
    assert "No decision of orders in __spark_kafka_sink_decisions." in bench.said()


def test_batch_decided_during_forget_is_not_lost(bench: OperatorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.driver.commit(bench.batch(5))
    take_over = bench.operator._fenced

    def too_late(prefix: str) -> OpenTransaction:
        bench.decide(6)  # by a running query, which dies afterwards
        return take_over(prefix)

    monkeypatch.setattr(bench.operator, "_fenced", too_late)
    with pytest.raises(IllegalStateError, match="Batch 6 of orders is decided"):
        bench.operator.forget(PREFIX)
    assert bench.driver.begin().last_batch_id == 6
    assert sorted(bench.values()) == ["row 5.0", "row 5.1", "row 6.0", "row 6.1"]


@pytest.mark.parametrize("command", ["forget", "adopt"])
def test_command_that_is_refused_changes_nothing(bench: OperatorBench, command: str) -> None:
    """Bug: forget aborted rows that were decided in another topic. A refused adopt had made the topic, so that other
    commands took a misspelt name for the right one.
    """
    bench.decide(0)
    others = other_topic("others")
    if command == "forget":
        KafkaDriverCluster(bench.coordinator, others, "another prefix")
    topics = set(bench.cluster.topics)
    with pytest.raises(IllegalStateError, match=r"2 (of its )?transactions .*are open.* another"):
        getattr(Operator(bench.coordinator, others, bench.out, lambda: WALL_MS), command)(PREFIX)
    assert set(bench.cluster.topics) == topics
    bench.operator.finish(PREFIX)
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]


def test_transactions_without_a_coordinator_are_not_called_ended(bench: OperatorBench) -> None:
    """Bug: no broker lists what is in a partition of __transaction_state without a leader. The commands said that
    nothing was open, while readers waited for it.
    """
    bench.driver.commit(bench.batch(0))
    for command in ("show", "finish", "abort"):
        getattr(bench.operator, command)(PREFIX)
        assert "__transaction_state" not in bench.said()
    bench.cluster.on(ApiKey.FIND_COORDINATOR, without_leader(r"orders/\d*7"), times=None)
    bench.operator.show(None)
    away = "orders/7, orders/17, orders/27, orders/37, orders/47, orders/57, orders/67, orders/77, orders/87, orders/97"
    away += " and 90 more"
    said = bench.said()
    assert said.endswith(
        f"Transactions of {away} are not shown: their partitions of __transaction_state have no leader.\n"
        "No other transaction is open.\n"
    )
    for command in ("finish", "abort"):
        getattr(bench.operator, command)(PREFIX)
        assert bench.said().startswith(
            f"Batch 0 is committed; nothing else of orders is open.\nWhat is open of {away} is not known: "
        )
    with pytest.raises(
        IllegalStateError, match=r"not known whether .* are open\. Its ids may be orders/7, .* have no leader"
    ):
        Operator(bench.coordinator, other_topic("others"), bench.out, lambda: WALL_MS).adopt(PREFIX)
    assert "others" not in bench.cluster.topics


def test_coordinator_that_is_elected_meanwhile_is_not_called_away(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    bench.cluster.on(ApiKey.FIND_COORDINATOR, without_leader(r"orders/\d+"), times=3)
    bench.operator.finish(PREFIX)
    assert bench.said() == "Batch 0 is committed; nothing of orders is open.\n"


def test_what_is_unseen_needs_no_right_on_the_transactions_topic(bench: OperatorBench) -> None:
    """Bug: who may not describe it, as nearly all may not, was told that nothing is open; and `adopt` did not find the
    decisions of the earlier topic, so that a batch could be written twice.
    """
    bench.driver.commit(bench.batch(0))
    asked = len(bench.asked(ApiKey.METADATA))
    bench.operator.finish(PREFIX)
    topics = [topic.name for each in bench.asked(ApiKey.METADATA)[asked:] for topic in each.request.topics or ()]
    assert "__transaction_state" not in topics
    bench.cluster.on(
        ApiKey.FIND_COORDINATOR,
        without_leader(r"orders/\d+", ErrorCode.transactional_id_authorization_failed),
        times=None,
    )
    bench.operator.show(None)
    assert "no leader" not in bench.said()


def without_leader(ids: str, code: int = ErrorCode.coordinator_not_available) -> faults.Hook:
    """FindCoordinator for ids whose partition of __transaction_state has no leader."""

    def away(coordinator: dict[str, Any]) -> dict[str, Any]:
        is_away = re.fullmatch(ids, coordinator["key"]) is not None
        return coordinator | ({"error_code": code, "node_id": -1, "host": "", "port": -1} if is_away else {})

    return faults.change(lambda values: values | {"coordinators": [*map(away, values["coordinators"])]})


def another_coordinator(ids: str) -> faults.Hook:
    """FindCoordinator of a broker that is cut off: it still names itself."""

    def itself(coordinator: dict[str, Any]) -> dict[str, Any]:
        is_own = re.fullmatch(ids, coordinator["key"]) is not None
        return coordinator | ({"node_id": 2, "host": "broker-2", "port": 9092} if is_own else {})

    return faults.change(lambda values: values | {"coordinators": [*map(itself, values["coordinators"])]})


def test_commands_that_would_believe_a_broker_that_is_cut_off_are_refused(bench: OperatorBench) -> None:
    """Bug: it knew no markers, so that `adopt` did not find the earlier topic, and a batch could be written twice; and
    `accept` took a transaction for lost that was open at the next coordinator.
    """
    bench.decide(0)
    bench.cluster.coordinators["orders/0"] = 0
    bench.cluster.on(ApiKey.FIND_COORDINATOR, another_coordinator("orders/0"), times=None, node_id=2)
    moved = Operator(bench.coordinator, other_topic("others"), bench.out, lambda: WALL_MS)
    text = r"Brokers name different coordinators of orders/0: .* cut off .* No decision and no transaction was changed"
    began_ms = bench.rig.now_ms
    with pytest.raises(IllegalStateError, match=text):
        bench.operator.accept(PREFIX)
    assert bench.rig.now_ms - began_ms <= 11_000
    bench.cluster.scripts.clear()
    bench.operator.accept(PREFIX)
    bench.cluster.on(ApiKey.FIND_COORDINATOR, another_coordinator("orders/0"), times=None, node_id=2)
    with pytest.raises(IllegalStateError, match=text):
        moved.adopt(PREFIX)
    bench.cluster.scripts.clear()
    bench.cluster.on(ApiKey.FIND_COORDINATOR, another_coordinator("orders/0"), times=2, node_id=2)  # for a moment
    moved.adopt(PREFIX)
    assert f"decision.topic={CONFIG.decision_topic} is refused for orders from now on" in bench.said()


def test_open_transactions_that_no_broker_lists_are_found(bench: OperatorBench) -> None:
    """Bug: the address of a broker led to another one, which lists only its own transactions. `abort` said that nothing
    is open.
    """
    bench.driver.commit(bench.batch(0))
    bench.batch(1)
    bench.cluster.on(ApiKey.LIST_TRANSACTIONS, listing_nothing, times=None)
    bench.operator.show(PREFIX)
    assert re.search("^orders/0 +Ongoing", bench.said(), re.MULTILINE)
    bench.operator.abort(PREFIX)
    assert "open until they time out (2): orders/0, orders/1" in bench.said()
    with pytest.raises(IllegalStateError, match="2 transactions of orders are open, and may be decided in another"):
        Operator(bench.coordinator, other_topic("others"), bench.out, lambda: WALL_MS).adopt(PREFIX)


def test_markers_of_tasks_that_no_broker_lists_are_found(bench: OperatorBench) -> None:
    """Bug: `adopt` found no earlier topic, and a batch was written twice."""
    bench.driver.commit(bench.batch(0))
    bench.cluster.on(ApiKey.LIST_TRANSACTIONS, listing_nothing, times=None)
    Operator(bench.coordinator, other_topic("others"), bench.out, lambda: WALL_MS).adopt(PREFIX)
    assert f"decision.topic={CONFIG.decision_topic} is refused for orders from now on" in bench.said()


def listing_nothing(cluster: ScriptedCluster, exchange: Exchange, proceed: Callable[[], Answer]) -> Answer:
    return Answer({"throttle_time": 0, "error_code": 0, "unknown_state_filters": [], "transaction_states": []})


def test_forget_aborts_open_transactions_first(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    bench.batch(1)
    bench.operator.forget(PREFIX)
    assert (bench.state("orders/0"), bench.state("orders/1")) == ("CompleteAbort", "CompleteAbort")


def test_forget_fails_if_decision_cannot_be_removed(bench: OperatorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.driver.commit(bench.batch(0))
    take_over = bench.operator._fenced

    def fenced_since(prefix: str) -> OpenTransaction:
        driver = take_over(prefix)
        bench.cluster.on(ApiKey.END_TXN, faults.fail_with(ProducerFencedError), times=None)
        return driver

    monkeypatch.setattr(bench.operator, "_fenced", fenced_since)
    with pytest.raises(ProducerFencedError):
        bench.operator.forget(PREFIX)
    assert "is free" not in bench.said()


def test_accept_fences_drivers_before_reading_the_batch(bench: OperatorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.decide(5)
    take_over = bench.operator._fenced

    def too_late(prefix: str) -> OpenTransaction:
        bench.decide(6)  # by a running query, which dies afterwards
        return take_over(prefix)

    monkeypatch.setattr(bench.operator, "_fenced", too_late)
    bench.operator.accept(PREFIX)
    assert "Batch 6 is closed: 2 of 2" in bench.said()


@pytest.mark.parametrize("command", ["finish", "accept"])
def test_operator_finds_a_decision_without_its_marker(
    bench: OperatorBench, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Bug: the command took the driver's next epoch first. Then no broker knew any more that the decision was committed
    (KAFKA-20734), and the command waited for its end in vain.
    """

    def end_without_leader(self: KafkaDriverCluster, *given: Any, **named: Any) -> Any:
        bench.cluster.move_leader(*self.place, NO_LEADER)
        end(self, *given, **named)
        bench.cluster.move_leader(*self.place, 0)
        raise KafkaTimeoutError("The driver is gone.")

    bench.cluster.transactions.leaves_out_markers = True
    outcomes = bench.batch(5)
    end = KafkaDriverCluster.end
    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "end", end_without_leader)
        with pytest.raises(KafkaTimeoutError):
            bench.driver.commit(outcomes)
    getattr(bench.operator, command)(PREFIX)
    assert "Batch 5 is c" in bench.said()
    assert sorted(bench.values()) == ["row 5.0", "row 5.1"]


def decide_and_lose_one(bench: OperatorBench) -> None:
    """Decide batch 0. Task 0 is committed while the partition has no leader, and its end marker is left out. The
    transaction of task 1 has timed out.
    """
    bench.cluster.transactions.leaves_out_markers = True
    batch_start = bench.driver.begin()
    outcomes = []
    for partition in range(2):
        at = bench.cluster.log("t", 0).next_offset
        task = bench.task(batch_start, 0, partition)
        outcomes.append(replace(task, offsets={"t": [[0, at, at + 1, 1]]}))
    bench.decide_these(outcomes)
    committed, lost = (each.written.transaction for each in outcomes if each.written is not None)
    bench.end([lost], committed=False)
    bench.cluster.move_leader("t", 0, NO_LEADER)
    bench.commit(committed)


def test_accept_writes_end_markers_that_were_left_out(bench: OperatorBench) -> None:
    """Bug: accept said that a transaction was committed, and a batch that failed later aborted its rows: the end marker
    was left out (KAFKA-20734).
    """
    decide_and_lose_one(bench)
    bench.cluster.move_leader("t", 0, 0)
    bench.operator.accept(PREFIX)
    assert bench.said().startswith("Batch 0 is closed: 1 of 2 transactions are known to be committed.")
    assert bench.values() == ["row 0.0"]
    batch_start = bench.driver.begin()
    bench.driver.abort(batch_start, [bench.task(batch_start, 1, 0)])
    assert bench.values() == ["row 0.0"]


def test_accept_is_refused_while_readers_do_not_see_committed_rows(bench: OperatorBench) -> None:
    decide_and_lose_one(bench)
    with pytest.raises(IllegalStateError, match=r"Batch 0 stays as it is: its rows are committed.*t-0.*accept again"):
        bench.operator.accept(PREFIX)
    bench.cluster.move_leader("t", 0, 0)
    bench.operator.accept(PREFIX)
    assert bench.values() == ["row 0.0"]


def test_list_of_a_prefix_has_only_its_own_transactions() -> None:
    bench = OperatorBench()
    bench.open("a.b/0", "a.b/driver", "axb/1", "a.b/2/3", "a.b/3.x", "a.b/4")
    bench.end([bench.raw.begin("a.b/4")], committed=False)
    bench.operator.show("a.b")
    lines = bench.said().splitlines()
    assert sorted(line.split()[0] for line in lines if "/" in line) == ["a.b/0", "a.b/driver"]


def test_transaction_forgotten_during_list_is_left_out(bench: OperatorBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open("orders/0")
    monkeypatch.setattr(type(bench.coordinator.transactions), "describe_transactions", lambda *_: {"orders/0": None})
    bench.operator.show(PREFIX)
    assert "No transaction is open." in bench.said()


def test_markers_before_forget_do_not_hide_a_loss(bench: OperatorBench) -> None:
    for batch_id in range(3):
        bench.driver.commit(bench.batch(batch_id))
    bench.operator.forget(PREFIX)
    bench.decide(0)
    bench.rig.clock.sleep_ms(16 * 60_000)
    bench.cluster.transactions.advance(bench.rig.clock.now_ms())
    with pytest.raises(TransactionLostError, match=r"Batch 0 .*2 of its 2 transactions are gone"):
        bench.driver.begin()


def test_late_driver_is_fenced_and_reports_no_loss(bench: OperatorBench) -> None:
    outcomes = bench.decide(0)
    decided = bench.cluster_of_driver.last_decision()
    assert decided is not None
    bench.driver.commit(bench.batch(1))  # its markers replace those of batch 0
    with pytest.raises(ProducerFencedError, match="It finishes batch 0, or has done so"):
        bench.driver.finish(outcomes[0].batch_start.driver, decided)
    assert len(bench.values()) == 2 * len(outcomes)


def test_timeout_beyond_cluster_maximum_is_refused_at_start() -> None:
    bench = CoordinatorBench()
    bench.cluster.transactions.max_timeout_ms = 600_000
    driver = ExactlyOnceDriver(PREFIX, KafkaDriverCluster(bench.coordinator, CONFIG, PREFIX), lambda: WALL_MS)
    with pytest.raises(InvalidTransactionTimeoutError, match=r"900000 ms.*transaction\.max\.timeout\.ms: lower"):
        driver.begin()


def test_decision_topic_is_created_compacted_or_refusal_says_how() -> None:
    bench = CoordinatorBench()
    bench.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(TopicAuthorizationError))
    with pytest.raises(
        TopicAuthorizationError, match=r"decision\.topic=__spark_kafka_sink_decisions by hand \(16 part"
    ):
        KafkaDriverCluster(bench.coordinator, CONFIG, PREFIX)
    KafkaDriverCluster(bench.coordinator, CONFIG, PREFIX)
    (topic,) = bench.asked(ApiKey.CREATE_TOPICS)[-1].request.topics
    configs = {config.name: config.value for config in topic.configs}
    assert (topic.num_partitions, configs["cleanup.policy"]) == (16, "compact")
    assert 1 << 20 < int(configs["max.message.bytes"]) < int(configs["segment.bytes"])


def test_too_large_decision_says_what_to_change(bench: OperatorBench) -> None:
    outcomes = bench.batch(4)
    bench.cluster.on(ApiKey.PRODUCE, faults.fail_with(RecordTooLargeError))
    text = r"Batch 4 .*prefix='orders' is not decided.* 2 tasks .*decision\.topic=__.*Raise max\.message\.bytes.*fewer"
    with pytest.raises(RecordTooLargeError, match=text):
        bench.driver.commit(outcomes)
    assert bench.values() == []


def test_commit_fences_a_losing_attempt_without_rows() -> None:
    bench = OperatorBench()
    outcomes = bench.batch(0)
    loser = bench.raw.begin(task_id(PREFIX, 1, 1))
    bench.driver.commit(outcomes)
    with pytest.raises((InvalidProducerEpochError, ProducerFencedError)):
        bench.raw.write(loser, TopicPartition("t", 0), "row 0.1")
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]


def test_batch_write_without_prefix_leaves_no_decision(bench: OperatorBench) -> None:
    cluster = KafkaDriverCluster(bench.coordinator, CONFIG, PREFIX, is_one_off=True)
    driver = ExactlyOnceDriver(PREFIX, cluster, lambda: WALL_MS, is_new=True)
    batch_start = driver.begin()
    driver.commit([bench.task(batch_start, batch_start.next_batch_id, 0)])
    assert bench.values() == ["row 0.0"]
    assert cluster.last_decision() is None


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["finish", "accept"])
def test_finish_of_a_write_without_prefix_leaves_no_decision(command: str) -> None:
    """Bug: no write uses such a prefix again, so its decision stayed in the topic, and in the list, forever."""
    prefix = pool_name(3)
    bench = OperatorBench(prefix=prefix)
    bench.decide(0)
    getattr(bench.operator, command)(prefix)
    assert len(bench.values()) == 2
    bench.operator.show(prefix)
    assert f"No decision of {prefix} in " in bench.said()
    bench.operator.finish(prefix)
    assert "Nothing was decided, or it was finished before; " in bench.said()


def test_nothing_is_changed_without_the_prefix_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "connect", lambda _: pytest.fail("it asked the cluster"))
    out = io.StringIO()
    arguments = ["forget", "--prefix", PREFIX, "--bootstrap-servers", "h:9092", "--decision-topic", "mine"]
    assert main(arguments, out, lambda _: "yes") == 1
    assert (
        "write a batch twice. Stop its query first: a batch under way fails. Its decisions are looked for in mine."
        in (out.getvalue())
    )
    assert out.getvalue().endswith("Nothing was changed.\n")


@pytest.mark.parametrize(
    ("no_answer", "said"),
    [
        (EOFError, "There is no input to read an answer from: --yes goes on without asking.\nNothing was changed.\n"),
        (KeyboardInterrupt, "\nNothing was changed.\n"),
    ],
    ids=["no terminal", "Ctrl-C"],
)
def test_question_without_an_answer_changes_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, no_answer: type[BaseException], said: str
) -> None:
    """Bug: Ctrl-C at the question printed a traceback, which did not say that nothing was changed."""

    def ask(_: str) -> str:
        raise no_answer

    monkeypatch.setattr(operator, "connect", lambda _: pytest.fail("it asked the cluster"))
    out = io.StringIO()
    assert main(["finish", "--prefix", PREFIX, "--bootstrap-servers", "h:9092"], out, ask) == 1
    assert out.getvalue().endswith(said)


@pytest.mark.parametrize("command", ["list", "finish", "abort", "accept", "forget"])
def test_empty_prefix_is_refused_without_a_question(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(operator, "connect", lambda _: pytest.fail("it connects"))
    out = io.StringIO()
    assert main([command, "--prefix", "", "--bootstrap-servers", "h:9092"], out, lambda _: "") == 1
    assert out.getvalue().startswith("ConfigError: transactional.id.prefix='' must have 1 to 200 printable characters")


@pytest.mark.parametrize("command", ["finish", "abort", "forget"])
def test_typed_prefix_or_yes_confirms_the_command(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    bench = OperatorBench()
    bench.driver.commit(bench.batch(0))
    monkeypatch.setattr(operator, "connect", lambda _: bench.coordinator)
    monkeypatch.setattr(bench.coordinator, "close", lambda: None)
    arguments = [command, "--prefix", PREFIX, "--bootstrap-servers", "h:9092"]
    assert main(arguments, io.StringIO(), lambda _: f" {PREFIX} ") == 0
    assert main([*arguments, "--yes"], io.StringIO(), lambda _: pytest.fail("it asked")) == 0


def test_error_of_a_wrong_option_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("# ours\nkafka.no.such=1\ntopic=ignored\n")
    out = io.StringIO()
    assert main(["list", "--properties", str(tmp_path / "p"), "--bootstrap-servers", "h:1"], out) == 1
    assert out.getvalue().startswith("ConfigError: ")
    assert out.getvalue().endswith(f" ({tmp_path / 'p'}, line 2)\n")
    assert out.getvalue().count("\n") == 1


def test_error_of_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    out = io.StringIO()
    assert main(["list", "--properties", str(tmp_path / "none")], out) == 1
    assert (
        out.getvalue() == f"ConfigError: --properties {tmp_path / 'none'} cannot be read: No such file or directory.\n"
    )


def test_error_of_a_file_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes("# größe\n".encode("latin-1"))
    out = io.StringIO()
    assert main(["list", "--properties", str(tmp_path / "p")], out) == 1
    assert out.getvalue().startswith(f"ConfigError: {tmp_path / 'p'} is not UTF-8: ")
    assert out.getvalue().count("\n") == 1


def test_the_querys_file_is_read_as_the_job_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a continued line was cut off without an error. The login had no password, and only one of the servers was
    used.
    """
    (tmp_path / "p").write_text(
        "! ours\nkafka.bootstrap.servers=h1:9093,\\\n  h2:9093\nkafka.security.protocol=SASL_PLAINTEXT\n"
        "kafka.sasl.mechanism=SCRAM-SHA-256\n"
        "kafka.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required \\\n"
        '  username="ada" password="secret-word";\n'
    )
    bench = OperatorBench()
    configs = []
    monkeypatch.setattr(operator, "connect", lambda config: configs.append(config) or bench.coordinator)
    monkeypatch.setattr(bench.coordinator, "close", lambda: None)
    out = io.StringIO()
    assert main(["list", "--properties", str(tmp_path / "p")], out) == 0, out.getvalue()
    (config,) = configs
    assert config.bootstrap_servers == (("h1", 9093), ("h2", 9093))
    assert "secret-word" not in out.getvalue()


def test_malformed_line_of_properties_is_named_by_number(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("kafka.bootstrap.servers=h1:9093\nsecret-word\n")
    out = io.StringIO()
    assert main(["list", "--properties", str(tmp_path / "p")], out) == 1
    assert out.getvalue().startswith(f"ConfigError: {tmp_path / 'p'}: line 2 is not name=value")
    assert "secret-word" not in out.getvalue()


def test_decision_topic_comes_from_file_or_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The query's options may have capitals.
    (tmp_path / "p").write_text("Kafka.Bootstrap.Servers=h:1\nDecision.Topic=ours\n")
    bench = OperatorBench()
    monkeypatch.setattr(operator, "connect", lambda _: bench.coordinator)
    monkeypatch.setattr(bench.coordinator, "close", lambda: None)
    for arguments, topic in (([], "ours"), (["--decision-topic", "other"], "other")):
        out = io.StringIO()
        assert main(["list", "--properties", str(tmp_path / "p"), *arguments], out) == 0
        assert f"No decision in {topic}." in out.getvalue()


def test_open_transactions_of_any_prefix_are_listed() -> None:
    bench = OperatorBench()
    bench.open("payments/3.1", "foreign")
    bench.operator.show(None)
    text = bench.said()
    assert "payments/3.1" in text
    assert "foreign" not in text


def test_an_open_transaction_is_ended_by_its_exact_epoch(bench: OperatorBench) -> None:
    outcomes = bench.batch(0)
    assert bench.driver.abort(outcomes[0].batch_start, outcomes)
    ids = {outcome.written.transaction.transactional_id for outcome in outcomes if outcome.written}
    assert {bench.state(each) for each in ids} == {"CompleteAbort"}
    assert isinstance(outcomes[0].batch_start.driver, OpenTransaction)
    assert bench.values() == []


def test_batch_with_only_a_failed_note_is_not_called_aborted(
    bench: OperatorBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = bench.batch(0)

    write = KafkaDriverCluster.write_decision

    def write_and_fail(cluster: KafkaDriverCluster, driver: OpenTransaction, decision: Decision, sequence: int) -> int:
        offset = write(cluster, driver, decision, sequence)
        if decision.is_finished:
            raise KafkaTimeoutError
        return offset

    with monkeypatch.context() as patch:
        patch.setattr(KafkaDriverCluster, "write_decision", write_and_fail)
        with pytest.raises(KafkaTimeoutError):
            bench.driver.commit(outcomes)
    assert not bench.driver.abort(outcomes[0].batch_start, outcomes)
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]
    assert bench.driver.begin().last_batch_id == 0


def test_no_task_begins_after_its_batch_was_aborted(bench: OperatorBench) -> None:
    batch_start = bench.driver.begin()
    assert bench.driver.abort(batch_start, [])
    found = bench.cluster_of_driver.describe([batch_start.driver.transactional_id])[batch_start.driver.transactional_id]
    assert found is not None
    # the comparison that a task makes
    assert (found.state, found.producer) != (TransactionState.EMPTY, batch_start.driver.producer)


def test_decided_batch_is_not_aborted(bench: OperatorBench) -> None:
    outcomes = bench.decide(0)
    assert not bench.driver.abort(outcomes[0].batch_start, outcomes)
    bench.driver.begin()
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]


@pytest.mark.parametrize("topic", ["mine", "-mine", "my decisions", CONFIG.decision_topic])
@pytest.mark.parametrize("prefix", [PREFIX, "a b", "it's", "-x", "$HOME;", "orders."])
@pytest.mark.parametrize("command", ["finish", "accept", "forget"])
def test_command_of_an_error_can_be_typed(command: str, prefix: str, topic: str) -> None:
    """Bug: to the shell a prefix with a blank or a quote was a different prefix, or none. The sentence's full stop or
    colon stood behind the prefix and looked like a part of it.
    """
    python, module, name, *typed = shlex.split(operator_command(command, prefix, topic))
    assert (python, module, name) == ("python", "-m", "spark_kafka_sink.transactions")
    options = _parser().parse_args(typed)
    assert (options.command, options.prefix) == (command, prefix)
    assert (options.decision_topic or CONFIG.decision_topic) == topic
    assert options.bootstrap_servers == typed[-1] == "HOST:PORT"


@pytest.mark.parametrize("command", ["finish", "abort", "accept", "forget"])
def test_operator_works_where_only_short_timeouts_are_allowed(bench: OperatorBench, command: str) -> None:
    """Bug: the operator checked the tasks' default timeout of 15 minutes and was refused, although it has no tasks."""
    if command in {"finish", "accept"}:
        bench.decide(0)
    else:
        bench.driver.commit(bench.batch(0))
    cluster_module._CHECKED.clear()  # an operator has its own client
    bench.cluster.transactions.max_timeout_ms = 600_000
    getattr(bench.operator, command)(PREFIX)
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]


def written_by_a_stranger(bench: OperatorBench, key: bytes, value: bytes) -> None:
    bench.coordinator.writer.write_alone(bench.cluster_of_driver.place, key, value, bench.coordinator.timer(1_000))


def with_checksum(content: dict[str, object]) -> bytes:
    checksum = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps(content | {"checksum": checksum}).encode()


@pytest.mark.parametrize(
    "changed",
    [
        {"time_ms": 10**18},
        {"time_ms": 10**400},
        {"time_ms": -(10**18)},
        {"rows": "many"},
        {"batch_id": [1]},
        {"version": "\x1b[31m"},
        {"query_id": "q\x1b[2J\npayments: batch 7"},
        {"transactions": [["a", "b", "c", "d", "e", "f"]]},
    ],
    ids=str,
)
def test_damaged_record_is_shown_safely_beside_others(bench: OperatorBench, changed: dict[str, object]) -> None:
    """Bug: a time beyond the calendar ended the list, and a query id cleared the screen."""
    bench.driver.commit(bench.batch(0))
    content: dict[str, object] = json.loads(Decision(0, "q", WALL_MS, 1, 2, (), is_finished=True).to_bytes())
    del content["checksum"]
    written_by_a_stranger(bench, b"evil", with_checksum(content | changed))
    written_by_a_stranger(bench, b"evil\nborn\nborn", with_checksum(content | changed))
    bench.operator.show(None)
    said = bench.said()
    assert "orders: batch 0 of query q, 2 rows" in said
    assert re.search("^evil: ", said, re.MULTILINE)
    assert len(said.splitlines()) == 4
    assert said.replace("\n", "").isprintable()


def test_first_use_beyond_the_calendar_hides_no_other(bench: OperatorBench) -> None:
    """Bug: such a record ended the list."""
    bench.driver.commit(bench.batch(0))
    written_by_a_stranger(bench, first_use_key(b"evil"), FirstUse(10**18, 16, 1).to_bytes())
    bench.operator.show(None)
    said = bench.said()
    assert re.search(r"^evil: .*offset \d+: this record cannot be shown: \w+Error\.$", said, re.MULTILINE)
    assert "orders: batch 0 of query q, 2 rows" in said


def test_foreign_keys_and_ids_are_shown_without_control_characters(bench: OperatorBench) -> None:
    """Bug: a key forged a line in colour, and a transactional id set the terminal's title."""
    written_by_a_stranger(bench, b"evil\x1b[31m\npayments: batch 7 of query q\xff", b"{}")
    name = "z\x1b[2J\x1b]0;pwned\x07\u202e/driver"
    bench.raw.write(bench.raw.begin(name), TopicPartition("t", 0), "row")
    bench.operator.show(None)
    said = bench.said()
    assert said.replace("\n", "").isprintable()
    assert "evil?[31m?payments: batch 7" in said
    assert "z?[2J?]0;pwned??/driver" in said


def test_prefix_without_a_decision_is_shown_with_its_first_use(bench: OperatorBench) -> None:
    bench.driver.begin()
    bench.operator.show(None)
    said = bench.said()
    assert re.search(r"^orders: no decision yet; first used \d{4}-\d\d-\d\d ", said, re.MULTILINE)
    bench.operator.show("another")
    assert "orders" not in bench.said()
    bench.operator.adopt(PREFIX)
    adopted, earlier = bench.said().splitlines()
    assert adopted == "orders is adopted: its query begins at the next batch of its checkpoint."
    assert earlier.startswith(f"It must not go back to a decision topic that it had before {CONFIG.decision_topic}: ")
    bench.operator.show(PREFIX)
    assert re.search(r"^orders: no decision yet; freed or adopted .*any batch\.$", bench.said(), re.MULTILINE)
    bench.driver.commit(bench.batch(7))
    bench.operator.show(None)
    assert "no decision yet" not in bench.said()


def test_lost_decision_topic_is_an_error_until_adopted(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    bench.cluster.delete_topic(CONFIG.decision_topic)
    bench.cluster.create_topic(CONFIG.decision_topic, 16, configs={"cleanup.policy": "compact"})
    with pytest.raises(IllegalStateError, match=r"knows nothing of transactional\.id.prefix='orders'") as lost:
        bench.driver.begin()
    typed = shlex.split(str(lost.value).rpartition("-m spark_kafka_sink.transactions ")[2])
    assert _parser().parse_args(typed).command == "adopt"
    bench.operator.adopt(PREFIX)
    batch_start = bench.driver.begin()
    assert batch_start.is_written_already(7, "q") is False
    bench.driver.commit([bench.task(batch_start, 7, 0)])
    assert bench.driver.begin().last_batch_id == 7


def test_freed_prefix_begins_at_any_batch_and_is_not_lost(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(3))
    bench.operator.forget(PREFIX)
    batch_start = bench.driver.begin()
    assert (batch_start.last_batch_id, batch_start.is_written_already(2, "another")) == (None, False)


def test_prefix_freed_by_older_release_is_an_error_until_adopted(bench: OperatorBench) -> None:
    """The older release wrote a tombstone and no first-use record."""
    driver = bench.raw.begin("orders/driver")
    place = bench.cluster_of_driver.place
    bench.coordinator.writer.write(driver, place, PREFIX.encode(), None, 0, bench.coordinator.timer(1_000))
    bench.commit(driver)
    with pytest.raises(IllegalStateError, match="the prefix was freed by an older release"):
        bench.driver.begin()
    bench.operator.adopt(PREFIX)
    assert bench.driver.begin().is_adopted


def test_adopt_is_refused_where_a_decision_is_known(bench: OperatorBench) -> None:
    bench.driver.commit(bench.batch(0))
    with pytest.raises(
        IllegalStateError, match=r"on batch 0: the query goes on after that batch.*forget --prefix=orders"
    ):
        bench.operator.adopt(PREFIX)
    bench.decide(1)
    with pytest.raises(IllegalStateError, match="Batch 1 of orders is decided"):
        bench.operator.adopt(PREFIX)


def restore(bench: OperatorBench, *records: tuple[bytes, bytes]) -> None:
    bench.cluster.delete_topic(CONFIG.decision_topic)
    bench.cluster.create_topic(CONFIG.decision_topic, 16, configs={"cleanup.policy": "compact"})
    client = bench.another_client()
    place = KafkaDriverCluster(client, CONFIG, PREFIX).place
    for key, value in records:
        client.writer.write_alone(place, key, value, bench.timer())


@pytest.mark.parametrize("is_finished", [True, False])
def test_copy_of_decisions_is_refused_until_adopted(bench: OperatorBench, is_finished: bool) -> None:
    """A later decision may be missing in it. Also where the copy was made between decision and commit."""
    if is_finished:
        bench.driver.commit(bench.batch(3))
    else:
        bench.decide(3)
    last = bench.cluster_of_driver.last_decision()
    assert last is not None
    restore(bench, (PREFIX.encode(), last.to_bytes()))
    settle: list[Callable[[], object]] = [bench.driver.begin]
    settle += [partial(getattr(bench.operator, name), PREFIX) for name in ("finish", "accept")]
    for command in settle:
        with pytest.raises(IllegalStateError, match=r"is a copy for.*on batch 3") as refused:
            command()
        typed = shlex.split(str(refused.value).rpartition("-m spark_kafka_sink.transactions ")[2])
        assert _parser().parse_args(typed).command == "adopt"
    for name in ("abort", "forget"):
        with pytest.raises(IllegalStateError, match="is a copy for" if is_finished else "can only be finished"):
            getattr(bench.operator, name)(PREFIX)
    bench.operator.adopt(PREFIX)
    assert "orders is adopted: its query goes on after batch 3, the last one decided here." in bench.said()
    batch_start = bench.driver.begin()
    assert (batch_start.last_batch_id, sorted(bench.values())) == (3, ["row 3.0", "row 3.1"])
    bench.driver.commit([bench.task(batch_start, 4, 0)])
    with pytest.raises(IllegalStateError, match="there is nothing to adopt"):
        bench.operator.adopt(PREFIX)


def test_copy_of_a_first_use_is_adopted(bench: OperatorBench) -> None:
    bench.driver.begin()
    first_use = bench.cluster_of_driver.last_records().first_use
    assert first_use is not None
    restore(bench, (first_use_key(PREFIX.encode()), first_use.to_bytes()))
    with pytest.raises(IllegalStateError, match="is a copy for"):
        bench.driver.begin()
    bench.operator.adopt(PREFIX)
    assert bench.driver.begin().is_adopted


def test_adopt_is_refused_while_transactions_are_open(bench: OperatorBench) -> None:
    """Another topic may hold their decision, and the next driver would abort them."""
    bench.decide(0)
    others = other_topic("others")
    operator = Operator(bench.coordinator, others, bench.out, lambda: WALL_MS)
    with pytest.raises(IllegalStateError, match=r"2 transactions of orders are open.*abort --prefix=orders --decision"):
        operator.adopt(PREFIX)
    assert [bench.state(f"orders/{number}") for number in range(2)] == ["Ongoing"] * 2
    bench.operator.finish(PREFIX)
    operator.adopt(PREFIX)
    driver = ExactlyOnceDriver(PREFIX, KafkaDriverCluster(bench.coordinator, others, PREFIX), lambda: WALL_MS)
    assert driver.begin().is_adopted


@pytest.mark.parametrize("command", ["finish", "abort", "accept", "forget", "adopt"])
def test_command_for_an_unused_prefix_leaves_it_usable(bench: OperatorBench, command: str) -> None:
    with contextlib.suppress(IllegalStateError):  # only adopt has something to do
        getattr(bench.operator, command)(PREFIX)
    assert bench.driver.begin().last_batch_id is None


def test_command_for_a_write_without_a_prefix_leaves_no_record(bench: OperatorBench) -> None:
    """No write uses such a prefix again."""
    prefix = pool_name(3)
    bench.raw.begin(f"{prefix}/driver")
    for command in ("finish", "abort", "forget"):
        getattr(bench.operator, command)(prefix)
    place = KafkaDriverCluster(bench.coordinator, CONFIG, prefix).place
    assert [record for record in bench.cluster.log(*place).records() if prefix.encode() in (record.key or b"")] == []


def test_error_about_a_foreign_record_has_no_control_character(
    bench: OperatorBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written_by_a_stranger(bench, PREFIX.encode(), with_checksum({"version": "\x1b[2J\nAll is well."}))
    monkeypatch.setattr(operator, "connect", lambda _: bench.coordinator)
    arguments = ["finish", "--prefix", PREFIX, "--yes", "--bootstrap-servers", "broker-0:9092"]
    assert main(arguments) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable()
    assert line.startswith("ProtocolError: ")


def test_any_error_is_one_line_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> object:
        raise KafkaTimeoutError("\x1b[2J\nAll is well.")

    monkeypatch.setattr(operator, "connect", refuse)
    assert main(["list", "--bootstrap-servers", "broker-0:9092"]) == 1
    assert capsys.readouterr().out == "KafkaTimeoutError: ?[2J?All is well.\n"


def test_terminal_without_a_letter_gets_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the command ended with UnicodeEncodeError, perhaps after it had changed something."""
    bench = OperatorBench()
    written = io.BytesIO()
    out = io.TextIOWrapper(written, "ascii", write_through=True)
    monkeypatch.setattr(operator, "connect", lambda _: bench.coordinator)
    monkeypatch.setattr(bench.coordinator, "close", lambda: None)
    arguments = ["list", "--prefix", "größe", "--bootstrap-servers", "broker-0:9092"]
    assert main(arguments, out) == 0
    assert written.getvalue().startswith(rb"No decision of gr\xf6\xdfe in ")


@pytest.mark.parametrize("command", ["finish", "abort", "accept", "forget"])
@pytest.mark.parametrize("prefix", ["order", pool_name(3)])
def test_command_for_a_misspelt_prefix_is_refused_and_leaves_nothing(
    bench: OperatorBench, command: str, prefix: str
) -> None:
    """Bug: the command said that nothing was decided, and the batch of the right prefix timed out."""
    bench.decide(0)
    records = len([*bench.cluster.log(*bench.cluster_of_driver.place).records()])
    with pytest.raises(IllegalStateError, match=f"Nothing is known of transactional.id.prefix='{prefix}'"):
        getattr(bench.operator, command)(prefix)
    assert bench.coordinator.transactions.describe_transactions(
        [f"{prefix}/driver"], bench.coordinator.timer(1_000)
    ) == {f"{prefix}/driver": None}
    assert len([*bench.cluster.log(*bench.cluster_of_driver.place).records()]) == records


def test_blanks_around_a_prefix_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the option. Bug: the command looked for a prefix that no query can have, and found nothing to do."""
    bench = OperatorBench()
    bench.decide(0)
    monkeypatch.setattr(operator, "connect", lambda _: bench.coordinator)
    monkeypatch.setattr(bench.coordinator, "close", lambda: None)
    arguments = ["finish", "--prefix", f" {PREFIX} ", "--yes", "--bootstrap-servers", "h:9092"]
    assert main(arguments, io.StringIO()) == 0
    assert sorted(bench.values()) == ["row 0.0", "row 0.1"]


@pytest.mark.parametrize("version", [2, 1])
def test_abort_in_another_topic_leaves_a_decided_batch(version: int) -> None:
    """Bug: without --decision-topic, `abort` found no decision and aborted a batch that was decided."""
    bench = OperatorBench(version)
    bench.move_to("own")
    bench.driver.commit(bench.batch(0))
    bench.decide(1)
    bench.cluster.create_topic(CONFIG.decision_topic, 16, configs={"cleanup.policy": "compact"})
    text = "2 of its transactions are open. They may be decided in own, where earlier ones were, so nothing was aborted"
    with pytest.raises(IllegalStateError, match=text) as refused:
        bench.operator.abort(PREFIX)
    assert "transactions abort --prefix=orders --decision-topic=own" in str(refused.value)
    bench.operator_of("own").finish(PREFIX)
    assert sorted(bench.values()) == ["row 0.0", "row 0.1", "row 1.0", "row 1.1"]
    bench.batch(2)
    bench.operator_of("own").abort(PREFIX)
    bench.operator.abort(PREFIX)  # nothing is open
    assert sorted(bench.values()) == ["row 0.0", "row 0.1", "row 1.0", "row 1.1"]
