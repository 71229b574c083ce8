"""What the current transaction of a producer contains, and whether it must be ended.

Reference: the partitions and the flags of org.apache.kafka.clients.producer.internals.TransactionManager (KIP-98,
KIP-890).
"""

from __future__ import annotations

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError


class CurrentTransaction:
    """The contents of the transaction, and whether it must be ended. Guarded by the lock of the manager.

    Under transaction version 1 a partition is new, then asked for (AddPartitionsToTxn), then in the transaction. Under
    version 2 the first record adds it.
    """

    def __init__(self) -> None:
        self.version = 1
        self.is_resumed = False
        """Another producer began it."""
        self.is_in_doubt = False
        """It may have started: an attempt of the request that starts it was not answered."""
        self.has_gap = False
        """A batch of this epoch was lost, or a request may still arrive. Under version 1 the next transaction takes the
        next epoch.
        """
        self.last_refusal: KafkaError | None = None
        """The last answer to a request that its records wait for, if it was an error."""
        self._new: set[TopicPartition] = set()
        self._asked_for: set[TopicPartition] = set()
        self._inside: set[TopicPartition] = set()
        self._has_started = False

    @property
    def is_empty(self) -> bool:
        return not self._has_started

    @property
    def needs_next_epoch(self) -> bool:
        """Whether the transaction after this one must not share its epoch. Under version 2 it never does."""
        return self.has_gap and self.version < 2 and not self.is_resumed

    def __contains__(self, topic_partition: TopicPartition) -> bool:
        return topic_partition in self._inside

    def begin(self, version: int) -> None:
        self.forget()
        self.version = version

    def resume(self, version: int, is_empty: bool) -> None:
        """Take over a transaction that another producer prepared."""
        self.begin(version)
        self.is_resumed = True
        if not is_empty:
            self.start()

    def start(self) -> None:
        """Note that the transaction contains, or contained before, something that is not a record."""
        self._has_started = True
        self.is_in_doubt = False

    def may_have_started(self) -> None:
        """Note that the transaction may have started, and so must be ended."""
        if not self._has_started:
            self._has_started = self.is_in_doubt = True

    def add(self, topic_partition: TopicPartition) -> None:
        """A record of the partition belongs to the transaction."""
        if self.version >= 2:
            self._has_started = True
            self._inside.add(topic_partition)
        elif topic_partition not in self._inside and topic_partition not in self._asked_for:
            self._new.add(topic_partition)

    def ask_for_new(self) -> frozenset[TopicPartition]:
        """Return the partitions that are new. From now on they are asked for."""
        new = frozenset(self._new)
        self._asked_for |= new
        self._new.clear()
        return new

    def confirm_added(self, partitions: frozenset[TopicPartition]) -> None:
        """The coordinator has taken `partitions` in."""
        self._asked_for -= partitions
        self._inside |= partitions
        self.start()

    def forget(self) -> None:
        """The transaction has ended, or another begins."""
        self._new.clear()
        self._asked_for.clear()
        self._inside.clear()
        self._has_started = self.is_in_doubt = self.has_gap = self.is_resumed = False
        self.last_refusal = None
