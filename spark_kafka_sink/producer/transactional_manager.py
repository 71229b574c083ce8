"""What a producer with a transactional.id may do, and the requests by which it does it.

Application threads begin, add, prepare, commit and abort; the Sender thread sends and settles. One lock guards both
sides; the result of an operation is waited for outside it. Reference:
org.apache.kafka.clients.producer.internals.TransactionManager (KIP-98, KIP-360, KIP-447, KIP-890).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    IllegalStateError,
    InvalidPidMappingError,
    InvalidProducerEpochError,
    KafkaError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    TransactionalIdAuthorizationError,
    UnknownProducerIdError,
    UnsupportedVersionError,
)
from spark_kafka_sink.producer import transactional_requests as requests
from spark_kafka_sink.producer.partition_sequences import NO_PRODUCER, ProducerIdAndEpoch
from spark_kafka_sink.producer.pending_operation import PendingOperation, TransactionalResult
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.transaction_content import PreparedTransaction, TransactionContent
from spark_kafka_sink.producer.transaction_manager import OutgoingRequest, State, TransactionManager
from spark_kafka_sink.producer.transactional_queue import TransactionalQueue
from spark_kafka_sink.producer.transactional_requests import (
    Action,
    GroupMetadata,
    Priority,
    Refusal,
    TransactionalRequest,
)
from spark_kafka_sink.protocol.messages import Message

log = logging.getLogger(__name__)

_FATAL_FOR_A_BATCH: Final = (
    ClusterAuthorizationError,
    TransactionalIdAuthorizationError,
    ProducerFencedError,
    UnsupportedVersionError,
    InvalidPidMappingError,
)
_OPEN: Final = frozenset({State.IN_TRANSACTION, State.PREPARED})
_ENDING: Final = frozenset({State.COMMITTING, State.ABORTING})


class TransactionalManager(TransactionManager):
    """States as the table of `State` has them.

    `finalized_feature` tells the cluster's level of a feature: transaction.version 2 and above is KIP-890's protocol,
    in which brokers add partitions by themselves and every transaction has an epoch of its own.
    """

    is_transactional = True
    recovers_by_itself = False

    def __init__(
        self,
        transactional_id: str,
        transaction_timeout_ms: int,
        retry_backoff: ExponentialBackoff,
        finalized_feature: Callable[[str], int],
    ) -> None:
        super().__init__(retry_backoff)
        self.transactional_id = transactional_id
        self.transaction_version = 1
        self._transaction_timeout_ms = transaction_timeout_ms
        self._finalized_feature = finalized_feature
        self._lock = threading.RLock()
        self._queue = TransactionalQueue(retry_backoff)
        self._pending = PendingOperation()
        self._content = TransactionContent()
        self._must_bump_epoch = False

    # ---- operations: application threads ---------------------------------------------------------------------------

    def begin_initialize(self) -> TransactionalResult:
        """Ask for a producer id and epoch, which fences every older producer of the id."""
        with self._lock:
            pending = self._pending.joined("init_transactions")
            if pending is not None:
                return pending
            self._move_to(State.INITIALIZING)
            self.producer = NO_PRODUCER
            result = self._pending.begin("init_transactions")
            self._enqueue_init(NO_PRODUCER, result)
            return result

    def begin_transaction(self) -> None:
        with self._lock:
            self._raise_error()
            self._pending.ensure_none("begin_transaction")
            self._move_to(State.IN_TRANSACTION)
            self.transaction_version = 2 if self._finalized_feature("transaction.version") >= 2 else 1
            self._forget_transaction()

    def add_partition(self, topic_partition: TopicPartition) -> None:
        """A record of the partition is about to be appended. Raises IllegalStateError outside a transaction, and the
        error of one that can only be aborted.
        """
        with self._lock:
            self._raise_error()
            if self.state is not State.IN_TRANSACTION:
                raise IllegalStateError(
                    f"A record can be sent between begin_transaction and its end; this producer {self.state.value}."
                )
            self._content.add(topic_partition, self.transaction_version)

    def begin_send_offsets(
        self, offsets: Mapping[TopicPartition, tuple[int, str | None]], group: GroupMetadata
    ) -> TransactionalResult:
        """Commit a group's offsets as part of the transaction."""
        with self._lock:
            pending = self._pending.joined("send_offsets_to_transaction")
            if pending is not None:
                return pending
            self._raise_error()
            if self.state is not State.IN_TRANSACTION:
                raise IllegalStateError(f"Offsets belong into a transaction; this producer {self.state.value}.")
            result = self._pending.begin("send_offsets_to_transaction")

            def commit_offsets(_: Message) -> None:
                self._content.start()
                commit = requests.txn_offset_commit(
                    self.transactional_id,
                    self.producer,
                    group,
                    offsets,
                    self.transaction_version,
                    lambda _: result.finish(),
                    result,
                )
                self._queue.add(commit)

            if self.transaction_version >= 2:
                commit_offsets(None)
            else:
                self._queue.add(
                    requests.add_offsets(self.transactional_id, self.producer, group.group_id, commit_offsets, result)
                )
            return result

    def prepare(self) -> PreparedTransaction:
        """Close the transaction to records and leave it open. The caller has flushed."""
        with self._lock:
            self._raise_error()
            self._pending.ensure_none("prepare_transaction")
            self._move_to(State.PREPARED)
            return PreparedTransaction(
                self.transactional_id, *self.producer, self.transaction_version, self._content.is_empty
            )

    def resume(self, prepared: PreparedTransaction) -> None:
        """Take over a transaction that another producer prepared, in order to end it."""
        with self._lock:
            if prepared.transactional_id != self.transactional_id:
                raise IllegalStateError(
                    f"A transaction of {prepared.transactional_id} cannot be resumed by {self.transactional_id}."
                )
            self._move_to(State.PREPARED)
            self._forget_transaction()
            self.producer = ProducerIdAndEpoch(prepared.producer_id, prepared.producer_epoch)
            self.transaction_version = prepared.transaction_version
            if not prepared.is_empty:
                self._content.start()

    def begin_commit(self) -> TransactionalResult:
        """End the transaction with all its records, once they are acknowledged."""
        with self._lock:
            pending = self._pending.joined("commit_transaction")
            if pending is not None:
                return pending
            self._raise_error()
            self._move_to(State.COMMITTING)
            return self._enqueue_end(self._pending.begin("commit_transaction"), committed=True)

    def begin_abort(self) -> TransactionalResult:
        """End the transaction as if nothing had been sent; the Sender drops what has not been."""
        with self._lock:
            pending = self._pending.joined("abort_transaction")
            if pending is not None:
                return pending
            if self.has_fatal_error:
                self._raise_error()
            self._pending.give_up(KafkaError("The transaction was aborted."))
            self._move_to(State.ABORTING)
            self._content.forget_new()
            self._queue.clear(but=[Priority.FIND_COORDINATOR])
            return self._enqueue_end(self._pending.begin("abort_transaction"), committed=False)

    @property
    def name_of_transactions(self) -> str | None:
        return self.transactional_id

    def abort_what_is_open(self) -> None:
        """The producer closes: a transaction that nobody has prepared or begun to end is aborted."""
        with self._lock:
            if self.state in {State.IN_TRANSACTION, State.ABORTABLE_ERROR}:
                log.info("%s: aborting the open transaction, because the producer closes", self.transactional_id)
                self._pending.give_up(KafkaError("The producer was closed."))
                self.begin_abort()

    @property
    def lost_transaction(self) -> KafkaError | None:
        if self.state is State.ABORTING:
            return KafkaError(f"The transaction of {self.transactional_id} was aborted.")
        return self.last_error if self.state is State.ABORTABLE_ERROR else None

    # ---- the accumulator's questions -------------------------------------------------------------------------------

    @property
    def is_completing(self) -> bool:
        return self.state in _ENDING

    def must_wait(self, batch: ProducerBatch) -> bool:
        with self._lock:
            if not batch.has_sequence and self.state in {State.ABORTABLE_ERROR, State.ABORTING}:
                return True
            if self.transaction_version < 2 and batch.topic_partition not in self._content:
                return True
            return super().must_wait(batch)

    def handle_failed_batch(self, batch: ProducerBatch, error: KafkaError) -> None:
        with self._lock:
            self.sequences.entry(batch.topic_partition).remove(batch)
            if isinstance(error, _FATAL_FOR_A_BATCH):
                self.fail(error)
            elif self.state in _OPEN | {State.COMMITTING, State.ABORTABLE_ERROR}:
                self._must_bump_epoch = True
                self._to_abortable(error)

    def can_retry(self, batch: ProducerBatch, error: KafkaError, log_start_offset: int) -> bool:  # noqa: ARG002
        """Not in a transaction that is lost already, and not where the leader has lost records of it."""
        with self._lock:
            if self.state in {State.ABORTABLE_ERROR, State.ABORTING, State.FATAL_ERROR}:
                return False
            if isinstance(error, (OutOfOrderSequenceError, UnknownProducerIdError)):
                in_flight = self.sequences.entry(batch.topic_partition).in_flight
                return bool(in_flight) and in_flight[0] is not batch
            return error.retriable

    # ---- requests: the Sender thread -------------------------------------------------------------------------------

    def next_request(self, now_ms: int, has_incomplete: bool) -> OutgoingRequest | None:
        """What to send next, if anything; the end of a transaction waits until no batch is incomplete."""
        with self._lock:
            if self._queue.in_flight is not None or self.has_fatal_error:
                return None
            self._enqueue_new_partitions()
            first = self._queue.first()
            if first is None or (first.priority is Priority.END_TXN and has_incomplete):
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
                sent=lambda: self._on_sent(request),
                answered=lambda body, answered_ms: self._on_answer(request, body, answered_ms),
                refused=self.fail,
                unreachable=lambda: self._on_unreachable(request, now_ms),
            )

    def request_delay_ms(self, now_ms: int) -> int:
        """How long until a request that waits out its backoff may go."""
        with self._lock:
            return self._queue.delay_ms(now_ms)

    def fail(self, error: KafkaError) -> None:
        with self._lock:
            super().fail(error)
            self._queue.clear()
            self._pending.give_up(error)

    def _enqueue_new_partitions(self) -> None:
        added = self._content.ask_for_new() if self.state in {State.IN_TRANSACTION, State.COMMITTING} else None
        if added:
            result = TransactionalResult("add partitions")
            self._queue.add(
                requests.add_partitions(
                    self.transactional_id, self.producer, added, lambda _: self._content.give_in(added), result
                )
            )

    def _enqueue_init(self, producer: ProducerIdAndEpoch, result: TransactionalResult) -> None:
        def succeeded(body: Message) -> None:
            self._on_initialized(body, result)

        who = (self.transactional_id, self._transaction_timeout_ms, producer)
        self._queue.add(requests.init_producer_id(*who, succeeded, result))

    def _enqueue_end(self, result: TransactionalResult, *, committed: bool) -> TransactionalResult:
        def succeeded(body: Message) -> None:
            self._on_end(body, result)

        who = (self.transactional_id, self.producer)
        self._queue.add(requests.end_txn(*who, committed, self.transaction_version, succeeded, result))
        return result

    def _on_sent(self, request: TransactionalRequest) -> None:
        with self._lock:
            self._queue.sent(request)

    def _on_unreachable(self, request: TransactionalRequest, now_ms: int) -> None:
        with self._lock:
            self._queue.forget_coordinator(request)
            self._queue.again(request, 0, now_ms)

    def _on_answer(self, request: TransactionalRequest, body: Message, now_ms: int) -> None:
        """`body` None: the connection went before an answer came."""
        with self._lock:
            self._queue.in_flight = None
            if self.has_fatal_error or request.result.is_done:
                return
            if body is None:
                self._queue.forget_coordinator(request)
                self._queue.again(request, 0, now_ms)
                return
            refusals = list(request.refusals(body))
            if not refusals:
                request.succeeded(body)
                return
            worst = max(refusals, key=lambda refusal: requests.action_for(refusal.error_code))
            self._on_refusal(request, worst, now_ms)

    def _on_refusal(self, request: TransactionalRequest, refusal: Refusal, now_ms: int) -> None:
        action = requests.action_for(refusal.error_code)
        if action is Action.FIND_COORDINATOR:
            self._queue.forget_coordinator(request)
        if action <= Action.FIND_COORDINATOR:
            self._queue.again(request, refusal.error_code, now_ms)
            return
        error = refusal.error()
        if isinstance(error, InvalidProducerEpochError):
            error = ProducerFencedError(f"{refusal.place}: {ProducerFencedError.sentence}")
        if action is Action.FAIL or self.state not in _OPEN | {State.COMMITTING}:
            self.fail(error)
            return
        request.result.finish(error)
        self._must_bump_epoch |= isinstance(error, (UnknownProducerIdError, InvalidPidMappingError))
        self._to_abortable(error)

    # ---- what answers lead to, with the lock held ------------------------------------------------------------------

    def _on_initialized(self, body: Message, result: TransactionalResult) -> None:
        self.producer = ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))
        log.info("%s: producer id %d, epoch %d", self.transactional_id, *self.producer)
        self._forget_transaction()
        self._move_to(State.READY)
        result.finish()

    def _on_end(self, body: Message, result: TransactionalResult) -> None:
        """The transaction has ended; `body` is None where there was nothing to end."""
        if body is not None and getattr(body, "producer_id", -1) >= 0:
            self.producer = ProducerIdAndEpoch(int(body.producer_id), int(body.producer_epoch))
        must_bump = self._must_bump_epoch and self.transaction_version < 2
        self._forget_transaction()
        if must_bump:
            self._move_to(State.INITIALIZING)
            self._enqueue_init(self.producer, result)
            return
        self._move_to(State.READY)
        result.finish()

    def _forget_transaction(self) -> None:
        self._content.forget()
        self._must_bump_epoch = False

    # ---- results and errors, with the lock held --------------------------------------------------------------------

    def _to_abortable(self, error: KafkaError) -> None:
        first = self.last_error if self.state is State.ABORTABLE_ERROR else None
        self._move_to(State.ABORTABLE_ERROR, first or error)
        self._pending.give_up(error)
        self._queue.clear(but=[Priority.FIND_COORDINATOR])

    def _raise_error(self) -> None:
        if self.last_error is not None and self.state in {State.ABORTABLE_ERROR, State.FATAL_ERROR}:
            told = type(self.last_error)(f"The producer met an error before: {self.last_error}")
            told.error_code = self.last_error.error_code
            raise told
