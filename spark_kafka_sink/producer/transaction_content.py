"""What the current transaction of a producer contains, and whether it must be ended.

Reference: the partitions and the flags of org.apache.kafka.clients.producer.internals.TransactionManager (KIP-98,
KIP-890).
"""

from __future__ import annotations

from collections.abc import Iterable

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.common.open_transaction import ProducerIdAndEpoch


class CurrentTransaction:
    """The contents of the transaction, and whether it must be ended. Guarded by the lock of the manager.

    Under transaction version 1 a partition is new, then asked for (AddPartitionsToTxn), then in the transaction. Under
    version 2 the first record adds it.
    """

    def __init__(self) -> None:
        self.version = 1
        self.is_resumed = False
        """Another producer began it."""
        self.is_prepared = False
        """Another producer may end it."""
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
        self._added_at: dict[TopicPartition | str, str] = {}
        """The partitions and groups that a coordinator has taken in, and the id of that node. Version 1."""
        self._of_version_1: ProducerIdAndEpoch | None = None
        """The epoch in which the last transaction of version 1 was."""

    @property
    def is_empty(self) -> bool:
        return not self._has_started

    def needs_next_epoch(self, cluster_version: int) -> bool:
        """Return whether the transaction after this one must not share its epoch. Under version 2 it never does, and
        so version 2 cannot follow on version 1 without another epoch.
        """
        return self.version < 2 and (self.has_gap or cluster_version >= 2) and not self.is_resumed

    def __contains__(self, topic_partition: TopicPartition) -> bool:
        return topic_partition in self._inside

    def begin(self, cluster_version: int, producer: ProducerIdAndEpoch) -> None:
        """Begin with the version of the cluster, or with version 1 if the epoch has transactions of version 1
        (KAFKA-18227): until the end marker is written, a leader takes records of version 2 in the same epoch for those
        of the transaction before.
        """
        self.forget()
        self.version = 2 if cluster_version >= 2 and producer != self._of_version_1 else 1
        if self.version < 2:
            self._of_version_1 = producer

    def resume(self, version: int, is_empty: bool) -> None:
        """Take over a transaction that another producer prepared. The next one has another epoch."""
        self.forget()
        self.version = version
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

    def was_added(self, parts: Iterable[TopicPartition | str], node_id: str) -> None:
        """The coordinator `node_id` has taken in these partitions or this group, under version 1."""
        self._added_at.update(dict.fromkeys(parts, node_id))

    def added_elsewhere(self, node_id: str) -> tuple[list[TopicPartition], list[str]]:
        """Return the partitions and the groups that another node than `node_id` has taken in."""
        parts = [part for part, taken_by in self._added_at.items() if taken_by != node_id]
        return [each for each in parts if not isinstance(each, str)], [each for each in parts if isinstance(each, str)]

    def forget(self) -> None:
        """The transaction has ended, or another begins."""
        self._new.clear()
        self._asked_for.clear()
        self._inside.clear()
        self._added_at.clear()
        self._has_started = self.is_in_doubt = self.has_gap = self.is_resumed = self.is_prepared = False
        self.last_refusal = None
