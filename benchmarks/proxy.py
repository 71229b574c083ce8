"""A TCP proxy between Kafka clients and one broker. It counts requests and bytes by api, and forwards everything."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, Self

from spark_kafka_sink.protocol.versions import ApiKey

HOST = "127.0.0.1"
NAMES = {key.value: key.name.title().replace("_", "") for key in ApiKey}
"""Kafka's own names of its apis, such as InitProducerId."""


class Counted(NamedTuple):
    """The counts of one api. Bytes include the four bytes of each frame's length."""

    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def plus(self, other: Counted) -> Counted:
        return Counted(*(mine + more for mine, more in zip(self, other, strict=True)))

    def minus(self, other: Counted) -> Counted:
        return Counted(*(mine - less for mine, less in zip(self, other, strict=True)))


class CountingProxy:
    """A context manager. Clients connect to `address`. Set `upstream` before the first client connects.

    A broker answers the requests of a connection in their order (protocol guide, "Network"). So an answer belongs to
    the oldest request without an answer. A Produce request with acks=0 has no answer: clients must not send it here.
    """

    def __init__(self) -> None:
        self.upstream = ""
        self._lock = threading.Lock()
        self._counts: dict[str, Counted] = {}
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for each in sockets:
            with suppress(OSError):  # the other side may have ended it
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in sockets:
            each.close()

    def counts(self) -> Mapping[str, Counted]:
        """Return the counts so far, by the name of the api."""
        with self._lock:
            return dict(self._counts)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # the proxy is closed
                return
            host, _, port = self.upstream.rpartition(":")
            try:
                server = socket.create_connection((host, int(port)))
            except OSError:  # the broker has ended
                client.close()
                continue
            with self._lock:
                self._sockets += [client, server]
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked: deque[str] = deque()
            self._start(self._pass, client, server, self._counted_request, asked)
            self._start(self._pass, server, client, self._counted_answer, asked)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name=f"counting-proxy-{self.address}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pass(
        self,
        source: socket.socket,
        target: socket.socket,
        count: Callable[[bytes, deque[str]], None],
        asked: deque[str],
    ) -> None:
        """Forward whole frames until either side ends the connection. Each frame is counted before it is forwarded."""
        with suppress(OSError):
            while frame := _next_frame(source):
                count(frame, asked)
                target.sendall(frame)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _counted_request(self, frame: bytes, asked: deque[str]) -> None:
        number = int.from_bytes(frame[4:6], "big")
        api = NAMES.get(number, f"api {number}")
        asked.append(api)
        self._add(api, Counted(1, len(frame), 0))

    def _counted_answer(self, frame: bytes, asked: deque[str]) -> None:
        self._add(asked.popleft(), Counted(0, 0, len(frame)))

    def _add(self, api: str, more: Counted) -> None:
        with self._lock:
            self._counts[api] = self._counts.get(api, Counted()).plus(more)


def _next_frame(source: socket.socket) -> bytes:
    """Return a frame with its four bytes of length, or nothing if the connection has ended."""
    head = _exactly(source, 4)
    return head + _exactly(source, int.from_bytes(head, "big")) if head else b""


def _exactly(source: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = source.recv(min(size - len(found), 1 << 20))
        if not part:
            return b""
        found += part
    return bytes(found)
