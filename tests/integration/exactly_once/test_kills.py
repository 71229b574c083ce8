"""The protocol and its tasks on real brokers, in processes that are killed at chosen requests and at random times.

EXACTLY_ONCE_KILLS=100 sets the number of kills (12 by default, on each of two brokers), EXACTLY_ONCE_SEED=7 the
first seed.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cluster_admin import set_feature
from support.exactly_once_streams import check_content, check_nothing_open, visible_values
from support.killed_query import KEYS, Query, started
from support.librdkafka import read_values
from support.raw_transactions import LIMIT_MS, RawTransactions

from spark_kafka_sink.admin.transaction_values import EndTxnStatus, TransactionState
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.local import Admin, EmbeddedKafka
from spark_kafka_sink.sink.exactly_once.cluster import connect
from spark_kafka_sink.sink.exactly_once.messages import TransactionLostError
from spark_kafka_sink.sink.exactly_once.operator import main
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver

ROUNDS = 16_500 if int(os.environ.get("EXACTLY_ONCE_KILLS", "12")) >= 100 else 100
KILLS = int(os.environ.get("EXACTLY_ONCE_KILLS", "12"))
SEED = int(os.environ.get("EXACTLY_ONCE_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


def test_drivers_killed_at_any_time_lose_and_duplicate_nothing(
    servers: str, three_partitions: str, tmp_path: Path
) -> None:
    arguments = ("--kills", str(KILLS), "--seed", str(SEED))
    with started(servers, three_partitions, tmp_path / "c", *arguments) as process:
        said, _ = process.communicate(timeout=60 + 5 * KILLS)
    assert process.returncode == 0, f"seed {SEED}"
    result = json.loads(said)
    print(f"seed {SEED}: {result}")
    assert result["kills"] >= KILLS
    assert result["finished"] == result["last"], f"seed {SEED}: {result}"
    try:
        check_content(servers, three_partitions, result["finished"] * 20, KEYS)
        check_nothing_open(servers, three_partitions)
    except AssertionError as error:
        raise AssertionError(f"EXACTLY_ONCE_SEED={SEED}: {error}") from error


def test_killed_drivers_lose_and_duplicate_no_dead_letter(servers: str, three_partitions: str, tmp_path: Path) -> None:
    """Every row of a finished batch is there once, in its topic or in the dead letters."""
    dead = f"{three_partitions}-dead"
    Admin(servers).create_topic(dead, 3)
    kills = max(4, KILLS // 2)
    more = ("--dead", dead, "--kills", str(kills), "--seed", str(SEED))
    with started(servers, three_partitions, tmp_path / "c", *more) as process:
        said, _ = process.communicate(timeout=120 + 10 * kills)
    assert process.returncode == 0, f"seed {SEED}"
    result = json.loads(said)
    assert (result["finished"], result["status"]) == (result["last"], 0), f"EXACTLY_ONCE_SEED={SEED}: {result}"
    query = Query(servers, three_partitions, tmp_path / "c", dead=dead)
    rows = range(result["finished"] * query.rows)
    found = visible_values(servers, three_partitions), visible_values(servers, dead)
    bad = [row for row in rows if query.is_bad(row)]
    assert found == ([row for row in rows if not query.is_bad(row)], bad), f"EXACTLY_ONCE_SEED={SEED}"
    check_nothing_open(servers, three_partitions)


def test_drivers_killed_while_the_transaction_version_changes_lose_and_duplicate_nothing(
    own_kafka: Callable[..., EmbeddedKafka], tmp_path: Path
) -> None:
    """The last step of an upgrade of brokers, taken back and done again. A client learns of it with a new connection
    only, so that drivers and tasks of both versions write beside each other.
    """
    kafka = own_kafka(features={"transaction.version": 1})
    kafka.create_topic("t", 3)
    servers, rng, level, changes = kafka.bootstrap_servers, random.Random(SEED), 1, 0
    arguments = ("--kills", str(KILLS), "--seed", str(SEED))
    with started(servers, "t", tmp_path / "c", *arguments) as process:
        deadline = time.monotonic() + 60 + 5 * KILLS
        while process.poll() is None:
            assert time.monotonic() < deadline, f"seed {SEED}: the drivers do not end"
            level, changes = 3 - level, changes + 1
            set_feature(servers, "transaction.version", level)
            time.sleep(rng.choice((0.05, 0.2, 0.5, 1.0)))
        said = process.stdout.read() if process.stdout is not None else ""
    assert process.returncode == 0, f"EXACTLY_ONCE_SEED={SEED}"
    result = json.loads(said)
    print(f"seed {SEED}: {changes} changes, {result}")
    assert (result["finished"], result["status"]) == (result["last"], 0), f"EXACTLY_ONCE_SEED={SEED}: {result}"
    try:
        check_content(servers, "t", result["finished"] * 20, KEYS)
        check_nothing_open(servers, "t")
    except AssertionError as error:
        raise AssertionError(f"EXACTLY_ONCE_SEED={SEED}: {error}") from error


def await_batch(query: Query, process: subprocess.Popen[str], before: int) -> None:
    """Wait until the process has finished another batch or has ended."""
    deadline = time.monotonic() + 120
    while query.finished() <= before and process.poll() is None:
        assert time.monotonic() < deadline, f"seed {SEED}: no batch after {before} in 120 s"
        time.sleep(0.01)


def test_brokers_killed_at_any_time_lose_and_duplicate_nothing(
    own_kafka: Callable[..., EmbeddedKafka], tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    # A node whose session ends while it starts has no leaders for a moment. Kafka then takes partitions of a decided
    # transaction for deleted, and leaves out their end markers: its rows stay invisible (docs/exactly-once.md).
    kafka = own_kafka(properties={"broker.session.timeout.ms": 9_000})
    kafka.create_topic("t", 3)
    query = Query(kafka.bootstrap_servers, "t", tmp_path / "c")
    for number in range(max(2, KILLS // 6)):
        with started(kafka.bootstrap_servers, "t", tmp_path / "c", "--batches", "1000000") as process:
            await_batch(query, process, query.finished())
            time.sleep(rng.random())
            kafka.kill_node(1)
            time.sleep(rng.random())
            before = query.finished()
            kafka.start_node(1)
            await_batch(query, process, before)
        assert process.returncode in (-9, 1), f"seed {SEED}, kill {number}"  # 1: its batch failed, as it would in Spark
    with started(kafka.bootstrap_servers, "t", tmp_path / "c", "--batches", "2") as process:
        process.communicate(timeout=120)
    assert process.returncode == 0, f"seed {SEED}"
    try:
        check_content(kafka.bootstrap_servers, "t", query.finished() * query.rows, KEYS)
        check_nothing_open(kafka.bootstrap_servers, "t")
    except AssertionError as error:
        raise AssertionError(f"EXACTLY_ONCE_SEED={SEED}: {error}") from error


def test_consecutive_batches_of_one_id_pass_the_last_epoch(servers: str, three_partitions: str) -> None:
    """The requests of one task, batch after batch, without rows. From EXACTLY_ONCE_KILLS=100 on there are enough of
    them for a new producer id; under version 2 each batch takes two epochs.
    """
    place = TopicPartition(three_partitions, 0)
    with connect(Query(servers, three_partitions, Path()).config().producer) as coordinator:
        version = 2 if coordinator.transaction_version(coordinator.timer(LIMIT_MS)) >= 2 else 1
        raw = RawTransactions(coordinator, version)
        ids = []
        for batch in range(ROUNDS if version == 2 else min(ROUNDS, 2_000)):
            open_ = raw.begin(f"{three_partitions}/0")
            raw.mark(open_, open_.transactional_id, place, batch + 1, "")
            (outcome,) = coordinator.transactions.end_txns([open_], coordinator.timer(LIMIT_MS), committed=True)
            assert outcome.status is EndTxnStatus.DONE, f"batch {batch}: {outcome}"
            ids.append(open_.producer_id)
        group = f"{three_partitions}/0"
        marker = coordinator.groups.fetch_offsets({group: [place]}, coordinator.timer(LIMIT_MS))[group][place]
    assert marker is not None
    assert marker.offset == len(ids)
    print(f"version {version}: {len(ids)} batches, {len(set(ids))} producer ids")
    assert len(set(ids)) == (2 if len(ids) * 2 > 32_767 else 1)


class GoneError(BaseException):
    """The driver is gone."""


def leave_decided(query: Query) -> None:
    """Leave batch 0 decided and none of its transactions committed, as a driver does that dies in between."""

    def gone(*_: Any) -> None:
        raise GoneError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, "finish", gone)
        patch.setattr(ExactlyOnceDriver, "abort", lambda *_: True)  # a driver that is gone aborts nothing
        with pytest.raises(GoneError):
            query.run(0, 1)


def states(query: Query) -> dict[str, TransactionState]:
    with connect(query.config().producer) as coordinator:
        listed = coordinator.transactions.list_transactions(coordinator.timer(30_000))
    found = {each.transactional_id: each.state for each in listed}
    return {name: state for name, state in found.items() if name.startswith(f"{query.topic}/")}


def test_a_decided_batch_is_finished_by_the_next_start(servers: str, three_partitions: str, tmp_path: Path) -> None:
    query = Query(servers, three_partitions, tmp_path / "c")
    leave_decided(query)
    assert read_values(servers, three_partitions, 3) == []
    query.run(1, 2)
    check_content(servers, three_partitions, 2 * query.rows, KEYS)


def test_decided_batch_that_timed_out_is_an_error_until_accepted(
    servers: str, three_partitions: str, tmp_path: Path
) -> None:
    query = Query(servers, three_partitions, tmp_path / "c", timeout_ms=1_500)
    leave_decided(query)
    deadline = time.monotonic() + 30
    while TransactionState.ONGOING in states(query).values():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for _ in range(2):
        with pytest.raises(
            TransactionLostError, match=rf"Batch 0 .*{three_partitions}.*rows may be missing in Kafka, 20 of"
        ):
            query.run(0, 2)
    out = io.StringIO()
    arguments: Sequence[Any] = ["--bootstrap-servers", servers, "--prefix", three_partitions]
    assert main(["list", *arguments], out) == 0
    assert "are not known to be committed yet" in out.getvalue()
    assert main(["accept", *arguments], out, lambda _: three_partitions) == 0
    query.run(1, 3)
    assert visible_values(servers, three_partitions) == list(range(20, 40))


def test_an_undecided_batch_that_timed_out_is_written_again(
    servers: str, three_partitions: str, tmp_path: Path
) -> None:
    query = Query(servers, three_partitions, tmp_path / "c", timeout_ms=1_500)

    commit = ExactlyOnceDriver.commit

    def commit_late(driver: ExactlyOnceDriver, outcomes: Any) -> Any:
        time.sleep(3)
        return commit(driver, outcomes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactlyOnceDriver, "commit", commit_late)
        with pytest.raises(Exception, match=r"Batch 0 is not decided.*(timed out|more than 80 %)"):
            query.run(0, 1)
    query.run(0, 2)
    check_content(servers, three_partitions, query.rows, KEYS)
