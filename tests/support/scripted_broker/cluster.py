"""The scripted cluster: nodes, topics, leaders and logs, without sockets, threads or a clock.

`handle_frame` gets the bytes of a request and returns those of the response. Tests change the state between frames, and
`on` puts a hook before an API.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from support.scripted_broker.batches import BrokerRecord
from support.scripted_broker.dispatch import dispatch
from support.scripted_broker.exchange import Exchange, Reply
from support.scripted_broker.faults import Hook, Script
from support.scripted_broker.partition_log import PartitionLog
from support.scripted_broker.sasl import SaslListener
from support.scripted_broker.telemetry import TelemetryReceiver
from support.scripted_broker.transaction_coordinator import TransactionCoordinator
from support.scripted_broker.versions import KAFKA_4_1, TELEMETRY, VersionRanges

NO_LEADER = -1


@dataclass(slots=True)
class ScriptedNode:
    """A broker's address; the loopback server puts its real port here."""

    id: int
    host: str
    port: int
    rack: str | None = None


@dataclass(slots=True)
class ScriptedPartition:
    """A partition with its leader (NO_LEADER if there is none) and log."""

    leader_id: int
    replica_ids: list[int]
    leader_epoch: int = 0
    log: PartitionLog = field(default_factory=PartitionLog)


@dataclass(slots=True)
class ScriptedTopic:
    """A topic. While `is_visible` is False, metadata does not include it, but its logs remain."""

    name: str
    id: uuid.UUID
    partitions: list[ScriptedPartition]
    is_internal: bool = False
    is_visible: bool = True
    visible_from_ms: int = 0
    max_message_bytes: int = 1_048_588
    configs: dict[str, str] = field(default_factory=dict)
    """The differences from the defaults of describe_configs.py."""
    operations: int = -(2**31)
    """What the client may do: a bit for each number of AclOperation. By default the brokers do not say."""


class ScriptedCluster:
    """A cluster in memory. `seed` decides topic ids. `versions` are those of every node; `node_versions` overrides them
    for one.
    """

    def __init__(
        self,
        node_count: int = 1,
        *,
        seed: int = 0,
        auto_create_topics: bool = False,
        default_partitions: int = 1,
        versions: VersionRanges = KAFKA_4_1,
        finalized_features: Mapping[str, int] | None = None,
    ) -> None:
        self.nodes = {index: ScriptedNode(index, f"broker-{index}", 9092) for index in range(node_count)}
        self.live_node_ids = set(self.nodes)
        """The nodes in metadata."""
        self.controller_id = 0
        self.cluster_id: str | None = "scripted-cluster"
        self.topics: dict[str, ScriptedTopic] = {}
        self.auto_create_topics = auto_create_topics
        self.topic_creation_ms = 0
        """How long an auto-created topic stays unknown after the request that created it. That request always gets
        UNKNOWN_TOPIC_OR_PARTITION.
        """
        self.default_partitions = default_partitions
        self.versions: VersionRanges = versions
        self.node_versions: dict[int, VersionRanges] = {}
        self.finalized_features = dict(finalized_features or {})
        self.has_leader_hints = True
        """Whether a produce response to the wrong node names the right one (KIP-951)."""
        self.throttle_ms = 0
        self.coordinators: dict[str, int] = {}
        """Node ids by group or transactional id; without an entry it is the first live node."""
        self.next_producer_id = 1000
        self.transactions = TransactionCoordinator(self)
        self.broker_configs: dict[str, str] = {}
        """Settings of each broker."""
        self.quorum_ahead_ms: int | None = None
        """How far the controller's time of day is ahead; None: the client may not ask."""
        self.sasl: SaslListener | None = None
        """If it is set, every node requires a login."""
        self.telemetry: TelemetryReceiver | None = None
        """The plugin for metrics of clients. Without it no node offers the APIs."""
        self.requests: list[Exchange] = []
        """Every request, in order."""
        self.scripts: list[Script] = []
        self._random = Random(seed)

    # ---- topics and leaders ------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        leaders: Sequence[int] | None = None,
        visible_from_ms: int = 0,
        configs: Mapping[str, str] | None = None,
    ) -> ScriptedTopic:
        """Create a topic with a new id. Without given leaders the nodes lead its partitions in turn."""
        node_ids = sorted(self.nodes)
        chosen = leaders or [node_ids[index % len(node_ids)] for index in range(partitions)]
        topic = ScriptedTopic(
            name,
            uuid.UUID(int=self._random.getrandbits(128), version=4),
            [ScriptedPartition(leader_id, list(node_ids)) for leader_id in chosen],
            visible_from_ms=visible_from_ms,
            configs=dict(configs or {}),
        )
        self.topics[name] = topic
        return topic

    def delete_topic(self, name: str) -> None:
        del self.topics[name]

    def add_partitions(self, name: str, count: int) -> None:
        topic = self.topics[name]
        node_ids = sorted(self.nodes)
        for index in range(len(topic.partitions), len(topic.partitions) + count):
            topic.partitions.append(ScriptedPartition(node_ids[index % len(node_ids)], list(node_ids)))

    def move_leader(self, topic: str, partition: int, node_id: int) -> None:
        """Set a new leader, or NO_LEADER, in a new epoch. The log moves with it."""
        moved = self.topics[topic].partitions[partition]
        moved.leader_id = node_id
        moved.leader_epoch += 1

    def visible_topic(self, name: str, now_ms: int) -> ScriptedTopic | None:
        topic = self.topics.get(name)
        return topic if topic is not None and topic.is_visible and topic.visible_from_ms <= now_ms else None

    def partition(self, topic: str, partition: int) -> ScriptedPartition | None:
        found = self.topics.get(topic)
        return found.partitions[partition] if found is not None and 0 <= partition < len(found.partitions) else None

    def log(self, topic: str, partition: int) -> PartitionLog:
        return self.topics[topic].partitions[partition].log

    def records(self, topic: str) -> list[list[BrokerRecord]]:
        """Return the records that a reader of the topic sees, by partition."""
        return [partition.log.records() for partition in self.topics[topic].partitions]

    def coordinator_id(self, key: str) -> int:
        return self.coordinators.get(key, min(self.live_node_ids))

    def ranges_of(self, node_id: int) -> VersionRanges:
        versions = self.node_versions.get(node_id, self.versions)
        if self.telemetry is None or node_id not in (self.telemetry.node_ids or self.nodes):
            return versions
        return {**versions, **TELEMETRY}

    # ---- requests ----------------------------------------------------------------------------------------------------

    def on(
        self, api_key: int, hook: Hook, *, times: int | None = 1, node_id: int | None = None, skip: int = 0
    ) -> Script:
        """Let `hook` handle the next `times` requests of this API (None: all of them), after `skip` normal ones.

        Hooks of faults.py, or any `hook(exchange, proceed) -> Answer`. The oldest script that applies goes first.
        """
        script = Script(int(api_key), hook, times, node_id, skip)
        self.scripts.append(script)
        return script

    def handle_frame(self, node_id: int, payload: bytes, now_ms: int, connection: object = None) -> list[Reply]:
        """Handle a request without its size, and return the replies with their sizes. A SASL listener must know the
        connection.

        Raises on bytes that are not a request of this client, which is a fault of the client under test.
        """
        return dispatch(self, node_id, payload, now_ms, connection)

    def requests_of(self, api_key: int) -> list[Exchange]:
        return [exchange for exchange in self.requests if exchange.api_key == api_key]
