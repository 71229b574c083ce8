"""The driver's side of exactly-once delivery: fence, finish what was decided, decide, commit, abort.

Tasks leave their transactions open, and the driver ends them: a broker asks no more than transactional id, producer id
and epoch (KIP-98, KIP-890). What makes a batch count is one record, the decision, written in a transaction of the
driver's own before any task's transaction is committed; after it the batch can only be finished, by this driver or by
the next one, however the rows would be laid out by then. The proof is in docs/exactly-once.md.

Decisions only: every request goes through the `DriverCluster`. One thread, the driver's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from spark_kafka_sink.admin.group_offsets import CommittedOffset
from spark_kafka_sink.admin.transaction_values import (
    EndTxnOutcome,
    EndTxnStatus,
    TransactionDescription,
    TransactionState,
)
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.record.fingerprint import MODULUS
from spark_kafka_sink.sink.exactly_once.advice import operator_command, who_finds_out, who_finishes
from spark_kafka_sink.sink.exactly_once.messages import (
    Birth,
    Decision,
    Mandate,
    TaskOutcome,
    TaskTransaction,
    TransactionLostError,
    check_agreement,
    check_same_batch,
    driver_id,
    is_task_id,
)

log = logging.getLogger(__name__)

USABLE_SHARE: Final = 0.8
"""Of transaction.timeout.ms: what is left must do for the commit, and for a restart where the driver dies in it."""
_UNKNOWN: Final = frozenset(
    {EndTxnStatus.INVALID_TXN_STATE, EndTxnStatus.PRODUCER_FENCED, EndTxnStatus.INVALID_PID_MAPPING}
)
_STAYS_OPEN: Final = frozenset({EndTxnStatus.REFUSED, EndTxnStatus.UNRESOLVED})


class PrefixRecords(NamedTuple):
    """What the decision topic knows of a prefix. `birth` may be None where there is a decision."""

    decision: Decision | None
    birth: Birth | None


class DriverCluster(Protocol):
    """The requests that the protocol consists of. Each returns when its answer is known, or raises KafkaError."""

    place: TopicPartition
    """Where decisions of the prefix are written; the markers are offsets of this partition."""

    def transaction_version(self) -> int: ...

    def init_producer_id(self, transactional_id: str, held: ProducerIdAndEpoch | None) -> ProducerIdAndEpoch:
        """As `Transactions.init_producer_id`."""
        ...

    @property
    def knows_prefix(self) -> bool:
        """Whether a record of the prefix was read over this client before."""
        ...

    def check_topic(self) -> None:
        """Raise IllegalStateError where the decision topic does not keep what it is given."""
        ...

    def check_presence(self) -> None:
        """Raise IllegalStateError where the decision topic is gone, by what the last listing's metadata said."""
        ...

    def last_records(self) -> PrefixRecords:
        """The newest ones that were committed."""
        ...

    def lost_decisions(self) -> KafkaError:
        """The error for a decision topic that knows nothing of the prefix, which was used before."""
        ...

    def write_birth(self, *, is_adopted: bool) -> None:
        """In no transaction: acknowledged by all replicas in sync."""
        ...

    def write_decision(self, transaction: OpenTransaction, decision: Decision, sequence: int) -> None: ...

    def end(self, transactions: Sequence[OpenTransaction], *, committed: bool) -> list[EndTxnOutcome]: ...

    def describe(self, transactional_ids: Iterable[str]) -> Mapping[str, TransactionDescription | None]: ...

    def list_ids(self, states: Iterable[TransactionState]) -> list[str]:
        """Of every transactional id of the cluster in one of these states that begins with the prefix."""
        ...

    def markers(self, transactional_ids: Iterable[str]) -> Mapping[str, CommittedOffset | None]:
        """What was committed for `place` by the groups of these names, once nothing of it is pending."""
        ...


class Committed(NamedTuple):
    """A batch that counts now. `driver` is the driver's next transaction, None where nothing was decided."""

    decision: Decision | None
    was_skipped: bool
    driver: OpenTransaction | None


class ExactlyOnceDriver:
    """The protocol, for one prefix. It holds nothing between its calls: a batch's `begin` and its `commit` or `abort`
    may run in different processes. `topic` is the sink's option `topic`. `is_new`: no decision of the prefix waits to
    be finished, because no write has had it before, or only writes that ended well (write_names.py).
    `is_operator`: a prefix of which the decision topic knows nothing is no error, and is treated as one without a
    decision.
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
        self.topic = topic
        self._is_new = is_new
        self._is_operator = is_operator
        self._cluster = cluster
        self._wall_ms = wall_ms
        self._unwritten: frozenset[str] = frozenset()
        """For the log: ids that were listed as EMPTY. Some brokers call finished transactions so."""
        self._finish = operator_command("finish", prefix, cluster.place.topic)

    # ---- before the tasks ------------------------------------------------------------------------------------------

    def begin(self, held: ProducerIdAndEpoch | None = None, known: Decision | None = None) -> Mandate:
        """Fence every other driver of the prefix, finish the batch decided last, abort what was left undecided.

        `held`: this driver's own id and epoch from the batch before; then another driver that has taken over since is
        not fenced, but raises ProducerFencedError. `known`: what it decided last, which need not be read then. Raises
        TransactionLostError, IllegalStateError where the decision topic has lost what it knew of the prefix or does not
        keep what it is given, and KafkaError where a request fails.
        """
        version = self._cluster.transaction_version()
        name = driver_id(self.prefix)
        if not self._is_new and held is None and not self._cluster.knows_prefix:
            if not self._is_operator:
                self._cluster.check_topic()
            self.ensure_birth()
        last, birth = known, None
        while True:
            driver = OpenTransaction.of(name, self._cluster.init_producer_id(name, held), version)
            # A coordinator that has forgotten the id (transactional.id.expiration.ms) takes whatever is held, and gives
            # another producer id: others may have decided since. To find that there is no decision takes a whole
            # partition of those of others.
            if not self._is_new and (last is None or held is None or held.producer_id != driver.producer_id):
                last, birth = self._read_records()
            if last is None or last.is_finished:
                break
            log.info("Finishing batch %d of %s, which was decided before", last.batch_id, self.prefix)
            self.finish(driver, last)
            with self._told_to_count(last):
                driver = self._note_finished(driver, last, 0)
            held, last = driver.producer, last.finished()
        left = self._others_open(driver, ())
        if left and self._is_current(driver):
            self._abort_all(left)
        self._cluster.check_presence()
        is_adopted = birth is not None and birth.is_adopted
        if last is None:
            return Mandate(self.prefix, driver, self._cluster.place, is_adopted=is_adopted)
        return Mandate(
            self.prefix,
            driver,
            self._cluster.place,
            last.batch_id,
            last.query_id,
            last.rows,
            last.fingerprint,
            last.topic,
            last.is_accepted,
            is_adopted,
        )

    def ensure_birth(self) -> None:
        """Write the birth record of a prefix that has none, no decision, and no driver that its coordinator knows.

        Comes before the driver's first InitProducerId: a driver that its coordinator knows has left a record, then.
        """
        name = driver_id(self.prefix)
        is_unused = self._cluster.describe([name])[name] is None
        if is_unused and self._cluster.last_records() == PrefixRecords(None, None):
            self._cluster.write_birth(is_adopted=False)

    def check_owner(self, batch_id: int, query_id: str) -> None:
        """Raise IllegalStateError, before any driver is fenced, where the last decision is another query's or a later
        batch's. Where a driver is just deciding nothing is checked: to read then waits for its end, and the tasks check
        it too.
        """
        name = driver_id(self.prefix)
        found = self._cluster.describe([name])[name]
        if found is None or found.state is TransactionState.ONGOING:
            return
        last = self._cluster.last_records().decision
        if last is not None:
            driver = OpenTransaction.of(name, found.producer, 2)
            seen = Mandate(self.prefix, driver, self._cluster.place, last.batch_id, last.query_id, last.rows)
            seen.is_written_already(batch_id, query_id)

    # ---- after the tasks -------------------------------------------------------------------------------------------

    def commit(self, outcomes: Sequence[TaskOutcome]) -> Committed:
        """Decide the batch and commit it. Afterwards no transaction of the prefix is open that was begun before.

        Raises BatchChangedError where the batch was decided before with other rows or for another topic;
        IllegalStateError where a task's transaction is not what the task left, or too old, and
        ProducerFencedError where another driver has taken over: nothing is decided then. Raises KafkaTimeoutError
        where it cannot be known whether it is; TransactionLostError after the decision; and any KafkaError, which says
        so, where all is committed and that could not be noted.
        """
        if not outcomes:
            return Committed(None, False, None)
        first = outcomes[0]
        check_agreement(outcomes)
        if first.was_skipped:
            check_same_batch(outcomes, self.topic)
            return Committed(None, True, None)
        tasks = tuple(outcome.written for outcome in outcomes if outcome.written is not None)
        rows = sum(task.rows for task in tasks)
        decision = Decision(
            first.batch_id,
            first.query_id,
            self._wall_ms(),
            len(outcomes),
            rows,
            tasks,
            fingerprint=sum(outcome.fingerprint for outcome in outcomes) % MODULUS,
            topic=self.topic,
        )
        driver = first.mandate.driver
        if not tasks:
            if not first.mandate.needs_trace(first.query_id):
                return Committed(None, False, None)
            return Committed(decision.finished(), False, self._note_finished(driver, decision, 0))
        self._cluster.write_decision(driver, decision, 0)
        self._verify(driver, decision)
        (decided,) = self._cluster.end([driver], committed=True)
        driver = self._next_driver(driver, decided, decision)
        self.finish(driver, decision)
        # Whoever is fenced by now must not touch what its successor's tasks have begun: the record is the proof that
        # there is no successor yet, and what was listed before it is ended by its exact epochs.
        with self._told_to_count(decision):
            left = self._others_open(driver, ())
            driver = self._note_finished(driver, decision, 0 if driver.transaction_version >= 2 else 1)
        self._abort_all(left)
        return Committed(decision.finished(), False, driver)

    def abort(self, mandate: Mandate, outcomes: Iterable[TaskOutcome]) -> bool:
        """End what the tasks left open, if it is certain that the batch is not decided; whether all of it was ended.

        A decided batch is left alone, and so is one that may be: the next driver of the prefix finishes or aborts it.
        Raises AuthenticationError where a node did not let us in, and KafkaError where another request fails.
        """
        driver = mandate.driver
        (ended,) = self._cluster.end([driver], committed=False)
        if ended.status is EndTxnStatus.INVALID_TXN_STATE and driver.transaction_version < 2:
            if not self._is_untouched(driver):
                return False
            # nothing was ended, so the epoch is still the one under which a task that is late may begin
            next_ = self._cluster.init_producer_id(driver.transactional_id, driver.producer)
            last, birth = self._cluster.last_records()
            if (last and last.batch_id) != mandate.last_batch_id or not (self._is_new or last or birth):
                return False  # another process has decided it between the look and the fence, or the topic is lost
            ended = replace(ended, producer=next_)
        elif ended.status is not EndTxnStatus.DONE:
            _raise_refusal([ended])
            return False
        named = [outcome.written for outcome in outcomes if outcome.written is not None]
        aborted = self._abort_all([task.transaction for task in named])
        driver = driver.with_producer(ended.producer)
        # where another attempt has taken a task's id, it is that one's transaction which is open
        ended_ones = [task for task, each in zip(named, aborted, strict=True) if each.status not in _UNKNOWN]
        left = self._others_open(driver, ended_ones)
        others = self._abort_all(left) if left and self._is_current(driver) else ()
        _raise_refusal((*aborted, *others))
        if any(each.status in _STAYS_OPEN for each in (*aborted, *others)):
            return False
        # Else they are committed, and what was ended above was the note of that: version 1 tells no epochs apart.
        return all(each.status is not EndTxnStatus.INVALID_TXN_STATE for each in aborted)

    def finish(self, driver: OpenTransaction, decision: Decision) -> None:
        """Commit every transaction of a decision. Raises TransactionLostError where one can no longer be, and
        ProducerFencedError where that is not this driver's to tell.
        """
        with self._told_to_be_decided(decision):
            outcomes = self._cluster.end(decision.transactions, committed=True)
            unknown = {each.transaction.transactional_id for each in outcomes if each.status in _UNKNOWN}
            for each in outcomes:
                if each.status not in _UNKNOWN and each.error is not None:
                    raise each.error
            if unknown:
                tasks = [task for task in decision.tasks if task.transaction.transactional_id in unknown]
                self._abort_usurpers(driver, tasks)
                self._check_markers(driver, decision, tasks)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _read_records(self) -> PrefixRecords:
        """What the decision topic knows of the prefix. Raises IllegalStateError where that is nothing: every driver has
        left a record before it began.
        """
        found = self._cluster.last_records()
        if found == PrefixRecords(None, None) and not self._is_operator:
            raise self._cluster.lost_decisions()
        return found

    def _abort_usurpers(self, driver: OpenTransaction, tasks: Sequence[TaskTransaction]) -> None:
        """Abort what a late attempt has begun under the id of a decided transaction: its marker is pending, and keeps
        that of the decided one from being read until it times out.
        """
        decided = {task.transaction.transactional_id: task.transaction for task in tasks}
        open_ = [
            OpenTransaction.of(name, found.producer, driver.transaction_version)
            for name, found in self._cluster.describe(decided).items()
            if found is not None and found.state is TransactionState.ONGOING and not _is_open(found, decided[name])
        ]
        if open_ and self._is_current(driver):  # else a successor's tasks may have begun them
            self._abort_all(open_)

    def _check_markers(self, driver: OpenTransaction, decision: Decision, tasks: Sequence[TaskTransaction]) -> None:
        """A transaction that its coordinator knows no more was committed if its marker was. One of a later batch proves
        it only where another driver has taken over, which has finished this one before its tasks began; else it is from
        the prefix's life before that was forgotten.
        """
        found = self._cluster.markers([task.transaction.transactional_id for task in tasks])
        lost = [
            task
            for task in tasks
            if found.get(task.transaction.transactional_id) != CommittedOffset(decision.batch_id + 1, task.marker_text)
        ]
        if lost and not self._is_current(driver):
            raise ProducerFencedError(
                f"{driver}: {ProducerFencedError.sentence} It finishes batch {decision.batch_id}, or has done so."
            )
        if lost:
            raise TransactionLostError(
                f"Batch {decision.batch_id} of transactional.id.prefix={self.prefix!r} was decided, and"
                f" {len(lost)} of its {len(decision.tasks)} transactions are gone: rows are missing in Kafka,"
                f" {sum(task.rows for task in lost)} of {decision.rows} ("
                + "; ".join(f"partition {task.partition}: {task.rows} rows in {task.transaction}" for task in lost[:20])
                + "). They timed out between decision and commit, or their markers expired in a stop longer than"
                " offsets.retention.minutes. Write the missing rows by hand from the batch's input, then let the query"
                f" go on: {operator_command('accept', self.prefix, self._cluster.place.topic)}. A longer"
                " kafka.transaction.timeout.ms makes this rarer."
            )

    def _verify(self, driver: OpenTransaction, decision: Decision) -> None:
        """Every transaction must be as its task left it, and young enough. Called with the decision written and not
        committed, so that ages are told by brokers' clocks alone.
        """
        ids = [driver.transactional_id, *(task.transaction.transactional_id for task in decision.tasks)]
        described = self._cluster.describe(ids)
        own = described[driver.transactional_id]
        if own is None or not _is_open(own, driver) or own.start_time_ms is None:
            raise ProducerFencedError(
                f"{driver}: {ProducerFencedError.sentence} Another driver runs under this transactional.id.prefix, or"
                " the driver's own transaction timed out before the decision was made;"
                f" batch {decision.batch_id} is not decided here."
            )
        for task in decision.tasks:
            found = described[task.transaction.transactional_id]
            if found is None or not _is_open(found, task.transaction):
                state = "unknown" if found is None else f"{found.state.value} in epoch {found.producer_epoch}"
                raise IllegalStateError(
                    f"Batch {decision.batch_id} is not decided: {task.transaction} of partition {task.partition} is"
                    f" {state}. It timed out, or a late attempt of the task took its place; the batch must run again."
                )
            age_ms = own.start_time_ms - (found.start_time_ms or 0)
            if age_ms > USABLE_SHARE * found.timeout_ms:
                raise IllegalStateError(
                    f"Batch {decision.batch_id} is not decided: {task.transaction} of partition {task.partition} is"
                    f" open for {age_ms} ms, more than 80 % of its time-out. Raise kafka.transaction.timeout.ms"
                    f" (now {found.timeout_ms}) and, if need be, the brokers' transaction.max.timeout.ms; or make"
                    " batches smaller (maxOffsetsPerTrigger, maxFilesPerTrigger)."
                )

    def _note_finished(self, driver: OpenTransaction, decision: Decision, sequence: int) -> OpenTransaction:
        """Write that all is committed, so that a later start need not ask for transactions and markers that brokers
        have forgotten by then.
        """
        self._cluster.write_decision(driver, decision.finished(), sequence)
        (noted,) = self._cluster.end([driver], committed=True)
        return self._next_driver(driver, noted, decision)

    def _others_open(self, driver: OpenTransaction, kept: Iterable[TaskTransaction]) -> list[OpenTransaction]:
        """What else is open under the prefix, or, under transaction version 2, could be opened by who holds it."""
        states = [TransactionState.ONGOING]
        if driver.transaction_version >= 2:
            states.append(TransactionState.EMPTY)  # begun and not written to: aborting it takes its epoch away
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

    def _is_current(self, driver: OpenTransaction) -> bool:
        """Whether no other driver has fenced this one: then nothing seen before was begun by another's tasks."""
        own = self._cluster.describe([driver.transactional_id])[driver.transactional_id]
        return own is not None and own.producer == driver.producer

    def _is_untouched(self, driver: OpenTransaction) -> bool:
        """Whether nothing was written in the driver's transaction: under version 1 its abort is then refused."""
        own = self._cluster.describe([driver.transactional_id])[driver.transactional_id]
        return own is not None and own.state is TransactionState.EMPTY and own.producer == driver.producer

    def _abort_all(self, transactions: Sequence[OpenTransaction]) -> Sequence[EndTxnOutcome]:
        """By exact epochs. What cannot be aborted now is by the next driver, or by its time-out."""
        if not transactions:
            return ()
        if count := sum(each.transactional_id not in self._unwritten for each in transactions):
            log.info("%s: aborting %d open transactions", self.prefix, count)
        outcomes = self._cluster.end(transactions, committed=False)
        for each in outcomes:
            if each.status in _STAYS_OPEN:
                log.warning("%s stays open until its time-out: %s", each.transaction, each.error)
        return outcomes

    # ---- what is said of a batch that is decided, or may be ----------------------------------------------------------

    @contextmanager
    def _told_to_be_decided(self, decision: Decision) -> Iterator[None]:
        try:
            yield
        except (TransactionLostError, ProducerFencedError):
            raise  # these say what is to be done
        except KafkaError as error:
            raise error.reworded(
                f"Batch {decision.batch_id} of {self.prefix} is decided, and its commit did not end: {error}"
                f" {who_finishes(decision.query_id, self._finish)}",
                retriable=bool(decision.query_id),
            ) from error

    @contextmanager
    def _told_to_count(self, decision: Decision) -> Iterator[None]:
        """What fails here comes after the commit, and must not be taken for a batch that failed."""
        try:
            yield
        except KafkaError as error:
            who = "the next start" if decision.query_id else self._finish
            raise error.reworded(
                f"Batch {decision.batch_id} of {self.prefix} is committed: its rows count, and must not be written"
                f" again. What failed is the note of that, which {who} writes: {error.__cause__ or error}",
                retriable=False,
            ) from error

    def _next_driver(self, driver: OpenTransaction, ended: EndTxnOutcome, decision: Decision) -> OpenTransaction:
        """The driver's transaction after one that was committed. Raises what kept it from being."""
        if ended.status is EndTxnStatus.DONE:
            return driver.with_producer(ended.producer)
        if ended.status in {EndTxnStatus.PRODUCER_FENCED, EndTxnStatus.INVALID_PID_MAPPING}:
            raise ProducerFencedError(
                f"{driver}: {ProducerFencedError.sentence} It finishes or repeats batch {decision.batch_id}."
            ) from ended.error
        if ended.status is EndTxnStatus.INVALID_TXN_STATE:
            raise IllegalStateError(
                f"Batch {decision.batch_id} is not decided: {driver} timed out while the decision was written."
            ) from ended.error
        raise KafkaTimeoutError().reworded(
            f"Whether batch {decision.batch_id} is decided is not known: {ended.error}"
            f" {who_finds_out(decision.query_id, self._finish)}",
            retriable=bool(decision.query_id),
        ) from ended.error


def _raise_refusal(outcomes: Iterable[EndTxnOutcome]) -> None:
    """Of a node that does not let us in, so that the client with its certificates is given up."""
    for each in outcomes:
        if isinstance(each.error, AuthenticationError):
            raise each.error


def _is_open(found: TransactionDescription, left: OpenTransaction) -> bool:
    return found.state is TransactionState.ONGOING and found.producer == left.producer
