"""Record batches as a broker sees them (format v2). Reads by kio and independent codecs, not by the package under
test.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from typing import NamedTuple

import cramjam
import lz4.frame
import pyarrow
from crc32c import crc32c
from kio.serial.readers import read_signed_varint, read_signed_varlong

HEADER = struct.Struct(">qiiBIhiqqqhii")
CRC_START = 21
NO_SEQUENCE = -1
SEQUENCE_MODULUS = 2**31
TRANSACTIONAL = 0x10
CONTROL = 0x20
_XERIAL_MAGIC = b"\x82SNAPPY\x00"


class BadBatchError(Exception):
    """The broker's error code: CORRUPT_MESSAGE (2) or INVALID_RECORD (87)."""

    def __init__(self, error_code: int, reason: str) -> None:
        super().__init__(reason)
        self.error_code = error_code


class BatchHeader(NamedTuple):
    """The 61 bytes before the records, in their order on the wire."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def codec(self) -> int:
        return self.attributes & 7

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def last_sequence(self) -> int:
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) % SEQUENCE_MODULUS


class BrokerRecord(NamedTuple):
    """A record as it is stored in a partition's log."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bytes | None], ...]


def check_batch(data: bytes) -> BatchHeader:
    """Return the header of the single batch in `data`. Raises BadBatchError for a wrong length, magic, checksum or
    count.
    """
    if len(data) < HEADER.size:
        raise BadBatchError(2, f"{len(data)} bytes are not a record batch")
    header = BatchHeader._make(HEADER.unpack_from(data))
    if header.magic != 2:
        raise BadBatchError(87, f"magic {header.magic}")
    if header.batch_length != len(data) - 12:
        raise BadBatchError(2, f"batch of {header.batch_length + 12} bytes in {len(data)}")
    if header.crc != crc32c(memoryview(data)[CRC_START:]):
        raise BadBatchError(2, "checksum")
    if header.record_count != header.last_offset_delta + 1 or header.record_count < 1:
        raise BadBatchError(87, f"{header.record_count} records, last offset delta {header.last_offset_delta}")
    return header


def place_batch(data: bytes, base_offset: int, leader_epoch: int) -> bytes:
    """Return the batch as it is stored: offset and leader epoch are outside the checksum."""
    return struct.pack(">q", base_offset) + data[8:12] + struct.pack(">i", leader_epoch) + data[16:]


def control_batch(producer_id: int, epoch: int, committed: bool, timestamp_ms: int) -> bytes:
    """Return the end marker of a transaction (org.apache.kafka.common.record.EndTransactionMarker)."""
    record = b"\0\0\0\x08" + struct.pack(">hh", 0, int(committed)) + b"\x0c" + struct.pack(">hi", 0, 0) + b"\0"
    records = bytes([len(record) << 1]) + record
    attributes = CONTROL | TRANSACTIONAL
    tail = struct.pack(">hiqqqhii", attributes, 0, timestamp_ms, timestamp_ms, producer_id, epoch, NO_SEQUENCE, 1)
    tail += records
    return struct.pack(">qiiBI", 0, len(tail) + 9, -1, 2, crc32c(tail)) + tail


def read_records(data: bytes) -> Iterator[BrokerRecord]:
    """Return the records of a stored batch. Raises BadBatchError if they do not fill it exactly."""
    header = check_batch(data)
    body = _decompress(header.codec, data[HEADER.size :])
    at = 0
    for index in range(header.record_count):
        length, size = read_signed_varint(body, at)
        at += size
        end = at + length
        record, at = _read_record(body, at, header)
        if at != end or record.offset != header.base_offset + index:
            raise BadBatchError(87, f"record {index} ends at {at}, not {end}, or has offset {record.offset}")
        yield record
    if at != len(body):
        raise BadBatchError(87, f"{len(body) - at} bytes after the last record")


def _read_record(body: bytes, at: int, header: BatchHeader) -> tuple[BrokerRecord, int]:
    at += 1  # attributes, unused
    timestamp_delta, size = read_signed_varlong(body, at)
    at += size
    offset_delta, size = read_signed_varint(body, at)
    at += size
    key, at = _read_bytes(body, at)
    value, at = _read_bytes(body, at)
    count, size = read_signed_varint(body, at)
    at += size
    headers = []
    for _ in range(count):
        name, at = _read_bytes(body, at)
        header_value, at = _read_bytes(body, at)
        if name is None:
            raise BadBatchError(87, "a header without a name")
        headers.append((name, header_value))
    timestamp_ms = header.base_timestamp + timestamp_delta
    return BrokerRecord(header.base_offset + offset_delta, timestamp_ms, key, value, tuple(headers)), at


def _read_bytes(body: bytes, at: int) -> tuple[bytes | None, int]:
    length, size = read_signed_varint(body, at)
    at += size
    if length < 0:
        return None, at
    if at + length > len(body):
        raise BadBatchError(87, "a field runs past the batch")
    return body[at : at + length], at + length


def _decompress(codec: int, data: bytes) -> bytes:
    if codec == 0:
        return data
    if codec == 1:
        return gzip.decompress(data)
    if codec == 2:
        return _unsnappy(data)
    if codec == 3:
        return bytes(lz4.frame.decompress(data))
    if codec == 4:
        return bytes(pyarrow.input_stream(pyarrow.py_buffer(data), compression="zstd").read())
    raise BadBatchError(76, f"codec {codec}")


def _unsnappy(data: bytes) -> bytes:
    if not data.startswith(_XERIAL_MAGIC):
        return bytes(cramjam.snappy.decompress_raw(data))
    at, blocks = 16, []
    while at < len(data):
        (length,) = struct.unpack_from(">i", data, at)
        blocks.append(bytes(cramjam.snappy.decompress_raw(data[at + 4 : at + 4 + length])))
        at += 4 + length
    return b"".join(blocks)
