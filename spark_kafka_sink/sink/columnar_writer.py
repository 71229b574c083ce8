"""The Arrow batches of a task into its delivery: no Python object for a row. Used by the task's thread alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.topics import by_topic
from spark_kafka_sink.sink.arrow_batches import joined
from spark_kafka_sink.sink.columns import NULL_TOPIC
from spark_kafka_sink.sink.frame import HEADERS, KEY, PARTITION, TIMESTAMP, TOPIC, VALUE
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.task_delivery import TaskDelivery
from spark_kafka_sink.sink.write_report import task_report

MANY_PARTITIONS: Final = 32


def write_arrow(config: SinkConfig, pool: ProducerPool, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """As `deliver_arrow`, for `mapInArrow`: yields the task's report once all rows are acknowledged."""
    delivery = deliver_arrow(config, pool, batches)
    yield task_report(delivery.tally.delivered, delivery.batches, delivery.retries)


def deliver_arrow(
    config: SinkConfig,
    pool: ProducerPool,
    batches: Iterable[pa.RecordBatch],
    delivery: TaskDelivery | None = None,
) -> TaskDelivery:
    """Write every row of `batches`, whose columns have passed `frame.check_columns`, by `delivery` or a plain one;
    returns it, finished, once all are acknowledged. A timestamp column may be int64 ms or an Arrow timestamp of any
    unit that counts from 1970 in UTC.

    Raises KafkaError if a row is not, SchemaError for a row that cannot be written.
    """
    delivery = delivery or TaskDelivery(config, pool)
    try:
        for batch in joined(batches, lambda: _is_spread(delivery)):
            delivery.send_each(_columns_by_topic(config, batch))
            del batch  # not kept while the next one is read
        delivery.finish()
    finally:
        delivery.abandon()
    return delivery


def _is_spread(delivery: TaskDelivery) -> bool:
    """Whether a batch costs much by the number of its partitions; said of the topics that the last one went to."""
    return sum(map(delivery.partition_count, delivery.topics[:MANY_PARTITIONS])) >= MANY_PARTITIONS


def _columns_by_topic(config: SinkConfig, batch: pa.RecordBatch) -> Iterator[tuple[str, RecordColumns]]:
    if batch.num_rows == 0:
        return
    # of columns with one name the first counts, as in Spark's own sink
    named = {name: batch.column(index) for index, name in reversed([*enumerate(batch.schema.names)])}
    columns = RecordColumns(
        value=named[VALUE],
        key=named.get(KEY),
        headers=named.get(HEADERS),
        timestamp_ms=_epoch_ms(named.get(TIMESTAMP)),
        partition=named.get(PARTITION),
    )
    if config.topic is not None:
        yield config.topic, columns
    else:
        yield from by_topic(columns, named[TOPIC], NULL_TOPIC)


def _epoch_ms(times: pa.Array | None) -> pa.Array | None:
    """int64 milliseconds, rounded down. Raises SchemaError for a time before 1970, which Kafka's brokers and clients do
    not take.
    """
    if times is None:
        return None
    counts = times.cast(pa.int64()) if pa.types.is_timestamp(times.type) else times
    if counts.null_count < len(counts) and (earliest := pc.min(counts).as_py()) < 0:
        unit = times.type.unit if pa.types.is_timestamp(times.type) else "ms"
        raise SchemaError(
            f"A timestamp of {earliest} {unit} lies before 1970, and Kafka has no such timestamps: correct it, or make"
            " it null for the time of writing."
        )
    if pa.types.is_timestamp(times.type):
        return times.cast(pa.timestamp("ms", times.type.tz), safe=False).cast(pa.int64())
    return times
