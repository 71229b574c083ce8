"""The report of a columnar write: the tasks' part, which they return to the driver, and the summary. Plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.record.arrow import binary_array, int_array
from spark_kafka_sink.sink.delivery import Delivered

REPORT_DDL: Final = (
    "topic STRING, partition INT, records BIGINT, bytes BIGINT, last_offset BIGINT, batches BIGINT, retries BIGINT"
)
EXACTLY_ONCE_DDL: Final = REPORT_DDL + ", outcome STRING"
"""The row of a task's own counts has the task's `TaskOutcome` as JSON."""
_REPORT_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("records", pa.int64()),
        ("bytes", pa.int64()),
        ("last_offset", pa.int64()),
        ("batches", pa.int64()),
        ("retries", pa.int64()),
    ]
)

_MOST_TOPICS: Final = 10
"""The most topics that a report names: a topic column may have a thousand, and each micro-batch has a report."""


def task_report(
    delivered: Mapping[TopicPartition, Delivered], batches: int, retries: int, outcome: str | None = None
) -> pa.RecordBatch:
    """Return a task's report as Arrow, of `REPORT_DDL`; of `EXACTLY_ONCE_DDL` if there is an `outcome`."""
    columns = report_columns(delivered, batches, retries)
    arrays = [_array(column, field) for column, field in zip(columns, _REPORT_SCHEMA, strict=True)]
    if outcome is None:
        return pa.RecordBatch.from_arrays(arrays, schema=_REPORT_SCHEMA)
    texts = binary_array([*[None] * len(delivered), outcome], "outcome").cast(pa.string())
    return pa.RecordBatch.from_arrays([*arrays, texts], schema=_REPORT_SCHEMA.append(pa.field("outcome", pa.string())))


def report_columns(
    delivered: Mapping[TopicPartition, Delivered], batches: int, retries: int
) -> tuple[tuple[Any, ...], ...]:
    """Return a task's report, the columns of `REPORT_DDL`: a row for each topic-partition, and one without a topic for
    the task's own counts.
    """
    rows: list[tuple[Any, ...]] = [
        (place.topic, place.partition, part.records, part.size, part.last_offset, 0, 0)
        for place, part in delivered.items()
    ]
    rows.append((None, None, 0, 0, -1, batches, retries))
    return tuple(zip(*rows, strict=True))


def report_rows(columns: Iterable[Iterable[Any]]) -> Iterator[Mapping[str, Any]]:
    """Return the rows of `report_columns`, for `WriteReport.of`."""
    names = _REPORT_SCHEMA.names
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _array(column: tuple[Any, ...], field: pa.Field) -> pa.Array:
    if pa.types.is_string(field.type):
        return binary_array(column, field.name).cast(field.type)
    return int_array(column, field.type, field.name)


@dataclass(frozen=True, slots=True)
class WriteReport:
    """A write that succeeded. `str()` of it is one line."""

    records: int
    """Records that were acknowledged."""
    bytes: int
    """Of encoded records, before compression."""
    batches: int
    """Record batches that the producers sent."""
    retries: int
    """Records that the producers sent again. As in Kafka's record-retry-total, a batch that was too large and was split
    is not counted. Nor are rows that Spark's tasks wrote again.
    """
    duration: float
    """Seconds."""
    last_offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The highest offset written in each partition; -1 if the broker does not return one (acks=0)."""

    @classmethod
    def of(cls, rows: Iterable[Any], duration: float) -> WriteReport:
        """Make the summary of the tasks' rows of `REPORT_DDL`."""
        counts = dict.fromkeys(("records", "bytes", "batches", "retries"), 0)
        last_offsets: dict[TopicPartition, int] = {}
        for row in rows:
            for name in counts:
                counts[name] += row[name]
            if row["topic"] is not None:
                place = TopicPartition(row["topic"], row["partition"])
                last_offsets[place] = max(last_offsets.get(place, -1), row["last_offset"])
        return cls(duration=duration, last_offsets=dict(sorted(last_offsets.items())), **counts)

    def __str__(self) -> str:
        topics = sorted({place.topic for place in self.last_offsets})
        more = f" and {len(topics) - _MOST_TOPICS:,} more" if len(topics) > _MOST_TOPICS else ""
        where = f" to {len(self.last_offsets)} partitions of {', '.join(topics[:_MOST_TOPICS])}{more}" if topics else ""
        rate = f", {self.records / self.duration:,.0f} records/s" if self.duration > 0 else ""
        return (
            f"{self.records:,} records, {self.bytes / 1e6:,.1f} MB in {self.batches:,} batches{where},"
            f" {self.retries:,} retries, {self.duration:.2f} s{rate}"
        )
