"""The measurements of benchmarks/exactly_once_cost.py: a cluster behind proxies, and batches of exactly-once delivery.

The batches run as with `format("kafka_sink")`, without Spark. The driver and the tasks run in this process, one after
the other, by the same functions that the data source calls.
"""

from __future__ import annotations

import argparse
import io
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from broker import KEPT, MARKERS_WITHIN_S, QUICK_DELETION
from microbenchmark import texts
from proxy import Counted, CountingProxy

from jobs.read_topic import topic_reader
from spark_kafka_sink.admin.transaction_values import TransactionState
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.protocol.fetch import LATEST_TIMESTAMP, READ_COMMITTED
from spark_kafka_sink.record import fingerprint as fingerprints
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.arrow_writer import write_all
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.exactly_once import task as task_module
from spark_kafka_sink.sink.exactly_once.cluster import connect, process_driver
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome
from spark_kafka_sink.sink.exactly_once.task import ExactlyOnceTask, TaskIdentity
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import process_pool

VALUE_BYTES = 100
"""Bytes of a value in measurements of requests and latencies."""
BLOCK_ROWS = 10_000
"""Rows of the Arrow batches that Spark gives to a data source."""
PHASES = ("begin", "tasks", "commit")
OFFSETS_TOPIC, STATE_TOPIC = "__consumer_offsets", "__transaction_state"
GAINED = ("control records in the topic", "decision topic", OFFSETS_TOPIC, STATE_TOPIC)
ENDING = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)


class MeasurementError(Exception):
    """The brokers do not have the records that were written."""


@dataclass(frozen=True)
class Stage:
    """A cluster, and the proxies in front of its brokers."""

    kafka: EmbeddedKafka
    proxies: Sequence[CountingProxy]

    @property
    def proxied(self) -> str:
        return ",".join(proxy.address for proxy in self.proxies)

    def counts(self) -> Mapping[str, Counted]:
        """Return the counts of all proxies together."""
        found: dict[str, Counted] = defaultdict(Counted)
        for proxy in self.proxies:
            for api, counted in proxy.counts().items():
                found[api] = found[api].plus(counted)
        return found

    def new_topic(self, partitions: int) -> str:
        name = f"cost-{uuid.uuid4().hex[:8]}"
        self.kafka.create_topic(name, partitions, len(self.proxies), KEPT)
        return name


@contextmanager
def stage_of(nodes: int, transaction_version: int) -> Iterator[Stage]:
    with ExitStack() as stack:
        proxies = {node: stack.enter_context(CountingProxy()) for node in range(1, nodes + 1)}
        kafka = stack.enter_context(
            EmbeddedKafka(
                nodes,
                properties=QUICK_DELETION,
                features={"transaction.version": transaction_version},
                advertised={node: proxy.address for node, proxy in proxies.items()},
                tuned_for="throughput",
            )
        )
        for node, proxy in proxies.items():
            proxy.upstream = kafka.proxied_address(node)
        yield Stage(kafka, tuple(proxies.values()))


class Query:
    """One query, from its first batch on. A batch is `begin`, `run_task` of each of its tasks, and `commit`."""

    def __init__(self, servers: str, topic: str) -> None:
        self.prefix = f"cost-{uuid.uuid4().hex[:8]}"
        self.topic = topic
        self.batch_id = 0
        self._config = SinkConfig.from_options(
            {
                "kafka.bootstrap.servers": servers,
                "topic": topic,
                "delivery.guarantee": "exactly-once",
                "transactional.id.prefix": self.prefix,
            }
        )

    @property
    def decision_topic(self) -> str:
        return self._config.decision_topic

    def begin(self) -> BatchStart:
        with process_driver(self._config, self.prefix) as driver:
            return driver.begin()

    def run_task(self, batch_start: BatchStart, partition: int, blocks: Iterable[pa.RecordBatch]) -> TaskOutcome:
        identity = TaskIdentity(self.batch_id, self.prefix, partition, 0)
        task = ExactlyOnceTask.in_process(self._config, batch_start, identity)
        write_all(TaskDelivery(self._config, process_pool(), task), blocks)
        return task.outcome

    def commit(self, outcomes: Sequence[TaskOutcome]) -> None:
        with process_driver(self._config, self.prefix) as driver:
            driver.commit(outcomes)
        self.batch_id += 1


def blocks_of(rows: int, value_bytes: int, first: int = 0) -> list[pa.RecordBatch]:
    """Return rows that count up from `first`, with 100,003 different keys of 20 bytes, and values of text."""
    blocks = []
    for start in range(first, first + rows, BLOCK_ROWS):
        numbers = range(start, min(start + BLOCK_ROWS, first + rows))
        keys = texts([f"customer-{10_000_000_000 + number * 31 % 100_003}" for number in numbers])
        values = texts([f'{{"id":{number:010d},"note":"'.ljust(value_bytes, "x") for number in numbers])
        blocks.append(pa.record_batch({"key": keys, "value": values}))
    return blocks


# ---- counting --------------------------------------------------------------------------------------------------------


class Logs:
    """The logs that a batch is written to: their end offsets, and the number of records that a reader finds."""

    def __init__(self, servers: str, topic: str, decision_topic: str) -> None:
        self._servers = servers
        self.topic = topic
        self.topics = (topic, decision_topic, OFFSETS_TOPIC, STATE_TOPIC)

    def await_markers(self) -> None:
        """Wait until the coordinators have written all end markers. They write them after they have answered EndTxn."""
        deadline = time.monotonic() + MARKERS_WITHIN_S
        with connect(ProducerConfig.from_mapping({"bootstrap.servers": self._servers})) as coordinator:
            while left := coordinator.transactions.list_transactions(coordinator.timer(30_000), states=ENDING):
                if time.monotonic() > deadline:
                    raise MeasurementError(f"{len(left)} transactions have no end markers after {MARKERS_WITHIN_S:g} s")
                time.sleep(0.02)

    def ends(self) -> dict[TopicPartition, int]:
        """Return the end offset of each partition."""
        with topic_reader(self._servers, self.topic, "exactly-once-cost") as reader:
            places = [place for topic in self.topics for place in reader.partitions(topic)]
            return reader.offsets(places, LATEST_TIMESTAMP)

    def records(self, start: Mapping[TopicPartition, int]) -> int:
        """Count the records of the topic from these offsets on, as a reader under read_committed finds them."""
        own = {place: offset for place, offset in start.items() if place.topic == self.topic}
        with topic_reader(self._servers, self.topic, "exactly-once-cost") as reader:
            return sum(len(found.records) for found in reader.read([self.topic], READ_COMMITTED, own))


@dataclass(frozen=True)
class Batch:
    """The counts of one batch."""

    phases: Mapping[str, Mapping[str, Counted]]
    """The counts by phase and api."""
    gained: Mapping[str, int]
    """Records that the logs of each topic gained; for the topic that was written, only control records."""

    def requests(self, phase: str) -> int:
        return sum(counted.requests for counted in self.phases[phase].values())

    @property
    def total(self) -> Counted:
        every = (counted for phase in self.phases.values() for counted in phase.values())
        return reduce(Counted.plus, every, Counted())

    @property
    def rows_up(self) -> int:
        """Bytes of the tasks' Produce requests."""
        return self.phases["tasks"].get("Produce", Counted()).bytes_up

    def as_dict(self) -> dict[str, Any]:
        phases = {
            name: {api: counted._asdict() for api, counted in phase.items()} for name, phase in self.phases.items()
        }
        return {"phases": phases, "gained": dict(self.gained)}


def difference(before: Mapping[str, Counted], after: Mapping[str, Counted]) -> dict[str, Counted]:
    found = {api: counted.minus(before.get(api, Counted())) for api, counted in after.items()}
    return {api: counted for api, counted in found.items() if counted != Counted()}


class Counting:
    """Counts the batches of one query."""

    def __init__(self, stage: Stage, tasks: int, rows: int, partitions: int) -> None:
        self._stage = stage
        self._query = Query(stage.proxied, stage.new_topic(partitions))
        self._rows = rows
        self._blocks = [blocks_of(rows, VALUE_BYTES, task * rows) for task in range(tasks)]
        self._logs: Logs | None = None

    def batch(self) -> Batch:
        """Write a batch. Raises MeasurementError if the topic does not contain its rows."""
        query = self._query
        before = None if self._logs is None else self._logs.ends()
        seen = [self._stage.counts()]
        batch_start = query.begin()
        seen.append(self._stage.counts())
        outcomes = [query.run_task(batch_start, number, blocks) for number, blocks in enumerate(self._blocks)]
        seen.append(self._stage.counts())
        query.commit(outcomes)
        seen.append(self._stage.counts())
        phases = {name: difference(*seen[number : number + 2]) for number, name in enumerate(PHASES)}
        if self._logs is None:  # the first batch may have created internal topics
            self._logs = Logs(self._stage.kafka.bootstrap_servers, query.topic, query.decision_topic)
        self._logs.await_markers()
        return Batch(phases, {} if before is None else self._gained(self._logs, before))

    def _gained(self, logs: Logs, before: Mapping[TopicPartition, int]) -> dict[str, int]:
        gained: dict[str, int] = defaultdict(int)
        for place, end in logs.ends().items():
            gained[place.topic] += end - before[place]
        found, expected = logs.records(before), self._rows * len(self._blocks)
        if found != expected:
            raise MeasurementError(f"{logs.topic}: a batch of {expected:,} rows has {found:,} in the topic")
        gained[logs.topic] -= found
        return {name: gained[topic] for name, topic in zip(GAINED, logs.topics, strict=True)}


# ---- timing ----------------------------------------------------------------------------------------------------------


@dataclass
class Latency:
    """Milliseconds of each batch's begin and commit, and of each task."""

    begin: list[float] = field(default_factory=list)
    task: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)


def timed(times: list[float], work: Callable[..., Any], *arguments: object) -> Any:
    started = time.perf_counter()
    result = work(*arguments)
    times.append((time.perf_counter() - started) * 1000)
    return result


def latency(stage: Stage, tasks: int, settings: argparse.Namespace) -> Latency:
    query = Query(stage.kafka.bootstrap_servers, stage.new_topic(settings.partitions))
    every = [blocks_of(settings.rows, VALUE_BYTES, task * settings.rows) for task in range(tasks)]
    logs = Logs(stage.kafka.bootstrap_servers, query.topic, query.decision_topic)
    found = Latency()
    for number in range(settings.warm_up + settings.batches):
        if number == settings.warm_up:
            found = Latency()
        batch_start = timed(found.begin, query.begin)
        outcomes = [timed(found.task, query.run_task, batch_start, task, blocks) for task, blocks in enumerate(every)]
        timed(found.commit, query.commit, outcomes)
        logs.await_markers()
    return found


@dataclass
class Share:
    """Nanoseconds for each record, one entry for each round. `elapsed` and `processor` (time of the process) have a
    task with the fingerprint and one without. `alone` has only the fingerprint by the compiled kernel, `alone_by_numpy`
    by numpy.
    """

    value_bytes: int
    rows: int
    elapsed: list[tuple[float, float]] = field(default_factory=list)
    processor: list[tuple[float, float]] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    alone_by_numpy: list[float] = field(default_factory=list)


def no_fingerprint(_topic: str, _columns: RecordColumns) -> int:
    return 0


def stream_of(blocks: Sequence[pa.RecordBatch]) -> bytes:
    """Return the blocks as the bytes that Spark sends to a task."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, blocks[0].schema) as writer:
        for block in blocks:
            writer.write_batch(block)
    return bytes(sink.getvalue())


def read(stream: bytes) -> pa.RecordBatchReader:
    """Read the blocks into new memory, as a task gets them: in the processor's caches, if they fit."""
    return pa.ipc.open_stream(io.BytesIO(stream))


def run_task_alone(query: Query, stream: bytes, rows: int) -> tuple[float, float]:
    """Run a batch with one task. Return elapsed and processor nanoseconds for each record of the task."""
    batch_start = query.begin()
    elapsed, processor = time.perf_counter_ns(), time.process_time_ns()
    outcome = query.run_task(batch_start, 0, read(stream))
    elapsed, processor = time.perf_counter_ns() - elapsed, time.process_time_ns() - processor
    query.commit([outcome])
    return elapsed / rows, processor / rows


def fingerprint_alone(stream: bytes) -> float:
    """Return processor nanoseconds for each record of the fingerprint by itself."""
    spent = rows = 0
    for block in read(stream):
        columns = RecordColumns(value=block.column("value"), key=block.column("key"))
        started = time.thread_time_ns()
        fingerprints.fingerprint("topic", columns)
        spent += time.thread_time_ns() - started
        rows += block.num_rows
    return spent / rows


def task_without_fingerprint(query: Query, stream: bytes, rows: int) -> tuple[float, float]:
    """Run as `run_task_alone`, without the fingerprint."""
    with patch.object(task_module, "fingerprint", no_fingerprint):
        return run_task_alone(query, stream, rows)


def share(stage: Stage, value_bytes: int, rows: int, settings: argparse.Namespace) -> Share:
    query = Query(stage.kafka.bootstrap_servers, stage.new_topic(settings.partitions))
    blocks = blocks_of(rows, value_bytes)
    stream, first_block = stream_of(blocks), stream_of(blocks[:1])
    found = Share(value_bytes, rows)
    for number in range(settings.rounds + 1):
        ways = (run_task_alone, task_without_fingerprint)
        turn = [way(query, stream, rows) for way in (ways if number % 2 else ways[::-1])]
        with_it, without = turn if number % 2 else turn[::-1]
        alone = fingerprint_alone(stream)
        with patch.object(fingerprints, "add_hashes", fingerprints.add_hashes_by_numpy):
            by_numpy = fingerprint_alone(first_block)
        if number:  # the first round warms up
            found.elapsed.append((with_it[0], without[0]))
            found.processor.append((with_it[1], without[1]))
            found.alone.append(alone)
            found.alone_by_numpy.append(by_numpy)
    return found
