"""The transactions of a producer with a transactional.id.

`TransactionManager` is the whole of it. Application threads begin operations (`begin_commit`, ...) and get an
`OperationResult` to wait for. The Sender's thread asks for the next request, hands in its answer, and asks which
batches may go. One lock guards both sides; results are waited for outside it. The manager holds

- `ProducerIdentity`: producer id, epoch and sequence numbers,
- `CurrentTransaction` (transaction_content.py): what is in the transaction, and whether there is anything to end,
- `JoinedSends`: the calls that the transaction's end waits for,
- `PendingOperation` and `TransactionQueue`: the operation under way, and the requests that it takes.

Reference: org.apache.kafka.clients.producer.internals.TransactionManager (KIP-98, KIP-360, KIP-447, KIP-890).
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    AuthorizationError,
    ClusterAuthorizationError,
    IllegalStateError,
    InvalidPidMappingError,
    KafkaError,
    OutOfOrderSequenceError,
    ProducerClosedError,
    ProducerFencedError,
    TransactionAbortableError,
    TransactionAbortedError,
    TransactionalIdAuthorizationError,
    UnknownProducerIdError,
    UnsupportedVersionError,
)
from spark_kafka_sink.common.open_transaction import NO_PRODUCER, OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.producer import transaction_requests as requests
from spark_kafka_sink.producer.idempotence import ATTEMPTS_BEFORE_A_WARNING, OutgoingRequest, ProducerIdentity
from spark_kafka_sink.producer.operations import OperationResult, PendingOperation
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.transaction_content import CurrentTransaction
from spark_kafka_sink.producer.transaction_requests import (
    Action,
    GroupMetadata,
    Offsets,
    Priority,
    Refusal,
    TransactionQueue,
    TransactionRequest,
)
from spark_kafka_sink.protocol.versions import Message

log = logging.getLogger(__name__)


class State(enum.Enum):
    """The states of a transactional producer."""

    UNINITIALIZED = "has no producer id"
    INITIALIZING = "waits for a producer id"
    READY = "has a producer id"
    IN_TRANSACTION = "is in a transaction"
    PREPARED = "has a prepared transaction"
    COMMITTING = "is committing a transaction"
    ABORTING = "is aborting a transaction"
    ABORTABLE_ERROR = "is in a transaction that can only be aborted"
    FATAL_ERROR = "had an error that it cannot recover from"


_MOVES: Final[Mapping[State, frozenset[State]]] = {
    State.UNINITIALIZED: frozenset({State.INITIALIZING, State.PREPARED}),
    State.INITIALIZING: frozenset({State.READY, State.UNINITIALIZED, State.ABORTABLE_ERROR}),
    State.READY: frozenset({State.INITIALIZING, State.IN_TRANSACTION}),
    State.IN_TRANSACTION: frozenset({State.PREPARED, State.COMMITTING, State.ABORTING, State.ABORTABLE_ERROR}),
    State.PREPARED: frozenset({State.INITIALIZING, State.COMMITTING, State.ABORTING, State.ABORTABLE_ERROR}),
    State.COMMITTING: frozenset({State.UNINITIALIZED, State.INITIALIZING, State.READY, State.ABORTABLE_ERROR}),
    State.ABORTING: frozenset({State.UNINITIALIZED, State.INITIALIZING, State.READY, State.ABORTABLE_ERROR}),
    State.ABORTABLE_ERROR: frozenset({State.ABORTABLE_ERROR, State.ABORTING}),
    State.FATAL_ERROR: frozenset(),
}
"""The states that may follow each state. FATAL_ERROR may follow any."""
_MAY_BECOME_ABORTABLE: Final = frozenset(
    {State.IN_TRANSACTION, State.PREPARED, State.COMMITTING, State.ABORTABLE_ERROR}
)
_TAKES_PARTITIONS: Final = frozenset({State.IN_TRANSACTION, State.PREPARED, State.COMMITTING})
"""Records may still be on their way into the transaction."""
_LOST: Final = frozenset({State.ABORTABLE_ERROR, State.ABORTING})
_FATAL_FOR_A_BATCH: Final = (
    AuthenticationError,
    ClusterAuthorizationError,
    TransactionalIdAuthorizationError,
    ProducerFencedError,
    UnsupportedVersionError,
    InvalidPidMappingError,
)


class StateMachine:
    """The producer's state, and the error that led to it. The table above has every move."""

    def __init__(self) -> None:
        self.state = State.UNINITIALIZED
        self.error: KafkaError | None = None

    @property
    def has_fatal_error(self) -> bool:
        return self.state is State.FATAL_ERROR

    @property
    def is_lost(self) -> bool:
        """The transaction is being aborted, or can only be aborted."""
        return self.state in _LOST

    @property
    def may_become_abortable(self) -> bool:
        return self.state in _MAY_BECOME_ABORTABLE

    def move_to(self, state: State, error: KafkaError | None = None) -> None:
        if state is not State.FATAL_ERROR and state not in _MOVES[self.state]:
            raise IllegalStateError(f"A producer that {self.state.value} cannot become one that {state.value}.")
        self.state = state
        self.error = error
        if state is State.FATAL_ERROR and error is not None:
            error.fatal = True  # also if its class says otherwise

    def become_abortable(self, error: KafkaError) -> None:
        """Allow only an abort of the transaction. The first error of several is kept."""
        error.fatal = False  # its class may say so, for producers without transactions
        first = self.error if self.state is State.ABORTABLE_ERROR else None
        self.move_to(State.ABORTABLE_ERROR, first or error)

    def raise_error(self) -> None:
        """Raise the error that keeps the producer, or its transaction, from going on. Do nothing without one."""
        if self.error is not None and self.state in {State.ABORTABLE_ERROR, State.FATAL_ERROR}:
            text = f"The producer had an error before: {self.error}"
            if self.error.retriable and self.state is State.ABORTABLE_ERROR:
                # a record's timeout, say: a caller would retry a commit that raised it again and again
                raise TransactionAbortableError(f"{text} Only abort_transaction is left.")
            raise self.error.reworded(text)


class PreparedTransaction(NamedTuple):
    """An open transaction whose records are all acknowledged. Another process can end it by these values."""

    transaction: OpenTransaction
    is_empty: bool
    """Nothing was written in it. A broker refuses to commit such a transaction."""


class JoinedSends:
    """The calls that have joined the transaction and are not over. Its end waits for them.

    A `send` or a `send_columns` joins with its first record, and each end waits for it. A `write` joins as it begins,
    with its table. Each part of the table is a call that each end waits for. Between two parts a commit and a prepare
    wait, and an abort does not: it forgets the table, and the next part raises.

    A call joins under the manager's lock. It leaves without a lock, by one call into C, which Ctrl-C does not divide: a
    call that never left would keep the transaction from its end.
    """

    def __init__(self, machine: StateMachine, lock: threading.RLock) -> None:
        """`lock`: of the manager."""
        self._machine, self._lock = machine, lock
        self._calls: set[object] = set()
        self._tables: set[object] = set()
        self.leave: Final[Callable[[object], None]] = self._calls.discard
        self.forget_tables: Final[Callable[[], None]] = self._tables.clear

    def __bool__(self) -> bool:
        return bool(self._calls or self._tables)

    def __contains__(self, table: object) -> bool:
        """Whether the transaction has the table, and no abort has forgotten it."""
        return table in self._tables

    @property
    def has_tables(self) -> bool:
        return bool(self._tables)

    def may_join(self, send: object) -> bool:
        """Return whether the transaction accepts records of `send`. A closed one accepts those that it waits for."""
        state = self._machine.state
        return state is State.IN_TRANSACTION or (state in {State.PREPARED, State.COMMITTING} and send in self._calls)

    def join(self, send: object) -> None:
        """Note that `send` is under way. Raises IllegalStateError if the transaction accepts no records of it."""
        if not self.may_join(send):
            raise self._outside()
        self._calls.add(send)

    def begin_table(self, table: object) -> None:
        """`table` is about to be written, in several parts. Raises IllegalStateError outside a transaction, and the
        error of a transaction that can only be aborted.
        """
        with self._lock:
            self._machine.raise_error()
            if self._machine.state is not State.IN_TRANSACTION:
                raise self._outside()
            self._tables.add(table)

    def join_part(self, table: object) -> None:
        """A part of `table` is about to be appended. Raises TransactionAbortedError after an abort, also in the next
        transaction, and the error of a transaction that can only be aborted.
        """
        with self._lock:
            self._machine.raise_error()
            if table not in self._tables:
                raise TransactionAbortedError(
                    "The transaction was aborted while this table was being written, by abort_transaction or because"
                    " the producer closes. Nothing of the table is committed; write it again in another transaction."
                )
            self._calls.add(table)

    def end_table(self, table: object) -> None:
        """Wait for `table` no longer. Its parts are in the transaction, or the transaction is lost."""
        self._tables.discard(table)
        self._calls.discard(table)

    def wait_until_left(self, clock: Clock, timeout_ms: int) -> bool:
        """Wait until every call has left. Return False if that takes longer than `timeout_ms`."""
        deadline_ms = clock.now_ms() + timeout_ms
        while self:
            if clock.now_ms() >= deadline_ms:
                return False
            clock.sleep_ms(1)
        return True

    @property
    def reason_for_delay(self) -> str:
        """Return a sentence for error texts: the calls that the end of the transaction waits for."""
        if not self:
            return ""
        return f" It waits for a call of {'write' if self._tables else 'send or send_columns'} that has not ended."

    def _outside(self) -> IllegalStateError:
        return IllegalStateError(
            f"A record can be sent between begin_transaction and its end; this producer {self._machine.state.value}."
        )


class TransactionManager:
    """Begins, fills and ends transactions. Implements `DrainRules`.

    `finalized_feature` returns the cluster's level of a feature. From transaction.version 2 on (KIP-890) brokers add
    partitions by themselves, and every transaction has its own epoch. `brokers`: as in `Coordinators`.
    A `begin_...` called again with the same arguments returns the same result until its caller has the outcome.
    """

    def __init__(
        self,
        transactional_id: str,
        transaction_timeout_ms: int,
        retry_backoff: ExponentialBackoff,
        finalized_feature: Callable[[str], int],
        brokers: Callable[[], Sequence[Node]],
    ) -> None:
        self.transactional_id = transactional_id
        self.identity = ProducerIdentity(retry_backoff, is_transactional=True)
        self.machine = StateMachine()
        self._transaction_timeout_ms = transaction_timeout_ms
        self._finalized_feature = finalized_feature
        self._lock = threading.RLock()
        self.sends = JoinedSends(self.machine, self._lock)
        self.pending = PendingOperation(self._undo)
        self._queue = TransactionQueue(transactional_id, retry_backoff, self._lock, self.pending, brokers)
        self._current = CurrentTransaction()
        self._lacks_epoch = False
        """The coordinator refused an epoch until an abort: the next abort asks for it."""
        # The identity's own methods: a batch costs no call more than without transactions.
        self.batch_in_turn, self.has_taken = self.identity.batch_in_turn, self.identity.has_taken
        self.on_drain, self.on_split_part = self.identity.on_drain, self.identity.on_split_part
        self.handle_completed_batch = self.identity.handle_completed_batch
        self.handle_split_batch = self.identity.handle_split_batch
        self.request_delay_ms = self._queue.delay_ms
        self.use_coordinators = self._queue.use_coordinators

    def __repr__(self) -> str:
        return f"TransactionManager({self.transactional_id}, {self.machine.state.name}, {self.identity})"

    @property
    def has_fatal_error(self) -> bool:
        return self.machine.has_fatal_error

    @property
    def last_error(self) -> KafkaError | None:
        return self.machine.error

    @property
    def transaction_version(self) -> int:
        """The transaction.version of the current transaction."""
        return self._current.version

    # ---- operations: application threads ---------------------------------------------------------------------------

    def begin_initialize(self, transactional_id: str | None = None) -> OperationResult:
        """Ask for a producer id and epoch, which fences every older producer of the id. A `transactional_id` replaces
        the producer's own from now on.
        """
        with self._lock:
            requested_id = transactional_id or self.transactional_id
            if (pending := self.pending.joined("init_transactions", requested_id)) is not None:
                return pending
            self.machine.raise_error()
            enqueue = partial(self._enqueue_init, NO_PRODUCER, requested_id)
            return self.pending.begin("init_transactions", enqueue, requested_id)

    def begin_transaction(self) -> None:
        with self._lock:
            self.machine.raise_error()
            self.pending.ensure_none("begin_transaction")
            self.machine.move_to(State.IN_TRANSACTION)
            self._current.begin(self._finalized_feature("transaction.version"), self.identity.producer)

    def add_partition(self, topic_partition: TopicPartition, send: object) -> None:
        """`send` is about to append a record of the partition. The transaction's end waits for `send`, which may add
        more partitions until then, unless the end is an abort. Raises as `JoinedSends.begin_table` does.
        """
        with self._lock:
            self.machine.raise_error()
            self.sends.join(send)
            self._current.add(topic_partition)

    def begin_send_offsets(self, offsets: Offsets, group: GroupMetadata) -> OperationResult:
        """Commit a group's offsets as part of the transaction. The caller must not change `offsets` afterwards: a later
        call is compared with them.
        """
        with self._lock:
            if (pending := self.pending.joined("send_offsets_to_transaction", (offsets, group))) is not None:
                return pending
            self.machine.raise_error()
            if self.machine.state is not State.IN_TRANSACTION:
                raise IllegalStateError(
                    f"Offsets must be sent in a transaction; this producer {self.machine.state.value}."
                )
            enqueue = partial(self._queue.add_offsets, self._open, group, offsets, self._current.start)
            return self.pending.begin("send_offsets_to_transaction", enqueue, (offsets, group))

    def current(self) -> PreparedTransaction:
        """Return the transaction as it is."""
        with self._lock:
            self.machine.raise_error()
            return PreparedTransaction(self._open, self._current.is_empty)

    @property
    def _open(self) -> OpenTransaction:
        return OpenTransaction.of(self.transactional_id, self.identity.producer, self._current.version)

    def prepare(self) -> None:
        """Close the transaction to records and leave it open. The caller must wait for the records before."""
        with self._lock:
            self.machine.raise_error()
            self.pending.ensure_none("prepare_transaction")
            self.machine.move_to(State.PREPARED)
            self._current.is_prepared = True

    def lose(self, error: KafkaError, table: object = None) -> None:
        """Allow only an abort: a part of `table` is missing, or (None) the call that prepares has failed."""
        with self._lock:
            is_open = self.machine.may_become_abortable and table in self.sends
            if is_open or (table is None and self.machine.state is State.PREPARED):
                self._to_abortable(error)
            self.sends.end_table(table)

    def resume(self, prepared: PreparedTransaction) -> None:
        """Take over a transaction that another producer prepared, in order to end it."""
        with self._lock:
            transaction = prepared.transaction
            if transaction.transactional_id != self.transactional_id:
                raise IllegalStateError(
                    f"A transaction of {transaction.transactional_id} cannot be resumed by {self.transactional_id}."
                )
            self.machine.raise_error()
            self.pending.ensure_none("resume_transaction")
            if (state := self.machine.state) is not State.UNINITIALIZED:
                raise IllegalStateError(
                    f"Only a producer without its own transaction can resume one; this one {state.value}."
                )
            self.machine.move_to(State.PREPARED)
            self._current.resume(transaction.transaction_version, prepared.is_empty)
            self.identity.producer = transaction.producer

    def begin_commit(self) -> OperationResult:
        """End the transaction with all its records, once they are acknowledged."""
        with self._lock:
            if (pending := self.pending.joined("commit_transaction")) is not None:
                return pending
            self.machine.raise_error()
            return self.pending.begin("commit_transaction", partial(self._enqueue_end, True))

    def begin_abort(self) -> OperationResult:
        """End the transaction as if nothing had been sent. The Sender drops the records that it has not sent."""
        with self._lock:
            if (pending := self.pending.joined("abort_transaction")) is not None:
                return pending
            if self.has_fatal_error:
                self.machine.raise_error()
            return self.pending.begin("abort_transaction", partial(self._enqueue_end, False))

    def abort_open_transaction(self) -> None:
        """The producer closes: abort a transaction that is neither prepared nor ending, or waits for a table."""
        with self._lock:
            if self.sends.has_tables and self.machine.may_become_abortable:
                self._to_abortable(ProducerClosedError("The producer was closed while a table was being written."))
            if self.machine.state not in {State.IN_TRANSACTION, State.ABORTABLE_ERROR} or self._lacks_epoch:
                return  # without an epoch no transaction is open, and the outcome of the last one may not be known yet
            self.begin_abort()
        log.info("%s: aborting the open transaction, because the producer closes", self.transactional_id)

    # ---- batches: the Sender and the accumulator -------------------------------------------------------------------

    @property
    def is_completing(self) -> bool:
        return self.machine.state in {State.COMMITTING, State.ABORTING}

    @property
    def lost_transaction(self) -> KafkaError | None:
        """Why the transaction cannot be committed any more, so that the rest of its records need not be sent."""
        with self._lock:
            if self.machine.state is State.ABORTING:
                return self.machine.error or _aborted(self.transactional_id)
            return self.machine.error if self.machine.state is State.ABORTABLE_ERROR else None

    def reason_to_wait(self, topic_partition: TopicPartition) -> str | None:
        """Return why records of the partition must wait, if a broker refused something that they wait for."""
        with self._lock:
            refusal = self._current.last_refusal
            if topic_partition in self._current or refusal is None:
                return None
            return f"the partition is not in the transaction yet; the last answer was: {refusal}"

    def must_wait(self, batch: ProducerBatch) -> bool:
        with self._lock:
            state = self.machine.state
            if batch.topic_partition not in self._current or state is State.FATAL_ERROR:
                return True
            return (state in _LOST and not batch.has_sequence) or self.identity.must_wait(batch)

    def can_retry(self, batch: ProducerBatch, error: KafkaError, log_start_offset: int) -> bool:  # noqa: ARG002
        """Return whether to send `batch` again: not in a lost transaction, nor if the leader has lost its records."""
        with self._lock:
            if self.machine.is_lost or self.has_fatal_error:
                return False
            if isinstance(error, (OutOfOrderSequenceError, UnknownProducerIdError)):
                in_flight = self.identity.sequences[batch.topic_partition].in_flight
                return bool(in_flight) and in_flight[0] is not batch
            return error.retriable

    def handle_failed_batch(self, batch: ProducerBatch, error: KafkaError) -> None:
        with self._lock:
            self.identity.sequences[batch.topic_partition].remove(batch)
            if isinstance(error, _FATAL_FOR_A_BATCH):
                self.fail(error)
                return
            error.fatal = self.has_fatal_error
            self._current.has_gap = True
            if self.machine.may_become_abortable:
                self._to_abortable(error)

    def handle_refused_record(self, error: KafkaError, send: object) -> None:
        """Allow only an abort, because a record of `send` could not be added to the transaction.

        The same applies while the transaction is being committed or prepared and waits for `send`. From now on nothing
        waits for `send`.
        """
        with self._lock:
            if self.sends.may_join(send):
                self._to_abortable(error)
            self.sends.leave(send)

    # ---- requests: the Sender --------------------------------------------------------------------------------------

    def next_request(self, now_ms: int, has_incomplete: Callable[[], bool]) -> OutgoingRequest | None:
        """Return the next request, or None.

        The end of a transaction waits until every send that joined it is over, and then until no batch is incomplete.
        `has_incomplete` is called once the end is in the queue: no record can come after that.
        """
        with self._lock:
            if self._queue.in_flight is not None or self.has_fatal_error:
                return None
            self._enqueue_new_partitions()
            first = self._queue.first()
            if first is None or (first.priority is Priority.END_TXN and (self.sends or has_incomplete())):
                return None
            if first.priority is Priority.END_TXN and self._current.is_empty:
                self._queue.remove(first)
                self._on_end(None, first.result)
                return None
            next_ = self._queue.before(first, self._open, self._current, now_ms)
            return None if next_ is None else self._queue.outgoing(next_, now_ms, self._on_answer, self.fail)

    def fail(self, error: KafkaError) -> None:
        with self._lock:
            self._finish_ended()
            self.machine.move_to(State.FATAL_ERROR, error)
            self._queue.clear()
            self.pending.give_up(error)

    def give_up(self, error: KafkaError) -> None:
        """The Sender has ended: nothing is sent any more, and the operation under way fails with `error`."""
        with self._lock:
            self._finish_ended()
            self.pending.close(error)

    def _finish_ended(self) -> None:
        """Report success if only the next epoch is missing: the transaction before it has ended."""
        if self.machine.state is State.INITIALIZING and not self.pending.is_under_way("init_transactions"):
            self.pending.give_up(None)

    def _enqueue_new_partitions(self) -> None:
        added = self._current.ask_for_new() if self.machine.state in _TAKES_PARTITIONS else None
        if added:
            result = OperationResult("add partitions")
            self._queue.add(
                requests.add_partitions(self._open, added, lambda _: self._current.confirm_added(added), result)
            )

    def _enqueue_init(self, producer: ProducerIdAndEpoch, transactional_id: str, result: OperationResult) -> None:
        self.machine.move_to(State.INITIALIZING)
        self.transactional_id = self._queue.transactional_id = transactional_id
        who = (self.transactional_id, self._transaction_timeout_ms, producer)
        self._queue.add(requests.init_producer_id(*who, lambda body: self._on_initialized(body, result), result))

    def _enqueue_end(self, committed: bool, result: OperationResult) -> None:
        state = State.COMMITTING if committed else State.ABORTING
        self.machine.move_to(state, self.machine.error)  # with which unsent records fail, if there is one
        if not committed:
            self.pending.give_up(_aborted(self.transactional_id))
            self.sends.forget_tables()  # not waited for: a table may never end, and the next part raises
            self._queue.clear_for_abort()
        self._queue.add(requests.end_txn(self._open, committed, lambda body: self._on_end(body, result), result))

    def _undo(self, error: KafkaError) -> None:
        """An operation was interrupted as it began: only an abort is left, or `init_transactions` again."""
        if self.machine.state is State.INITIALIZING:
            self.machine.move_to(State.UNINITIALIZED)
            self._queue.clear()
        elif self.machine.may_become_abortable or self.is_completing:
            self._to_abortable(self.machine.error or error)

    def _on_answer(self, request: TransactionRequest, body: Message, node_id: str, now_ms: int) -> None:
        """Handle an answer. `body` is None if the connection was lost before it came."""
        with self._lock:
            self._queue.in_flight = None
            if body is None:  # a copy may still arrive, also of a request that nothing waits for
                self.pending.last_loss = "A broker was disconnected before it answered."
                request.was_lost = True
                self._current.has_gap |= request.may_be_late
                if request.adds_to_transaction:
                    self._current.may_have_started()
            if self.has_fatal_error or request.result.is_done:
                return
            if body is None:
                self._queue.lost(request, now_ms)
            elif (refusal := request.most_severe_refusal(body)) is not None:
                self._on_refusal(request, refusal, node_id, now_ms)
            else:
                if request.priority is not Priority.FIND_COORDINATOR:  # which does not help the records
                    self._current.last_refusal = None
                self._current.was_added(request.adds, node_id)
                request.succeeded(body)

    # ---- what answers lead to, with the lock held ------------------------------------------------------------------

    def _on_refusal(self, request: TransactionRequest, refusal: Refusal, node_id: str, now_ms: int) -> None:
        action, error = refusal.action, request.error_of(refusal, node_id)
        if self.machine.is_lost and request.adds_to_transaction and refusal.error_code in requests.NOTHING_ADDED:
            request.result.finish(error)  # the abort needs no answer, and the topic may never come back
            return
        is_end = request.priority is Priority.END_TXN
        if is_end and self._had_nothing_to_end(request, error):
            return
        if action is Action.FIND_COORDINATOR:
            self._queue.forget_coordinator(request)
        if action <= Action.FIND_COORDINATOR or self._queue.doubts(request, error):
            self._current.last_refusal = self.pending.last_refusal = error
            if (attempts := self._queue.again(request, refusal.error_code, now_ms)) % ATTEMPTS_BEFORE_A_WARNING == 0:
                self._queue.forget_coordinator(request)  # one that is cut off may refuse for ever
                self._queue.say(logging.WARNING, f"attempt {attempts} was refused: {error}")
        elif self._may_initialize_again(request, error):
            pass
        elif action is Action.ABORT and self.machine.is_lost and not is_end:
            request.result.finish(error)
        elif action is Action.FAIL or not self.machine.may_become_abortable:
            self.fail(error)
        else:
            request.result.finish(error)
            self._current.has_gap |= isinstance(error, UnknownProducerIdError)
            self._to_abortable(error)

    def _may_initialize_again(self, request: TransactionRequest, error: KafkaError) -> bool:
        """Handle a refusal of a producer id after which the producer can go on. Return False for any other."""
        if isinstance(error, AuthorizationError) and self.pending.is_under_way("init_transactions"):
            self.machine.move_to(State.UNINITIALIZED)  # it may be asked for again, once it is granted
            self._queue.clear()
            error.fatal = False
            request.result.finish(error)
            return True
        if isinstance(error, TransactionAbortableError) and request.priority is Priority.INIT_PRODUCER_ID:
            self._finish_ended()
            self._lacks_epoch = True
            self._to_abortable(error)
            return True
        return False

    def _had_nothing_to_end(self, request: TransactionRequest, error: KafkaError) -> bool:
        if self._current.is_in_doubt and error.error_code == requests.INVALID_TXN_STATE:
            request.succeeded(None)
            return True
        return False

    def _on_initialized(self, body: Message, result: OperationResult) -> None:
        self.identity.adopt(body)
        self._queue.say(logging.INFO, "producer id {}, epoch {}".format(*self.identity.producer))
        self._current.forget()
        self._lacks_epoch = False
        self.machine.move_to(State.READY)
        result.finish()

    def _on_end(self, body: Message, result: OperationResult) -> None:
        """Handle the end of the transaction. `body` is None if there was nothing to end."""
        if getattr(body, "producer_id", -1) >= 0:  # in the answers of version 5 and above
            self.identity.adopt(body)
        cluster_version = self._finalized_feature("transaction.version")
        needs_next_epoch = self._current.needs_next_epoch(cluster_version) or self._lacks_epoch
        next_state = State.UNINITIALIZED if self._current.is_resumed else State.READY
        self._current.forget()
        if needs_next_epoch:
            self._init_after_end(result)
            return
        self.machine.move_to(next_state)
        result.finish()

    def _init_after_end(self, result: OperationResult) -> None:
        self._enqueue_init(self.identity.producer, self.transactional_id, result)

    def _to_abortable(self, error: KafkaError) -> None:
        self.machine.become_abortable(error)
        self.pending.give_up(error)
        self._queue.clear_for_abort()


Idempotence = ProducerIdentity | TransactionManager
"""The object that the Sender asks for the producer id and the order of batches."""


def give_up_after_fault(owner: Idempotence, batches: Iterable[ProducerBatch], error: KafkaError) -> None:
    """Give up `batches`. An internal error, the cause of `error`, prevented their outcome.

    After a fault in the owner's own state nothing may reach a broker: the producer fails (KAFKA-14831).
    """
    try:
        if isinstance(error.__cause__, IllegalStateError):
            raise error.__cause__
        for batch in batches:
            owner.handle_failed_batch(batch, error)
    except Exception:
        owner.fail(error)
        raise


def _aborted(transactional_id: str) -> TransactionAbortedError:
    return TransactionAbortedError(
        f"The transaction of {transactional_id} was aborted, by abort_transaction or because the producer closes,"
        " before this had ended. Nothing of it is committed."
    )


def leave_cluster(owner: Idempotence, change: str) -> None:
    """The brokers belong to another cluster: go on under an id of that one. A transaction cannot go on: no coordinator
    there knows it, and its records would hold up all readers.
    """
    log.warning("The brokers belong to another cluster now: %s. The producer id is not used any more.", change)
    if isinstance(owner, ProducerIdentity):
        owner.give_up_id()
    elif not owner.has_fatal_error:
        owner.fail(
            KafkaError(
                f"The brokers belong to another cluster now: {change}. Transactions of {owner.transactional_id} are in"
                " the one before. Does bootstrap.servers name the right brokers? Make another producer."
            )
        )
