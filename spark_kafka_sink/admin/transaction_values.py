"""Transactions and what their coordinators say of them, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch


class EndTxnStatus(Enum):
    """How the end of a transaction went. The three after DONE tell nothing about what became of its records: the
    coordinator holds another transaction, or none, under this id.
    """

    DONE = "done"
    INVALID_TXN_STATE = "the transaction ended otherwise before, or nothing was in it"
    PRODUCER_FENCED = "a newer producer has taken over, or the transaction timed out"
    INVALID_PID_MAPPING = "the coordinator knows another producer id, or none"
    UNRESOLVED = "no clear answer came, and it may have taken effect"
    REFUSED = "the coordinator refused, without effect"


@dataclass(frozen=True, slots=True)
class EndTxnOutcome:
    """`producer` is that of the next transaction where the status is DONE and the transaction version 2, else the one
    that was sent. `error` is None where the status is DONE.
    """

    transaction: OpenTransaction
    status: EndTxnStatus
    producer: ProducerIdAndEpoch
    error: KafkaError | None = None


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
        """UNKNOWN for the name of a state that we have not heard of."""
        return next((state for state in cls if state.value == name), cls.UNKNOWN)


class TransactionDescription(NamedTuple):
    """`start_time_ms` is the broker's time of day, None where nothing was begun. `topic_partitions` are those that
    have no end marker yet.
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
