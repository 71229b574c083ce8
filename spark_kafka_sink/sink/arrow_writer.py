"""Writes the Arrow batches of a task into its delivery, without a Python object for a row. Only the task's thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.record.arrow import int_values, without
from spark_kafka_sink.record.columns import (
    FIRST_USUAL_MS,
    LAST_MS,
    NO_TIMESTAMP,
    RecordColumns,
    by_topic,
    early_text,
    late_text,
)
from spark_kafka_sink.sink.arrow_batches import joined
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.report import task_report
from spark_kafka_sink.sink.schema import (
    ALLOW_EARLY,
    HEADERS,
    KEY,
    NULL_TOPIC,
    PARTITION,
    TIMESTAMP,
    TOPIC,
    VALUE,
    before_1970_text,
)

MANY_PARTITIONS: Final = 32


def write_arrow(config: SinkConfig, pool: ProducerPool, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows at least once, for `mapInArrow`: yield the task's report once all rows are acknowledged. Raises as
    `write_all`.
    """
    delivery = TaskDelivery(config, pool)
    write_all(delivery, batches)
    yield task_report(delivery.counts.delivered, delivery.batches, delivery.retries)


def write_all(delivery: TaskDelivery, batches: Iterable[pa.RecordBatch]) -> None:
    """Write every row of `batches`, whose columns have passed `schema.check_columns`, and finish the delivery. A
    timestamp column may be int64 ms or an Arrow timestamp of any unit that counts from 1970 in UTC.

    Raises KafkaError if a row is not acknowledged, SchemaError for a row that cannot be written.
    """
    try:
        for batch in joined(batches, lambda: _is_spread(delivery)):
            delivery.send_each(_columns_by_topic(delivery.config, batch))
            del batch  # free it before the next one is read
        delivery.finish()
    finally:
        delivery.abandon()


def _is_spread(delivery: TaskDelivery) -> bool:
    """Return whether batches go to many partitions, so that larger ones are worth a copy. Looks at the last batch's
    topics.
    """
    return sum(map(delivery.partition_count, delivery.topics[:MANY_PARTITIONS])) >= MANY_PARTITIONS


def _columns_by_topic(config: SinkConfig, batch: pa.RecordBatch) -> Iterator[tuple[str, RecordColumns]]:
    if batch.num_rows == 0:
        return
    # of columns with the same name the first one counts, as in Spark's own sink
    named = {name: batch.column(index) for index, name in reversed([*enumerate(batch.schema.names)])}
    columns = RecordColumns(
        value=named[VALUE],
        key=named.get(KEY),
        headers=named.get(HEADERS),
        timestamp_ms=_epoch_ms(named.get(TIMESTAMP), allows_early=config.allows_early_timestamps),
        partition=named.get(PARTITION),
    )
    if config.topic is not None:
        yield config.topic, columns
    else:
        yield from by_topic(columns, named[TOPIC], NULL_TOPIC)


def _epoch_ms(times: pa.Array | None, *, allows_early: bool) -> pa.Array | None:
    """Return times as int64 milliseconds, rounded down; a null for -1 ms, which is Kafka's sign for no timestamp.
    Raises SchemaError before 1970 and after 9999, and for a number (not a date) before 1980 unless `allows_early`.
    """
    if times is None:
        return None
    if times.null_count == len(times):
        return pa.nulls(len(times), pa.int64())
    unit = times.type.unit if pa.types.is_timestamp(times.type) else None
    counts = times if unit is None else times.cast(pa.int64())
    a_second = _PER_SECOND[unit]
    none = NO_TIMESTAMP * a_second // 1000 if a_second >= 1000 else None
    earliest, latest = _bounds(counts)
    if earliest < 0 and none is not None and none in int_values(counts):
        counts = without(counts, none)
        earliest, latest = _bounds(counts)
    if earliest < 0:
        raise SchemaError(before_1970_text("A timestamp", f"{earliest} {unit or 'ms'}"))
    if latest * 1000 // a_second > LAST_MS:
        raise SchemaError(late_text("A timestamp", latest * 1000 // a_second))
    if unit is not None:
        return counts.cast(times.type).cast(pa.timestamp("ms", times.type.tz), safe=False).cast(pa.int64())
    if earliest < FIRST_USUAL_MS and not allows_early:
        raise SchemaError(early_text("A timestamp", earliest) + ALLOW_EARLY)
    return counts


_PER_SECOND: Final = {None: 1_000, "s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""By the unit of an Arrow timestamp; None: a number of ms."""


def _bounds(times: pa.Array) -> tuple[int, int]:
    """Return the earliest and the latest time; usual ones if all are null."""
    found = pc.min_max(times)
    earliest, latest = found["min"].as_py(), found["max"].as_py()
    return (FIRST_USUAL_MS, FIRST_USUAL_MS) if earliest is None else (earliest, latest)
