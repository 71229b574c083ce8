"""A query of exactly-once batches without Spark, in processes that are killed: python -m support.killed_query.

The protocol, its tasks and their producers are the real ones. Batches, checkpoint and layout replace those of Spark. A
process runs batch after batch until SIGKILL ends it: it kills itself before or after a certain request of the driver,
or the test kills it at any time. The next process goes on from the checkpoint, with other partitions and another order
of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from support import unfit_rows

from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.arrow_writer import columns_by_topic, write_all
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.exactly_once import session as session_module
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster, describe_in_process
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome
from spark_kafka_sink.sink.exactly_once.session import StreamBatch, session
from spark_kafka_sink.sink.exactly_once.task import ExactlyOnceTask, TaskIdentity
from spark_kafka_sink.sink.options import DECISION_TOPIC, SinkConfig
from spark_kafka_sink.sink.producer_pool import process_pool

KEYS = 7
LATEST_KILL_S = 0.25
ROOT = Path(__file__).resolve().parents[2]
DRIVERS_REQUESTS = 18
"""Requests of a driver in its first batch; each end of a transaction counts."""


class Query(NamedTuple):
    """The settings that all processes of the query share. A batch has `rows` rows. With `dead`, a topic of dead
    letters, every fourth row can never be written: it asks for a partition that no topic has. With `has_formats` too,
    it does not fit the schema of its format.
    """

    servers: str
    topic: str
    checkpoint: Path
    rows: int = 20
    timeout_ms: int = 60_000
    decisions: str = DECISION_TOPIC
    dead: str = ""
    has_formats: bool = False

    def config(self) -> SinkConfig:
        config = SinkConfig.from_options(
            {
                "kafka.bootstrap.servers": self.servers,
                "topic": self.topic,
                "delivery.guarantee": "exactly-once",
                "transactional.id.prefix": self.topic,
                "decision.topic": self.decisions,
                "kafka.transaction.timeout.ms": self.timeout_ms,
                "kafka.linger.ms": 0,
                "kafka.retry.backoff.ms": 20,
                "errors.tolerance": "all" if self.dead else "none",
                "errors.deadletterqueue.topic.name": self.dead or None,
            }
        )
        return replace(config, column_formats=unfit_rows.formats()) if self.has_formats else config

    def finished(self) -> int:
        return int(self.checkpoint.read_text()) if self.checkpoint.exists() else 0

    def log_commit(self, batch: int) -> None:
        written = self.checkpoint.with_suffix(".new")
        written.write_text(str(batch + 1))
        written.rename(self.checkpoint)

    def is_bad(self, number: int) -> bool:
        return bool(self.dead) and number % 4 == 1

    def row(self, number: int) -> tuple[bytes, bytes]:
        return str(number % KEYS).encode(), str(number).encode()

    def layout(self, batch: int, rng: random.Random) -> list[list[tuple[bytes, bytes]]]:
        """Return the batch's rows by task: one to four, some empty. The rows of a key are in one task, in order."""
        count = rng.randint(1, 4)
        homes = [rng.randrange(count) for _ in range(KEYS)]
        tasks: list[list[tuple[bytes, bytes]]] = [[] for _ in range(count)]
        for key in rng.sample(range(KEYS), KEYS):
            first = batch * self.rows
            tasks[homes[key]] += [self.row(n) for n in range(first, first + self.rows) if n % KEYS == key]
        return tasks

    def run(self, last_batch: int, seed: int) -> None:
        """Run batches up to `last_batch`."""
        rng = random.Random(seed)
        config = self.config()
        own = session(self.topic)
        for batch in range(self.finished(), last_batch + 1):
            layout = self.layout(batch, rng)

            def run_tasks(batch_start: BatchStart, batch_id: int, layout: Any = layout) -> Sequence[TaskOutcome]:
                return [self._task(config, batch_start, batch_id, index, rows) for index, rows in enumerate(layout)]

            own.run(config, StreamBatch("query", str(os.getpid()), batch), run_tasks)
            self.log_commit(batch)

    def _task(self, config: SinkConfig, batch_start: BatchStart, batch_id: int, index: int, rows: Any) -> TaskOutcome:
        task = TaskIdentity(batch_id, "query", index, 0)
        transaction = ExactlyOnceTask(
            batch_start, task, lambda ids: describe_in_process(config, batch_start.driver, ids)
        )
        delivery = TaskDelivery(config, process_pool(), transaction)
        if self.has_formats:
            numbers = [int(value) for _, value in rows]
            half = len(numbers) // 2
            batches = [unfit_rows.columns(part, KEYS) for part in (numbers[:half], numbers[half:])]
            write_all(delivery, [pa.RecordBatch.from_arrays([*each.values()], [*each]) for each in batches])
            return transaction.outcome
        try:
            for key, value in rows:
                if self.dead:
                    delivery.send_each(columns_by_topic(config, delivery.sifted(self._columns(key, value))))
                else:
                    delivery.send(self.topic, RecordColumns.from_rows([value], [key]))
            delivery.finish()
        finally:
            delivery.abandon()
        return transaction.outcome

    def _columns(self, key: bytes, value: bytes) -> dict[str, pa.Array]:
        number = int(value)
        partition = [-1, 99][number % 8 // 4] if self.is_bad(number) else None
        return {
            "value": pa.array([value]),
            "key": pa.array([key]),
            "partition": pa.array([partition], pa.int32()),
        }


@contextmanager
def started(servers: str, topic: str, checkpoint: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A driver in a process of its own, which is killed at the end if it still runs."""
    arguments = ["--servers", servers, "--topic", topic, "--checkpoint", str(checkpoint), *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "support.killed_query", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


class DyingCluster:
    """Wraps a driver's cluster, and kills the process before (`is_after` False) or after its n-th request."""

    def __init__(
        self,
        cluster: Any,
        number: int,
        is_after: bool,
        die: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self._die = die
        self._cluster = cluster
        self._left = number
        self._is_after = is_after
        self.place = cluster.place

    def end(self, transactions: Sequence[Any], *, committed: bool) -> list[Any]:
        return [self._count(partial(self._end_one, each, committed)) for each in transactions]

    def _end_one(self, transaction: Any, committed: bool) -> Any:
        return self._cluster.end([transaction], committed=committed)[0]

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._cluster, name)
        if not callable(call):
            return call
        return lambda *arguments, **named: self._count(lambda: call(*arguments, **named))

    def _count(self, call: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left < 0 and not self._is_after:
            self._die()
        answer = call()
        if self._left < 0:
            self._die()
        return answer


def put_before_next_cluster(stand_in: Callable[[KafkaDriverCluster], DyingCluster]) -> None:
    """Let the next driver session of this process make its requests to what `stand_in` returns."""

    patch = pytest.MonkeyPatch()

    def cluster(*arguments: Any, **named: Any) -> DyingCluster:
        patch.undo()
        return stand_in(KafkaDriverCluster(*arguments, **named))

    patch.setattr(session_module, "KafkaDriverCluster", cluster)


def in_a_process(run: Callable[[], None]) -> int:
    """Fork. The child calls the function and exits. Return its process id."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def killed_once(query: Query, batches: int, seed: int) -> str:
    """Run one process, which may be killed. Return how it ended."""
    rng = random.Random(seed)
    number, is_after = rng.randrange(DRIVERS_REQUESTS * 2), rng.random() < 0.5
    dies_by_itself = rng.random() < 0.6

    def run() -> None:
        if dies_by_itself:
            put_before_next_cluster(partial(DyingCluster, number=number, is_after=is_after))
        query.run(batches - 1, seed)

    child = in_a_process(run)
    deadline = time.monotonic() + (60 if dies_by_itself else rng.random() * LATEST_KILL_S)
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "killed itself" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "killed"


def kill_many(query: Query, expected: int, seed: int) -> None:
    """Run processes until that many were killed, and then one that is not. Print the outcomes."""
    kills, runs = 0, 0
    ends: dict[str, int] = {}
    while kills < expected:
        how = killed_once(query, query.finished() + 100, seed * 1_000_003 + runs)
        runs += 1
        ends[how] = ends.get(how, 0) + 1
        kills += how.startswith("killed")
        if runs > 5 * expected:
            raise SystemExit(f"{runs} processes, and {kills} of them killed: {ends}")
    last = query.finished() + 1
    _, status = os.waitpid(in_a_process(lambda: query.run(last, runs)), 0)
    result = {"kills": kills, "runs": runs, "ends": ends, "finished": query.finished(), "last": last + 1}
    print(json.dumps(result | {"status": status}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, help="kill that many processes")
    parser.add_argument("--batches", type=int, help="or run that many batches in this one")
    parser.add_argument("--decisions", default=DECISION_TOPIC, help="the decision topic")
    parser.add_argument("--dead", default="", help="the topic of dead letters")
    parser.add_argument("--formats", action="store_true", help="rows are structs that become Avro and JSON")
    options = parser.parse_args()
    query = Query(
        options.servers,
        options.topic,
        options.checkpoint,
        decisions=options.decisions,
        dead=options.dead,
        has_formats=options.formats,
    )
    if options.kills is not None:
        kill_many(query, options.kills, options.seed)
    else:
        query.run(query.finished() + options.batches - 1, options.seed)


if __name__ == "__main__":
    main()
