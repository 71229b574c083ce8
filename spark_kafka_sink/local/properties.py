"""A node's ports, and its server.properties."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.security import BrokerSecurity

HOST = "127.0.0.1"


class ReservedPort:
    """A TCP port of the loopback interface, reserved also between a node's stop and its next start.

    On Linux this socket is bound with SO_REUSEADDR and does not listen. The broker can bind and listen beside it,
    because Java sets that option too, and the kernel assigns the port to no other socket. Without the reservation, a
    client that keeps connecting to a killed broker may get the broker's port as its source port, and connect to itself.
    On other systems the port is only known to have been free.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, 0))
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self._socket.close()

    def release(self) -> None:
        self._socket.close()


PropertyValue = str | int | float | bool

OWNED_PROPERTIES = frozenset(
    {
        "process.roles",
        "node.id",
        "broker.id",
        "controller.quorum.voters",
        "controller.quorum.bootstrap.servers",
        "controller.listener.names",
        "listeners",
        "advertised.listeners",
        "log.dir",
        "listener.security.protocol.map",
        "inter.broker.listener.name",
        "log.dirs",
        "metadata.log.dir",
    }
)
"""Properties that a cluster sets for each node. They cannot be overridden."""

# Defaults that differ from Kafka's, and why. A cluster's properties override them.
_TEST_DEFAULTS: Mapping[str, PropertyValue] = {
    # A consumer group starts at once instead of waiting 3 s for more members.
    "group.initial.rebalance.delay.ms": 0,
    # A restarted broker is refused as a duplicate until its old session has expired (9 s by default).
    "broker.session.timeout.ms": 3000,
    "broker.heartbeat.interval.ms": 500,
    # Creating the files of 50 partitions each, the default, takes longer than a test.
    "offsets.topic.num.partitions": 4,
    "transaction.state.log.num.partitions": 4,
    "share.coordinator.state.topic.num.partitions": 4,
    # By default Kafka deletes records with timestamps older than a week, soon after the start.
    "log.retention.ms": -1,
    # 128 MB by default, which is much of a small heap.
    "log.cleaner.dedupe.buffer.size": 4 * 1024 * 1024,
}


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """The ports of one node."""

    node_id: int
    port: int
    controller_port: int
    proxied_port: int | None = None
    """Port of the listener for clients of a proxy."""
    advertised: str | None = None
    """`host:port` of that proxy, which the listener advertises."""
    secured_ports: Mapping[str, int] = field(default_factory=dict)
    """Ports of the secured listeners, by name."""

    @property
    def bootstrap_server(self) -> str:
        return f"{HOST}:{self.port}"


def refuse_owned(properties: Mapping[str, PropertyValue]) -> None:
    """Raise LocalBrokerError if a property is one that the cluster sets itself."""
    if owned := sorted(OWNED_PROPERTIES & properties.keys()):
        raise LocalBrokerError(
            f"{', '.join(owned)}: set by the embedded cluster for each node and not to be overridden."
        )


def server_properties(
    node: NodeAddress,
    cluster: Sequence[NodeAddress],
    log_dirs: Sequence[Path],
    extra: Mapping[str, PropertyValue],
    security: BrokerSecurity | None = None,
) -> dict[str, str]:
    """Return all properties of one node, which is broker and controller. `extra` overrides the defaults for tests."""
    replicas = len(cluster)
    in_sync = max(1, replicas - 1)
    merged: dict[str, PropertyValue] = {
        **_TEST_DEFAULTS,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        **(security.properties() if security is not None else {}),
        **extra,
        "process.roles": "broker,controller",
        "node.id": node.node_id,
        "controller.quorum.voters": ",".join(f"{each.node_id}@{HOST}:{each.controller_port}" for each in cluster),
        "controller.listener.names": "CONTROLLER",
        # Names relative to the JVM's folder, because a comma in a path cannot be escaped.
        "log.dirs": ",".join(each.name for each in log_dirs),
        **_listeners(node, security.listeners if security is not None else {}),
    }
    return {key: _text(value) for key, value in merged.items()}


def _listeners(node: NodeAddress, secured: Mapping[str, str]) -> dict[str, PropertyValue]:
    """Return the PLAINTEXT listener, which the nodes use, and those of proxied and secured clients."""
    ports = {"PLAINTEXT": node.port, **node.secured_ports}
    protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **secured}
    advertised = {name: f"{HOST}:{port}" for name, port in ports.items()}
    if node.proxied_port is not None and node.advertised is not None:
        ports["PROXIED"], protocols["PROXIED"], advertised["PROXIED"] = node.proxied_port, "PLAINTEXT", node.advertised
    bound = {**{name: f"{HOST}:{port}" for name, port in ports.items()}, "CONTROLLER": f"{HOST}:{node.controller_port}"}
    return {
        "listeners": ",".join(f"{name}://{address}" for name, address in bound.items()),
        "advertised.listeners": ",".join(f"{name}://{address}" for name, address in advertised.items()),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "inter.broker.listener.name": "PLAINTEXT",
    }


def render(properties: Mapping[str, str]) -> str:
    """Return a java.util.Properties file, in ASCII."""
    return "".join(f"{_escape(key, ' :=')}={_escape(value)}\n" for key, value in properties.items())


def _text(value: PropertyValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _escape(text: str, separators: str = "") -> str:
    escaped = "".join(_escape_character(character, separators) for character in text)
    # Java drops leading blanks, and takes a line with a leading # or ! for a comment.
    return f"\\{escaped}" if escaped[:1] in (" ", "#", "!") else escaped


def _escape_character(character: str, separators: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character in separators:
        return f"\\{character}"
    if character.isascii():
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
