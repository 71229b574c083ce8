"""What a producer with a transactional.id may do: the operations that application threads begin. What becomes of
them, the Sender thread finds out in `transactional_exchange`; the result is waited for outside the lock.

Reference: org.apache.kafka.clients.producer.internals.TransactionManager (KIP-98, KIP-360, KIP-447, KIP-890).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError
from spark_kafka_sink.common.open_transaction import NO_PRODUCER, OpenTransaction
from spark_kafka_sink.producer import transaction_requests as requests
from spark_kafka_sink.producer.transaction_content import PreparedTransaction
from spark_kafka_sink.producer.transaction_manager import State
from spark_kafka_sink.producer.transaction_requests import GroupMetadata, OperationResult
from spark_kafka_sink.producer.transactional_exchange import TransactionalExchange
from spark_kafka_sink.protocol.messages import Message

log = logging.getLogger(__name__)


class TransactionalManager(TransactionalExchange):
    """`finalized_feature` tells the cluster's level of a feature: transaction.version 2 and above is KIP-890's
    protocol, in which brokers add partitions by themselves and every transaction has an epoch of its own.

    Every `begin_...` that is called again, with the same arguments, while the outcome of its first call is not known
    gives the same result.
    """

    def __init__(
        self,
        transactional_id: str,
        transaction_timeout_ms: int,
        retry_backoff: ExponentialBackoff,
        finalized_feature: Callable[[str], int],
    ) -> None:
        super().__init__(transactional_id, transaction_timeout_ms, retry_backoff)
        self._finalized_feature = finalized_feature

    @property
    def last_refusal(self) -> KafkaError | None:
        """Why the operation under way takes so long, as far as answers tell."""
        return self._pending.last_refusal

    @property
    def last_loss(self) -> str | None:
        """The last request of the operation under way that brought no answer, in words."""
        return self._pending.last_loss

    def begin_initialize(self, transactional_id: str | None = None) -> OperationResult:
        """Ask for a producer id and epoch, which fences every older producer of the id; from now on under another id,
        where one is given.
        """
        with self._lock:
            wanted_id = transactional_id or self.transactional_id
            pending = self._pending.joined("init_transactions", wanted_id)
            if pending is not None:
                return pending
            self._raise_error()
            self._move_to(State.INITIALIZING)
            self.transactional_id = wanted_id
            result = self._pending.begin("init_transactions", wanted_id)
            self._enqueue_init(NO_PRODUCER, result)
            return result

    def begin_transaction(self) -> None:
        with self._lock:
            self._raise_error()
            self._pending.ensure_none("begin_transaction")
            self._move_to(State.IN_TRANSACTION)
            self.transaction_version = 2 if self._finalized_feature("transaction.version") >= 2 else 1
            self._forget_transaction()

    def add_partition(self, topic_partition: TopicPartition, send: object = None) -> None:
        """A record of the partition is about to be appended, by `send`, for which the transaction's end waits: but for
        an abort it goes on to add others. Raises IllegalStateError outside a transaction, and the error of one
        that can only be aborted.
        """
        with self._lock:
            self._raise_error()
            if not self._is_taking(send):
                raise IllegalStateError(
                    f"A record can be sent between begin_transaction and its end; this producer {self.state.value}."
                )
            self._content.add(topic_partition, self.transaction_version)
            if send is not None:
                self.sends.add(send)

    def begin_send_offsets(
        self, offsets: Mapping[TopicPartition, tuple[int, str | None]], group: GroupMetadata
    ) -> OperationResult:
        """Commit a group's offsets as part of the transaction. `offsets` are not changed any more: a later call is
        compared with them.
        """
        with self._lock:
            pending = self._pending.joined("send_offsets_to_transaction", (offsets, group))
            if pending is not None:
                return pending
            self._raise_error()
            if self.state is not State.IN_TRANSACTION:
                raise IllegalStateError(f"Offsets belong into a transaction; this producer {self.state.value}.")
            result = self._pending.begin("send_offsets_to_transaction", (offsets, group))

            def commit_offsets(_: Message) -> None:
                self._content.start()
                if result.is_done:  # an abort was quicker
                    return
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
                added = OperationResult("add offsets")
                who = (self.transactional_id, self.producer, group.group_id)
                self._queue.add(requests.add_offsets(*who, commit_offsets, added))
            return result

    def current(self) -> PreparedTransaction:
        """The transaction as it is."""
        with self._lock:
            self._raise_error()
            transaction = OpenTransaction.of(self.transactional_id, self.producer, self.transaction_version)
            return PreparedTransaction(transaction, self._content.is_empty)

    def prepare(self) -> None:
        """Close the transaction to records and leave it open. What came in before is for the caller to wait for."""
        with self._lock:
            self._raise_error()
            self._pending.ensure_none("prepare_transaction")
            self._move_to(State.PREPARED)

    def lose_prepared(self, error: KafkaError) -> None:
        """What was being prepared can only be aborted: nobody will know of it."""
        with self._lock:
            if self.state is State.PREPARED:
                self._to_abortable(error)

    def resume(self, prepared: PreparedTransaction) -> None:
        """Take over a transaction that another producer prepared, in order to end it."""
        with self._lock:
            transaction = prepared.transaction
            if transaction.transactional_id != self.transactional_id:
                raise IllegalStateError(
                    f"A transaction of {transaction.transactional_id} cannot be resumed by {self.transactional_id}."
                )
            self._raise_error()
            self._pending.ensure_none("resume_transaction")
            if self.state is not State.UNINITIALIZED:
                raise IllegalStateError(
                    f"A transaction is resumed by a producer that has none of its own; this one {self.state.value}."
                )
            self._move_to(State.PREPARED)
            self._forget_transaction()
            self._is_resumed = True
            self.producer = transaction.producer
            self.transaction_version = transaction.transaction_version
            if not prepared.is_empty:
                self._content.start()

    def begin_commit(self) -> OperationResult:
        """End the transaction with all its records, once they are acknowledged."""
        with self._lock:
            pending = self._pending.joined("commit_transaction")
            if pending is not None:
                return pending
            self._raise_error()
            self._move_to(State.COMMITTING)
            return self._enqueue_end(self._pending.begin("commit_transaction"), committed=True)

    def begin_abort(self) -> OperationResult:
        """End the transaction as if nothing had been sent; the Sender drops what has not been."""
        with self._lock:
            pending = self._pending.joined("abort_transaction")
            if pending is not None:
                return pending
            if self.has_fatal_error:
                self._raise_error()
            self._move_to(State.ABORTING, self.last_error)  # records not sent yet fail with the error, if there was one
            self._pending.give_up(self._aborted())
            self._queue.clear_for_abort()
            return self._enqueue_end(self._pending.begin("abort_transaction"), committed=False)

    def abort_what_is_open(self) -> None:
        """The producer closes: a transaction that nobody has prepared or begun to end is aborted."""
        with self._lock:
            if self.state in {State.IN_TRANSACTION, State.ABORTABLE_ERROR}:
                log.info("%s: aborting the open transaction, because the producer closes", self.transactional_id)
                self.begin_abort()
