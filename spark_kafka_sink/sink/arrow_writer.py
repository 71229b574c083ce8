"""Writes the Arrow batches of a task into its delivery, without a Python object for a row. Only the task's thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa

from spark_kafka_sink.record.columns import RecordColumns, by_topic, epoch_ms
from spark_kafka_sink.sink.arrow_batches import joined
from spark_kafka_sink.sink.delivery import TaskDelivery, task_report
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.schema import ALLOW_EARLY, HEADERS, KEY, NULL_TOPIC, PARTITION, TIMESTAMP, TOPIC, VALUE

MANY_PARTITIONS: Final = 32


def write_arrow(config: SinkConfig, pool: ProducerPool, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows at least once, for `mapInArrow`: yield the task's report once all rows are acknowledged. Raises as
    `write_all`.
    """
    delivery = TaskDelivery(config, pool)
    write_all(delivery, batches)
    yield task_report(delivery.report)


def write_all(delivery: TaskDelivery, batches: Iterable[pa.RecordBatch]) -> None:
    """Write every row of `batches`, whose columns have passed `schema.check_columns`, and finish the delivery. A
    timestamp column may be int64 ms or an Arrow timestamp of any unit that counts from 1970 in UTC.

    Raises KafkaError if a row is not acknowledged, SchemaError for a row that cannot be written.
    """
    try:
        for batch in joined(batches, lambda: _is_spread(delivery)):
            # of columns with the same name the first one counts, as in Spark's own sink
            named = {name: batch.column(index) for index, name in reversed([*enumerate(batch.schema.names)])}
            delivery.send_each(columns_by_topic(delivery.config, delivery.sifted(named)))
            del named
            del batch  # free it before the next one is read
        delivery.finish()
    finally:
        delivery.abandon()


def _is_spread(delivery: TaskDelivery) -> bool:
    """Return whether batches go to many partitions, so that larger ones are worth a copy. Looks at the last batch's
    topics.
    """
    return sum(map(delivery.partition_count, delivery.topics[:MANY_PARTITIONS])) >= MANY_PARTITIONS


def columns_by_topic(config: SinkConfig, named: Mapping[str, pa.Array]) -> Iterator[tuple[str, RecordColumns]]:
    """Yield the rows of each topic, in their order. `named`: columns of a batch by their names. Raises SchemaError or
    SerializationError for a row that cannot be written.
    """
    if len(named[VALUE]) == 0:
        return
    times, advice = named.get(TIMESTAMP), None if config.allows_early_timestamps else ALLOW_EARLY
    columns = RecordColumns(
        value=named[VALUE],
        key=named.get(KEY),
        headers=named.get(HEADERS),
        timestamp_ms=None if times is None else epoch_ms(times, advice),
        partition=named.get(PARTITION),
    )
    if config.topic is not None:
        yield config.topic, columns
    else:
        yield from by_topic(columns, named[TOPIC], NULL_TOPIC)
