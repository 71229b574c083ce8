"""Which column of a row is what, and rows turned into record columns.

The rules and the words are those of Spark's own Kafka sink (KafkaWriter.scala of 4.x), and one column is more than
it has: `timestamp`. The row interfaces learn the schema from the first row that a task sees, so types are checked by
Python value, and every block again: that costs one pass in C per column.

Used by a task's thread alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.record.columns import RecordColumns

Column = list[Any]

_NONE: Final = type(None)
_BYTES_LIKE: Final = frozenset({str, bytes, bytearray, _NONE})

_ALLOWED: Final = {
    "value": (_BYTES_LIKE, "string or binary"),
    "key": (_BYTES_LIKE, "string or binary"),
    "topic": (frozenset({str, _NONE}), "string"),
    "partition": (frozenset({int, _NONE}), "int"),
    "headers": (frozenset({list, tuple, _NONE}), "array<struct<key:string,value:binary>>"),
    "timestamp": (frozenset({datetime.datetime, int, _NONE}), "timestamp or bigint"),
}
"""Column → (Python types that its rows may hold, Spark's name for them)."""

_SPARK_TYPES: Final[dict[type, str]] = {
    bool: "boolean",
    int: "int",
    float: "double",
    str: "string",
    bytes: "binary",
    bytearray: "binary",
    Decimal: "decimal",
    datetime.date: "date",
    datetime.datetime: "timestamp",
    datetime.timedelta: "interval day to second",
    list: "array",
    dict: "map",
}

_HEADER_BYTES: Final = 32
"""What a header counts besides its name and value: a row, a dict, a string and a bytearray of Python's, which take 500.
So a block of 1 MiB has at most 16 MB of them.
"""

_DAYS_OF_400_YEARS: Final = 146_097

NULL_TOPIC: Final = (
    "[KAFKA_NULL_TOPIC_IN_DATA] The Kafka message data sent to the producer contains a null topic. Use the `topic`"
    " option for setting a default topic."
)
NO_TOPIC: Final = (
    "topic option required when no 'topic' attribute is present. Use the topic option for setting a topic."
)
NO_VALUE: Final = "Required attribute 'value' not found"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Positions of the columns that matter in a row; None where the row has no such column. Others are ignored."""

    value: int
    key: int | None
    topic: int | None
    partition: int | None
    headers: int | None
    timestamp: int | None

    @classmethod
    def of(cls, row: Any, topic_option: str | None) -> RowLayout:
        """The layout of a DataFrame's `row`. The option `topic` wins over the column, which then counts as absent.

        Raises SchemaError: no column names, no `value`, no topic at all.
        """
        names = getattr(row, "__fields__", None)
        if names is None:
            raise SchemaError(
                f"A row of type {type(row).__name__} has no column names: hand over the rows of a DataFrame, with a"
                " 'value' column."
            )
        position = {name: index for index, name in reversed(list(enumerate(names)))}
        if topic_option is None and "topic" not in position:
            raise SchemaError(NO_TOPIC)
        if "value" not in position:
            raise SchemaError(f"{NO_VALUE}. The columns are: {', '.join(names)}.")
        return cls(
            value=position["value"],
            key=position.get("key"),
            topic=None if topic_option is not None else position["topic"],
            partition=position.get("partition"),
            headers=position.get("headers"),
            timestamp=position.get("timestamp"),
        )


class RowBlock:
    """Rows of one layout, collected as columns."""

    def __init__(self, layout: RowLayout, topic_option: str | None) -> None:
        self._topic_option = topic_option
        self._fields = {name: (index, Column()) for name in _ALLOWED if (index := getattr(layout, name)) is not None}
        self._values = self._fields["value"][1]
        self.size = 0
        """About the bytes held: keys, values and headers."""

    @property
    def num_rows(self) -> int:
        return len(self._values)

    def extend(self, rows: Sequence[Any]) -> int:
        """Take `rows` in; returns about how many bytes they hold. Raises SchemaError on a value of a wrong type."""
        try:
            fields = list(zip(*rows, strict=True))
        except ValueError:
            widths = ", ".join(map(str, sorted(set(map(len, rows)))))
            raise SchemaError(
                f"Rows of one partition have different numbers of columns: {widths}. Hand over the rows of a DataFrame."
            ) from None
        size = 0
        for name, (index, column) in self._fields.items():
            values = fields[index]
            _check_types(name, values)
            column += values
            if name in ("value", "key"):
                size += sum(map(len, filter(None, values)))
            elif name == "headers":
                _check_header_fields(values)
                size += _size_of_headers(values)
        self.size += size
        return size

    def by_topic(self) -> Iterator[tuple[str, RecordColumns]]:
        """The rows of each topic, in their order. Raises SchemaError on a null topic, SerializationError on a value
        that cannot be written.
        """
        columns = {name: column for name, (_, column) in self._fields.items()}
        if self._topic_option is not None:
            yield self._topic_option, _record_columns(columns)
            return
        topics = columns.pop("topic")
        if None in topics:
            raise SchemaError(NULL_TOPIC)
        rows_of: dict[str, list[int]] = {}
        for row, topic in enumerate(topics):
            rows_of.setdefault(topic, []).append(row)
        if len(rows_of) == 1:
            yield topics[0], _record_columns(columns)
            return
        for topic, rows in rows_of.items():
            yield topic, _record_columns({name: [column[row] for row in rows] for name, column in columns.items()})


def _check_types(name: str, values: Sequence[Any]) -> None:
    allowed, wanted = _ALLOWED[name]
    wrong = set(map(type, values)) - allowed
    if wrong and not all(issubclass(found, tuple) and name == "headers" for found in wrong):
        found = min(_SPARK_TYPES.get(found, found.__name__) for found in wrong)
        raise SchemaError(f"{name} attribute unsupported type {found}. {name} must be a(n) {wanted}")


def _check_header_fields(values: Sequence[Any]) -> None:
    """By the first header there is: the rows of a DataFrame have all the same fields."""
    first = next((headers[0] for headers in values if headers), None)
    names = getattr(first, "__fields__", None)
    if names is not None and [name.lower() for name in names] != ["key", "value"]:
        raise SchemaError(
            f"headers attribute unsupported type array<struct<{','.join(names)}>>. headers must be a(n)"
            f" {_ALLOWED['headers'][1]}"
        )


def _size_of_headers(values: Sequence[Any]) -> int:
    try:
        return sum(
            _HEADER_BYTES + len(key or "") + len(value or b"")
            for headers in values
            if headers
            for key, value in headers
        )
    except (TypeError, ValueError):
        raise SchemaError(
            "headers attribute has an element of another shape. headers must be a(n)"
            " array<struct<key:string,value:binary>>"
        ) from None


def _record_columns(columns: dict[str, Column]) -> RecordColumns:
    timestamps = columns.get("timestamp")
    return RecordColumns.from_rows(
        columns["value"],
        columns.get("key"),
        columns.get("headers"),
        None if timestamps is None else _epoch_ms(timestamps),
        columns.get("partition"),
    )


def _epoch_ms(timestamps: Column) -> list[int | None]:
    """Milliseconds since 1970 of datetimes (naive ones are local time, as PySpark makes them of a timestamp; `fold`
    counts) or of milliseconds. A null stays null: the producer stamps it. Raises SchemaError before 1970.
    """
    found = [_datetime_ms(t) if isinstance(t, datetime.datetime) else t for t in timestamps]
    earliest = min((ms for ms in found if ms is not None), default=0)
    if earliest < 0:
        raise SchemaError(
            f"The timestamp {timestamps[found.index(earliest)]} lies before 1970, and Kafka has no such timestamps:"
            " correct it, or make it null for the time of writing."
        )
    return found


def _datetime_ms(moment: datetime.datetime) -> int:
    shift_days = 0
    if moment.year in (datetime.MINYEAR, datetime.MAXYEAR):
        # timestamp() looks a day back and ahead, beyond what a datetime holds; the calendar repeats after 400 years
        shift_days = _DAYS_OF_400_YEARS if moment.year == datetime.MAXYEAR else -_DAYS_OF_400_YEARS
        moment = (moment - datetime.timedelta(shift_days)).replace(fold=moment.fold)
    # seconds and microseconds apart: one float of both cannot hold them exactly in far-off years
    seconds = round(moment.timestamp() - moment.microsecond / 1e6) + shift_days * 86_400
    return seconds * 1000 + moment.microsecond // 1000
