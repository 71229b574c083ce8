"""The rows of a task, one by one or all at once, into its delivery.

Rows are collected as columns and sent in blocks, bounded by rows and by bytes, so that neither a million small rows
nor a few large ones make memory grow beyond the producer's own bound. Used by the task's thread alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

from spark_kafka_sink.record.kernel import IS_FULL, NOT_TAKEN
from spark_kafka_sink.sink.columns import RowBlock, RowLayouts, Taken, taken
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool

CHUNK_ROWS: Final = 64
"""Rows taken from Spark at a time; fewer while they are large, so that a chunk holds little more than CHUNK_BYTES."""
CHUNK_BYTES: Final = 256 << 10


class PartitionWriter:
    """Writes the rows of one task: `write` or many `add`, then `finish`; `abandon` instead where something failed."""

    def __init__(self, config: SinkConfig, pool: ProducerPool) -> None:
        self._config = config
        self._delivery = TaskDelivery(config, pool)
        self._tally = self._delivery.tally
        self._layouts = RowLayouts(config.topic)
        self._block = self._new_block(0)
        self._pending: list[Taken] = []
        self._chunk_rows = 1
        self._collected = 0
        """Rows of the blocks before."""

    def write(self, rows: Iterable[Any]) -> None:
        """Send all of `rows`. Raises what the iterator raises, and KafkaError as soon as it is known that a row
        failed.
        """
        iterator = iter(rows)
        while self._write_chunk(iterator):
            pass

    def add(self, row: Any) -> None:
        """Send one row. Raises KafkaError as soon as it is known that a row failed."""
        self._tally.check()
        taker = self._block.taker
        if taker is not None and not self._pending:
            try:
                state = taker.add(row)
            except Exception as error:
                self._tally.fail(error)
                raise
            if state != NOT_TAKEN:
                if state == IS_FULL:
                    self._send_full()
                return
        self._pending += self._taken((row,))
        if len(self._pending) >= self._chunk_rows:
            chunk, self._pending = self._pending, []
            self._collect(chunk)

    def finish(self) -> None:
        """Wait until every row is acknowledged and give the producer back. Raises KafkaError if one is not."""
        try:
            self._tally.check()
            if self._pending:
                self._collect(self._pending)
            self._send_block()
            self._delivery.finish()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the producer back without waiting. What was sent already still goes its way."""
        self._pending = []
        self._block = self._new_block(0)
        self._delivery.abandon()

    def _write_chunk(self, iterator: Iterator[Any]) -> bool:
        """Take some rows; returns whether there may be more."""
        self._tally.check()
        odd: tuple[Any, ...] = ()
        if self._block.taker is not None:
            rest = self._take(self._block.taker, iterator)
            if not rest:
                return rest is not None
            odd = rest
        chunk = self._taken(chain(odd, islice(iterator, self._chunk_rows - len(odd))))
        if chunk:
            self._collect(chunk)
        return bool(chunk)

    def _take(self, taker: Any, iterator: Iterator[Any]) -> tuple[Any, ...] | None:
        """Take rows as `RowTaker.take` does."""
        rows, size = taker.rows, taker.size
        try:
            rest: tuple[Any, ...] | None = taker.take(iterator, self._chunk_rows, CHUNK_BYTES)
        except Exception as error:
            self._tally.fail(error)
            raise
        if taker.rows > rows:
            self._adapt(taker.rows - rows, taker.size - size)
            self._send_full()
        return rest

    def _taken(self, rows: Iterable[Any]) -> list[Taken]:
        try:
            return taken(rows, self._collected + self._block.num_rows + len(self._pending))
        except Exception as error:
            self._tally.fail(error)
            raise

    def _collect(self, chunk: Sequence[Taken]) -> None:
        try:
            size = self._block.extend(chunk)
        except Exception as error:
            self._tally.fail(error)  # rows went with it: who goes on after it must not succeed
            raise
        self._adapt(len(chunk), size)
        self._send_full()

    def _adapt(self, rows: int, size: int) -> None:
        """Take more rows at a time, or fewer: `rows` of them held `size` bytes."""
        if size > CHUNK_BYTES:
            self._chunk_rows = max(1, rows // 2)
        elif self._chunk_rows < CHUNK_ROWS and size < CHUNK_BYTES // 4:
            self._chunk_rows *= 2

    def _send_full(self) -> None:
        if not self._block.is_full:
            return
        try:
            self._send_block()
        except Exception as error:
            self._tally.fail(error)
            raise

    def _send_block(self) -> None:
        block = self._block
        self._collected += block.num_rows
        self._block = self._new_block(self._collected)
        if block.num_rows:
            self._delivery.send_each(block.by_topic())

    def _new_block(self, first: int) -> RowBlock:
        return RowBlock(self._layouts, first, allows_early=self._config.allows_early_timestamps)
