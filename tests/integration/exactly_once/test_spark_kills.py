"""The driver, its JVM and its Python workers are killed together, at random times and at chosen points; executors are
killed one by one. A restarted Spark puts its rows into other partitions and in another order.

EXACTLY_ONCE_KILLS=100 means 24 kills at random times (2 by default), 12 at each form's chosen points (4) and 12
executors (3). EXACTLY_ONCE_SEED=7 sets the first seed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.exactly_once_streams import KEYS, Stream, check_content, check_nothing_open, open_transactions
from support.killed_spark import DIES_AT, HOLDS, POINTS, kill_session

from spark_kafka_sink.admin.transaction_values import TransactionState
from spark_kafka_sink.local import Admin
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster, connect
from spark_kafka_sink.sink.exactly_once.messages import Decision
from spark_kafka_sink.sink.options import SinkConfig

ROOT = Path(__file__).resolve().parents[3]
KILLS = int(os.environ.get("EXACTLY_ONCE_KILLS", "12")) // 8
SEED = int(os.environ.get("EXACTLY_ONCE_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
FILES_AHEAD = 40
ORDERS = ("", "ascending", "descending")
CHOSEN_POINTS = ("commit 0", "begin 0", "commit 1", "begin 1")
LIMIT_S = 240
both_forms = pytest.mark.parametrize("form", ["format", "foreachBatch"])


def start(stream: Stream, partitions: int, *flags: str, **environment: str) -> subprocess.Popen[bytes]:
    arguments = [stream.servers, stream.topic, str(stream.folder), stream.form, str(partitions), *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "support.exactly_once_job", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"} | environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def started(stream: Stream, partitions: int, *flags: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """The job as a context. When it is left, also by a failed assertion, no process of the job is left."""
    process = start(stream, partitions, *flags, **environment)
    try:
        yield process
    finally:
        kill_session_of(process)


def kill_session_of(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        kill_session(process.pid)
        process.wait()


def finish(stream: Stream, partitions: int) -> None:
    """Run the job to its end."""
    with started(stream, partitions) as process:
        assert process.wait(timeout=LIMIT_S) == 0, f"seed {SEED}"


def new_stream(broker: Admin, folder: Path, form: str) -> Stream:
    topic = f"killed-{uuid.uuid4().hex[:8]}"
    broker.create_topic(topic, 3)
    return Stream(broker.bootstrap_servers, topic, folder, form)


def await_true(what: Callable[[], Any], process: subprocess.Popen[bytes], text: str) -> Any:
    """Return the first true result of `what`, while the process runs."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert process.poll() is None, f"seed {SEED}, {text}: the query ended by itself"
        assert time.monotonic() < deadline, f"seed {SEED}, {text}: the query does not get on"
        time.sleep(0.02)
    return found


def check(stream: Stream, files: int) -> None:
    try:
        stream.check(files)
    except AssertionError as error:
        raise AssertionError(f"EXACTLY_ONCE_SEED={SEED}: {error}") from error


@both_forms
def test_whole_spark_killed_loses_and_duplicates_nothing(kafka_broker: Admin, tmp_path: Path, form: str) -> None:
    rng = random.Random(SEED)
    stream = new_stream(kafka_broker, tmp_path, form)
    files = 0
    for number in range(KILLS):
        before = stream.last_batch()
        ahead = before + 1 + FILES_AHEAD - files
        stream.write_files(files, ahead)
        files += ahead
        layout = rng.randint(1, 4), "--order", rng.choice(ORDERS)
        text = f"kill {number}"
        if form == "foreachBatch" and number % 2 == 0:  # after a certain request of the driver
            with started(stream, *layout, "--dies-after", str(rng.randrange(30))) as process:
                assert process.wait(timeout=LIMIT_S) == -signal.SIGKILL, f"seed {SEED}, {text}"
            continue
        with started(stream, *layout) as process:
            await_true(lambda before=before: stream.last_batch() > before, process, text)  # type: ignore[misc]  # until the query runs
            time.sleep(rng.random() * 2)
            assert process.poll() is None, f"seed {SEED}, {text}: the query ended before its kill"
    finish(stream, 2)
    check(stream, files)


def last_decision(stream: Stream) -> tuple[Decision, Counter[TransactionState]]:
    """The last decision, and the broker's states of its tasks' transactions."""
    config = SinkConfig.from_options(stream.options)
    with connect(config.producer) as coordinator:
        cluster = KafkaDriverCluster(coordinator, config, stream.prefix)
        decision = cluster.last_decision()
        assert decision is not None, f"seed {SEED}: nothing is decided"
        ids = [transaction.transactional_id for transaction in decision.transactions]
        return decision, Counter(each.state for each in cluster.describe(ids).values() if each is not None)


@pytest.mark.slow
@both_forms
def test_spark_killed_between_decision_and_last_commit_finishes_the_batch(
    kafka_broker: Admin, tmp_path: Path, form: str
) -> None:
    """Spark dies before the first commit of the batch's transactions or between two of them, in commit itself and in
    the recovery of the next start. The start after that runs the batch again, with other partitions.
    """
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    stream = new_stream(kafka_broker, tmp_path, form)
    files, partitions, order = 0, 0, ""
    for number in range(max(1, KILLS // 4) * len(CHOSEN_POINTS)):
        point = CHOSEN_POINTS[number % len(CHOSEN_POINTS)]
        text = f"seed {SEED}, kill {number} at {point!r}"
        ahead = rng.randint(1, 3)
        stream.write_files(files, ahead)
        files += ahead
        partitions = rng.choice([count for count in (2, 3, 4) if count != partitions])
        order = rng.choice([each for each in ORDERS if each != order])
        before = -1 if number == 0 else last_decision(stream)[0].batch_id
        with started(stream, partitions, "--order", order, **{DIES_AT: point}) as process:
            assert process.wait(timeout=LIMIT_S) == -signal.SIGKILL, text
        decision, states = last_decision(stream)
        assert not decision.is_finished, text
        place, ended = point.split()
        assert decision.batch_id == before + (place == "commit"), text  # recovery writes no decision
        assert states[TransactionState.ONGOING] == len(decision.tasks) - int(ended), f"{text}: {states}"
        assert stream.last_batch() < decision.batch_id, text
    finish(stream, 1)
    check(stream, files)


# ---- executors -----------------------------------------------------------------------------------------------------


def is_executor(process: psutil.Process) -> bool:
    try:
        return any("CoarseGrainedExecutorBackend" in word for word in process.cmdline())
    except psutil.Error:  # the task has just ended
        return False


class Cluster:
    """A job on two executors in separate processes, and the kills of these."""

    def __init__(self, stream: Stream, spark_home: Path, partitions: int) -> None:
        self._stream = stream
        self._holds = stream.folder / "holds"
        self._holds.mkdir()
        environment = {HOLDS: str(self._holds), "SPARK_HOME": str(spark_home)}
        self.process = start(stream, partitions, "--master", "local-cluster[2,1,800]", **environment)

    def executors(self) -> list[psutil.Process]:
        return [each for each in psutil.Process(self.process.pid).children(recursive=True) if is_executor(each)]

    def kill_at(self, point: str) -> None:
        """Kill the executor of the next task that reaches this point, while its batch's transactions are open."""
        (self._holds / point).touch()
        held = await_true(lambda: list(self._holds.glob(f"{point}.*")), self.process, point)[0]
        (executor,) = [each for each in psutil.Process(int(held.suffix[1:])).parents() if is_executor(each)]
        stream = self._stream
        await_true(lambda: open_transactions(stream.servers, stream.prefix), self.process, point)
        self._kill(executor)
        held.unlink()

    def kill_one(self, rng: random.Random) -> None:
        self._kill(rng.choice(await_true(self.executors, self.process, "no executor")))

    def _kill(self, executor: psutil.Process) -> None:
        executor.kill()
        psutil.wait_procs([executor], timeout=30)
        assert self.process.poll() is None, f"seed {SEED}: the driver went with its executor"

    def finish(self) -> None:
        assert self.process.wait(timeout=LIMIT_S) == 0, f"seed {SEED}"


@pytest.mark.slow
@pytest.mark.parametrize(("form", "partitions"), [("format", 0), ("format", 3), ("foreachBatch", 3)])
def test_executors_killed_during_a_batch_lose_and_duplicate_nothing(
    kafka_broker: Admin, tmp_path: Path, own_spark_home: Path, form: str, partitions: int
) -> None:
    """The query goes on with the remaining executors and with new ones. Without a shuffle Spark runs a killed task as
    another attempt, beside the open transaction of the first. If shuffle files were lost with the executor, Spark runs
    the whole stage again, and counts its attempts from 0.
    """
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    stream = new_stream(kafka_broker, tmp_path, form)
    kills = max(3, KILLS)
    files = 10 * kills
    stream.write_files(0, files)
    cluster = Cluster(stream, own_spark_home, partitions)
    try:
        for number in range(kills):
            before = stream.last_batch()
            if number % 3 < len(POINTS):
                cluster.kill_at(POINTS[number % 3])
            else:
                time.sleep(rng.random())
                cluster.kill_one(rng)
            await_true(lambda before=before: stream.last_batch() > before, cluster.process, f"kill {number}")  # type: ignore[misc]
        cluster.finish()
        check(stream, files)
    finally:
        kill_session_of(cluster.process)


@pytest.mark.slow
def test_executors_killed_in_a_batch_write_lose_and_duplicate_nothing(
    kafka_broker: Admin, tmp_path: Path, own_spark_home: Path
) -> None:
    print(f"seed {SEED}")
    stream = new_stream(kafka_broker, tmp_path, "write")
    cluster = Cluster(stream, own_spark_home, 3)
    try:
        for point in POINTS:
            cluster.kill_at(point)
        cluster.finish()
        check_content(stream.servers, stream.topic, stream.rows, KEYS)
        check_nothing_open(stream.servers, stream.prefix)
    finally:
        kill_session_of(cluster.process)
