"""Which batches of a fetch a reader may see: no control batches, and under read_committed none of an aborted
transaction. No state between fetches: each names the aborted transactions that it touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from spark_kafka_sink.record.decoder import DecodedBatch

_ABORT_KEY_TYPE: Final = 0
"""Type in the key of a control record: 0 abort, 1 commit (org.apache.kafka.common.record.ControlRecordType)."""


class AbortedTransaction(NamedTuple):
    """The producer, and the offset of the transaction's first record in the partition."""

    producer_id: int
    first_offset: int


def is_abort_marker(batch: DecodedBatch) -> bool:
    """Whether the batch ends a transaction that was aborted."""
    if not batch.is_control or not batch.records:
        return False
    key = batch.records[0].key
    return key is not None and int.from_bytes(key[2:4], "big") == _ABORT_KEY_TYPE


def visible_batches(
    batches: Iterable[DecodedBatch], aborted: Iterable[AbortedTransaction]
) -> Iterator[tuple[DecodedBatch, bool]]:
    """Each batch, in the order of offsets, with whether its records are to be seen."""
    waiting = sorted(aborted, key=lambda transaction: transaction.first_offset, reverse=True)
    aborting: set[int] = set()
    for batch in batches:
        while waiting and waiting[-1].first_offset <= batch.last_offset:
            aborting.add(waiting.pop().producer_id)
        if is_abort_marker(batch):
            aborting.discard(batch.producer_id)
        is_aborted = batch.is_transactional and batch.producer_id in aborting
        yield batch, not batch.is_control and not is_aborted
