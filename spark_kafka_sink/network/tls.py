"""TLS over a socket that does not block, at the transport's seam. Owned by the selector's thread.

OpenSSL works on the socket itself: measured against a pair of memory buffers, which leave large writes to one system
call, it carries as much and costs a quarter less. It writes records of 16 KiB at most, each by a call; small buffers
are joined up to that size, and larger ones go in as they are.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from spark_kafka_sink.common.errors import SslAuthenticationError
from spark_kafka_sink.common.security import SecurityConfig
from spark_kafka_sink.network.tls_context import tls_context
from spark_kafka_sink.network.tls_failures import handshake_failure, later_failure
from spark_kafka_sink.network.transport import (
    READ,
    WOULD_BLOCK,
    WRITE,
    Address,
    PlainTransport,
    TransportFactory,
    begin_connect,
    open_socket,
    raise_connect_error,
)

_RECORD: Final = 16_384
"""Bytes in the largest record (RFC 8446, 5.1)."""


class TlsTransport:
    """TCP with encryption, to a peer whose certificate is for the address's host."""

    __slots__ = ("_description", "_failure", "_has_ended", "_host", "_socket")

    def __init__(
        self, address: Address, description: str, send_buffer: int, receive_buffer: int, context: ssl.SSLContext
    ) -> None:
        """Starts to connect. Raises OSError where it fails at once, SslAuthenticationError for a host that no
        certificate can be for, as a broken broker may announce.
        """
        self._host = (address.host or str(address.sockaddr[0])).rstrip(".")
        self._description = description
        self._failure: OSError | None = None
        """Met behind good bytes, which are handed over first; perhaps the peer says nothing more, ever."""
        self._has_ended = False
        """The same of the peer's farewell, after which TCP may stay open."""
        try:
            self._host.encode("idna")  # as the next line does, which leaks its socket where that fails
            self._socket = context.wrap_socket(
                open_socket(address, send_buffer, receive_buffer),
                server_hostname=self._host,
                do_handshake_on_connect=False,
            )
            begin_connect(self._socket, address)
        except ValueError as error:
            raise SslAuthenticationError(
                f"{description}: TLS cannot be spoken to a host named {self._host!r} ({error}). Correct"
                " bootstrap.servers, or the broker's advertised.listeners."
            ) from None

    def fileno(self) -> int:
        return self._socket.fileno()

    def finish_connect(self) -> None:
        raise_connect_error(self._socket)

    def handshake(self) -> int:
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return READ
        except ssl.SSLWantWriteError:
            return WRITE
        except OSError as error:
            # A cipher suite is agreed on by the peer's first message.
            has_spoken = self._socket.cipher() is not None
            raise handshake_failure(error, self._description, self._host, has_spoken) from None
        return 0

    def recv_into(self, buffer: memoryview) -> int:
        """As much as there is: OpenSSL gives one record a call."""
        tls, filled = self._socket, 0
        try:
            if self._failure is not None:
                raise self._failure
            while filled < buffer.nbytes:
                count = tls.recv_into(buffer[filled:])
                if count == 0:
                    self._has_ended = True
                    break
                filled += count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            # Wanting to write: an answer to the peer's new key (RFC 8446, 4.6.3) that the socket does not take now. It
            # goes with our next bytes, which are on their way: they are what fills the socket.
            return filled or WOULD_BLOCK
        except OSError as error:
            if not filled:
                raise later_failure(error, self._description) from None
            self._failure = error
        return filled

    def has_buffered(self) -> bool:
        return self._socket.pending() > 0 or self._has_ended or self._failure is not None

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """OpenSSL keeps the record that the socket did not take whole, and wants the same bytes again. So they come:
        nothing counts as sent before it is, and what is sent next begins where this ended.
        """
        tls, sent = self._socket, 0
        try:
            for piece in _pieces(buffers):
                left = piece
                while left.nbytes:
                    count = tls.send(left)
                    sent += count
                    left = left[count:]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return sent or WOULD_BLOCK
        return sent

    def close(self) -> None:
        # Without TLS's own farewell: in a forked child it would end the parent's connection.
        self._socket.close()


def transport_factory(config: SecurityConfig) -> TransportFactory:
    """TLS where the settings want it. Raises ConfigError where their files cannot be used."""
    return partial(TlsTransport, context=tls_context(config)) if config.uses_tls else PlainTransport


def _pieces(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """The same bytes, small buffers joined into records; what begins at a piece's first byte is cut the same way."""
    small: list[memoryview] = []
    room = _RECORD
    for buffer in buffers:
        rest = buffer
        if small or buffer.nbytes < _RECORD:
            small.append(buffer[:room])
            rest = buffer[room:]
            room -= small[-1].nbytes
            if room:
                continue
            yield memoryview(b"".join(small))
            small, room = [], _RECORD
        if rest.nbytes >= _RECORD:
            yield rest
        elif rest.nbytes:
            small, room = [rest], _RECORD - rest.nbytes
    if small:
        yield memoryview(b"".join(small))
