"""The requests and bytes of batches, and what the brokers' logs gain by them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from benchmark_proxy import Counted
from exactly_once_batches import VALUE_BYTES, MeasurementError, Query, Stage, blocks_of
from read_topic import topic_reader

from spark_kafka_sink.admin.transaction_values import TransactionState
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.protocol.requests import LATEST_TIMESTAMP, READ_COMMITTED
from spark_kafka_sink.sink.exactly_once.cluster import connect

PHASES = ("begin", "tasks", "commit")
OFFSETS_TOPIC, STATE_TOPIC = "__consumer_offsets", "__transaction_state"
GAINED = ("control records in the topic", "decision topic", OFFSETS_TOPIC, STATE_TOPIC)
ENDING = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)
MARKERS_WITHIN_S = 30.0


class Logs:
    """The logs that a batch is written to: how far they go, and how many records a reader finds."""

    def __init__(self, servers: str, topic: str, decision_topic: str) -> None:
        self._servers = servers
        self.topic = topic
        self.topics = (topic, decision_topic, OFFSETS_TOPIC, STATE_TOPIC)

    def await_markers(self) -> None:
        """Wait until the coordinators have written all end markers, which they do after they have answered EndTxn."""
        deadline = time.monotonic() + MARKERS_WITHIN_S
        with connect(ProducerConfig.from_mapping({"bootstrap.servers": self._servers})) as coordinator:
            while left := coordinator.transactions.list_transactions(coordinator.timer(30_000), states=ENDING):
                if time.monotonic() > deadline:
                    raise MeasurementError(f"{len(left)} transactions have no end markers after {MARKERS_WITHIN_S:g} s")
                time.sleep(0.02)

    def ends(self) -> dict[TopicPartition, int]:
        """The end offset of each partition."""
        with topic_reader(self._servers, self.topic, "exactly-once-cost") as reader:
            places = [place for topic in self.topics for place in reader.partitions(topic)]
            return reader.offsets(places, LATEST_TIMESTAMP)

    def records(self, start: Mapping[TopicPartition, int]) -> int:
        """Of the topic, from these offsets on, as a reader under read_committed finds them."""
        own = {place: offset for place, offset in start.items() if place.topic == self.topic}
        with topic_reader(self._servers, self.topic, "exactly-once-cost") as reader:
            return sum(len(found.records) for found in reader.read([self.topic], READ_COMMITTED, own))


@dataclass(frozen=True)
class Batch:
    """One batch, as it was counted."""

    phases: Mapping[str, Mapping[str, Counted]]
    """By phase and api."""
    gained: Mapping[str, int]
    """How far the logs of each topic went on; of the topic that was written, by control records only."""

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
        """Write a batch. Raises MeasurementError where the topic does not hold its rows."""
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
