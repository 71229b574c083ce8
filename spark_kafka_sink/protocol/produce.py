"""The Produce request, and its frame, which is written without kio because no other request is sent as often.

The frame is what kio would write, byte for byte, in every version that we speak. The record batches stay the buffers
that they came in; header and fields are a few bytes between them. Sources: the protocol guide ("Protocol Primitive
Types", "Request Header"), KIP-482 (tagged fields).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.protocol.building import VersionedRequest
from spark_kafka_sink.protocol.framing import MAX_FRAME, SIZE_BYTES, RecordChunks
from spark_kafka_sink.protocol.layout import write_varint
from spark_kafka_sink.protocol.versions import PURPOSE_OF_TRANSACTION_V2, SUPPORTED_VERSIONS, ApiKey, Message

_API_KEY: Final = 0
_FIRST_FLEXIBLE: Final = 9
_LONGEST_STRING: Final = 2**15 - 1
_TOP: Final = struct.Struct(">ihhi")
"""Size, api key, version, correlation id."""
_ACKS_AND_TIMEOUT: Final = struct.Struct(">hi")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_FIRST_PRODUCE_OF_TRANSACTION_V2 = 12
_FIRST_PRODUCE_WITH_ZSTD = 7


@dataclass(frozen=True, slots=True)
class ProduceRequest(VersionedRequest):
    """Record batches by topic and partition.

    `acks` is -1, 0 or 1. `transaction_version` (KIP-890) matters only with a transactional id: under 1, a broker must
    not read version 12 as permission to add partitions to the transaction. Under 2, an older version would write
    records that are in no transaction. `has_zstd` keeps the request from brokers that cannot read zstd (KIP-110).
    """

    api_key: ClassVar[ApiKey] = ApiKey.PRODUCE
    acks: int
    timeout_ms: int
    batches: Mapping[str, Sequence[tuple[int, RecordChunks]]] = field(repr=False)
    transactional_id: str | None = None
    transaction_version: int = 2
    has_zstd: bool = False

    @property
    def oldest_version(self) -> int:
        if self.transactional_id is not None and self.transaction_version >= 2:
            return _FIRST_PRODUCE_OF_TRANSACTION_V2
        return _FIRST_PRODUCE_WITH_ZSTD if self.has_zstd else SUPPORTED_VERSIONS[ApiKey.PRODUCE].oldest

    @property
    def purpose(self) -> str:
        if self.oldest_version == _FIRST_PRODUCE_OF_TRANSACTION_V2:
            return PURPOSE_OF_TRANSACTION_V2
        return "compression.type=zstd" if self.has_zstd else ""

    @property
    def latest_version(self) -> int:
        if self.transactional_id is not None and self.transaction_version < 2:
            return _FIRST_PRODUCE_OF_TRANSACTION_V2 - 1
        return SUPPORTED_VERSIONS[ApiKey.PRODUCE].latest

    def build(self, version: int) -> Message:
        topics = [
            {
                "name": topic,
                "partition_data": [{"index": index, "records": records} for index, records in partitions],
            }
            for topic, partitions in self.batches.items()
        ]
        return self._fill(
            version,
            {
                "transactional_id": self.transactional_id,
                "acks": self.acks,
                "timeout": self.timeout_ms,
                "topic_data": topics,
            },
        )

    def encode(self, version: int, correlation_id: int, client_id: str | None) -> list[memoryview]:
        return produce_frame(
            version, correlation_id, client_id, self.transactional_id, self.acks, self.timeout_ms, self.batches
        )


def produce_frame(
    version: int,
    correlation_id: int,
    client_id: str | None,
    transactional_id: str | None,
    acks: int,
    timeout_ms: int,
    batches: Mapping[str, Sequence[tuple[int, RecordChunks]]],
) -> list[memoryview]:
    """Return the buffers of the frame, as `framing.encode_request` does.

    Raises ProtocolError if a value does not fit its field.
    """
    try:
        buffers, size = _written(version, correlation_id, client_id, transactional_id, acks, timeout_ms, batches)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"Produce cannot be encoded: {error}") from error
    size -= SIZE_BYTES
    if size > MAX_FRAME:
        raise ProtocolError(f"Produce is {size} bytes; a frame holds at most {MAX_FRAME}.")
    _INT32.pack_into(buffers[0], 0, size)
    return buffers


def _written(
    version: int,
    correlation_id: int,
    client_id: str | None,
    transactional_id: str | None,
    acks: int,
    timeout_ms: int,
    batches: Mapping[str, Sequence[tuple[int, RecordChunks]]],
) -> tuple[list[memoryview], int]:
    """Return the buffers, whose size field is not filled in yet, and the sum of their bytes."""
    is_flexible = version >= _FIRST_FLEXIBLE
    string, count = (_compact_string, _compact_count) if is_flexible else (_string, _INT32.pack)
    no_tags = b"\0" if is_flexible else b""
    buffers: list[memoryview] = []
    size = 0
    piece: bytes | bytearray = bytearray(_TOP.pack(0, _API_KEY, version, correlation_id))
    piece += _string(client_id) + no_tags  # the client id has the old form in every version
    piece += string(transactional_id) + _ACKS_AND_TIMEOUT.pack(acks, timeout_ms) + count(len(batches))
    for topic, partitions in batches.items():
        piece += string(topic) + count(len(partitions))
        for index, records in partitions:
            piece += _INT32.pack(index) + count(records.size)  # a count of bytes has the form of a count of items
            size += len(piece) + records.size
            buffers.append(memoryview(piece))
            buffers += records.buffers
            piece = no_tags  # of the partition
        piece += no_tags
    piece += no_tags
    if piece:
        buffers.append(memoryview(piece))
    return buffers, size + len(piece)


def _compact_count(count: int) -> bytes:
    return write_varint(count + 1)


def _encoded(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > _LONGEST_STRING:
        raise ValueError(f"{text[:100]!r}... has {len(encoded)} bytes; a string holds at most {_LONGEST_STRING}")
    return encoded


def _string(text: str | None) -> bytes:
    if text is None:
        return b"\xff\xff"
    encoded = _encoded(text)
    return _INT16.pack(len(encoded)) + encoded


def _compact_string(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    encoded = _encoded(text)
    return write_varint(len(encoded) + 1) + encoded
