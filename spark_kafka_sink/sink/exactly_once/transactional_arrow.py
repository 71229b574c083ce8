"""A task of an exactly-once batch as Spark runs it: who it is, its Arrow batches, its transaction. The task's thread
runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

import pyarrow as pa
from pyspark import TaskContext

from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.sink.arrow_writer import deliver_arrow
from spark_kafka_sink.sink.exactly_once.cluster import describe_in_process
from spark_kafka_sink.sink.exactly_once.messages import Mandate
from spark_kafka_sink.sink.exactly_once.task import TaskIdentity, TransactionalDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.report import task_report
from spark_kafka_sink.sink.running_query import QUERY_ID, refuse_task_in_query

_DEFAULT_LOCATION: Final = "spark.sql.streaming.checkpointLocation"
"""A setting of the session, which Spark hands to tasks as a local property. With it a query's name is its folder."""


def write_in_transaction(
    config: SinkConfig,
    pool: ProducerPool,
    mandate: Mandate,
    batch_id: int,
    query_id: str,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: write the rows, leave the transaction open, yield the report with the task's outcome."""
    context = _context()
    task = TaskIdentity(batch_id, query_id, context.partitionId(), context.attemptNumber())
    delivery = deliver_in_transaction(config, pool, mandate, task, batches)
    outcome = delivery.outcome.to_json()
    yield task_report(delivery.tally.delivered, delivery.batches, delivery.retries, outcome)


def deliver_in_transaction(
    config: SinkConfig, pool: ProducerPool, mandate: Mandate, task: TaskIdentity, batches: Iterable[pa.RecordBatch]
) -> TransactionalDelivery:
    """As `deliver_arrow`; the transaction stays open. Raises IllegalStateError for a batch that must not be written,
    ProducerFencedError for a task that comes too late.
    """
    delivery = TransactionalDelivery(config, pool, mandate, task, partial(describe_in_process, config))
    deliver_arrow(config, pool, batches, delivery)
    return delivery


def streaming_task() -> TaskIdentity:
    """Who the running task of a streaming query is. Raises IllegalStateError where Spark does not say."""
    context = _context()
    batch_id = context.getLocalProperty("streaming.sql.batchId")
    query_id = context.getLocalProperty(QUERY_ID)
    if batch_id is None or not query_id:
        raise IllegalStateError("Spark tells this task no batch id and no query id: exactly-once delivery needs both.")
    return TaskIdentity(int(batch_id), query_id, context.partitionId(), context.attemptNumber())


def check_default_location() -> None:
    """Raise IllegalStateError in a task of a query that has a name and no checkpoint that outlives it."""
    if not _context().getLocalProperty(_DEFAULT_LOCATION):
        raise IllegalStateError(
            "delivery.guarantee=exactly-once: the query has a name and no checkpoint location, so Spark uses a"
            f' temporary one. Set {_DEFAULT_LOCATION}, or give .option("checkpointLocation", ...).'
        )


def batch_task(mandate: Mandate) -> TaskIdentity:
    """Who the running task of a batch write is: the write comes after the last one under the prefix. Raises
    ConfigError where a streaming query may run the task: a batch that Spark runs again would be written twice.
    """
    context = _context()
    refuse_task_in_query(context.getLocalProperty)
    return TaskIdentity(mandate.next_batch_id, "", context.partitionId(), context.attemptNumber())


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise IllegalStateError("This runs in a Spark task alone.")
    return context
