"""Requests of transactions: a producer id, what the transaction covers, its end, and the state of open transactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from spark_kafka_sink.protocol.building import VersionedRequest
from spark_kafka_sink.protocol.versions import PURPOSE_OF_TRANSACTION_V2, SUPPORTED_VERSIONS, ApiKey, Message

_FIRST_INIT_OF_HELD_ID = 3
_LAST_END_TXN_OF_TRANSACTION_V1 = 4
_FIRST_TXN_OFFSET_COMMIT_OF_TRANSACTION_V2 = 5
_FIRST_TXN_OFFSET_COMMIT_WITH_MEMBER = 3
_EXACTLY_ONCE = "delivery.guarantee=exactly-once"


@dataclass(frozen=True, slots=True)
class InitProducerIdRequest(VersionedRequest):
    """Ask for a producer id and epoch, or for the next epoch of a producer id that the producer has (KIP-360).

    Brokers below version 3 cannot give the next epoch. The sequence numbers of a lost batch are never used again,
    unlike in the Java client: if the leader has the batch after all, it would take the next transaction's records for
    duplicates and drop them.
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


@dataclass(frozen=True, slots=True)
class _OfProducer(VersionedRequest):
    """A request of a producer about its transaction."""

    transactional_id: str
    producer_id: int
    producer_epoch: int

    def _producer_values(self) -> dict[str, object]:
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer_id,
            "producer_epoch": self.producer_epoch,
        }


@dataclass(frozen=True, slots=True)
class AddPartitionsToTxnRequest(_OfProducer):
    """Add partitions to the transaction (transaction version 1; under version 2 the Produce request adds them)."""

    api_key: ClassVar[ApiKey] = ApiKey.ADD_PARTITIONS_TO_TXN
    topics: Mapping[str, Sequence[int]]

    def build(self, version: int) -> Message:
        topics = [{"name": topic, "partitions": tuple(partitions)} for topic, partitions in self.topics.items()]
        values = {f"v3_and_below_{name}": value for name, value in self._producer_values().items()}
        return self._fill(version, {**values, "v3_and_below_topics": topics})


@dataclass(frozen=True, slots=True)
class AddOffsetsToTxnRequest(_OfProducer):
    """Add the offsets of a group to the transaction (transaction version 1)."""

    api_key: ClassVar[ApiKey] = ApiKey.ADD_OFFSETS_TO_TXN
    group_id: str

    def build(self, version: int) -> Message:
        return self._fill(version, self._producer_values() | {"group_id": self.group_id})


@dataclass(frozen=True, slots=True)
class EndTxnRequest(_OfProducer):
    """Commit or abort the transaction.

    Under `transaction_version` 2 the answer carries the next epoch, so the versions of 2 must not be used under 1.
    """

    api_key: ClassVar[ApiKey] = ApiKey.END_TXN
    committed: bool
    transaction_version: int = 2

    @property
    def latest_version(self) -> int:
        return _latest(ApiKey.END_TXN, self.transaction_version, _LAST_END_TXN_OF_TRANSACTION_V1)

    def build(self, version: int) -> Message:
        return self._fill(version, self._producer_values() | {"committed": self.committed})


class OffsetToCommit(NamedTuple):
    """The next offset of a partition to read, with a text of the application."""

    partition: int
    offset: int
    metadata: str | None = None
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class TxnOffsetCommitRequest(_OfProducer):
    """Commit offsets of a group in the transaction (KIP-447: fenced by generation and member of the group)."""

    api_key: ClassVar[ApiKey] = ApiKey.TXN_OFFSET_COMMIT
    group_id: str
    topics: Mapping[str, Sequence[OffsetToCommit]]
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None
    transaction_version: int = 2

    @property
    def oldest_version(self) -> int:
        if self.transaction_version >= 2:  # older ones do not add the group to the transaction
            return _FIRST_TXN_OFFSET_COMMIT_OF_TRANSACTION_V2
        if self._names_member:
            return _FIRST_TXN_OFFSET_COMMIT_WITH_MEMBER
        return SUPPORTED_VERSIONS[ApiKey.TXN_OFFSET_COMMIT].oldest

    @property
    def purpose(self) -> str:
        if self.transaction_version >= 2:
            return PURPOSE_OF_TRANSACTION_V2
        return "send_offsets_to_transaction with a group's member" if self._names_member else ""

    @property
    def _names_member(self) -> bool:
        return self.generation_id != -1 or self.member_id != "" or self.group_instance_id is not None

    @property
    def latest_version(self) -> int:
        return _latest(
            ApiKey.TXN_OFFSET_COMMIT, self.transaction_version, _FIRST_TXN_OFFSET_COMMIT_OF_TRANSACTION_V2 - 1
        )

    def build(self, version: int) -> Message:
        topics = [
            {"name": topic, "partitions": [_offset_values(offset, version) for offset in offsets]}
            for topic, offsets in self.topics.items()
        ]
        return self._fill(
            version,
            self._producer_values()
            | {
                "group_id": self.group_id,
                "generation_id": self.generation_id,
                "member_id": self.member_id,
                "group_instance_id": self.group_instance_id,
                "topics": topics,
            },
        )


@dataclass(frozen=True, slots=True)
class DescribeTransactionsRequest(VersionedRequest):
    """Ask the coordinator for the state of transactions (KIP-664)."""

    api_key: ClassVar[ApiKey] = ApiKey.DESCRIBE_TRANSACTIONS
    transactional_ids: tuple[str, ...]

    @property
    def purpose(self) -> str:
        return _EXACTLY_ONCE

    def build(self, version: int) -> Message:
        return self._fill(version, {"transactional_ids": self.transactional_ids})


@dataclass(frozen=True, slots=True)
class ListTransactionsRequest(VersionedRequest):
    """List the transactions that a node coordinates (KIP-664, KIP-994).

    `pattern` is a regular expression on transactional ids, from version 2 on.
    """

    api_key: ClassVar[ApiKey] = ApiKey.LIST_TRANSACTIONS
    states: tuple[str, ...] = ()
    producer_ids: tuple[int, ...] = ()
    duration_ms: int = -1
    pattern: str | None = None

    @property
    def purpose(self) -> str:
        return _EXACTLY_ONCE

    def build(self, version: int) -> Message:
        return self._fill(
            version,
            {
                "state_filters": self.states,
                "producer_id_filters": self.producer_ids,
                "duration_filter": self.duration_ms,
                "transactional_id_pattern": self.pattern,
            },
        )


@dataclass(frozen=True, slots=True)
class DescribeProducersRequest(VersionedRequest):
    """Ask leaders which producers write to their partitions, and since which offset a transaction is open (KIP-664)."""

    api_key: ClassVar[ApiKey] = ApiKey.DESCRIBE_PRODUCERS
    topics: Mapping[str, Sequence[int]]

    @property
    def purpose(self) -> str:
        return _EXACTLY_ONCE

    def build(self, version: int) -> Message:
        topics = [{"name": topic, "partition_indexes": tuple(indexes)} for topic, indexes in self.topics.items()]
        return self._fill(version, {"topics": topics})


def _latest(api_key: ApiKey, transaction_version: int, last_of_v1: int) -> int:
    latest = SUPPORTED_VERSIONS[api_key].latest
    return latest if transaction_version >= 2 else min(latest, last_of_v1)


def _offset_values(offset: OffsetToCommit, version: int) -> dict[str, object]:
    values: dict[str, object] = {
        "partition_index": offset.partition,
        "committed_offset": offset.offset,
        "committed_metadata": offset.metadata,
    }
    if version >= 2:  # older brokers do not store the epoch, which is only a hint
        values["committed_leader_epoch"] = offset.leader_epoch
    return values
