"""Writes the Arrow batches of a task into its delivery, without a Python object for a row. Only the task's thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from spark_kafka_sink.record.columns import RecordColumns, by_topic, epoch_ms
from spark_kafka_sink.sink.arrow_batches import joined
from spark_kafka_sink.sink.delivery import TaskDelivery, task_report
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.schema import ALLOW_EARLY, HEADERS, KEY, NULL_TOPIC, PARTITION, TIMESTAMP, TOPIC, VALUE

if TYPE_CHECKING:
    from spark_kafka_sink.serialization.record_formats import RecordFormats

MANY_PARTITIONS: Final = 32
_WRITTEN: Final = frozenset({VALUE, KEY, TOPIC, PARTITION, HEADERS, TIMESTAMP})


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

    Raises KafkaError if a row is not acknowledged, SchemaError for a row that cannot be written, SerializationError for
    one that does not fit the schema of its format.
    """
    formats = _formats(delivery.config)
    rows = 0
    try:
        for batch in joined(batches, lambda: _is_spread(delivery)):
            named = _named(batch)
            first, rows = rows, rows + batch.num_rows
            del batch  # free it before the next one is read
            if formats is None:
                delivery.send_each(columns_by_topic(delivery.config, delivery.sifted(named)))
            else:
                _send_formatted(delivery, formats, named, first)
            del named
        delivery.finish()
    finally:
        delivery.abandon()


def _is_spread(delivery: TaskDelivery) -> bool:
    """Return whether batches go to many partitions, so that larger ones are worth a copy. Looks at the last batch's
    topics.
    """
    return sum(map(delivery.partition_count, delivery.topics[:MANY_PARTITIONS])) >= MANY_PARTITIONS


def _formats(config: SinkConfig) -> RecordFormats | None:
    if config.column_formats is None:
        return None
    from spark_kafka_sink.serialization.record_formats import RecordFormats  # imports the encoders

    return RecordFormats(config.column_formats)


def _send_formatted(
    delivery: TaskDelivery, formats: RecordFormats, named: Mapping[str, pa.Array], first_row: int
) -> None:
    """Send rows whose columns have formats. `first_row`: the number of the first one in the task."""
    for part in formats.parts({name: column for name, column in named.items() if name in _WRITTEN}):
        if delivery.letters is None:
            part.check(first_row)
        delivery.send_each(columns_by_topic(delivery.config, delivery.sifted(part.columns, formats.unwritable(part))))


def _named(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the columns. Of columns with the same name the first one counts, as in Spark's own sink."""
    return {name: batch.column(index) for index, name in reversed([*enumerate(batch.schema.names)])}


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
