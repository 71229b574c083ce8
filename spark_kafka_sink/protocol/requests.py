"""The requests of metadata, producing and reading. Each is a frozen value that builds kio's entity in the version a
node speaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from spark_kafka_sink.protocol.building import VersionedRequest
from spark_kafka_sink.protocol.chunks import RecordChunks
from spark_kafka_sink.protocol.messages import SUPPORTED_VERSIONS, ApiKey, Message, request_type
from spark_kafka_sink.protocol.produce_frames import produce_frame

READ_UNCOMMITTED = 0
READ_COMMITTED = 1
LATEST_TIMESTAMP = -1
EARLIEST_TIMESTAMP = -2
_CONSUMER_REPLICA_ID = -1
_LAST_PRODUCE_OF_TRANSACTION_V1 = 11
_FIRST_PRODUCE_WITH_ZSTD = 7
_FIRST_INIT_OF_HELD_ID = 3
_TOPIC_RESOURCE = 2


@dataclass(frozen=True, slots=True)
class ApiVersionsRequest(VersionedRequest):
    """Asks a node which versions it speaks (KIP-511: and tells it who asks)."""

    api_key: ClassVar[ApiKey] = ApiKey.API_VERSIONS
    software_name: str
    software_version: str

    def build(self, version: int) -> Message:
        if version < 3:
            return request_type(self.api_key, version)()
        return self._fill(
            version, {"client_software_name": self.software_name, "client_software_version": self.software_version}
        )


@dataclass(frozen=True, slots=True)
class MetadataRequest(VersionedRequest):
    """Brokers, and the partitions of `topics`: None asks for every topic, () for none."""

    api_key: ClassVar[ApiKey] = ApiKey.METADATA
    topics: tuple[str, ...] | None
    allow_auto_topic_creation: bool = True

    def build(self, version: int) -> Message:
        topics = None if self.topics is None else [{"name": name} for name in self.topics]
        return self._fill(version, {"topics": topics, "allow_auto_topic_creation": self.allow_auto_topic_creation})


@dataclass(frozen=True, slots=True)
class CreateTopicRequest(VersionedRequest):
    """Creates one topic; `replication_factor` -1 leaves it to the broker's default (KIP-464)."""

    api_key: ClassVar[ApiKey] = ApiKey.CREATE_TOPICS
    topic: str
    partitions: int
    replication_factor: int
    configs: Mapping[str, str] = field(default_factory=dict)
    timeout_ms: int = 30_000

    def build(self, version: int) -> Message:
        topic = {
            "name": self.topic,
            "num_partitions": self.partitions,
            "replication_factor": self.replication_factor,
            "configs": [{"name": name, "value": value} for name, value in self.configs.items()],
        }
        return self._fill(version, {"topics": (topic,), "timeout": self.timeout_ms})


@dataclass(frozen=True, slots=True)
class DescribeTopicConfigsRequest(VersionedRequest):
    """Asks for settings of one topic by name. Any node answers."""

    api_key: ClassVar[ApiKey] = ApiKey.DESCRIBE_CONFIGS
    topic: str
    names: tuple[str, ...]

    def build(self, version: int) -> Message:
        topic = {"resource_type": _TOPIC_RESOURCE, "resource_name": self.topic, "configuration_keys": self.names}
        return self._fill(version, {"resources": (topic,)})


@dataclass(frozen=True, slots=True)
class ProduceRequest(VersionedRequest):
    """Record batches by topic and partition.

    `acks` is -1, 0 or 1. `transaction_version` (KIP-890) matters with a transactional id only: under 1 a broker must
    not take version 12 as leave to add partitions to the transaction by itself. `has_zstd` keeps the request from
    brokers that cannot read it (KIP-110).
    """

    api_key: ClassVar[ApiKey] = ApiKey.PRODUCE
    acks: int
    timeout_ms: int
    batches: Mapping[str, Sequence[tuple[int, RecordChunks]]] = field(repr=False)
    transactional_id: str | None = None
    transaction_version: int = 2
    has_zstd: bool = False

    @property
    def oldest_version(self) -> int:
        return _FIRST_PRODUCE_WITH_ZSTD if self.has_zstd else SUPPORTED_VERSIONS[ApiKey.PRODUCE].oldest

    @property
    def purpose(self) -> str:
        return "compression.type=zstd" if self.has_zstd else ""

    @property
    def latest_version(self) -> int:
        if self.transactional_id is not None and self.transaction_version < 2:
            return _LAST_PRODUCE_OF_TRANSACTION_V1
        return SUPPORTED_VERSIONS[ApiKey.PRODUCE].latest

    def build(self, version: int) -> Message:
        topics = [
            {
                "name": topic,
                "partition_data": [{"index": index, "records": records} for index, records in partitions],
            }
            for topic, partitions in self.batches.items()
        ]
        return self._fill(
            version,
            {
                "transactional_id": self.transactional_id,
                "acks": self.acks,
                "timeout": self.timeout_ms,
                "topic_data": topics,
            },
        )

    def encode(self, version: int, correlation_id: int, client_id: str | None) -> list[memoryview]:
        return produce_frame(
            version, correlation_id, client_id, self.transactional_id, self.acks, self.timeout_ms, self.batches
        )


@dataclass(frozen=True, slots=True)
class InitProducerIdRequest(VersionedRequest):
    """A producer id and epoch; with an id already held, the next epoch of it (KIP-360), which brokers below version 3
    cannot give.

    The numbers of a lost batch are not used again instead, as the Java client does where it may: a leader that has the
    batch after all would take the next transaction's records for its doubles and drop them.
    """

    api_key: ClassVar[ApiKey] = ApiKey.INIT_PRODUCER_ID
    transactional_id: str | None = None
    transaction_timeout_ms: int = 2**31 - 1
    producer_id: int = -1
    producer_epoch: int = -1

    @property
    def oldest_version(self) -> int:
        return _FIRST_INIT_OF_HELD_ID if self._holds_id else SUPPORTED_VERSIONS[ApiKey.INIT_PRODUCER_ID].oldest

    @property
    def purpose(self) -> str:
        if not self._holds_id:
            return ""
        return "Close this producer and make another: to go on with this one after a transaction lost a batch"

    @property
    def _holds_id(self) -> bool:
        return self.producer_id >= 0

    def build(self, version: int) -> Message:
        return self._fill(
            version,
            {
                "transactional_id": self.transactional_id,
                "transaction_timeout": self.transaction_timeout_ms,
                "producer_id": self.producer_id,
                "producer_epoch": self.producer_epoch,
            },
        )


class FetchPartition(NamedTuple):
    """Where to read a partition from."""

    partition: int
    fetch_offset: int
    max_bytes: int
    current_leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class FetchRequest(VersionedRequest):
    """Records from given offsets on, without a fetch session (KIP-227: session 0, epoch -1)."""

    api_key: ClassVar[ApiKey] = ApiKey.FETCH
    topics: Mapping[str, Sequence[FetchPartition]]
    max_wait_ms: int
    min_bytes: int = 1
    max_bytes: int = 50 * 1024 * 1024
    isolation_level: int = READ_UNCOMMITTED

    def build(self, version: int) -> Message:
        topics = [
            {"topic": topic, "partitions": [_fetch_partition(wanted, version) for wanted in partitions]}
            for topic, partitions in self.topics.items()
        ]
        return self._fill(
            version,
            {
                "max_wait": self.max_wait_ms,
                "min_bytes": self.min_bytes,
                "max_bytes": self.max_bytes,
                "isolation_level": self.isolation_level,
                "topics": topics,
            },
        )


class ListOffsetsPartition(NamedTuple):
    """Which offset of a partition: `timestamp` in ms since the epoch, or LATEST_TIMESTAMP or EARLIEST_TIMESTAMP."""

    partition: int
    timestamp: int
    current_leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class ListOffsetsRequest(VersionedRequest):
    """Offsets by time. With READ_COMMITTED the latest is the last stable offset; `timeout_ms` bounds a look into
    tiered storage.
    """

    api_key: ClassVar[ApiKey] = ApiKey.LIST_OFFSETS
    topics: Mapping[str, Sequence[ListOffsetsPartition]]
    isolation_level: int = READ_UNCOMMITTED
    timeout_ms: int = 30_000

    def build(self, version: int) -> Message:
        topics = [
            {"name": topic, "partitions": [_list_offsets_partition(wanted, version) for wanted in partitions]}
            for topic, partitions in self.topics.items()
        ]
        values: dict[str, object] = {
            "replica_id": _CONSUMER_REPLICA_ID,
            "isolation_level": self.isolation_level,
            "topics": topics,
        }
        if version >= 10:
            values["timeout"] = self.timeout_ms
        return self._fill(version, values)


def _fetch_partition(wanted: FetchPartition, version: int) -> dict[str, object]:
    values: dict[str, object] = {
        "partition": wanted.partition,
        "fetch_offset": wanted.fetch_offset,
        "partition_max_bytes": wanted.max_bytes,
    }
    if version >= 9:  # an older broker does not check the epoch, and needs none to answer
        values["current_leader_epoch"] = wanted.current_leader_epoch
    return values


def _list_offsets_partition(wanted: ListOffsetsPartition, version: int) -> dict[str, object]:
    values: dict[str, object] = {"partition_index": wanted.partition, "timestamp": wanted.timestamp}
    if version >= 4:
        values["current_leader_epoch"] = wanted.current_leader_epoch
    return values
