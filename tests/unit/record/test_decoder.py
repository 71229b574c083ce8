from __future__ import annotations

import random
import struct

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_kafka_sink.common.errors import CorruptBatchError
from spark_kafka_sink.record.batch import LOG_APPEND_TIME_FLAG, seal
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.decoder import BatchLimits, decode_batches
from spark_kafka_sink.record.encoder import encode_rows


def batch_bytes(values: list[bytes | None], codec: str = "none", base_offset: int = 0) -> bytes:
    run = encode_rows(None, values, [[("h", b"x")]] * len(values), [1000] * len(values), 0, 1000)
    joined = b"".join(seal([run.chunk], len(values), 1000, 1000, codec_for(codec)).buffers)
    return base_offset.to_bytes(8, "big") + joined[8:]


def with_records(body: bytes, count: int, last_delta: int | None = None, attributes: int = 0) -> bytes:
    """A batch of these bytes with a true length and checksum, whatever the bytes are."""
    last_delta = count - 1 if last_delta is None else last_delta
    covered = struct.pack(">hiqqqhii", attributes, last_delta, 0, 0, -1, -1, -1, count) + body
    return struct.pack(">qiibI", 0, len(covered) + 9, -1, 2, crc32c(covered)) + covered


def decoded_values(data: bytes) -> list[list[bytes | None]]:
    return [[record.value for record in batch.records] for batch in decode_batches(data)]


def refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptBatchError, match=message):
        list(decode_batches(data))


def test_consecutive_batches_have_their_own_offsets_and_codecs() -> None:
    data = batch_bytes([b"a", b"b"], "none", 10) + batch_bytes([b"c"], "zstd", 12) + batch_bytes([b"d"], "lz4", 2**40)
    batches = list(decode_batches(memoryview(data)))
    assert [[record.offset for record in batch.records] for batch in batches] == [[10, 11], [12], [2**40]]
    assert [batch.codec.name for batch in batches] == ["none", "zstd", "lz4"]
    assert sum(batch.size for batch in batches) == len(data)


def test_times_that_lie_far_apart_are_read_to_the_millisecond() -> None:
    times = [1_000, 1_000 + 2**31, 1_000 + 2**45, 0]
    run = encode_rows(None, [b"v"] * 4, None, times, 0, 1_000)
    data = b"".join(seal([run.chunk], 4, 1_000, 1_000 + 2**45, codec_for("none")).buffers)
    (batch,) = decode_batches(data)
    assert [record.timestamp_ms for record in batch.records] == times


def test_log_append_time_is_the_time_of_every_record() -> None:
    data = batch_bytes([b"a", b"b"])
    header, covered = data[:17], bytearray(data[21:])
    covered[1] |= LOG_APPEND_TIME_FLAG
    covered[14:22] = (5_000).to_bytes(8, "big")  # the largest timestamp
    (batch,) = decode_batches(header + crc32c(bytes(covered)).to_bytes(4, "big") + covered)
    assert [record.timestamp_ms for record in batch.records] == [5_000, 5_000]


def test_last_batch_that_is_cut_off_is_left_out() -> None:
    first, second = batch_bytes([b"a"]), batch_bytes([b"b"])
    for kept in range(len(second)):
        assert decoded_values(first + second[:kept]) == [[b"a"]]
    assert decoded_values(b"") == []


def test_flipped_bit_after_the_leader_epoch_is_noticed() -> None:
    data = batch_bytes([b"value", b"another"])
    for position in range(16, len(data)):
        wrong = bytearray(data)
        wrong[position] ^= 0x10
        with pytest.raises(CorruptBatchError):
            list(decode_batches(bytes(wrong)))


def test_error_of_a_wrong_checksum_names_the_offset() -> None:
    data = bytearray(batch_bytes([b"value"], base_offset=77))
    data[-1] ^= 1
    refused(bytes(data), "The batch at offset 77 is corrupt. Its checksum is 0x[0-9a-f]{8}, its bytes give 0x")


@pytest.mark.parametrize("magic", [0, 1, 3])
def test_another_format_version_is_refused(magic: int) -> None:
    data = bytearray(batch_bytes([b"value"]))
    data[16] = magic
    refused(bytes(data), f"format version {magic}; only 2 is read")


@pytest.mark.parametrize("length", [-1, 0, 48, -(2**31)])
def test_length_too_small_for_a_header_is_refused(length: int) -> None:
    data = batch_bytes([b"value"])
    refused(data[:8] + struct.pack(">i", length) + data[12:], f"claims a length of {length} bytes")


RECORD = bytes([0x10, 0, 0, 0, 1, 0x04, 0x61, 0x62, 0])  # 8 bytes: null key, value "ab", no headers


def test_record_of_these_tests_decodes() -> None:
    assert decoded_values(with_records(RECORD, 1)) == [[b"ab"]]
    assert decoded_values(with_records(b"", 0, last_delta=5)) == [[]]


@pytest.mark.parametrize(
    ("body", "count", "message"),
    [
        (RECORD, 2, "claims 2 records in 9 bytes"),
        (RECORD, 2**31 - 1, "claims 2147483647 records in 9 bytes"),
        (RECORD, -1, "claims -1 records"),
        (RECORD, 0, "9 bytes follow its 0 records"),
        (RECORD * 2, 1, "9 bytes follow its 1 records"),
        (RECORD[:-1], 1, "Record 0 claims 8 bytes of 7 left"),
        (b"\x12" + RECORD[1:] + b"\x00", 1, "Record 0 is not the 9 bytes long that it states"),
        (b"\x0e" + RECORD[1:], 1, "Record 0 is not the 7 bytes long"),
        (b"\x11" + RECORD[1:], 1, "Record 0 is not the -9 bytes long"),
        (b"\xff\xff\xff\xff\xff\x01" + RECORD, 1, "varint takes more than 5 bytes"),
        (b"\xfe\xff\xff\xff\x0f" + RECORD[1:], 1, "Record 0 claims 2147483647 bytes of 8 left"),
        (bytes([0x10, 0, 0, 0, 1, 0x40, 0x61, 0x62, 0]), 1, "end within record 0"),
        (bytes([0x10, 0, 0, 2, 1, 4, 0x61, 0x62, 0]), 1, "Record 0 has offset delta 1 of 0"),
        (bytes([0x10, 0, 0, 1, 1, 4, 0x61, 0x62, 0]), 1, "Record 0 has offset delta -1 of 0"),
        (bytes([0x10, 0, 0, 0, 1, 4, 0x61, 0x62, 1]), 1, "claims -1 headers"),
        (bytes([0x10, 0, 0, 0, 1, 0, 0x04, 0, 0]), 1, "claims 2 headers in 2 bytes"),
        (bytes([0x0E, 0, 0, 0, 1, 1, 0xFE, 0x7F]), 1, "claims 8191 headers in 0 bytes"),
        (bytes([0x10, 0, 0, 0, 1, 1, 0x02, 1, 0]), 1, "name has the length -1"),
        (bytes([0x0E, 0, 0, 0, 1, 1, 0x80, 0x80]), 1, "end within record 0"),
    ],
)
def test_records_that_contradict_the_header_are_refused(body: bytes, count: int, message: str) -> None:
    refused(with_records(body, count, last_delta=0), message)


def test_unknown_codec_is_refused() -> None:
    refused(with_records(RECORD, 1, attributes=6), "compression codec 6")


def test_records_that_do_not_decompress_are_refused() -> None:
    refused(with_records(RECORD, 1, attributes=4), "do not decompress as zstd")


def test_count_is_checked_against_the_decompressed_bytes() -> None:
    compressed = bytes(codec_for("gzip").compress([RECORD * 10]))
    assert decoded_values(with_records(compressed, 10, 0, attributes=1)) == [[b"ab"] * 10]
    refused(with_records(compressed, 13, attributes=1), "claims 13 records in 90 bytes")


def test_compression_bomb_is_refused_at_the_limit() -> None:
    data = batch_bytes([bytes(5_000_000)], "zstd")
    assert len(data) < 10_000
    with pytest.raises(CorruptBatchError, match="take more than 1000000 bytes when decompressed"):
        list(decode_batches(data, BatchLimits(decompressed_size=1_000_000)))


@settings(derandomize=True, max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=80), st.integers(-5, 30), st.integers(0, 5))
def test_any_bytes_give_records_or_a_corrupt_batch_error(body: bytes, count: int, attributes: int) -> None:
    try:
        batches = list(decode_batches(with_records(body, count, attributes=attributes)))
    except CorruptBatchError:
        return
    assert sum(len(batch.records) for batch in batches) == count


def test_changed_batch_with_valid_checksum_decodes_or_is_corrupt() -> None:
    rng = random.Random(11)
    body = batch_bytes([b"some value", None, b"x" * 100])[61:]
    outcomes = {"read": 0, "refused": 0}
    for _ in range(3000):
        wrong = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            wrong[rng.randrange(len(wrong))] = rng.randrange(256)
        try:
            list(decode_batches(with_records(bytes(wrong), 3)))
            outcomes["read"] += 1
        except CorruptBatchError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100


@pytest.mark.parametrize(("records", "headers"), [(11, ()), (1, (10,)), (5, (6,)), (5, (3, 3))])
def test_more_objects_than_are_read_are_refused(records: int, headers: tuple[int, ...]) -> None:
    """Bug: a compressed batch of 51 KB became 612 MB of records. `headers`: of the first records, one number each."""
    some: list[list[tuple[str, bytes | None]]] = [[] for _ in range(records)]
    for index, count in enumerate(headers):
        some[index] = [("h", None)] * count
    run = encode_rows(None, [b"v"] * records, some, [0] * records, 0, 0)
    data = b"".join(seal([run.chunk], records, 0, 0, codec_for("gzip")).buffers)
    (batch,) = decode_batches(data, BatchLimits(objects=11))
    assert len(batch.records) == records
    with pytest.raises(CorruptBatchError, match=r"more than the 10 that are read|headers, 1 more than are read"):
        list(decode_batches(data, BatchLimits(objects=10)))


def test_batch_of_more_than_two_million_records_is_refused() -> None:
    refused(with_records(bytes(7 * 2_000_001), 2_000_001), "2000001 records, more than the 2000000 that are read")
