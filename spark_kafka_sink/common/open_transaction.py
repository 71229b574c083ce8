"""A producer's id and epoch, and an open transaction of that producer. Plain values.

A coordinator checks only these values: any process that has them can end the transaction (KIP-98, KIP-890).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class ProducerIdAndEpoch(NamedTuple):
    """A producer id and epoch, given by a coordinator.

    A newer producer of the same transactional id has a higher epoch, or another id.
    """

    producer_id: int
    epoch: int

    @property
    def is_valid(self) -> bool:
        return self.producer_id >= 0


NO_PRODUCER: Final = ProducerIdAndEpoch(-1, -1)


class OpenTransaction(NamedTuple):
    """The values that end a transaction.

    The transaction began under `transaction_version`, 1 or 2.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    transaction_version: int

    @classmethod
    def of(cls, transactional_id: str, producer: ProducerIdAndEpoch, transaction_version: int) -> OpenTransaction:
        return cls(transactional_id, producer.producer_id, producer.epoch, transaction_version)

    @property
    def producer(self) -> ProducerIdAndEpoch:
        """The producer that began the transaction. Compare it to find out whether another producer has taken over."""
        return ProducerIdAndEpoch(self.producer_id, self.producer_epoch)

    def with_producer(self, producer: ProducerIdAndEpoch) -> OpenTransaction:
        """Return the transaction that `producer` begins next under the same transactional id."""
        return self.of(self.transactional_id, producer, self.transaction_version)

    def __str__(self) -> str:
        epoch = f"epoch {self.producer_epoch}, transaction version {self.transaction_version}"
        return f"transactional id {self.transactional_id!r} (producer id {self.producer_id}, {epoch})"
