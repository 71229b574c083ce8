"""One connection of the selector. The selector's thread owns it.

Also what passes between the selector and its user: frames to send, frames received, and how a connection ended.

Before its user's frames, and between them when a session is renewed, a channel carries those of its authenticator.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from spark_kafka_sink.common.errors import AuthenticationError, DisconnectError, KafkaError, ProtocolError
from spark_kafka_sink.network.sasl.authenticator import SaslAuthenticator, is_of_authentication
from spark_kafka_sink.network.transport import WOULD_BLOCK, Transport

_SIZE: Final = struct.Struct(">i")
_SMALLEST_FRAME: Final = 4
"""A correlation id. What cannot hold one is no response."""
_TLS_ALERT: Final = b"\x15\x03"
"""How a TLS listener begins its answer to what is no TLS (RFC 8446, 5.1)."""
_LARGEST_OF_AUTHENTICATION: Final = 512 * 1024
"""Until the peer is who it should be it is not given more memory than this."""
_IOV_MAX: Final = 1024
"""Most buffers one sendmsg takes on Linux and BSD (POSIX IOV_MAX)."""


class ChannelKind(Enum):
    """Where a connection stood when it ended (org.apache.kafka.common.network.ChannelState)."""

    NOT_CONNECTED = auto()
    AUTHENTICATE = auto()
    READY = auto()
    EXPIRED = auto()
    FAILED_SEND = auto()
    AUTHENTICATION_FAILED = auto()
    LOCAL_CLOSE = auto()


class SetupStep(Enum):
    """What a new connection waits for before it takes requests; the value names it in errors."""

    TCP = "the TCP connection"
    TLS = "the TLS handshake"
    SASL = "the SASL login"


@dataclass(frozen=True, slots=True)
class ChannelState:
    """How a connection ended. `error` says why, naming node and address."""

    kind: ChannelKind
    error: KafkaError | None = None


@dataclass(frozen=True, slots=True)
class NetworkReceive:
    """One whole frame without its size. Nobody else holds the payload."""

    source: str
    payload: bytes | bytearray


class NetworkSend:
    """One whole frame on its way out, as the buffers it was made of; they must not change until it is `completed`."""

    __slots__ = ("_first", "_pending", "destination", "remaining", "size")

    def __init__(self, destination: str, buffers: Iterable[memoryview]) -> None:
        self.destination = destination
        self._pending = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        self._first = 0
        self.size = sum(map(len, self._pending))
        self.remaining = self.size
        """Bytes that the socket has not taken yet."""

    def __repr__(self) -> str:
        return f"NetworkSend(to {self.destination!r}, {self.remaining} of {self.size} bytes left)"

    @property
    def completed(self) -> bool:
        return self.remaining == 0

    def head(self, limit: int) -> list[memoryview]:
        """The next buffers to send, at most `limit` of them."""
        return self._pending[self._first : self._first + limit]

    def advance(self, count: int) -> None:
        """`count` bytes were taken; buffers that went whole are let go."""
        self.remaining -= count
        pending, first = self._pending, self._first
        while count:
            length = pending[first].nbytes
            if count < length:
                pending[first] = pending[first][count:]
                break
            count -= length
            first += 1
        self._first = first
        if not self.remaining:
            self._pending, self._first = [], 0


class Channel:
    """A connection to one node. At most one frame is on its way out, and one on its way in."""

    __slots__ = (
        "_authenticator", "_filled", "_frame", "_held", "_max_receive_size", "_offered", "_own_send", "_size_bytes",
        "_view", "description", "failed_send", "has_tcp", "id", "interest", "is_authenticated", "is_closed",
        "is_connected", "is_counted", "send", "transport",
    )  # fmt: skip

    def __init__(
        self,
        connection_id: str,
        description: str,
        transport: Transport,
        max_receive_size: int,
        authenticator: SaslAuthenticator | None = None,
    ) -> None:
        """`description` names node and address for errors; a frame beyond `max_receive_size` bytes is refused."""
        self.id = connection_id
        self.description = description
        self.transport = transport
        self.interest = 0
        self.is_connected = False
        """TCP's handshake is done, and TLS's where there is one: no byte of ours goes before."""
        self.is_closed = False
        self.is_authenticated = authenticator is None
        """Once, at least; the session may be under renewal."""
        self.failed_send: KafkaError | None = None
        """Why nothing can be sent any more, while what came before is still being read."""
        self.send: NetworkSend | None = None
        self.has_tcp = False
        """TCP's handshake is done; TLS's may be under way."""
        self.is_counted = False
        """The selector has counted its authentication."""
        self._authenticator = authenticator
        self._own_send: NetworkSend | None = None  # the authenticator's
        self._held: NetworkSend | None = None  # waits until the session is renewed
        self._offered: NetworkSend | None = None  # the transport has seen its bytes, and may want them again
        self._max_receive_size = max_receive_size
        self._size_bytes = bytearray(_SIZE.size)
        self._frame: bytearray | None = None
        self._view = memoryview(self._size_bytes)
        self._filled = 0

    def shake_hands(self) -> int:
        """The socket is ready: go on with TCP's handshake, and then with TLS's. Gives the readiness to wait for, 0 when
        the channel is connected. Raises OSError, and what the transport raises.
        """
        if not self.has_tcp:
            self.transport.finish_connect()
            self.has_tcp = True
        awaited = self.transport.handshake()
        self.is_connected = awaited == 0
        return awaited

    # ---- authentication --------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a send may be given."""
        authenticator = self._authenticator
        is_content = authenticator is None or authenticator.is_complete
        return self.is_connected and self.failed_send is None and is_content

    @property
    def setup_step(self) -> SetupStep | None:
        """What the connection still waits for; None once it has been ready."""
        if not self.has_tcp:
            return SetupStep.TCP
        if not self.is_connected:
            return SetupStep.TLS
        return None if self.is_authenticated else SetupStep.SASL

    @property
    def is_authenticating(self) -> bool:
        return self._authenticator is not None and not self._authenticator.is_complete

    @property
    def has_send(self) -> bool:
        """A send was given and is not gone; perhaps it waits for the session's renewal."""
        return self._held is not None or (self.send is not None and self.send is not self._own_send)

    @property
    def is_sending(self) -> bool:
        """A send is on its way, and nothing in its way but the socket."""
        return self.send is not None and self.is_ready

    @property
    def is_held_up(self) -> bool:
        """Whether the authenticator is at work, or has just ended and a send waits for that."""
        return self.is_connected and (self.is_authenticating or self._held is not None)

    def authenticate(self) -> None:
        """The peer can be spoken to. Raises what the authenticator raises."""
        if self._authenticator is not None:
            self._authenticator.begin()

    def prepare(self, now_ms: int) -> None:
        """Let the authenticator speak before anybody else: one whose session is about to end begins anew when there is
        something to send, which waits (KIP-368). Raises what it raises.
        """
        authenticator = self._authenticator
        if authenticator is None:
            return
        authenticator.advance(now_ms)
        self.is_authenticated |= authenticator.is_complete
        send = self.send
        if send is not None and send is not self._own_send and authenticator.is_due(now_ms):
            if send is self._offered:
                return  # it has begun to go, though perhaps no byte is counted yet, and must go whole
            self._held, self.send = send, None
            authenticator.begin()
        if self.send is None:
            frame = authenticator.take_outgoing()
            if frame is not None:
                self.send = self._own_send = NetworkSend(self.id, frame)
            elif authenticator.is_complete:
                self.send, self._held = self._held, None

    def take(self, receive: NetworkReceive, now_ms: int) -> bool:
        """Give the frame to the authenticator if it is for it, and say whether it was. What was in flight when the
        session's renewal began is not. Raises what the authenticator raises.
        """
        authenticator = self._authenticator
        if authenticator is None or authenticator.is_complete:
            return False
        if self.is_authenticated and not is_of_authentication(receive.payload):
            return False
        authenticator.receive(receive.payload, now_ms)
        self.is_authenticated |= authenticator.is_complete
        return True

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def write(self) -> NetworkSend | None:
        """Send what the socket takes; the frame when all of it is gone, unless it is the authenticator's. Raises
        OSError.
        """
        send = self.send
        if send is None:
            return None
        while not send.completed:
            buffers = send.head(_IOV_MAX)
            offered = sum(map(len, buffers))
            self._offered = send
            count = self.transport.sendmsg(buffers)
            if count == WOULD_BLOCK:
                return None
            send.advance(count)
            if count < offered:
                return None
        self.send = self._offered = None
        if send is self._own_send:
            self._own_send = None
            return None
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
            largest = self._max_receive_size if self.is_authenticated else _LARGEST_OF_AUTHENTICATION
            if not _SMALLEST_FRAME <= size <= largest:
                raise ProtocolError(
                    f"{self.description} sent a frame of {size} bytes; a response has {_SMALLEST_FRAME} to "
                    f"{largest}. {self._what_it_speaks()}"
                )
            self._frame = bytearray(size)
            self._view, self._filled = memoryview(self._frame), 0
        if not self._fill():
            return None
        payload = self._frame
        self._frame, self._view, self._filled = None, memoryview(self._size_bytes), 0
        return NetworkReceive(self.id, payload)

    def _what_it_speaks(self) -> str:
        if self._size_bytes.startswith(_TLS_ALERT):
            return "It speaks TLS: set security.protocol=SSL (or SASL_SSL), or use the port of its PLAINTEXT listener."
        return "Is this a Kafka listener, and one for this security.protocol?"

    def _fill(self) -> bool:
        """Whether the buffer in hand is full after one look at the socket."""
        count = self.transport.recv_into(self._view[self._filled :])
        if count == WOULD_BLOCK:
            return False
        if count == 0:
            raise DisconnectError(f"{self.description} closed the connection{self._progress()}")
        self._filled += count
        return self._filled == len(self._view)

    def _progress(self) -> str:
        if self._frame is not None:
            return f" after {self._filled} of a response's {len(self._frame)} bytes."
        if self._filled:
            return f" after {self._filled} of a size's {_SIZE.size} bytes."
        return "." if self.is_authenticated else " before it had authenticated us. Is it a SASL listener?"

    def state(self, error: KafkaError | None) -> ChannelState:
        """How the connection ends, now, for `error`."""
        if isinstance(error, AuthenticationError):
            return ChannelState(ChannelKind.AUTHENTICATION_FAILED, error)
        if self.failed_send is not None:
            return ChannelState(ChannelKind.FAILED_SEND, self.failed_send)
        if not self.has_tcp:
            return ChannelState(ChannelKind.NOT_CONNECTED, error)
        is_ready = self.is_connected and self.is_authenticated
        return ChannelState(ChannelKind.READY if is_ready else ChannelKind.AUTHENTICATE, error)
