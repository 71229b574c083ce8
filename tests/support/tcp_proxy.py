"""A TCP proxy that disturbs the connection between a client and one server: slow, narrow, in slices, cut, silent.

One thread moves the bytes. Any thread may give orders, which apply to open and to later connections. The proxy does not
interpret the bytes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

HOST = "127.0.0.1"
_READ_BYTES = 65_536
_CONNECT_TIMEOUT_S = 1.0
_BACKLOG = 128


class Way(Enum):
    """A direction."""

    UP = "to the server"
    DOWN = "to the client"


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of one direction. `slice_bytes`: bytes sent at once. `is_held`: bytes are read and kept."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    slice_bytes: int | None = None
    is_held: bool = False

    @property
    def queue_limit(self) -> int:
        """The number of bytes to keep. More stay unread, so that the sender's buffers fill up."""
        if self.bytes_per_s is None or self.is_held:
            return 16 * 1024 * 1024
        return max(1, int(self.bytes_per_s * max(self.delay_s, 0.05)))

    @property
    def burst_bytes(self) -> int | None:
        """The bytes of a hundredth of a second."""
        return None if self.bytes_per_s is None else max(1, int(self.bytes_per_s * 0.01))


@dataclass(slots=True, eq=False)
class _Pipe:
    """One direction of one connection."""

    way: Way
    source: socket.socket
    target: socket.socket
    chunks: deque[tuple[float, bytes]] = field(default_factory=deque)
    queued: int = 0
    free_at_s: float = 0.0
    has_ended: bool = False
    is_shut: bool = False
    is_full: bool = False
    """The target accepts no bytes now."""


@dataclass(slots=True, eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    pipes: tuple[_Pipe, _Pipe]
    interests: dict[socket.socket, int] = field(default_factory=dict)
    is_parked: bool = False


class TcpProxy:
    """A context manager. `address` (`host:port`) is fixed from the beginning; `upstream` may be set and changed.

    `receive_buffer_bytes`: SO_RCVBUF of the clients' connections, small if their send buffers must fill up.
    """

    def __init__(self, upstream: str | None = None, *, receive_buffer_bytes: int | None = None) -> None:
        self.upstream = upstream
        self.accepted = 0
        self.passed = dict.fromkeys(Way, 0)
        """Forwarded bytes, by direction."""
        self._conditions = dict.fromkeys(Way, Conditions())
        self._cut_at: dict[Way, tuple[int, bool]] = {}
        self._receive_buffer_bytes = receive_buffer_bytes
        self._lock = threading.RLock()
        self._poller = selectors.DefaultSelector()
        self._connections: list[_Connection] = []
        self._dead: list[socket.socket] = []
        self._wake_end, self._wake_start = socket.socketpair()
        self._wake_end.setblocking(False)
        self._poller.register(self._wake_end, selectors.EVENT_READ)
        self._is_stopping = False
        self._listener: socket.socket | None = None
        # Bound until the end, so that the port stays reserved while no socket listens (see
        # spark_kafka_sink.local.properties).
        self._place = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind((HOST, 0))
        self.address = f"{HOST}:{self._place.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name=f"tcp-proxy-{self.address}", daemon=True)

    def __enter__(self) -> TcpProxy:
        self._listen()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._wake()
        self._thread.join(10)
        with self._lock:
            self.cut()
            self._stop_listening()
            self._drop_dead()
            self._poller.close()
            for each in (self._place, self._wake_end, self._wake_start):
                each.close()
        assert not self._thread.is_alive(), "the proxy's thread does not end"

    # ---- orders ------------------------------------------------------------------------------------------------------

    @property
    def open_connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def shape(
        self,
        *ways: Way,
        delay_s: float | None = None,
        bytes_per_s: float | None = None,
        slice_bytes: int | None = None,
        is_held: bool | None = None,
    ) -> None:
        """Change the given conditions in these directions (default: both)."""
        given = {"delay_s": delay_s, "bytes_per_s": bytes_per_s, "slice_bytes": slice_bytes, "is_held": is_held}
        with self._order():
            for way in ways or Way:
                changes = {name: value for name, value in given.items() if value is not None}
                self._conditions[way] = replace(self._conditions[way], **changes)  # type: ignore[arg-type]

    def hold(self, *ways: Way) -> None:
        """Read bytes and keep them until `heal`, also ends of connections."""
        self.shape(*ways, is_held=True)

    def park(self) -> None:
        """Keep all bytes of the current connections until `heal`; new connections work.

        So bytes of a client arrive long after it has given up.
        """
        with self._order():
            for connection in self._connections:
                connection.is_parked = True

    def heal(self) -> None:
        """Forward everything at once, and accept connections. Half-open connections are reset."""
        with self._order():
            self._conditions = dict.fromkeys(Way, Conditions())
            self._cut_at.clear()
            for connection in self._connections:
                connection.is_parked = False
                for pipe in connection.pipes:
                    pipe.free_at_s = 0.0
            self._drop_dead()
            self._listen()

    def cut(self, *, reset: bool = False) -> None:
        """End every connection, on both sides; with `reset` by RST instead of FIN. Held bytes are lost."""
        with self._order():
            for connection in list(self._connections):
                self._close(connection, reset)

    def cut_after(self, count: int, way: Way, *, reset: bool = True) -> None:
        """End the connection after the `count`-th byte from now in this direction."""
        with self._order():
            self._cut_at[way] = (self.passed[way] + count, reset)

    def refuse(self) -> None:
        """Close all connections and refuse new ones."""
        with self._order():
            self.cut(reset=True)
            self._stop_listening()

    def half_open(self) -> None:
        """Forward no more bytes on open connections, which stay open; new ones work."""
        with self._order():
            for connection in self._connections:
                for each in (connection.client, connection.server):
                    self._watch(connection, each, 0)
                    self._dead.append(each)
            self._connections.clear()

    def black_hole(self) -> None:
        """Make connections half open, and answer no connection attempt."""
        with self._order():
            self.half_open()
            if self._listener is None:
                return
            self._poller.unregister(self._listener)
            self._listener.listen(0)
            # A full backlog: the kernel drops further SYNs.
            for _ in range(4):
                filler = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                filler.setblocking(False)
                filler.connect_ex(self._place.getsockname())
                self._dead.append(filler)

    @contextlib.contextmanager
    def _order(self) -> Iterator[None]:
        with self._lock:
            yield
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_start.send(b"\0")

    def _listen(self) -> None:
        self._stop_listening()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._receive_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)
        listener.setblocking(False)
        listener.bind(self._place.getsockname())
        listener.listen(_BACKLOG)
        self._listener = listener
        self._poller.register(listener, selectors.EVENT_READ)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(KeyError):  # in a black hole
                self._poller.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _drop_dead(self) -> None:
        for each in self._dead:
            _end(each, reset=True)
        self._dead.clear()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            ready = self._poller.select(self._timeout_s())
            with self._lock:
                for key, events in ready:
                    self._process(key, events)
                now_s = time.monotonic()
                for connection in list(self._connections):
                    self._pump(connection, now_s)

    def _timeout_s(self) -> float | None:
        with self._lock:
            due = [
                max(pipe.chunks[0][0], pipe.free_at_s)
                for connection in self._connections
                for pipe in connection.pipes
                if pipe.chunks and not pipe.is_full and not self._is_held(connection, pipe.way)
            ]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _process(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._wake_end:
            self._wake_end.recv(4096)
        elif key.fileobj is self._listener:
            self._accept()
        elif key.data in self._connections:
            for pipe in key.data.pipes:
                if pipe.target is key.fileobj and events & selectors.EVENT_WRITE:
                    pipe.is_full = False
            for pipe in key.data.pipes:
                if pipe.source is key.fileobj and events & selectors.EVENT_READ:
                    self._read(key.data, pipe)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:  # closed in the meantime
            return
        self.accepted += 1
        try:
            assert self.upstream is not None, "the proxy has no upstream"
            host, _, port = self.upstream.rpartition(":")
            server = socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)
        except OSError:
            _end(client, reset=True)
            return
        for each in (client, server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipes = (_Pipe(Way.UP, client, server), _Pipe(Way.DOWN, server, client))
        self._connections.append(_Connection(client, server, pipes))

    def _read(self, connection: _Connection, pipe: _Pipe) -> None:
        conditions = self._conditions[pipe.way]
        room = min(_READ_BYTES, conditions.queue_limit - pipe.queued)
        if room <= 0:
            return
        try:
            data = pipe.source.recv(room)
        except BlockingIOError:
            return
        except OSError:
            if not any(self._is_held(connection, way) for way in Way):
                self._close(connection, reset=True)
                return
            data = b""  # held bytes are forwarded after the end of their sender
        if not data:
            pipe.has_ended = True
            return
        pipe.chunks.append((time.monotonic() + conditions.delay_s, data))
        pipe.queued += len(data)

    def _pump(self, connection: _Connection, now_s: float) -> None:
        try:
            for pipe in connection.pipes:
                self._write(connection, pipe, now_s)
        except OSError:
            self._close(connection, reset=True)
        if connection not in self._connections:
            return
        if all(pipe.is_shut for pipe in connection.pipes):
            self._close(connection, reset=False)
            return
        for each in (connection.client, connection.server):
            interest = 0
            for pipe in connection.pipes:
                has_room = pipe.queued < self._conditions[pipe.way].queue_limit
                if pipe.source is each and not pipe.has_ended and has_room:
                    interest |= selectors.EVENT_READ
                if pipe.target is each and pipe.is_full:
                    interest |= selectors.EVENT_WRITE
            self._watch(connection, each, interest)

    def _write(self, connection: _Connection, pipe: _Pipe, now_s: float) -> None:
        conditions = self._conditions[pipe.way]
        if pipe.is_shut or self._is_held(connection, pipe.way):
            return
        while pipe.chunks and not pipe.is_full and max(pipe.chunks[0][0], pipe.free_at_s) <= now_s:
            due_s, data = pipe.chunks.popleft()
            cut_at, reset = self._cut_at.get(pipe.way, (None, True))
            limits = [len(data), conditions.slice_bytes, conditions.burst_bytes]
            limits.append(None if cut_at is None else cut_at - self.passed[pipe.way])
            count = min(limit for limit in limits if limit is not None)
            try:
                sent = pipe.target.send(data[:count])
            except BlockingIOError:
                sent, pipe.is_full = 0, True
            if sent < len(data):
                pipe.chunks.appendleft((due_s, data[sent:]))
            pipe.queued -= sent
            self.passed[pipe.way] += sent
            if conditions.bytes_per_s is not None:
                pipe.free_at_s = max(now_s, pipe.free_at_s) + sent / conditions.bytes_per_s
            if cut_at is not None and self.passed[pipe.way] >= cut_at:
                del self._cut_at[pipe.way]
                self._close(connection, reset)
                return
            if conditions.slice_bytes is not None:
                break  # the other connections' turn: slices must not share a segment
        if pipe.has_ended and not pipe.chunks:
            pipe.is_shut = True
            with contextlib.suppress(OSError):
                pipe.target.shutdown(socket.SHUT_WR)

    def _is_held(self, connection: _Connection, way: Way) -> bool:
        return connection.is_parked or self._conditions[way].is_held

    def _watch(self, connection: _Connection, each: socket.socket, interest: int) -> None:
        before = connection.interests.get(each, 0)
        if interest == before:
            return
        if not before:
            self._poller.register(each, interest, connection)
        elif not interest:
            self._poller.unregister(each)
        else:
            self._poller.modify(each, interest, connection)
        connection.interests[each] = interest

    def _close(self, connection: _Connection, reset: bool) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        for each in (connection.client, connection.server):
            self._watch(connection, each, 0)
            _end(each, reset)


def _end(each: socket.socket, reset: bool) -> None:
    if reset:
        with contextlib.suppress(OSError):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    each.close()
