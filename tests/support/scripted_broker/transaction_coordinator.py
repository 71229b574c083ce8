"""The transactions of a cluster and their rules (org.apache.kafka.coordinator.transaction), for transaction versions 1
and 2 (KIP-890).

Errors are codes, 0 for none. `advance` sets the time, which ends transactions by their timeout and writes delayed
markers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kio.schema.errors import ErrorCode

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

MAX_EPOCH = 2**15 - 2
NOT_STARTED = -1
_NONE = -1
_NO_LEADER = -1


class Commit(NamedTuple):
    """An offset in a group."""

    offset: int
    metadata: str | None
    leader_epoch: int = -1


@dataclass(slots=True)
class Transaction:
    """One transactional id. `partitions` and `groups` are those without an end marker yet."""

    transactional_id: str
    producer_id: int
    timeout_ms: int
    epoch: int = _NONE
    last_epoch: int = _NONE
    previous_producer_id: int = _NONE
    state: str = "Empty"
    start_ms: int = NOT_STARTED
    client_version: int = 1
    partitions: set[tuple[str, int]] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    markers_due_ms: int = 0
    pending_offsets: dict[str, dict[tuple[str, int], Commit]] = field(default_factory=dict)

    @property
    def is_committing(self) -> bool:
        return self.state.endswith("Commit")


class TransactionCoordinator:
    """All transactional ids of the cluster, for all coordinating nodes."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        self._cluster = cluster
        self.transactions: dict[str, Transaction] = {}
        self.offsets: dict[str, dict[tuple[str, int], Commit]] = {}
        """Committed offsets by group and partition."""
        self.marker_delay_ms = 0
        """How long after EndTxn's answer the end markers are written."""
        self.max_timeout_ms = 15 * 60_000
        self.leaves_out_markers = False
        """Whether it writes no end marker into a partition without a leader, as Kafka 4.3 (KAFKA-20734)."""

    def advance(self, now_ms: int) -> None:
        for transaction in self.transactions.values():
            is_late = transaction.start_ms + transaction.timeout_ms <= now_ms
            if transaction.state == "Ongoing" and is_late:
                self._fence(transaction, now_ms)
            if transaction.state.startswith("Prepare") and transaction.markers_due_ms <= now_ms:
                self._complete(transaction)

    # ---- producer ids ------------------------------------------------------------------------------------------------

    def new_producer_id(self) -> int:
        self._cluster.next_producer_id += 1
        return self._cluster.next_producer_id - 1

    def init_producer_id(self, key: str, timeout_ms: int, claimed: tuple[int, int], now_ms: int) -> int:
        """Begin the next epoch, which is then in `transactions`."""
        if not key:
            return ErrorCode.invalid_request
        if not 0 < timeout_ms <= self.max_timeout_ms:
            return ErrorCode.invalid_transaction_timeout
        held = self.transactions.get(key)
        if held is None:
            held = self.transactions[key] = Transaction(key, self.new_producer_id(), timeout_ms)
        if claimed[0] >= 0 and not _may_claim(held, claimed):
            return ErrorCode.producer_fenced
        if held.state.startswith("Prepare"):
            return ErrorCode.concurrent_transactions
        if held.state == "Ongoing":
            self._fence(held, now_ms)
            self.advance(now_ms)
            return ErrorCode.concurrent_transactions
        held.timeout_ms = timeout_ms
        held.state, held.start_ms = "Empty", NOT_STARTED
        return self._next_epoch(held, claimed)

    def _next_epoch(self, held: Transaction, claimed: tuple[int, int]) -> int:
        has_claim = claimed[0] >= 0
        if held.epoch >= MAX_EPOCH and (not has_claim or claimed[1] == held.epoch):
            held.previous_producer_id, held.producer_id = held.producer_id, self.new_producer_id()
            held.last_epoch, held.epoch = held.epoch if has_claim else _NONE, 0
        elif not has_claim or held.epoch == _NONE or claimed[1] == held.epoch:
            held.last_epoch = held.epoch if has_claim else _NONE
            held.epoch += 1
        elif claimed[1] != held.last_epoch:
            return ErrorCode.producer_fenced
        return 0

    # ---- begin -------------------------------------------------------------------------------------------------------

    def check(self, key: str, producer_id: int, epoch: int) -> int:
        """Return the error code if this producer may not add to the transaction now."""
        held = self.transactions.get(key)
        if held is None or held.producer_id != producer_id:
            return ErrorCode.invalid_producer_id_mapping
        if held.epoch != epoch:
            return ErrorCode.producer_fenced
        return ErrorCode.concurrent_transactions if held.state.startswith("Prepare") else 0

    def begin(self, key: str, now_ms: int, version: int) -> Transaction:
        """Return the transaction, open. Call `check` before."""
        held = self.transactions[key]
        if held.state != "Ongoing":
            held.state, held.start_ms = "Ongoing", now_ms
        held.client_version = version
        return held

    # ---- end ---------------------------------------------------------------------------------------------------------

    def end(self, key: str, producer_id: int, epoch: int, committed: bool, version: int, now_ms: int) -> int:
        """Prepare to commit or abort, as for EndTxn; a repetition changes nothing. Only the `version` of the request
        decides about the rules (TransactionCoordinator.endTransaction).
        """
        held = self.transactions.get(key)
        if held is None:
            return ErrorCode.invalid_producer_id_mapping
        if version >= 2 and held.state.startswith("Prepare"):  # checked before anything else
            return ErrorCode.concurrent_transactions
        is_retry = version >= 2 and held.epoch == epoch + 1 and held.producer_id == producer_id
        is_overflow_retry = (
            version >= 2 and (held.previous_producer_id, held.epoch) == (producer_id, 0) and epoch == MAX_EPOCH
        )
        if held.producer_id != producer_id and not is_overflow_retry:
            return ErrorCode.invalid_producer_id_mapping
        is_retry = is_retry or is_overflow_retry
        is_current = held.epoch == epoch or (is_retry and held.state.startswith("Complete"))
        if not is_current:
            return ErrorCode.producer_fenced
        if held.state.startswith("Prepare"):
            return ErrorCode.concurrent_transactions
        is_same_outcome = held.is_committing == committed
        if held.state.startswith("Complete") and (version < 2 or is_retry):
            return 0 if is_same_outcome else ErrorCode.invalid_txn_state
        if held.state != "Ongoing" and (committed or version < 2):
            return ErrorCode.invalid_txn_state
        self._prepare(held, committed, version, now_ms)  # version 2 may abort an empty transaction
        return 0

    def _prepare(self, held: Transaction, committed: bool, version: int, now_ms: int) -> None:
        held.state = "PrepareCommit" if committed else "PrepareAbort"
        held.client_version = version
        if version >= 2:
            held.last_epoch, held.epoch = held.epoch, held.epoch + 1
        held.markers_due_ms = now_ms + self.marker_delay_ms
        if self.marker_delay_ms == 0:
            self._complete(held)

    def _fence(self, held: Transaction, now_ms: int) -> None:
        """Abort in an epoch that no producer gets."""
        held.state = "PrepareAbort"
        held.last_epoch, held.epoch = _NONE, held.epoch + 1
        held.client_version = 2 if self._cluster.finalized_features.get("transaction.version", 0) >= 2 else 1
        held.markers_due_ms = now_ms + self.marker_delay_ms

    def _complete(self, held: Transaction) -> None:
        committed, ended = held.is_committing, True
        for topic, index in sorted(held.partitions):
            partition = self._cluster.partition(topic, index)
            if partition is not None and not (self.leaves_out_markers and partition.leader_id == _NO_LEADER):
                log = partition.log
                ended &= log.end_transaction(held.producer_id, held.epoch, committed, partition.leader_epoch)
        if not ended:  # it stays so: TransactionMarkerRequestCompletionHandler gives up after INVALID_PRODUCER_EPOCH
            return
        for group in sorted(held.groups):
            commits = held.pending_offsets.pop(group, {})
            if committed:
                self.offsets.setdefault(group, {}).update(commits)
        held.partitions.clear()
        held.groups.clear()
        held.state = "CompleteCommit" if committed else "CompleteAbort"
        if held.epoch > MAX_EPOCH:
            held.previous_producer_id, held.producer_id = held.producer_id, self.new_producer_id()
            held.last_epoch, held.epoch = held.epoch, 0


def _may_claim(held: Transaction, claimed: tuple[int, int]) -> bool:
    producer_id, epoch = claimed
    is_rotated = producer_id == held.previous_producer_id and epoch >= MAX_EPOCH
    return held.epoch == _NONE or producer_id == held.producer_id or is_rotated
