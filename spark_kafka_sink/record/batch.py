"""The header of a record batch, format v2 (KIP-98, org.apache.kafka.common.record.DefaultRecordBatch).

`seal` closes a batch with it, on the thread that drains the batch. Header and records are never joined, nor are
uncompressed records: `buffers` goes to the socket as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from spark_kafka_sink.record.codecs import Codec

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

HEADER_SIZE = 61
"""Bytes before the first record: RECORD_BATCH_OVERHEAD."""
LENGTH_PREFIX = 12
"""Bytes of base offset and batch length, which the batch length does not count: LOG_OVERHEAD."""
CRC_START = 21
"""The checksum covers all bytes from the attributes on."""
MAGIC = 2
CODEC_MASK = 0x07
LOG_APPEND_TIME_FLAG = 0x08
TRANSACTIONAL_FLAG = 0x10
CONTROL_FLAG = 0x20

NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
NO_SEQUENCE = -1
MAX_SEQUENCE = 2**31 - 1
_NO_LEADER_EPOCH = -1

BEFORE_CRC = struct.Struct(">qiib")
"""Base offset, batch length, partition leader epoch, magic."""
AFTER_CRC = struct.Struct(">hiqqqhii")
"""Attributes, last offset delta, base and max timestamp, producer id, producer epoch, base sequence, record count."""


def increment_sequence(sequence: int, increment: int) -> int:
    """Return `sequence` + `increment`. After 2**31 - 1 comes 0 (DefaultRecordBatch.incrementSequence)."""
    return (sequence + increment) % (MAX_SEQUENCE + 1)


class _Stamp(NamedTuple):
    """The fields of the header that stay the same in every attempt."""

    codec_id: int
    record_count: int
    base_timestamp_ms: int
    max_timestamp_ms: int


@dataclass(frozen=True)
class SealedBatch:
    """A batch ready to be sent. `buffers` are its bytes in order, the header first; `size` is their sum."""

    buffers: list[memoryview]
    size: int
    stamp: _Stamp

    def with_producer_state(
        self, producer_id: int, producer_epoch: int, base_sequence: int, is_transactional: bool
    ) -> SealedBatch:
        """Return the same records with a new header for another producer id, epoch and sequence. No copy of records."""
        return _assemble(self.buffers[1:], self.stamp, producer_id, producer_epoch, base_sequence, is_transactional)


def seal(
    chunks: Sequence[SizedBuffer],
    record_count: int,
    base_timestamp_ms: int,
    max_timestamp_ms: int,
    codec: Codec,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    is_transactional: bool = False,
) -> SealedBatch:
    """Close a batch of `record_count` encoded records (offset deltas 0..record_count-1) in `chunks`.

    A codec compresses even if the result is larger, as in Kafka's own producer.
    """
    body = [memoryview(chunk) for chunk in (chunks if codec.id == 0 else [codec.compress(chunks)])]
    stamp = _Stamp(codec.id, record_count, base_timestamp_ms, max_timestamp_ms)
    return _assemble(body, stamp, producer_id, producer_epoch, base_sequence, is_transactional)


def _assemble(
    body: list[memoryview],
    stamp: _Stamp,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    is_transactional: bool,
) -> SealedBatch:
    size = HEADER_SIZE + sum(map(len, body))
    covered = AFTER_CRC.pack(
        stamp.codec_id | (TRANSACTIONAL_FLAG if is_transactional else 0),
        stamp.record_count - 1,
        stamp.base_timestamp_ms,
        stamp.max_timestamp_ms,
        producer_id,
        producer_epoch,
        base_sequence,
        stamp.record_count,
    )
    checksum = crc32c(covered)
    for chunk in body:
        checksum = crc32c(chunk, checksum)
    start = BEFORE_CRC.pack(0, size - LENGTH_PREFIX, _NO_LEADER_EPOCH, MAGIC)
    return SealedBatch([memoryview(start + checksum.to_bytes(4, "big") + covered), *body], size, stamp)
