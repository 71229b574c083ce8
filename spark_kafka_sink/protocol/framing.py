"""Frames: a request becomes the buffers of one `sendmsg`, a response payload becomes an entity or a `ProtocolError`.

On the wire every message is a 4-byte size, a header and a body (protocol guide, "Common Request and Response
Structure"). Record batches pass from the encoder to the socket as the buffers they were made in: kio's writers ask a
bytes field only for its length and give it to the buffer's `write`, so `RecordChunks` can take its place.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from kio.serial import entity_reader
from kio.serial.errors import SerialError

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.protocol.layout import Edit, Step, apply_edits, layout_of, restore_codes
from spark_kafka_sink.protocol.versions import ApiKey, Message, MessageType, response_type, writer_of


class RecordChunks:
    """The records of one partition in a Produce request: whole record batches (format v2), as the buffers of the
    encoder.
    """

    __slots__ = ("buffers", "size")

    def __init__(self, buffers: Iterable[memoryview], size: int | None = None) -> None:
        """`size`: bytes of all buffers, if the caller knows it."""
        self.buffers: tuple[memoryview, ...] = tuple(buffers)
        self.size = sum(buffer.nbytes for buffer in self.buffers) if size is None else size

    def __len__(self) -> int:
        """Bytes of all buffers. kio asks for the length."""
        return self.size

    def __repr__(self) -> str:
        return f"RecordChunks({self.size} bytes in {len(self.buffers)} buffers)"


class GatherBuffer:
    """A buffer for kio's writers that returns a list of buffers.

    Small pieces are joined; `RecordChunks` are inserted as they are.
    """

    __slots__ = ("_buffers", "_small")

    def __init__(self, reserved: int = 0) -> None:
        """Leave the first `reserved` bytes for the caller to fill in."""
        self._buffers: list[memoryview] = []
        self._small = bytearray(reserved)

    def write(self, data: bytes | RecordChunks) -> None:
        if isinstance(data, RecordChunks):
            self._buffers.append(memoryview(self._small))
            self._small = bytearray()
            self._buffers.extend(data.buffers)
        else:
            self._small += data

    def finish(self) -> list[memoryview]:
        """Return everything written, in order, without empty buffers."""
        if self._small:
            self._buffers.append(memoryview(self._small))
            self._small = bytearray()
        return [buffer for buffer in self._buffers if buffer.nbytes]


_log = logging.getLogger(__name__)

_INT32: Final = struct.Struct(">i")
_INT16: Final = struct.Struct(">h")
_UNSUPPORTED_VERSION: Final = 35
_UNKNOWN_SERVER_ERROR: Final = -1
_API_VERSIONS: Final = int(ApiKey.API_VERSIONS)
SIZE_BYTES: Final = 4
MAX_FRAME: Final = 2**31 - 1


def encode_request(entity: Message, correlation_id: int, client_id: str | None) -> list[memoryview]:
    """Return the buffers of a request's frame, for `sendmsg`: size, header and body.

    Record batches stay the buffers that they came in. Raises ProtocolError if a value does not fit its field, such as a
    topic name of more than 32,767 bytes or a number out of range.
    """
    request_type: MessageType = type(entity)
    header_type = request_type.__header_schema__
    buffer = GatherBuffer(reserved=SIZE_BYTES)
    header = header_type(
        request_api_key=request_type.__api_key__,
        request_api_version=request_type.__version__,
        correlation_id=correlation_id,
        client_id=client_id,
    )
    try:
        writer_of(header_type)(buffer, header)
        writer_of(request_type)(buffer, entity)
    except (struct.error, SerialError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ProtocolError(f"{request_name(request_type)} cannot be encoded: {error}") from error
    frame = buffer.finish()
    size = sum(piece.nbytes for piece in frame) - SIZE_BYTES
    if size > MAX_FRAME:
        raise ProtocolError(f"{request_name(request_type)} is {size} bytes; a frame holds at most {MAX_FRAME}.")
    _INT32.pack_into(frame[0], 0, size)
    return frame


def correlation_id_of(payload: bytes | bytearray | memoryview) -> int:
    """Return the correlation id at the start of a response frame. Raises ProtocolError if the frame is too short."""
    if len(payload) < _INT32.size:
        raise ProtocolError(f"A response of {len(payload)} bytes is too short for a correlation id.")
    return int(_INT32.unpack_from(payload)[0])


def parse_response(request_type: MessageType, payload: bytes | bytearray | memoryview) -> tuple[int, Message]:
    """Return the correlation id and the response to a request of `request_type`, from a frame without its size.

    Every count and length is compared with the remaining bytes before memory is allocated. Tags that kio does not know
    are skipped, as KIP-482 requires. An error code that kio does not know is logged, and is an int in the entity. A
    broker that does not know our version of ApiVersions answers in version 0 (KIP-511), which is read too.

    Bytes after the response are ignored, as Kafka's own clients ignore them: some servers send them.

    Raises only ProtocolError, on bytes that are not this response: missing bytes, an impossible count, a null in a
    field that allows none, text that is not UTF-8, a date out of range.
    """
    correlation_id = correlation_id_of(payload)
    version = int(request_type.__version__)
    api_key = int(request_type.__api_key__)
    if api_key == _API_VERSIONS and version > 0 and _error_code_after_header(payload) == _UNSUPPORTED_VERSION:
        version = 0
    walk_header, walk_body, read = _reading(api_key, version)
    edits: list[Edit] = []
    try:
        body = walk_header(payload, 0, edits)
        end = walk_body(payload, body, edits)
    except (IndexError, struct.error):
        raise ProtocolError(f"{_response_name(request_type, version, len(payload))} ends too early.") from None
    except ProtocolError as error:
        raise ProtocolError(f"{_response_name(request_type, version, len(payload))}: {error}.") from None
    if end != len(payload) and _log.isEnabledFor(logging.DEBUG):
        name = _response_name(request_type, version, len(payload))
        _log.debug("%s has %d bytes more than it needs; they are ignored.", name, len(payload) - end)
    if edits:
        name = _response_name(request_type, version, len(payload))
        notes = [edit.note for edit in edits if edit.note]
        if notes:  # one line, because a broker decides how many there are
            more = f" (and {len(notes) - 1} more such places)" if len(notes) > 1 else ""
            _log.warning("%s: %s%s", name, notes[0], more)
        payload = apply_edits(payload, edits)
        body = walk_header(payload, 0, [])
    elif not isinstance(payload, bytes):
        payload = memoryview(payload).toreadonly()  # the bytes must not change while kio reads them
    try:
        entity, _ = read(payload, body)
    except (SerialError, ValueError, OverflowError, TypeError, LookupError) as error:
        name = _response_name(request_type, version, end)
        raise ProtocolError(f"{name} does not parse: {str(error).rstrip('.')}.") from error
    codes = [edit.code for edit in edits if edit.code is not None]
    if any(code != _UNKNOWN_SERVER_ERROR for code in codes):
        restore_codes(entity, iter(codes))
    return correlation_id, entity


def request_name(request_type: MessageType) -> str:
    """Return "Produce" for a ProduceRequest, for error texts."""
    return str(request_type.__name__).removesuffix("Request")


def _response_name(request_type: MessageType, version: int, size: int) -> str:
    return f"{request_name(request_type)}'s response (version {version}, {size} bytes)"


@cache
def _reading(api_key: int, version: int) -> tuple[Step, Step, Any]:
    """Return the walks over header and body of a response, and kio's reader of the body."""
    entity_type = response_type(api_key, version)
    return layout_of(entity_type.__header_schema__), layout_of(entity_type), entity_reader(entity_type)


def _error_code_after_header(payload: bytes | bytearray | memoryview) -> int:
    at = _INT32.size  # ApiVersions responses have header 0 in every version
    return int(_INT16.unpack_from(payload, at)[0]) if len(payload) >= at + _INT16.size else 0
