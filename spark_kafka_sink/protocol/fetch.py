"""Requests that read: records, offsets of a partition, and the offsets that a group has committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from spark_kafka_sink.protocol.building import VersionedRequest
from spark_kafka_sink.protocol.versions import ApiKey, Message

READ_UNCOMMITTED = 0
READ_COMMITTED = 1
LATEST_TIMESTAMP = -1
EARLIEST_TIMESTAMP = -2
_CONSUMER_REPLICA_ID = -1
_FIRST_BATCHED_OFFSET_FETCH = 8


class FetchPartition(NamedTuple):
    """The offset from which to read a partition, and how many bytes."""

    partition: int
    fetch_offset: int
    max_bytes: int
    current_leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class FetchRequest(VersionedRequest):
    """Read records from given offsets on, without a fetch session (KIP-227: session 0, epoch -1)."""

    api_key: ClassVar[ApiKey] = ApiKey.FETCH
    topics: Mapping[str, Sequence[FetchPartition]]
    max_wait_ms: int
    min_bytes: int = 1
    max_bytes: int = 50 * 1024 * 1024
    isolation_level: int = READ_UNCOMMITTED

    def build(self, version: int) -> Message:
        topics = [
            {"topic": topic, "partitions": [_fetch_partition(requested, version) for requested in partitions]}
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
    """The offset to look up: `timestamp` in ms since the epoch, or LATEST_TIMESTAMP or EARLIEST_TIMESTAMP."""

    partition: int
    timestamp: int
    current_leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class ListOffsetsRequest(VersionedRequest):
    """Look up offsets by time. With READ_COMMITTED the latest is the last stable offset.

    `timeout_ms` limits a lookup in tiered storage.
    """

    api_key: ClassVar[ApiKey] = ApiKey.LIST_OFFSETS
    topics: Mapping[str, Sequence[ListOffsetsPartition]]
    isolation_level: int = READ_UNCOMMITTED
    timeout_ms: int = 30_000

    def build(self, version: int) -> Message:
        topics = [
            {"name": topic, "partitions": [_list_offsets_partition(requested, version) for requested in partitions]}
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


def _fetch_partition(requested: FetchPartition, version: int) -> dict[str, object]:
    values: dict[str, object] = {
        "partition": requested.partition,
        "fetch_offset": requested.fetch_offset,
        "partition_max_bytes": requested.max_bytes,
    }
    if version >= 9:  # older brokers do not check the epoch
        values["current_leader_epoch"] = requested.current_leader_epoch
    return values


def _list_offsets_partition(requested: ListOffsetsPartition, version: int) -> dict[str, object]:
    values: dict[str, object] = {"partition_index": requested.partition, "timestamp": requested.timestamp}
    if version >= 4:
        values["current_leader_epoch"] = requested.current_leader_epoch
    return values


@dataclass(frozen=True, slots=True)
class OffsetFetchRequest(VersionedRequest):
    """Read a group's committed offsets. `topics` None: those of all topics that the principal may describe.

    `require_stable` (KIP-447) makes the broker answer only after open transactions that may change the offsets.
    """

    api_key: ClassVar[ApiKey] = ApiKey.OFFSET_FETCH
    group_id: str
    topics: Mapping[str, Sequence[int]] | None
    require_stable: bool = True

    def build(self, version: int) -> Message:
        topics = None
        if self.topics is not None:
            topics = [{"name": topic, "partition_indexes": tuple(places)} for topic, places in self.topics.items()]
        group: dict[str, object] = {"group_id": self.group_id, "topics": topics}
        if version < _FIRST_BATCHED_OFFSET_FETCH:
            return self._fill(version, {**group, "require_stable": self.require_stable})
        return self._fill(version, {"groups": (group,), "require_stable": self.require_stable})


def group_offsets_of(response: Message, group_id: str) -> Message | None:
    """Return the part of an OffsetFetch response with `error_code` and `topics`, or None if the group is missing, or is
    there with different outcomes.
    """
    if response.__version__ < _FIRST_BATCHED_OFFSET_FETCH:
        return response
    parts = [group for group in response.groups if group.group_id == group_id]
    return parts[0] if parts and all(part == parts[0] for part in parts) else None
