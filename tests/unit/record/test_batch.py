from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from support.record_golden import plain, read_by_kio

from spark_kafka_sink.record.batch import HEADER_SIZE, seal
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.decoder import decode_batches
from spark_kafka_sink.record.encoder import encode_rows


def encoded(count: int, base_offset_delta: int = 0) -> memoryview:
    values = [b"value %d" % row for row in range(count)]
    return encode_rows(None, values, None, [1000] * count, base_offset_delta, 1000).chunk


def address(chunk: Any) -> int:
    return int(np.frombuffer(chunk, np.uint8).ctypes.data)


def test_chunks_follow_the_header_without_a_copy() -> None:
    chunks = [encoded(3), encoded(2, 3)]
    batch = seal(chunks, 5, 1000, 1000, codec_for("none"))
    assert len(batch.buffers[0]) == HEADER_SIZE
    assert list(map(address, batch.buffers[1:])) == list(map(address, chunks))
    assert batch.size == sum(map(len, batch.buffers))
    assert [record.offset for record in read_by_kio(b"".join(batch.buffers))] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batch_is_a_header_and_one_buffer(name: str) -> None:
    batch = seal([encoded(500), encoded(500, 500)], 1000, 1000, 1000, codec_for(name))
    assert [len(buffer) for buffer in batch.buffers] == [HEADER_SIZE, batch.size - HEADER_SIZE]
    joined = b"".join(batch.buffers)
    assert len(joined) == batch.size
    (decoded,) = decode_batches(joined)
    assert [record.value for record in decoded.records] == [b"value %d" % row for row in range(500)] * 2
    assert decoded.codec.name == name


def test_incompressible_records_are_sent_compressed() -> None:
    batch = seal([encoded(1)], 1, 1000, 1000, codec_for("lz4"))
    assert batch.size > HEADER_SIZE + len(encoded(1))
    (decoded,) = decode_batches(b"".join(batch.buffers))
    assert (decoded.codec.name, decoded.records[0].value) == ("lz4", b"value 0")


@pytest.mark.parametrize("name", ["none", "zstd"])
def test_new_producer_state_changes_only_header_and_checksum(name: str) -> None:
    sealed = seal([encoded(3)], 3, 1000, 1005, codec_for(name), 1, 2, 3)
    again = sealed.with_producer_state(2**40, 7, 2**31 - 1, True)
    assert again.buffers[1] is sealed.buffers[1]
    (before,), (after,) = decode_batches(b"".join(sealed.buffers)), decode_batches(b"".join(again.buffers))
    assert (before.producer_id, before.producer_epoch, before.base_sequence, before.is_transactional) == (
        1,
        2,
        3,
        False,
    )
    assert (after.producer_id, after.producer_epoch, after.base_sequence) == (2**40, 7, 2**31 - 1)
    assert after.is_transactional
    assert plain(after) == plain(before)
    assert (after.base_timestamp_ms, after.max_timestamp_ms, after.last_offset_delta) == (1000, 1005, 2)


def test_checksum_covers_all_bytes_after_it() -> None:
    joined = b"".join(seal([encoded(2), encoded(1, 2)], 3, 1000, 1000, codec_for("none")).buffers)
    assert int.from_bytes(joined[17:21], "big") == crc32c(joined[21:])
