"""Splitting a batch that is too large: parts that end, keep order, sequences, futures and callbacks."""

from __future__ import annotations

import pytest
from support.scripted_broker.batches import BrokerRecord, check_batch, read_records

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.producer.buffer_pool import SharedAllocation
from spark_kafka_sink.producer.futures import FutureRecordMetadata, RecordThunk, RunMetadata
from spark_kafka_sink.producer.producer_batch import ProducerBatch, split_batch
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.decoder import BatchLimits, decode_batches
from spark_kafka_sink.record.encoder import encode_rows

PLACE = TopicPartition("flights", 0)


def sealed_batch(values: list[bytes], codec: str = "none") -> tuple[ProducerBatch, list[FutureRecordMetadata]]:
    batch = ProducerBatch(PLACE, 50, 10**6, 1_000)
    futures = []
    for index, value in enumerate(values):
        future = FutureRecordMetadata(50 + index, -1, len(value))
        thunk = RecordThunk(future, None)
        batch.append_row(b"k%d" % index, value, (("h", b"%d" % index),), 50 + index, 40 + len(value), thunk)
        futures.append(future)
    batch.close_for_appends()
    batch.seal(codec_for(codec))
    return batch, futures


def all_records(parts: list[ProducerBatch], codec: str = "none") -> list[BrokerRecord]:
    records = []
    for part in parts:
        part.seal(codec_for(codec))
        records += list(read_records(part.sealed_bytes()))
    return records


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_split_parts_hold_records_in_order_within_bounds(codec: str) -> None:
    values = [b"%03d" % index * 10 for index in range(40)]
    batch, _ = sealed_batch(values, codec)
    parts = split_batch(batch, 2_000)
    assert len(parts) in {2, 3}
    assert all(part.record_count <= 20 for part in parts)
    records = all_records(parts, codec)
    assert [record.value for record in records] == values
    assert [record.key for record in records] == [b"k%d" % index for index in range(40)]
    assert [record.timestamp_ms for record in records] == [50 + index for index in range(40)]
    assert records[7].headers == ((b"h", b"7"),)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_split_accepts_a_batch_above_the_usual_decompression_limit(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    monkeypatch.setattr(decode_batches, "__defaults__", (BatchLimits(1_000, 3),))
    values = [bytes(500)] * 4
    batch, _ = sealed_batch(values, codec)
    assert [record.value for record in all_records(split_batch(batch, 0), codec)] == values


def test_repeated_splits_end_with_single_records() -> None:
    batches = [sealed_batch([bytes(10)] * 11)[0]]
    rounds = 0
    while any(batch.record_count > 1 for batch in batches):
        rounds += 1
        batches = [part for b in batches for part in (split_batch(b, 0) if b.record_count > 1 else [b])]
        for batch in batches:
            batch.seal(codec_for("none"))
    assert len(batches) == 11
    assert rounds <= 5


def test_one_huge_record_among_small_ones_is_cut_out() -> None:
    batch, _ = sealed_batch([b"a", bytes(5_000), b"b", b"c"])
    parts = split_batch(batch, 0)
    assert len(parts) > 1
    assert [record.value for record in all_records(parts)] == [b"a", bytes(5_000), b"b", b"c"]


def test_split_parts_keep_age_and_have_no_attempts() -> None:
    batch, _ = sealed_batch([b"a", b"b"])
    batch.attempts, batch.leader_epoch = 3, 8
    for part in split_batch(batch, 2_000):
        assert (part.created_ms, part.attempts, part.leader_epoch) == (1_000, 0, 8)
        assert not part.is_backing_off(2_000)
        assert not part.is_open


def test_parts_have_the_sequences_that_their_records_had() -> None:
    batch, _ = sealed_batch([bytes(20)] * 10)
    batch.set_producer_state(7, 2, 2**31 - 5, True)
    batch.ordinal = (4,)
    batch.seal(codec_for("none"))
    parts = split_batch(batch, 0)
    assert parts[0].base_sequence == 2**31 - 5
    assert parts[1].base_sequence == (2**31 - 5 + parts[0].record_count) % 2**31
    assert [part.ordinal for part in parts] == [(4, 0), (4, 1)]
    for part in parts:
        part.seal(codec_for("none"))
        header = check_batch(part.sealed_bytes())
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 2, part.base_sequence)
        assert header.is_transactional


def test_without_sequences_parts_have_none() -> None:
    batch, _ = sealed_batch([b"a", b"b"])
    assert [(part.has_sequence, part.ordinal) for part in split_batch(batch, 0)] == [(False, ())] * 2


def test_futures_follow_their_records() -> None:
    batch, futures = sealed_batch([bytes(20)] * 6)
    first, second = split_batch(batch, 0)
    assert batch.thunks == []
    assert batch.split_parts == [first, second]
    first.complete(100, None)
    assert [future.done() for future in futures] == [True] * 3 + [False] * 3
    second.complete(500, None)
    assert [future.result(0).offset for future in futures] == [100, 101, 102, 500, 501, 502]


def test_run_across_the_cut_is_reported_in_both_parts() -> None:
    batch = ProducerBatch(PLACE, 0, 10**6, 0)
    allocation = SharedAllocation(lambda: None, "its append")
    runs: list[RunMetadata] = []
    for first, count in ((0, 3), (3, 5)):
        place = batch.reserve_run(count, 100, allocation, lambda run, error: runs.append(run))
        run = encode_rows(None, [bytes(20)] * count, None, [0] * count, first, 0)
        batch.fill_run(place, run.chunk, run.max_timestamp_ms, run.largest_record, 100)
    batch.close_for_appends()
    batch.seal(codec_for("none"))
    one, two = split_batch(batch, 0)
    assert (one.record_count, two.record_count) == (4, 4)
    one.complete(10, None)
    two.complete(90, None)
    assert [(run.base_offset, run.record_count) for run in runs] == [(10, 3), (13, 1), (90, 4)]
    assert [run.serialized_size for run in runs] == [3 * 27, 27, 4 * 27]
