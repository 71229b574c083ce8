"""A producer that follows a script instead of talking to a broker.

It stands at the sink's own seam, the `Producer` protocol. It has no transactions; a test's subclass may add them.

By default every row is acknowledged at flush, as the real one does at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.fake_clock import FakeClock

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.producer.futures import RunCallback, RunMetadata
from spark_kafka_sink.producer.transactions import PreparedTransaction
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.producer_pool import ProducerPool


@dataclass
class Sent:
    topic: str
    columns: RecordColumns
    on_completion: RunCallback | None

    def rows(self, *names: str) -> list[tuple[Any, ...]]:
        arrays = [getattr(self.columns, name) for name in names]
        return list(zip(*(array.to_pylist() for array in arrays), strict=True))

    def report(self, error: KafkaError | None = None, partition: int = 0, count: int | None = None) -> None:
        assert self.on_completion is not None
        run = RunMetadata(self.topic, partition, -1 if error else 0, count or self.columns.num_rows, -1, 0)
        self.on_completion(run, error)


@dataclass
class ScriptedProducer:
    on_send: Callable[[Sent], None] | None = None
    on_flush: Callable[[Sequence[Sent]], None] | None = None
    sent: list[Sent] = field(default_factory=list)
    unreported: list[Sent] = field(default_factory=list)
    looked_up: list[str] = field(default_factory=list)
    flushes: int = 0
    closed_with: list[float | None] = field(default_factory=list)
    has_failed: bool = False
    partitions: int = 4
    client_id: str = ""
    waited_ms: tuple[int, int] = (0, 0)

    def send_columns(self, topic: str, columns: RecordColumns, on_completion: RunCallback | None = None) -> None:
        assert not self.closed_with, "a send after close"
        sent = Sent(topic, columns, on_completion)
        if self.on_send is not None:
            self.on_send(sent)
        self.sent.append(sent)
        self.unreported.append(sent)

    def flush(self, timeout: float | None = None) -> None:
        self.flushes += 1
        unreported, self.unreported = self.unreported, []
        if self.on_flush is not None:
            self.on_flush(unreported)
            return
        for sent in unreported:
            sent.report()

    def look_up(self, topics: Iterable[str]) -> None:
        self.looked_up.extend(topics)

    def partitions_for(self, topic: str) -> range:
        assert topic in {each.topic for each in self.sent}
        return range(self.partitions)

    def close(self, timeout: float | None = None) -> None:
        self.closed_with.append(timeout)

    def batches_and_retries(self) -> tuple[int, int]:
        return len(self.sent), 0

    def waits_ms(self) -> tuple[int, int]:
        return self.waited_ms

    def metrics(self) -> dict[str, float]:
        return {"batch-send-total": float(len(self.sent)), "record-retry-total": 0.0}

    def topic_metrics(self) -> dict[str, dict[str, float]]:
        return {each.topic: {"record-error-total": 0.0, "compression-rate": 1.0} for each in self.sent}

    def node_metrics(self) -> dict[str, dict[str, float]]:
        return {"node-1": {"request-total": float(self.flushes)}}

    def connection_metrics(self) -> dict[tuple[str, str], dict[str, float]]:
        return {("node-1", "h1:9092"): {"ready": 1.0, "requests-in-flight": float(len(self.unreported))}}

    def init_transactions(
        self, transactional_id: str | None = None, coordinators: Mapping[tuple[int, str], Node] | None = None
    ) -> None:
        raise AssertionError("this producer has no transactions")

    def begin_transaction(self) -> None:
        raise AssertionError("this producer has no transactions")

    def send_offsets_to_transaction(self, offsets: Mapping[TopicPartition, tuple[int, str | None]], group: str) -> None:
        raise AssertionError("this producer has no transactions")

    @property
    def current_transaction(self) -> OpenTransaction:
        raise AssertionError("this producer has no transactions")

    def prepare_transaction(self) -> PreparedTransaction:
        raise AssertionError("this producer has no transactions")


class ScriptedPool(ProducerPool):
    """A pool of one scripted producer, or of the producers that `create` makes."""

    def __init__(
        self, create: ScriptedProducer | Callable[[ProducerConfig], ScriptedProducer], clock: Clock | None = None
    ) -> None:
        self.create: Callable[[ProducerConfig], ScriptedProducer] = (
            (lambda _: create) if isinstance(create, ScriptedProducer) else create
        )
        super().__init__(lambda config: self.create(config), clock or FakeClock())

    @property
    def lent(self) -> int:
        return len(self._lent)
