"""The scripted cluster on real sockets: one thread, one listener per node on 127.0.0.1. The thread belongs to the
tests, not to the package.
"""

from __future__ import annotations

import contextlib
import heapq
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

from support.scripted_broker.cluster import ScriptedCluster

from spark_kafka_sink.local.properties import HOST, ReservedPort

_TICK_S = 0.05


@dataclass(slots=True, eq=False)
class _Client:
    node_id: int
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    pending: bytearray = field(default_factory=bytearray)
    last_due_s: float = 0.0
    is_closing: bool = False
    is_closed: bool = False


class ScriptedServer:
    """A context manager. While it runs, hold `lock` to look at or change the cluster.

    At the end it raises the error of its thread, such as a request that does not parse.
    """

    def __init__(self, cluster: ScriptedCluster) -> None:
        self.cluster = cluster
        self.lock = threading.RLock()
        self._poller = selectors.DefaultSelector()
        self._listeners: dict[int, socket.socket] = {}
        self._ports: list[ReservedPort] = []
        """Also those of nodes that are stopped: else another socket may get one, or a client connect to itself."""
        self._clients: list[_Client] = []
        self._due: list[tuple[float, int, _Client, bytes, bool]] = []
        self._next_due = 0
        self._errors: list[BaseException] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="scripted-server", daemon=True)

    def __enter__(self) -> ScriptedServer:
        for node_id in self.cluster.nodes:
            self.start_node(node_id)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping = True
        self._thread.join(10)
        with self.lock:
            for node_id in list(self._listeners):
                self.stop_node(node_id)
            self._poller.close()
            for port in self._ports:
                port.release()
        if self._thread.is_alive():
            raise AssertionError("the scripted server's thread does not end")
        if self._errors and error is None:
            raise self._errors[0]

    @property
    def bootstrap_servers(self) -> list[str]:
        return [f"{node.host}:{node.port}" for node in self.cluster.nodes.values()]

    def start_node(self, node_id: int) -> None:
        """Listen, on the same port as before if there was one."""
        with self.lock:
            node = self.cluster.nodes[node_id]
            if node.host != HOST:
                self._ports.append(ReservedPort())
                node.host, node.port = HOST, self._ports[-1].number
            listener = socket.create_server((HOST, node.port))
            listener.setblocking(False)
            self.cluster.live_node_ids.add(node_id)
            self._listeners[node_id] = listener
            self._poller.register(listener, selectors.EVENT_READ, node_id)

    def stop_node(self, node_id: int) -> None:
        """Stop to listen, and end the node's connections."""
        with self.lock:
            self.cluster.live_node_ids.discard(node_id)
            listener = self._listeners.pop(node_id, None)
            if listener is not None:
                self._poller.unregister(listener)
                listener.close()
            self.cut(node_id)

    def cut(self, node_id: int, *, reset: bool = False) -> None:
        """End the node's connections; with `reset` by RST instead of FIN."""
        with self.lock:
            for client in [client for client in self._clients if client.node_id == node_id]:
                if reset:
                    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._close(client)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            ready = self._poller.select(self._timeout_s())
            with self.lock:
                try:
                    for key, events in ready:
                        self._process(key, events)
                    self._send_due()
                except BaseException as error:  # the test's thread raises it
                    self._errors.append(error)

    def _timeout_s(self) -> float:
        with self.lock:
            return min(_TICK_S, max(0.0, self._due[0][0] - time.monotonic())) if self._due else _TICK_S

    def _process(self, key: selectors.SelectorKey, events: int) -> None:
        if isinstance(key.data, int):
            if self._listeners.get(key.data) is key.fileobj:
                self._accept(key.data)
            return
        client: _Client = key.data
        if client.is_closed:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ and not client.is_closed:
                self._read(client)
        except OSError:
            self._close(client)  # the client hung up, as it may
        except Exception:
            self._close(client)
            raise

    def _accept(self, node_id: int) -> None:
        try:
            connection, _ = self._listeners[node_id].accept()
        except BlockingIOError:
            return  # it was for another socket, closed meanwhile, whose descriptor this one has
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(node_id, connection)
        self._clients.append(client)
        self._poller.register(connection, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        data = client.socket.recv(1 << 20)
        if not data:
            self._close(client)
            return
        client.received += data
        while len(client.received) >= 4 and not client.is_closing:
            (size,) = struct.unpack_from(">i", client.received)
            if size < 0:
                raise AssertionError(f"a request's frame of {size} bytes")
            if len(client.received) < 4 + size:
                return
            payload = bytes(client.received[4 : 4 + size])
            del client.received[: 4 + size]
            self._answer(client, payload)

    def _answer(self, client: _Client, payload: bytes) -> None:
        now_s = time.monotonic()
        for reply in self.cluster.handle_frame(client.node_id, payload, int(now_s * 1000), client):
            client.last_due_s = max(client.last_due_s, now_s + reply.delay_ms / 1000)
            self._next_due += 1
            heapq.heappush(self._due, (client.last_due_s, self._next_due, client, reply.data, reply.close))

    def _send_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, client, data, close = heapq.heappop(self._due)
            if client.is_closed:
                continue
            client.pending += data
            client.is_closing = client.is_closing or close
            with contextlib.suppress(ConnectionError):
                self._flush(client)
                continue
            self._close(client)

    def _flush(self, client: _Client) -> None:
        while client.pending:
            try:
                sent = client.socket.send(client.pending)
            except BlockingIOError:
                break
            del client.pending[:sent]
        if client.is_closing and not client.pending:
            self._close(client)
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.pending else 0)
        self._poller.modify(client.socket, interest, client)

    def _close(self, client: _Client) -> None:
        if client.is_closed:
            return
        client.is_closed = True
        self._clients.remove(client)
        self._poller.unregister(client.socket)
        client.socket.close()
