"""A task's path to Kafka: acquire a producer, send, flush, check, release. Every interface of the sink goes through it.

Rows are collected as columns and sent in blocks, bounded by rows and by bytes, so that neither a million small rows
nor a few large ones make memory grow beyond the producer's own bound. A row counts only when the broker has
acknowledged it: `finish` raises unless every row was.

The task's thread owns the writer; the Sender thread reports to its `Tally`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.sink.columns import RowBlock, RowLayout
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool

BLOCK_ROWS: Final = 8_192
BLOCK_BYTES: Final = 1 << 20
CHUNK_ROWS: Final = 64
"""Rows taken from Spark at a time; fewer while they are large, so that a chunk holds little more than CHUNK_BYTES."""
CHUNK_BYTES: Final = 256 << 10


class Tally:
    """What became of the rows of one task. The Sender thread writes, the task's thread reads."""

    __slots__ = ("_first_error", "acknowledged")

    def __init__(self) -> None:
        self.acknowledged = 0
        self._first_error: KafkaError | None = None

    def __call__(self, run: RunMetadata, error: KafkaError | None) -> None:
        """The producer's report on `run.record_count` rows."""
        if error is None:
            self.acknowledged += run.record_count
        elif self._first_error is None:
            self._first_error = _located(error, run)

    def check(self) -> None:
        """Raise the first error there was."""
        if self._first_error is not None:
            raise self._first_error


class PartitionWriter:
    """Writes the rows of one task: `write` or many `add`, then `finish`; `abandon` instead where something failed.

    The producer is taken at the first block, so an empty partition makes no connection.
    """

    def __init__(self, config: SinkConfig, pool: ProducerPool) -> None:
        self._config = config
        self._pool = pool
        self._producer: Producer | None = None
        self._layout: RowLayout | None = None
        self._block: RowBlock | None = None
        self._tally = Tally()
        self._sent = 0
        self._pending: list[Any] = []
        self._chunk_rows = 1

    def write(self, rows: Iterable[Any]) -> None:
        """Send all of `rows`. Raises what the iterator raises, and KafkaError as soon as it is known that a row
        failed.
        """
        iterator = iter(rows)
        while chunk := list(islice(iterator, self._chunk_rows)):
            self._take(chunk)

    def add(self, row: Any) -> None:
        """Send one row. Raises KafkaError as soon as it is known that a row failed."""
        self._tally.check()
        self._pending.append(row)
        if len(self._pending) >= self._chunk_rows:
            chunk, self._pending = self._pending, []
            self._take(chunk)

    def finish(self) -> None:
        """Wait until every row is acknowledged and give the producer back. Raises KafkaError if one is not."""
        try:
            if self._pending:
                self._take(self._pending)
            self._send_block()
            if self._producer is not None:
                self._producer.flush()
            self._check()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the producer back without waiting. What was sent already still goes its way."""
        self._pending = []
        self._block = None
        producer, self._producer = self._producer, None
        if producer is not None:
            self._pool.release(producer)

    def _take(self, chunk: Sequence[Any]) -> None:
        self._tally.check()
        if self._layout is None:
            self._layout = RowLayout.of(chunk[0], self._config.topic)
        if self._block is None:
            self._block = RowBlock(self._layout, self._config.topic)
        block = self._block
        size = block.extend(chunk)
        if size > CHUNK_BYTES:
            self._chunk_rows = max(1, len(chunk) // 2)
        elif self._chunk_rows < CHUNK_ROWS and size < CHUNK_BYTES // 4:
            self._chunk_rows *= 2
        if block.num_rows >= BLOCK_ROWS or block.size >= BLOCK_BYTES:
            self._send_block()

    def _send_block(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        if self._producer is None:
            self._producer = self._pool.acquire(self._config.producer)
        for topic, columns in block.by_topic():
            self._producer.send_columns(topic, columns, self._tally)
            self._sent += columns.num_rows

    def _check(self) -> None:
        self._tally.check()
        if self._tally.acknowledged != self._sent:
            missing = self._sent - self._tally.acknowledged
            raise KafkaError(
                f"{missing} of {self._sent} rows were sent and neither acknowledged nor refused; the task must write"
                " them again. The log of this Python worker says why its producer stopped."
            )


def _located(error: KafkaError, run: RunMetadata) -> KafkaError:
    """`error`, or another of its class with the topic-partition in its text where that is missing."""
    place = f"{run.topic}-{run.partition}"
    if place in str(error):
        return error
    located = type(error)(f"{place}: {error}")
    located.error_code = error.error_code
    return located
