"""The scripted cluster on sockets, with the real selector as its client."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator

import pytest
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer

from spark_kafka_sink.network.channel import ChannelKind, NetworkReceive, NetworkSend
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.network.transport import resolve
from spark_kafka_sink.protocol.framing import encode_request, parse_response
from spark_kafka_sink.protocol.metadata import MetadataRequest
from spark_kafka_sink.protocol.versions import ApiKey, request_type


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(ScriptedCluster(2)) as made:
        yield made


def connect(selector: Selector, server: ScriptedServer, node_id: int) -> None:
    node = server.cluster.nodes[node_id]
    selector.connect(str(node_id), resolve(node.host, node.port)[0], -1, -1)
    wait_for(selector, lambda: str(node_id) in selector.connected)


def wait_for(selector: Selector, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while True:
        selector.poll(100)
        if condition():
            return
        assert time.monotonic() < deadline


def ask(selector: Selector, node_id: int, *correlation_ids: int) -> list[NetworkReceive]:
    """Send the requests one after the other, then wait for that many responses."""
    received: list[NetworkReceive] = []
    for correlation_id in correlation_ids:
        send = NetworkSend(str(node_id), encode_request(MetadataRequest(()).build(12), correlation_id, "c"))
        selector.send(send)
        selector.poll(100)
        received += selector.completed_receives  # the response may come in the poll that sent the request
        assert send.completed
    deadline = time.monotonic() + 10
    while len(received) < len(correlation_ids):
        selector.poll(100)
        received += selector.completed_receives
        assert time.monotonic() < deadline
    return received


def test_each_node_answers_on_its_own_port(server: ScriptedServer, selector: Selector) -> None:
    ports = {node.port for node in server.cluster.nodes.values()}
    assert len(ports) == 2
    for node_id in (0, 1):
        connect(selector, server, node_id)
        (received,) = ask(selector, node_id, 70 + node_id)
        correlation_id, answer = parse_response(request_type(ApiKey.METADATA, 12), received.payload)
        assert correlation_id == 70 + node_id
        assert {broker.port for broker in answer.brokers} == ports
    with server.lock:
        assert [exchange.node_id for exchange in server.cluster.requests] == [0, 1]


def test_delayed_response_delays_the_next_one(server: ScriptedServer, selector: Selector) -> None:
    connect(selector, server, 0)
    with server.lock:
        server.cluster.on(ApiKey.METADATA, faults.delay(150))
    started = time.monotonic()
    received = ask(selector, 0, 1, 2)
    assert [parse_response(request_type(ApiKey.METADATA, 12), each.payload)[0] for each in received] == [1, 2]
    assert time.monotonic() - started >= 0.14


@pytest.mark.parametrize("reset", [False, True])
def test_cut_connection_can_be_made_again(server: ScriptedServer, selector: Selector, reset: bool) -> None:
    connect(selector, server, 0)
    ask(selector, 0, 1)
    server.cut(0, reset=reset)
    wait_for(selector, lambda: "0" in selector.disconnected)
    assert ("reset" in str(selector.disconnected["0"].error)) is reset
    connect(selector, server, 0)


def test_stopped_node_refuses_connections_until_it_starts(server: ScriptedServer, selector: Selector) -> None:
    port = server.cluster.nodes[0].port
    server.stop_node(0)
    selector.connect("0", resolve("127.0.0.1", port)[0], -1, -1)
    wait_for(selector, lambda: "0" in selector.disconnected)
    assert selector.disconnected["0"].kind is ChannelKind.NOT_CONNECTED
    server.start_node(0)
    assert server.cluster.nodes[0].port == port
    connect(selector, server, 0)


def test_event_of_an_old_descriptor_is_ignored() -> None:
    """Bug: a node was restarted at the moment a client connected, and a test failed now and then with
    BlockingIOError.
    """
    with ScriptedServer(ScriptedCluster(1)) as server, server.lock:
        server._process(server._poller.get_key(server._listeners[0]), selectors.EVENT_READ)


def test_malformed_request_fails_the_test(selector: Selector) -> None:
    server = ScriptedServer(ScriptedCluster()).__enter__()
    connect(selector, server, 0)
    frame = b"".join(encode_request(MetadataRequest(()).build(12), 1, "c")) + b"?"
    longer = (len(frame) - 4).to_bytes(4, "big") + frame[4:]
    selector.send(NetworkSend("0", [memoryview(longer)]))
    wait_for(selector, lambda: "0" in selector.disconnected)
    with pytest.raises(ValueError, match="bytes too many"):
        server.__exit__(None, None, None)
