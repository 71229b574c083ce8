"""A peer on a real socket that the test controls, and steps that tests of the selector repeat."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from spark_kafka_sink.network.channel import ChannelState, NetworkReceive, NetworkSend
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.network.transport import resolve

LIMIT_S = 10.0


class Peer:
    """A listener with connections that the test controls."""

    def __init__(self, receive_buffer: int | None = None) -> None:
        self.listener = socket.socket()
        if receive_buffer is not None:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.address = resolve(*self.listener.getsockname())[0]
        self.accepted: list[socket.socket] = []

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(LIMIT_S)
        self.accepted.append(connection)
        return connection

    def close(self) -> None:
        for connection in self.accepted:
            connection.close()
        self.listener.close()


def frame(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


def send_of(payload: bytes, connection_id: str = "1") -> NetworkSend:
    return NetworkSend(connection_id, [memoryview(frame(payload))])


def poll_until(selector: Selector, condition: Callable[[], object]) -> None:
    """Poll until the last poll's results satisfy the condition."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        selector.poll(100)
        if condition():
            return
        assert time.monotonic() < deadline, "it did not happen"


def connect(selector: Selector, peer: Peer, connection_id: str = "1", send_buffer: int = -1) -> socket.socket:
    selector.connect(connection_id, peer.address, send_buffer, -1)
    poll_until(selector, lambda: connection_id in selector.connected)
    return peer.accept()


def receive(selector: Selector) -> NetworkReceive:
    poll_until(selector, lambda: selector.completed_receives)
    (received,) = selector.completed_receives
    return received


def lost(selector: Selector, connection_id: str = "1") -> ChannelState:
    poll_until(selector, lambda: connection_id in selector.disconnected)
    return selector.disconnected[connection_id]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def socket_of(selector: Selector, connection_id: str = "1") -> socket.socket:
    """Return a second handle on the connection's socket, to read its options."""
    return socket.socket(fileno=os.dup(selector._channels[connection_id].transport.fileno()))
