"""Batches that have not ended: what a flush waits for, what expires, what a close gives up.

Guarded by the accumulator's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spark_kafka_sink.client.backoff import FOREVER_MS
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.producer.producer_batch import ProducerBatch


class IncompleteBatches:
    """In the order in which they were made, so that the first is the first to expire."""

    def __init__(self, delivery_timeout_ms: int) -> None:
        self._delivery_timeout_ms = delivery_timeout_ms
        self._batches: dict[ProducerBatch, None] = {}
        self._parts: set[ProducerBatch] = set()

    def __iter__(self) -> Iterator[ProducerBatch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: ProducerBatch) -> None:
        self._batches[batch] = None

    def replace(self, batch: ProducerBatch, parts: Iterable[ProducerBatch]) -> None:
        """`parts` stand for `batch` from now on. They are as old as it was, and so break the order."""
        self.remove(batch)
        for part in parts:
            self._batches[part] = None
            self._parts.add(part)

    def remove(self, batch: ProducerBatch) -> None:
        self._batches.pop(batch, None)
        self._parts.discard(batch)

    def remove_empty(self, topic_partition: TopicPartition) -> None:
        """The partition's batch that an append made and put nothing into, for it ended early."""
        empty = [each for each in self._batches if each.record_count == 0 and each.topic_partition == topic_partition]
        for batch in empty:
            del self._batches[batch]

    def next_expiry_ms(self) -> int:
        """When the first batch that has not ended reaches delivery.timeout.ms. One that is still being filled does not
        expire; the thread that fills it wakes the Sender.
        """
        first_ms: int | None = None
        for batch in self._batches:
            if _can_expire(batch) and (first_ms is None or batch.created_ms < first_ms):
                first_ms = batch.created_ms
                if not self._parts:
                    break
        return FOREVER_MS if first_ms is None else first_ms + self._delivery_timeout_ms

    def expired(self, now_ms: int) -> list[ProducerBatch]:
        """Those that have reached it and not ended, queued or in flight."""
        if now_ms < self.next_expiry_ms():
            return []
        return [
            batch
            for batch in self._batches
            if _can_expire(batch) and batch.has_reached_delivery_timeout(self._delivery_timeout_ms, now_ms)
        ]


def _can_expire(batch: ProducerBatch) -> bool:
    """One with an outcome only waits for the end of its request, or a fault kept it from giving its memory back."""
    return batch.is_filled and not (batch.is_done and batch.is_in_flight)
