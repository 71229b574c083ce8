"""The rows of a task, one by one or all at once, into its delivery.

Rows are collected as columns and sent in blocks, bounded by rows and by bytes, so that neither a million small rows
nor a few large ones make memory grow beyond the producer's own bound. Used by the task's thread alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

from spark_kafka_sink.sink.columns import RowBlock, RowLayouts, taken
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.task_delivery import TaskDelivery

BLOCK_ROWS: Final = 8_192
BLOCK_BYTES: Final = 1 << 20
CHUNK_ROWS: Final = 64
"""Rows taken from Spark at a time; fewer while they are large, so that a chunk holds little more than CHUNK_BYTES."""
CHUNK_BYTES: Final = 256 << 10


class PartitionWriter:
    """Writes the rows of one task: `write` or many `add`, then `finish`; `abandon` instead where something failed."""

    def __init__(self, config: SinkConfig, pool: ProducerPool) -> None:
        self._config = config
        self._delivery = TaskDelivery(config, pool)
        self._layouts = RowLayouts(config.topic)
        self._block: RowBlock | None = None
        self._pending: list[Any] = []
        self._chunk_rows = 1
        self._collected = 0

    def write(self, rows: Iterable[Any]) -> None:
        """Send all of `rows`. Raises what the iterator raises, and KafkaError as soon as it is known that a row
        failed.
        """
        iterator = iter(rows)
        while chunk := self._taken(islice(iterator, self._chunk_rows)):
            self._take(chunk)

    def add(self, row: Any) -> None:
        """Send one row. Raises KafkaError as soon as it is known that a row failed."""
        self._delivery.tally.check()
        self._pending += self._taken((row,))
        if len(self._pending) >= self._chunk_rows:
            chunk, self._pending = self._pending, []
            self._take(chunk)

    def finish(self) -> None:
        """Wait until every row is acknowledged and give the producer back. Raises KafkaError if one is not."""
        try:
            if self._pending:
                self._take(self._pending)
            self._send_block()
            self._delivery.finish()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the producer back without waiting. What was sent already still goes its way."""
        self._pending = []
        self._block = None
        self._delivery.abandon()

    def _taken(self, rows: Iterable[Any]) -> list[Any]:
        try:
            return taken(rows, self._collected + len(self._pending))
        except Exception as error:
            self._delivery.tally.fail(error)
            raise

    def _take(self, chunk: Sequence[Any]) -> None:
        self._delivery.tally.check()
        try:
            self._collect(chunk)
        except Exception as error:
            self._delivery.tally.fail(error)  # rows went with it: who goes on after it must not succeed
            raise

    def _collect(self, chunk: Sequence[Any]) -> None:
        if self._block is None:
            allows_early = self._config.allows_early_timestamps
            self._block = RowBlock(self._layouts, self._collected, allows_early=allows_early)
        block = self._block
        size = block.extend(chunk)
        self._collected += len(chunk)
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
        self._delivery.send_each(block.by_topic())
