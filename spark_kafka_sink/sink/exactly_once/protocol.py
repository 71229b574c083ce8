"""The driver's side of exactly-once delivery: fence other drivers, finish the decided batch, decide, commit, abort.

Tasks leave their transactions open, and the driver ends them: a broker asks only for transactional id, producer id and
epoch (KIP-98, KIP-890). A batch counts because of one record, the decision. The driver writes it in a transaction of
its own before it commits any task's transaction. After the decision the batch can only be finished, by this driver or
by the next one, even if the rows come in other partitions then. The proof is in docs/exactly-once.md.

This module only decides: every request goes through the `DriverCluster`. One thread, the driver's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from spark_kafka_sink.admin.group_offsets import CommittedOffset
from spark_kafka_sink.admin.transaction_values import (
    UNKNOWN_ENDS,
    EndTxnOutcome,
    EndTxnStatus,
    TransactionDescription,
    TransactionState,
)
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.record.fingerprint import MODULUS
from spark_kafka_sink.sink.exactly_once.advice import (
    finish_advice,
    moved_decisions,
    operator_command,
    timeout_advice,
    unknown_advice,
)
from spark_kafka_sink.sink.exactly_once.end_markers import EndMarkers, MarkersCluster, is_for_marker
from spark_kafka_sink.sink.exactly_once.messages import (
    BatchStart,
    Decision,
    FirstUse,
    TaskOutcome,
    TaskTransaction,
    TransactionLostError,
    all_offsets,
    check_agreement,
    check_same_batch,
    driver_id,
    is_task_id,
)

log = logging.getLogger(__name__)

USABLE_SHARE: Final = 0.8
"""The most of transaction.timeout.ms that may be over when the batch is decided. The rest must be enough for the
commit, and for a restart if the driver dies during it.
"""
Descriptions = Mapping[str, TransactionDescription | None]
"""By transactional id."""
_STAYS_OPEN: Final = frozenset({EndTxnStatus.REFUSED, EndTxnStatus.UNRESOLVED})


class PrefixRecords(NamedTuple):
    """What the decision topic knows of a prefix. `first_use` may be None if there is a decision."""

    decision: Decision | None
    first_use: FirstUse | None

    @property
    def moved_to(self) -> str:
        """The decision topic that has the decisions now. Empty if it is this one."""
        return "" if self.first_use is None else self.first_use.moved_to


class DriverCluster(MarkersCluster, Protocol):
    """The requests of the protocol. Each returns when its answer is known, or raises KafkaError."""

    def transaction_version(self) -> int: ...

    @property
    def knows_prefix(self) -> bool:
        """Whether this client has read a record of the prefix before."""
        ...

    def check_topic(self) -> None:
        """Raise IllegalStateError if the decision topic does not keep the last record of each key."""
        ...

    def check_presence(self) -> None:
        """Raise IllegalStateError if there is no decision topic."""
        ...

    def last_records(self) -> PrefixRecords:
        """Return the newest committed records of the prefix."""
        ...

    def lost_decisions(self) -> KafkaError:
        """Return the error for a prefix that was used before and has no record in the decision topic."""
        ...

    def copied(self, records: PrefixRecords) -> KafkaError | None:
        """Return the error for records that were written into another topic than this one, which is a copy of it."""
        ...

    def write_first_use(self, *, is_adopted: bool, moved_to: str = "", is_free: bool = False) -> None:
        """Write it outside transactions, acknowledged by all in-sync replicas."""
        ...

    def write_decision(self, transaction: OpenTransaction, decision: Decision, sequence: int) -> int:
        """Return the offset of the record, -1 if it is not known."""
        ...

    def list_ids(self, states: Iterable[TransactionState]) -> list[str]:
        """Return every transactional id of the cluster in one of these states."""
        ...

    def markers(self, transactional_ids: Iterable[str]) -> Mapping[str, CommittedOffset | None]:
        """Return the offset of `place` that each group of these names has committed, once none is pending."""
        ...


class Committed(NamedTuple):
    """A batch that counts now. `driver` is the driver's next transaction, None if nothing was decided. `decided_ms` is
    the time of day at which the decision counted, None if no transaction had to be committed.
    """

    decision: Decision | None
    was_skipped: bool
    driver: OpenTransaction | None
    decided_ms: int | None = None


class ExactlyOnceDriver:
    """The protocol, for one prefix. It holds no state between calls: a batch's `begin` and its `commit` or `abort` may
    run in different processes.

    `topic` is the sink's option `topic`. `is_new`: no decision of the prefix waits to be finished, because no write had
    the prefix before, or only writes that ended well (write_names.py). `is_operator`: a prefix without any record is
    not an error, and counts as one without a decision.
    """

    def __init__(
        self,
        prefix: str,
        cluster: DriverCluster,
        wall_ms: Callable[[], int],
        *,
        topic: str | None = None,
        is_new: bool = False,
        is_operator: bool = False,
    ) -> None:
        self.prefix = prefix
        self._name = driver_id(prefix)
        self.topic = topic
        self._is_new = is_new
        self._is_operator = is_operator
        self._cluster = cluster
        self._end_markers = EndMarkers(prefix, cluster)
        self._wall_ms = wall_ms
        self._unwritten: frozenset[str] = frozenset()
        """Ids that were listed as EMPTY, for the log. Some brokers list finished transactions as EMPTY."""
        self._finish = operator_command("finish", prefix, cluster.place.topic)

    # ---- before the tasks ------------------------------------------------------------------------------------------

    def begin(self, held: ProducerIdAndEpoch | None = None, known: Decision | None = None) -> BatchStart:
        """Fence every other driver of the prefix, finish the batch decided last, abort undecided transactions.

        `held`: this driver's producer id and epoch from the batch before. With it, a driver that has taken over since
        then is not fenced, and this call raises ProducerFencedError. `known`: this driver's last decision. It is not
        read then, and open transactions are left to the next `commit`. Raises TransactionLostError; IllegalStateError
        if the decision topic has lost the records of the prefix or does not keep records; and KafkaError if a request
        fails.
        """
        if held is not None or self._is_new:
            driver = self._next_of(held)
        else:
            if not self._cluster.knows_prefix:
                if not self._is_operator:
                    self._cluster.check_topic()
                self.ensure_first_use()
            driver = self.fence()
        last, first_use = known, None
        while True:
            # A coordinator that has forgotten the id (transactional.id.expiration.ms) accepts any held epoch and gives
            # another producer id: another driver may have decided since, so the decision is read again.
            if not self._is_new and (last is None or not goes_on(held, driver)):
                last, first_use = self.read_records()
            if last is None or last.is_finished:
                break
            log.info("Finishing batch %d of %s, which was decided before", last.batch_id, self.prefix)
            self.finish(driver, last)
            with self._errors_say_committed(last):
                driver = self._note_finished(driver, last, 0)
            held, last = driver.producer, last.finished()
            driver = self._next_of(held)
        if last is not None and last is known:
            self._cluster.check_presence()  # else the topic was read, or a claim has it
        else:
            left = self._others_open(driver, ())
            self._abort_all(left if left and self._current(driver) else ())
        is_adopted, is_free = (False, False) if first_use is None else (first_use.is_adopted, first_use.is_free)
        place = self._cluster.place
        return BatchStart.after(last, self.prefix, driver, place, is_adopted=is_adopted, is_free=is_free)

    def ensure_first_use(self) -> None:
        """Write the first-use record of a prefix, if it has no record and its coordinator does not know its driver.

        Must come before the driver's first InitProducerId. So every driver that the coordinator knows has left a
        record.
        """
        is_unused = self._cluster.describe([self._name])[self._name] is None
        if is_unused and self._cluster.last_records() == PrefixRecords(None, None):
            self._cluster.write_first_use(is_adopted=False)

    def fence(self) -> OpenTransaction:
        """Fence every other driver of the prefix. What the last one left in the decision topic has ended then."""
        may_abort = self._end_markers.complete_last_decision(self._name, self._cluster.transaction_version())
        driver = self._next_of(None)
        if may_abort and (ended := self._end_markers.complete_abort(driver)) is not None:
            driver = self._next_of(ended.producer)
        return driver

    def read_records(self) -> PrefixRecords:
        """Read the records of the prefix. Raises IllegalStateError if none exists, because every driver has left a
        record before it began; if they come from a copy of the decision topic; and if another topic has the decisions
        now.
        """
        found = self._cluster.last_records()
        if found == PrefixRecords(None, None) and not self._is_operator:
            raise self._cluster.lost_decisions()
        if (copied := self._cluster.copied(found)) is not None:
            raise copied
        if found.moved_to:
            raise moved_decisions(self.prefix, self._cluster.place.topic, found.moved_to)
        return found

    def check_owner(self, batch_id: int, query_id: str) -> None:
        """Raise IllegalStateError, before any driver is fenced, if the last decision is of another query or of a later
        batch. Checks nothing while a decision is open, because reading would wait for its end. The tasks check it too.
        """
        found = self._cluster.describe([self._name])[self._name]
        if found is None or self._end_markers.is_deciding(found):
            return
        if not self._cluster.knows_prefix:  # `begin` takes a known prefix for a topic that was checked
            self._cluster.check_topic()
        last = self._cluster.last_records().decision
        if last is not None:
            driver = OpenTransaction.of(self._name, found.producer, 2)
            seen = BatchStart.after(last, self.prefix, driver, self._cluster.place, is_adopted=False)
            seen.is_written_already(batch_id, query_id)

    # ---- after the tasks -------------------------------------------------------------------------------------------

    def commit(self, outcomes: Sequence[TaskOutcome]) -> Committed:
        """Decide the batch and commit it. Afterwards no transaction of the prefix is open that was begun before.

        Nothing is decided after BatchChangedError (the batch was decided before with other rows or for another topic),
        IllegalStateError (a task's transaction is not as the task left it, or is too old; or the decisions of the
        prefix belong into another partition than at `begin`) and ProducerFencedError (another driver has taken over).
        KafkaTimeoutError: it is not known whether the batch is decided. TransactionLostError: it is decided, and rows
        are lost. If only the note of the commit fails, the KafkaError says that the batch is committed.
        """
        if not outcomes:
            return Committed(None, False, None)
        first = outcomes[0]
        check_agreement(outcomes)
        if first.was_skipped:
            check_same_batch(outcomes, self.topic)
            return Committed(None, True, None)
        if first.batch_start.place != self._cluster.place:
            # Partitions were added, and the process that began the batch does not know it yet. It would not find this
            # decision, and would write the batch again.
            raise self._cluster.lost_decisions()
        tasks = tuple(outcome.written for outcome in outcomes if outcome.written is not None)
        rows = sum(task.rows for task in tasks)
        offsets = all_offsets(outcomes)
        decision = Decision(
            first.batch_id,
            first.query_id,
            self._wall_ms(),
            len(outcomes),
            rows,
            tasks,
            fingerprint=sum(outcome.fingerprint for outcome in outcomes) % MODULUS,
            topic=self.topic,
            ends={place: each.end for place, each in offsets.items()},
        )
        driver = first.batch_start.driver
        seen = self._end_markers.check_rows(outcomes, offsets)
        if not tasks:
            if not first.batch_start.needs_trace(first.query_id):
                return Committed(None, False, None)
            return Committed(decision.finished(), False, self._note_finished(driver, decision, 0))
        offset = self._cluster.write_decision(driver, decision, 0)
        self._end_markers.check_added(outcomes, seen, self._verify(driver, decision))
        (decided,) = self._cluster.end([driver], committed=True)
        driver = self._next_driver(driver, decided, decision)
        decided_ms = self._wall_ms()
        with _errors_say_unknown(decision, self._finish):
            driver = self._end_markers.complete_decision(driver, offset)
            self._end_markers.refuse_successor(decided.transaction, driver)
        left = self.finish(driver, decision)
        # A driver that is fenced by now must not end transactions of its successor's tasks. The note proves that there
        # is no successor yet; transactions listed before it are aborted by their exact epochs.
        with self._errors_say_committed(decision):
            driver = self._note_finished(driver, decision, 0 if driver.transaction_version >= 2 else 1)
        self._abort_all(left)
        return Committed(decision.finished(), False, driver, decided_ms)

    def abort(self, batch_start: BatchStart, outcomes: Iterable[TaskOutcome]) -> bool:
        """Abort the tasks' transactions if it is certain that the batch is not decided. Return whether all were ended.

        A batch that is or may be decided is left as it is: the next driver of the prefix finishes or aborts it. Raises
        AuthenticationError if a node refused the login, and KafkaError if another request fails.
        """
        driver = batch_start.driver
        (ended,) = self._cluster.end([driver], committed=False)
        if ended.status is EndTxnStatus.INVALID_TXN_STATE and driver.transaction_version < 2:
            own = self._current(driver)
            if own is None or own.state is not TransactionState.EMPTY:
                return False  # version 1 refuses an abort also if nothing was written
            # nothing was ended, so a late task may still begin in this epoch
            next_ = self._cluster.init_producer_id(driver.transactional_id, driver.producer)
            last, first_use = self._cluster.last_records()
            if (last and last.batch_id) != batch_start.last_batch_id or not (self._is_new or last or first_use):
                return False  # another process has decided it in between, or the topic is lost
            ended = replace(ended, producer=next_)
        elif ended.status is not EndTxnStatus.DONE:
            _raise_refusal([ended])
            return False
        named = [outcome.written for outcome in outcomes if outcome.written is not None]
        aborted = self._abort_all([task.transaction for task in named])
        driver = driver.with_producer(ended.producer)
        # if another attempt has taken a task's id, the open transaction is that attempt's
        ended_ones = [task for task, each in zip(named, aborted, strict=True) if each.status not in UNKNOWN_ENDS]
        left = self._others_open(driver, ended_ones)
        others = self._abort_all(left) if left and self._current(driver) else ()
        _raise_refusal((*aborted, *others))
        if any(each.status in _STAYS_OPEN for each in (*aborted, *others)):
            return False
        # Else they are committed, and the transaction ended above was the note's: version 1 has one epoch for both.
        return all(each.status is not EndTxnStatus.INVALID_TXN_STATE for each in aborted)

    def finish(self, driver: OpenTransaction, decision: Decision) -> list[OpenTransaction]:
        """Commit a decision's transactions, and wait until readers can read the rows. Return the prefix's other open
        ones. Raises TransactionLostError if one is gone, and ProducerFencedError if another driver has taken over,
        which finds that out.
        """
        with self._errors_say_decided(decision):
            if unknown := _commit(self._cluster, decision.tasks):
                self._settle_unknown(driver, decision, unknown)
            left = self._others_open(driver, ())  # meanwhile the brokers write the end markers
            self._end_markers.complete(decision, driver)
            return left

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _next_of(self, held: ProducerIdAndEpoch | None) -> OpenTransaction:
        producer = self._cluster.init_producer_id(self._name, held)
        return OpenTransaction.of(self._name, producer, self._cluster.transaction_version())

    def _settle_unknown(self, driver: OpenTransaction, decision: Decision, tasks: Sequence[TaskTransaction]) -> None:
        """Find out what became of decided transactions whose coordinators refused to commit them. One that was frozen
        or cut off may have refused by an older epoch: the transaction is open for the next coordinator, and committed.
        """
        given = {task.transaction.transactional_id: task.transaction.producer for task in tasks}
        described = self._cluster.describe(given, given)
        open_ = [
            task
            for task in tasks
            if (found := described[task.transaction.transactional_id]) and _is_open(found, task.transaction)
        ]
        refused = _commit(self._cluster, open_) if open_ else []
        if left := [task for task in tasks if task not in open_ or task in refused]:
            self._abort_late_attempts(driver, decision, left, described)
            self._check_markers(driver, decision, left)

    def _abort_late_attempts(
        self, driver: OpenTransaction, decision: Decision, tasks: Sequence[TaskTransaction], seen: Descriptions
    ) -> None:
        """Abort transactions that a late attempt has begun under the id of a decided one. Their pending markers would
        hide the decided marker until they time out. A transaction in the epoch after the decided one is no attempt's: a
        driver has begun it for an end marker, and it is committed.
        """
        decided = {task.transaction.transactional_id: task.transaction for task in tasks}
        described = {name: found for name, found in seen.items() if found is not None and name in decided}
        open_ = [
            OpenTransaction.of(name, found.producer, driver.transaction_version)
            for name, found in described.items()
            if found.state is TransactionState.ONGOING and not _is_open(found, decided[name])
        ]
        for_markers = [each for each in open_ if is_for_marker(each.producer, decided[each.transactional_id])]
        late = [each for each in open_ if each not in for_markers]
        self._end_markers.refuse_late(decision, described, late)
        if open_ and self._current(driver):  # else tasks of a successor may have begun them
            self._cluster.end(for_markers, committed=True)
            self._abort_all(late)

    def _check_markers(self, driver: OpenTransaction, decision: Decision, tasks: Sequence[TaskTransaction]) -> None:
        """Check the transactions that their coordinators no longer know: each was committed if its marker was.

        A marker of a later batch proves it only if another driver has taken over, which has finished this batch before
        its tasks began. Else that marker is from before the prefix was freed.
        """
        found = self._cluster.markers([task.transaction.transactional_id for task in tasks])
        lost = [
            task
            for task in tasks
            if found.get(task.transaction.transactional_id) != CommittedOffset(decision.batch_id + 1, task.marker_text)
        ]
        if lost and not self._current(driver):
            raise ProducerFencedError(
                f"{driver}: {ProducerFencedError.sentence} It finishes batch {decision.batch_id}, or has done so."
            )
        if lost:
            markers = [found.get(task.transaction.transactional_id) for task in lost]
            raise _lost(decision, lost, markers, self.prefix, self._cluster.place.topic)

    def _verify(self, driver: OpenTransaction, decision: Decision) -> Descriptions:
        """Check that every transaction is as its task left it, and young enough. Return them. Called while the decision
        is written and not committed, so that only the brokers' clocks tell the ages.
        """
        given = {each.transactional_id: each.producer for each in (driver, *decision.transactions)}
        described = self._cluster.describe(given, given, have_begun=True)
        own = described[driver.transactional_id]
        if own is None or not _is_open(own, driver) or own.start_time_ms is None:
            raise ProducerFencedError(
                f"{driver}: {ProducerFencedError.sentence} Another driver runs under this transactional.id.prefix, or"
                " the driver's own transaction timed out before the decision was made;"
                f" batch {decision.batch_id} is not decided here."
            )
        for task in decision.tasks:
            _check_left_open(decision, task, described[task.transaction.transactional_id], own.start_time_ms)
        return described

    def _note_finished(self, driver: OpenTransaction, decision: Decision, sequence: int) -> OpenTransaction:
        """Write that the batch is committed. A later start then need not ask for transactions and markers, which the
        brokers may have forgotten.
        """
        self._cluster.write_decision(driver, decision.finished(), sequence)
        (noted,) = self._cluster.end([driver], committed=True)
        return self._next_driver(driver, noted, decision)

    def _others_open(self, driver: OpenTransaction, kept: Iterable[TaskTransaction]) -> list[OpenTransaction]:
        """Other open transactions of the prefix. Under version 2 also those that a task could still open."""
        states = [TransactionState.ONGOING]
        if driver.transaction_version >= 2:
            states.append(TransactionState.EMPTY)  # begun, and nothing written: an abort ends its epoch
        mine = {task.transaction.transactional_id for task in kept}
        ids = [name for name in self._cluster.list_ids(states) if is_task_id(self.prefix, name) and name not in mine]
        if not ids:
            return []
        described = {name: found for name, found in self._cluster.describe(ids).items() if found is not None}
        self._unwritten = frozenset(name for name, found in described.items() if found.state is TransactionState.EMPTY)
        return [
            OpenTransaction.of(name, found.producer, driver.transaction_version)
            for name, found in described.items()
            if found.state in states
        ]

    def _current(self, driver: OpenTransaction) -> TransactionDescription | None:
        """Return the driver's state, None if it is fenced: then a successor's tasks may have begun what was seen."""
        own = self._cluster.describe([self._name], {self._name: driver.producer})[self._name]
        return own if own is not None and own.producer == driver.producer else None

    def _abort_all(self, transactions: Sequence[OpenTransaction]) -> Sequence[EndTxnOutcome]:
        """Abort them by their exact epochs. Those that stay open end by the next driver or by their timeout."""
        if not transactions:
            return ()
        if count := sum(each.transactional_id not in self._unwritten for each in transactions):
            log.info("%s: aborting %d open transactions", self.prefix, count)
        outcomes = self._cluster.end(transactions, committed=False)
        for each in outcomes:
            if each.status in _STAYS_OPEN:
                log.warning("%s stays open until its timeout: %s", each.transaction, each.error)
        return outcomes

    # ---- errors of a batch that is decided, or may be --------------------------------------------------------------

    @contextmanager
    def _errors_say_decided(self, decision: Decision) -> Iterator[None]:
        try:
            yield
        except (TransactionLostError, ProducerFencedError):
            raise  # these say what is to be done
        except KafkaError as error:
            raise error.reworded(
                f"Batch {decision.batch_id} of {self.prefix} is decided, and its commit did not end: {error}"
                f" {finish_advice(decision.query_id, self._finish)}",
                retriable=bool(decision.query_id),
            ) from error

    @contextmanager
    def _errors_say_committed(self, decision: Decision) -> Iterator[None]:
        """An error in here comes after the commit. Its text must say that the batch did not fail."""
        try:
            yield
        except KafkaError as error:
            who = "The next start" if decision.query_id else self._finish
            raise error.reworded(
                f"Batch {decision.batch_id} of {self.prefix} is committed: its rows count, and must not be written"
                f" again. What failed is the note of that. {who} tries again to write it: {error.__cause__ or error}",
                retriable=False,
            ) from error

    def _next_driver(self, driver: OpenTransaction, ended: EndTxnOutcome, decision: Decision) -> OpenTransaction:
        """Return the driver's transaction after a committed one. Raises the reason why it was not committed."""
        if ended.status is EndTxnStatus.DONE:
            return driver.with_producer(ended.producer)
        if ended.status in {EndTxnStatus.PRODUCER_FENCED, EndTxnStatus.INVALID_PID_MAPPING}:
            is_shared = not decision.query_id and not self._is_new
            other = " But another write under the prefix may have this number too: then look for the rows in the topic."
            raise ProducerFencedError(
                f"Whether batch {decision.batch_id} is decided is not known: {ended.error} Or {driver} timed out while"
                " the decision was written; then the batch is not decided."
                f" {unknown_advice(decision.query_id, self._finish)}{other if is_shared else ''}"
            ) from ended.error
        if ended.status is EndTxnStatus.INVALID_TXN_STATE and not ended.is_in_doubt:
            raise IllegalStateError(
                f"Batch {decision.batch_id} is not decided: {driver} timed out while the decision was written."
            ) from ended.error
        raise KafkaTimeoutError().reworded(
            f"Whether batch {decision.batch_id} is decided is not known: {ended.error}"
            f" {unknown_advice(decision.query_id, self._finish)}",
            retriable=bool(decision.query_id),
        ) from ended.error


def _commit(cluster: DriverCluster, tasks: Sequence[TaskTransaction]) -> list[TaskTransaction]:
    """Commit transactions. Return those whose coordinators do not say whether they are committed."""
    outcomes = cluster.end([task.transaction for task in tasks], committed=True)
    for each in outcomes:
        if each.status not in UNKNOWN_ENDS and each.error is not None:
            raise each.error
    unknown = {each.transaction.transactional_id for each in outcomes if each.status in UNKNOWN_ENDS}
    return [task for task in tasks if task.transaction.transactional_id in unknown]


@contextmanager
def _errors_say_unknown(decision: Decision, finish: str) -> Iterator[None]:
    """An error in here leaves a decision without its end marker, which the next transaction of the driver may abort."""
    try:
        yield
    except KafkaError as error:
        raise error.reworded(
            f"Whether batch {decision.batch_id} is decided is not known: {error}"
            f" {unknown_advice(decision.query_id, finish)}",
            retriable=bool(decision.query_id),
        ) from error


def goes_on(held: ProducerIdAndEpoch | None, driver: OpenTransaction) -> bool:
    """Return whether `driver` goes on from the epoch `held` of its batch before, and its last decision is still the
    newest.

    False if its coordinator has forgotten the id, and has given another producer id: another driver may have decided.
    """
    return held is not None and held.producer_id == driver.producer_id


def _lost(
    decision: Decision, lost: Sequence[TaskTransaction], markers: Sequence[object], prefix: str, topic: str
) -> TransactionLostError:
    """`markers`: for each of `lost`. Without one it is not known whether the transaction was committed."""
    may_be = "may be" if None in markers else "are"
    return TransactionLostError(
        f"Batch {decision.batch_id} of transactional.id.prefix={prefix!r} was decided, and {len(lost)} of its"
        f" {len(decision.tasks)} transactions are gone: rows {may_be} missing in Kafka,"
        f" {sum(task.rows for task in lost)} of {decision.rows} ("
        + "; ".join(f"partition {task.partition}: {task.rows} rows in {task.transaction}" for task in lost[:20])
        + "). They timed out between decision and commit; or an operator or a late task aborted them; or their markers"
        " expired in a stop longer than offsets.retention.minutes, or were deleted with the consumer groups of their"
        " ids. Compare the topics with the batch's input, write by hand what is missing, then let the query go on:"
        f" {operator_command('accept', prefix, topic)}. A longer kafka.transaction.timeout.ms makes this rarer."
    )


def _check_left_open(
    decision: Decision, task: TaskTransaction, found: TransactionDescription | None, start_ms: int
) -> None:
    """Raise IllegalStateError if the transaction is not as its task left it, or was too old at `start_ms`."""
    if found is None or not _is_open(found, task.transaction):
        state = "unknown" if found is None else f"{found.state.value} in epoch {found.producer_epoch}"
        raise IllegalStateError(
            f"Batch {decision.batch_id} is not decided: {task.transaction} of partition {task.partition} is"
            f" {state}. It timed out, or a late attempt of the task took its place; the batch must run again."
            f" If it times out each time: {timeout_advice(decision.query_id, found and found.timeout_ms)}"
        )
    age_ms = start_ms - (found.start_time_ms or 0)
    if age_ms > USABLE_SHARE * found.timeout_ms:
        raise IllegalStateError(
            f"Batch {decision.batch_id} is not decided: {task.transaction} of partition {task.partition} is"
            f" open for {age_ms} ms, more than 80 % of its timeout."
            f" {timeout_advice(decision.query_id, found.timeout_ms)}"
        )


def _raise_refusal(outcomes: Iterable[EndTxnOutcome]) -> None:
    """Raise a refused login, so that the caller makes a new client, which reads the certificates again."""
    for each in outcomes:
        if isinstance(each.error, AuthenticationError):
            raise each.error


def _is_open(found: TransactionDescription, left: OpenTransaction) -> bool:
    return found.state is TransactionState.ONGOING and found.producer == left.producer
