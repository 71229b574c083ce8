"""A selector without sockets: the methods of `network.selector.Selector` over a scripted cluster and a fake clock.

`poll` moves the clock to the next event, or by its timeout. So a client runs through minutes in one thread without
waiting. Latency, outages and slow sockets are settings of `FakeNetwork`. The scripted cluster decides what a broker
answers.
"""

from __future__ import annotations

import heapq
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.fake_clock import FakeClock
from support.scripted_broker.cluster import ScriptedCluster

from spark_kafka_sink.common.errors import DisconnectError, IllegalStateError, KafkaError, ProtocolError
from spark_kafka_sink.common.windows import Windows
from spark_kafka_sink.network.channel import ChannelKind, ChannelState, NetworkReceive, NetworkSend, SetupStep
from spark_kafka_sink.network.selector import SelectorSample
from spark_kafka_sink.network.transport import Address

_MAX_RECEIVE_SIZE = 100 * 1024 * 1024


class FakeNetwork:
    """The network between a client and the nodes of one cluster. Settings apply at once."""

    def __init__(self, cluster: ScriptedCluster, latency_ms: Callable[[], int] = lambda: 1) -> None:
        self.cluster = cluster
        self.latency_ms = latency_ms
        """The latency of one direction, for every connect, request and response."""
        self.refusing: set[int] = set()
        """Nodes whose connect fails."""
        self.hanging: set[int] = set()
        """Nodes whose connect neither succeeds nor fails."""
        self.refused_logins: dict[int, KafkaError] = {}
        """Nodes whose logins fail, and with which error."""
        self.stalled: set[int] = set()
        """Nodes whose connections take no bytes: sends stay unfinished until the node is removed."""
        self.held: set[int] = set()
        """Nodes whose responses are delayed until the node is removed."""
        self.selectors: list[FakeSelector] = []

    def resolve(self, host: str, port: int) -> list[Address]:
        """Resolve a name like `network.resolver.resolve`, without a name service."""
        return [Address(socket.AF_INET, (host, port))]

    def bootstrap_addresses(self) -> list[tuple[str, int]]:
        return [(node.host, node.port) for node in self.cluster.nodes.values()]

    def node_at(self, sockaddr: tuple[Any, ...]) -> int | None:
        """Return the node that listens there."""
        host, port = sockaddr[:2]
        return next((node.id for node in self.cluster.nodes.values() if (node.host, node.port) == (host, port)), None)

    def cut(self, node_id: int) -> None:
        """End every connection to the node; bytes in transit are lost in both directions."""
        for selector in self.selectors:
            selector.cut(node_id)

    def stop(self, node_id: int) -> None:
        """Stop the node: connections end, new ones are refused, metadata does not list it."""
        self.cluster.live_node_ids.discard(node_id)
        self.refusing.add(node_id)
        self.cut(node_id)

    def start(self, node_id: int) -> None:
        self.cluster.live_node_ids.add(node_id)
        self.refusing.discard(node_id)


@dataclass(slots=True, eq=False)
class _Connection:
    id: str
    node_id: int | None
    description: str
    is_connected: bool = False
    is_closed: bool = False
    send: NetworkSend | None = None
    arrived: bytearray = field(default_factory=bytearray)
    """Bytes from the node that were not received yet."""
    is_ended: bool = False
    """The node has closed the connection; earlier bytes are still received."""
    has_hung_up: bool = False
    """The node reads no more bytes; the client may not know it yet."""
    held: list[tuple[bytes, bool]] = field(default_factory=list)
    last_request_ms: int = 0
    last_response_ms: int = 0


class FakeSelector:
    """One client's connections. Bytes of a send are read when the socket takes them, as in a kernel."""

    def __init__(self, network: FakeNetwork, clock: FakeClock, max_receive_size: int = _MAX_RECEIVE_SIZE) -> None:
        self._network = network
        self._clock = clock
        self._max_receive_size = max_receive_size
        self._connections: dict[str, _Connection] = {}
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._next_event = 0
        self.is_woken = False
        self._is_closed = False
        self._lost: dict[str, ChannelState] = {}
        self.completed_sends: list[NetworkSend] = []
        self.completed_receives: list[NetworkReceive] = []
        self.disconnected: dict[str, ChannelState] = {}
        self.connected: list[str] = []
        self.polls = 0
        self.counts = Windows(SelectorSample)
        network.selectors.append(self)

    # ---- the methods of Selector -------------------------------------------------------------------------------------

    def connect(self, connection_id: str, address: Address, send_buffer: int = -1, receive_buffer: int = -1) -> None:
        self._check_open()
        if connection_id in self._connections or connection_id in self._lost:
            raise IllegalStateError(f"There is a connection {connection_id!r} already.")
        node_id = self._network.node_at(address.sockaddr)
        connection = _Connection(connection_id, node_id, f"Node {connection_id} at {address}")
        self._connections[connection_id] = connection
        if node_id not in self._network.hanging:
            self._after(self._network.latency_ms(), lambda: self._finish_connect(connection))

    def close(self, connection_id: str) -> None:
        self._lost.pop(connection_id, None)
        connection = self._connections.get(connection_id)
        if connection is not None:
            self._drop(connection)

    def close_all(self) -> None:
        self._is_closed = True
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._lost.clear()
        self._events.clear()
        if self in self._network.selectors:
            self._network.selectors.remove(self)

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def is_channel_ready(self, connection_id: str) -> bool:
        connection = self._connections.get(connection_id)
        return connection is not None and connection.is_connected

    def setup_step(self, connection_id: str) -> SetupStep | None:
        connection = self._connections.get(connection_id)
        return None if connection is None or connection.is_connected else SetupStep.TCP

    def send(self, send: NetworkSend) -> None:
        self._check_open()
        connection = self._connections.get(send.destination)
        if connection is None or not connection.is_connected:
            raise IllegalStateError(f"There is no connection {send.destination!r} to send on.")
        if connection.send is not None:
            raise IllegalStateError(f"{connection.description}: the last send is still under way ({connection.send}).")
        connection.send = send

    def poll(self, timeout_ms: int) -> None:
        self._check_open()
        self.polls += 1
        began_ms = self._clock.now_ms()
        self.completed_sends, self.completed_receives, self.connected = [], [], []
        self.disconnected, self._lost = self._lost, {}
        deadline_ms = self._clock.now_ms() + max(0, timeout_ms)
        while True:
            self._take_sends()
            self._run_due()
            self._hand_over()
            if self.is_woken or self._has_results():
                break
            next_ms = self._events[0][0] if self._events else deadline_ms
            if self._clock.now_ms() >= deadline_ms:
                break
            self._clock.advance_to(min(next_ms, deadline_ms))
        self.is_woken = False
        counts = self.counts.at(self._clock.now_ms())
        counts.selects += 1
        counts.wait_ms += self._clock.now_ms() - began_ms
        self.disconnected.update(self._lost)
        self._lost.clear()

    def wakeup(self) -> None:
        self.is_woken = True

    # ---- actions of tests ------------------------------------------------------------------------------------------

    def cut(self, node_id: int) -> None:
        """End this client's connections to the node."""
        for connection in list(self._connections.values()):
            if connection.node_id == node_id:
                kind = ChannelKind.READY if connection.is_connected else ChannelKind.NOT_CONNECTED
                self._lose(connection, kind, DisconnectError(f"{connection.description} was cut."), self._lost)

    def at(self, time_ms: int, action: Callable[[], object]) -> None:
        """Call something at a time of the clock, in the poll that reaches it."""
        self._after(time_ms - self._clock.now_ms(), action)

    @property
    def connection_ids(self) -> list[str]:
        return list(self._connections)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise IllegalStateError("The selector is closed.")

    def _has_results(self) -> bool:
        return bool(
            self.completed_sends or self.completed_receives or self.connected or self.disconnected or self._lost
        )

    def _after(self, delay_ms: int, action: Callable[[], object]) -> None:
        self._next_event += 1
        heapq.heappush(self._events, (self._clock.now_ms() + max(0, delay_ms), self._next_event, action))

    def _run_due(self) -> None:
        while self._events and self._events[0][0] <= self._clock.now_ms():
            heapq.heappop(self._events)[2]()

    def _finish_connect(self, connection: _Connection) -> None:
        if connection.is_closed or connection.node_id in self._network.hanging:
            return
        if connection.node_id is None or connection.node_id in self._network.refusing:
            error = DisconnectError(f"{connection.description} cannot be connected to: Connection refused.")
            self._lose(connection, ChannelKind.NOT_CONNECTED, error, self.disconnected)
            return
        refusal = self._network.refused_logins.get(connection.node_id)
        if refusal is not None:
            self._lose(connection, ChannelKind.AUTHENTICATION_FAILED, refusal, self.disconnected)
            return
        connection.is_connected = True
        self.counts.at(self._clock.now_ms()).connections += 1
        self.connected.append(connection.id)

    def _take_sends(self) -> None:
        for connection in list(self._connections.values()):
            send = connection.send
            if send is None or connection.node_id in self._network.stalled:
                continue
            frame = b"".join(send.head(send.size))
            send.advance(send.remaining)
            connection.send = None
            self.completed_sends.append(send)
            if len(frame) - 4 != struct.unpack_from(">i", frame)[0]:
                raise AssertionError(f"a frame of {len(frame)} bytes says {struct.unpack_from('>i', frame)[0]}")
            connection.last_request_ms = self._in_order(connection.last_request_ms)
            self._after_at(connection.last_request_ms, connection, frame[4:])

    def _in_order(self, not_before_ms: int, delay_ms: int = 0) -> int:
        return max(not_before_ms, self._clock.now_ms() + self._network.latency_ms() + delay_ms)

    def _after_at(self, due_ms: int, connection: _Connection, payload: bytes) -> None:
        self._after(due_ms - self._clock.now_ms(), lambda: self._arrive(connection, payload))

    def _arrive(self, connection: _Connection, payload: bytes) -> None:
        """Handle a request that reaches its node, and send the responses."""
        if connection.is_closed or connection.has_hung_up or connection.node_id is None:
            return
        for reply in self._network.cluster.handle_frame(connection.node_id, payload, self._clock.now_ms()):
            connection.has_hung_up |= reply.close
            due_ms = connection.last_response_ms = self._in_order(connection.last_response_ms, reply.delay_ms)
            self._after(due_ms - self._clock.now_ms(), _bind(connection, reply.data, reply.close))

    def _hand_over(self) -> None:
        """Return at most one frame per connection, as the real selector does."""
        for connection in list(self._connections.values()):
            if connection.held and connection.node_id not in self._network.held:
                for data, close in connection.held:
                    connection.arrived += data
                    connection.is_ended = connection.is_ended or close
                connection.held.clear()
            self._read_frame(connection)

    def _read_frame(self, connection: _Connection) -> None:
        if any(receive.source == connection.id for receive in self.completed_receives):
            return
        arrived = connection.arrived
        if len(arrived) >= 4:
            (size,) = struct.unpack_from(">i", arrived)
            if not 4 <= size <= self._max_receive_size:
                error = ProtocolError(f"{connection.description} sent a frame of {size} bytes.")
                self._lose(connection, ChannelKind.READY, error, self.disconnected)
                return
            if len(arrived) >= 4 + size:
                self.completed_receives.append(NetworkReceive(connection.id, bytes(arrived[4 : 4 + size])))
                del arrived[: 4 + size]
                return
        if connection.is_ended:
            ended = DisconnectError(f"{connection.description} closed the connection.")
            self._lose(connection, ChannelKind.READY, ended, self.disconnected)

    def _lose(
        self, connection: _Connection, kind: ChannelKind, error: KafkaError, into: dict[str, ChannelState]
    ) -> None:
        self._drop(connection)
        into[connection.id] = ChannelState(kind, error)

    def _drop(self, connection: _Connection) -> None:
        connection.is_closed = True
        self.counts.at(self._clock.now_ms()).closed += 1
        del self._connections[connection.id]


def _bind(connection: _Connection, data: bytes, close: bool) -> Callable[[], object]:
    def deliver() -> None:
        if not connection.is_closed:
            connection.held.append((data, close))

    return deliver
