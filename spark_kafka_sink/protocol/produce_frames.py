"""The frame of a Produce request, written without kio: the one request that is sent often enough for that.

It is what kio would write, byte for byte, in every version that we speak. Header and fields are a few bytes between the
record batches, which stay the buffers that they came in. Sources: the protocol guide ("Protocol Primitive Types",
"Request Header"), KIP-482 (tagged fields).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.protocol.chunks import RecordChunks
from spark_kafka_sink.protocol.framing import MAX_FRAME, SIZE_BYTES
from spark_kafka_sink.protocol.layout import write_varint

_API_KEY: Final = 0
_FIRST_FLEXIBLE: Final = 9
_LONGEST_STRING: Final = 2**15 - 1
_TOP: Final = struct.Struct(">ihhi")
"""Size, api key, version, correlation id."""
_ACKS_AND_TIMEOUT: Final = struct.Struct(">hi")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")


def produce_frame(
    version: int,
    correlation_id: int,
    client_id: str | None,
    transactional_id: str | None,
    acks: int,
    timeout_ms: int,
    batches: Mapping[str, Sequence[tuple[int, RecordChunks]]],
) -> list[memoryview]:
    """The buffers of the frame, as `framing.encode_request` gives them.

    Raises ProtocolError where a value does not fit its field.
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
    """The buffers, the size left open, and how many bytes they are."""
    is_flexible = version >= _FIRST_FLEXIBLE
    string, count = (_compact_string, _compact_count) if is_flexible else (_string, _INT32.pack)
    no_tags = b"\0" if is_flexible else b""
    buffers: list[memoryview] = []
    size = 0
    piece: bytes | bytearray = bytearray(_TOP.pack(0, _API_KEY, version, correlation_id))
    piece += _string(client_id) + no_tags  # the client's id has the old form in every version
    piece += string(transactional_id) + _ACKS_AND_TIMEOUT.pack(acks, timeout_ms) + count(len(batches))
    for topic, partitions in batches.items():
        piece += string(topic) + count(len(partitions))
        for index, records in partitions:
            piece += _INT32.pack(index) + count(records.size)  # bytes are counted as items are
            size += len(piece) + records.size
            buffers.append(memoryview(piece))
            buffers += records.buffers
            piece = no_tags  # the partition's
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
