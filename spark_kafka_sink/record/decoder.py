"""Record batches (format v2) back to records: for the topic reader, and to split a batch that is too large for the
broker.

Holds no state; any thread. Shares only the layout of the header with the encoder. Every length and count is compared
with the remaining bytes before memory is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from spark_kafka_sink.common.errors import CorruptBatchError
from spark_kafka_sink.record.batch import (
    AFTER_CRC,
    BEFORE_CRC,
    CODEC_MASK,
    CONTROL_FLAG,
    CRC_START,
    HEADER_SIZE,
    LENGTH_PREFIX,
    LOG_APPEND_TIME_FLAG,
    MAGIC,
    TRANSACTIONAL_FLAG,
)
from spark_kafka_sink.record.codecs import Codec, codec_by_id


class BatchLimits(NamedTuple):
    """Limits of one batch: bytes after decompression, and records and headers together.

    Compressed, both cost almost nothing: 20 KB can hold 2,000,000 records, each of which takes 120 bytes of memory.
    """

    decompressed_size: int = 256 * 1024 * 1024
    objects: int = 2_000_000


DEFAULT_LIMITS = BatchLimits()

_LEAST_RECORD = 7
"""Bytes of the smallest record: length, attributes, two deltas, two lengths, header count."""
_LEAST_HEADER = 2
_VARINT_BYTES = 5
_VARLONG_BYTES = 10


class DecodedRecord(NamedTuple):
    """A record. A header is (name, value or None)."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A batch. `size` is its bytes in Kafka, `attributes` the 16 bits of the header.

    The last offset may lie after the last record.
    """

    base_offset: int
    last_offset_delta: int
    partition_leader_epoch: int
    attributes: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    size: int
    records: list[DecodedRecord]

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def codec(self) -> Codec:
        return codec_by_id(self.attributes & CODEC_MASK)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_FLAG)

    @property
    def is_control(self) -> bool:
        """A control batch of the broker: the key of its record has version and type (two int16) of a marker."""
        return bool(self.attributes & CONTROL_FLAG)


def decode_batches(data: bytes | memoryview, limits: BatchLimits = DEFAULT_LIMITS) -> Iterator[DecodedBatch]:
    """Yield the batches of a Fetch response's records. A last batch that is cut off is skipped, because brokers send
    such.

    Raises CorruptBatchError for another format version, a wrong checksum, contents that differ from the header, or more
    than `limits`.
    """
    view = memoryview(data)
    while len(view) >= CRC_START:
        base_offset, length, leader_epoch, magic = BEFORE_CRC.unpack_from(view)
        if magic != MAGIC:
            raise CorruptBatchError(f"The batch at offset {base_offset} has format version {magic}; only 2 is read.")
        if length < HEADER_SIZE - LENGTH_PREFIX:
            raise CorruptBatchError(f"The batch at offset {base_offset} claims a length of {length} bytes.")
        size = length + LENGTH_PREFIX
        if size > len(view):
            return
        try:
            yield _decode_batch(view[:size], base_offset, leader_epoch, limits)
        except CorruptBatchError as error:
            raise CorruptBatchError(f"The batch at offset {base_offset} is corrupt. {error}") from error
        view = view[size:]


def _decode_batch(view: memoryview, base_offset: int, leader_epoch: int, limits: BatchLimits) -> DecodedBatch:
    stored = int.from_bytes(view[CRC_START - 4 : CRC_START], "big")
    computed = crc32c(view[CRC_START:])
    if stored != computed:
        raise CorruptBatchError(f"Its checksum is {stored:#010x}, its bytes give {computed:#010x}.")
    attributes, last_delta, base_time, max_time, producer_id, epoch, sequence, count = AFTER_CRC.unpack_from(
        view, CRC_START
    )
    records: list[DecodedRecord] = []
    body = view[HEADER_SIZE:]
    if count != 0 or len(body):
        plain = codec_by_id(attributes & CODEC_MASK).decompress(body, limits.decompressed_size)
        if not 0 <= count * _LEAST_RECORD <= len(plain):
            raise CorruptBatchError(f"It claims {count} records in {len(plain)} bytes.")
        if count > limits.objects:
            raise CorruptBatchError(f"It has {count} records, more than the {limits.objects} that are read.")
        append_time = max_time if attributes & LOG_APPEND_TIME_FLAG else None
        records = _decode_records(plain, count, base_offset, last_delta, base_time, append_time, limits.objects)
    return DecodedBatch(
        base_offset,
        last_delta,
        leader_epoch,
        attributes,
        base_time,
        max_time,
        producer_id,
        epoch,
        sequence,
        len(view),
        records,
    )


def _decode_records(  # noqa: C901 -- one branch for each field, kept in one loop for speed
    body: bytes, count: int, base_offset: int, last_delta: int, base_time: int, append_time: int | None, most: int
) -> list[DecodedRecord]:
    """Read varints of one byte, the usual case, without a call for each."""
    records, position, room = list[DecodedRecord](), 0, most - count
    try:
        for _ in range(count):
            length, position = _varint(body, position, _VARINT_BYTES)
            end = position + length
            if end > len(body):
                raise CorruptBatchError(f"Record {len(records)} claims {length} bytes of {len(body) - position} left.")
            position += 1  # attributes: all unused
            raw = body[position]
            if raw < 0x80:
                time_delta = raw >> 1 ^ -(raw & 1)
                position += 1
            else:
                time_delta, position = _varint(body, position, _VARLONG_BYTES)
            raw = body[position]
            if raw < 0x80:
                offset_delta = raw >> 1 ^ -(raw & 1)
                position += 1
            else:
                offset_delta, position = _varint(body, position, _VARINT_BYTES)
            if not 0 <= offset_delta <= last_delta:
                raise CorruptBatchError(f"Record {len(records)} has offset delta {offset_delta} of {last_delta}.")
            raw = body[position]
            if raw < 0x80:
                size = raw >> 1 ^ -(raw & 1)
                position += 1
            else:
                size, position = _varint(body, position, _VARINT_BYTES)
            key = value = None
            if size >= 0:
                key = body[position : position + size]
                position += size
            raw = body[position]
            if raw < 0x80:
                size = raw >> 1 ^ -(raw & 1)
                position += 1
            else:
                size, position = _varint(body, position, _VARINT_BYTES)
            if size >= 0:
                value = body[position : position + size]
                position += size
            headers: tuple[tuple[str, bytes | None], ...] = ()
            if body[position]:
                headers, position = _decode_headers(body, position, end, room)
                room -= len(headers)
            else:
                position += 1
            if position != end:
                raise CorruptBatchError(f"Record {len(records)} is not the {length} bytes long that it states.")
            stamp = base_time + time_delta if append_time is None else append_time
            records.append(DecodedRecord(base_offset + offset_delta, stamp, key, value, headers))
    except IndexError:
        raise CorruptBatchError(f"Its bytes end within record {len(records)}.") from None
    if position != len(body):
        raise CorruptBatchError(f"{len(body) - position} bytes follow its {count} records.")
    return records


def _decode_headers(
    body: bytes, position: int, end: int, room: int
) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, position = _varint(body, position, _VARINT_BYTES)
    if not 0 <= count * _LEAST_HEADER <= end - position:
        raise CorruptBatchError(f"A record claims {count} headers in {end - position} bytes.")
    if count > room:
        raise CorruptBatchError(f"A record has {count} headers, {count - room} more than are read of one batch.")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        size, position = _varint(body, position, _VARINT_BYTES)
        if size < 0:
            raise CorruptBatchError(f"A header's name has the length {size}.")
        name = body[position : position + size].decode("utf-8", "replace")
        position += size
        size, position = _varint(body, position, _VARINT_BYTES)
        value = None
        if size >= 0:
            value = body[position : position + size]
            position += size
        headers.append((name, value))
    return tuple(headers), position


def _varint(body: bytes, position: int, max_bytes: int) -> tuple[int, int]:
    """Return the zigzag varint at `position`, and its end."""
    value = 0
    for index in range(max_bytes):
        byte = body[position + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), position + index + 1
    raise CorruptBatchError(f"A varint takes more than {max_bytes} bytes.")
