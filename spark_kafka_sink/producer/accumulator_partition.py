"""The partitions' queues in the accumulator. Guarded by the accumulator's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.producer.producer_batch import ProducerBatch


class PartitionQueue:
    """Batches in the order in which they are to be sent: those that came back first, the one still filling last."""

    __slots__ = ("batches", "is_muted", "topic_partition")

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self.batches: deque[ProducerBatch] = deque()
        self.is_muted = False

    @property
    def open_batch(self) -> ProducerBatch | None:
        """The batch that takes records, if there is one."""
        last = self.batches[-1] if self.batches else None
        return last if last is not None and last.is_open else None

    @property
    def is_full(self) -> bool:
        """There is a batch to send that will grow no more."""
        return len(self.batches) > 1 or (bool(self.batches) and self.batches[0].is_full)

    def forget_uncounted(self) -> None:
        """An append of a row ended early: nothing is left of it, nor of a batch that it made."""
        if self.batches and self.batches[-1].record_count == 0:
            self.batches.pop()
        elif self.batches:
            self.batches[-1].forget_uncounted()

    def put_back(self, batch: ProducerBatch) -> None:
        """Queue a batch that came back, before all that were first sent later. Batches never sent have no ordinal and
        come last.
        """
        if not batch.ordinal:
            self.batches.appendleft(batch)
            return
        earlier: list[ProducerBatch] = []
        while self.batches and self.batches[0].ordinal and self.batches[0].ordinal < batch.ordinal:
            earlier.append(self.batches.popleft())
        self.batches.appendleft(batch)
        self.batches.extendleft(reversed(earlier))


class PartitionQueues(dict[TopicPartition, PartitionQueue]):
    """A queue for each partition that is asked for by `[...]`; none is made by `get`."""

    def __missing__(self, topic_partition: TopicPartition) -> PartitionQueue:
        queue = self[topic_partition] = PartitionQueue(topic_partition)
        return queue

    def let_go(self, idle: Iterable[TopicPartition]) -> None:
        """Forget these queues, which are empty, of topics that metadata has forgotten: a producer that writes to ever
        new topics would look at them all in every turn. A batch that comes back has one made for it.
        """
        for topic_partition in idle:
            del self[topic_partition]
