"""Dead letters: rows that can never be written go to a topic of their own, with headers that say why.

`DeadLetters` belongs to a task, and to its thread: it finds the rows of each batch (record/sifting.py), makes their
records, and stops at the limit. On the driver `check_limit` adds up what the tasks report. A sink without
errors.tolerance=all has no `DeadLetters`, and does nothing of this.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from pyspark import TaskContext

from spark_kafka_sink.common.errors import TooManyDeadLettersError
from spark_kafka_sink.producer.record_fields import SizeLimit
from spark_kafka_sink.producer.writes import RowCounts, WriteReport
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.headers import Header
from spark_kafka_sink.record.sifting import (
    Columns,
    LimitsOf,
    RowContent,
    SiftRules,
    Unwritable,
    contents,
    sendable_size,
    unwritable_rows,
    without_rows,
)
from spark_kafka_sink.sink.options import MOST_DEAD_LETTERS_OPTION, SinkConfig
from spark_kafka_sink.sink.schema import ALLOW_EARLY
from spark_kafka_sink.sink.topic_limits import process_limits

log = logging.getLogger(__name__)

TOPIC_HEADER: Final = "__sink.errors.topic"
PARTITION_HEADER: Final = "__sink.errors.partition"
CLASS_HEADER: Final = "__sink.errors.exception.class.name"
MESSAGE_HEADER: Final = "__sink.errors.exception.message"
ROW_HEADER: Final = "__sink.errors.row"
BATCH_HEADER: Final = "__sink.errors.batch.id"
AS_JSON_HEADER: Final = "__sink.errors.as.json"
"""Names what is JSON text in the dead letter, because it does not fit its schema and has no bytes in its format."""
LEFT_OUT_HEADER: Final = "__sink.errors.left.out"
"""Names what the record had and the dead letter does not have: it would be too large, or nothing can hold a cell."""

_PARTS: Final = ("value", "headers", "key")
_LONGEST_TEXT: Final = 500
_LONGEST_TOPIC: Final = 300
"""A name that is no topic's may be of any length. Topics have at most 249 characters."""


class TaskPlace(NamedTuple):
    """Where a task's rows come from. `batch_id`: None for a batch write."""

    partition: int = 0
    batch_id: str | None = None

    @classmethod
    def of_task(cls) -> TaskPlace:
        """Return the place of the running task."""
        context = TaskContext.get()
        if context is None:
            return cls()
        return cls(context.partitionId(), context.getLocalProperty("streaming.sql.batchId"))


class Letters(NamedTuple):
    """The dead letters of one batch. `originals`: the rows as they came, by topic, for the fingerprint of exactly-once
    delivery. The topic of a row without one is "".
    """

    records: RecordColumns | None
    """None if they are written already."""
    originals: Sequence[tuple[str, RecordColumns]]


class LetterCounts(NamedTuple):
    """What a task reports of its dead letters. `first`: as in `WriteReport`. `kinds`: their number by the class of the
    error, with its module.
    """

    counts: RowCounts
    first: str | None
    kinds: Mapping[str, int] = {}


class DeadLetters:
    """The dead letters of one task. `limits_of` asks the brokers about a topic."""

    def __init__(self, config: SinkConfig, limits_of: LimitsOf, place: TaskPlace) -> None:
        assert config.dead_letter_topic is not None
        self.topic: str = config.dead_letter_topic
        self.counts = RowCounts()
        self.first: str | None = None
        self.kinds: Counter[str] = Counter()
        self._most = config.most_dead_letters
        self._limits_of = limits_of
        self._place = place
        self._rules = sift_rules(config)
        self._rows = 0
        """Rows of earlier batches."""
        self._found = 0

    @classmethod
    def of(cls, config: SinkConfig) -> DeadLetters | None:
        """Return the dead letters of the running task, None if the sink has none."""
        if config.dead_letter_topic is None:
            return None
        return cls(config, process_limits(config.producer).of, TaskPlace.of_task())

    @property
    def report(self) -> LetterCounts:
        return LetterCounts(self.counts, self.first, dict(self.kinds))

    def log(self) -> None:
        """Log a warning if there are any."""
        if self.first is not None:
            batch = "" if self._place.batch_id is None else f"Batch {self._place.batch_id}, "
            whose = f"{batch}partition {self._place.partition}"
            _log(whose, self.counts.acknowledged, self.topic, self.first)

    def sift(
        self,
        columns: Columns,
        known: Iterable[Unwritable] = (),
        *,
        is_written_already: bool = False,
        header: Header | None = None,
    ) -> tuple[Columns, Letters | None]:
        """Return the columns without the rows that can never be written, and the dead letters of those. `known`: rows
        of this batch that the caller found. `is_written_already`: the rows are not sent, so no broker is asked.
        `header`: what the rows get when they are sent, and the dead letters here, unless they have one of its name.

        Raises TooManyDeadLettersError above the limit, and KafkaError if the brokers could not be asked.
        """
        first_row = self._rows
        self._rows += len(columns["value"])
        rules = self._rules if header is None else replace(self._rules, header=header)
        faults = unwritable_rows(columns, rules, None if is_written_already else self._limits_of, known)
        if not faults:
            return columns, None
        if not is_written_already:
            self._count(faults, first_row)
        rows = contents(columns, faults, self._rules)
        records = None if is_written_already else self._records(rows, first_row, header)
        return without_rows(columns, faults), Letters(records, _originals(rows))

    def _count(self, faults: Sequence[Unwritable], first_row: int) -> None:
        if self.first is None:
            fault = faults[0]
            self.first = f"row {first_row + fault.row} of partition {self._place.partition}: {fault.reason}"
        self._found += len(faults)
        self.kinds.update(_class_of(fault.error) for fault in faults)
        if self._found > self._most:
            raise too_many(self._found, self._most, self.first)

    def _records(self, rows: Sequence[RowContent], first_row: int, header: Header | None) -> RecordColumns:
        more = [() if header is None or _has(row, header[0]) else (header,) for row in rows]
        reasons = [[*self._reasons(row, first_row), *own] for row, own in zip(rows, more, strict=True)]
        sizes = (
            sendable_size(row, _headers(row, own, row.fault.lost), self._rules)
            for row, own in zip(rows, reasons, strict=True)
        )
        largest = max((size for size in sizes if size is not None), default=None)
        limit = self._limits_of(self.topic, None, largest).max_message_bytes
        fitting = [self._fitting(row, own, limit) for row, own in zip(rows, reasons, strict=True)]
        return RecordColumns.from_rows(
            [row.value for row, _ in fitting],
            [row.key for row, _ in fitting],
            [headers for _, headers in fitting],
            [row.timestamp_ms if row.has_valid_time else None for row, _ in fitting],
        )

    def _fitting(
        self, row: RowContent, reasons: list[Header], max_message_bytes: int | None
    ) -> tuple[RowContent, list[Header]]:
        """Return the row and its headers, without its value, headers or key if they make it too large."""
        left_out = set(row.fault.lost)
        headers = _headers(row, reasons, left_out)
        is_there = {"value": row.value is not None, "headers": bool(row.headers), "key": row.key is not None}
        for part in (each for each in _PARTS if is_there[each]):
            size = sendable_size(row, headers, self._rules)
            if size is not None and (max_message_bytes is None or size <= max_message_bytes):
                break
            left_out.add(part)
            row = _without(row, part)
            headers = _headers(row, reasons, left_out)
        return row, headers

    def _reasons(self, row: RowContent, first_row: int) -> list[Header]:
        place = self._place
        texts = {
            TOPIC_HEADER: None if row.topic is None else row.topic[:_LONGEST_TOPIC],
            PARTITION_HEADER: None if row.partition is None else str(row.partition),
            CLASS_HEADER: _class_of(row.fault.error),
            MESSAGE_HEADER: row.fault.reason[:_LONGEST_TEXT],
            ROW_HEADER: str(first_row + row.fault.row),
        }
        if place.batch_id is not None:
            texts[BATCH_HEADER] = place.batch_id
        return [(name, None if text is None else text.encode("utf-8", "replace")) for name, text in texts.items()]


def _class_of(error: type[Exception]) -> str:
    return f"{error.__module__}.{error.__qualname__}"


def sift_rules(config: SinkConfig) -> SiftRules:
    """Return what the options say about rows."""
    limit, producer = SizeLimit(config.producer), config.producer
    return SiftRules(
        topic=config.topic,
        early_advice=None if config.allows_early_timestamps else ALLOW_EARLY,
        max_bytes=limit.max_bytes,
        size_setting=f"kafka.{limit.setting}",
        codec=codec_for(producer.compression_type, producer.compression_level),
        decision_topic=config.trusted_topic,
    )


def _has(row: RowContent, name: str) -> bool:
    """Return whether the row has a header of this name."""
    return any(own == name for own, _ in row.headers)


def _headers(row: RowContent, reasons: Sequence[Header], left_out: Container[str]) -> list[Header]:
    """Return the headers of a dead letter."""
    lists = ((AS_JSON_HEADER, row.as_json), (LEFT_OUT_HEADER, [part for part in _PARTS if part in left_out]))
    return [*row.headers, *reasons, *((name, ", ".join(parts).encode()) for name, parts in lists if parts)]


def _without(row: RowContent, part: str) -> RowContent:
    if part == "headers":
        return row._replace(headers=[])
    row = row._replace(as_json=tuple(name for name in row.as_json if name != part))
    return row._replace(value=None) if part == "value" else row._replace(key=None)


def _originals(rows: Sequence[RowContent]) -> list[tuple[str, RecordColumns]]:
    by_topic: dict[str, list[RowContent]] = {}
    for row in rows:
        by_topic.setdefault(row.topic or "", []).append(row)
    return [
        (
            topic,
            RecordColumns.from_rows(
                [row.value for row in own],
                [row.key for row in own],
                [row.headers for row in own],
                [row.timestamp_ms for row in own],
                [row.partition for row in own],
            ),
        )
        for topic, own in by_topic.items()
    ]


# ---- on the driver ---------------------------------------------------------------------------------------------------


def check_limit(config: SinkConfig, report: WriteReport) -> None:
    """Raise TooManyDeadLettersError if the tasks together have more dead letters than the option allows."""
    if report.dead_letters > config.most_dead_letters:
        raise too_many(report.dead_letters, config.most_dead_letters, report.first_dead_letter)


def log_letters(config: SinkConfig, report: WriteReport, whose: str) -> None:
    """Log a warning if there are dead letters. `whose` begins it: "Batch 7"."""
    if report.dead_letters:
        _log(whose, report.dead_letters, config.dead_letter_topic, report.first_dead_letter)


def _log(whose: str, rows: int, topic: str | None, first: str | None) -> None:
    log.warning("%s: %d rows cannot be written, and are in topic %s. The first is %s", whose, rows, topic, first)


def too_many(found: int, most: int, first: str | None) -> TooManyDeadLettersError:
    return TooManyDeadLettersError(
        f"At least {found} rows cannot be written, and {MOST_DEAD_LETTERS_OPTION}={most}. The first is {first}. Correct"
        f" the query, or raise {MOST_DEAD_LETTERS_OPTION}.",
        setting=MOST_DEAD_LETTERS_OPTION,
    )
