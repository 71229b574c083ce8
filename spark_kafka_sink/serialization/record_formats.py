"""Applies the formats of `value` and `key` to Arrow columns, in a task or in `KafkaProducer.write`.

The encoders are made once for each type of column, and kept. Records stay as they are in every other column; if a
schema's id goes into a header, the column `headers` gets one more for each record whose column is not null.

Rows that do not fit come out in `FormattedRecords.bad_rows`, and nowhere else: they are null in the columns. The caller
must not send them. One thread uses a `RecordFormats`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import pyarrow as pa

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record.headers import with_header, without_headers
from spark_kafka_sink.record.sifting import Unwritable
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import JSON, BadRow, ColumnFormat
from spark_kafka_sink.serialization.plan import ZONE_IS_MISSING

MOST_BYTES: Final = 16 << 20
"""The most bytes of a column in one part, unless one row alone has more."""
HEADERS: Final = "headers"
_MOST_NAMED: Final = 3
"""The most bad rows that an error names."""
_NEAR: Final = 50
"""Rows between two that are encoded with them: these cost less than another call."""


@dataclass(frozen=True, slots=True)
class ResolvedFormat:
    """One column's format, and the Arrow type of the column that it was made for."""

    column_format: ColumnFormat
    data_type: pa.DataType


@dataclass(frozen=True, slots=True)
class ResolvedFormats:
    """The formats that a task needs to know, a plain value. It has no settings of the registry."""

    value: ResolvedFormat | None = None
    key: ResolvedFormat | None = None

    def columns(self) -> Iterator[ResolvedFormat]:
        """Yield the columns that have a format."""
        return (each for each in (self.value, self.key) if each is not None)


class FormattedRecords(NamedTuple):
    """Some records, with bytes in `value` and `key`."""

    columns: Mapping[str, pa.Array]
    first_row: int
    """The number of the first record in the columns that were given."""
    bad_rows: tuple[BadRow, ...]
    """Rows that do not fit, in their order, counted in the columns that were given."""
    source: Mapping[str, pa.Array]
    """The same records as they were given."""

    def check(self, first_row: int = 0) -> None:
        """Raise SerializationError if there are rows that do not fit. `first_row`: the number of the first row of the
        columns that were given.
        """
        if not self.bad_rows:
            return
        named = [f"{bad.path} of row {first_row + bad.row}: {bad.reason}" for bad in self.bad_rows[:_MOST_NAMED]]
        more = f" And {len(self.bad_rows) - _MOST_NAMED} more." if len(self.bad_rows) > _MOST_NAMED else ""
        raise SerializationError(
            f"Rows do not fit the schema of their format. {'; '.join(named)}.{more} Correct or filter such rows, or"
            " give the column a schema that they fit."
        )


class RecordFormats:
    """The encoders of one task or write."""

    def __init__(self, formats: ResolvedFormats, most_bytes: int = MOST_BYTES) -> None:
        self._formats = tuple(formats.columns())
        self._most_bytes = most_bytes
        self._encoders: dict[tuple[str, pa.DataType], ColumnEncoder] = {}
        self._text_encoders: dict[tuple[str, pa.DataType], ColumnEncoder | None] = {}

    def parts(self, columns: Mapping[str, pa.Array]) -> Iterator[FormattedRecords]:
        """Yield the records of `columns`, which have one length, in their order, in parts of at most `most_bytes` a
        column or one record. Raises SchemaError for a column whose type does not fit, SerializationError for a record
        whose value has more than 2 GiB.
        """
        rows = max(map(len, columns.values()), default=0)
        first = 0
        while first < rows:
            rest = {name: column.slice(first) for name, column in columns.items()} if first else columns
            encoded, bad_rows = self._encoded(rest)
            count = min(map(len, encoded.values()), default=rows - first)
            part = {name: encoded.get(name, column).slice(0, count) for name, column in rest.items()}
            self._add_headers(part)
            source = {name: column.slice(0, count) for name, column in rest.items()}
            yield FormattedRecords(part, first, _counted(bad_rows, first, count), source)
            first += count

    def unwritable(self, part: FormattedRecords) -> list[Unwritable]:
        """Return the rows of a part that do not fit, in their order and counted in the part, each with a reason. Cells
        that do not fit are there as JSON text, with their nulls, if JSON can hold them. Raises SerializationError for a
        row that an option would mend.
        """
        if not part.bad_rows:
            return []
        if any(bad.reason.startswith(ZONE_IS_MISSING) for bad in part.bad_rows):
            part.check()
        reasons: dict[int, str] = {}
        fields: dict[str, list[int]] = {}
        for bad in part.bad_rows:
            row = bad.row - part.first_row
            reasons.setdefault(row, f"{bad.path}: {bad.reason}")
            fields.setdefault(bad.path.partition(".")[0], []).append(row)
        texts: dict[int, dict[str, bytes]] = {row: {} for row in reasons}
        lost: dict[int, set[str]] = {row: set() for row in reasons}
        for field, rows in fields.items():
            for row in rows:
                lost[row].add(field)
        for each in self._formats:
            field = each.column_format.field
            for row, text in self._texts(each, part.source, fields.get(field, ())):
                texts[row][field] = text
                lost[row].discard(field)
        return [
            Unwritable(row, SerializationError, reason, texts[row], frozenset(lost[row]))
            for row, reason in reasons.items()
        ]

    def _texts(
        self, resolved: ResolvedFormat, columns: Mapping[str, pa.Array], rows: Sequence[int]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield cells of a column as JSON text, with the number of their row. `rows`: ascending."""
        if not rows:
            return
        column = columns[resolved.column_format.field]
        encoder = self._text_encoder(resolved, column.type)
        if encoder is None:
            return
        for run in _near(rows):
            first, end, wanted = run[0], run[-1] + 1, set(run)
            while first < end:
                values = encoder.encode(column.slice(first, end - first), self._most_bytes).values
                for row in wanted.intersection(range(first, first + len(values))):
                    text = values[row - first].as_py()
                    if text is not None:
                        yield row, text
                first += len(values)

    def _text_encoder(self, resolved: ResolvedFormat, data_type: pa.DataType) -> ColumnEncoder | None:
        field, json = resolved.column_format.field, resolved.column_format.json
        key = field, data_type
        if key not in self._text_encoders:
            options = replace(json, ignore_null_fields=False, takes_any_type=True)
            try:
                made = ColumnEncoder(ColumnFormat(field, JSON, None, json=options), data_type)
            except SchemaError:  # a type that JSON does not have: the dead letters go without it
                made = None
            self._text_encoders[key] = made
        return self._text_encoders[key]

    def _encoded(self, columns: Mapping[str, pa.Array]) -> tuple[dict[str, pa.Array], list[BadRow]]:
        encoded: dict[str, pa.Array] = {}
        bad_rows: list[BadRow] = []
        for each in self._formats:
            field = each.column_format.field
            if field in columns:
                values, bad = self._encoder(each, columns[field].type).encode(columns[field], self._most_bytes)
                encoded[field] = values
                bad_rows += bad
        return encoded, bad_rows

    def _encoder(self, resolved: ResolvedFormat, data_type: pa.DataType) -> ColumnEncoder:
        key = resolved.column_format.field, data_type
        found = self._encoders.get(key)
        if found is None:
            found = self._encoders[key] = ColumnEncoder(resolved.column_format, data_type)
        return found

    def _add_headers(self, part: dict[str, pa.Array]) -> None:
        """A row's own header with the id of a schema tells how the bytes of its source were written, not these."""
        for each in self._formats:
            header = each.column_format.header
            if HEADERS in part:
                part[HEADERS] = without_headers(part[HEADERS], each.column_format.schema_id_header)
            if header is not None and each.column_format.field in part:
                part[HEADERS] = with_header(part.get(HEADERS), *header, part[each.column_format.field])


def _near(rows: Sequence[int]) -> Iterator[list[int]]:
    """Yield numbers of rows in groups that are encoded at once. `take` would do, but does not know every type."""
    group = [rows[0]]
    for row in rows[1:]:
        if row - group[-1] > _NEAR:
            yield group
            group = []
        group.append(row)
    yield group


def _counted(bad_rows: list[BadRow], first: int, count: int) -> tuple[BadRow, ...]:
    """Return the bad rows among the first `count`, counted from `first` on. A row may be there for each column."""
    return tuple(sorted(bad._replace(row=first + bad.row) for bad in bad_rows if bad.row < count))
