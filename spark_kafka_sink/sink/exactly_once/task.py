"""A task's part in exactly-once delivery: its rows go into one transaction, with a marker, and that is left open.

A task never ends its transaction: that its input has ended does not mean that it was complete, and only the driver
knows which attempt counts. A task that fails aborts what it began. The task's thread owns the delivery.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from spark_kafka_sink.admin.transaction_values import TransactionDescription, TransactionState
from spark_kafka_sink.common.errors import IllegalStateError, ProducerFencedError
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.fingerprint import MODULUS, fingerprint
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.exactly_once.decision import TaskTransaction, marker_text
from spark_kafka_sink.sink.exactly_once.messages import Mandate, TaskOutcome, task_id
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool

Describe = Callable[[str], TransactionDescription | None]

_NAMED_BY_EACH_TASK: Final = "spark-kafka-sink"
"""Makes a producer a transactional one, and is never sent. The same for every prefix, so that they share producers: a
write without a prefix has one of its own, after which nobody would ask for its producer again.
"""


class TaskIdentity(NamedTuple):
    """Which rows of which batch, and which try. `query_id` is empty for a batch write."""

    batch_id: int
    query_id: str
    partition: int
    attempt: int


class TransactionalDelivery(TaskDelivery):
    """As `TaskDelivery`, into a transaction; what became of it is in `outcome` after `finish`.

    Rows of a batch that is written already are counted and dropped, whatever partitions they come in. A task without
    rows begins no transaction. `describe` asks for the state of a transactional id. Raises IllegalStateError for a
    batch that the driver's mandate does not allow.
    """

    outcome: TaskOutcome

    def __init__(
        self, config: SinkConfig, pool: ProducerPool, mandate: Mandate, task: TaskIdentity, describe: Describe
    ) -> None:
        super().__init__(config, pool)
        self._describe = describe
        self._mandate = mandate
        self._task = task
        self._skipped = 0
        self._fingerprint = 0
        self._is_written_already = mandate.is_written_already(task.batch_id, task.query_id)
        self._is_prepared = False

    def send(self, topic: str, columns: RecordColumns) -> None:
        self._fingerprint = (self._fingerprint + fingerprint(topic, columns)) % MODULUS
        if self._is_written_already:
            self._skipped += columns.num_rows
        else:
            super().send(topic, columns)

    def finish(self) -> None:
        """Wait until every row is acknowledged, leave the transaction open with its marker in it, and give the producer
        back. Raises KafkaError if a row is not acknowledged.
        """
        try:
            written = None if self._producer is None else self._prepare(self._producer)
        finally:
            self.abandon()
        task = self._task
        self.outcome = TaskOutcome(
            self._mandate,
            task.batch_id,
            task.query_id,
            task.partition,
            self._skipped or self._sent,
            written,
            self._is_written_already,
            self._fingerprint,
        )

    def abandon(self) -> None:
        """Give the producer back, or close it, which aborts what is open, where the transaction is not prepared."""
        producer, self._producer = self._producer, None
        if producer is not None:
            (self._pool.release if self._is_prepared else self._pool.discard)(producer)

    def _acquire(self) -> Producer:
        name = self._free_name()
        self._ensure_current()
        producer = self._pool.borrow(replace(self._config.producer, transactional_id=_NAMED_BY_EACH_TASK))
        try:
            producer.init_transactions(name)
            producer.begin_transaction()
        except BaseException:
            self._pool.discard(producer)
            raise
        return producer

    def _free_name(self) -> str:
        """A name under which no attempt of this batch has left a transaction open: to take that aborts it, and it may
        be the one that counts. Attempts are counted from 0 in each run of a stage, and the tasks of one run go on in
        the next.
        """
        for attempt in itertools.count(self._task.attempt):
            name = task_id(self._mandate.prefix, self._task.partition, attempt)
            found = self._describe(name)
            if found is None or found.state is not TransactionState.ONGOING:
                break
        return name

    def _ensure_current(self) -> None:
        """Raise ProducerFencedError where the driver has decided already, or another one has taken over: to begin then
        would abort what a task of the same name has left open, and what may be decided.
        """
        mandate, task = self._mandate, self._task
        found = self._describe(mandate.driver.transactional_id)
        if found is None or found.state is not TransactionState.EMPTY or found.producer != mandate.driver.producer:
            raise ProducerFencedError(
                f"Attempt {task.attempt} of partition {task.partition} comes too late for batch {task.batch_id}: its"
                f" driver, {mandate.driver}, has decided, given up, or been replaced."
            )

    def _prepare(self, producer: Producer) -> TaskTransaction:
        """The marker goes on its way before the rows are waited for; it counts only if the transaction does. An attempt
        whose batch was decided meanwhile leaves nothing open: the driver has looked for what others left, and under
        version 1 of transactions what it aborted may have begun anew with the next partition.
        """
        task = self._task
        current = producer.current_transaction
        offsets = {self._mandate.place: (task.batch_id + 1, marker_text(current, self._sent))}
        producer.send_offsets_to_transaction(offsets, current.transactional_id)
        self._await_rows()
        self._ensure_current()
        prepared = producer.prepare_transaction()
        if prepared.transaction != current:
            raise IllegalStateError(
                f"The transaction of partition {task.partition} was {current}, and now {prepared.transaction}."
            )
        self._is_prepared = True
        return TaskTransaction(current, task.partition, self._sent)
