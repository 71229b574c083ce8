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
"""Bytes of a correlation id, which every response has."""
_TLS_ALERT: Final = b"\x15\x03"
"""The first bytes of a TLS listener's answer to a client without TLS (RFC 8446, 5.1)."""
_LARGEST_OF_AUTHENTICATION: Final = 512 * 1024
"""Bytes of the largest frame that is read before the peer is authenticated."""
_IOV_MAX: Final = 1024
"""The most buffers that one sendmsg takes on Linux and BSD (POSIX IOV_MAX)."""


class ChannelKind(Enum):
    """The state of a connection when it ended (org.apache.kafka.common.network.ChannelState)."""

    NOT_CONNECTED = auto()
    AUTHENTICATE = auto()
    READY = auto()
    EXPIRED = auto()
    FAILED_SEND = auto()
    AUTHENTICATION_FAILED = auto()
    LOCAL_CLOSE = auto()


class SetupStep(Enum):
    """What a new connection waits for before it can send requests. Errors show the value."""

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
    """One whole frame without its size. The receiver owns the payload."""

    source: str
    payload: bytes | bytearray


class NetworkSend:
    """One whole frame to send, as a list of buffers. They must not change until it is `completed`."""

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
        """Return the next buffers to send, at most `limit` of them."""
        return self._pending[self._first : self._first + limit]

    def advance(self, count: int) -> None:
        """The socket took `count` bytes. Buffers that were sent whole are released."""
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
        """The handshakes of TCP and of TLS, if it is used, are done. This client sends nothing before."""
        self.is_closed = False
        self.is_authenticated = authenticator is None
        """The connection was authenticated once. Its session may be in renewal."""
        self.failed_send: KafkaError | None = None
        """Why sending failed. Frames that came before are still read."""
        self.send: NetworkSend | None = None
        self.has_tcp = False
        """The TCP handshake is done. The TLS handshake may still run."""
        self.is_counted = False
        """The selector has counted its authentication."""
        self._authenticator = authenticator
        self._own_send: NetworkSend | None = None  # of the authenticator
        self._held: NetworkSend | None = None  # waits for the session's renewal
        self._offered: NetworkSend | None = None  # the transport saw its bytes, and may need the same ones again
        self._max_receive_size = max_receive_size
        self._size_bytes = bytearray(_SIZE.size)
        self._frame: bytearray | None = None
        self._view = memoryview(self._size_bytes)
        self._filled = 0

    def shake_hands(self) -> int:
        """Continue the TCP handshake, then the TLS handshake, on a socket that is ready. Returns the readiness to wait
        for, 0 when the channel is connected. Raises OSError, and what the transport raises.
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
        """Whether `send` may be set."""
        authenticator = self._authenticator
        is_content = authenticator is None or authenticator.is_complete
        return self.is_connected and self.failed_send is None and is_content

    @property
    def setup_step(self) -> SetupStep | None:
        """What the connection still waits for; None once it was ready."""
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
        """A frame of the user is not sent yet. It may wait for the session's renewal."""
        return self._held is not None or (self.send is not None and self.send is not self._own_send)

    @property
    def is_sending(self) -> bool:
        """A frame is being sent, and only the socket can delay it."""
        return self.send is not None and self.is_ready

    @property
    def is_held_up(self) -> bool:
        """Whether the authenticator works, or has just ended while a frame waits for it."""
        return self.is_connected and (self.is_authenticating or self._held is not None)

    def authenticate(self) -> None:
        """Start the authentication; the channel is connected. Raises what the authenticator raises."""
        if self._authenticator is not None:
            self._authenticator.begin()

    def prepare(self, now_ms: int) -> None:
        """Give the authenticator precedence over the user's frames. If the session is about to end and there is a frame
        to send, the frame waits for a new authentication (KIP-368). Raises what the authenticator raises.
        """
        authenticator = self._authenticator
        if authenticator is None:
            return
        authenticator.advance(now_ms)
        self.is_authenticated |= authenticator.is_complete
        send = self.send
        if send is not None and send is not self._own_send and authenticator.is_due(now_ms):
            if send is self._offered:
                return  # the transport has begun to send it, and must send it whole
            self._held, self.send = send, None
            authenticator.begin()
        if self.send is None:
            frame = authenticator.take_outgoing()
            if frame is not None:
                self.send = self._own_send = NetworkSend(self.id, frame)
            elif authenticator.is_complete:
                self.send, self._held = self._held, None

    def take(self, receive: NetworkReceive, now_ms: int) -> bool:
        """Pass the frame to the authenticator if it is for it, and return whether it was. Responses to requests that
        were in flight when the renewal began are not. Raises what the authenticator raises.
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
        """Send what the socket takes. Returns the frame when it is sent whole, unless it is the authenticator's. Raises
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
        """Read what has come, at most to the end of one frame. Returns the frame when it is complete.

        The size is checked before a buffer is allocated. Raises OSError if the connection failed, DisconnectError if
        the peer closed it, ProtocolError if no response can have that size.
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
        """Read once into the current buffer, and return whether it is full."""
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
        """Return the state in which the connection ends because of `error`."""
        if isinstance(error, AuthenticationError):
            return ChannelState(ChannelKind.AUTHENTICATION_FAILED, error)
        if self.failed_send is not None:
            return ChannelState(ChannelKind.FAILED_SEND, self.failed_send)
        if not self.has_tcp:
            return ChannelState(ChannelKind.NOT_CONNECTED, error)
        is_ready = self.is_connected and self.is_authenticated
        return ChannelState(ChannelKind.READY if is_ready else ChannelKind.AUTHENTICATE, error)
