"""The rows of a task, one by one or all at once, collected as record columns and sent in blocks.

Blocks are bounded by rows and by bytes, so that neither a million small rows nor a few large ones make memory grow
beyond the producer's own bound. The row interfaces have no schema: the values of each row count by the names of that
row, and Python types are checked for every row. The rules and the words are those of Spark's own Kafka sink
(KafkaWriter.scala of 4.x), with one more column, `timestamp`. A `RowTaker`, in C, takes most rows. The code in Python
can take every row; it takes all rows if the kernel was not compiled.

Used by the task's thread only.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, groupby, islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import Row

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record.arrow import binary_array, int_array, int_text
from spark_kafka_sink.record.columns import (
    FIRST_USUAL_MS,
    LAST_MS,
    NO_TIMESTAMP,
    RecordColumns,
    before_1970_text,
    by_topic,
    early_text,
    late_text,
)
from spark_kafka_sink.record.headers import field_names, header_pairs, headers_from_cells
from spark_kafka_sink.record.kernel import IS_FULL, NOT_TAKEN, RowTaker, Step, bytes_step, headers_step, typed_step
from spark_kafka_sink.record.sifting import Columns, Unwritable
from spark_kafka_sink.record.values import datetime_ms
from spark_kafka_sink.sink.arrow_writer import columns_by_topic
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.loose_columns import loose_columns
from spark_kafka_sink.sink.schema import (
    ALLOW_EARLY,
    HEADERS,
    KEY,
    NO_TOPIC,
    NO_VALUE,
    NULL_TOPIC,
    PARTITION,
    TIMESTAMP,
    TOPIC,
    VALUE,
    warn_of_case,
    wrong_type,
)

Column = list[Any]
Taken = tuple[tuple[Any, ...], Sequence[Any]]
"""The names and the cells of a row, as they were when the row was taken."""

BLOCK_ROWS: Final = 8_192
BLOCK_BYTES: Final = 1 << 20
"""A block with this many rows or bytes is full."""

_NONE: Final = type(None)
_CHANGEABLE: Final = frozenset({bytearray, list, tuple})
"""Types of values that can be written, and that their owner may change afterwards."""
_BYTES_LIKE: Final[frozenset[type]] = frozenset({str, bytes, bytearray, _NONE})

_ALLOWED: Final[dict[str, frozenset[type]]] = {
    VALUE: _BYTES_LIKE,
    KEY: _BYTES_LIKE,
    TOPIC: frozenset({str, _NONE}),
    PARTITION: frozenset({int, _NONE}),
    HEADERS: frozenset({list, tuple, _NONE}),
    TIMESTAMP: frozenset({datetime.datetime, int, _NONE}),
}
"""Column → the Python types that its rows may hold."""

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
"""Bytes that a header counts besides its name and value. Its Python objects (a row, a dict, a string and a bytearray)
take 500 bytes, so a block of 1 MiB has at most 16 MB of them.
"""

MOST_LAYOUTS: Final = 256
"""The most layouts that are kept."""


def taken(rows: Iterable[Any], first: int, *, takes_unnamed: bool = False) -> list[Taken]:
    """Take `rows`, each as it is when it comes: an iterator may use one dict or bytearray for all of them. `first` is
    the number of the first row. Raises SchemaError for a row without names, and unless `takes_unnamed` for a header
    without a name.
    """
    are_fixed = _CHANGEABLE.isdisjoint  # not in a function: its call would take as long as the check
    return [
        (tuple(names), row)
        if type(row) is Row and type(names := getattr(row, "__fields__", None)) is list and are_fixed(map(type, row))
        else _snapshot(row, number, takes_unnamed=takes_unnamed)
        for number, row in enumerate(rows, first)
    ]


def _snapshot(row: Any, number: int, *, takes_unnamed: bool) -> Taken:
    """Copy row `number`, which is a Row, a named tuple or a mapping: its owner may change its values before it is sent.
    Raises SchemaError for a row without names.
    """
    names = field_names(row)
    if not isinstance(names, Iterable):
        raise SchemaError(
            f"Row {number} is a {type(row).__name__} without names of columns. Give the rows of a DataFrame, or Rows,"
            ' named tuples or dicts that have their columns by name: Row(value="v", key="k").'
        )
    own = tuple(names)
    values = row if isinstance(row, tuple) else row.values()
    cells = [bytes(cell) if type(cell) is bytearray else cell for cell in values]
    if HEADERS in own:
        at = own.index(HEADERS)
        if at < len(cells) and type(cells[at]) in (list, tuple):
            cells[at] = row_headers(cells[at], number, takes_unnamed=takes_unnamed)
    return own, cells


def row_headers(headers: Any, number: int, *, takes_unnamed: bool) -> list[tuple[Any, Any]]:
    """Return the headers of row `number` as `header_pairs` does. Raises SchemaError if they are none."""
    try:
        return header_pairs(headers, f"row {number}", takes_unnamed=takes_unnamed)
    except SerializationError as unclear:
        raise SchemaError(str(unclear)) from None


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The position of each column of a row that is written. Other columns are ignored."""

    names: Sequence[Any]
    """The names of all columns of the row."""
    positions: Mapping[str, int]

    @classmethod
    def of(cls, names: Sequence[Any], topic_option: str | None, number: int = 0) -> RowLayout:
        """Return the layout of row `number`, whose columns have these names. The option `topic` wins over the column,
        which then counts as absent. Of columns with the same name the first one counts.

        Raises SchemaError: no `value`, or no topic at all.
        """
        every = {name: index for index, name in reversed(list(enumerate(names)))}
        positions = {name: every[name] for name in _ALLOWED if name in every}
        its_columns = f" The columns of row {number} are: {', '.join(map(str, names)) or '(none)'}."
        if topic_option is not None:
            positions.pop(TOPIC, None)
        elif TOPIC not in positions:
            raise SchemaError(NO_TOPIC + its_columns)
        if VALUE not in positions:
            raise SchemaError(f"{NO_VALUE}.{its_columns}")
        warn_of_case(names, topic_option)
        return cls(names, positions)


class RowLayouts:
    """The layouts of the rows of a task: each row may have other columns."""

    def __init__(self, topic_option: str | None) -> None:
        self.topic_option = topic_option
        self.last: RowLayout | None = None
        """The layout of the last row."""
        self._known: dict[tuple[Any, ...], RowLayout] = {}

    def runs_of(self, rows: Sequence[Taken], first: int) -> Iterator[tuple[RowLayout, Sequence[Sequence[Any]]]]:
        """Yield the cells of `rows`, in runs of equal column names; `first` is the number of the first row. Raises
        SchemaError for a row that has no `value`, or no topic.
        """
        names, cells = zip(*rows, strict=True)
        if names.count(names[0]) == len(rows):  # nearly always, and counted in C
            yield self._layout(names[0], first), cells
            return
        at = 0
        for own, run in groupby(names):
            end = at + len(list(run))
            yield self._layout(own, first + at), cells[at:end]
            at = end

    def _layout(self, names: tuple[Any, ...], number: int) -> RowLayout:
        found = self._known.get(names)
        if found is None:
            if len(self._known) >= MOST_LAYOUTS:  # dicts may have other keys in every row
                self._known.clear()
            found = self._known[names] = RowLayout.of(names, self.topic_option, number)
        self.last = found
        return found


class RowBlock:
    """Rows, collected as columns. `first` is the number of the first row in its partition.

    `taker` takes rows that are like the last one into this block; None without a kernel or a last row.
    """

    def __init__(self, layouts: RowLayouts, first: int = 0, *, allows_early: bool = False) -> None:
        self._layouts = layouts
        self._first = first
        self._allows_early = allows_early
        self._columns: dict[str, Column] = {VALUE: []}
        """The column `headers` has the number of headers of each row."""
        self._header_keys: Column = []
        self._header_values: Column = []
        self._size = 0
        """Without the size of the taker's rows."""
        self.taker: Any = None
        self._make_taker()

    @property
    def num_rows(self) -> int:
        return len(self._columns[VALUE])

    @property
    def size(self) -> int:
        """About the bytes of keys, values and headers."""
        size: int = self._size if self.taker is None else self._size + self.taker.size
        return size

    @property
    def is_full(self) -> bool:
        return self.num_rows >= BLOCK_ROWS or self.size >= BLOCK_BYTES

    def extend(self, rows: Sequence[Taken]) -> int:
        """Add `rows`. Return about their number of bytes. Raises SchemaError for a row without a required column, and
        for a value of a wrong type.
        """
        self._size, self.taker = self.size, None
        size = sum(self._extend_run(*run) for run in self._layouts.runs_of(rows, self._first + self.num_rows))
        self._size += size
        self._make_taker()
        return size

    def _make_taker(self) -> None:
        layout = self._layouts.last
        if layout is None or RowTaker is None:
            return
        plan = tuple(self._step(name, position) for name, position in layout.positions.items())
        room = BLOCK_ROWS - self.num_rows, BLOCK_BYTES - self._size
        self.taker = RowTaker(Row, layout.names, plan, *room, _HEADER_BYTES)

    def _step(self, name: str, position: int) -> Step:
        column = self._column(name, self.num_rows)
        if name == HEADERS:
            return headers_step(position, column, self._header_keys, self._header_values)
        if name in (VALUE, KEY):
            return bytes_step(position, column)
        return typed_step(position, column, tuple(_ALLOWED[name]))

    def _extend_run(self, layout: RowLayout, rows: Sequence[Sequence[Any]]) -> int:
        """Add rows of one layout."""
        before = self.num_rows
        fields = self._fields(layout, rows)
        size = 0
        for name, position in layout.positions.items():
            values = fields[position]
            _check_types(name, values)
            column = self._column(name, before)
            if name == HEADERS:
                size += self._extend_headers(column, values)
                continue
            column += values
            if name in (VALUE, KEY):
                size += sum(map(len, filter(None, values)))
        return size

    def _column(self, name: str, num_rows: int) -> Column:
        """Return the column `name`, filled up to `num_rows` rows if the last rows had no such column."""
        column = self._columns.setdefault(name, [])
        if len(column) < num_rows:
            column += [0 if name == HEADERS else None] * (num_rows - len(column))
        return column

    def _extend_headers(self, counts: Column, values: Sequence[Sequence[tuple[Any, Any]] | None]) -> int:
        """Add the headers of each row. Return about their number of bytes."""
        pairs = [pair for headers in values if headers for pair in headers]
        counts += [len(headers) if headers else 0 for headers in values]
        self._header_keys += [key for key, _ in pairs]
        self._header_values += [value for _, value in pairs]
        return sum(_HEADER_BYTES + len(key or "") + len(value or b"") for key, value in pairs)

    def _fields(self, layout: RowLayout, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Return the columns of `rows`. Raises SchemaError for a row with more or fewer values than names."""
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
        """Yield the rows of each topic, in their order. Raises SchemaError on a null topic, SerializationError on a
        value that cannot be written.
        """
        columns = {name: self._column(name, self.num_rows) for name in self._columns}
        numbers = range(self._first, self._first + self.num_rows)
        option = self._layouts.topic_option
        topics = columns.pop(TOPIC) if option is None else [option]
        if None in topics:
            raise SchemaError(f"{NULL_TOPIC} Row {numbers[topics.index(None)]} has none.")
        records = self._record_columns(columns, numbers)
        if topics.count(topics[0]) == len(topics):
            yield topics[0], records
        else:
            yield from by_topic(records, binary_array(topics, TOPIC, numbers), NULL_TOPIC)

    def loose_columns(self) -> tuple[Columns, Sequence[Unwritable]]:
        """Return the block as columns for `TaskDelivery.sifted`, and the rows that are known to be unwritable."""
        cells = {name: self._column(name, self.num_rows) for name in self._columns}
        header_cells = self._header_keys, self._header_values
        return loose_columns(cells, header_cells, _record_ms, allows_early=self._allows_early)

    def _record_columns(self, columns: dict[str, Column], numbers: Sequence[int]) -> RecordColumns:
        keys, counts, places = columns.get(KEY), columns.get(HEADERS), columns.get(PARTITION)
        timestamps = columns.get(TIMESTAMP)
        headers = times = None
        if counts is not None:
            headers = headers_from_cells(counts, self._header_keys, self._header_values, numbers)
        if timestamps is not None:
            found = _epoch_ms(timestamps, numbers, allows_early=self._allows_early)
            times = int_array(found, pa.int64(), "timestamp_ms", numbers)
        return RecordColumns(
            value=binary_array(columns[VALUE], VALUE, numbers),
            key=None if keys is None else binary_array(keys, KEY, numbers),
            headers=headers,
            timestamp_ms=times,
            partition=None if places is None else int_array(places, pa.int32(), PARTITION, numbers),
        )


def _check_types(name: str, values: Sequence[Any]) -> None:
    wrong = set(map(type, values)) - _ALLOWED[name]
    if wrong:
        raise wrong_type(name, min(_SPARK_TYPES.get(found, found.__name__) for found in wrong))


def _epoch_ms(timestamps: Column, numbers: Sequence[int], *, allows_early: bool) -> list[int | None]:
    """Milliseconds since 1970 of datetimes or of milliseconds. Naive datetimes are local time, as PySpark makes them of
    timestamps; `fold` counts. A null stays null, and -1 becomes null: the producer then sets the time.

    Raises SchemaError before 1970, after 9999, and unless `allows_early` for a number before 1980, which is probably in
    another unit.
    """
    found = [_record_ms(t) if isinstance(t, datetime.datetime) else t for t in timestamps]
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


def _record_ms(moment: datetime.datetime) -> int:
    """Return milliseconds since 1970, rounded down, but -2 for a moment between -1 and 0: -1 stands for no time."""
    ms = datetime_ms(moment)
    return NO_TIMESTAMP - 1 if ms == NO_TIMESTAMP and moment.microsecond % 1000 else ms


def is_ambiguous(moment: datetime.datetime) -> bool:
    """Whether a local time comes twice, because clocks went back."""
    return datetime_ms(moment.replace(fold=0)) != datetime_ms(moment.replace(fold=1))


CHUNK_ROWS: Final = 64
"""Rows taken from Spark at a time; fewer if they are large, so that a chunk has little more than CHUNK_BYTES."""
CHUNK_BYTES: Final = 256 << 10


class PartitionWriter:
    """Writes the rows of one task: `write` or many `add`, then `finish`; or `abandon` if something failed."""

    def __init__(self, delivery: TaskDelivery) -> None:
        config = delivery.config
        self.config = config
        self._delivery = delivery
        self._counts = delivery.counts
        self._layouts = RowLayouts(config.topic)
        self._block = self._new_block(0)
        self._pending: list[Taken] = []
        self._chunk_rows = 1
        self._collected = 0
        """The number of rows in earlier blocks."""
        self._expected: dict[int, Unwritable] = {}
        """Rows that cannot be written, by their number in the task."""

    def write(self, rows: Iterable[Any]) -> None:
        """Send all `rows`. Raises the iterator's errors, and KafkaError as soon as a row is known to have failed."""
        iterator = iter(rows)
        while self._write_chunk(iterator):
            pass

    def add(self, row: Any) -> None:
        """Send one row. Raises KafkaError as soon as a row is known to have failed."""
        self._counts.check()
        taker = self._block.taker
        if taker is not None and not self._pending:
            try:
                state = taker.add(row)
            except Exception as error:
                self._counts.fail(error)
                raise
            if state != NOT_TAKEN:
                if state == IS_FULL:
                    self._send_full()
                return
        self._pending += self._taken((row,))
        if len(self._pending) >= self._chunk_rows:
            chunk, self._pending = self._pending, []
            self._collect(chunk)

    def expect(self, faults: Iterable[Unwritable], first: int) -> None:
        """Note rows that will come and cannot be written: they become dead letters. `faults`: counted from row `first`
        of the task.
        """
        for fault in faults:
            known = self._expected.get(first + fault.row, fault)
            self._expected[first + fault.row] = known.joined(fault)

    def finish(self) -> None:
        """Wait until every row is acknowledged and give the producer back. Raises KafkaError if one is not."""
        try:
            self._counts.check()
            if self._pending:
                self._collect(self._pending)
            self._send_block()
            self._delivery.finish()
        finally:
            self.abandon()

    def log_letters(self) -> None:
        """Log a warning if there are dead letters. For interfaces without a driver to which the task could report."""
        letters = self._delivery.letters
        if letters is not None:
            letters.log()

    def abandon(self) -> None:
        """Give the producer back without waiting. Rows that were sent may still be delivered."""
        self._pending = []
        self._block = self._new_block(0)
        self._delivery.abandon()

    def _write_chunk(self, iterator: Iterator[Any]) -> bool:
        """Take some rows. Return whether there may be more."""
        self._counts.check()
        odd: tuple[Any, ...] = ()
        if self._block.taker is not None:
            rest = self._take(self._block.taker, iterator)
            if not rest:
                return rest is not None
            odd = rest
        chunk = self._taken(chain(odd, islice(iterator, self._chunk_rows - len(odd))))
        if chunk:
            self._collect(chunk)
        return bool(chunk)

    def _take(self, taker: Any, iterator: Iterator[Any]) -> tuple[Any, ...] | None:
        """Take rows as `RowTaker.take` does."""
        rows, size = taker.rows, taker.size
        try:
            rest: tuple[Any, ...] | None = taker.take(iterator, self._chunk_rows, CHUNK_BYTES)
        except Exception as error:
            self._counts.fail(error)
            raise
        if taker.rows > rows:
            self._adapt(taker.rows - rows, taker.size - size)
            self._send_full()
        return rest

    def _taken(self, rows: Iterable[Any]) -> list[Taken]:
        try:
            first = self._collected + self._block.num_rows + len(self._pending)
            return taken(rows, first, takes_unnamed=self._delivery.letters is not None)
        except Exception as error:
            self._counts.fail(error)
            raise

    def _collect(self, chunk: Sequence[Taken]) -> None:
        try:
            size = self._block.extend(chunk)
        except Exception as error:
            self._counts.fail(error)  # rows are lost: a caller that goes on must not succeed
            raise
        self._adapt(len(chunk), size)
        self._send_full()

    def _adapt(self, rows: int, size: int) -> None:
        """Take more or fewer rows at a time: the last `rows` rows had `size` bytes."""
        if size > CHUNK_BYTES:
            self._chunk_rows = max(1, rows // 2)
        elif self._chunk_rows < CHUNK_ROWS and size < CHUNK_BYTES // 4:
            self._chunk_rows *= 2

    def _send_full(self) -> None:
        if not self._block.is_full:
            return
        try:
            self._send_block()
        except Exception as error:
            self._counts.fail(error)
            raise

    def _send_block(self) -> None:
        block = self._block
        self._collected += block.num_rows
        self._block = self._new_block(self._collected)
        if not block.num_rows:
            return
        if self._delivery.letters is None:
            self._delivery.send_each(block.by_topic())
        else:
            columns, faults = block.loose_columns()
            known = self._expected_of(block.num_rows)
            for fault in faults:
                known[fault.row] = known.get(fault.row, fault).joined(fault)
            columns = self._delivery.sifted(columns, [*known.values()])
            self._delivery.send_each(columns_by_topic(self.config, columns))

    def _expected_of(self, rows: int) -> dict[int, Unwritable]:
        """Take out the faults of the last `rows` rows, by their places in the block."""
        first = self._collected - rows
        own = [number for number in self._expected if number < self._collected]
        return {number - first: self._expected.pop(number)._replace(row=number - first) for number in own}

    def _new_block(self, first: int) -> RowBlock:
        return RowBlock(self._layouts, first, allows_early=self.config.allows_early_timestamps)
