"""The fake selector is held to the real one's methods, so that what runs on it runs on sockets."""

from __future__ import annotations

import inspect
import struct

import pytest
from support.fake_clock import FakeClock
from support.fake_selector import FakeNetwork, FakeSelector
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster

from spark_kafka_sink.common.errors import IllegalStateError, ProtocolError
from spark_kafka_sink.network.channel import ChannelKind, NetworkSend
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.protocol.framing import encode_request, parse_response
from spark_kafka_sink.protocol.metadata import MetadataRequest
from spark_kafka_sink.protocol.versions import ApiKey, request_type


class Client:
    """One connection to node 0, over latencies of 5 ms."""

    def __init__(self, nodes: int = 1) -> None:
        self.cluster = ScriptedCluster(nodes)
        self.clock = FakeClock()
        self.network = FakeNetwork(self.cluster, latency_ms=lambda: 5)
        self.selector = FakeSelector(self.network, self.clock)
        self.start_ms = self.clock.now_ms()

    @property
    def elapsed_ms(self) -> int:
        return self.clock.now_ms() - self.start_ms

    def connect(self, node_id: int = 0) -> None:
        node = self.cluster.nodes[node_id]
        self.selector.connect(str(node_id), self.network.resolve(node.host, node.port)[0])

    def connected(self) -> Client:
        self.connect()
        self.selector.poll(1000)
        assert self.selector.connected == ["0"]
        return self

    def ask(self, correlation_id: int = 1) -> NetworkSend:
        frame = encode_request(MetadataRequest(()).build(12), correlation_id, "c")
        send = NetworkSend("0", frame)
        self.selector.send(send)
        return send

    def answers(self, polls: int = 10) -> list[int]:
        found = []
        for _ in range(polls):
            self.selector.poll(1000)
            for receive in self.selector.completed_receives:
                found.append(parse_response(request_type(ApiKey.METADATA, 12), receive.payload)[0])
        return found


def test_it_has_the_real_ones_methods_with_the_same_arguments() -> None:
    for name, method in inspect.getmembers(Selector, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(FakeSelector, name)) == inspect.signature(method), name


def test_clock_moves_to_the_next_due_event() -> None:
    client = Client()
    client.connect()
    client.selector.poll(1000)
    assert (client.selector.connected, client.elapsed_ms) == (["0"], 5)
    send = client.ask()
    client.selector.poll(1000)
    assert (client.selector.completed_sends, client.elapsed_ms) == ([send], 5)
    client.selector.poll(1000)
    assert len(client.selector.completed_receives) == 1
    assert client.elapsed_ms == 15


def test_poll_with_nothing_due_lasts_its_timeout() -> None:
    client = Client().connected()
    client.selector.poll(300)
    assert client.elapsed_ms == 305
    client.selector.wakeup()
    client.selector.poll(300)
    assert client.elapsed_ms == 305


def test_at_most_one_frame_a_poll_and_in_order() -> None:
    client = Client().connected()
    client.network.held.add(0)
    for correlation_id in (1, 2, 3):
        client.ask(correlation_id)
        client.selector.poll(50)
    client.network.held.clear()
    per_poll = []
    for _ in range(4):
        client.selector.poll(10)
        per_poll.append(len(client.selector.completed_receives))
    assert per_poll == [1, 1, 1, 0]


def test_delayed_response_delays_the_next_one() -> None:
    client = Client().connected()
    client.cluster.on(ApiKey.METADATA, faults.delay(500))
    client.ask(1)
    client.selector.poll(0)
    client.ask(2)
    assert client.answers(3) == [1, 2]
    assert client.elapsed_ms == 515


@pytest.mark.parametrize("how", ["refusing", "unknown address"])
def test_refused_connection_is_reported_with_its_address(how: str) -> None:
    client = Client()
    if how == "refusing":
        client.network.refusing.add(0)
        client.connect()
    else:
        client.selector.connect("0", client.network.resolve("broker-0", 1)[0])
    client.selector.poll(1000)
    assert client.selector.disconnected["0"].kind is ChannelKind.NOT_CONNECTED
    assert "broker-0" in str(client.selector.disconnected["0"].error)
    client.connect()


def test_hanging_connection_never_answers() -> None:
    client = Client()
    client.network.hanging.add(0)
    client.connect()
    client.selector.poll(60_000)
    assert (client.selector.connected, client.selector.disconnected) == ([], {})
    client.selector.close("0")
    assert client.selector.connection_ids == []


def test_cut_loses_bytes_in_flight_and_is_reported_once() -> None:
    client = Client().connected()
    client.ask()
    client.selector.poll(0)
    client.network.cut(0)
    client.selector.poll(1000)
    assert client.selector.disconnected["0"].kind is ChannelKind.READY
    client.selector.poll(100)
    assert client.selector.disconnected == {}
    assert client.cluster.requests == []


def test_stalled_socket_takes_its_bytes_later() -> None:
    client = Client().connected()
    client.network.stalled.add(0)
    frame = bytearray(b"".join(encode_request(MetadataRequest(()).build(12), 1, "c")))
    client.selector.send(NetworkSend("0", [memoryview(frame)]))
    client.selector.poll(100)
    assert client.selector.completed_sends == []
    frame[8:12] = struct.pack(">i", 99)  # what is reused before it is sent goes out changed
    client.network.stalled.clear()
    assert client.answers() == [99]


def test_bytes_before_the_end_are_delivered_before_the_end() -> None:
    client = Client().connected()
    client.cluster.on(ApiKey.METADATA, faults.close_after(), skip=1)
    client.ask(1)
    client.selector.poll(0)
    client.ask(2)
    client.selector.poll(0)
    client.selector.poll(1000)
    assert (len(client.selector.completed_receives), client.selector.disconnected) == (1, {})
    client.selector.poll(1000)
    assert (len(client.selector.completed_receives), list(client.selector.disconnected)) == (0, ["0"])


@pytest.mark.parametrize("length", [-1, 0, 2**31 - 1])
def test_impossible_frame_length_is_a_protocol_error(length: int) -> None:
    client = Client().connected()
    client.cluster.on(ApiKey.METADATA, faults.frame_length(length))
    client.ask()
    client.selector.poll(0)
    client.selector.poll(1000)
    assert isinstance(client.selector.disconnected["0"].error, ProtocolError)


def test_misuse_is_refused_as_by_the_real_one() -> None:
    client = Client().connected()
    with pytest.raises(IllegalStateError, match="already"):
        client.connect()
    client.ask()
    with pytest.raises(IllegalStateError, match="under way"):
        client.ask()
    with pytest.raises(IllegalStateError, match="no connection '9'"):
        client.selector.send(NetworkSend("9", []))
    client.selector.close_all()
    with pytest.raises(IllegalStateError, match="closed"):
        client.selector.poll(0)


def test_stopped_node_is_gone_until_it_starts() -> None:
    client = Client(nodes=2).connected()
    client.network.stop(0)
    client.selector.poll(10)
    assert list(client.selector.disconnected) == ["0"]
    client.connect()
    client.selector.poll(100)
    assert list(client.selector.disconnected) == ["0"]
    client.network.start(0)
    client.connected()


def test_action_runs_at_its_time() -> None:
    client = Client().connected()
    client.selector.at(client.clock.now_ms() + 40, lambda: client.network.cut(0))
    client.selector.poll(1000)
    assert (list(client.selector.disconnected), client.elapsed_ms) == (["0"], 45)
