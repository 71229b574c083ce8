"""A node's server.properties and its ports."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.cluster import EmbeddedKafka
from spark_kafka_sink.local.properties import HOST, NodeAddress, PropertyValue, ReservedPort, render, server_properties

ONE = [NodeAddress(1, 9092, 9093)]
THREE = [NodeAddress(node_id, 9090 + node_id, 9190 + node_id) for node_id in (1, 2, 3)]


def parse(text: str) -> dict[str, str]:
    """Reads the subset of java.util.Properties that `render` writes: a line per property, = as separator."""
    properties = {}
    for line in text.split("\n")[:-1]:
        separator = re.match(r"(?:[^\\=]|\\.)*", line)
        assert separator is not None
        key, value = line[: separator.end()], line[separator.end() + 1 :]
        assert not line.startswith(("#", "!", " "))
        assert not value.startswith((" ", "\t"))
        properties[unescape(key)] = unescape(value)
    return properties


def unescape(text: str) -> str:
    plain = {"n": "\n", "r": "\r", "t": "\t"}

    def replace(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else plain.get(match[2], match[2])

    units = re.sub(r"\\(?:u([0-9a-f]{4})|(.))", replace, text)
    return units.encode("utf-16-be", "surrogatepass").decode("utf-16-be")


def test_single_node_is_broker_controller_and_only_replica() -> None:
    properties = server_properties(ONE[0], ONE, [Path("/node/data")], {})
    assert properties["process.roles"] == "broker,controller"
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:9093"
    assert properties["listeners"] == "PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093"
    assert properties["log.dirs"] == "data"
    assert properties["transaction.state.log.replication.factor"] == "1"
    assert properties["transaction.state.log.min.isr"] == "1"
    assert "auto.create.topics.enable" not in properties, "Kafka's own default holds"


def test_comma_in_the_data_path_stays_one_folder() -> None:
    folder = Path("/tests, all/node")
    properties = server_properties(ONE[0], ONE, [folder / "data", folder / "data-2"], {})
    assert properties["log.dirs"] == "data,data-2", "as the node sees them from its folder, in which it runs"


def test_proxied_listener_advertises_the_proxy_only_to_clients() -> None:
    node = NodeAddress(1, 9092, 9093, 9094, "127.0.0.1:5000")
    properties = server_properties(node, [node], [Path("/data")], {})
    assert properties["listeners"] == (
        "PLAINTEXT://127.0.0.1:9092,PROXIED://127.0.0.1:9094,CONTROLLER://127.0.0.1:9093"
    )
    assert properties["advertised.listeners"] == "PLAINTEXT://127.0.0.1:9092,PROXIED://127.0.0.1:5000"
    assert properties["inter.broker.listener.name"] == "PLAINTEXT"


def test_three_nodes_know_each_other_and_replicate_internal_topics() -> None:
    second = server_properties(THREE[1], THREE, [Path("/data")], {})
    assert second["node.id"] == "2"
    assert second["controller.quorum.voters"] == "1@127.0.0.1:9191,2@127.0.0.1:9192,3@127.0.0.1:9193"
    assert second["offsets.topic.replication.factor"] == "3"
    assert second["transaction.state.log.replication.factor"] == "3"
    assert second["transaction.state.log.min.isr"] == "2"


def test_clusters_own_properties_override_the_defaults_for_tests() -> None:
    extra: dict[str, PropertyValue] = {"auto.create.topics.enable": False, "group.initial.rebalance.delay.ms": 7}
    properties = server_properties(ONE[0], ONE, [Path("/data")], extra)
    assert properties["auto.create.topics.enable"] == "false"
    assert properties["group.initial.rebalance.delay.ms"] == "7"


@pytest.mark.parametrize(
    "key",
    [
        "process.roles",
        "node.id",
        "broker.id",
        "controller.quorum.voters",
        "controller.quorum.bootstrap.servers",
        "controller.listener.names",
        "listeners",
        "advertised.listeners",
        "listener.security.protocol.map",
        "inter.broker.listener.name",
        "log.dir",
        "log.dirs",
        "metadata.log.dir",
    ],
)
def test_properties_of_the_cluster_itself_cannot_be_overridden(key: str) -> None:
    with pytest.raises(LocalBrokerError, match=re.escape(key)):
        EmbeddedKafka(properties={key: "x"})


def test_only_one_or_three_nodes() -> None:
    with pytest.raises(LocalBrokerError, match="1 or 3 nodes, not 2"):
        EmbeddedKafka(2)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(TEXT.filter(bool), TEXT, max_size=5))
def test_any_property_survives_the_file(properties: dict[str, str]) -> None:
    text = render(properties)
    assert text.isascii()
    assert parse(text) == properties


def test_known_line_is_escaped_as_java_reads_it() -> None:
    assert render({"sasl jaas": ' C:\\x "ü"\n'}) == 'sasl\\ jaas=\\ C:\\\\x "\\u00fc"\\n\n'


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a server listen beside a reservation")
def test_reserved_port_can_be_listened_on_repeatedly() -> None:
    port = ReservedPort()
    for _ in range(2):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does
            server.bind((HOST, port.number))
            server.listen()
            socket.create_connection((HOST, port.number), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port.number), timeout=5)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((HOST, port.number))
    port.release()
    with socket.socket() as stranger:
        stranger.bind((HOST, port.number))


def test_ports_reserved_at_once_differ() -> None:
    ports = [ReservedPort() for _ in range(50)]
    assert len({port.number for port in ports}) == 50
    for port in ports:
        port.release()
