"""Committed offsets of consumer groups, with their metadata texts. It runs on the caller's thread only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from spark_kafka_sink.admin.coordinator_calls import CONTRADICTION, CoordinatorApi, CoordinatorCalls
from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    CoordinatorNotAvailableError,
    KafkaError,
    UnstableOffsetCommitError,
    error_for_code,
)
from spark_kafka_sink.protocol.fetch import OffsetFetchRequest, group_offsets_of
from spark_kafka_sink.protocol.metadata import GROUP
from spark_kafka_sink.protocol.versions import Message, Request

_NO_OFFSET = -1


class CommittedOffset(NamedTuple):
    """The next offset to read, and the text that was committed with it."""

    offset: int
    metadata: str


GroupCommits = dict[TopicPartition, CommittedOffset | None]
"""None if nothing is committed, or if it has expired (offsets.retention.minutes)."""


class GroupOffsets:
    """The calls. Each returns when all answers have come, or when the timer has expired."""

    def __init__(self, calls: CoordinatorCalls) -> None:
        self._calls = calls

    def fetch_offsets(
        self,
        topic_partitions: Mapping[str, Iterable[TopicPartition]],
        timer: Timer,
    ) -> dict[str, GroupCommits]:
        """Return the committed offsets of these partitions, by group. Groups are asked in parallel.

        The call waits for offsets in an open transaction, and for those whose end has not reached the coordinator yet
        (KIP-447). Raises GroupAuthorizationError, TopicAuthorizationError, UnsupportedVersionError (a broker before
        Kafka 2.5), and KafkaTimeoutError, with the text of UnstableOffsetCommitError if that was the reason.
        """
        return self._fetch(
            [_GroupPartitions(group, tuple(partitions)) for group, partitions in topic_partitions.items()], timer
        )

    def disputed(self, groups: Sequence[str], timer: Timer) -> list[str]:
        """Return the groups for which brokers name different coordinators, as `CoordinatorCalls.disputed`."""
        return self._calls.disputed(GROUP, groups, timer)

    def fetch_all_offsets(self, groups: Iterable[str], timer: Timer) -> dict[str, GroupCommits]:
        """Return what the groups have committed for all topics that the principal may describe. Does not wait for open
        transactions. Raises as `fetch_offsets` does.
        """
        return self._fetch([_GroupPartitions(group, None) for group in groups], timer)

    def _fetch(self, items: Sequence[_GroupPartitions], timer: Timer) -> dict[str, GroupCommits]:
        outcomes = self._calls.run(_OffsetFetch(), items, timer)
        return {item.group_id: outcome.get() for item, outcome in outcomes.items()}


class _GroupPartitions(NamedTuple):
    group_id: str
    topic_partitions: tuple[TopicPartition, ...] | None
    """None: those of all topics."""


class _OffsetFetch(CoordinatorApi[_GroupPartitions, GroupCommits]):
    key_type = GROUP
    advice: ClassVar[Mapping[int, str]] = {
        29: "Not authorized for a topic: grant DESCRIBE on it, which READ includes.",
        30: "Not authorized for the group: grant DESCRIBE on it, which READ includes.",
    }

    def key(self, item: _GroupPartitions) -> str:
        return item.group_id

    def describe(self, item: _GroupPartitions) -> str:
        places = "all topics" if item.topic_partitions is None else ", ".join(map(str, item.topic_partitions))
        return f"OffsetFetch of group {item.group_id!r} ({places})"

    def requests(self, items: Sequence[_GroupPartitions]) -> Iterable[tuple[Request, Sequence[_GroupPartitions]]]:
        for item in items:
            if item.topic_partitions is None:
                yield OffsetFetchRequest(item.group_id, None, require_stable=False), [item]
                continue
            topics: dict[str, list[int]] = {}
            for topic_partition in item.topic_partitions:
                topics.setdefault(topic_partition.topic, []).append(topic_partition.partition)
            yield OffsetFetchRequest(item.group_id, topics), [item]

    def answers(
        self, items: Sequence[_GroupPartitions], body: Message
    ) -> Mapping[_GroupPartitions, GroupCommits | KafkaError]:
        found = {item: group_offsets_of(body, item.group_id) for item in items}
        return {item: _committed(item, group) for item, group in found.items() if group is not None}


def _committed(item: _GroupPartitions, group: Message) -> GroupCommits | KafkaError:
    """Return the group's offsets, or the first error in its answer. An unstable offset counts last. A partition that is
    named twice with different outcomes has none of them: the group is asked again.
    """
    codes: list[tuple[int, TopicPartition | None]] = [(int(group.error_code), None)]
    found: GroupCommits = {}
    contradicted: list[TopicPartition] = []
    for topic in group.topics:
        for partition in topic.partitions:
            topic_partition = TopicPartition(str(topic.name), int(partition.partition_index))
            offset = CommittedOffset(int(partition.committed_offset), str(partition.metadata or ""))
            committed = offset if offset.offset != _NO_OFFSET else None
            if topic_partition in found and found[topic_partition] != committed:
                contradicted.append(topic_partition)
            found[topic_partition] = committed
            codes.append((int(partition.error_code), topic_partition))
    codes.sort(key=lambda pair: pair[0] == UnstableOffsetCommitError.error_code)
    for code, place in codes:
        if code:
            return error_for_code(code, api="OffsetFetch").at(topic_partition=place)
    if contradicted:
        return CoordinatorNotAvailableError(CONTRADICTION).at(topic_partition=contradicted[0])
    if item.topic_partitions is None:
        return found
    for topic_partition in item.topic_partitions:
        if topic_partition not in found:  # an offset of -1 would say that nothing is committed
            return CoordinatorNotAvailableError("The answer does not mention it.").at(topic_partition=topic_partition)
    return {topic_partition: found[topic_partition] for topic_partition in item.topic_partitions}
