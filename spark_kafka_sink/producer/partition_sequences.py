"""Sequence numbers by partition: the next one, the last acknowledged one, and the batches between them.

Sender thread, under the accumulator's lock where batches are drained. State outlives the topic's metadata: a topic
that vanishes and comes back goes on where it was, because brokers would take restarted numbers for duplicates and
drop the records. Reference: org.apache.kafka.clients.producer.internals.{TxnPartitionMap, TxnPartitionEntry}.
"""

from __future__ import annotations

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.open_transaction import NO_PRODUCER, ProducerIdAndEpoch
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.record.batch import MAX_SEQUENCE, increment_sequence

NO_LAST_ACKED_SEQUENCE = -1
REMEMBERED_BATCHES = 5
"""Of so many batches a leader knows a double (ProducerStateEntry.NUM_BATCHES_TO_RETAIN)."""


class PartitionSequences:
    """One partition's numbers."""

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self.producer = NO_PRODUCER
        self.next_sequence = 0
        self.last_acked_sequence = NO_LAST_ACKED_SEQUENCE
        self.in_flight: list[ProducerBatch] = []
        """Batches with a sequence that have not ended, in order of their first send; those that wait for a retry are
        among them.
        """
        self._next_ordinal = 0

    def take(self, batch: ProducerBatch, is_transactional: bool) -> None:
        """Give `batch` the next numbers and count it as in flight."""
        batch.set_producer_state(self.producer.producer_id, self.producer.epoch, self.next_sequence, is_transactional)
        batch.ordinal = (self._next_ordinal,)
        self._next_ordinal += 1
        self.next_sequence = increment_sequence(self.next_sequence, batch.record_count)
        self.in_flight.append(batch)

    def insert(self, part: ProducerBatch) -> None:
        """Count a part of a split batch as in flight, in its place."""
        self.in_flight.append(part)
        self.in_flight.sort(key=lambda batch: batch.ordinal)

    def remove(self, batch: ProducerBatch) -> None:
        if self.in_flight and self.in_flight[0] is batch:  # nearly always
            del self.in_flight[0]
        else:
            self.in_flight = [other for other in self.in_flight if other is not batch]

    def acknowledge(self, last_sequence: int) -> None:
        last = self.last_acked_sequence
        if last == NO_LAST_ACKED_SEQUENCE or _is_after(last_sequence, last):
            self.last_acked_sequence = last_sequence

    @property
    def is_window_full(self) -> bool:
        """One batch more, and the leader might no longer know the oldest in flight for a double: what came after it
        counts, acknowledged or not. A part of a split batch is many in the place of one, so none follows it.
        """
        if not self.in_flight:
            return False
        oldest = self.in_flight[0].ordinal
        return len(oldest) > 1 or self._next_ordinal - oldest[0] >= REMEMBERED_BATCHES

    @property
    def has_acknowledged(self) -> bool:
        """The leader has taken records of this producer and epoch."""
        return self.last_acked_sequence != NO_LAST_ACKED_SEQUENCE

    def start_at_beginning(self, producer: ProducerIdAndEpoch, is_transactional: bool) -> None:
        """Number what is in flight from 0 under a new producer id or epoch (KIP-360)."""
        sequence = 0
        for batch in self.in_flight:
            batch.reset_producer_state(producer.producer_id, producer.epoch, sequence, is_transactional)
            sequence = increment_sequence(sequence, batch.record_count)
        self.producer = producer
        self.next_sequence = sequence
        self.last_acked_sequence = NO_LAST_ACKED_SEQUENCE


def _is_after(sequence: int, other: int) -> bool:
    """Whether `sequence` comes after `other`, less than half a turn on, so that 0 comes after 2**31 - 1."""
    return 0 < (sequence - other) % (MAX_SEQUENCE + 1) < 2**30


class SequenceTable(dict[TopicPartition, PartitionSequences]):
    """By topic-partition. One that is asked for is there from then on."""

    def __missing__(self, topic_partition: TopicPartition) -> PartitionSequences:
        entry = self[topic_partition] = PartitionSequences(topic_partition)
        return entry
