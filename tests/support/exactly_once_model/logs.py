"""Partition logs and the cluster around the scripted broker's transaction coordinator, whose rules are held against
real brokers by tests/integration/admin/test_cluster_client.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.transaction_coordinator import TransactionCoordinator

from spark_kafka_sink.admin.transaction_values import OpenRecords
from spark_kafka_sink.common.errors import error_for_code


@dataclass(slots=True)
class Entry:
    """A record, and the end of its transaction: None while that is open."""

    producer_id: int
    producer_epoch: int
    value: Any
    is_committed: bool | None = None


class ModelLog:
    """A partition. Batches that are sent again under one sequence are stored once."""

    def __init__(self) -> None:
        self.changes = 0
        self.entries: list[Entry] = []
        self._epochs: dict[int, int] = {}
        """The last one of each producer id, also of an end marker."""
        self._sequences: dict[tuple[int, int, int], int] = {}

    def append(self, producer_id: int, epoch: int, sequence: int, values: list[Any]) -> int:
        """Return the index of the first entry. Raises InvalidProducerEpochError after a record or an end marker of a
        later epoch (org.apache.kafka.storage.internals.log.ProducerAppendInfo).
        """
        if epoch < self._epochs.get(producer_id, epoch):
            raise error_for_code(ErrorCode.invalid_producer_epoch)
        self._epochs[producer_id] = epoch
        sent = (producer_id, epoch, sequence)
        if sent not in self._sequences:
            self.changes += 1
            self._sequences[sent] = len(self.entries)
            self.entries += [Entry(producer_id, epoch, value) for value in values]
        return self._sequences[sent]

    def append_alone(self, value: Any) -> None:
        """Append outside any transaction."""
        self.changes += 1
        self.entries.append(Entry(-1, -1, value, True))

    def has_ongoing(self, producer_id: int, epoch: int) -> bool:
        """Return whether the leader takes records of this transaction without asking its coordinator (KIP-890)."""
        return self.open_.get(producer_id, OpenRecords(0, -1)).producer_epoch == epoch

    def end_transaction(self, producer_id: int, epoch: int, committed: bool, leader_epoch: int) -> bool:
        """Return False if the end marker is refused because its epoch is too old."""
        if epoch < self._epochs.get(producer_id, epoch):
            return False
        self._epochs[producer_id] = epoch
        for entry in self.entries:
            if entry.producer_id == producer_id and entry.is_committed is None:
                entry.is_committed = committed
                self.changes += 1
        return True

    @property
    def open_(self) -> dict[int, OpenRecords]:
        """The open transactions by producer id."""
        found: dict[int, OpenRecords] = {}
        for index, entry in enumerate(self.entries):
            if entry.is_committed is None:
                first, _ = found.get(entry.producer_id, (index, 0))
                found[entry.producer_id] = OpenRecords(first, entry.producer_epoch)
        return found

    @property
    def stable_end(self) -> int:
        return min((each.first_offset for each in self.open_.values()), default=len(self.entries))

    def committed(self) -> list[Any]:
        """Return all committed entries, also those that a reader cannot see yet."""
        return [entry.value for entry in self.entries if entry.is_committed]

    def visible(self) -> list[Any]:
        """Return the entries that a reader under read_committed sees: none behind an open transaction."""
        found = []
        for entry in self.entries:
            if entry.is_committed is None:
                break
            if entry.is_committed:
                found.append(entry.value)
        return found


@dataclass
class ModelCluster:
    """The part of a cluster that `TransactionCoordinator` needs."""

    version: int
    next_producer_id: int = 1
    logs: dict[tuple[str, int], ModelLog] = field(default_factory=dict)
    has_leaders: bool = True

    def __post_init__(self) -> None:
        self.finalized_features = {"transaction.version": self.version}
        self.transactions = TransactionCoordinator(self)  # type: ignore[arg-type]
        self.transactions.leaves_out_markers = True

    def log(self, topic: str, index: int) -> ModelLog:
        found = self.logs.get((topic, index))
        if found is None:
            found = self.logs[topic, index] = ModelLog()
        return found

    def partition(self, topic: str, index: int) -> Any:
        return SimpleNamespace(log=self.log(topic, index), leader_epoch=0, leader_id=0 if self.has_leaders else -1)
