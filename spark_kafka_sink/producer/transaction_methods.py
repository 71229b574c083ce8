"""The transactional side of `KafkaProducer`: each method asks the manager to begin something and waits for its result.

Application threads. A call that timed out may be made again with the same arguments, and then waits for the same
operation; with others it raises IllegalStateError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError, KafkaTimeoutError, ProducerClosedError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.common.retold import copied
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata
from spark_kafka_sink.producer.record_fields import checked_group, checked_offsets
from spark_kafka_sink.producer.sender import Sender
from spark_kafka_sink.producer.transaction_requests import GroupMetadata, OperationResult
from spark_kafka_sink.producer.transactions import PreparedTransaction, TransactionManager


class TransactionMethods:
    """What `KafkaProducer` is made of, as far as transactions go."""

    config: ProducerConfig
    sender: Sender
    _clock: Clock
    _metadata: ProducerMetadata
    _metrics: ProducerMetrics
    _thread: threading.Thread | None
    _transactions: TransactionManager | None

    def _ensure_usable(self) -> None:
        """Raise IllegalStateError when the producer is closed, or another process's. `KafkaProducer` has it."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait for every record sent before. `KafkaProducer` has it."""

    def init_transactions(self, transactional_id: str | None = None) -> None:
        """Get a producer id and epoch for transactional.id, which fences older producers with it and ends what they
        left open.

        Again after `prepare_transaction`, when somebody else ends what was prepared; then, and before the first
        transaction, `transactional_id` may give the producer another one, over the connections it has.

        Raises KafkaTimeoutError after max.block.ms. Raises AuthorizationError without the right to the id: call it
        again once that is granted. Raises TransactionAbortableError where `abort_transaction` must come first, which
        asks for a producer id again.
        """
        self._operate("txn-init", lambda manager: manager.begin_initialize(transactional_id))

    def begin_transaction(self) -> None:
        """From now on records belong to a new transaction."""
        started_ms = self._clock.now_ms()
        self._manager().begin_transaction()
        self._metrics.call_returned("txn-begin", self._clock.now_ms() - started_ms)

    def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, tuple[int, str | None]], group: GroupMetadata | str
    ) -> None:
        """Commit consumed offsets, topic-partition → (next offset, text), of a group as part of the transaction
        (KIP-447). Raises SerializationError for offsets or a group that are none; nothing is begun then. Raises
        CommitFailedError when the group has rebalanced: its generation or member is not a current one.
        """
        if not offsets:
            self._manager()
            return
        checked, metadata = checked_offsets(offsets), checked_group(group)
        self._operate("txn-send-offsets", lambda manager: manager.begin_send_offsets(checked, metadata))

    @property
    def current_transaction(self) -> OpenTransaction:
        """The transaction that was begun. Waits for none of its records."""
        return self._manager().current().transaction

    def prepare_transaction(self) -> PreparedTransaction:
        """Wait until every record is acknowledged, and leave the transaction open: who has what this returns can end
        it from any process.
        """
        manager = self._manager()
        self.flush()
        manager.prepare()
        try:
            manager.sends.wait_until_left(self._clock)  # of other threads, which joined before
            self.flush()
            return manager.current()
        except BaseException as cause:  # Ctrl-C, say: what nobody is told of, nobody ends
            manager.lose_prepared(_as_kafka_error(cause, "prepare_transaction"))
            raise

    def resume_transaction(self, prepared: PreparedTransaction) -> None:
        """Take over, in a producer that has no transactions of its own, what another one prepared, to commit or abort
        it. Afterwards it can resume the next, or begin its own with `init_transactions`.
        """
        self._manager().resume(prepared)

    def commit_transaction(self) -> None:
        """Make the transaction's records count. Raises KafkaTimeoutError after max.block.ms (call it again),
        ProducerFencedError, and the error of a record that failed, or, where that may be tried again as a time-out may,
        TransactionAbortableError, with the next call at the latest: then only `abort_transaction` is left.
        """
        self._operate("txn-commit", lambda manager: manager.begin_commit())

    def abort_transaction(self) -> None:
        """Make the transaction as if it had never been. Records that were not sent fail: with the transaction's error
        where it has one, else with TransactionAbortedError.
        """
        self._operate("txn-abort", lambda manager: manager.begin_abort())

    def _join_transaction(self, topic: str, partitions: Iterable[int], send: object) -> None:
        """Records of these partitions are about to be appended: they belong to a transaction, where there is an id, and
        that does not end before `send` is taken out of the manager's.
        """
        manager = self._transactions
        if manager is not None:
            for partition in dict.fromkeys(partitions):
                manager.add_partition(TopicPartition(topic, partition), send)

    def _lose_transaction(self, cause: BaseException, send: object) -> None:
        """A record of `send` was not taken, be it for Ctrl-C or a close: without it the transaction must not be
        committed. Of misuse there is none in it. A time-out is told why.
        """
        if isinstance(cause, IllegalStateError) and not isinstance(cause, ProducerClosedError):
            return
        cause = _as_kafka_error(cause, "A send")
        self.sender.explained(cause)
        manager = self._transactions
        if manager is not None:
            manager.handle_refused_record(cause, send)

    def _operate(self, call: str, begin: Callable[[TransactionManager], OperationResult]) -> None:
        started_ms = self._clock.now_ms()
        manager = self._manager()
        if threading.current_thread() is self._thread:
            raise IllegalStateError("A callback cannot wait for a transaction: its own thread would have to do it.")
        result = begin(manager)
        self.sender.wakeup()
        if not result.wait(self._clock, self.config.max_block_ms):
            limit = f"within max.block.ms={self.config.max_block_ms}"
            late = KafkaTimeoutError(
                f"{result.operation} of transactional.id {manager.transactional_id} did not end {limit}; call it again"
                f" to go on waiting.{self._why_late(manager, limit)}"
            )
            raise self.sender.explained(late)
        if result.error is not None:
            raise copied(result.error)
        self._metrics.call_returned(call, self._clock.now_ms() - started_ms)

    def _why_late(self, manager: TransactionManager, limit: str) -> str:
        """What an operation that did not end waits for, as far as it is known."""
        metadata = self._metadata
        if metadata.fetch().is_bootstrap_configured:
            return f" {metadata.no_broker_text(self.config.bootstrap_servers, limit)}"
        failure = metadata.connection_failure
        lost = "" if failure is None else f" The last lost connection: {failure}"
        return manager.pending.reason_for_delay + lost

    def _manager(self) -> TransactionManager:
        self._ensure_usable()
        manager = self._transactions
        if manager is None:
            raise IllegalStateError("A producer without a transactional.id has no transactions: set transactional.id.")
        return manager


def _as_kafka_error(cause: BaseException, call: str) -> KafkaError:
    if isinstance(cause, KafkaError):
        return cause
    return KafkaError(f"{call} was interrupted by {type(cause).__name__}: {cause}")
