"""A task's delivery: acquire a producer, send, flush, check, release. Every interface of the sink goes through it.

A row counts only when the broker has acknowledged it: `finish` raises unless every row was acknowledged. The task's
thread owns the delivery; the Sender thread reports to its `RowCounts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool
from spark_kafka_sink.sink.worker import acknowledge_now


@dataclass(slots=True)
class Delivered:
    """The rows that one partition of a topic has received."""

    records: int = 0
    size: int = 0
    """Bytes of encoded records, before compression."""
    last_offset: int = -1


class RowCounts:
    """Acknowledged rows of one task, and the first error. The Sender thread writes, the task's thread reads."""

    __slots__ = ("_first_error", "acknowledged", "delivered")

    def __init__(self) -> None:
        self.acknowledged = 0
        self.delivered: dict[TopicPartition, Delivered] = {}
        self._first_error: Exception | None = None

    def __call__(self, run: RunMetadata, error: KafkaError | None) -> None:
        """Take the producer's report on `run.record_count` rows."""
        if error is not None:
            if self._first_error is None:
                self._first_error = error.at(topic_partition=TopicPartition(run.topic, run.partition))
            return
        self.acknowledged += run.record_count
        place = TopicPartition(run.topic, run.partition)
        delivered = self.delivered.get(place)
        if delivered is None:
            delivered = self.delivered[place] = Delivered()
        delivered.records += run.record_count
        delivered.size += run.serialized_size
        if run.base_offset >= 0:
            delivered.last_offset = max(delivered.last_offset, run.base_offset + run.record_count - 1)

    def fail(self, error: Exception) -> None:
        """Note that `error` lost rows before they were sent."""
        if self._first_error is None:
            self._first_error = error

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._first_error is not None:
            raise self._first_error


class Transaction(Protocol):
    """The transaction that a task's rows go into, as `TaskDelivery` uses it."""

    @property
    def is_prepared(self) -> bool:
        """Whether the transaction is complete and stays open when the producer goes back to the pool."""
        ...

    def takes(self, topic: str, columns: RecordColumns) -> bool:
        """Count rows before they are sent. False: they are written already, and must not be sent."""
        ...

    def begin(self, pool: ProducerPool, config: ProducerConfig) -> Producer:
        """Borrow a producer of `config` and begin the transaction in it. Raises KafkaError."""
        ...

    def add_marker(self, producer: Producer, rows: int) -> None:
        """Add the marker of `rows` sent rows to the transaction, without waiting. Raises KafkaError."""
        ...

    def prepare(self, producer: Producer) -> None:
        """Leave the transaction open for the driver, once all rows are acknowledged. Raises KafkaError."""
        ...


class TaskDelivery:
    """Any number of `send`, then `finish`; or `abandon` if something failed.

    Must be made before the task reads a row. The producer is taken at the first send, so an empty partition makes no
    connection. Without a `transaction` delivery is at least once, and tasks share the producer.
    """

    def __init__(self, config: SinkConfig, pool: ProducerPool, transaction: Transaction | None = None) -> None:
        acknowledge_now()  # so that Spark sends the task's rows
        self.config = config
        self.counts = RowCounts()
        self.batches = 0
        self.retries = 0
        """Acknowledged batches and retried records while this task had the producer; known after `finish`."""
        self.topics: Sequence[str] = ()
        """The topics of the last `send_each`."""
        self._pool = pool
        self._transaction = transaction
        self._producer: Producer | None = None
        self._before: Mapping[str, float] = {}
        self._sent = 0

    def send(self, topic: str, columns: RecordColumns) -> None:
        """Send rows. Raises KafkaError as soon as one of these rows or of earlier ones is known to have failed."""
        if self._transaction is not None and not self._transaction.takes(topic, columns):
            return
        self.counts.check()
        if self._producer is None:
            self._producer = self._acquire()
            self._before = self._producer.metrics()
            if self.config.metrics_ports is not None:
                from spark_kafka_sink.sink.prometheus import serve  # of an extra

                serve(self._pool, self.config.metrics_host, self.config.metrics_ports)
        self._producer.send_columns(topic, columns, self.counts)
        self._sent += columns.num_rows

    def send_each(self, rows: Iterable[tuple[str, RecordColumns]]) -> None:
        """Send rows to each topic. Topics without metadata are looked up together. Raises as `send`."""
        parts = list(rows)
        self.topics = [topic for topic, _ in parts]
        for number, (topic, columns) in enumerate(parts):
            self.send(topic, columns)
            if number == 0 and len(parts) > 1 and self._producer is not None:
                self._producer.look_up(self.topics[1:])

    def partition_count(self, topic: str) -> int:
        """Return the number of partitions of `topic`; 0 if no rows were sent to it. Raises KafkaError."""
        return 0 if self._producer is None else len(self._producer.partitions_for(topic))

    def finish(self) -> None:
        """Wait until every row is acknowledged, prepare the transaction, and give the producer back. Raises KafkaError
        if a row is not acknowledged.
        """
        try:
            if self._transaction is None or self._producer is None:
                self._await_rows()
            else:
                self._transaction.add_marker(self._producer, self._sent)
                self._await_rows()
                self._transaction.prepare(self._producer)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the producer back without waiting. Rows that were sent may still be delivered. A transaction that is not
        prepared is aborted, because its producer is closed.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            return
        if self._transaction is None or self._transaction.is_prepared:
            self._pool.release(producer)
        else:
            self._pool.discard(producer)

    def _acquire(self) -> Producer:
        if self._transaction is None:
            return self._pool.acquire(self.config.producer)
        return self._transaction.begin(self._pool, self.config.producer)

    def _await_rows(self) -> None:
        """Wait until every row is acknowledged. Raises KafkaError if one is not."""
        if self._producer is not None:
            self._producer.flush()
            now = self._producer.metrics()
            self.batches = int(now["batch-send-total"] - self._before["batch-send-total"])
            self.retries = int(now["record-retry-total"] - self._before["record-retry-total"])
        self.counts.check()
        if self.counts.acknowledged != self._sent:
            missing = self._sent - self.counts.acknowledged
            raise KafkaError(
                f"{missing} of {self._sent} rows were sent and neither acknowledged nor refused; the task must write"
                " them again. The log of this Python worker says why its producer stopped."
            )
