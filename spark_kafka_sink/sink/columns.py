"""Which column of a row is what, and rows turned into record columns.

The rules and the words are those of Spark's own Kafka sink (KafkaWriter.scala of 4.x), and one column is more than
it has: `timestamp`. The row interfaces know no schema: each row's values count by the names that this row itself has,
and types are checked by Python value, for every chunk again. That costs one pass in C per column.

Used by a task's thread alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from pyspark.sql.types import Row

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.headers import field_names, header_pairs
from spark_kafka_sink.record.row_arrays import int_text
from spark_kafka_sink.record.timestamps import FIRST_USUAL_MS, LAST_MS, NO_TIMESTAMP, early_text, late_text
from spark_kafka_sink.sink.options import EARLY_OPTION

Column = list[Any]

_NONE: Final = type(None)
_FIELDS: Final = attrgetter("__fields__")
_CHANGEABLE: Final = frozenset({bytearray, list, tuple})
"""Types of values that can be written, and whose contents their owner may change."""
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
CAST_TIMESTAMP: Final = (
    ": CAST(timestamp AS TIMESTAMP) gives it the time of the record. Rename or drop the column where it is no such time"
)
ALLOW_EARLY: Final = f" If the date is right, set {EARLY_OPTION}=true."


class NamedCells(tuple[Any, ...]):
    """A row as it was when it was taken: its values, with their names as `__fields__`, as a Row has them."""

    __fields__: Sequence[Any]


def taken(rows: Iterable[Any], first: int) -> list[Any]:
    """Take `rows`, of which `first` is the number of the first one, each as it is when it comes: an iterator may use
    one dict or bytearray for all of them. Raises SchemaError for a row without names.
    """
    are_fixed = _CHANGEABLE.isdisjoint  # here and not in a function: a call takes as long as the check
    return [
        row if type(row) is Row and are_fixed(map(type, row)) else snapshot(row, number)
        for number, row in enumerate(rows, first)
    ]


def snapshot(row: Any, number: int) -> Any:
    """Row `number`, which is a Row, a named tuple or a mapping, as it is now: its owner may change what it holds before
    it is sent. Raises SchemaError for a row without names.
    """
    names = field_names(row)
    if names is None:
        raise _nameless(row, number)
    values = row if isinstance(row, tuple) else row.values()
    cells = [bytes(cell) if type(cell) is bytearray else cell for cell in values]
    if "headers" in names:
        at = list(names).index("headers")
        if at < len(cells) and type(cells[at]) in (list, tuple):
            cells[at] = _pairs(cells[at], number)
    fixed = NamedCells(cells)
    fixed.__fields__ = names
    return fixed


def _pairs(headers: Any, number: int) -> list[tuple[Any, Any]]:
    try:
        return header_pairs(headers, f"row {number}")
    except SerializationError as unclear:
        raise SchemaError(str(unclear)) from None


def _nameless(row: Any, number: int) -> SchemaError:
    return SchemaError(
        f"Row {number} is a {type(row).__name__} without names of columns. Give the rows of a DataFrame, or Rows,"
        ' named tuples or dicts that have their columns by name: Row(value="v", key="k").'
    )


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The columns that matter in a row, each with its position. Others are ignored."""

    names: Sequence[Any]
    """Of all columns of the row."""
    positions: Mapping[str, int]

    @classmethod
    def of(cls, names: Sequence[Any], topic_option: str | None, number: int = 0) -> RowLayout:
        """The layout of row `number`, whose columns have these names. The option `topic` wins over the column, which
        then counts as absent. Of columns with one name the first counts.

        Raises SchemaError: no `value`, or no topic at all.
        """
        every = {name: index for index, name in reversed(list(enumerate(names)))}
        positions = {name: every[name] for name in _ALLOWED if name in every}
        its_columns = f" The columns of row {number} are: {', '.join(map(str, names)) or '(none)'}."
        if topic_option is not None:
            positions.pop("topic", None)
        elif "topic" not in positions:
            raise SchemaError(NO_TOPIC + its_columns)
        if "value" not in positions:
            raise SchemaError(f"{NO_VALUE}.{its_columns}")
        return cls(names, positions)


class RowLayouts:
    """The layouts of the rows of a task: each row's values count by the names that this row itself has."""

    def __init__(self, topic_option: str | None) -> None:
        self.topic_option = topic_option
        self._known: dict[tuple[Any, ...], RowLayout] = {}

    def runs_of(self, rows: Sequence[Any], first: int) -> Iterator[tuple[RowLayout, Sequence[Any]]]:
        """`rows` cut where the names of their columns change; `first` is the number of the first one. Raises
        SchemaError for a row that has no names, no `value`, or no topic.
        """
        try:
            names = list(map(_FIELDS, rows))
        except AttributeError:
            number = next(number for number, row in enumerate(rows) if field_names(row) is None)
            raise _nameless(rows[number], first + number) from None
        if names.count(names[0]) == len(rows):  # by far most often, and then in C
            yield self._layout(names[0], first), rows
            return
        at = 0
        for own, run in groupby(names, key=tuple):
            end = at + len(list(run))
            yield self._layout(own, first + at), rows[at:end]
            at = end

    def _layout(self, names: Sequence[Any], number: int) -> RowLayout:
        key = tuple(names)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = RowLayout.of(key, self.topic_option, number)
        return found


class RowBlock:
    """Rows, collected as columns. `first` is the number of the first row in its partition."""

    def __init__(self, layouts: RowLayouts, first: int = 0, *, allows_early: bool = False) -> None:
        self._layouts = layouts
        self._first = first
        self._allows_early = allows_early
        self._columns: dict[str, Column] = {}
        self.num_rows = 0
        self.size = 0
        """About the bytes held: keys, values and headers."""

    def extend(self, rows: Sequence[Any]) -> int:
        """Take `rows` in, which are fixed or snapshots; returns about how many bytes they hold. Raises SchemaError for
        a row that lacks a column it needs, and for a value of a wrong type.
        """
        size = sum(
            self._extend_run(layout, run) for layout, run in self._layouts.runs_of(rows, self._first + self.num_rows)
        )
        self.size += size
        return size

    def _extend_run(self, layout: RowLayout, rows: Sequence[Any]) -> int:
        """Take in rows of one layout."""
        columns, before = self._columns, self.num_rows
        fields = self._fields(layout, rows)
        size = 0
        for name, position in layout.positions.items():
            values = fields[position]
            _check_types(name, values)
            column = columns.get(name)
            if column is None:
                column = columns[name] = [None] * before
            column += values
            if name in ("value", "key"):
                size += sum(map(len, filter(None, values)))
            elif name == "headers":
                size += _size_of_headers(values)
        self.num_rows = before + len(rows)
        if len(columns) > len(layout.positions):  # rows before these had columns that these do not have
            for name in columns.keys() - layout.positions.keys():
                columns[name] += [None] * len(rows)
        return size

    def _fields(self, layout: RowLayout, rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The columns of `rows`. Raises SchemaError for a row with more values than names, or with fewer."""
        try:
            fields = list(zip(*rows, strict=True))
        except ValueError:
            fields = []
        if len(fields) == len(layout.names):
            return fields
        count = len(layout.names)
        index = next(index for index, row in enumerate(rows) if len(row) != count)
        raise SchemaError(
            f"Row {self._first + self.num_rows + index} has {len(rows[index])} values for {count} columns:"
            f" {', '.join(map(str, layout.names)) or '(none)'}. Give it one value for each name."
        )

    def by_topic(self) -> Iterator[tuple[str, RecordColumns]]:
        """The rows of each topic, in their order. Raises SchemaError on a null topic, SerializationError on a value
        that cannot be written.
        """
        columns = dict(self._columns)
        numbers = range(self._first, self._first + self.num_rows)
        if self._layouts.topic_option is not None:
            yield self._layouts.topic_option, self._record_columns(columns, numbers)
            return
        topics = columns.pop("topic")
        if None in topics:
            raise SchemaError(f"{NULL_TOPIC} Row {numbers[topics.index(None)]} has none.")
        rows_of: dict[str, list[int]] = {}
        for row, topic in enumerate(topics):
            rows_of.setdefault(topic, []).append(row)
        if len(rows_of) == 1:
            yield topics[0], self._record_columns(columns, numbers)
            return
        for topic, rows in rows_of.items():
            own = {name: [column[row] for row in rows] for name, column in columns.items()}
            yield topic, self._record_columns(own, [numbers[row] for row in rows])

    def _record_columns(self, columns: dict[str, Column], numbers: Sequence[int]) -> RecordColumns:
        timestamps = columns.get("timestamp")
        times = None if timestamps is None else _epoch_ms(timestamps, numbers, allows_early=self._allows_early)
        return RecordColumns.from_rows(
            columns["value"], columns.get("key"), columns.get("headers"), times, columns.get("partition"), numbers
        )


def _check_types(name: str, values: Sequence[Any]) -> None:
    allowed, wanted = _ALLOWED[name]
    wrong = set(map(type, values)) - allowed
    if wrong:
        found = min(_SPARK_TYPES.get(found, found.__name__) for found in wrong)
        advice = CAST_TIMESTAMP if name == "timestamp" else ""
        raise SchemaError(f"{name} attribute unsupported type {found}. {name} must be a(n) {wanted}{advice}")


def _size_of_headers(values: Sequence[Any]) -> int:
    """About the bytes of the headers that `snapshot` took."""
    return sum(_HEADER_BYTES + len(key) + len(value or b"") for headers in values if headers for key, value in headers)


def _epoch_ms(timestamps: Column, numbers: Sequence[int], *, allows_early: bool) -> list[int | None]:
    """Milliseconds since 1970 of datetimes (naive ones are local time, as PySpark makes them of a timestamp; `fold`
    counts) or of milliseconds. A null stays null, and -1 becomes one: the producer stamps it.

    Raises SchemaError before 1970, after 9999, and for a number before 1980, which is likely in another unit, unless
    `allows_early`.
    """
    found = [_datetime_ms(t) if isinstance(t, datetime.datetime) else t for t in timestamps]
    if NO_TIMESTAMP in found:
        found = [None if ms == NO_TIMESTAMP else ms for ms in found]
    given = [ms for ms in found if ms is not None]
    earliest, latest = min(given, default=FIRST_USUAL_MS), max(given, default=0)
    if earliest < 0:
        at = found.index(earliest)
        moment = timestamps[at]
        shown = int_text(moment) if isinstance(moment, int) else moment
        raise SchemaError(before_1970_text(f"The timestamp of row {numbers[at]}", shown))
    if latest > LAST_MS:
        at = found.index(latest)
        raise SchemaError(late_text(f"The timestamp of row {numbers[at]}", latest))
    if earliest < FIRST_USUAL_MS and not allows_early:
        for number, timestamp in zip(numbers, timestamps, strict=True):
            if type(timestamp) is int and 0 <= timestamp < FIRST_USUAL_MS:
                raise SchemaError(early_text(f"The timestamp of row {number}", timestamp) + ALLOW_EARLY)
    return found


def before_1970_text(whose: str, moment: object) -> str:
    """The text of an error for a time that Kafka does not know."""
    return (
        f"{whose} is {moment}, which lies before 1970, and Kafka has no such timestamps: correct it, or make it null"
        " for the time of writing."
    )


def _datetime_ms(moment: datetime.datetime) -> int:
    shift_days = 0
    if moment.year in (datetime.MINYEAR, datetime.MAXYEAR):
        # timestamp() looks a day back and ahead, beyond what a datetime holds; the calendar repeats after 400 years
        shift_days = _DAYS_OF_400_YEARS if moment.year == datetime.MAXYEAR else -_DAYS_OF_400_YEARS
        moment = (moment - datetime.timedelta(shift_days)).replace(fold=moment.fold)
    # seconds and microseconds apart: one float of both cannot hold them exactly in far-off years
    seconds = round(moment.timestamp() - moment.microsecond / 1e6) + shift_days * 86_400
    return seconds * 1000 + moment.microsecond // 1000
