"""One connection's bytes: whole frames out of a `NetworkSend`, whole frames into a `NetworkReceive`. Owned by the
selector's thread.
"""

from __future__ import annotations

import struct
from typing import Final

from spark_kafka_sink.common.errors import DisconnectError, KafkaError, ProtocolError
from spark_kafka_sink.network.frames import ChannelKind, ChannelState, NetworkReceive, NetworkSend
from spark_kafka_sink.network.transport import WOULD_BLOCK, Transport

_SIZE: Final = struct.Struct(">i")
_SMALLEST_FRAME: Final = 4
"""A correlation id. What cannot hold one is no response."""
_IOV_MAX: Final = 1024
"""Most buffers one sendmsg takes on Linux and BSD (POSIX IOV_MAX)."""


class Channel:
    """A connection to one node. At most one frame is on its way out, and one on its way in."""

    __slots__ = (
        "_filled", "_frame", "_max_receive_size", "_size_bytes", "_view", "description", "failed_send", "id",
        "interest", "is_closed", "is_connected", "is_muted", "send", "transport",
    )  # fmt: skip

    def __init__(self, connection_id: str, description: str, transport: Transport, max_receive_size: int) -> None:
        """`description` names node and address for errors; a frame beyond `max_receive_size` bytes is refused."""
        self.id = connection_id
        self.description = description
        self.transport = transport
        self.interest = 0
        self.is_connected = False
        self.is_closed = False
        self.is_muted = False
        self.failed_send: KafkaError | None = None
        """Why nothing can be sent any more, while what came before is still being read."""
        self.send: NetworkSend | None = None
        self._max_receive_size = max_receive_size
        self._size_bytes = bytearray(_SIZE.size)
        self._frame: bytearray | None = None
        self._view = memoryview(self._size_bytes)
        self._filled = 0

    def write(self) -> NetworkSend | None:
        """Send what the socket takes; the frame when all of it is gone. Raises OSError."""
        send = self.send
        if send is None:
            return None
        while not send.completed:
            buffers = send.head(_IOV_MAX)
            offered = sum(buffer.nbytes for buffer in buffers)
            count = self.transport.sendmsg(buffers)
            if count == WOULD_BLOCK:
                return None
            send.advance(count)
            if count < offered:
                return None
        self.send = None
        return send

    def read(self) -> NetworkReceive | None:
        """Take what has come; the frame when all of it is there. Reads no further than one frame.

        The frame's size is checked before a buffer is made for it. Raises OSError where the connection failed,
        DisconnectError where the peer closed it, ProtocolError where the size is none of a response.
        """
        if self._frame is None:
            if not self._fill():
                return None
            (size,) = _SIZE.unpack(self._size_bytes)
            if not _SMALLEST_FRAME <= size <= self._max_receive_size:
                raise ProtocolError(
                    f"{self.description} sent a frame of {size} bytes; a response has {_SMALLEST_FRAME} to "
                    f"{self._max_receive_size}. Is this a Kafka listener, and one without TLS?"
                )
            self._frame = bytearray(size)
            self._view, self._filled = memoryview(self._frame), 0
        if not self._fill():
            return None
        payload = self._frame
        self._frame, self._view, self._filled = None, memoryview(self._size_bytes), 0
        return NetworkReceive(self.id, payload)

    def _fill(self) -> bool:
        """Whether the buffer in hand is full after one look at the socket."""
        count = self.transport.recv_into(self._view[self._filled :])
        if count == WOULD_BLOCK:
            return False
        if count == 0:
            raise DisconnectError(f"{self.description} closed the connection{self._progress()}.")
        self._filled += count
        return self._filled == len(self._view)

    def _progress(self) -> str:
        if self._frame is not None:
            return f" after {self._filled} of a response's {len(self._frame)} bytes"
        return f" after {self._filled} of a size's {_SIZE.size} bytes" if self._filled else ""

    def state(self, error: KafkaError | None) -> ChannelState:
        """How the connection ends, now, for `error`."""
        if self.failed_send is not None:
            return ChannelState(ChannelKind.FAILED_SEND, self.failed_send)
        return ChannelState(ChannelKind.READY if self.is_connected else ChannelKind.NOT_CONNECTED, error)
