"""Tables as record columns: those of pyarrow, Polars, DuckDB, pandas and others, by the Arrow PyCapsule interface.

`Table` checks the names and types of the columns before it reads a row. `Table.parts` then reads batch after batch,
and gives parts that bound the memory of a conversion. A table is read once, by one thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakSet

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record.arrow import BINARY, as_binary, checked, is_bytes_like, value_size
from spark_kafka_sink.record.columns import RecordColumns, by_topic, epoch_ms
from spark_kafka_sink.record.headers import headers_size, is_list_of_headers

PART_ROWS: Final = 65_536
PART_BYTES: Final = 16 << 20
"""A part has at most this many rows, and bytes of values, keys and headers, but at least one row."""

VALUE, KEY, HEADERS, PARTITION, TIMESTAMP, TOPIC = "value", "key", "headers", "partition", "timestamp", "topic"


class ByName(Enum):
    """The default of a parameter that names a column."""

    BY_NAME = "the column with the parameter's name, if there is one"

    def __repr__(self) -> str:
        return self.name


BY_NAME: Final = ByName.BY_NAME
ColumnName: TypeAlias = str | ByName | None
"""The name of a column. None: no column."""
ColumnNames: TypeAlias = ColumnName | Sequence[str]
"""The name of a column, or the columns that become one struct, in their order."""


class _Rule(NamedTuple):
    """The Arrow types that a column may have, and the advice for any other type."""

    fits: Callable[[pa.DataType], bool]
    types: str
    advice: str


_KINDS_OF_TEXT: Final = (pat.is_string, pat.is_large_string) + (
    (pat.is_string_view,) if hasattr(pa, "string_view") else ()
)
"""Views of text came with pyarrow 16."""


def _is_text(data_type: pa.DataType) -> bool:
    plain = data_type.value_type if pat.is_dictionary(data_type) else data_type
    return any(accepts(plain) for accepts in _KINDS_OF_TEXT)


def _is_moment(data_type: pa.DataType) -> bool:
    return bool(pat.is_int64(data_type)) or (pat.is_timestamp(data_type) and data_type.tz is not None)


_BYTES: Final = _Rule(is_bytes_like, "string or binary", "cast it, or encode it as text, such as JSON")
_RULES: Final[Mapping[str, _Rule]] = {
    VALUE: _BYTES,
    KEY: _BYTES,
    HEADERS: _Rule(is_list_of_headers, "list<struct<key: string, value: binary>>", "make it a list of such structs"),
    PARTITION: _Rule(pat.is_integer, "an integer", "cast it to int32"),
    TIMESTAMP: _Rule(
        _is_moment, "a timestamp with a time zone, or int64 milliseconds since 1970", "cast it to one of these"
    ),
    TOPIC: _Rule(_is_text, "string", "cast it, or give one topic for all rows by topic='…'"),
}
_GIVE_ZONE: Final = (
    "give it the zone that its times are in (Polars: dt.replace_time_zone, pandas: dt.tz_localize, pyarrow:"
    " compute.assume_timezone, DuckDB: AT TIME ZONE)"
)
_EARLY_ADVICE: Final = " If the date is right, give a timestamp with a time zone instead of a number."
_ADVICE_BEFORE_VIEWS: Final = (
    ""
    if hasattr(pa, "string_view")
    else f" Tables with views of text, as those of Polars, need pyarrow 16, and this is {pa.__version__}."
)
_MOST_NAMES: Final = 20
_OPAQUE: Final = frozenset({"arrow.opaque", "pandas.period"})
"""Extension types whose stored values mean nothing without their maker."""
_UHUGEINT: Final = re.compile(r"""(?<!['"\w])UHUGEINT(?!['"\w])""")
"""The type itself, and not a name in a type."""
_READ: Final[WeakSet[Any]] = WeakSet()
"""Readers whose rows a write has begun to read. A second one would find the rest of them, or none."""
_INT32: Final = range(-(2**31), 2**31)


class Table:
    """The rows of `data`, an object with `__arrow_c_stream__` or `__arrow_c_array__`, and the columns of the records.

    `topic` is for every row; None takes topics from the column. `names` has the column of each field of a record, by
    the names of `_RULES`. Other columns are not read. The fields `formatted` have a format: their columns are not
    checked here, and may be several that become a struct. Raises SchemaError for data that is no table, for a column
    that is missing, ambiguous or of a wrong type, and without a topic or a column of values.
    """

    def __init__(
        self, data: object, topic: str | None, names: Mapping[str, ColumnNames], formatted: Collection[str] = ()
    ) -> None:
        if topic is not None and not (isinstance(topic, str) and topic):
            raise SchemaError(f"topic={topic!r:.100}: give the name of a topic, or topic_column='…'.")
        self._topic = topic
        self._reader = _reader_of(data)
        if self._reader in _READ:
            raise SchemaError(
                "The data is a RecordBatchReader from which an earlier write has read rows, and it does not give them"
                " again. Make another one of the same data, or give a table."
            )
        self._structs = {field: names for field, names in names.items() if isinstance(names, (list, tuple))}
        for field in self._structs:
            _check_struct(self._reader.schema, field, self._structs[field], formatted)
        plain = {field: name for field, name in names.items() if field not in self._structs}
        self._fields = _chosen(self._reader.schema, topic, plain, formatted, has_value=VALUE in self._structs)
        self._formatted = formatted
        used = {name for _, name in self._fields.values()}.union(*self._structs.values())
        _refuse_unwritable(data, self._reader.schema, used)

    def type_of(self, field: str) -> pa.DataType:
        """Return the type of a field's column. Raises SchemaError if it has none."""
        schema = self._reader.schema
        if field in self._structs:
            return pa.struct([schema.field(schema.get_field_index(name)) for name in self._structs[field]])
        if field not in self._fields:
            raise SchemaError(f"{field}.format is set, and no column is the {field}. {_columns_of(schema)}")
        return schema.field(self._fields[field][0]).type

    def parts(self) -> Iterator[TablePart]:
        """Yield the rows in their order. Errors of the stream are raised as they are. Raises SchemaError for a batch
        with other columns than the stream's.
        """
        row = 0
        schema = self._reader.schema
        _READ.add(self._reader)
        with self._reader as batches:
            for batch in batches:
                _check_same(schema, batch.schema, row)
                columns = {
                    field: batch.column(index) if field in self._formatted else _plain(batch.column(index))
                    for field, (index, _) in self._fields.items()
                }
                columns |= {field: _struct_of(batch, names) for field, names in self._structs.items()}
                names = {field: name for field, (_, name) in self._fields.items()}
                rows = batch.num_rows
                del batch
                for first in range(0, rows, PART_ROWS):
                    yield from TablePart(row, columns, names, self._topic).slice(first, PART_ROWS).within(PART_BYTES)
                row += rows


class TablePart:
    """Some rows of a table. `first_row` counts from 0. `columns` and `names` are those of each field of a record."""

    def __init__(
        self, first_row: int, columns: Mapping[str, pa.Array], names: Mapping[str, str], topic: str | None
    ) -> None:
        self.first_row = first_row
        self._columns = columns
        self._names = names
        self._topic = topic

    @property
    def num_rows(self) -> int:
        return len(self._columns[VALUE])

    @property
    def columns(self) -> Mapping[str, pa.Array]:
        return self._columns

    def with_columns(self, columns: Mapping[str, pa.Array], offset: int) -> TablePart:
        """Return the rows from `offset` on with other columns: those that have a format as bytes."""
        return TablePart(self.first_row + offset, columns, self._names, self._topic)

    def slice(self, offset: int, length: int) -> TablePart:
        """Return at most `length` rows from `offset` on. No copy."""
        columns = {field: column.slice(offset, length) for field, column in self._columns.items()}
        return TablePart(self.first_row + offset, columns, self._names, self._topic)

    def within(self, most_bytes: int) -> Iterator[TablePart]:
        """Yield the part, or its halves again and again, each within `most_bytes` or one row."""
        rows = self.num_rows
        if rows > 1 and self._size() > most_bytes:
            half = rows // 2
            yield from self.slice(0, half).within(most_bytes)
            yield from self.slice(half, rows - half).within(most_bytes)
        else:
            yield self

    def by_topic(self) -> Iterator[tuple[str, RecordColumns]]:
        """Yield each topic and its records. Raises SchemaError or SerializationError for contents that no record can
        have.
        """
        get = self._columns.get
        times, partitions = get(TIMESTAMP), get(PARTITION)
        if times is not None:
            times = epoch_ms(times, _EARLY_ADVICE, f"A timestamp of {self._of(TIMESTAMP)}")
        columns = RecordColumns(
            value=self._columns[VALUE],
            key=get(KEY),
            headers=get(HEADERS),
            timestamp_ms=times,
            partition=None if partitions is None else self._as_int32(partitions),
        )
        if self._topic is not None:
            yield self._topic, columns
            return
        null_text = f"A topic of {self._of(TOPIC)} is null: filter such rows, or give one topic for all by topic='…'."
        name = self._names[TOPIC]
        yield from by_topic(columns, checked(as_binary(self._columns[TOPIC], name), name), null_text)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Add the rows of this part to an error that counts them from 0, unless the part is the table's first."""
        try:
            yield
        except (SchemaError, SerializationError) as error:
            if self.first_row == 0:
                raise
            where = f"In the rows of the data from {self.first_row} on, which count from 0 here"
            raise error.reworded(f"{where}: {error}") from error

    def _size(self) -> int:
        keys_and_values = (self._columns[field] for field in (VALUE, KEY) if field in self._columns)
        headers = self._columns.get(HEADERS)
        return sum(map(_size_of, keys_and_values)) + (0 if headers is None else headers_size(headers))

    def _as_int32(self, partitions: pa.Array) -> pa.Array:
        bounds = pc.min_max(partitions)
        for number in (bounds["min"].as_py(), bounds["max"].as_py()):
            if number is not None and number not in _INT32:
                raise SerializationError(
                    f"A partition of {self._of(PARTITION)} is {number}, and partitions have 32 bits: correct it, or"
                    " make it null to have one chosen."
                )
        return partitions.cast(pa.int32())

    def _of(self, field: str) -> str:
        return f"the column '{self._names[field]}'"


def _size_of(column: pa.Array) -> int:
    """Return about the bytes of the values of a column. Not `nbytes`: that counts all entries of a dictionary, and all
    long texts of views, in each slice.
    """
    if is_bytes_like(column.type):
        return value_size(column)
    if isinstance(column.type, pa.BaseExtensionType):
        return _size_of(column.storage)
    if pat.is_dictionary(column.type):
        return int(column.indices.nbytes)
    if pat.is_struct(column.type):
        return sum(_size_of(column.field(number)) for number in range(column.type.num_fields))
    elements = _elements(column)
    return int(column.nbytes) if elements is None else 4 * len(column) + _size_of(elements)


def _elements(column: pa.Array) -> pa.Array | None:
    """Return the elements of all lists of a column, or the entries of all maps. None for another type."""
    if pat.is_fixed_size_list(column.type):
        size = column.type.list_size
        return column.values.slice(column.offset * size, len(column) * size)
    if not any(is_kind(column.type) for is_kind in (pat.is_list, pat.is_large_list, pat.is_map)):
        return None
    if not len(column):
        return column.values.slice(0, 0)
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return column.values.slice(first, last - first)


def _struct_of(batch: pa.RecordBatch, names: Sequence[str]) -> pa.Array:
    """Return these columns as one struct, which is never null. No copy."""
    schema = batch.schema
    fields = [schema.field(schema.get_field_index(name)) for name in names]
    children = [batch.column(schema.get_field_index(name)) for name in names]
    return pa.Array.from_buffers(pa.struct(fields), batch.num_rows, [None], children=children)


def _check_struct(schema: pa.Schema, field: str, names: Sequence[object], formatted: Collection[str]) -> None:
    if field not in formatted:
        raise SchemaError(
            f"{field}={names!r:.100}: several columns become one {field} only in a format, such as"
            f" serialization={{'{field}.format': 'avro'}}."
            if field in (VALUE, KEY)
            else f"{field}={names!r:.100}: give the name of one column."
        )
    if not names:
        raise SchemaError(f"{field}=[]: give at least one column. {_columns_of(schema)}")
    for name in names:
        if not isinstance(name, str):
            raise SchemaError(f"{field}={names!r:.100}: give names of columns.")
        _index_of(schema, field, field, name)
    if len(set(names)) < len(names):
        raise SchemaError(f"{field}={names!r:.100} has a column twice.")


def _reader_of(data: object) -> Any:
    """Return a RecordBatchReader of the data, from which nothing is read yet."""
    if isinstance(data, pa.RecordBatchReader):
        return data  # through its own stream in C, an error or Ctrl-C of a Python generator would lose its class
    if isinstance(data, pa.Table):
        return data.to_reader()  # through C, a buffer ends where the last offset says: the kernel could not check it
    if isinstance(data, pa.RecordBatch):
        return pa.RecordBatchReader.from_batches(data.schema, [data])
    try:
        if hasattr(data, "__arrow_c_stream__"):
            return _imported_stream(data)
        if hasattr(data, "__arrow_c_array__"):
            batch = _imported_batch(data)
            return pa.RecordBatchReader.from_batches(batch.schema, [batch])
    except (pa.ArrowException, TypeError) as error:  # TypeError: sparse columns of pandas
        raise SchemaError(
            f"The data is a {_type_name(data)}, and cannot be read as an Arrow table: {error}. Give a table, in which"
            f" each column has a name and one type.{_ADVICE_BEFORE_VIEWS}"
        ) from error
    advice = (
        "call its method collect() first" if hasattr(data, "collect") else "make one, by pyarrow.table(…) for example"
    )
    raise SchemaError(
        f"The data is a {_type_name(data)}; give a table that has the Arrow PyCapsule interface (__arrow_c_stream__),"
        f" as those of pyarrow, Polars, DuckDB and pandas 2.2 have: {advice}."
    )


def _check_same(schema: pa.Schema, given: pa.Schema, row: int) -> None:
    """Refuse a batch of a Python generator whose columns are not the reader's. pyarrow does not compare them."""
    if given.names == schema.names and given.types == schema.types:
        return
    raise SchemaError(
        f"The batch that begins with row {row} has the columns {_typed(given)}, and its RecordBatchReader promises"
        f" {_typed(schema)}: give every batch these columns, in this order."
    )


def _typed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in [*schema][:_MOST_NAMES]) or "none"


def _refuse_unwritable(data: Any, schema: pa.Schema, names: Collection[str]) -> None:
    """Refuse columns whose Arrow data are not the values.

    Of Python objects, such as UUIDs, Polars gives the addresses in memory. DuckDB wraps an UHUGEINT from 2^127 on to a
    negative number. An opaque type, such as DuckDB's BIGNUM, is stored in a way that only its maker reads.
    """
    for name, data_type in _types_of(data):
        if name not in names:
            continue
        if data_type == "Object":
            raise SchemaError(
                f"The column '{name}' has Python objects (the Polars type Object), which are no bytes: make it text, by"
                " map_elements(str, return_dtype=polars.String) for example."
            )
        if _UHUGEINT.search(data_type):
            raise SchemaError(
                f"The column '{name}' has the DuckDB type {data_type:.100}, whose large numbers Arrow cannot hold: cast"
                " it to VARCHAR, or to a smaller type of numbers."
            )
    for field in schema:
        unknown = next((each for each in _extensions(field.type) if each.extension_name in _OPAQUE), None)
        if field.name in names and unknown is not None:
            raise SchemaError(
                f"The column '{field.name}' has the Arrow type {unknown}, whose bytes only its maker can read: cast it"
                " to text, or to another usual type."
            )


def _types_of(data: Any) -> Iterable[tuple[str, str]]:
    """Return the columns of a DataFrame of Polars, or of a relation of DuckDB, with the names of their types."""
    library = type(data).__module__.lstrip("_").partition(".")[0]
    if library == "polars":
        return [(name, str(data_type)) for name, data_type in getattr(data, "schema", {}).items()]
    if library == "duckdb" and hasattr(data, "columns"):
        return [(name, str(data_type)) for name, data_type in zip(data.columns, data.types, strict=True)]
    return ()


def _extensions(data_type: pa.DataType) -> Iterator[pa.DataType]:
    """Yield the extension types in a type."""
    if isinstance(data_type, pa.BaseExtensionType):
        yield data_type
        data_type = data_type.storage_type
    parts: Sequence[pa.DataType] = ()
    if pat.is_struct(data_type):
        parts = [data_type.field(number).type for number in range(data_type.num_fields)]
    elif pat.is_map(data_type):
        parts = (data_type.key_type, data_type.item_type)
    elif hasattr(data_type, "value_type"):  # lists and dictionaries
        parts = (data_type.value_type,)
    for part in parts:
        yield from _extensions(part)


def _imported_stream(data: Any) -> Any:
    if hasattr(pa.RecordBatchReader, "from_stream"):
        return pa.RecordBatchReader.from_stream(data)
    return pa.RecordBatchReader._import_from_c_capsule(data.__arrow_c_stream__())  # pyarrow 14 has only this


def _imported_batch(data: Any) -> pa.RecordBatch:
    if hasattr(pa.RecordBatchReader, "from_stream"):
        return pa.record_batch(data)
    return pa.RecordBatch._import_from_c_capsule(*data.__arrow_c_array__())


def _type_name(data: object) -> str:
    module, name = type(data).__module__, type(data).__qualname__
    return name if module == "builtins" else f"{module.partition('.')[0]} {name}"


def _chosen(
    schema: pa.Schema,
    topic: str | None,
    names: Mapping[str, ColumnNames],
    formatted: Collection[str],
    *,
    has_value: bool,
) -> dict[str, tuple[int, str]]:
    """Return the index and the name of the column of each field of a record that has one, of a fitting type."""
    chosen: dict[str, tuple[int, str]] = {}
    for field, name in names.items():
        parameter = "topic_column" if field == TOPIC else field
        if field == TOPIC and topic is not None:
            if name is not BY_NAME and name is not None:
                raise SchemaError(f"topic={topic!r} and topic_column={name!r} are two sources of topics: give one.")
            continue
        index = _index_of(schema, field, parameter, name)
        if index is not None:
            column = schema.field(index)
            if field in formatted:
                chosen[field] = index, column.name
                continue
            _check_type(column.name, _plain_type(column.type), field)
            if not pat.is_null(column.type) or field in (VALUE, TOPIC):
                chosen[field] = index, column.name
    if VALUE not in chosen and not has_value:
        advice = "name it by value='…'" + (", or several by value=['…', '…']" if VALUE in formatted else "")
        raise SchemaError(f"No column is the value of the records: {advice}. {_columns_of(schema)}")
    if topic is None and TOPIC not in chosen:
        raise SchemaError(
            "The records have no topic: give one for all rows by topic='…', or name a column by topic_column='…'."
            f" {_columns_of(schema)}"
        )
    return chosen


def _index_of(schema: pa.Schema, field: str, parameter: str, name: ColumnNames) -> int | None:
    if name is None:
        return None
    if not isinstance(name, (str, ByName)):
        raise SchemaError(f"{parameter}={name!r:.100}: give the name of a column, or None for no column.")
    wanted = field if isinstance(name, ByName) else name
    found = schema.get_all_field_indices(wanted)
    if len(found) > 1:
        raise SchemaError(f"The data has {len(found)} columns named '{wanted}' ({field}): rename all but one.")
    if found:
        return int(found[0])
    if isinstance(name, ByName):
        return None
    raise SchemaError(f"{parameter}={name!r}: the data has no such column. {_columns_of(schema)}")


def _columns_of(schema: pa.Schema) -> str:
    names = [str(name) for name in schema.names]
    if not names:
        return "The data has no columns."
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"The data has the columns {', '.join(names[:_MOST_NAMES])}{more}."


def _check_type(name: str, data_type: pa.DataType, field: str) -> None:
    rule = _RULES[field]
    if pat.is_null(data_type) or rule.fits(data_type):
        return
    advice = _GIVE_ZONE if field == TIMESTAMP and pat.is_timestamp(data_type) else rule.advice
    whose = "" if name == field else f" ({field})"
    without = "" if field in (VALUE, TOPIC) else f", or leave the column out by {field}=None"
    raise SchemaError(
        f"The column '{name}'{whose} has the Arrow type {data_type}; it must be {rule.types}: {advice}{without}."
    )


def _plain_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type of the stored texts if the column has Arrow's type for JSON."""
    return data_type.storage_type if _is_json(data_type) else data_type


def _is_json(data_type: pa.DataType) -> bool:
    return isinstance(data_type, pa.BaseExtensionType) and data_type.extension_name == "arrow.json"


def _plain(column: pa.Array) -> pa.Array:
    """Return a column that can be sliced at no cost: without an extension type, and with a dictionary of `binary`."""
    if _is_json(column.type):
        column = column.storage
    if pat.is_null(column.type):
        return pa.nulls(len(column), BINARY)
    if pat.is_dictionary(column.type) and column.type.value_type != BINARY:
        dictionary = checked(as_binary(column.dictionary, "dictionary"), "dictionary")
        column = pa.DictionaryArray.from_arrays(column.indices, dictionary, safe=False)  # `as_binary` checks indices
    return column
