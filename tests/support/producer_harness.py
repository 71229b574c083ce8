"""A whole producer in one thread: real parts over the fake selector, a scripted cluster and a fake clock.

The test sends, and runs the Sender turn by turn. A send that waits (for metadata, for memory) runs turns.
Everything follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.fake_clock import FakeClock
from support.fake_selector import FakeNetwork, FakeSelector
from support.scripted_broker.cluster import ScriptedCluster

from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.factory import network_client
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.futures import FutureRecordMetadata, RecordMetadata, RunMetadata
from spark_kafka_sink.producer.idempotence import ProducerIdentity
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata
from spark_kafka_sink.producer.writes import WriteReport
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.columns import RecordColumns

TOPIC = "flights"
AT_ONCE = {"linger.ms": "0"}
"""Settings: send each record as soon as the node is ready."""
ONE_EACH = {"linger.ms": "0", "batch.size": "1"}
"""Settings: one record in each batch."""
_TURNS_WITHOUT_TIME = 2_000


@dataclass(slots=True, eq=False)
class Delivery:
    """One `send` and its outcome. `calls` are those of its callback; more than one is a fault."""

    topic: str
    value: bytes | str | None
    sent_ms: int
    future: FutureRecordMetadata | None = None
    calls: list[tuple[RecordMetadata, KafkaError | None]] = field(default_factory=list)
    settled_ms: int | None = None

    @property
    def is_settled(self) -> bool:
        return bool(self.calls)

    @property
    def error(self) -> KafkaError | None:
        return self.calls[0][1] if self.calls else None

    @property
    def took_ms(self) -> int:
        """Return the time from the send to the callback. The record must have its outcome."""
        assert self.settled_ms is not None
        return self.settled_ms - self.sent_ms

    @property
    def metadata(self) -> RecordMetadata | None:
        """The metadata of an acknowledged record."""
        return self.calls[0][0] if self.calls and self.error is None else None

    @property
    def place(self) -> RecordMetadata:
        """The metadata that the callback got, also with an error."""
        return self.calls[0][0]


@dataclass(slots=True, eq=False)
class ColumnsDelivery:
    """One `send_columns` and its runs."""

    topic: str
    num_rows: int
    sent_ms: int
    runs: list[tuple[RunMetadata, KafkaError | None]] = field(default_factory=list)

    @property
    def settled_rows(self) -> int:
        return sum(run.record_count for run, _ in self.runs)

    @property
    def is_settled(self) -> bool:
        return self.settled_rows >= self.num_rows

    @property
    def error(self) -> KafkaError | None:
        """Return the error of the first run that failed."""
        return next((error for _, error in self.runs if error is not None), None)


class DrivenProducer(KafkaProducer):
    """A producer whose flush can run the Sender's turns, because no thread does."""

    on_flush: Callable[[], None] | None = None

    def flush(self, timeout: float | None = None) -> None:
        if self.on_flush is None:
            super().flush(timeout)
        else:
            self.on_flush()


class ProducerHarness:
    """All parts of one producer. `settings` are Kafka's producer keys; bootstrap.servers is filled in.

    `topics`: partitions by name. `on_turn`, if set, is called before every turn, for the faults of a simulation.
    """

    selector_class: type[FakeSelector] = FakeSelector

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        topics: Mapping[str, int] | None = None,
        node_count: int = 1,
        cluster: ScriptedCluster | None = None,
        latency_ms: Callable[[], int] = lambda: 1,
        seed: int = 1,
    ) -> None:
        rng = random.Random(seed)
        self.clock = FakeClock()
        self.clock.on_wait = self._wait
        self.cluster = cluster or ScriptedCluster(node_count)
        for topic, partitions in ({TOPIC: 1} if topics is None else topics).items():
            self.cluster.create_topic(topic, partitions)
        self.network = FakeNetwork(self.cluster, latency_ms)
        self.selector = self.selector_class(self.network, self.clock)
        addresses = self.network.bootstrap_addresses()
        servers = ",".join(f"{host}:{port}" for host, port in addresses)
        self.config = config = ProducerConfig.from_mapping({"bootstrap.servers": servers, **(settings or {})})
        self.metadata = ProducerMetadata.of(config, self.clock, rng)
        self.metadata.bootstrap(addresses)
        self.api_versions = ApiVersions()
        self.client = network_client(
            config,
            self.metadata,
            self.clock,
            rng,
            self.api_versions,
            selector=self.selector,
            resolve=self.network.resolve,
        )
        self.producer = DrivenProducer(
            config,
            clock=self.clock,
            rng=rng,
            client=self.client,
            metadata=self.metadata,
            api_versions=self.api_versions,
        )
        self.accumulator = self.producer._accumulator
        self.on_turn: Callable[[], None] | None = None
        self.deliveries: list[Delivery | ColumnsDelivery] = []
        self.turns = 0

    # ---- time --------------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def turn(self, max_ms: int | None = None) -> None:
        """Run one turn of the Sender, with a poll of at most `max_ms`."""
        self.turns += 1
        if self.on_turn is not None:
            self.on_turn()
        if max_ms is not None:
            self.selector.at(self.now_ms + max_ms, self.selector.wakeup)
        self.producer.sender.run_once()

    def turn_of_thread(self) -> None:
        """A turn as the Sender's thread runs it: a fault in it marks the producer as failed, and does not end the
        thread.
        """
        self.producer.sender._run_safely()

    def run_until(self, condition: Callable[[], object], limit_ms: int = 300_000) -> None:
        """Run turns until the condition holds. Fails after `limit_ms`, or if turns pass and the clock does not."""
        deadline_ms = self.now_ms + limit_ms
        moved_ms, moved_turn = self.now_ms, self.turns
        while not condition():
            assert self.now_ms < deadline_ms, f"not so within {limit_ms} ms: {self.producer!r}"
            self.turn(deadline_ms - self.now_ms)
            if self.now_ms != moved_ms:
                moved_ms, moved_turn = self.now_ms, self.turns
            assert self.turns - moved_turn < _TURNS_WITHOUT_TIME, f"the Sender runs hot: {self.producer!r}"

    def run_for(self, duration_ms: int) -> None:
        deadline_ms = self.now_ms + duration_ms
        self.run_until(lambda: self.now_ms >= deadline_ms, duration_ms + 1)

    def _wait(self, timeout_ms: int) -> None:
        """Run the Sender's turns while an application thread waits."""
        before_ms = self.now_ms
        self.turn(timeout_ms)
        if self.now_ms == before_ms and not self.client.has_in_flight_requests():
            self.clock.advance(1)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(
        self, value: bytes | str | None = b"value", topic: str = TOPIC, partition: int | None = None, **more: Any
    ) -> Delivery:
        """Call `KafkaProducer.send`, and note the outcome."""
        delivery = Delivery(topic, value, self.now_ms)

        def note(metadata: RecordMetadata, error: KafkaError | None) -> None:
            delivery.calls.append((metadata, error))
            delivery.settled_ms = self.now_ms

        delivery.future = self.producer.send(topic, value, partition=partition, on_completion=note, **more)
        self.deliveries.append(delivery)
        return delivery

    def send_columns(self, columns: RecordColumns, topic: str = TOPIC) -> ColumnsDelivery:
        delivery = ColumnsDelivery(topic, columns.num_rows, self.now_ms)
        self.deliveries.append(delivery)
        self.producer.send_columns(topic, columns, lambda run, error: delivery.runs.append((run, error)))
        return delivery

    def write(self, data: object, topic: str | None = TOPIC, **names: Any) -> WriteReport:
        """`KafkaProducer.write`. Its flush, and later ones, run the Sender's turns."""
        self.producer.on_flush = self.flush
        return self.producer.write(data, topic, **names)

    def warm_up(self, *topics: str) -> None:
        """Send one record to each partition and wait for the acknowledgement: metadata, connections and, with
        idempotence, a producer id are then there.
        """
        for topic in topics or (TOPIC,):
            for partition in range(len(self.cluster.topics[topic].partitions)):
                self.send(b"warm-up", topic, partition)
        self.settle()
        assert all(delivery.error is None for delivery in self.deliveries)
        self.deliveries.clear()

    def settle(self, limit_ms: int = 300_000) -> None:
        """Run turns until every delivery has its outcome."""
        self.run_until(lambda: all(delivery.is_settled for delivery in self.deliveries), limit_ms)

    def flush(self, limit_ms: int = 300_000) -> None:
        """Flush as an application thread does, and run the Sender's turns."""

        def wait(batch: ProducerBatch) -> bool:
            self.run_until(lambda: batch.result.is_done, limit_ms)  # as the product: a split batch itself never ends
            return True

        self.accumulator.flush(lambda: None, wait)

    def close(self) -> None:
        """Close as the Sender's thread would: drain, then end."""
        self.producer.close()
        self.selector.is_woken = False  # it has ended the poll that waited
        self.producer.sender.run()

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> ProducerIdentity:
        """The state of an idempotent producer without transactions."""
        identity = self.producer._identity
        assert identity is not None
        return identity

    @property
    def known_topics(self) -> tuple[str, ...]:
        """Return the topics that the next full Metadata request names."""
        return self.metadata.new_metadata_request_builder().topics or ()

    @property
    def memory_in_use(self) -> int:
        """The bytes of buffer.memory that were not given back."""
        pool = self.accumulator.pool
        return pool.total_memory - pool.available_memory

    def values(self, topic: str = TOPIC, partition: int = 0) -> list[bytes | None]:
        """Return the values in a partition's log, in order, without those of `warm_up`."""
        records = self.cluster.records(topic)[partition]
        return [record.value for record in records if record.value != b"warm-up"]

    def sent_batches(self, topic: str = TOPIC) -> int:
        """Return the number of batches for the topic that the brokers received."""
        return sum(
            len(each.partition_data)
            for exchange in self.cluster.requests_of(ApiKey.PRODUCE)
            for each in exchange.request.topic_data
            if each.name == topic
        )


def warm(settings: Mapping[str, Any] = AT_ONCE, **more: Any) -> ProducerHarness:
    """Return a harness whose topics are known and whose partitions have acknowledged a record each.

    `more` goes to ProducerHarness. The cluster has forgotten the requests.
    """
    harness = ProducerHarness(settings, **more)
    harness.warm_up(*harness.cluster.topics)
    harness.cluster.requests.clear()
    return harness
