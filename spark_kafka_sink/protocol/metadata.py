"""Requests about the cluster: its brokers and topics, the coordinators of groups and transactional ids, and topics to
create or to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from spark_kafka_sink.common.errors import error_for_code
from spark_kafka_sink.protocol.building import VersionedRequest
from spark_kafka_sink.protocol.versions import ApiKey, Message

GROUP = 0
TRANSACTION = 1
_FIRST_BATCHED_FIND_COORDINATOR = 4
_TOPIC_RESOURCE = 2
_BROKER_RESOURCE = 4
_OPERATIONS_SINCE = 8


@dataclass(frozen=True, slots=True)
class MetadataRequest(VersionedRequest):
    """The brokers, and the partitions of `topics`. None means every topic, () means no topic."""

    api_key: ClassVar[ApiKey] = ApiKey.METADATA
    topics: tuple[str, ...] | None
    allow_auto_topic_creation: bool = True

    def build(self, version: int) -> Message:
        topics = None if self.topics is None else [{"name": name} for name in self.topics]
        return self._fill(version, {"topics": topics, "allow_auto_topic_creation": self.allow_auto_topic_creation})


@dataclass(frozen=True, slots=True)
class PermissionsRequest(VersionedRequest):
    """The brokers and the partitions of `topics`, and what this principal may do with each topic (KIP-430, Kafka 2.3).
    Creates no topic. Brokers before 2.3 answer without permissions.
    """

    api_key: ClassVar[ApiKey] = ApiKey.METADATA
    topics: tuple[str, ...]

    def build(self, version: int) -> Message:
        topics = [{"name": name} for name in self.topics]
        values: dict[str, object] = {"topics": topics, "allow_auto_topic_creation": False}
        if version >= _OPERATIONS_SINCE:
            values["include_topic_authorized_operations"] = True
        return self._fill(version, values)


@dataclass(frozen=True, slots=True)
class CreateTopicRequest(VersionedRequest):
    """Create one topic. With `replication_factor` -1 the broker uses its default (KIP-464). With `validate_only` the
    broker creates nothing, and says whether it would.
    """

    api_key: ClassVar[ApiKey] = ApiKey.CREATE_TOPICS
    topic: str
    partitions: int
    replication_factor: int
    configs: Mapping[str, str] = field(default_factory=dict)
    timeout_ms: int = 30_000
    validate_only: bool = False

    def build(self, version: int) -> Message:
        topic = {
            "name": self.topic,
            "num_partitions": self.partitions,
            "replication_factor": self.replication_factor,
            "configs": [{"name": name, "value": value} for name, value in self.configs.items()],
        }
        values = {"topics": (topic,), "timeout": self.timeout_ms, "validate_only": self.validate_only}
        return self._fill(version, values)


@dataclass(frozen=True, slots=True)
class DescribeTopicConfigsRequest(VersionedRequest):
    """Read settings of one topic by name. Any node answers."""

    api_key: ClassVar[ApiKey] = ApiKey.DESCRIBE_CONFIGS
    topic: str
    names: tuple[str, ...]

    def build(self, version: int) -> Message:
        topic = {"resource_type": _TOPIC_RESOURCE, "resource_name": self.topic, "configuration_keys": self.names}
        return self._fill(version, {"resources": (topic,)})


@dataclass(frozen=True, slots=True)
class DescribeBrokerConfigsRequest(VersionedRequest):
    """Read settings of one broker by name. Only that broker answers."""

    api_key: ClassVar[ApiKey] = ApiKey.DESCRIBE_CONFIGS
    node_id: int
    names: tuple[str, ...]

    def build(self, version: int) -> Message:
        broker = {
            "resource_type": _BROKER_RESOURCE,
            "resource_name": str(self.node_id),
            "configuration_keys": self.names,
        }
        return self._fill(version, {"resources": (broker,)})


@dataclass(frozen=True, slots=True)
class DescribeQuorumRequest(VersionedRequest):
    """Describe the controllers of a cluster in KRaft mode. Any broker answers. From version 1 on the answer has the
    leader's time of day (KIP-836, Kafka 3.3).
    """

    api_key: ClassVar[ApiKey] = ApiKey.DESCRIBE_QUORUM

    def build(self, version: int) -> Message:
        topic = {"topic_name": "__cluster_metadata", "partitions": ({"partition_index": 0},)}
        return self._fill(version, {"topics": (topic,)})


def time_of_quorum(response: Message) -> int | None:
    """Return the leading controller's time of day in ms since the epoch, as of its answer; None if it is not there.
    Raises the error of the answer.
    """
    if code := int(response.error_code):
        raise error_for_code(code, api="DescribeQuorum")
    for partition in (partition for topic in response.topics for partition in topic.partitions):
        for voter in partition.current_voters:
            if voter.replica_id == partition.leader_id and int(voter.last_caught_up_timestamp) > 0:
                return int(voter.last_caught_up_timestamp)
    return None


@dataclass(frozen=True, slots=True)
class FindCoordinatorRequest(VersionedRequest):
    """Find the coordinator of a group (`key_type` GROUP) or of a transactional id (TRANSACTION)."""

    api_key: ClassVar[ApiKey] = ApiKey.FIND_COORDINATOR
    key: str
    key_type: int

    def build(self, version: int) -> Message:
        if version < _FIRST_BATCHED_FIND_COORDINATOR:
            return self._fill(version, {"key": self.key, "key_type": self.key_type})
        return self._fill(version, {"key_type": self.key_type, "coordinator_keys": (self.key,)})


@dataclass(frozen=True, slots=True)
class FindCoordinatorsRequest(VersionedRequest):
    """Find the coordinators of several keys of one type (KIP-699), from version 4 on."""

    api_key: ClassVar[ApiKey] = ApiKey.FIND_COORDINATOR
    keys: tuple[str, ...]
    key_type: int

    @property
    def oldest_version(self) -> int:
        return _FIRST_BATCHED_FIND_COORDINATOR

    def build(self, version: int) -> Message:
        return self._fill(version, {"key_type": self.key_type, "coordinator_keys": self.keys})


class Coordinator(NamedTuple):
    """The answer to FindCoordinator. Without an error it has the address of the node."""

    node_id: int
    host: str
    port: int
    error_code: int
    error_message: str | None


def coordinator_of(response: Message, key: str) -> Coordinator | None:
    """Return the coordinator of `key` from a FindCoordinator response of any version, or None if `key` is missing in
    it.
    """
    if response.__version__ >= _FIRST_BATCHED_FIND_COORDINATOR:
        found = next((each for each in response.coordinators if each.key == key), None)
        if found is None:
            return None
    else:
        found = response
    return Coordinator(found.node_id, found.host, found.port, int(found.error_code), found.error_message)
