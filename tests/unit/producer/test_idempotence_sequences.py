"""Numbers of one partition: given, acknowledged, renumbered, closed up; and the queue that keeps their order."""

from __future__ import annotations

import pytest

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.open_transaction import NO_PRODUCER, ProducerIdAndEpoch
from spark_kafka_sink.producer.idempotence import PartitionSequences, SequenceTable
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.record_accumulator import PartitionQueue
from spark_kafka_sink.record.batch import MAX_SEQUENCE, increment_sequence

PLACE = TopicPartition("flights", 0)
PRODUCER = ProducerIdAndEpoch(7, 1)


def batch_of(records: int) -> ProducerBatch:
    batch = ProducerBatch(PLACE, 0, 10_000, 0)
    for _ in range(records):
        batch.append_row(None, b"v", (), 0, 10, None)
    return batch


def taken(entry: PartitionSequences, *counts: int) -> list[ProducerBatch]:
    batches = [batch_of(count) for count in counts]
    for batch in batches:
        entry.take(batch, is_transactional=False)
    return batches


def entry_at(next_sequence: int = 0) -> PartitionSequences:
    entry = PartitionSequences(PLACE)
    entry.producer = PRODUCER
    entry.next_sequence = next_sequence
    return entry


@pytest.mark.parametrize(
    ("sequence", "step", "expected"),
    [(0, 5, 5), (MAX_SEQUENCE - 4, 4, MAX_SEQUENCE), (MAX_SEQUENCE, 1, 0), (MAX_SEQUENCE - 1, 5, 3)],
)
def test_sequences_go_on_at_0_after_the_last(sequence: int, step: int, expected: int) -> None:
    assert increment_sequence(sequence, step) == expected


def test_batches_get_consecutive_numbers_and_are_counted_in_flight() -> None:
    entry = entry_at()
    first, second = taken(entry, 3, 2)
    assert (first.producer_id, first.producer_epoch) == PRODUCER
    assert [(batch.base_sequence, batch.last_sequence) for batch in (first, second)] == [(0, 2), (3, 4)]
    assert first.ordinal < second.ordinal
    assert entry.in_flight == [first, second]
    assert entry.next_sequence == 5
    entry.remove(first)
    assert entry.in_flight == [second]


def test_other_batches_stay_in_flight_in_order() -> None:
    entry = entry_at()
    first, second, third = taken(entry, 1, 1, 1)
    entry.remove(second)
    assert entry.in_flight == [first, third]
    entry.remove(second)  # as a batch that expired in flight
    assert entry.in_flight == [first, third]
    entry.remove(first)
    entry.remove(third)
    entry.remove(third)
    assert entry.in_flight == []


def ending_at(last_sequence: int, leader_epoch: int | None = None, drained_ms: int = 0) -> ProducerBatch:
    """Return a batch of one record."""
    batch = batch_of(1)
    batch.base_sequence, batch.leader_epoch, batch.drained_ms = last_sequence, leader_epoch, drained_ms
    return batch


def test_last_acknowledged_sequence_never_decreases() -> None:
    entry = entry_at()
    assert not entry.has_acknowledged
    entry.acknowledge(ending_at(4))
    entry.acknowledge(ending_at(2))
    assert entry.has_acknowledged
    assert entry.last_acked_sequence == 4


def test_acknowledgements_move_on_across_the_wrap() -> None:
    entry = entry_at()
    entry.acknowledge(ending_at(MAX_SEQUENCE - 1))
    entry.acknowledge(ending_at(2))
    assert entry.last_acked_sequence == 2
    entry.acknowledge(ending_at(MAX_SEQUENCE))
    assert entry.last_acked_sequence == 2


@pytest.mark.parametrize(
    ("leader_epoch", "created_ms", "is_known"),
    [(3, 100, True), (3, 600_049, True), (3, 600_050, False), (4, 100, False), (2, 100, False), (None, 100, False)],
)
def test_leader_knows_the_producer_by_its_own_recent_acknowledgement(
    leader_epoch: int | None, created_ms: int, is_known: bool
) -> None:
    entry = entry_at()
    batch = batch_of(1)
    batch.leader_epoch, batch.created_ms = leader_epoch, created_ms
    assert not entry.is_known_to_leader(batch)
    entry.acknowledge(ending_at(4, leader_epoch=3, drained_ms=50))
    assert entry.is_known_to_leader(batch) is is_known


def test_new_epoch_numbers_batches_in_flight_from_0() -> None:
    entry = entry_at(40)
    first, second = taken(entry, 3, 2)
    entry.acknowledge(ending_at(39))
    entry.start_at_beginning(ProducerIdAndEpoch(7, 2), is_transactional=False)
    assert [(batch.producer_epoch, batch.base_sequence) for batch in (first, second)] == [(2, 0), (2, 3)]
    assert first.sequence_has_been_reset
    assert entry.next_sequence == 5
    assert not entry.has_acknowledged
    assert entry.producer.epoch == 2


def test_five_batches_or_a_split_part_fill_the_window() -> None:
    entry = entry_at()
    taken(entry, 1, 1, 1, 1)
    assert not entry.is_window_full
    taken(entry, 1)
    assert entry.is_window_full
    entry = entry_at()
    (whole,) = taken(entry, 2)
    assert not entry.is_window_full
    part = batch_of(1)
    part.ordinal = (*whole.ordinal, 0)
    entry.remove(whole)
    entry.insert(part)
    assert entry.is_window_full


def test_parts_are_in_flight_in_their_places() -> None:
    entry = entry_at()
    first, second = taken(entry, 2, 2)
    entry.remove(first)
    parts = [batch_of(1), batch_of(1)]
    for number, part in enumerate(parts):
        part.ordinal = (*first.ordinal, number)
    for part in reversed(parts):
        entry.insert(part)
    assert entry.in_flight == [*parts, second]


def test_the_table_makes_entries_and_keeps_them() -> None:
    table = SequenceTable()
    entry = table[PLACE]
    assert table[PLACE] is entry
    assert entry.producer == NO_PRODUCER
    assert not entry.producer.is_valid
    assert [each.topic_partition for each in table.values()] == [PLACE]


# ---- the queue -------------------------------------------------------------------------------------------------------


def test_returned_batch_is_queued_by_its_first_send() -> None:
    entry = entry_at(MAX_SEQUENCE - 1)
    one, two, three = taken(entry, 1, 1, 1)  # the third's sequence is 0
    queue, new = PartitionQueue(PLACE), batch_of(1)
    queue.batches.append(new)
    for batch in (two, three, one):
        queue.put_back(batch)
    assert list(queue.batches) == [one, two, three, new]


def test_returned_batch_without_sequence_goes_first() -> None:
    queue = PartitionQueue(PLACE)
    old, new = batch_of(1), batch_of(1)
    queue.batches.append(new)
    queue.put_back(old)
    assert list(queue.batches) == [old, new]


def test_the_last_batch_takes_records_while_it_is_open() -> None:
    queue = PartitionQueue(PLACE)
    assert queue.open_batch is None
    assert not queue.is_full
    batch = batch_of(1)
    queue.batches.append(batch)
    assert queue.open_batch is batch
    assert not queue.is_full
    batch.close_for_appends()
    assert queue.open_batch is None
    assert queue.is_full
