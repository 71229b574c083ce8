"""Rows 36 to 42: exactly-once delivery from Spark, whose driver, workers and attempts die, run twice or come too
late.

Some rows need the driver to die at a certain request. They run the query of support.killed_query, with the real
driver, tasks and producers. The other rows run Spark.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from integration.exactly_once import test_spark_kills
from support.fault_stage import FaultStage
from support.history import History, Outcome, Sent
from support.killed_query import KEYS, Query
from support.librdkafka import produce, read_topic
from support.spark_workers import python_workers
from support.workload import Place, assert_kept, read_all

from spark_kafka_sink.local import Admin

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
PARTITIONS = 3
DECISIONS = "__spark_kafka_sink_decisions"
LATEST_REQUEST = 16
"""The number of the last request of a driver in a batch of up to six tasks."""

QUERY = """
import json, random, sys, threading
from dataclasses import replace
from pathlib import Path
from support import killed_query
from functools import partial
from support.killed_query import DyingCluster, KEYS, Query, put_before_next_cluster
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.sink.exactly_once.session import StreamBatch, session
from spark_kafka_sink.sink.exactly_once.task import TaskIdentity

given = json.loads(sys.argv[1])


class Staged(Query):
    def layout(self, batch, rng):
        if not given["tasks"]:
            return super().layout(batch, rng)
        tasks = [[] for _ in range(given["tasks"])]
        for number in range(batch * self.rows, (batch + 1) * self.rows):
            tasks[number % KEYS % given["tasks"]].append(self.row(number))
        return tasks

    def _task(self, config, batch_start, batch_id, index, rows):
        if not given["attempts"]:
            return super()._task(config, batch_start, batch_id, index, rows)
        outcomes, own = {}, Query._task

        def attempt(number):
            made = killed_query.TaskIdentity
            outcomes[number] = self._attempt(config, batch_start, batch_id, index, number, rows)

        threads = [threading.Thread(target=attempt, args=[number]) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes[random.Random(given["seed"] + batch_id).randrange(2)]

    def _attempt(self, config, batch_start, batch_id, index, number, rows):
        task = TaskIdentity(batch_id, "query", index, number)
        # a client is for one thread; attempts are threads here and processes in Spark, so each has its own client
        own = replace(config, producer=replace(config.producer, client_id=f"attempt-{number}"))
        transaction = killed_query.ExactlyOnceTask(
            batch_start, task, lambda ids: killed_query.describe_in_process(own, batch_start.driver, ids)
        )
        delivery = killed_query.TaskDelivery(config, killed_query.process_pool(), transaction)
        try:
            for key, value in rows:
                delivery.send(self.topic, killed_query.RecordColumns.from_rows([value], [key]))
            delivery.finish()
        finally:
            delivery.abandon()
        return transaction.outcome


class FailingCluster(DyingCluster):
    def _count(self, call):
        self._left -= 1
        if self._left == -1:
            if self._is_after:
                call()
            raise KafkaTimeoutError("staged: no response")
        return call()


kind = {"dies": DyingCluster, "fails": FailingCluster}.get(given["how"])
if kind is not None:
    put_before_next_cluster(partial(kind, number=given["at"], is_after=given["is_after"]))
query = Staged(given["servers"], given["topic"], Path(given["checkpoint"]), timeout_ms=given["timeout_ms"])
try:
    query.run(given["last"], given["seed"])
except KafkaTimeoutError as error:
    if given["how"] != "fails":
        raise
    print("failed:", error)
    query.run(given["last"], given["seed"])  # by the same process, with the session that it has
"""


class Staging:
    """A topic, a checkpoint, and consecutive processes of a query."""

    def __init__(self, stage: FaultStage, folder: Path, seed: int, timeout_ms: int = 60_000) -> None:
        self.stage, self.seed = stage, seed
        self.rng = random.Random(seed)
        self.places = stage.new_topic(PARTITIONS)
        self.topic = self.places[0][0]
        self.query = Query(stage.direct, self.topic, folder / f"checkpoint-{self.topic}", timeout_ms=timeout_ms)

    def run(self, last: int, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a process to batch `last`. `how` is a death of the process, or a failure of request `at`."""
        given = {"tasks": 0, "attempts": False, "how": "", "at": 0, "is_after": False, "seed": self.rng.random()}
        given |= {"seed": self.rng.randrange(10**6), "last": last, "timeout_ms": self.query.timeout_ms} | more
        given |= {"servers": self.query.servers, "topic": self.topic, "checkpoint": str(self.query.checkpoint)}
        ended = subprocess.run(
            [sys.executable, "-c", QUERY, json.dumps(given)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        how = {key: given[key] for key in ("tasks", "how", "at", "is_after") if given[key]}
        self.stage.note(
            f"to batch {last} {how}: ended with {ended.returncode}; {self.query.finished()} batches are done"
        )
        return ended

    def goes_through(self, last: int, **more: Any) -> str:
        """Run to the end and return the process's output."""
        ended = self.run(last, **more)
        assert ended.returncode == 0, ended.stderr[-2_000:]
        return ended.stdout

    def is_decided(self) -> bool:
        """Whether the last decision is of an unfinished batch."""
        partitions = len(self.stage.kafka.describe_topic(DECISIONS).partitions)
        messages = read_topic(self.stage.direct, DECISIONS, partitions)
        values = [message.value() for message in messages if message.key() == self.topic.encode()]
        return bool(values) and json.loads(values[-1])["state"] == "decided"

    def check(self, batches: int) -> None:
        """Check that every row of these batches is read once, the rows of a key in order, and that readers do not
        wait.
        """
        rows = [self.query.row(number) for number in range(batches * self.query.rows)]
        sent = [Sent(value.decode(), self.topic, None, Outcome.YES, None, key.decode()) for key, value in rows]
        committed = read_all(self.stage.direct, {self.topic: PARTITIONS}, "read_committed")
        assert_kept(History(sent, committed))
        produce(self.stage.direct, self.topic, [f"behind {number}" for number in range(50)])
        seen = {
            message.partition()
            for message in read_topic(self.stage.direct, self.topic, PARTITIONS)
            if message.value().startswith(b"behind")
        }
        everything = read_topic(self.stage.direct, self.topic, PARTITIONS, isolation_level="read_uncommitted")
        assert seen == {message.partition() for message in everything if message.value().startswith(b"behind")}
        self.stage.note(f"{batches} batches, {len(sent)} rows, each read once and in order; no transaction is open")


def test_row_36_two_attempts_of_every_task(one_node: FaultStage, tmp_path: Path, seed: int) -> None:
    """Speculation, or a late attempt: both write to the end, one sends its message to the driver, and readers never see
    the other's rows.
    """
    staging = Staging(one_node, tmp_path, seed)
    staging.goes_through(5, attempts=True)
    staging.check(6)
    uncommitted = read_all(one_node.direct, {staging.topic: PARTITIONS}, "read_uncommitted")
    assert len(uncommitted) >= 2 * 6 * staging.query.rows


@pytest.mark.parametrize("row", [38, 39], ids=["undecided", "decided"])
def test_row_38_and_39_driver_killed(one_node: FaultStage, tmp_path: Path, seed: int, row: int) -> None:
    """The driver dies at a request before or after the decision: the next driver writes the batch again, or
    finishes it.
    """
    for number in range(12):
        staging = Staging(one_node, tmp_path, seed * 100 + number)
        staging.goes_through(0)
        at = staging.rng.randrange(*((0, 9) if row == 38 else (8, 14)))
        ended = staging.run(1, how="dies", at=at, is_after=staging.rng.random() < 0.5, tasks=3)
        if ended.returncode != -signal.SIGKILL or staging.is_decided() != (row == 39):
            continue
        staging.goes_through(2)
        staging.check(3)
        return
    raise AssertionError("no death at the right time in 12")


def test_row_38_driver_killed_repeatedly(one_node: FaultStage, tmp_path: Path, seed: int) -> None:
    staging = Staging(one_node, tmp_path, seed)
    command = [sys.executable, "-m", "support.killed_query", "--servers", one_node.direct, "--topic", staging.topic]
    options = ["--checkpoint", str(staging.query.checkpoint), "--kills", "8", "--seed", str(seed)]
    ended = subprocess.run(command + options, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-2_000:]
    one_node.note(ended.stdout.strip())
    reported = json.loads(ended.stdout)
    assert set(reported["ends"]) <= {"killed", "killed itself"}, ended.stderr[-2_000:]
    assert reported["status"] == 0, ended.stderr[-2_000:]
    staging.check(reported["finished"])


def test_row_40_commit_fails_midway(one_node: FaultStage, tmp_path: Path, seed: int) -> None:
    """A request of the driver fails, Spark calls abort, and the batch comes again: to the same driver, or to a new one
    if this driver died of the failure.
    """
    failed = 0
    for number in range(4):
        staging = Staging(one_node, tmp_path, seed * 100 + number)
        staging.goes_through(0)
        at = staging.rng.randrange(2, LATEST_REQUEST)
        failed += "failed:" in staging.goes_through(2, how="fails", at=at, is_after=staging.rng.random() < 0.5)
        staging.check(3)
    one_node.note(f"{failed} of 4 batches failed")
    assert failed, "no request failed a batch"


def test_row_41_outage_longer_than_the_timeout(one_node: FaultStage, tmp_path: Path, seed: int) -> None:
    """The broker has aborted the open transactions. Without a decision the batch is written again; with one the driver
    raises an error. No row is lost silently.
    """
    lost = repeated = 0
    for number in range(24):
        if number >= 8 and lost and repeated:
            break
        staging = Staging(one_node, tmp_path, seed * 100 + number, timeout_ms=2_500)
        staging.goes_through(0)
        at = staging.rng.randrange(5, LATEST_REQUEST)
        ended = staging.run(1, how="dies", at=at, is_after=staging.rng.random() < 0.5, tasks=3)
        if ended.returncode != -signal.SIGKILL:
            continue
        decided = staging.is_decided()
        time.sleep(4)
        again = staging.run(2)
        if again.returncode == 0:
            staging.check(3)
            repeated += 1
            continue
        reported = again.stderr.strip().splitlines()[-1]
        one_node.note(reported)
        assert decided
        assert "TransactionLostError" in reported
        assert "atch 1" in reported
        third = staging.run(2)  # it does not continue by itself
        assert third.returncode != 0
        assert "TransactionLostError" in third.stderr
        lost += 1
    one_node.note(f"{lost} said that rows are lost, {repeated} were written again or had been through")
    assert lost, "no driver died between decision and commit"
    assert repeated, "no driver died elsewhere"


def test_row_42_other_parallelism(one_node: FaultStage, tmp_path: Path, seed: int) -> None:
    """Ten pairs: killed with one number of tasks, started again with another."""
    rng = random.Random(seed)
    staging = Staging(one_node, tmp_path, seed)
    done = killed = 0
    for _ in range(10):
        before, after = rng.sample(range(1, KEYS + 1), 2)
        at, is_after = rng.randrange(LATEST_REQUEST), rng.random() < 0.5
        killed += staging.run(done, how="dies", at=at, is_after=is_after, tasks=before).returncode == -signal.SIGKILL
        staging.goes_through(done, tasks=after)
        done += 1
    staging.check(done)
    one_node.note(f"{killed} of 10 were killed")
    assert killed >= 3


# ---- Spark -----------------------------------------------------------------------------------------------------------

FILES, ROWS = 8, 400


class SparkRun:
    """A streaming query in separate processes."""

    def __init__(self, stage: FaultStage, folder: Path, guarantee: str) -> None:
        self.stage, self.folder, self.guarantee = stage, folder, guarantee
        self.places: list[Place] = stage.new_topic(PARTITIONS)
        self.topic = self.places[0][0]
        self.sent: list[Sent] = []
        (folder / "rows").mkdir()
        for number in range(FILES):
            partitions = [row % PARTITIONS for row in range(ROWS)]
            values = [f"{number * ROWS + row}" for row in range(ROWS)]
            self.sent += [
                # Spark may put two files into one batch after a kill, in any order.
                Sent(value, self.topic, partition, Outcome.YES, None, f"file {number}")
                for value, partition in zip(values, partitions, strict=True)
            ]
            path = folder / "rows" / f"{number}.parquet"
            pq.write_table(pa.table({"partition": pa.array(partitions, pa.int32()), "value": values}), path)
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))

    def start(self, parallelism: int) -> subprocess.Popen[bytes]:
        self.stage.note(f"Spark with {parallelism} tasks a batch")
        log = (self.folder / "spark.log").open("ab")
        with log:
            return subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("streaming_job.py")),
                    *(self.stage.direct, self.topic, str(self.folder), str(parallelism), self.guarantee),
                ],
                env=ENVIRONMENT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def revived(self, driver: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """The query, started again if it ended with the worker in which its driver commits: Spark does not retry that
        worker, because it is not a task.
        """
        if driver.poll() in {None, 0}:
            return driver
        log = (self.folder / "spark.log").read_text()
        assert "Python worker exited unexpectedly" in log.rpartition("STREAM_FAILED")[2], log[-3_000:]
        return self.start(3)

    def await_written(self, more: int, driver: subprocess.Popen[bytes]) -> None:
        """Wait until the topic has that many more records, or the query has ended."""
        expected, deadline = self.written() + more, time.monotonic() + 90
        while self.written() < expected and driver.poll() is None:
            assert time.monotonic() < deadline, (self.folder / "spark.log").read_text()[-2_000:]
            time.sleep(0.1)

    def written(self) -> int:
        return len(read_topic(self.stage.direct, self.topic, PARTITIONS, isolation_level="read_uncommitted"))

    def finish(self, driver: subprocess.Popen[bytes]) -> None:
        assert driver.wait(180) == 0, (self.folder / "spark.log").read_text()[-3_000:]
        topics = {self.topic: PARTITIONS}
        committed = read_all(self.stage.direct, topics, "read_committed")
        is_exact = self.guarantee == "exactly-once"
        assert_kept(History(self.sent, committed), exactly_once=is_exact, in_order=is_exact)
        self.stage.note(f"{len(self.sent)} rows, read {len(committed)} times; {self.written()} were written")


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to the driver, its JVM and its workers at once."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in family:
        if each.is_running():
            each.kill()
    process.wait(30)
    psutil.wait_procs(family[1:], 10)


@pytest.mark.parametrize("guarantee", ["exactly-once", "at-least-once"])
def test_row_37_python_workers_killed(one_node: FaultStage, tmp_path: Path, seed: int, guarantee: str) -> None:
    rng = random.Random(seed)
    run = SparkRun(one_node, tmp_path, guarantee)
    driver = run.start(3)
    try:
        for _ in range(5):
            run.await_written(rng.randrange(1, ROWS), driver)
            driver = run.revived(driver)
            workers = python_workers(driver.pid)
            one_node.note(f"SIGKILL to {len(workers)} workers")
            for worker in workers:
                if worker.is_running():
                    worker.kill()
        driver.wait(180)
        driver = run.revived(driver)
        run.finish(driver)
    finally:
        if driver.poll() is None:
            end_with_children(driver)


def test_row_38_spark_killed_whole(broker: Admin, tmp_path: Path) -> None:
    """The driver, its JVM and its workers are killed, and started again with other partitions."""
    test_spark_kills.test_whole_spark_killed_loses_and_duplicates_nothing(broker, tmp_path, "format")
