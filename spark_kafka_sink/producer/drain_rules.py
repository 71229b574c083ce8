"""What the accumulator asks before and after it takes a batch from its queue: the seam between batches and their
sequence numbers.
"""

from __future__ import annotations

from typing import Protocol

from spark_kafka_sink.producer.producer_batch import ProducerBatch


class DrainRules(Protocol):
    """Called under the accumulator's lock; must not call back into the accumulator."""

    @property
    def is_completing(self) -> bool:
        """A transaction is ending, so that nothing lingers."""
        ...

    def must_wait(self, batch: ProducerBatch) -> bool:
        """The batch may not be sent yet, for the sake of order."""
        ...

    def on_drain(self, batch: ProducerBatch) -> None:
        """The batch is about to be sent: give it its sequence if it has none."""
        ...

    def on_split_part(self, part: ProducerBatch) -> None:
        """A part of a split batch is queued with the sequence that its records had."""
        ...


class NoDrainRules:
    """Without idempotence every batch goes as it comes."""

    is_completing = False

    def must_wait(self, batch: ProducerBatch) -> bool:  # noqa: ARG002
        return False

    def on_drain(self, batch: ProducerBatch) -> None:
        """Nothing to give it."""

    def on_split_part(self, part: ProducerBatch) -> None:
        """Nothing to keep of it."""
