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
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from spark_kafka_sink.admin.transaction_values import (
    UNKNOWN_ENDS,
    EndTxnOutcome,
    OpenByProducer,
    PartitionEnds,
    TransactionDescription,
    TransactionState,
)
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.sink.exactly_once.advice import operator_command
from spark_kafka_sink.sink.exactly_once.messages import (
    Decision,
    PartitionOffsets,
    TaskOutcome,
    TransactionLostError,
    is_task_id,
)

log = logging.getLogger(__name__)

_COMMITTED: Final = frozenset({TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT})
_COMPLETE: Final = frozenset({TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT})
_ENDING: Final = frozenset({TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT})
_NOT_ENDED: Final = frozenset({TransactionState.ONGOING, TransactionState.EMPTY})
_MOST_ROUNDS: Final = 4
"""A partition may lose its leader again while its markers are written."""
_MOST_NAMED: Final = 20
_NO_OFFSET_IS_LATER: Final = 2**63 - 1
_LEFT_OUT: Final = "Brokers of Kafka 4.3 leave out the end marker for a partition without a leader (KAFKA-20734)."


class MarkersCluster(Protocol):
    """The requests for end markers. Each returns when its answer is known, or raises KafkaError."""

    place: TopicPartition
    """The partition of the decision topic that holds the decisions of the prefix."""

    def ends(self, expected: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, PartitionEnds]:
        """Return where each partition ends, for both kinds of readers. If its log ends before the offset in `expected`,
        its leader is looked for again, for a while. Partitions of topics that are gone, or that the driver may not
        describe, are left out, with a warning.
        """
        ...

    def vanished(self, places: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        """Return those that are not in the cluster, as the driver last saw it: their topic was deleted, and perhaps
        created again with fewer partitions. Nothing else takes a partition away.
        """
        ...

    def unreadable(
        self, ends: Mapping[TopicPartition, int], transactional_ids: Iterable[str]
    ) -> Sequence[TopicPartition]:
        """Wait until readers under read_committed can read each partition up to its offset in `ends`. Return the
        partitions where they cannot although the coordinators call the transactions complete.
        """
        ...

    def open_transactions(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, OpenByProducer]:
        """Return each partition's open transactions. Partitions that the driver may not read are left out."""
        ...

    def ids_of(self, producer_ids: Iterable[int]) -> list[str]:
        """Return the transactional ids of these producers, as far as the driver may describe them."""
        ...

    def describe(
        self,
        transactional_ids: Iterable[str],
        given: Mapping[str, ProducerIdAndEpoch] = {},
        *,
        have_begun: bool = False,
    ) -> Mapping[str, TransactionDescription | None]:
        """`given`: an answer with an older epoch than this is not believed. `have_begun`: nor the same epoch without a
        transaction.
        """
        ...

    def init_producer_id(self, transactional_id: str, held: ProducerIdAndEpoch | None) -> ProducerIdAndEpoch:
        """As `Transactions.init_producer_id`."""
        ...

    def add_partitions(self, added: Mapping[OpenTransaction, Sequence[TopicPartition]]) -> None:
        """Begin transactions, by adding partitions."""
        ...

    def end(self, transactions: Sequence[OpenTransaction], *, committed: bool) -> list[EndTxnOutcome]: ...


class SeenPartitions(NamedTuple):
    """Those of a batch that the driver may describe, and the open transactions of those where it has looked for them.

    It looks if readers cannot read exactly up to the batch.
    """

    visible: Collection[TopicPartition] = ()
    open_: Mapping[TopicPartition, OpenByProducer] = {}


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

    def check_rows(
        self, outcomes: Sequence[TaskOutcome], offsets: Mapping[TopicPartition, PartitionOffsets]
    ) -> SeenPartitions:
        """Raise IllegalStateError if the end of a task's transaction would end records of an earlier one, too: the
        abort of the batch then ends both. Also if a partition has lost rows of the batch: the next run writes them.
        `offsets`: `all_offsets` of the outcomes.

        The partitions are asked for open transactions only if readers cannot read exactly up to the batch, if the
        partition ends before the batch does, or if the batch has fewer records than offsets: other producers write
        there too, the topic was created again, or a leader was elected that lacks records. Also if the batch begins
        the partition, because readers of a new topic are at offset 0 as well.
        """
        for place, (first, end, records) in offsets.items():
            if records > end - first:
                raise _lost_rows(outcomes[0], place, "the batch")
        if not offsets:
            return SeenPartitions()
        ends = self._cluster.ends({place: batch.end for place, batch in offsets.items()})
        for place in self._cluster.vanished([place for place in offsets if place not in ends]):
            raise _lost_rows(outcomes[0], place, "the batch")
        unclear = [place for place, found in ends.items() if _is_unclear(offsets[place], found)]
        if not unclear:
            return SeenPartitions(ends.keys())
        open_ = self._cluster.open_transactions(unclear)
        lost: dict[str, tuple[TaskOutcome, TopicPartition]] = {}
        for outcome in outcomes:
            for topic, ranges in outcome.offsets.items():
                for partition, first, end, _ in ranges:
                    place = TopicPartition(topic, partition)
                    self._refuse_open_before(outcome, place, first, open_.get(place, {}))
                    assert outcome.written is not None
                    own = outcome.written.transaction
                    if (place in ends and end > ends[place].log) or _lacks_rows(own, first, open_.get(place)):
                        lost.setdefault(own.transactional_id, (outcome, place))
        self._refuse_lost(lost)
        return SeenPartitions(ends.keys(), open_)

    def check_added(
        self,
        outcomes: Sequence[TaskOutcome],
        seen: SeenPartitions,
        described: Mapping[str, TransactionDescription | None],
    ) -> None:
        """Raise IllegalStateError if a transaction does not have a partition that its task wrote, or in which records
        of its epoch are open.

        Its coordinator has lost records of __transaction_state then, and has given the task the producer id and epoch
        of an earlier attempt once more. The leader of the partition has taken the rows for those of that attempt. Or
        only that attempt has written there: its rows would be taken for rows of the batch without their end marker.
        """
        visible = frozenset(seen.visible)
        for outcome in outcomes:
            found = None if outcome.written is None else described.get(outcome.written.transaction.transactional_id)
            if found is None:
                continue
            written = {TopicPartition(topic, each[0]) for topic, ranges in outcome.offsets.items() for each in ranges}
            unknown = (written & visible).union(_open_of(found.producer, seen.open_)) - found.topic_partitions
            for place in self._cluster.ends(dict.fromkeys(sorted(unknown), 0)) if unknown else ():  # still visible
                raise _unknown_rows(outcome, place, found.transactional_id)

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
        self, outcome: TaskOutcome, place: TopicPartition, first: int, open_: OpenByProducer
    ) -> None:
        assert outcome.written is not None
        own = outcome.written.transaction
        began = open_[own.producer_id].first_offset if own.producer_id in open_ else first
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
            driver = driver.with_producer(_next_producers(self._end({driver: [place]}, committed=True))[name])
        raise KafkaTimeoutError(f"The end marker of a decision of {name} is still missing in {place}. {_LEFT_OUT}")

    def refuse_successor(self, decided: OpenTransaction, next_: OpenTransaction) -> None:
        """Raise ProducerFencedError if another driver has taken over since the decision. If the end marker was left
        out, that driver may have aborted the decision, and readers can pass it then, too.

        A coordinator that gives out a new producer id shows the old one until the transaction is complete.
        """
        name = decided.transactional_id
        own = self._cluster.describe([name], {name: decided.producer})[name]
        if own is None or own.producer not in {decided.producer, next_.producer}:
            raise ProducerFencedError(f"{next_}: {ProducerFencedError.sentence}")

    # ---- after the tasks are committed -----------------------------------------------------------------------------

    def complete(self, decision: Decision, driver: OpenTransaction) -> None:
        """Wait until readers under read_committed can read all rows of a committed batch. Write end markers that are
        missing. Raises KafkaTimeoutError, KafkaError if a marker cannot be written, and TransactionLostError if it may
        have become the marker of an abort.
        """
        names, ends = [each.transactional_id for each in decision.transactions], decision.ends
        for round_ in range(_MOST_ROUNDS):
            behind = self._cluster.unreadable(ends, names) if ends else ()
            ends = {place: ends[place] for place in behind}
            missing = self._missing(decision, ends, driver.transaction_version, is_first=round_ == 0) if ends else []
            if not missing:
                return
            for committed in (True, False):
                self._write(decision, driver, [each for each in missing if each.committed is committed])
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
            place: {producer_id: each for producer_id, each in open_[place].items() if each.first_offset < end}
            for place, end in ends.items()
            if place in open_
        }
        hidden = [place for place in ends if place not in open_] if is_first else []
        of_batch = {each.transactional_id: each for each in decision.transactions}
        others = set().union(*blocking.values()) - {each.producer_id for each in of_batch.values()}
        older = [name for name in self._cluster.ids_of(others) if is_task_id(self._prefix, name)] if others else []
        missing, described = [], self._cluster.describe([*of_batch, *older])
        if ending := [name for name in older if (found := described[name]) is not None and found.state in _ENDING]:
            log.warning(
                "Batch %d: readers wait in %s until the coordinators of %s have written end markers.",
                *(decision.batch_id, _named(blocking), ", ".join(ending[:_MOST_NAMED])),
            )
        for name, found in described.items():
            left = of_batch.get(name)
            made = _missing_of(name, left, found, blocking, hidden if left is not None else [], transaction_version)
            if made is not None:
                missing.append(made)
        seen = {place for each in missing for place in each.places}.difference(hidden)
        if seen:
            log.warning("Batch %d: end markers are missing in %s. Writing them.", decision.batch_id, _named(seen))
        elif missing:
            log.info("Batch %d: end markers may be missing in %s.", decision.batch_id, _named(hidden))
        return missing

    def _write(self, decision: Decision, driver: OpenTransaction, missing: Sequence[_Missing]) -> None:
        """Write markers of one kind."""
        for is_of_batch in (True, False):
            chosen = {each.transaction: each.places for each in missing if each.is_of_batch is is_of_batch}
            committed = all(each.committed for each in missing)
            try:
                ended = self._end(chosen if committed else self._in_new_epochs(chosen), committed=committed)
                if committed and is_of_batch:
                    self._refuse_other_end(decision, driver, ended)
                _next_producers(ended)
            except KafkaError as error:
                if is_of_batch:
                    raise
                log.warning("%s: an older transaction stays open: %s", self._prefix, error)

    def _in_new_epochs(
        self, chosen: Mapping[OpenTransaction, Sequence[TopicPartition]]
    ) -> dict[OpenTransaction, Sequence[TopicPartition]]:
        """If this driver dies before it aborts them, the next one must not take them for markers of committed rows."""
        return {
            each.with_producer(self._cluster.init_producer_id(each.transactional_id, each.producer)): places
            for each, places in chosen.items()
        }

    def _end(
        self, added: Mapping[OpenTransaction, Sequence[TopicPartition]], *, committed: bool
    ) -> Sequence[EndTxnOutcome]:
        """End transactions in these partitions, once more."""
        if not added:
            return ()
        self._cluster.add_partitions(added)
        return self._cluster.end(list(added), committed=committed)

    # ---- markers of commits that have become those of aborts -------------------------------------------------------

    def refuse_late(
        self, decision: Decision, described: Mapping[str, TransactionDescription], late: Sequence[OpenTransaction]
    ) -> None:
        """Raise TransactionLostError if records of a decided batch may be gone. `late`: open transactions that late
        attempts of its tasks have begun since.

        The records are open in a partition of such a transaction, so that one marker ends both. Or a driver has begun a
        transaction for a marker and died, and it timed out. Only version 2 shows that.
        """
        decided = {each.transactional_id: each for each in decision.transactions}
        gone = [
            name
            for name, found in described.items()
            if found.state is TransactionState.COMPLETE_ABORT
            and is_for_marker(found.producer, decided[name], has_ended=True)
        ]
        open_ = self._cluster.open_transactions(list(decision.ends)) if late and decision.ends else {}
        for each in late:
            epochs = {decided[each.transactional_id].producer_epoch, each.producer_epoch}  # others were aborted before
            begun = ((place, found[each.producer_id]) for place, found in open_.items() if each.producer_id in found)
            if any(
                records.first_offset < decision.ends[place] and records.producer_epoch in epochs
                for place, records in begun
                if place in described[each.transactional_id].topic_partitions
            ):
                gone.append(each.transactional_id)
        if gone:
            raise self._lost_markers(decision, gone)

    def _refuse_other_end(self, decision: Decision, driver: OpenTransaction, ended: Sequence[EndTxnOutcome]) -> None:
        """Raise TransactionLostError if what was begun for a marker has ended otherwise: a late attempt aborted it. A
        successor of the driver would have committed it.
        """
        other = [each.transaction.transactional_id for each in ended if each.status in UNKNOWN_ENDS]
        own = self._cluster.describe([driver.transactional_id])[driver.transactional_id] if other else None
        if own is not None and own.producer == driver.producer:
            raise self._lost_markers(decision, other)

    def _lost_markers(self, decision: Decision, names: Sequence[str]) -> TransactionLostError:
        tasks = [task for task in decision.tasks if task.transaction.transactional_id in names]
        return TransactionLostError(
            f"Batch {decision.batch_id} of transactional.id.prefix={self._prefix!r} was decided, and rows of"
            f" {len(tasks)} of its {len(decision.tasks)} transactions may be missing in Kafka ("
            + "; ".join(
                f"partition {each.partition}: {each.rows} rows in {each.transaction}" for each in tasks[:_MOST_NAMED]
            )
            + f"). {_LEFT_OUT} A late task, or a timeout after the driver died, aborted what was begun to write it."
            " Compare the topic with the batch's input, write the missing rows by hand, then let the query go on:"
            f" {operator_command('accept', self._prefix, self._cluster.place.topic)}."
        )

    # ---- before and after a driver begins --------------------------------------------------------------------------

    def complete_last_decision(self, name: str, transaction_version: int) -> bool:
        """Write the end marker of the last decision of the driver `name` if it is missing. Called before the driver's
        next InitProducerId: after it the coordinator does not know any more how the decision ended.

        Return whether a transaction of the driver must end as an abort, by `complete_abort`. It is open for its
        coordinator, so that InitProducerId aborts it; or another driver began after it, and died. Nothing depends on
        what it wrote: no decision is acted on before readers can read it, and without its note a batch is only finished
        once more.
        """
        place = self._cluster.place
        open_ = self._cluster.open_transactions([place]).get(place)
        found = self._cluster.describe([name])[name] if open_ else None
        if not open_ or found is None or found.producer_id not in open_:
            return False
        if found.state in _COMPLETE:
            # it may have ended between the two answers: then nothing is missing
            again = self._cluster.open_transactions([place]).get(place, {})
            if again.get(found.producer_id) != open_[found.producer_id]:
                return False
            log.warning("The end marker of a decision of %s is missing in %s. Writing it.", name, place)
            driver = OpenTransaction.of(name, found.producer, transaction_version)
            _next_producers(self._end({driver: [place]}, committed=found.state in _COMMITTED))
        return found.state in _NOT_ENDED

    def is_deciding(self, driver: TransactionDescription) -> bool:
        """Return whether a decision of the driver is open, for its coordinator or in the partition."""
        if driver.state is TransactionState.ONGOING:
            return True
        place = self._cluster.place
        return driver.producer_id in self._cluster.open_transactions([place]).get(place, {})

    def complete_abort(self, driver: OpenTransaction) -> OpenTransaction | None:
        """Write the end marker of the transaction that the InitProducerId of `driver` aborted, if it is missing. Return
        the driver's next transaction; None if nothing was missing.
        """
        place = self._cluster.place
        if driver.producer_id not in self._cluster.open_transactions([place]).get(place, {}):
            return None
        ended = _next_producers(self._end({driver: [place]}, committed=False))
        return driver.with_producer(ended[driver.transactional_id])


def _missing_of(
    name: str,
    left: OpenTransaction | None,
    found: TransactionDescription | None,
    blocking: Mapping[TopicPartition, OpenByProducer],
    hidden: Sequence[TopicPartition],
    transaction_version: int,
) -> _Missing | None:
    """Return what a transactional id is to write: markers of commits, if some are missing, or else of aborts. `left` is
    its transaction in the batch.
    """
    producer_id = left.producer_id if left is not None else found.producer_id if found is not None else -1
    open_ = {place: each[producer_id] for place, each in blocking.items() if producer_id in each}
    if left is None and found is not None and found.state in _NOT_ENDED:
        # Its coordinator does not know these records: an end marker was left out before another attempt took the id, or
        # records of __transaction_state were lost.
        unknown = [place for place in open_ if place not in found.topic_partitions]
        transaction = OpenTransaction.of(name, found.producer, transaction_version)
        return _Missing(transaction, unknown, False, False) if unknown else None
    is_complete = found is not None and found.producer_id == producer_id and found.state in _COMPLETE
    if left is not None and open_ and not is_complete:
        raise KafkaTimeoutError(f"{left} is committed, and still open in {_named(open_)}. {_LEFT_OUT}")
    if found is None or not is_complete:
        return None
    last_epoch = left.producer_epoch if left is not None else _last_epoch(found, transaction_version)
    counts = [place for place, records in open_.items() if records.producer_epoch == last_epoch]
    places = [*counts, *hidden] or list(open_)
    if not places:
        return None
    transaction = OpenTransaction.of(name, found.producer, transaction_version)
    return _Missing(transaction, places, bool(counts or hidden), left is not None)


def _last_epoch(found: TransactionDescription, transaction_version: int) -> int | None:
    """Return the epoch of the records that the last transaction has committed, None if it has committed none. Records
    of an older transaction that are still open were aborted: those of a committed batch can be read before the next
    batch begins.
    """
    if found.state not in _COMMITTED:
        return None
    return found.producer_epoch - (1 if transaction_version >= 2 else 0)  # KIP-890: each end gives a new epoch


def is_for_marker(producer: ProducerIdAndEpoch, decided: OpenTransaction, *, has_ended: bool = False) -> bool:
    """Return whether it is in the epoch that version 2 gives after the end of `decided`, in which only drivers write: a
    task begins a later one. `has_ended`: in the next one, which the end of that transaction gives.
    """
    epoch = decided.producer_epoch + (2 if has_ended else 1)
    return decided.transaction_version >= 2 and producer == ProducerIdAndEpoch(decided.producer_id, epoch)


def _next_producers(ended: Iterable[EndTxnOutcome]) -> dict[str, ProducerIdAndEpoch]:
    """Return the next epochs by transactional id. Raises the first error."""
    for each in ended:
        if each.error is not None:
            raise each.error
    return {each.transaction.transactional_id: each.producer for each in ended}


def _is_unclear(batch: PartitionOffsets, found: PartitionEnds) -> bool:
    """Return whether a partition may have more than the rows of the batch from its first row on, or less."""
    has_gaps = batch.records < batch.end - batch.first
    return found.stable != batch.first or batch.first == 0 or has_gaps or found.log < batch.end


def _open_of(producer: ProducerIdAndEpoch, open_: Mapping[TopicPartition, OpenByProducer]) -> list[TopicPartition]:
    """Return where records of this epoch are open."""
    return [
        place
        for place, found in open_.items()
        if producer.producer_id in found and found[producer.producer_id].producer_epoch == producer.epoch
    ]


def _lacks_rows(own: OpenTransaction, first: int, open_: OpenByProducer | None) -> bool:
    """Return whether rows of a task's open transaction are missing in a partition. They began at offset `first` (0: it
    may be unknown). They are missing if the transaction is not open in the partition, or begins later there. `open_` is
    None if the driver may not see the partition's transactions.
    """
    if open_ is None:
        return False
    found = open_.get(own.producer_id)
    return found is None or 0 < first < found.first_offset


def _lost_rows(outcome: TaskOutcome, place: TopicPartition, whose: str) -> IllegalStateError:
    return IllegalStateError(
        f"Batch {outcome.batch_id} is not decided: {place} has lost rows of {whose} that it had acknowledged. The topic"
        " was deleted during the batch (if it was not created again, create it), or a replica that was not in sync"
        " became the leader (unclean.leader.election.enable). The batch must run again: that writes all its rows."
    )


def _unknown_rows(outcome: TaskOutcome, place: TopicPartition, name: str) -> IllegalStateError:
    return IllegalStateError(
        f"Batch {outcome.batch_id} is not decided: the coordinator of {name} does not know that it has written into"
        f" {place}. Records of __transaction_state were lost, and {place} may have taken the rows for those of an"
        " earlier attempt. The batch must run again."
    )


def _named(places: Iterable[TopicPartition]) -> str:
    return ", ".join(sorted(map(str, places))[:_MOST_NAMED])
