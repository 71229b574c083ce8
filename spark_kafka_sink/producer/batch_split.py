"""Cuts a batch that the broker finds too large into parts that carry its records, futures and sequences on. Sender
thread.
"""

from __future__ import annotations

from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.record.batch import HEADER_SIZE, increment_sequence
from spark_kafka_sink.record.decoder import BatchLimits, DecodedRecord, decode_batches
from spark_kafka_sink.record.encoder import record_size_upper_bound


def split_batch(batch: ProducerBatch, now_ms: int) -> list[ProducerBatch]:
    """Parts of at most half the batch's records' bytes (before compression), so that splitting again and again comes
    to an end.

    A part has its share of the callbacks and futures, already bound to it, and the sequence numbers that its records
    had. The batch itself is left without callbacks; its result is not set.
    """
    (decoded,) = decode_batches(batch.sealed_bytes(), BatchLimits(batch.size, batch.size))
    sizes = [record_size_upper_bound(record.key, record.value, record.headers) for record in decoded.records]
    target = max(sum(sizes) // 2, max(sizes)) + HEADER_SIZE
    parts: list[ProducerBatch] = []
    firsts: list[int] = []
    for index, (record, size) in enumerate(zip(decoded.records, sizes, strict=True)):
        if not parts or not parts[-1].has_room_for(size):
            parts.append(_new_part(batch, record, target, now_ms))
            firsts.append(index)
        parts[-1].append_row(record.key, record.value, record.headers, record.timestamp_ms, size, None)
    bound = [(thunk, thunk.first) for thunk in batch.thunks]
    try:
        for number, (part, first) in enumerate(zip(parts, firsts, strict=True)):
            part.close_for_appends()
            _hand_over(batch, part, first, number)
        batch.split_parts, batch.thunks = parts, []
    except BaseException:  # no memory, say: the batch has its callbacks and futures again
        for thunk, first in bound:
            thunk.bind(batch.result, first)
        for part in parts:
            part.result.mark_done()  # a future that waits there already goes on to the batch's result
        raise
    return parts


def _new_part(batch: ProducerBatch, first_record: DecodedRecord, target: int, now_ms: int) -> ProducerBatch:
    part = ProducerBatch(batch.topic_partition, first_record.timestamp_ms, target, batch.created_ms)
    part.last_attempt_ms = part.retry_at_ms = now_ms
    part.leader_epoch = batch.leader_epoch
    part.was_sent_in_larger = batch.was_sent_in_larger or batch.may_be_in_log
    return part


def _hand_over(batch: ProducerBatch, part: ProducerBatch, first: int, number: int) -> None:
    """Give `part`, whose records begin at `first` of the batch, its sequences and callbacks."""
    if batch.has_sequence:
        part.ordinal = (*batch.ordinal, number)
        base_sequence = increment_sequence(batch.base_sequence, first)
        part.set_producer_state(batch.producer_id, batch.producer_epoch, base_sequence, batch.is_transactional)
    end = first + part.record_count
    for thunk in batch.thunks:
        begins, ends = max(thunk.first, first), min(thunk.first + thunk.record_count, end)
        if begins < ends:
            share = thunk.part(begins, ends)
            share.bind(part.result, begins - first)
            part.thunks.append(share)
