"""The calls of application threads that begin, join and end a transaction.

Reference: the transactional methods of org.apache.kafka.clients.producer.KafkaProducer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeVar

from spark_kafka_sink.client.network_metrics import throttles
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    BufferExhaustedError,
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerClosedError,
)
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.operations import OperationResult, interrupted
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata
from spark_kafka_sink.producer.record_fields import checked_group, checked_offsets
from spark_kafka_sink.producer.sender import Sender
from spark_kafka_sink.producer.transaction_requests import GroupMetadata, Offsets
from spark_kafka_sink.producer.transactions import PreparedTransaction, State, TransactionManager

_Result = TypeVar("_Result")
_MOST_NAMED: Final = 3
"""Brokers that one error names."""


class TransactionCalls:
    """Transactions for application threads: begins an operation, wakes the Sender, and waits for the result.

    A call that timed out may be made again with the same arguments, and then waits for the same operation. With other
    arguments it raises IllegalStateError. Only a producer with a transactional.id has a `manager`.
    """

    def __init__(
        self,
        *,
        manager: TransactionManager | None,
        config: ProducerConfig,
        clock: Clock,
        metadata: ProducerMetadata,
        metrics: ProducerMetrics,
        sender: Sender,
        is_sender_thread: Callable[[], bool],
    ) -> None:
        self._manager = manager
        self._config = config
        self._clock = clock
        self._metadata = metadata
        self._metrics = metrics
        self._sender = sender
        self._is_sender_thread = is_sender_thread
        self.leave: Final[Callable[[object], None]] = manager.sends.leave if manager else set[object]().discard
        """As `JoinedSends.leave`."""

    @property
    def manager(self) -> TransactionManager:
        """Return the manager. Raises IllegalStateError without one."""
        if self._manager is None:
            raise IllegalStateError("A producer without a transactional.id has no transactions: set transactional.id.")
        return self._manager

    def begin(self) -> None:
        started_ms = self._clock.now_ms()
        self.manager.begin_transaction()
        self._metrics.call_returned("txn-begin", self._clock.now_ms() - started_ms)

    def run(self, call: str, begin: Callable[[TransactionManager], OperationResult]) -> None:
        """Run one operation to its end. `call` is its name in the metrics."""
        started_ms = self._clock.now_ms()
        manager = self.manager
        if self._is_sender_thread():
            raise IllegalStateError("A callback cannot wait for a transaction: its own thread would have to do it.")
        result = begin(manager)
        self._sender.wakeup()
        if not result.wait(self._clock, self._config.max_block_ms):
            limit = f"within max.block.ms={self._config.max_block_ms}"
            late = KafkaTimeoutError(
                f"{result.operation} of transactional.id {manager.transactional_id} did not end {limit}; call it again"
                f" to go on waiting.{self._why_late(manager, limit)}"
            )
            raise self._sender.explained(late)
        if result.error is not None:
            raise result.error.copied()
        self._metrics.call_returned(call, self._clock.now_ms() - started_ms)

    def send_offsets(self, offsets: Offsets, group: GroupMetadata | str) -> None:
        """Commit offsets of a group in the transaction. Without offsets do nothing."""
        manager = self.manager
        if offsets:
            checked, metadata = checked_offsets(offsets), checked_group(group)
            self.run("txn-send-offsets", lambda _: manager.begin_send_offsets(checked, metadata))

    def prepare(self, flush: Callable[[], None]) -> PreparedTransaction:
        """Close the transaction for new records, wait for its records, and leave it open."""
        manager = self.manager
        flush()
        manager.prepare()
        try:
            if not manager.sends.wait_until_left(self._clock, self._config.max_block_ms):  # those that have joined it
                raise KafkaTimeoutError(
                    f"prepare_transaction of transactional.id {manager.transactional_id} did not end within"
                    f" max.block.ms={self._config.max_block_ms}.{manager.sends.reason_for_delay} Only abort_transaction"
                    " is left."
                )
            flush()
            prepared = manager.current()
            if (state := manager.machine.state) is not State.PREPARED:
                raise IllegalStateError(f"Another thread has ended this transaction: this producer {state.value}.")
            return prepared
        except BaseException as cause:  # Ctrl-C, for example: the caller gets no transaction that it could end
            manager.lose(_as_kafka_error(cause, "prepare_transaction"))
            raise

    def join(self, topic: str, partitions: Iterable[int], send: object) -> None:
        """Join the transaction, for a `send` that is about to append records of these partitions.

        The transaction does not end before `send` leaves it. Without transactions do nothing.
        """
        if self._manager is not None:
            for partition in dict.fromkeys(partitions):
                self._manager.add_partition(TopicPartition(topic, partition), send)

    def with_whole_table(self, write: Callable[[Callable[..., None]], _Result], send: Callable[..., None]) -> _Result:
        """Return `write(send_part)`, which sends a table part by part. `send` has the table's token as `send`.

        All parts are in the transaction that is open now. If `write` raises, that transaction can only be aborted.
        Without transactions nothing holds the parts together.
        """
        table, manager = object(), self._manager
        send_part = partial(send, send=table)
        if manager is None:
            return write(send_part)
        try:
            manager.sends.begin_table(table)
            result = write(send_part)
            manager.sends.end_table(table)
        except BaseException as cause:  # also misuse: a reader of the table may call anything
            is_misuse = isinstance(cause, IllegalStateError) and not isinstance(cause, ProducerClosedError)
            error = interrupted(cause, "A write") if is_misuse else _as_kafka_error(cause, "A send")
            manager.lose(self._sender.explained(error), table)
            raise
        finally:
            self._sender.wakeup()  # an end of the transaction may wait for the table
        return result

    def join_part(self, table: object) -> None:
        """Join for a part of the table. The transaction does not end before the part leaves it."""
        if self._manager is not None:
            self._manager.sends.join_part(table)

    def lose(self, cause: BaseException, send: object) -> None:
        """Note that a record of `send` was not taken, perhaps because of Ctrl-C or a close.

        The transaction must not be committed without it. A call that was misuse has no record in it. A timeout gets its
        cause.
        """
        if isinstance(cause, IllegalStateError) and not isinstance(cause, ProducerClosedError):
            return
        error = _as_kafka_error(cause, "A send")
        if isinstance(error, BufferExhaustedError) and not error.hint:
            error.hint = self._why_slow()
        self._sender.explained(error)
        if self._manager is not None:
            self._manager.handle_refused_record(error, send)

    def _why_slow(self) -> str:
        """Return the brokers that cannot be connected to or throttle this client: their records may fill the memory."""
        return self._unreachable() + self._throttles()

    def _why_late(self, manager: TransactionManager, limit: str) -> str:
        """Return what an unfinished operation waits for, as far as it is known."""
        pending = manager.pending
        if manager.is_completing and manager.sends:
            return manager.sends.reason_for_delay
        if self._metadata.fetch().is_bootstrap_configured:
            return f" {self._metadata.no_broker_text(self._config.bootstrap_servers, limit)}"
        failure = self._metadata.node_failure(pending.unreachable_node) or self._metadata.connection_failure
        lost = "" if failure is None else f" The last lost connection: {failure}"
        if failure is None and pending.last_loss is not None:
            lost = self._unreachable()  # another connection has brought metadata since the loss, and cleared its reason
        return pending.reason_for_delay + self._throttles() + lost

    def _throttles(self) -> str:
        return throttles(self._metrics.by_connection(self._clock.now_ms()))

    def _unreachable(self) -> str:
        failures, nodes = self._metadata.node_failures, self._metadata.fetch().nodes
        away = [node for node in nodes if node.id_string in failures][:_MOST_NAMED]
        return "".join(f" {node} is not connected: {failures[node.id_string]}" for node in away)


def _as_kafka_error(cause: BaseException, call: str) -> KafkaError:
    if isinstance(cause, KafkaError):
        return cause
    return interrupted(cause, call)
