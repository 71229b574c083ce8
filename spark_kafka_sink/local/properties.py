"""What a node is told in its server.properties. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.ports import HOST

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
        "log.dirs",
        "metadata.log.dir",
    }
)
"""What a cluster sets for each node and nobody can override."""

# What differs from Kafka's defaults, and why. A cluster's own properties override these.
_TEST_DEFAULTS: Mapping[str, PropertyValue] = {
    # A consumer group starts at once instead of waiting 3 s for more members.
    "group.initial.rebalance.delay.ms": 0,
    # A killed broker that comes back is refused as a duplicate until its old session has run out (9 s by default).
    "broker.session.timeout.ms": 3000,
    "broker.heartbeat.interval.ms": 500,
    # 50 partitions each by default: their files take longer to make than a test takes to run.
    "offsets.topic.num.partitions": 4,
    "transaction.state.log.num.partitions": 4,
    "share.coordinator.state.topic.num.partitions": 4,
    # 128 MB of a small heap by default.
    "log.cleaner.dedupe.buffer.size": 4 * 1024 * 1024,
}


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where one node is to be found."""

    node_id: int
    port: int
    controller_port: int
    proxied_port: int | None = None
    """Of the listener for clients that come through a proxy."""
    advertised: str | None = None
    """`host:port` of that proxy, which the listener tells its clients."""

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
    node: NodeAddress, cluster: Sequence[NodeAddress], data: Path, extra: Mapping[str, PropertyValue]
) -> dict[str, str]:
    """All properties of one node, broker and controller in one process; `extra` overrides the defaults for tests."""
    replicas = len(cluster)
    in_sync = max(1, replicas - 1)
    merged: dict[str, PropertyValue] = {
        **_TEST_DEFAULTS,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        **extra,
        "process.roles": "broker,controller",
        "node.id": node.node_id,
        "controller.quorum.voters": ",".join(f"{each.node_id}@{HOST}:{each.controller_port}" for each in cluster),
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{HOST}:{node.port},CONTROLLER://{HOST}:{node.controller_port}",
        "log.dirs": str(data),
        **_proxied_listener(node),
    }
    return {key: _text(value) for key, value in merged.items()}


def _proxied_listener(node: NodeAddress) -> dict[str, PropertyValue]:
    """A listener beside the broker's own, on which the nodes talk to each other undisturbed."""
    if node.advertised is None:
        return {}
    own, controller = f"PLAINTEXT://{HOST}:{node.port}", f"CONTROLLER://{HOST}:{node.controller_port}"
    return {
        "listeners": f"{own},PROXIED://{HOST}:{node.proxied_port},{controller}",
        "advertised.listeners": f"{own},PROXIED://{node.advertised}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
    }


def render(properties: Mapping[str, str]) -> str:
    """A java.util.Properties file, in ASCII."""
    return "".join(f"{_escape(key, ' :=')}={_escape(value)}\n" for key, value in properties.items())


def _text(value: PropertyValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _escape(text: str, separators: str = "") -> str:
    escaped = "".join(_escape_character(character, separators) for character in text)
    # Leading blanks would be dropped, and a leading # or ! would make a comment of the line.
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
