"""Rows whose columns have formats: `value` and `key` become bytes, and the rows go on as any others.

Rows are collected in chunks. The cells of a chunk become an Arrow array of the column's type, and the encoder of the
column makes bytes of it, as in a task that gets Arrow batches. A chunk has about `CHUNK_BYTES` of bytes, by the size of
the last one's. Used by the task's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, MapType, Row, StructType, UserDefinedType

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record.headers import field_names, is_list_of_pairs
from spark_kafka_sink.record.sifting import Unwritable
from spark_kafka_sink.record.values import array_of, array_of_fitting
from spark_kafka_sink.serialization.record_formats import RecordFormats, ResolvedFormats
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.rows import PartitionWriter, row_headers, taken
from spark_kafka_sink.sink.schema import HEADERS, VALUE

CHUNK_BYTES: Final = 1 << 20
CHUNK_ROWS: Final = 4_096
"""The most rows of a chunk."""
_FIRST_ROWS: Final = 32
_GROWTH: Final = 4
"""How many times as many rows a chunk may have as the last one."""
_FIXED: Final = frozenset({bool, int, float, str, bytes, type(None)})


def row_writer(delivery: TaskDelivery) -> PartitionWriter | FormattedWriter:
    """Return the writer of a task's rows, by the formats of its configuration."""
    formats = delivery.config.column_formats
    return PartitionWriter(delivery) if formats is None else FormattedWriter(delivery, formats)


class FormattedWriter:
    """Writes the rows of one task, as a `PartitionWriter` does: `write` or many `add`, then `finish`; or `abandon`."""

    def __init__(self, delivery: TaskDelivery, formats: ResolvedFormats) -> None:
        self.config = delivery.config
        self._counts = delivery.counts
        self._has_letters = delivery.letters is not None
        self._writer = PartitionWriter(delivery)
        self._columns = tuple(formats.columns())
        self._fields = tuple(each.column_format.field for each in self._columns)
        self._formats = RecordFormats(formats)
        ids = [each.column_format.schema_id_header for each in self._columns]
        self._schema_ids = frozenset({*ids, *(each.encode() for each in ids)})
        self._stored_forms = stored_forms(self.config)
        self._pending: list[tuple[tuple[Any, ...], list[Any]]] = []
        self._chunk_rows = _FIRST_ROWS
        self._taken = 0
        """The number of rows before the pending ones."""

    def write(self, rows: Iterable[Any]) -> None:
        """Send all `rows`. Raises the iterator's errors, KafkaError as soon as a row is known to have failed,
        SchemaError for a value of a wrong type, and without dead letters SerializationError for one that does not fit.
        """
        iterator = iter(rows)
        while self._take(islice(iterator, self._chunk_rows)):
            self._send_pending()

    def add(self, row: Any) -> None:
        """Send one row. Raises as `write`."""
        self._counts.check()
        self._take((row,))
        if len(self._pending) >= self._chunk_rows:
            self._send_pending()

    def finish(self) -> None:
        """Wait until every row is acknowledged and give the producer back. Raises KafkaError if one is not."""
        try:
            self._counts.check()
            self._send_pending()
            self._writer.finish()
        finally:
            self.abandon()

    def log_letters(self) -> None:
        """Log a warning if there are dead letters."""
        self._writer.log_letters()

    def abandon(self) -> None:
        """Give the producer back without waiting. Rows that were sent may still be delivered."""
        self._pending = []
        self._writer.abandon()

    def _take(self, rows: Iterable[Any]) -> bool:
        """Take rows as they are now. Return whether there were any."""
        before = len(self._pending)
        try:
            for row in rows:
                number = self._taken + len(self._pending)
                names, cells = taken((row,), number, takes_unnamed=self._has_letters)[0]
                self._check_names(names, number)
                self._pending.append((names, self._fixed_cells(names, cells, number)))
        except Exception as error:
            self._counts.fail(error)
            raise
        return len(self._pending) > before

    def _check_names(self, names: tuple[Any, ...], number: int) -> None:
        """Raise SchemaError for a row without a column that has a format, as by columns: not a record without a key.
        The writer refuses a row without a value.
        """
        for field in self._fields:
            if field != VALUE and field not in names:
                raise SchemaError(
                    f"{field}.format is set, and there is no column {field} in row {number}: add one, or leave the"
                    f" option out. The columns of the row are: {', '.join(map(str, names)) or '(none)'}."
                )

    def _fixed_cells(self, names: tuple[Any, ...], cells: Sequence[Any], number: int) -> list[Any]:
        own = list(cells)
        for field in self._fields:
            at = _place(names, field)
            if at is not None and at < len(own):
                form = self._stored_forms.get(field)
                own[at] = _fixed(own[at] if form is None else form(own[at], number))
        at = _place(names, HEADERS)
        if at is not None and at < len(own) and is_list_of_pairs(own[at]):
            own[at] = self._without_schema_ids(own[at], number)
        return own

    def _without_schema_ids(self, headers: Any, number: int) -> list[tuple[Any, Any]]:
        """Leave out the headers that tell how the bytes of the row's source were written, as `RecordFormats` does."""
        pairs = row_headers(headers, number, takes_unnamed=self._has_letters)
        return [pair for pair in pairs if pair[0] not in self._schema_ids]

    def _send_pending(self) -> None:
        rows, self._pending = self._pending, []
        if not rows:
            return
        try:
            self._writer.write(self._as_bytes(rows))
        except Exception as error:
            self._counts.fail(error)  # rows are lost: a caller that goes on must not succeed
            raise
        self._taken += len(rows)

    def _as_bytes(self, rows: Sequence[tuple[tuple[Any, ...], list[Any]]]) -> Iterator[Row]:
        """Yield the rows with bytes in the columns that have formats. The writer refuses a row that lacks one. With
        dead letters a row that does not fit has null in that column, and the writer knows of it beforehand.
        """
        columns = self._columns_of(rows)
        size = 0
        for part in self._formats.parts(columns):
            if self._has_letters:
                self._writer.expect(self._formats.unwritable(part), self._taken + part.first_row)
            else:
                part.check(self._taken)
            size += sum(part.columns[field].nbytes for field in self._fields)
            encoded = {name: column.to_pylist() for name, column in part.columns.items()}
            for at in range(len(encoded[self._fields[0]])):
                row = rows[part.first_row + at]
                yield _with_bytes(*row, {name: column[at] for name, column in encoded.items()})
        most = len(rows) * CHUNK_BYTES // max(size, 1)
        self._chunk_rows = max(1, min(most, len(rows) * _GROWTH, CHUNK_ROWS))

    def _columns_of(self, rows: Sequence[tuple[tuple[Any, ...], list[Any]]]) -> dict[str, pa.Array]:
        """Return the columns that have formats. With dead letters the writer learns which cells their type cannot
        hold.
        """
        numbers = range(self._taken, self._taken + len(rows))
        columns = {}
        for each in self._columns:
            field = each.column_format.field
            cells = [_cell(*row, field) for row in rows]
            if self._has_letters:
                columns[field], reasons = array_of_fitting(cells, each.data_type, field, numbers)
                lost = frozenset({field})
                faults = [Unwritable(place, SerializationError, why, lost=lost) for place, why in reasons.items()]
                self._writer.expect(faults, self._taken)
            else:
                columns[field] = array_of(cells, each.data_type, field, numbers)
        return columns


def _place(names: tuple[Any, ...], field: str) -> int | None:
    """Return the place of a column; of columns with the same name the first one counts."""
    return names.index(field) if field in names else None


def _cell(names: tuple[Any, ...], cells: Sequence[Any], field: str) -> Any:
    at = _place(names, field)
    return None if at is None or at >= len(cells) else cells[at]


def _with_bytes(names: tuple[Any, ...], cells: Sequence[Any], encoded: Mapping[str, Any]) -> Row:
    """Return the row with these bytes, and with more headers at the end of its own."""
    own_names, own = list(names), list(cells)
    for name, cell in encoded.items():
        at = _place(names, name)
        if name == HEADERS:
            more = [(header["key"], header["value"]) for header in cell]
            if at is None:
                own_names.append(HEADERS)
                own.append(more)
            elif at < len(own):
                own[at] = [*(own[at] or ()), *more]
        elif at is not None and at < len(own):
            own[at] = cell
    return _row(own, own_names)


def stored_forms(config: SinkConfig) -> Mapping[str, Callable[[Any, int], Any]]:
    """Return, for each column with user-defined types, what makes a cell what Spark stores it as (`stored_form`), from
    the cell and the number of its row. It raises SchemaError for a value that its type cannot serialize.
    """

    def checked(field: str, form: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
        def stored(cell: Any, number: int) -> Any:
            try:
                return form(cell)
            except Exception as error:
                raise SchemaError(
                    f"{field} of row {number} has a value that its user-defined type cannot serialize:"
                    f" {type(error).__name__}: {error}. Give the object that the type stores."
                ) from error

        return stored

    forms = ((field, stored_form(of)) for field, of in config.user_types)
    return {field: checked(field, form) for field, form in forms if form is not None}


def stored_form(data_type: DataType) -> Callable[[Any], Any] | None:
    """Return what makes a value what Spark stores it as, which is what a task gets by columns: the values of
    user-defined types in it are serialized. None if the type holds none. An object does not always tell its
    user-defined type: `deserialize` may return a str.
    """
    make = next((make for kind, make in _STORED.items() if isinstance(data_type, kind)), None)
    return None if make is None else make(data_type)


def _stored_object(data_type: Any) -> Callable[[Any], Any]:
    inner = stored_form(data_type.sqlType()) or _same
    return lambda value: None if value is None else inner(data_type.serialize(value))


def _stored_struct(data_type: Any) -> Callable[[Any], Any] | None:
    forms = {of.name: form for of in data_type.fields if (form := stored_form(of.dataType)) is not None}
    if not forms:
        return None

    def stored(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: forms.get(name, _same)(cell) for name, cell in value.items()}
        own = field_names(value)
        names = data_type.names if own is None else list(own)
        if not isinstance(value, tuple) or len(value) != len(names):
            return value  # it is refused later
        cells = tuple(forms.get(name, _same)(cell) for name, cell in zip(names, value, strict=True))
        return cells if own is None else _row(cells, names)

    return stored


def _stored_list(data_type: Any) -> Callable[[Any], Any] | None:
    form = stored_form(data_type.elementType)
    if form is None:
        return None
    return lambda value: [form(each) for each in value] if isinstance(value, (list, tuple)) else value


def _stored_map(data_type: Any) -> Callable[[Any], Any] | None:
    own, other = stored_form(data_type.keyType), stored_form(data_type.valueType)
    if own is None and other is None:
        return None
    of_key, of_value = own or _same, other or _same

    def stored(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {of_key(key): of_value(each) for key, each in value.items()}

    return stored


def _same(value: Any) -> Any:
    return value


_STORED: Final[Mapping[type, Callable[[Any], Callable[[Any], Any] | None]]] = {
    UserDefinedType: _stored_object,
    StructType: _stored_struct,
    ArrayType: _stored_list,
    MapType: _stored_map,
}


def _fixed(value: Any) -> Any:
    """Return a value that does not change when its owner changes a list, dict or bytearray in it. An object that tells
    its user-defined type becomes what Spark stores it as: without a schema nothing else tells it.
    """
    kind = type(value)
    if kind in _FIXED:
        return value
    if kind is bytearray:
        return bytes(value)
    if isinstance(value, Mapping):
        return {key: _fixed(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return value if _FIXED.issuperset(map(type, value)) else _fixed_tuple(value)
    if isinstance(value, list):
        return [_fixed(each) for each in value]
    user_defined = getattr(kind, "__UDT__", None)  # as PySpark finds the type of an object
    return value if user_defined is None else _fixed(user_defined.serialize(value))


def _fixed_tuple(value: tuple[Any, ...]) -> tuple[Any, ...]:
    fixed = tuple(map(_fixed, value))
    names = field_names(value)
    return fixed if names is None else _row(fixed, list(names))


def _row(cells: Sequence[Any], names: list[Any]) -> Row:
    row = Row(*cells)
    row.__fields__ = names
    return row
