"""Writes of many rows: acknowledged rows are counted, the report sums them up, and a table is written to its end.

Spark's tasks and `KafkaProducer.write` count by `RowCounts`. The Sender thread calls it; the writing thread reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.futures import RunCallback, RunMetadata
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.tables import ColumnNames, Table, TablePart

if TYPE_CHECKING:
    from spark_kafka_sink.serialization.record_formats import RecordFormats

log = logging.getLogger(__name__)

_MOST_TOPICS: Final = 10
"""The most topics that a report names: a topic column may have a thousand, and each micro-batch has a report."""


@dataclass(slots=True)
class Delivered:
    """The rows that one partition of a topic has received."""

    records: int = 0
    size: int = 0
    """Bytes of encoded records, before compression."""
    last_offset: int = -1
    first_offset: int = -1
    without_offset: int = 0
    """Records for which the broker gave no offset."""


class RowCounts:
    """Acknowledged rows of one write, and the first error. The Sender thread writes, the writing thread reads."""

    __slots__ = ("_failed_runs", "_first_error", "acknowledged", "delivered", "stamped")

    def __init__(self) -> None:
        self.acknowledged = 0
        self.delivered: dict[TopicPartition, Delivered] = {}
        self.stamped: set[str] = set()
        """The topics whose brokers have replaced the times of records."""
        self._failed_runs: list[int] = []
        """Rows of each failed run. A list, because the writing thread may add to it too."""
        self._first_error: Exception | None = None

    def __call__(self, run: RunMetadata, error: KafkaError | None) -> None:
        """Take the producer's report on `run.record_count` rows."""
        if error is not None:
            self._failed_runs.append(run.record_count)
            if self._first_error is None:
                self._first_error = error.at(topic_partition=TopicPartition(run.topic, run.partition))
            return
        self.acknowledged += run.record_count
        if run.timestamp_ms >= 0:
            self.stamped.add(run.topic)
        place = TopicPartition(run.topic, run.partition)
        delivered = self.delivered.get(place)
        if delivered is None:
            delivered = self.delivered[place] = Delivered()
        delivered.records += run.record_count
        delivered.size += run.serialized_size
        first, last = run.base_offset, run.base_offset + run.record_count - 1
        if first < 0:
            delivered.without_offset += run.record_count
            return
        if first < delivered.first_offset or delivered.first_offset < 0:
            delivered.first_offset = first
        if last > delivered.last_offset:
            delivered.last_offset = last

    @property
    def failed(self) -> int:
        """Rows that the producer has reported as failed."""
        return sum(self._failed_runs)

    def fail(self, error: Exception) -> None:
        """Note that `error` lost rows before they were sent."""
        if self._first_error is None:
            self._first_error = error

    @property
    def first_error(self) -> Exception | None:
        return self._first_error

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._first_error is not None:
            raise self._first_error


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The rows of a write that are in Kafka. `str()` of it is one line."""

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
    failed: int = 0
    """Rows that were sent and refused or lost. Above 0 only in the report of an error."""
    dead_letters: int = 0
    """Rows that can never be written, and went to the dead letters. `records` and `bytes` do not count them."""
    first_dead_letter: str | None = None
    """The first of them, and why it cannot be written."""

    @classmethod
    def of(cls, rows: Iterable[Any], duration: float) -> WriteReport:
        """Make the summary of the tasks' rows of the sink's `REPORT_DDL`."""
        counts = dict.fromkeys(("records", "bytes", "batches", "retries", "dead_letters"), 0)
        last_offsets: dict[TopicPartition, int] = {}
        first: str | None = None
        for row in rows:
            first = first or row["first_dead_letter"]
            for name in counts:
                counts[name] += row[name]
            if row["topic"] is not None:
                place = TopicPartition(row["topic"], row["partition"])
                last_offsets[place] = max(last_offsets.get(place, -1), row["last_offset"])
        last_offsets = dict(sorted(last_offsets.items()))
        return cls(duration=duration, last_offsets=last_offsets, first_dead_letter=first, **counts)

    def __str__(self) -> str:
        topics = sorted({place.topic for place in self.last_offsets})
        more = f" and {len(topics) - _MOST_TOPICS:,} more" if len(topics) > _MOST_TOPICS else ""
        where = f" to {len(self.last_offsets)} partitions of {', '.join(topics[:_MOST_TOPICS])}{more}" if topics else ""
        rate = f", {self.records / self.duration:,.0f} records/s" if self.duration > 0 else ""
        failed = f", {self.failed:,} records failed" if self.failed else ""
        dead = f", {self.dead_letters:,} dead letters" if self.dead_letters else ""
        return (
            f"{self.records:,} records, {self.bytes / 1e6:,.1f} MB in {self.batches:,} batches{where},"
            f" {self.retries:,} retries{failed}{dead}, {self.duration:.2f} s{rate}"
        )


class ColumnProducer(Protocol):
    """The part of a producer that a write uses."""

    def send_columns(self, topic: str, columns: RecordColumns, on_completion: RunCallback | None = None) -> None: ...

    def look_up(self, topics: Iterable[str]) -> None: ...

    def flush(self, timeout: float | None = None) -> None: ...

    def batches_and_retries(self) -> tuple[int, int]: ...


SendColumns: TypeAlias = Callable[[str, RecordColumns, RunCallback], None]


class Write:
    """The rows that one thread sends through a producer, and waits for."""

    def __init__(self, producer: ColumnProducer, counts: RowCounts, send_columns: SendColumns | None = None) -> None:
        """`send_columns`: in place of the producer's own."""
        self.counts = counts
        self.sent = 0
        self._timed: set[str] = set()
        """The topics of rows with a time of their own."""
        self._send_columns = send_columns or producer.send_columns
        self._producer = producer
        self._before = producer.batches_and_retries()

    def send(self, topic: str, columns: RecordColumns) -> None:
        """Send rows. Raises KafkaError as soon as one of these rows or of earlier ones is known to have failed."""
        self.counts.check()
        self._send_columns(topic, columns, self.counts)
        self.sent += columns.num_rows
        if columns.timestamp_ms is not None and columns.timestamp_ms.null_count < columns.num_rows:
            self._timed.add(topic)

    def finish(self) -> None:
        """Wait until every row is acknowledged. Raises KafkaError if one is not."""
        self._producer.flush()
        self.counts.check()
        if self.counts.acknowledged != self.sent:
            missing = self.sent - self.counts.acknowledged
            raise KafkaError(
                f"{missing} of {self.sent} rows were sent and neither acknowledged nor refused; they must be written"
                " again. The log of this process says why its producer stopped."
            )
        for topic in sorted(self._timed & self.counts.stamped - _warned):
            _warned.add(topic)
            log.warning(
                "Topic %s has message.timestamp.type=LogAppendTime: brokers have replaced the column timestamp by the"
                " time of writing. Leave out the column, or set the topic to CreateTime.",
                topic,
            )

    def batches_and_retries(self) -> tuple[int, int]:
        """Return acknowledged batches and retried records of the producer since this write began."""
        (batches, retries), (batches_before, retries_before) = self._producer.batches_and_retries(), self._before
        return batches - batches_before, retries - retries_before

    def report(self, duration: float) -> WriteReport:
        batches, retries = self.batches_and_retries()
        delivered = dict(sorted(self.counts.delivered.items()))
        return WriteReport(
            records=self.counts.acknowledged,
            bytes=sum(part.size for part in delivered.values()),
            batches=batches,
            retries=retries,
            duration=duration,
            last_offsets={place: part.last_offset for place, part in delivered.items()},
            failed=self.counts.failed,
        )


_warned: Final[set[str]] = set()
"""Each topic is warned of once in a process."""


def send_to_each(
    rows: Iterable[tuple[str, RecordColumns]],
    send: Callable[[str, RecordColumns], None],
    look_up: Callable[[list[str]], None],
) -> list[str]:
    """Send the rows of each topic, and return the topics. Topics without metadata are looked up together."""
    parts = list(rows)
    topics = [topic for topic, _ in parts]
    for number, (topic, columns) in enumerate(parts):
        send(topic, columns)
        if number == 0 and len(parts) > 1:
            look_up(topics[1:])
    return topics


def table_and_formats(
    data: object, topic: str | None, names: Mapping[str, ColumnNames], serialization: Mapping[str, object] | None
) -> tuple[Table, RecordFormats | None]:
    """Return the table, and the formats of its columns, resolved: a schema registry is asked here.

    Raises ConfigError, SchemaError for a column that cannot be written, and KafkaError of the registry.
    """
    if serialization is None:
        return Table(data, topic, names), None
    from spark_kafka_sink.serialization.format_options import formats_of_write
    from spark_kafka_sink.serialization.record_formats import RecordFormats
    from spark_kafka_sink.serialization.schemas import resolved  # not for the workers of Spark

    formats = formats_of_write(serialization)
    table = Table(data, topic, names, formats.fields)
    types = {field: table.type_of(field) for field in formats.fields}
    return table, RecordFormats(resolved(formats, types, topic))


def _formatted(part: TablePart, formats: RecordFormats | None) -> Iterator[TablePart]:
    """Yield the rows of `part`, with bytes in the columns that have a format. Raises SerializationError for a row that
    does not fit.
    """
    if formats is None:
        yield part
        return
    with part.located():
        for records in formats.parts(part.columns):
            records.check()
            yield part.with_columns(records.columns, records.first_row)


def write_table(
    producer: ColumnProducer,
    table: Table,
    clock: Clock,
    formats: RecordFormats | None = None,
    send_columns: SendColumns | None = None,
) -> WriteReport:
    """Send every row of `table`, and wait until all are acknowledged. `formats`: of its columns, if some have one.
    `send_columns`: in place of the producer's own.

    An Exception is raised after the rows that were sent have their outcomes, with a note on what was delivered; a
    KafkaError also has it in `report`. Ctrl-C is raised at once.
    """
    started_ms = clock.now_ms()
    write = Write(producer, RowCounts(), send_columns)
    try:
        for part in table.parts():
            for rows in _formatted(part, formats):
                with rows.located():
                    send_to_each(rows.by_topic(), write.send, producer.look_up)
            del part  # free it before the next one is read
        write.finish()
    except Exception as error:
        try:
            producer.flush()
        except KafkaError as late:
            error.add_note(str(late))
        report = write.report((clock.now_ms() - started_ms) / 1000)
        error.add_note(f"Before this error KafkaProducer.write had delivered {report}")
        if isinstance(error, KafkaError):
            error.report = report
        raise
    return write.report((clock.now_ms() - started_ms) / 1000)
