"""A task's delivery: acquire a producer, send, flush, check, release. Every interface of the sink goes through it.

A row counts only when the broker has acknowledged it: `finish` raises unless every row was. The task's thread owns
the delivery; the Sender thread reports to its `Tally`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.network.acknowledgements import acknowledge_now
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool


@dataclass(slots=True)
class Delivered:
    """What one partition of a topic has got."""

    records: int = 0
    size: int = 0
    """Bytes of encoded records, before compression."""
    last_offset: int = -1


class Tally:
    """What became of the rows of one task. The Sender thread writes, the task's thread reads."""

    __slots__ = ("_first_error", "acknowledged", "delivered")

    def __init__(self) -> None:
        self.acknowledged = 0
        self.delivered: dict[TopicPartition, Delivered] = {}
        self._first_error: Exception | None = None

    def __call__(self, run: RunMetadata, error: KafkaError | None) -> None:
        """The producer's report on `run.record_count` rows."""
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
        """Rows were lost to `error` before they were sent."""
        if self._first_error is None:
            self._first_error = error

    def check(self) -> None:
        """Raise the first error there was."""
        if self._first_error is not None:
            raise self._first_error


class TaskDelivery:
    """Any number of `send`, then `finish`; `abandon` instead where something failed.

    To be made before a row is asked for. The producer is taken at the first send, so an empty partition makes no
    connection.
    """

    def __init__(self, config: SinkConfig, pool: ProducerPool) -> None:
        acknowledge_now()  # the task, so that Spark sends its rows
        self.tally = Tally()
        self.batches = 0
        self.retries = 0
        """Batches acknowledged and records sent again while this task had the producer; known once it has finished."""
        self.topics: Sequence[str] = ()
        """Those of the last `send_each`."""
        self._config = config
        self._pool = pool
        self._producer: Producer | None = None
        self._before: Mapping[str, float] = {}
        self._sent = 0

    def send(self, topic: str, columns: RecordColumns) -> None:
        """Send rows. Raises KafkaError as soon as it is known that a row, of these or of earlier ones, failed."""
        self.tally.check()
        if self._producer is None:
            self._producer = self._acquire()
            self._before = self._producer.metrics()
            if self._config.metrics_ports is not None:
                from spark_kafka_sink.sink.prometheus import serve  # of an extra

                serve(self._pool, self._config.metrics_host, self._config.metrics_ports)
        self._producer.send_columns(topic, columns, self.tally)
        self._sent += columns.num_rows

    def send_each(self, rows: Iterable[tuple[str, RecordColumns]]) -> None:
        """Send rows to each topic, of which all are asked for together where they are not known. Raises as `send`."""
        parts = list(rows)
        self.topics = [topic for topic, _ in parts]
        for number, (topic, columns) in enumerate(parts):
            self.send(topic, columns)
            if number == 0 and len(parts) > 1 and self._producer is not None:
                self._producer.look_up(self.topics[1:])

    def partition_count(self, topic: str) -> int:
        """How many partitions `topic` has, of which rows were sent; 0 where none were. Raises KafkaError."""
        return 0 if self._producer is None else len(self._producer.partitions_for(topic))

    def finish(self) -> None:
        """Wait until every row is acknowledged and give the producer back. Raises KafkaError if one is not."""
        try:
            self._await_rows()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the producer back without waiting. What was sent already still goes its way."""
        producer, self._producer = self._producer, None
        if producer is not None:
            self._pool.release(producer)

    def _acquire(self) -> Producer:
        return self._pool.acquire(self._config.producer)

    def _await_rows(self) -> None:
        """Wait until every row is acknowledged. Raises KafkaError if one is not."""
        if self._producer is not None:
            self._producer.flush()
            now = self._producer.metrics()
            self.batches = int(now["batch-send-total"] - self._before["batch-send-total"])
            self.retries = int(now["record-retry-total"] - self._before["record-retry-total"])
        self.tally.check()
        if self.tally.acknowledged != self._sent:
            missing = self._sent - self.tally.acknowledged
            raise KafkaError(
                f"{missing} of {self._sent} rows were sent and neither acknowledged nor refused; the task must write"
                " them again. The log of this Python worker says why its producer stopped."
            )
