"""The requests of a transaction, one maker each, and what each error code in their answers leads to.

A `TransactionalRequest` is a value in the manager's queue: how to build it, where it goes, what its answer says. It
decides nothing; the manager does, by the table here. Any thread that holds the manager's lock. Reference:
org.apache.kafka.clients.producer.internals.TransactionManager's TxnRequestHandler classes (KIP-98, KIP-447, KIP-890).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    CommitFailedError,
    KafkaError,
    TopicAuthorizationError,
    UnknownServerError,
    error_for_code,
)
from spark_kafka_sink.common.retold import retold
from spark_kafka_sink.producer.pending_operation import TransactionalResult
from spark_kafka_sink.protocol.building import Request
from spark_kafka_sink.protocol.coordinator_requests import (
    GROUP,
    TRANSACTION,
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    FindCoordinatorRequest,
    OffsetToCommit,
    TxnOffsetCommitRequest,
    coordinator_of,
)
from spark_kafka_sink.protocol.messages import Message
from spark_kafka_sink.protocol.requests import InitProducerIdRequest

COORDINATOR_NOT_AVAILABLE: Final = 15
INVALID_TXN_STATE: Final = 48
CONCURRENT_TRANSACTIONS: Final = 51
NOTHING_ADDED: Final = frozenset({3, 55})
"""One of the partitions is not there (UNKNOWN_TOPIC_OR_PARTITION), so the others were not attempted."""
_COMMIT_FAILED: Final = frozenset({22, 25})
"""ILLEGAL_GENERATION and UNKNOWN_MEMBER_ID. Of the requests here only TxnOffsetCommit is answered so."""
_LEFT_OUT: Final = "The answer does not mention it."
_OFFSET_NOT_GRANTED: Final = "Not authorized for the topic that the offset is of: grant READ on it."


class Action(enum.IntEnum):
    """What to do about an error; of several in one answer the gravest counts."""

    RETRY = 1
    FIND_COORDINATOR = 2
    """Ask who the coordinator is, then send again."""
    ABORT = 3
    """The transaction can only be aborted."""
    FAIL = 4
    """The producer can do no more."""


_ACTIONS: Final[Mapping[int, Action]] = {
    -1: Action.RETRY,  # UNKNOWN_SERVER_ERROR: whether it took effect is unknown, and sending again does no harm
    3: Action.RETRY,  # UNKNOWN_TOPIC_OR_PARTITION: not known to this broker yet
    12: Action.ABORT,  # OFFSET_METADATA_TOO_LARGE
    14: Action.RETRY,  # COORDINATOR_LOAD_IN_PROGRESS
    15: Action.FIND_COORDINATOR,  # COORDINATOR_NOT_AVAILABLE
    16: Action.FIND_COORDINATOR,  # NOT_COORDINATOR
    22: Action.ABORT,  # ILLEGAL_GENERATION
    25: Action.ABORT,  # UNKNOWN_MEMBER_ID
    28: Action.ABORT,  # INVALID_COMMIT_OFFSET_SIZE
    29: Action.ABORT,  # TOPIC_AUTHORIZATION_FAILED
    30: Action.ABORT,  # GROUP_AUTHORIZATION_FAILED
    47: Action.FAIL,  # INVALID_PRODUCER_EPOCH: from a coordinator it means fenced
    48: Action.FAIL,  # INVALID_TXN_STATE
    49: Action.ABORT,  # INVALID_PRODUCER_ID_MAPPING
    51: Action.RETRY,  # CONCURRENT_TRANSACTIONS
    55: Action.RETRY,  # OPERATION_NOT_ATTEMPTED: another partition of the request was at fault
    59: Action.ABORT,  # UNKNOWN_PRODUCER_ID
    82: Action.ABORT,  # FENCED_INSTANCE_ID
    120: Action.ABORT,  # TRANSACTION_ABORTABLE
}


def action_for(error_code: int) -> Action:
    """The table's answer; for a code that is not in it, whether Kafka calls it retriable. A code that this client does
    not know counts as UNKNOWN_SERVER_ERROR.
    """
    known = _ACTIONS.get(error_code)
    if known is not None:
        return known
    error = error_for_code(error_code)
    if isinstance(error, UnknownServerError):
        return _ACTIONS[-1]
    return Action.RETRY if error.retriable else Action.FAIL


class Refusal(NamedTuple):
    """An error code in an answer, and to what it was said."""

    error_code: int
    place: str
    text: str | None = None

    def error(self, api: str, node_id: str) -> KafkaError:
        """The error in the node's answer to `api` ("EndTxn")."""
        said = error_for_code(self.error_code, self.text or "", api, node_id)
        text = f"{self.place}: {said}"
        if self.error_code not in _COMMIT_FAILED:
            return retold(said, text)
        failed = CommitFailedError(text)
        failed.error_code = self.error_code
        return failed


class Priority(enum.IntEnum):
    """The order of the queue: a coordinator before who needs it, the end of a transaction after all that belongs to
    it.
    """

    FIND_COORDINATOR = 0
    INIT_PRODUCER_ID = 1
    ADD_PARTITIONS_OR_OFFSETS = 2
    TXN_OFFSET_COMMIT = 3
    END_TXN = 4


@dataclass(slots=True, eq=False)
class TransactionalRequest:
    """One request in the queue. `coordinator` is (type, key) of the node it goes to, None for any node."""

    priority: Priority
    request: Request
    coordinator: tuple[int, str] | None
    refusals: Callable[[Message], Iterable[Refusal]]
    """The errors of an answer; none means success."""
    succeeded: Callable[[Message], None]
    result: TransactionalResult
    attempts: int = field(default=0)
    not_before_ms: int = field(default=0)
    is_in_doubt: bool = field(default=False)
    """An attempt was not answered, and may have been heard."""

    @property
    def api(self) -> str:
        """Kafka's name of the request."""
        return type(self.request).__name__.removesuffix("Request")

    @property
    def adds_to_transaction(self) -> bool:
        """Sent in order to add a partition or a group, which begins the transaction at its coordinator."""
        return self.priority is Priority.ADD_PARTITIONS_OR_OFFSETS

    @property
    def may_be_late(self) -> bool:
        """A copy that arrives late could be taken for one of the next transaction, in the same epoch."""
        return self.priority >= Priority.ADD_PARTITIONS_OR_OFFSETS


def find_coordinator(
    key_type: int, key: str, succeeded: Callable[[Message], None], result: TransactionalResult
) -> TransactionalRequest:
    place = f"transactional.id {key}" if key_type == TRANSACTION else f"group {key}"

    def refusals(body: Message) -> Iterable[Refusal]:
        found = coordinator_of(body, key)
        if found is None:
            return [Refusal(COORDINATOR_NOT_AVAILABLE, place)]
        return [Refusal(found.error_code, place, found.error_message)] if found.error_code else []

    request = FindCoordinatorRequest(key, key_type)
    return TransactionalRequest(Priority.FIND_COORDINATOR, request, None, refusals, succeeded, result)


def init_producer_id(
    transactional_id: str,
    transaction_timeout_ms: int,
    producer: tuple[int, int],
    succeeded: Callable[[Message], None],
    result: TransactionalResult,
) -> TransactionalRequest:
    """`producer` is (id, epoch) held already, (-1, -1) for none: with it the next epoch is asked for (KIP-360)."""
    request = InitProducerIdRequest(transactional_id, transaction_timeout_ms, *producer)
    return TransactionalRequest(
        Priority.INIT_PRODUCER_ID,
        request,
        (TRANSACTION, transactional_id),
        _own_error(f"transactional.id {transactional_id}"),
        succeeded,
        result,
    )


def add_partitions(
    transactional_id: str,
    producer: tuple[int, int],
    partitions: Iterable[TopicPartition],
    succeeded: Callable[[Message], None],
    result: TransactionalResult,
) -> TransactionalRequest:
    topics: dict[str, list[int]] = {}
    asked = sorted(partitions)
    for topic, partition in asked:
        topics.setdefault(topic, []).append(partition)
    request = AddPartitionsToTxnRequest(transactional_id, *producer, topics)

    def refusals(body: Message) -> Iterable[Refusal]:
        codes = {
            TopicPartition(str(topic.name), int(partition.partition_index)): int(partition.partition_error_code)
            for topic in body.results_by_topic_v3_and_below
            for partition in topic.results_by_partition
        }
        refused = [Refusal(code, str(place)) for place, code in codes.items() if code]
        return refused + _left_out(asked, codes)

    coordinator = (TRANSACTION, transactional_id)
    priority = Priority.ADD_PARTITIONS_OR_OFFSETS
    return TransactionalRequest(priority, request, coordinator, refusals, succeeded, result)


def add_offsets(
    transactional_id: str,
    producer: tuple[int, int],
    group_id: str,
    succeeded: Callable[[Message], None],
    result: TransactionalResult,
) -> TransactionalRequest:
    request = AddOffsetsToTxnRequest(transactional_id, *producer, group_id)
    return TransactionalRequest(
        Priority.ADD_PARTITIONS_OR_OFFSETS,
        request,
        (TRANSACTION, transactional_id),
        _own_error(f"group {group_id}"),
        succeeded,
        result,
    )


class GroupMetadata(NamedTuple):
    """Whose offsets are committed (KIP-447). Generation -1 and member "" commit for a group without members."""

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


def txn_offset_commit(
    transactional_id: str,
    producer: tuple[int, int],
    group: GroupMetadata,
    offsets: Mapping[TopicPartition, tuple[int, str | None]],
    transaction_version: int,
    succeeded: Callable[[Message], None],
    result: TransactionalResult,
) -> TransactionalRequest:
    """`offsets`: topic-partition → (next offset to read, a text that goes with it)."""
    topics: dict[str, Sequence[OffsetToCommit]] = {}
    for (topic, partition), (offset, text) in sorted(offsets.items(), key=lambda item: item[0]):
        topics[topic] = [*topics.get(topic, ()), OffsetToCommit(partition, offset, text)]
    request = TxnOffsetCommitRequest(
        transactional_id,
        *producer,
        group.group_id,
        topics,
        group.generation_id,
        group.member_id,
        group.group_instance_id,
        transaction_version,
    )

    def refusals(body: Message) -> Iterable[Refusal]:
        codes = {
            TopicPartition(str(topic.name), int(partition.partition_index)): int(partition.error_code)
            for topic in body.topics
            for partition in topic.partitions
        }
        refused = [
            Refusal(
                code,
                f"group {group.group_id}, {place}",
                _OFFSET_NOT_GRANTED if code == TopicAuthorizationError.error_code else None,
            )
            for place, code in codes.items()
            if code
        ]
        return refused + _left_out(offsets, codes)

    coordinator = (GROUP, group.group_id)
    return TransactionalRequest(Priority.TXN_OFFSET_COMMIT, request, coordinator, refusals, succeeded, result)


def end_txn(
    transactional_id: str,
    producer: tuple[int, int],
    committed: bool,
    transaction_version: int,
    succeeded: Callable[[Message], None],
    result: TransactionalResult,
) -> TransactionalRequest:
    request = EndTxnRequest(transactional_id, *producer, committed, transaction_version)
    return TransactionalRequest(
        Priority.END_TXN,
        request,
        (TRANSACTION, transactional_id),
        _own_error(f"transactional.id {transactional_id}"),
        succeeded,
        result,
    )


def _own_error(place: str) -> Callable[[Message], Iterable[Refusal]]:
    def refusals(body: Message) -> Iterable[Refusal]:
        return [Refusal(int(body.error_code), place)] if body.error_code else []

    return refusals


def _left_out(asked: Iterable[TopicPartition], answered: Container[TopicPartition]) -> list[Refusal]:
    """What an answer says nothing of may not have been done."""
    return [Refusal(COORDINATOR_NOT_AVAILABLE, str(place), _LEFT_OUT) for place in asked if place not in answered]
