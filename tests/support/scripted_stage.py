"""A producer and a scripted cluster, over real sockets; the sent records are compared with the logs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from support.fault_stage import Timeline
from support.history import History, Outcome, Read, Sent
from support.lateness import Stopwatch
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer
from support.workload import Ledger, assert_kept

from spark_kafka_sink.producer.kafka_producer import KafkaProducer

StartProducer = Callable[..., KafkaProducer]
FAST = {
    "linger.ms": 0,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 100,
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 100,
    "request.timeout.ms": 500,
    "delivery.timeout.ms": 20_000,
}
_LATEST_S = 10


class Scripted:
    """A scripted cluster on sockets with a topic of two partitions, a producer, and the records that it sent."""

    def __init__(self, start_producer: StartProducer, timeline: Timeline, nodes: int = 1, **options: Any) -> None:
        self.cluster = ScriptedCluster(nodes, **options)
        self.cluster.create_topic("t", 2)
        self.server = ScriptedServer(self.cluster)
        self.note = timeline.note
        self.ledger = Ledger("scripted")
        self._start = start_producer

    def producer(self, **settings: object) -> KafkaProducer:
        return self._start(",".join(self.server.bootstrap_servers), **FAST | settings)

    def send(self, producer: KafkaProducer, number: int = 1, partition: int = 0) -> list[Sent]:
        """Send that many records, one in each batch if batch.size allows no more. Their outcomes go to the ledger."""
        records = [self.ledger.add(("t", partition)) for _ in range(number)]
        for record in records:
            producer.send("t", record.value, partition=partition, on_completion=self.ledger.of_row(record))
        return records

    def deliver(self, producer: KafkaProducer, number: int = 1, partition: int = 0) -> None:
        """Send, and check that every record is acknowledged."""
        records = self.send(producer, number, partition)
        producer.flush(30)
        assert [record.outcome for record in records] == [Outcome.YES] * number, self.ledger.errors[:3]

    def check(self) -> None:
        """Check that the logs contain the acknowledged records."""
        self.ledger.check()
        assert all(record.outcome is not Outcome.UNKNOWN for record in self.ledger.sent), "a record without outcome"
        with self.server.lock:
            reads = [
                Read("t", partition, record.offset, (record.value or b"").decode())
                for partition, records in enumerate(self.cluster.records("t"))
                for record in records
            ]
        assert_kept(History(self.ledger.sent, reads))
        self.note(f"{len(self.ledger.sent)} records, {len(self.ledger.errors)} failed, no anomaly")

    def requests(self, api_key: int) -> int:
        with self.server.lock:
            return len(self.cluster.requests_of(api_key))

    def on(self, api_key: int, hook: faults.Hook, **when: Any) -> faults.Script:
        with self.server.lock:
            return self.cluster.on(api_key, hook, **when)


class TableStage:
    """A stage of `answer_table`. Its producer starts with the first record."""

    def __init__(self, stage: Scripted, settings: Mapping[str, Any]) -> None:
        self._stage = stage
        self._producer = cache(lambda: stage.producer(**settings))
        self.topic = "t"

    def send(self, number: int = 1, partition: int = 0) -> None:
        self._stage.send(self._producer(), number, partition)

    def deliver(self, number: int = 1, partition: int = 0) -> list[int]:
        self.send(number, partition)
        self._producer().flush(30)
        assert {record.outcome for record in self._stage.ledger.sent} == {Outcome.YES}, self._stage.ledger.errors[:3]
        return [-1 if record.offset is None else record.offset for record in self._stage.ledger.sent[-number:]]

    def wait(self, duration_ms: int) -> None:
        time.sleep(duration_ms / 1000)

    def watch(self) -> Stopwatch:
        return Stopwatch()

    def on(self, api_key: int, hook: faults.Hook, times: int | None = 1) -> faults.Script:
        return self._stage.on(api_key, hook, times=times)

    def requests(self, api_key: int) -> int:
        return self._stage.requests(api_key)

    @contextlib.contextmanager
    def cluster(self) -> Iterator[ScriptedCluster]:
        with self._stage.server.lock:
            yield self._stage.cluster


@pytest.fixture
def scripted(start_producer: StartProducer, timeline: Timeline) -> Iterator[Callable[..., Scripted]]:
    """`scripted(nodes=1, ...)` starts a cluster, which is stopped after the row."""
    with contextlib.ExitStack() as stack:

        def start(nodes: int = 1, **options: Any) -> Scripted:
            made = Scripted(start_producer, timeline, nodes, **options)
            stack.enter_context(made.server)
            return made

        yield start


Start = Callable[..., Scripted]


def outcome_by(deadline_s: float, producer: KafkaProducer, records: list[Sent]) -> None:
    """Check that every record has an outcome within this time, without the lateness of the machine."""
    with Stopwatch() as watch:
        producer.flush(deadline_s + _LATEST_S)
    assert watch.own_s <= deadline_s, f"{watch.took_s:.2f} s"
    assert all(record.outcome is not Outcome.UNKNOWN for record in records)
