"""A socket that does not block, as a channel needs it. TLS stands at the same seam."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

_CONNECTING = frozenset({errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, errno.EINTR})
WOULD_BLOCK = -1


class Address(NamedTuple):
    """Where to connect: what `socket.socket` and `connect` take, and the host by the name that was asked for, which the
    peer has to prove.
    """

    family: int
    sockaddr: tuple[Any, ...]
    host: str = ""

    def __str__(self) -> str:
        host, port = self.sockaddr[0], self.sockaddr[1]
        return f"[{host}]:{port}" if self.family == socket.AF_INET6 else f"{host}:{port}"


class Transport(Protocol):
    """Bytes in and out of one connection. Every method may raise OSError, which ends the connection."""

    def fileno(self) -> int: ...

    def finish_connect(self) -> None:
        """Called when the connection attempt has an outcome; raises it where it is a failure."""
        ...

    def recv_into(self, buffer: memoryview) -> int:
        """How many bytes came: 0 where the peer is done, WOULD_BLOCK where there are none now."""
        ...

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """How many bytes the socket took: WOULD_BLOCK where it takes none now."""
        ...

    def close(self) -> None: ...


class PlainTransport:
    """TCP without encryption."""

    __slots__ = ("_socket",)

    def __init__(self, address: Address, send_buffer: int, receive_buffer: int) -> None:
        """Starts to connect. Buffer sizes in bytes, -1 for the system's own. Raises OSError where it fails at once."""
        self._socket = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if send_buffer >= 0:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            if receive_buffer >= 0:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            code = self._socket.connect_ex(address.sockaddr)
            if code and code not in _CONNECTING:
                raise OSError(code, os.strerror(code))
        except OverflowError as error:  # a port beyond 65535, as a broken broker may announce
            self._socket.close()
            raise OSError(errno.EINVAL, str(error)) from error
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def finish_connect(self) -> None:
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def recv_into(self, buffer: memoryview) -> int:
        try:
            return self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return WOULD_BLOCK

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return WOULD_BLOCK

    def close(self) -> None:
        # No shutdown: in a forked child it would end the parent's connection, while close lets go of the descriptor
        # alone.
        self._socket.close()
