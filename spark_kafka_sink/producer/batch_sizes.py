"""How many bytes a batch may hold, and how many of a request it is expected to take.

batch.size and max.request.size are bytes on the wire, but batches are filled and drained before they are compressed.
So the share that compression leaves is learnt, topic by topic, from the batches before: the Sender thread tells and
asks, application threads ask. Reference: org.apache.kafka.common.record.CompressionRatioEstimator, which learns in
steps of half a percent; batches here are sixteen times as large, and fewer.
"""

from __future__ import annotations

from typing import Final

from spark_kafka_sink.producer.producer_batch import ProducerBatch

_MARGIN: Final = 1.05
"""Of what was learnt, so that batches which compress a little worse still fit."""
LEAST_SHARE: Final = 0.3
"""No less is expected, however well records compress: a batch of the default size then stays below Kafka's default of
max.message.bytes even if its own do not compress at all.
"""
_TELLING: Final = 4
"""Batches of less than this part of batch.size say little of the full ones."""


class BatchSizes:
    """For the topics of one producer, all with its codec."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = max(1, batch_size)
        self._ratios: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._refused: set[str] = set()

    def capacity(self, topic: str) -> int:
        """Bytes of records before compression that fill a new batch: batch.size where nothing is learnt."""
        return int(self._batch_size / self._shares.get(topic, 1.0))

    def on_wire(self, batch: ProducerBatch) -> int:
        """Bytes that the batch takes in a request: known when it is sealed, else expected."""
        if batch.is_sealed:
            return batch.wire_size
        return int(batch.size * self._shares.get(batch.topic_partition.topic, 1.0))

    def learn(self, batch: ProducerBatch) -> None:
        """From a batch that was sealed for the first time. What compresses worse than expected counts at once, what
        compresses better by half.
        """
        topic = batch.topic_partition.topic
        if topic in self._refused or batch.size * _TELLING < self._batch_size:
            return
        ratio = batch.wire_size / batch.size
        ratio = self._ratios[topic] = max(ratio, (self._ratios.get(topic, 1.0) + ratio) / 2)
        self._shares[topic] = min(1.0, max(LEAST_SHARE, ratio * _MARGIN))

    def refused(self, topic: str) -> None:
        """A batch was too large for its broker: expect nothing of compression any more, or the next ones would be."""
        self._refused.add(topic)
        self._shares[topic] = 1.0
