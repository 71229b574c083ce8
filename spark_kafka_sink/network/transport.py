"""A non-blocking socket, as a channel needs it, and the addresses of a host. TLS implements the same protocol."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from spark_kafka_sink.common.errors import BootstrapResolutionError
from spark_kafka_sink.common.texts import one_line

_HAS_SENDMSG: Final = hasattr(socket.socket, "sendmsg")
_CONNECTING = frozenset({errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, errno.EINTR})
WOULD_BLOCK: Final = -1
READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE


class Address(NamedTuple):
    """Where to connect: the arguments of `socket.socket` and `connect`, and the configured host name, for which TLS
    checks the certificate.
    """

    family: int
    sockaddr: tuple[Any, ...]
    host: str = ""

    def __str__(self) -> str:
        host, port = self.sockaddr[0], self.sockaddr[1]
        return f"[{host}]:{port}" if self.family == socket.AF_INET6 else f"{host}:{port}"


class Transport(Protocol):
    """Bytes in and out of one connection. Every method may raise OSError, which ends the connection, or a KafkaError
    with more detail: AuthenticationError if a new connection would end the same way.
    """

    def fileno(self) -> int: ...

    def finish_connect(self) -> None:
        """Called when the attempt to connect has ended. Raises its error if it failed."""
        ...

    def handshake(self) -> int:
        """Called after that, until it returns 0. Otherwise it returns the readiness of the socket (READ, WRITE) that it
        waits for. Nothing is sent or received for the user before it is done.
        """
        ...

    def recv_into(self, buffer: memoryview) -> int:
        """Return the number of bytes read: 0 if the peer has closed, WOULD_BLOCK if there are none now."""
        ...

    def has_buffered(self) -> bool:
        """Return whether there are bytes to read although the socket has none, as in a TLS buffer."""
        ...

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Return the number of bytes that the socket took, or WOULD_BLOCK if it takes none now. The next call must
        begin with the rest, unchanged.
        """
        ...

    def close(self) -> None: ...


TransportFactory = Callable[[Address, str, int, int], Transport]
"""(address, description of the node for errors, SO_SNDBUF, SO_RCVBUF) → a transport that connects. Raises OSError if
that fails at once, AuthenticationError if it can never succeed."""


def open_socket(address: Address, send_buffer: int, receive_buffer: int) -> socket.socket:
    """Return a socket that is not connected. Buffer sizes are bytes, -1 for the system's default. Raises OSError."""
    made = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if send_buffer >= 0:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        if receive_buffer >= 0:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    except BaseException:
        made.close()
        raise
    return made


def begin_connect(made: socket.socket, address: Address) -> None:
    """Start to connect. If that fails at once, close the socket and raise OSError."""
    try:
        code = made.connect_ex(address.sockaddr)
        if code and code not in _CONNECTING:
            raise OSError(code, os.strerror(code))
    except OverflowError as error:  # a port above 65535, which a broken broker may announce
        made.close()
        raise OSError(errno.EINVAL, str(error)) from error
    except BaseException:
        made.close()
        raise


def raise_connect_error(connected: socket.socket) -> None:
    """Raise OSError if the attempt to connect has failed."""
    code = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


class PlainTransport:
    """TCP without encryption."""

    __slots__ = ("_socket",)

    def __init__(self, address: Address, _: str, send_buffer: int, receive_buffer: int) -> None:
        """Start to connect. Buffer sizes are as in `open_socket`. Raises OSError if it fails at once."""
        self._socket = open_socket(address, send_buffer, receive_buffer)
        begin_connect(self._socket, address)

    def fileno(self) -> int:
        return self._socket.fileno()

    def finish_connect(self) -> None:
        raise_connect_error(self._socket)

    def handshake(self) -> int:
        return 0

    def recv_into(self, buffer: memoryview) -> int:
        try:
            return self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return WOULD_BLOCK

    def has_buffered(self) -> bool:
        return False

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        if not _HAS_SENDMSG:
            return self._send_each(buffers)
        try:
            return self._socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return WOULD_BLOCK

    def _send_each(self, buffers: Sequence[memoryview]) -> int:
        """Do the same on Windows, where Python has no sendmsg: by one call for each buffer."""
        sent = 0
        for buffer in buffers:
            try:
                count = self._socket.send(buffer)
            except (BlockingIOError, InterruptedError):
                return sent or WOULD_BLOCK
            sent += count
            if count < buffer.nbytes:
                break
        return sent

    def close(self) -> None:
        # No shutdown: in a forked child it would end the parent's connection. A close only closes the child's
        # descriptor.
        self._socket.close()


_MAX_PORT = 65535


def resolve(host: str, port: int) -> list[Address]:
    """Return each address of the name once, in the system's order of preference. Blocks as long as the system's
    resolver does.

    Raises BootstrapResolutionError, naming the host, if it has no address.
    """
    shown = one_line(host)  # the name may come from a broker
    if not 0 < port <= _MAX_PORT:
        raise BootstrapResolutionError(f"{shown}:{port} cannot be resolved: a port is a number from 1 to {_MAX_PORT}.")
    if not host:
        raise BootstrapResolutionError(f":{port} cannot be resolved: there is no host.")
    if not host.isprintable():  # old C libraries take an address with a line behind it, which logs would show
        raise BootstrapResolutionError(f"{shown}:{port} cannot be resolved: a host has no control characters.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise BootstrapResolutionError(f"{shown}:{port} cannot be resolved: {one_line(str(error))}") from error
    return list(dict.fromkeys(Address(family, sockaddr, host) for family, _, _, _, sockaddr in found))


def canonical_names(host: str) -> list[str]:
    """Return the full name of each address of the host, by reverse DNS, or the address itself if it has no name.

    For client.dns.lookup=resolve_canonical_bootstrap_servers_only. Raises BootstrapResolutionError, naming the host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise BootstrapResolutionError(f"{host} cannot be resolved: {error}") from error
    return list(dict.fromkeys(_full_name(sockaddr) for _, _, _, _, sockaddr in found))


def _full_name(sockaddr: tuple[Any, ...]) -> str:
    try:
        return socket.getnameinfo(sockaddr, 0)[0]
    except OSError:  # a DNS failure does not prove that there is no name
        return str(sockaddr[0])
