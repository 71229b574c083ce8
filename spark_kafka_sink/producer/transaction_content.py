"""What the current transaction holds, and the form in which another process can take it over. Guarded by the
manager's lock.
"""

from __future__ import annotations

from typing import NamedTuple

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.open_transaction import OpenTransaction


class PreparedTransaction(NamedTuple):
    """An open transaction whose records are all acknowledged: what another process needs to end it."""

    transaction: OpenTransaction
    is_empty: bool
    """Nothing was written in it. A broker refuses to commit such a transaction."""


class TransactionContent:
    """Partitions on their way into the transaction, and whether there is anything in it to be ended.

    Under transaction version 1 a partition is new, then asked for (AddPartitionsToTxn), then in. Under version 2 the
    first record puts it in.
    """

    def __init__(self) -> None:
        self._new: set[TopicPartition] = set()
        self._asked_for: set[TopicPartition] = set()
        self._inside: set[TopicPartition] = set()
        self._has_started = False
        self.is_in_doubt = False
        """Whether it has started is not known: what may have started it was not answered."""

    @property
    def is_empty(self) -> bool:
        return not self._has_started

    def __contains__(self, topic_partition: TopicPartition) -> bool:
        return topic_partition in self._inside

    def start(self) -> None:
        """Something is in the transaction that is not a record, or is there already."""
        self._has_started = True
        self.is_in_doubt = False

    def may_have_started(self) -> None:
        """It has to be ended in case it did."""
        if not self._has_started:
            self._has_started = self.is_in_doubt = True

    def add(self, topic_partition: TopicPartition, transaction_version: int) -> None:
        """A record of the partition belongs to the transaction."""
        if transaction_version >= 2:
            self._has_started = True
            self._inside.add(topic_partition)
        elif topic_partition not in self._inside and topic_partition not in self._asked_for:
            self._new.add(topic_partition)

    def ask_for_new(self) -> frozenset[TopicPartition]:
        """The partitions that are new; from now on they are asked for."""
        new = frozenset(self._new)
        self._asked_for |= new
        self._new.clear()
        return new

    def give_in(self, partitions: frozenset[TopicPartition]) -> None:
        """The coordinator has taken `partitions` in."""
        self._asked_for -= partitions
        self._inside |= partitions
        self.start()

    def forget(self) -> None:
        """The transaction has ended, or another begins."""
        self._new.clear()
        self._asked_for.clear()
        self._inside.clear()
        self._has_started = self.is_in_doubt = False
