"""A partition's log and the state of its producers (org.apache.kafka.storage.internals.log.ProducerStateManager)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kio.schema.errors import ErrorCode
from support.scripted_broker.batches import (
    NO_SEQUENCE,
    SEQUENCE_MODULUS,
    BatchHeader,
    BrokerRecord,
    check_batch,
    control_batch,
    place_batch,
    read_records,
)

_REMEMBERED_BATCHES = 5


class StoredBatch(NamedTuple):
    """A batch with its place in the log."""

    base_offset: int
    header: BatchHeader
    data: bytes

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.header.last_offset_delta + 1


class AppendResult(NamedTuple):
    """The place of the batch, or the reason why it was refused.

    A duplicate has the offset of the first copy. Its time of append is the first copy's latest timestamp, set by the
    broker or by the producer.
    """

    error_code: int
    base_offset: int = -1
    is_duplicate: bool = False
    log_append_time: int = -1


class AbortedTransaction(NamedTuple):
    """Its first record, and its end marker."""

    producer_id: int
    first_offset: int
    last_offset: int


class _Appended(NamedTuple):
    base_sequence: int
    last_sequence: int
    base_offset: int


@dataclass(slots=True)
class _ProducerState:
    epoch: int
    last_sequence: int = NO_SEQUENCE
    batches: deque[_Appended] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_BATCHES))


class PartitionLog:
    """Batches in order of offset."""

    def __init__(self) -> None:
        self.batches: list[StoredBatch] = []
        self.log_start_offset = 0
        self.duplicates = 0
        """The number of batches that were sent again and recognised."""
        self.aborted: list[AbortedTransaction] = []
        self.open_transactions: dict[int, int] = {}
        """The first offset by producer id."""
        self.producers: dict[int, _ProducerState] = {}

    @property
    def next_offset(self) -> int:
        return self.batches[-1].next_offset if self.batches else self.log_start_offset

    @property
    def last_stable_offset(self) -> int:
        """Return the offset where the first open transaction begins, or the end."""
        return min(self.open_transactions.values(), default=self.next_offset)

    def has_open(self, producer_id: int, epoch: int) -> bool:
        """Return whether a transaction of this producer and epoch is open here. Its coordinator may have ended it."""
        return producer_id in self.open_transactions and self.producers[producer_id].epoch == epoch

    def records(self) -> list[BrokerRecord]:
        """Return all records in the log without markers, decoded and checked."""
        return [record for batch in self.batches if not batch.header.is_control for record in read_records(batch.data)]

    def committed_records(self) -> list[BrokerRecord]:
        """Return the records that a reader under read_committed sees."""
        return [
            record for record in self.records() if record.offset < self.last_stable_offset and not self._is_lost(record)
        ]

    def _is_lost(self, record: BrokerRecord) -> bool:
        batch = next(batch for batch in self.batches if batch.base_offset <= record.offset < batch.next_offset)
        return batch.header.is_transactional and any(
            each.producer_id == batch.header.producer_id and each.first_offset <= record.offset < each.last_offset
            for each in self.aborted
        )

    def end_transaction(self, producer_id: int, epoch: int, committed: bool, leader_epoch: int) -> bool:
        """Append the marker; the producer continues in its epoch. Return False if the marker's epoch is too old."""
        state = self.producers.get(producer_id)
        if state is not None and epoch < state.epoch:
            return False
        offset = self.next_offset
        data = control_batch(producer_id, epoch, committed, 0)
        self.batches.append(StoredBatch(offset, check_batch(data), place_batch(data, offset, leader_epoch)))
        first_offset = self.open_transactions.pop(producer_id, None)
        if first_offset is not None and not committed:
            self.aborted.append(AbortedTransaction(producer_id, first_offset, offset))
        if state is None or state.epoch != epoch:
            self.producers[producer_id] = _ProducerState(epoch)
        return True

    def append(self, data: bytes, leader_epoch: int) -> AppendResult:
        """Check and append one batch. Raises BadBatchError if its bytes are wrong."""
        header = check_batch(data)
        if header.producer_id >= 0:
            refused = self._check_producer(header)
            if refused is not None:
                return refused
        base_offset = self.next_offset
        self.batches.append(StoredBatch(base_offset, header, place_batch(data, base_offset, leader_epoch)))
        if header.producer_id >= 0:
            self._remember(header, base_offset)
        if header.is_transactional:
            self.open_transactions.setdefault(header.producer_id, base_offset)
        return AppendResult(0, base_offset)

    def forget_producers(self) -> None:
        """Forget producers, as after producer.id.expiration.ms, or retention of all their records."""
        self.producers.clear()

    def restart_leader(self) -> None:
        """Forget all but the last batch of each producer, as the snapshot that a leader reads when it starts again."""
        for state in self.producers.values():
            while len(state.batches) > 1:
                state.batches.popleft()

    def delete_records_before(self, offset: int) -> None:
        """Delete records as retention does: whole batches, and the log then starts later."""
        self.batches = [batch for batch in self.batches if batch.next_offset > offset]
        self.log_start_offset = max(self.log_start_offset, offset)

    def _check_producer(self, header: BatchHeader) -> AppendResult | None:
        state = self.producers.get(header.producer_id)
        if state is None:
            return None  # a producer without state may begin anywhere
        if header.producer_epoch < state.epoch:
            return AppendResult(ErrorCode.invalid_producer_epoch)
        if header.producer_epoch > state.epoch:
            return None if header.base_sequence == 0 else AppendResult(ErrorCode.out_of_order_sequence_number)
        for batch in state.batches:
            if (batch.base_sequence, batch.last_sequence) == (header.base_sequence, header.last_sequence):
                self.duplicates += 1
                return AppendResult(0, batch.base_offset, is_duplicate=True, log_append_time=header.max_timestamp)
        if header.base_sequence != (state.last_sequence + 1) % SEQUENCE_MODULUS:
            return AppendResult(ErrorCode.out_of_order_sequence_number)
        return None

    def _remember(self, header: BatchHeader, base_offset: int) -> None:
        state = self.producers.get(header.producer_id)
        if state is None or state.epoch != header.producer_epoch:
            state = self.producers[header.producer_id] = _ProducerState(header.producer_epoch)
        state.last_sequence = header.last_sequence
        state.batches.append(_Appended(header.base_sequence, header.last_sequence, base_offset))
