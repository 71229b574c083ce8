"""What passes between the selector and its user: a frame to send, a frame received, and how a connection ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from spark_kafka_sink.common.errors import KafkaError


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
