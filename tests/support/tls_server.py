"""A TLS server that sends every frame back, with the fault that the test chooses."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import tempfile
import threading
from pathlib import Path
from types import TracebackType

from support.certificates import Authority, Identity

_TIMEOUT_S = 20.0


def server_context(identity: Identity, client_authority: Authority | None = None) -> ssl.SSLContext:
    """Return a server context. With `client_authority` clients must have a certificate from it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        context.load_cert_chain(identity.write(Path(folder) / "server.pem"))
    if client_authority is not None:
        context.load_verify_locations(cadata=client_authority.certificate_pem)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class TlsServer:
    """A context manager. Each connection has a thread, which does the handshake and echoes frames until the end."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self.address = f"{self.host}:{self.port}"
        self.connections: list[ssl.SSLSocket] = []
        """Connections after their handshake."""
        self.received = bytearray()
        """The bytes received over TLS, of all connections."""
        self.failures: list[OSError] = []
        self._threads: list[threading.Thread] = []
        self._started: list[ssl.SSLSocket] = []
        self._is_stopping = False

    def __enter__(self) -> TlsServer:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._started:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
            assert not thread.is_alive()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(_TIMEOUT_S)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                tls = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            except OSError as error:  # reset before its first byte
                self.failures.append(error)
                return
            self._started.append(tls)
            with tls, contextlib.suppress(OSError):
                if not self._shakes_hands(tls):
                    return
                self.connections.append(tls)
                while True:
                    size = self._exactly(tls, 4)
                    body = self._exactly(tls, *struct.unpack(">i", size))
                    tls.sendall(size + body)

    def _shakes_hands(self, tls: ssl.SSLSocket) -> bool:
        try:
            tls.do_handshake()
        except OSError as error:
            self.failures.append(error)
            # With unread bytes the close would be a reset, which may reach the client before the alert.
            raw = socket.socket(fileno=os.dup(tls.fileno()))
            with raw, contextlib.suppress(OSError):
                raw.settimeout(_TIMEOUT_S)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(1 << 16):
                    pass
            return False
        return True

    def _exactly(self, tls: ssl.SSLSocket, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = tls.recv(min(size - len(data), 1 << 16))
            if not piece:
                raise ConnectionError("the client is done")
            data += piece
            self.received += piece
        return bytes(data)
