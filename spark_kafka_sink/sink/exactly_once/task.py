"""A task's part in exactly-once delivery: its rows go into one transaction, with a marker, which stays open.

A task never commits its transaction: the end of its input does not mean that the input was complete, and only the
driver knows which attempt counts. A task that fails aborts its transaction. The task's thread runs all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark import TaskContext

from spark_kafka_sink.admin.transaction_values import TransactionDescription, TransactionState
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import IllegalStateError, ProducerFencedError
from spark_kafka_sink.producer.writes import Delivered
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.fingerprint import MODULUS, fingerprint
from spark_kafka_sink.sink.arrow_writer import write_all
from spark_kafka_sink.sink.delivery import TaskDelivery, task_report
from spark_kafka_sink.sink.exactly_once.cluster import Coordinators, coordinators_in_process, describe_in_process
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome, TaskTransaction, task_id
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool
from spark_kafka_sink.sink.running_query import QUERY_ID, refuse_task_in_query

Describe = Callable[[Sequence[str]], Mapping[str, TransactionDescription | None]]
"""Asks for the states of transactional ids; None for one that its coordinator does not know."""

Locate = Callable[[str, int, str], Coordinators]
"""Finds coordinators of a prefix, a partition and a transactional id. The producer looks up those that are left out."""

_NAMED_BY_EACH_TASK: Final = "spark-kafka-sink"
"""The transactional.id of every pooled transactional producer. It is never sent. All prefixes share it, so that they
share producers: a batch write without a prefix has its own prefix, and its producer would never be used again.
"""


_DEFAULT_LOCATION: Final = "spark.sql.streaming.checkpointLocation"
"""A setting of the session, which Spark hands to tasks as a local property. With it, the query's name is the folder of
its checkpoint.
"""


def _locate_nothing(_prefix: str, _partition: int, _name: str) -> Coordinators:
    return {}


class TaskIdentity(NamedTuple):
    """The partition of a batch that a task writes, and its attempt. `query_id` is empty for a batch write."""

    batch_id: int
    query_id: str
    partition: int
    attempt: int


class ExactlyOnceTask:
    """A task's part in an exactly-once batch: the `Transaction` of its `TaskDelivery`.

    Rows of a batch that is written already are counted and dropped, also if they come in other partitions. A task
    without rows begins no transaction. Raises IllegalStateError for a batch that the driver does not allow.
    """

    def __init__(
        self, batch_start: BatchStart, identity: TaskIdentity, describe: Describe, locate: Locate = _locate_nothing
    ) -> None:
        self._batch_start = batch_start
        self._identity = identity
        self._describe = describe
        self._locate = locate
        self._is_written_already = batch_start.is_written_already(identity.batch_id, identity.query_id)
        self._skipped = 0
        self._fingerprint = 0
        self._offsets: Mapping[str, Sequence[Sequence[int]]] = {}
        self._has_begun = False
        self._marked: TaskTransaction | None = None
        self._written: TaskTransaction | None = None

    @classmethod
    def in_process(cls, config: SinkConfig, batch_start: BatchStart, identity: TaskIdentity) -> ExactlyOnceTask:
        """A task that asks by the client of this process."""
        locate = partial(coordinators_in_process, config)
        return cls(batch_start, identity, partial(describe_in_process, config, batch_start.driver), locate)

    @property
    def outcome(self) -> TaskOutcome:
        """What the task reports to the driver. Raises IllegalStateError before its delivery has finished."""
        if self._has_begun and self._written is None:
            raise IllegalStateError(f"The transaction of partition {self._identity.partition} is not prepared.")
        return TaskOutcome(
            self._batch_start,
            self._identity.batch_id,
            self._identity.query_id,
            self._identity.partition,
            self._skipped if self._written is None else self._written.rows,
            self._written,
            self._is_written_already,
            self._fingerprint,
            self._offsets,
        )

    @property
    def is_prepared(self) -> bool:
        return self._written is not None

    @property
    def is_written_already(self) -> bool:
        return self._is_written_already

    def takes(self, topic: str, columns: RecordColumns) -> bool:
        self._fingerprint = (self._fingerprint + fingerprint(topic, columns)) % MODULUS
        if self._is_written_already:
            self._skipped += columns.num_rows
        return not self._is_written_already

    def begin(self, pool: ProducerPool, config: ProducerConfig) -> Producer:
        """Raises ProducerFencedError for a task that comes too late."""
        name, coordinators = self._free_name()
        self._has_begun = True
        producer = pool.borrow(replace(config, transactional_id=_NAMED_BY_EACH_TASK))
        try:
            producer.init_transactions(name, coordinators)
            producer.begin_transaction()
        except BaseException:
            pool.discard(producer)
            raise
        return producer

    def add_marker(self, producer: Producer, rows: int) -> None:
        """The marker is sent before the rows are acknowledged: it counts only if the transaction does."""
        self._marked = TaskTransaction(producer.current_transaction, self._identity.partition, rows)
        offsets = {self._batch_start.place: (self._identity.batch_id + 1, self._marked.marker_text)}
        producer.send_offsets_to_transaction(offsets, self._marked.transaction.transactional_id)

    def prepare(self, producer: Producer, delivered: Iterable[tuple[TopicPartition, Delivered]]) -> None:
        """An attempt whose batch was decided meanwhile leaves nothing open: the driver has looked for open transactions
        already. And under version 1 of transactions, one that the driver has aborted may have begun again with the next
        partition.
        """
        assert self._marked is not None
        name = self._batch_start.driver.transactional_id
        self._ensure_current(self._describe([name])[name])
        prepared = producer.prepare_transaction().transaction
        if prepared != self._marked.transaction:
            raise IllegalStateError(
                f"The transaction of partition {self._identity.partition} was {self._marked.transaction}, and now"
                f" {prepared}."
            )
        self._offsets = _offsets(delivered)
        self._written = self._marked

    def _free_name(self) -> tuple[str, Coordinators]:
        """Return a transactional id without an open transaction, and its coordinators, while the driver is current. To
        take an id aborts its open transaction, which may be of the attempt that counts. Spark counts attempts from 0 in
        each run of a stage, and tasks of one run go on during the next.

        One call asks for both ids, and their coordinators may answer in any order. If the driver is seen last, it has
        not decided on what the id may hold by then. If the id is seen last, nothing that is decided is open under it.
        """
        driver = self._batch_start.driver.transactional_id
        for attempt in itertools.count(self._identity.attempt):
            prefix, partition = self._batch_start.prefix, self._identity.partition
            name = task_id(prefix, partition, attempt)
            coordinators = self._locate(prefix, partition, name)
            described = self._describe([name, driver])
            self._ensure_current(described[driver])
            if not self._is_taken(described[name]):
                break
        return name, coordinators

    def _is_taken(self, found: TransactionDescription | None) -> bool:
        return found is not None and found.state is TransactionState.ONGOING

    def _ensure_current(self, found: TransactionDescription | None) -> None:
        """Raise ProducerFencedError if the driver has decided already, or another driver has taken over. To begin then
        would abort the transaction of a task of the same name, which may be decided. `found`: the driver's id.
        """
        batch_start, identity = self._batch_start, self._identity
        if found is None:
            raise IllegalStateError(
                f"Attempt {identity.attempt} of partition {identity.partition} cannot write batch {identity.batch_id}:"
                f" the brokers have forgotten {batch_start.driver.transactional_id}. Raise their"
                " transactional.id.expiration.ms above the time that a batch takes."
            )
        if found.state is not TransactionState.EMPTY or found.producer != batch_start.driver.producer:
            raise ProducerFencedError(
                f"Attempt {identity.attempt} of partition {identity.partition} comes too late for batch"
                f" {identity.batch_id}: its driver, {batch_start.driver}, has decided, given up, or been replaced. If"
                " the query fails with this, another query, or a second run of this one, may have"
                f" transactional.id.prefix={batch_start.prefix!r}: give each query and each sink its own."
            )


def _offsets(delivered: Iterable[tuple[TopicPartition, Delivered]]) -> dict[str, list[list[int]]]:
    """Return `TaskOutcome.offsets`. A broker that had a batch already may not tell its offset: then the range begins at
    0, and a partition without any offset is left out.
    """
    found: dict[str, list[list[int]]] = {}
    for (topic, partition), each in delivered:
        if each.last_offset >= 0:
            first = 0 if each.without_offset else each.first_offset
            known = each.records - each.without_offset
            found.setdefault(topic, []).append([partition, first, each.last_offset + 1, known])
    return found


def write_in_transaction(
    config: SinkConfig,
    pool: ProducerPool,
    batch_start: BatchStart,
    batch_id: int,
    query_id: str,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Write the rows into a transaction that stays open, for `mapInArrow`: yield the report with the task's outcome.

    Raises IllegalStateError for a batch that must not be written, ProducerFencedError for a task that comes too late,
    and as `write_all`.
    """
    context = _context()
    identity = TaskIdentity(batch_id, query_id, context.partitionId(), context.attemptNumber())
    task = ExactlyOnceTask.in_process(config, batch_start, identity)
    delivery = TaskDelivery(config, pool, task)
    write_all(delivery, batches)
    yield task_report(delivery.report, task.outcome.to_json())


def streaming_task() -> TaskIdentity:
    """Return the identity of the running task of a streaming query. Raises IllegalStateError if Spark does not say."""
    context = _context()
    batch_id = context.getLocalProperty("streaming.sql.batchId")
    query_id = context.getLocalProperty(QUERY_ID)
    if batch_id is None or not query_id:
        raise IllegalStateError("Spark gives this task no batch id or no query id: exactly-once delivery needs both.")
    return TaskIdentity(int(batch_id), query_id, context.partitionId(), context.attemptNumber())


def check_default_location() -> None:
    """Raise IllegalStateError in a task of a query that has a name and no checkpoint that outlives it."""
    if not _context().getLocalProperty(_DEFAULT_LOCATION):
        raise IllegalStateError(
            "delivery.guarantee=exactly-once: the query has a name and no checkpoint location, so Spark uses a"
            f' temporary one. Set {_DEFAULT_LOCATION}, or give .option("checkpointLocation", ...).'
        )


def batch_task(batch_start: BatchStart) -> TaskIdentity:
    """Return the identity of the running task of a batch write, which comes after the last write under the prefix.
    Raises ConfigError if a streaming query may run the task: a batch that Spark runs again would be written twice.
    """
    context = _context()
    refuse_task_in_query(context.getLocalProperty)
    return TaskIdentity(batch_start.next_batch_id, "", context.partitionId(), context.attemptNumber())


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise IllegalStateError("This runs only in a Spark task.")
    return context
