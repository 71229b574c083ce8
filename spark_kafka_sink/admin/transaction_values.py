"""Transactions and their states, as plain values. This module imports no client, because tasks do without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch


class EndTxnStatus(Enum):
    """The result of ending a transaction. After the three that follow DONE (`UNKNOWN_ENDS`) the coordinator has another
    transaction, or none, under this id.
    """

    DONE = "done"
    INVALID_TXN_STATE = "the transaction ended otherwise before, or nothing was in it"
    PRODUCER_FENCED = "a newer producer has taken over, or the transaction timed out"
    INVALID_PID_MAPPING = "the coordinator knows another producer id, or none"
    UNRESOLVED = "no clear answer came, and it may have taken effect"
    REFUSED = "the coordinator refused, without effect"


UNKNOWN_ENDS: Final = frozenset(
    {EndTxnStatus.INVALID_TXN_STATE, EndTxnStatus.PRODUCER_FENCED, EndTxnStatus.INVALID_PID_MAPPING}
)
"""The results that do not say whether the transaction's records were committed."""


@dataclass(frozen=True, slots=True)
class EndTxnOutcome:
    """`producer` belongs to the next transaction if the status is DONE and the transaction version is 2. Otherwise it
    is the producer of the request. `error` is None if the status is DONE. `is_in_doubt`: an earlier request may have
    ended it, whatever the status says.
    """

    transaction: OpenTransaction
    status: EndTxnStatus
    producer: ProducerIdAndEpoch
    error: KafkaError | None = None
    is_in_doubt: bool = False


class TransactionState(Enum):
    """A transaction's state, in Kafka's words (KIP-664)."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"
    UNKNOWN = "Unknown"

    @classmethod
    def of(cls, name: str) -> TransactionState:
        """Return the state of that name, UNKNOWN if the name is new."""
        return next((state for state in cls if state.value == name), cls.UNKNOWN)


class TransactionDescription(NamedTuple):
    """`start_time_ms` is ms since the epoch on the broker's clock, None if no transaction was begun. `topic_partitions`
    are the partitions without an end marker yet.
    """

    transactional_id: str
    state: TransactionState
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    start_time_ms: int | None
    topic_partitions: frozenset[TopicPartition]

    @property
    def producer(self) -> ProducerIdAndEpoch:
        return ProducerIdAndEpoch(self.producer_id, self.producer_epoch)


class TransactionListing(NamedTuple):
    transactional_id: str
    state: TransactionState
    producer_id: int
    coordinator: Node


class PartitionEnds(NamedTuple):
    """Offsets of a partition: `stable` is the end for readers under read_committed, `log` that of all records."""

    stable: int
    log: int


class OpenRecords(NamedTuple):
    """The records of one producer in one partition whose transaction is open there. `producer_epoch` is the one in
    which the last of them was written.
    """

    first_offset: int
    producer_epoch: int


OpenByProducer = Mapping[int, OpenRecords]
"""The open transactions of one partition, by producer id."""
