"""Our bytes and the Java client's, for the same input."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.record_golden import described_headers, from_hex, load, plain

from spark_kafka_sink.record.batch import seal
from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.decoder import DecodedBatch, decode_batches
from spark_kafka_sink.record.encoder import encode_columns, encode_rows, record_size_upper_bound
from spark_kafka_sink.record.kernel import has_kernel
from spark_kafka_sink.record.partitioning import (
    hash_by_kernel,
    hash_by_numpy,
    murmur2,
    partition_for_key,
    partitions_for_keys,
)

BATCHES = load("record_batches")
MADE = [entry for entry in BATCHES if entry["codec"] is not None]
RECORDS = load("records")
HASHES = load("murmur2")
PARTITION_COUNTS = (1, 2, 3, 7, 12, 200, 1000)


def label(entry: dict[str, Any]) -> str:
    return f"{entry['name']}-{entry['codec']}"


def columns_of(records: list[dict[str, Any]]) -> RecordColumns:
    return RecordColumns.from_rows(
        [from_hex(record["value"]) for record in records],
        [from_hex(record["key"]) for record in records],
        [described_headers(record) for record in records],
        [record["timestamp"] for record in records],
    )


def sealed(entry: dict[str, Any]) -> bytes:
    columns = columns_of(entry["records"])
    times = [record["timestamp"] for record in entry["records"]]
    chunks, (latest_ms,) = Block(columns, 0, -1).encode(array("q", (0, len(times), 0, times[0])))
    batch = seal(
        chunks,
        len(times),
        times[0],
        latest_ms,
        codec_for(entry["codec"]),
        entry["producer_id"],
        entry["producer_epoch"],
        entry["base_sequence"],
        entry["is_transactional"],
    )
    return b"".join(batch.buffers)


def decode_one(data: bytes) -> DecodedBatch:
    (batch,) = decode_batches(data)
    return batch


@pytest.mark.parametrize("entry", [e for e in MADE if e["codec"] == "none"], ids=label)
def test_uncompressed_batch_equals_javas_byte_for_byte(entry: dict[str, Any]) -> None:
    assert sealed(entry).hex() == entry["batch"]


@pytest.mark.parametrize("entry", [e for e in MADE if e["codec"] != "none"], ids=label)
def test_compressed_batch_has_javas_records_byte_for_byte(entry: dict[str, Any]) -> None:
    codec = codec_for(entry["codec"])
    ours, javas = sealed(entry), bytes.fromhex(entry["batch"])
    assert codec.decompress(ours[61:], 1 << 20) == codec.decompress(javas[61:], 1 << 20)
    # All of the header but length and checksum, which depend on the compressed bytes.
    assert ours[:8] == javas[:8]
    assert ours[12:17] == javas[12:17]
    assert ours[21:61] == javas[21:61]


@pytest.mark.parametrize("entry", MADE, ids=label)
def test_decoder_reads_records_written_by_java(entry: dict[str, Any]) -> None:
    batch = decode_one(bytes.fromhex(entry["batch"]))
    assert [record.timestamp_ms for record in batch.records] == [record["timestamp"] for record in entry["records"]]
    assert plain(batch) == [
        (offset, from_hex(record["key"]), from_hex(record["value"]), tuple(described_headers(record)))
        for offset, record in enumerate(entry["records"])
    ]
    assert (batch.codec.name, batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.is_transactional) == (
        entry["codec"],
        entry["producer_id"],
        entry["producer_epoch"],
        entry["base_sequence"],
        entry["is_transactional"],
    )


def test_log_append_time_replaces_the_times_of_records() -> None:
    (entry,) = (entry for entry in BATCHES if entry["name"] == "log append time")
    batch = decode_one(bytes.fromhex(entry["batch"]))
    assert [record.offset for record in batch.records] == [5_000_000_000, 5_000_000_001, 5_000_000_002]
    assert {record.timestamp_ms for record in batch.records} == {1_800_000_000_000}
    assert batch.last_offset == 5_000_000_002


def test_control_batch_is_recognized() -> None:
    (entry,) = (entry for entry in BATCHES if entry["name"] == "control")
    batch = decode_one(bytes.fromhex(entry["batch"]))
    assert batch.is_control
    assert batch.is_transactional
    assert batch.producer_id == 77
    assert batch.records[0].key == bytes([0, 0, 0, 1])  # version 0, type 1: commit


def test_single_records_with_any_delta_equal_javas_byte_for_byte() -> None:
    columns = columns_of([entry["record"] for entry in RECORDS])
    offsets = np.array([entry["offset_delta"] for entry in RECORDS], np.int64)
    times = np.array([entry["timestamp_delta"] for entry in RECORDS], np.int64)
    data, bounds = encode_columns(columns, offsets, times)
    encoded = [data[bounds[row] : bounds[row + 1]].hex() for row in range(len(RECORDS))]
    assert encoded == [entry["bytes"] for entry in RECORDS]


def test_rows_one_by_one_give_the_bytes_of_the_column() -> None:
    for entry in RECORDS:
        record = entry["record"]
        run = encode_rows(
            [from_hex(record["key"])],
            [from_hex(record["value"])],
            [described_headers(record)],
            [0],
            entry["offset_delta"],
            min(max(-entry["timestamp_delta"], -(2**63)), 2**63 - 1),
        )
        if abs(entry["timestamp_delta"]) < 2**63:
            assert run.chunk.hex() == entry["bytes"]


def test_upper_bound_of_a_record_holds_and_is_close() -> None:
    for entry in RECORDS:
        record = entry["record"]
        bound = record_size_upper_bound(from_hex(record["key"]), from_hex(record["value"]), described_headers(record))
        assert 0 <= bound - len(entry["bytes"]) // 2 <= 21


def test_murmur2_of_a_key_equals_javas() -> None:
    for entry in HASHES:
        key = bytes.fromhex(entry["key"])
        assert murmur2(key) == entry["murmur2"]
        assert [partition_for_key(key, count) for count in PARTITION_COUNTS] == entry["partitions"]


@pytest.mark.parametrize("sizes", ["all", "short", "alike"])
def test_murmur2_of_a_column_equals_javas(sizes: str) -> None:
    chosen = {
        "all": HASHES,
        "short": [entry for entry in HASHES if len(entry["key"]) <= 40],
        "alike": [entry for entry in HASHES if len(entry["key"]) == 24],
    }[sizes]
    keys = pa.array([bytes.fromhex(entry["key"]) for entry in chosen], pa.binary())
    for hasher in [hash_by_numpy, hash_by_kernel] if has_kernel() else [hash_by_numpy]:
        assert hasher(keys).view(np.int32).tolist() == [entry["murmur2"] for entry in chosen]
    for index, count in enumerate(PARTITION_COUNTS):
        assert partitions_for_keys(keys, count).tolist() == [entry["partitions"][index] for entry in chosen]
