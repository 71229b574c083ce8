"""The Sender's side of a transactional producer: which request goes next, what its answer leads to, and which batches
may go. The operations that put requests into the queue are in `transactional_manager`.

One lock guards both sides. Reference: org.apache.kafka.clients.producer.internals.TransactionManager (KIP-98, KIP-360,
KIP-890).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    AuthorizationError,
    ClusterAuthorizationError,
    InvalidPidMappingError,
    InvalidProducerEpochError,
    KafkaError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    TransactionAbortableError,
    TransactionAbortedError,
    TransactionalIdAuthorizationError,
    UnknownProducerIdError,
    UnsupportedVersionError,
)
from spark_kafka_sink.common.open_transaction import ProducerIdAndEpoch
from spark_kafka_sink.common.retold import retold
from spark_kafka_sink.producer import transaction_requests as requests
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.transaction_content import TransactionContent
from spark_kafka_sink.producer.transaction_manager import (
    ATTEMPTS_BEFORE_A_WARNING,
    OutgoingRequest,
    State,
    TransactionManager,
)
from spark_kafka_sink.producer.transaction_requests import (
    Action,
    OperationResult,
    PendingOperation,
    Priority,
    Refusal,
    TransactionQueue,
    TransactionRequest,
)
from spark_kafka_sink.protocol.messages import Message
from spark_kafka_sink.protocol.requests import InitProducerIdRequest

log = logging.getLogger(__name__)

_FATAL_FOR_A_BATCH: Final = (
    AuthenticationError,
    ClusterAuthorizationError,
    TransactionalIdAuthorizationError,
    ProducerFencedError,
    UnsupportedVersionError,
    InvalidPidMappingError,
)
_MAY_BECOME_ABORTABLE: Final = frozenset(
    {State.IN_TRANSACTION, State.PREPARED, State.COMMITTING, State.ABORTABLE_ERROR}
)
_TAKES_PARTITIONS: Final = frozenset({State.IN_TRANSACTION, State.PREPARED, State.COMMITTING})
"""Records may still be on their way into the transaction."""
_LOST: Final = frozenset({State.ABORTABLE_ERROR, State.ABORTING})


class TransactionalExchange(TransactionManager):
    """States as the table of `State` has them."""

    is_transactional = True
    recovers_by_itself = False

    def __init__(self, transactional_id: str, transaction_timeout_ms: int, retry_backoff: ExponentialBackoff) -> None:
        super().__init__(retry_backoff)
        self.transactional_id = transactional_id
        self.transaction_version = 1
        self._transaction_timeout_ms = transaction_timeout_ms
        self._lock = threading.RLock()
        self._queue = TransactionQueue(retry_backoff)
        self._pending = PendingOperation()
        self._content = TransactionContent()
        self._must_bump_epoch = False
        """What was sent in this epoch has a gap, or may still arrive: under version 1 the next transaction takes
        another.
        """
        self._lacks_epoch = False
        """The coordinator refused one until an abort: the next abort asks for it."""
        self._is_resumed = False

    @property
    def name_of_transactions(self) -> str | None:
        return self.transactional_id

    @property
    def lost_transaction(self) -> KafkaError | None:
        with self._lock:
            if self.state is State.ABORTING:
                return self.last_error or self._aborted()
            return self.last_error if self.state is State.ABORTABLE_ERROR else None

    def reason_to_wait(self, topic_partition: TopicPartition) -> str | None:
        with self._lock:
            if topic_partition in self._content or self._refusal is None:
                return None
            return f"the partition is not in the transaction yet; the last answer was: {self._refusal}"

    # ---- batches: the Sender and the accumulator -------------------------------------------------------------------

    @property
    def is_completing(self) -> bool:
        return self.state in {State.COMMITTING, State.ABORTING}

    def must_wait(self, batch: ProducerBatch) -> bool:
        with self._lock:
            if batch.topic_partition not in self._content or (not batch.has_sequence and self.state in _LOST):
                return True
            return super().must_wait(batch)

    def handle_failed_batch(self, batch: ProducerBatch, error: KafkaError) -> None:
        with self._lock:
            self.sequences[batch.topic_partition].remove(batch)
            if isinstance(error, _FATAL_FOR_A_BATCH):
                self.fail(error)
                return
            error.fatal = self.has_fatal_error
            self._must_bump_epoch = True
            if self.state in _MAY_BECOME_ABORTABLE:
                self._to_abortable(error)

    def handle_refused_record(self, error: KafkaError, send: object) -> None:
        """A record that belongs to the transaction was not taken into it: also to one that is being committed or
        prepared, where `send` joined it before, for which that waits. Whatever it was, nobody waits for `send` now.
        """
        with self._lock:
            if self._is_taking(send):
                self._to_abortable(error)
            self.sends.discard(send)

    def _is_taking(self, send: object) -> bool:
        """Whether the transaction takes records of `send`: while it is closed for others, if it waits for this one."""
        waits = self.state in {State.PREPARED, State.COMMITTING} and send in self.sends
        return self.state is State.IN_TRANSACTION or waits

    def can_retry(self, batch: ProducerBatch, error: KafkaError, log_start_offset: int) -> bool:  # noqa: ARG002
        """Not in a transaction that is lost already, and not where the leader has lost records of it."""
        with self._lock:
            if self.state in _LOST or self.has_fatal_error:
                return False
            if isinstance(error, (OutOfOrderSequenceError, UnknownProducerIdError)):
                in_flight = self.sequences[batch.topic_partition].in_flight
                return bool(in_flight) and in_flight[0] is not batch
            return error.retriable

    # ---- requests: the Sender thread -------------------------------------------------------------------------------

    def next_request(self, now_ms: int, has_incomplete: Callable[[], bool]) -> OutgoingRequest | None:
        """What to send next, if anything. The end of a transaction waits until no send is under way that joined it, and
        then until no batch is incomplete, which is asked once the end is in the queue: no record can come after that.
        """
        with self._lock:
            if self._queue.in_flight is not None or self.has_fatal_error:
                return None
            self._enqueue_new_partitions()
            first = self._queue.first()
            if first is None or (first.priority is Priority.END_TXN and (self.sends or has_incomplete())):
                return None
            if first.priority is Priority.END_TXN and self._content.is_empty:
                self._queue.remove(first)
                self._on_end(None, first.result)
                return None
            request, node = self._queue.with_coordinator(first)
            if request.not_before_ms > now_ms:
                return None
            return OutgoingRequest(
                request=request.request,
                node=node,
                take=lambda: self._take(request),
                answered=lambda body, answered_ms: self._on_answer(request, body, answered_ms),
                refused=lambda error: self.fail(_of_old_brokers(request, error)),
                unreachable=lambda: self._on_unreachable(request, node, now_ms),
            )

    def request_delay_ms(self, now_ms: int) -> int:
        """How long until a request that waits out its backoff may go."""
        with self._lock:
            return self._queue.delay_ms(now_ms)

    def fail(self, error: KafkaError) -> None:
        with self._lock:
            self._tell_of_an_end_before()
            super().fail(error)
            self._queue.clear()
            self._pending.give_up(error)

    def give_up(self, error: KafkaError) -> None:
        with self._lock:
            self._tell_of_an_end_before()
            self._pending.close(error)

    def _tell_of_an_end_before(self) -> None:
        """Where the epoch after a transaction is waited for, that has ended: it is no failure of its end that nothing
        can come after it.
        """
        if self.state is State.INITIALIZING and not self._pending.is_under_way("init_transactions"):
            self._pending.give_up(None)

    def _enqueue_new_partitions(self) -> None:
        added = self._content.ask_for_new() if self.state in _TAKES_PARTITIONS else None
        if added:
            result = OperationResult("add partitions")
            self._queue.add(
                requests.add_partitions(
                    self.transactional_id, self.producer, added, lambda _: self._content.give_in(added), result
                )
            )

    def _enqueue_init(self, producer: ProducerIdAndEpoch, result: OperationResult) -> None:
        def succeeded(body: Message) -> None:
            self._on_initialized(body, result)

        who = (self.transactional_id, self._transaction_timeout_ms, producer)
        self._queue.add(requests.init_producer_id(*who, succeeded, result))

    def _enqueue_end(self, result: OperationResult, *, committed: bool) -> OperationResult:
        def succeeded(body: Message) -> None:
            self._on_end(body, result)

        who = (self.transactional_id, self.producer)
        self._queue.add(requests.end_txn(*who, committed, self.transaction_version, succeeded, result))
        return result

    def _take(self, request: TransactionRequest) -> bool:
        with self._lock:
            return self._queue.take(request)

    def _on_unreachable(self, request: TransactionRequest, node: Node | None, now_ms: int) -> None:
        with self._lock:
            self._pending.last_loss = f"{node or 'A broker'} cannot be reached."
            if request in self._queue:
                self._queue.forget_coordinator(request)
                self._queue.again(request, 0, now_ms)

    def _on_answer(self, request: TransactionRequest, body: Message, now_ms: int) -> None:
        """`body` None: the connection went before an answer came."""
        with self._lock:
            self._queue.in_flight = None
            if body is None:  # a copy may arrive yet, also of what nobody waits for any more
                self._pending.last_loss = "A broker was disconnected before it answered."
                self._must_bump_epoch |= request.may_be_late
                request.is_in_doubt = True
            if self.has_fatal_error or request.result.is_done:
                return
            if body is None:
                self._queue.forget_coordinator(request)
                self._queue.again(request, 0, now_ms)
                return
            refusals = list(request.refusals(body))
            if not refusals:
                if request.priority is not Priority.FIND_COORDINATOR:  # by which nobody is a step further yet
                    self._refusal = None
                request.succeeded(body)
                return
            worst = max(refusals, key=lambda refusal: requests.action_for(refusal.error_code))
            self._on_refusal(request, worst, now_ms)

    def _on_refusal(self, request: TransactionRequest, refusal: Refusal, now_ms: int) -> None:
        action = requests.action_for(refusal.error_code)
        error = refusal.error()
        if self.state in _LOST and request.adds_to_transaction and refusal.error_code in requests.NOTHING_ADDED:
            if request.is_in_doubt:
                self._content.may_have_started()
            request.result.finish(error)  # nobody waits for it any more, and the topic may never come back
            return
        is_end = request.priority is Priority.END_TXN
        if is_end and self._had_nothing_to_end(request, error):
            return
        if action is Action.FIND_COORDINATOR:
            self._queue.forget_coordinator(request)
        if action <= Action.FIND_COORDINATOR:
            self._refusal = self._pending.last_refusal = error
            self._queue.again(request, refusal.error_code, now_ms)
            if request.attempts % ATTEMPTS_BEFORE_A_WARNING == 0:
                log.warning("%s: attempt %d was refused: %s", self.transactional_id, request.attempts, error)
        elif self._may_initialize_again(request, error):
            pass
        elif action is Action.ABORT and self.state in _LOST and not is_end:
            request.result.finish(error)
        elif action is Action.FAIL or self.state not in _MAY_BECOME_ABORTABLE:
            self.fail(_as_fenced(error, refusal))
        else:
            request.result.finish(error)
            self._must_bump_epoch |= isinstance(error, (UnknownProducerIdError, InvalidPidMappingError))
            self._to_abortable(error)

    def _may_initialize_again(self, request: TransactionRequest, error: KafkaError) -> bool:
        """Handle a refusal of a producer id that is not the producer's end; False for any other."""
        if isinstance(error, AuthorizationError) and self._pending.is_under_way("init_transactions"):
            self._move_to(State.UNINITIALIZED)  # it may be asked for again, once it is granted
            self._queue.clear()
            error.fatal = False
            request.result.finish(error)
            return True
        if isinstance(error, TransactionAbortableError) and request.priority is Priority.INIT_PRODUCER_ID:
            self._tell_of_an_end_before()
            self._lacks_epoch = True
            self._to_abortable(error)
            return True
        return False

    def _had_nothing_to_end(self, request: TransactionRequest, error: KafkaError) -> bool:
        if self._content.is_in_doubt and error.error_code == requests.INVALID_TXN_STATE:
            request.succeeded(None)
            return True
        if self.state is State.ABORTING and not self._is_resumed and isinstance(error, InvalidPidMappingError):
            # the coordinator has forgotten the producer, and no transaction is open when it does
            self._init_after_end(request.result)
            return True
        return False

    # ---- what answers lead to, with the lock held ------------------------------------------------------------------

    def _on_initialized(self, body: Message, result: OperationResult) -> None:
        self.producer = ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))
        log.info("%s: producer id %d, epoch %d", self.transactional_id, *self.producer)
        self._forget_transaction()
        self._lacks_epoch = False
        self._move_to(State.READY)
        result.finish()

    def _on_end(self, body: Message, result: OperationResult) -> None:
        """The transaction has ended; `body` is None where there was nothing to end."""
        if body is not None and getattr(body, "producer_id", -1) >= 0:
            self.producer = ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))
        must_bump = self._must_bump_epoch and self.transaction_version < 2 and not self._is_resumed
        next_state = State.UNINITIALIZED if self._is_resumed else State.READY
        self._forget_transaction()
        if must_bump or self._lacks_epoch:
            self._init_after_end(result)
            return
        self._move_to(next_state)
        result.finish()

    def _init_after_end(self, result: OperationResult) -> None:
        self._move_to(State.INITIALIZING)
        self._enqueue_init(self.producer, result)

    def _forget_transaction(self) -> None:
        self._content.forget()
        self._refusal = None
        self._must_bump_epoch = False
        self._is_resumed = False

    # ---- errors, with the lock held --------------------------------------------------------------------------------

    def _to_abortable(self, error: KafkaError) -> None:
        error.fatal = False  # its class may say so, for producers without transactions
        first = self.last_error if self.state is State.ABORTABLE_ERROR else None
        self._move_to(State.ABORTABLE_ERROR, first or error)
        self._pending.give_up(error)
        self._queue.clear_for_abort()

    def _aborted(self) -> TransactionAbortedError:
        return TransactionAbortedError(
            f"The transaction of {self.transactional_id} was aborted, by abort_transaction or because the producer"
            " closes, before this had ended. Nothing of it is committed."
        )

    def _raise_error(self) -> None:
        if self.last_error is not None and self.state in {State.ABORTABLE_ERROR, State.FATAL_ERROR}:
            text = f"The producer met an error before: {self.last_error}"
            if self.last_error.retriable and self.state is State.ABORTABLE_ERROR:
                # a record's time-out, say: a commit that raised it again would be called again, for ever
                raise TransactionAbortableError(f"{text} Only abort_transaction is left.")
            raise retold(self.last_error, text)


def _of_old_brokers(request: TransactionRequest, error: KafkaError) -> KafkaError:
    """What to do where a broker is too old to give another epoch after a transaction that lost a batch.

    The numbers of a lost batch are not used again instead, as the Java client does where it may: a leader that has the
    batch after all would take the next transaction's records for its doubles and drop them.
    """
    init = request.request
    asks_for_next_epoch = isinstance(init, InitProducerIdRequest) and init.producer_id >= 0
    if not asks_for_next_epoch or not isinstance(error, UnsupportedVersionError):
        return error
    return retold(
        error,
        "A batch of an aborted transaction failed, and only brokers of Kafka 2.5 or newer (KIP-360) let the same"
        f" producer go on after that: close this producer and make another, or upgrade the brokers. {error}",
    )


def _as_fenced(error: KafkaError, refusal: Refusal) -> KafkaError:
    """From a coordinator, an invalid epoch says that somebody else has a newer one."""
    if not isinstance(error, InvalidProducerEpochError):
        return error
    return ProducerFencedError(f"{refusal.place}: {ProducerFencedError.sentence}")
