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
from spark_kafka_sink.sink.columnar_writer import deliver_arrow
from spark_kafka_sink.sink.driver_cluster import describe_in_process
from spark_kafka_sink.sink.mandate import Mandate
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.running_query import QUERY_ID
from spark_kafka_sink.sink.transactional_task import TaskIdentity, TransactionalDelivery
from spark_kafka_sink.sink.write_report import task_report

_JOB_TAGS: Final = "spark.job.tags"
_CONNECT_OPERATION: Final = "SparkConnect_OperationTag"
"""Begins the job tag of every operation that a client of Spark Connect asked for."""


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


def batch_task(mandate: Mandate) -> TaskIdentity:
    """Who the running task of a batch write is: the write comes after the last one under the prefix.

    Raises IllegalStateError in a streaming query, which would write a batch twice that it runs again; and in Spark
    Connect, whose server does not say whether a write comes from a foreachBatch function.
    """
    context = _context()
    if _CONNECT_OPERATION in (context.getLocalProperty(_JOB_TAGS) or ""):
        raise IllegalStateError(
            'df.write.format("kafka_sink") with delivery.guarantee=exactly-once cannot be used on Spark Connect: the'
            " server does not say whether foreachBatch called it, and there a batch that Spark runs again would be"
            " written twice. Use KafkaSink(options).write(df), or for a stream"
            ' writeStream.format("kafka_sink").'
        )
    if context.getLocalProperty(QUERY_ID):
        raise IllegalStateError(
            'df.write.format("kafka_sink") with delivery.guarantee=exactly-once was called inside foreachBatch: a batch'
            " that Spark runs again would be another write. Use foreachBatch(sink.write_batch), or"
            ' writeStream.format("kafka_sink").'
        )
    return TaskIdentity(mandate.next_batch_id, "", context.partitionId(), context.attemptNumber())


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise IllegalStateError("This runs in a Spark task alone.")
    return context
