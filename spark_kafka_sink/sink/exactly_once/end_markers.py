"""The end markers of a batch's transactions, which brokers may leave out.

A coordinator of Kafka 4.3 leaves out the end marker for a partition that has no leader at that moment, and calls the
transaction complete (KAFKA-20734). Its records stay open in that partition: readers under read_committed see
neither them nor any record behind them. The next end marker of the same producer id ends them, whatever it says. It
would commit aborted records together with the next batch, or abort committed ones together with a batch that failed.

So the driver looks before it decides a batch, and after it has committed one. A missing marker is written by another
transaction of the same id, which has the partition and no records. To see whose transactions are open the driver needs
READ on the topic; without it the driver writes a marker more rather than one too few.

Decides only: every request goes through the `MarkersCluster`. No state. One thread, the driver's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from spark_kafka_sink.admin.transaction_values import EndTxnOutcome, TransactionDescription, TransactionState
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError, KafkaTimeoutError
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.sink.exactly_once.messages import Decision, PartitionOffsets, TaskOutcome, is_task_id

log = logging.getLogger(__name__)

_COMMITTED: Final = frozenset({TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT})
_COMPLETE: Final = frozenset({TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT})
_MOST_ROUNDS: Final = 4
"""A partition may lose its leader again while its markers are written."""
_MOST_NAMED: Final = 20
_NO_OFFSET_IS_LATER: Final = 2**63 - 1
_LEFT_OUT: Final = "Brokers of Kafka 4.3 leave out the end marker for a partition without a leader (KAFKA-20734)."


class MarkersCluster(Protocol):
    """The requests for end markers. Each returns when its answer is known, or raises KafkaError."""

    place: TopicPartition
    """The partition of the decision topic that holds the decisions of the prefix."""

    def stable_ends(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return how far readers under read_committed can read each partition. Partitions of topics that are gone, or
        that the driver may not describe, are left out, with a warning.
        """
        ...

    def log_ends(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offset after the last record of each partition. Some are left out as by `stable_ends`."""
        ...

    def unreadable(
        self, ends: Mapping[TopicPartition, int], transactional_ids: Iterable[str]
    ) -> Sequence[TopicPartition]:
        """Wait until readers under read_committed can read each partition up to its offset in `ends`. Return the
        partitions where they cannot although the coordinators call the transactions complete.
        """
        ...

    def open_transactions(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, Mapping[int, int]]:
        """Return each partition's open transactions: producer id → offset of its first record. Partitions that the
        driver may not read are left out.
        """
        ...

    def ids_of(self, producer_ids: Iterable[int]) -> list[str]:
        """Return the transactional ids of these producers, as far as the driver may describe them."""
        ...

    def describe(self, transactional_ids: Iterable[str]) -> Mapping[str, TransactionDescription | None]: ...

    def add_partitions(self, added: Mapping[OpenTransaction, Sequence[TopicPartition]]) -> None:
        """Begin transactions, by adding partitions."""
        ...

    def end(self, transactions: Sequence[OpenTransaction], *, committed: bool) -> list[EndTxnOutcome]: ...


class _Missing(NamedTuple):
    """A transaction that is to write end markers into partitions."""

    transaction: OpenTransaction
    places: Sequence[TopicPartition]
    committed: bool
    is_of_batch: bool


class EndMarkers:
    """Those of one prefix."""

    def __init__(self, prefix: str, cluster: MarkersCluster) -> None:
        self._prefix = prefix
        self._cluster = cluster

    # ---- before a batch is decided ---------------------------------------------------------------------------------

    def check_rows(self, outcomes: Sequence[TaskOutcome], offsets: Mapping[TopicPartition, PartitionOffsets]) -> None:
        """Raise IllegalStateError if the end of a task's transaction would end records of an earlier one, too: the
        abort of the batch then ends both. Also if a partition has lost rows of the batch: the next run writes them.
        `offsets`: `all_offsets` of the outcomes.

        The partitions are asked only if readers cannot read exactly up to the batch, or if the batch has fewer records
        than offsets: other producers write there too, or the topic was created again. Also if the batch begins the
        partition, because readers of a new topic are at offset 0 as well.
        """
        for place, (first, end, records) in offsets.items():
            if records > end - first:
                raise _lost_rows(outcomes[0], place, "the batch")
        stable = self._cluster.stable_ends(list(offsets)) if offsets else {}
        unclear = [
            place
            for place, (first, end, records) in offsets.items()
            if place in stable and (stable[place] != first or first == 0 or records < end - first)
        ]
        if not unclear:
            return
        open_, ends = self._cluster.open_transactions(unclear), self._cluster.log_ends(unclear)
        lost: dict[str, tuple[TaskOutcome, TopicPartition]] = {}
        for outcome in outcomes:
            for topic, ranges in outcome.offsets.items():
                for partition, first, end, _ in ranges:
                    place = TopicPartition(topic, partition)
                    self._refuse_open_before(outcome, place, first, open_.get(place, {}))
                    assert outcome.written is not None
                    own = outcome.written.transaction
                    if own.producer_id not in open_.get(place, (own.producer_id,)) or end > ends.get(place, end):
                        lost.setdefault(own.transactional_id, (outcome, place))
        self._refuse_lost(lost)

    def _refuse_lost(self, lost: Mapping[str, tuple[TaskOutcome, TopicPartition]]) -> None:
        """Refuse rows that are open for their coordinator and not in their partition. Others were ended, by a timeout
        or by another party, which is the caller's to find.
        """
        for name, found in self._cluster.describe(lost).items() if lost else ():
            outcome, place = lost[name]
            assert outcome.written is not None
            own = outcome.written.transaction
            if found is not None and found.state is TransactionState.ONGOING and found.producer == own.producer:
                raise _lost_rows(outcome, place, name)

    def _refuse_open_before(
        self, outcome: TaskOutcome, place: TopicPartition, first: int, open_: Mapping[int, int]
    ) -> None:
        assert outcome.written is not None
        own = outcome.written.transaction
        began = open_.get(own.producer_id, first)
        if began < first:
            raise IllegalStateError(
                f"Batch {outcome.batch_id} is not decided: it would commit records of an earlier transaction of"
                f" {own.transactional_id}, too. They are open in {place} from offset {began} on; those of this batch"
                f" begin at {first}. {_LEFT_OUT} The batch must run again: its abort ends both."
            )

    # ---- after the decision is committed, and before any task is ---------------------------------------------------

    def complete_decision(self, driver: OpenTransaction, offset: int) -> OpenTransaction:
        """Wait until readers under read_committed can read the decision at `offset` (-1: not known), so that the next
        driver finds it. Write its end marker if it is missing. Return the driver's next transaction.

        A marker that is not written aborts the decision, and nothing depends on it yet. Raises KafkaTimeoutError, and
        KafkaError if the marker cannot be written.
        """
        place, name = self._cluster.place, driver.transactional_id
        end = offset + 1 if offset >= 0 else _NO_OFFSET_IS_LATER
        for _ in range(_MOST_ROUNDS):
            if not self._cluster.unreadable({place: end}, [name]):
                return driver
            if driver.producer_id not in self._cluster.open_transactions([place]).get(place, {}):
                return driver  # a decision of another query is open before it
            log.warning("The end marker of a decision of %s is missing in %s. Writing it.", name, place)
            driver = driver.with_producer(self._end({driver: [place]}, committed=True)[name])
        raise KafkaTimeoutError(f"The end marker of a decision of {name} is still missing in {place}. {_LEFT_OUT}")

    # ---- after the tasks are committed -----------------------------------------------------------------------------

    def complete(self, decision: Decision, transaction_version: int) -> None:
        """Wait until readers under read_committed can read all rows of a committed batch. Write end markers that are
        missing. Raises KafkaTimeoutError, and KafkaError if a marker cannot be written.
        """
        names, ends = [each.transactional_id for each in decision.transactions], decision.ends
        for round_ in range(_MOST_ROUNDS):
            behind = self._cluster.unreadable(ends, names) if ends else ()
            ends = {place: ends[place] for place in behind}
            missing = self._missing(decision, ends, transaction_version, is_first=round_ == 0) if ends else []
            if not missing:
                return
            for committed in (True, False):
                self._write([each for each in missing if each.committed is committed], committed=committed)
        raise KafkaTimeoutError(f"End markers of committed rows are still missing in {_named(ends)}. {_LEFT_OUT}")

    def _missing(
        self, decision: Decision, ends: Mapping[TopicPartition, int], transaction_version: int, *, is_first: bool
    ) -> list[_Missing]:
        """Return what is to write markers: the transactions of the batch, and older ones of the prefix that are open
        before the `ends`. What is left then belongs to other producers.

        Where the driver may not see whose transactions are open, all transactions of the batch write a marker, once.
        """
        open_ = self._cluster.open_transactions(list(ends))
        blocking = {
            place: {producer_id for producer_id, first in open_[place].items() if first < end}
            for place, end in ends.items()
            if place in open_
        }
        hidden = [place for place in ends if place not in open_] if is_first else []
        of_batch = {each.transactional_id: each for each in decision.transactions}
        others = set().union(*blocking.values()) - {each.producer_id for each in of_batch.values()}
        older = [name for name in self._cluster.ids_of(others) if is_task_id(self._prefix, name)] if others else []
        missing = []
        for name, found in self._cluster.describe([*of_batch, *older]).items():
            left = of_batch.get(name)
            producer_id = left.producer_id if left is not None else found.producer_id if found is not None else -1
            places = [place for place, producer_ids in blocking.items() if producer_id in producer_ids]
            is_complete = found is not None and found.producer_id == producer_id and found.state in _COMPLETE
            if left is not None and places and not is_complete:
                raise KafkaTimeoutError(f"{left} is committed, and still open in {_named(places)}. {_LEFT_OUT}")
            if left is not None:
                places += hidden
            if found is not None and is_complete and places:
                transaction = OpenTransaction.of(name, found.producer, transaction_version)
                committed = left is not None or found.state in _COMMITTED
                missing.append(_Missing(transaction, places, committed, left is not None))
        seen = {place for each in missing for place in each.places}.difference(hidden)
        if seen:
            log.warning("Batch %d: end markers are missing in %s. Writing them.", decision.batch_id, _named(seen))
        elif missing:
            log.info("Batch %d: end markers may be missing in %s.", decision.batch_id, _named(hidden))
        return missing

    def _write(self, missing: Sequence[_Missing], *, committed: bool) -> None:
        for is_of_batch in (True, False):
            chosen = {each.transaction: each.places for each in missing if each.is_of_batch is is_of_batch}
            try:
                self._end(chosen, committed=committed)
            except KafkaError as error:
                if is_of_batch:
                    raise
                log.warning("%s: an older transaction stays open: %s", self._prefix, error)

    def _end(
        self, added: Mapping[OpenTransaction, Sequence[TopicPartition]], *, committed: bool
    ) -> dict[str, ProducerIdAndEpoch]:
        """End transactions in these partitions, once more. Return the next epochs by transactional id."""
        if not added:
            return {}
        self._cluster.add_partitions(added)
        ended = self._cluster.end(list(added), committed=committed)
        for each in ended:
            if each.error is not None:
                raise each.error
        return {each.transaction.transactional_id: each.producer for each in ended}

    # ---- before and after a driver begins --------------------------------------------------------------------------

    def complete_last_decision(self, name: str, transaction_version: int) -> bool:
        """Write the end marker of the last decision of the driver `name` if it is missing. Called before the driver's
        next InitProducerId: after it the coordinator does not know any more how the decision ended.

        Return whether the driver's transaction is open, so that InitProducerId aborts it.
        """
        place = self._cluster.place
        open_ = self._cluster.open_transactions([place]).get(place)
        found = self._cluster.describe([name])[name] if open_ else None
        if not open_ or found is None or found.producer_id not in open_:
            return False
        if found.state in _COMPLETE:
            log.warning("The end marker of a decision of %s is missing in %s. Writing it.", name, place)
            driver = OpenTransaction.of(name, found.producer, transaction_version)
            self._end({driver: [place]}, committed=found.state in _COMMITTED)
        return found.state is TransactionState.ONGOING

    def complete_abort(self, driver: OpenTransaction) -> OpenTransaction | None:
        """Write the end marker of the transaction that the InitProducerId of `driver` aborted, if it is missing. Return
        the driver's next transaction; None if nothing was missing.
        """
        place = self._cluster.place
        if driver.producer_id not in self._cluster.open_transactions([place]).get(place, {}):
            return None
        ended = self._end({driver: [place]}, committed=False)
        return driver.with_producer(ended[driver.transactional_id])


def _lost_rows(outcome: TaskOutcome, place: TopicPartition, whose: str) -> IllegalStateError:
    return IllegalStateError(
        f"Batch {outcome.batch_id} is not decided: {place} has lost rows of {whose} that it had acknowledged. The topic"
        " was deleted and created again during the batch, or a replica that was not in sync became the leader"
        " (unclean.leader.election.enable). The batch must run again: that writes all its rows."
    )


def _named(places: Iterable[TopicPartition]) -> str:
    return ", ".join(sorted(map(str, places))[:_MOST_NAMED])
