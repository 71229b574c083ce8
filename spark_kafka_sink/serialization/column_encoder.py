"""Encodes Arrow columns in the format that a `ColumnFormat` says: Avro, Protobuf, or JSON in the form of `to_json`.

The compiled kernel (`_columns.c`) writes row after row into one output, without a Python object for a row. Without the
kernel python_rows.py writes the same bytes, slowly. An encoder learns how large its rows are, so that the next output
has the right size at once. One thread at a time may use an encoder.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import pyarrow as pa

from spark_kafka_sink.common.errors import ConfigError, SchemaError, SerializationError
from spark_kafka_sink.record.arrow import BINARY, MAX_COLUMN_BYTES
from spark_kafka_sink.record.kernel import KERNEL
from spark_kafka_sink.serialization.avro import avro_plan
from spark_kafka_sink.serialization.avro_schema import parse_schema
from spark_kafka_sink.serialization.column_format import (
    AVRO,
    JSON,
    JSON_SCHEMA,
    PROTOBUF,
    BadRow,
    ColumnFormat,
    EncodedColumn,
)
from spark_kafka_sink.serialization.json_schema import json_schema_plan
from spark_kafka_sink.serialization.json_text import json_plan
from spark_kafka_sink.serialization.plan import Bound, Node, Op, Plan, powers_of_ten
from spark_kafka_sink.serialization.protobuf import protobuf_plan
from spark_kafka_sink.serialization.protobuf_rows import protobuf_writer
from spark_kafka_sink.serialization.python_rows import BadValue, avro_writer, json_writer, raw_values

MOST_BYTES: Final = 1 << 29
"""The most bytes of an encoded column, unless its first row alone has more."""
AVRO_FORM, JSON_FORM, PROTOBUF_FORM = range(3)
"""The emitters of the kernel."""
_WRITERS: Final = (avro_writer, json_writer, protobuf_writer)
"""Those of Python, in the same order."""
_ROOM: Final = 256
"""More than the kernel wants to be free before each value (`ROOM` in _columns.h)."""
_FIRST_GUESS: Final = 64
"""Bytes of a row, before one is known."""
_BAD_AT_ONCE: Final = 1000
_BAD_NUMBERS: Final = 3
TOO_LONG: Final = f"its bytes are more than {MAX_COLUMN_BYTES}"


class ColumnEncoder:
    """Encodes columns of one Arrow type in one format."""

    def __init__(self, column_format: ColumnFormat, data_type: pa.DataType) -> None:
        """Raise SchemaError, with the path of the field, if the type does not fit the format's schema."""
        make = _PLANS.get(column_format.name)
        if make is None:
            raise ConfigError(
                f"{column_format.field}.format must be one of {', '.join(_PLANS)}, not '{column_format.name}'."
            )
        self._field = column_format.field
        self._form, root = make(column_format, data_type)
        self._prefix = column_format.prefix
        self._type = data_type
        self._plan = Plan(root)
        self._bytes_of_a_row = float(_FIRST_GUESS)

    def encode(self, column: pa.Array, most_bytes: int = MOST_BYTES) -> EncodedColumn:
        """Return the bytes of a column, or of as many of its first rows as have `most_bytes` bytes, but at least one.

        `column`: an array of the encoder's type, a slice too. A null row is null. A row that does not fit the schema is
        null and stands in `bad_rows`. Raises SchemaError for another type, and SerializationError if the column's
        buffers contradict each other.
        """
        if column.type != self._type:
            raise SchemaError(f"{self._field}: the column has the Arrow type {column.type} instead of {self._type}.")
        most = min(most_bytes, MAX_COLUMN_BYTES - _ROOM)
        if KERNEL is None:
            return _encoded_by_python(self._form, self._plan, self._prefix, column, most)
        guess = int(len(column) * self._bytes_of_a_row * 1.05) + _ROOM
        run = _Run(self._form, self._plan, self._prefix, column, min(guess, most + _ROOM))
        try:
            made = run.encoded(most)
        except ValueError as error:
            raise SerializationError(
                f"{self._field}: the column's Arrow buffers contradict each other: {error}."
            ) from error
        if len(made.values):
            self._bytes_of_a_row = run.used / len(made.values)
        return made


class _Run:
    """One call of `encode` with the kernel: the outputs, and how far they are filled."""

    def __init__(self, form: int, plan: Plan, prefix: bytes, column: pa.Array, size: int) -> None:
        """`size`: of the first output, in bytes."""
        self._form, self._plan, self._prefix = form, plan, prefix
        self._rows = len(column)
        self._bound: Bound = plan.bind(column)
        self._is_whole = column.null_count == 0 and plan.nodes[0].op is not Op.DICT  # an entry may be null
        self._output = pa.allocate_buffer(size, resizable=True)
        self._offsets = bytearray(4 * (self._rows + 1))
        self._valid = bytearray((self._rows + 7) // 8)
        self._bad = array("q", bytes(8 * _BAD_NUMBERS * min(self._rows, _BAD_AT_ONCE)))
        self._bad_rows: list[BadRow] = []
        self._row = 0
        self.used = 0

    def encoded(self, most: int) -> EncodedColumn:
        """Encode until the last row, or until the output has `most` bytes. Raises ValueError for damaged buffers."""
        last = self._rows
        while True:
            if not self._is_filled(last):
                break
            if self._row > 0 and self._output.size >= most:
                break
            if self._output.size >= most:
                last = 1  # a first row that is larger goes alone
            if self._output.size >= MAX_COLUMN_BYTES:
                self._skip_row()
                break
            limit = most + _ROOM if last > 1 else MAX_COLUMN_BYTES
            self._output.resize(min(max(2 * self._output.size, self._expected()), max(limit, self._output.size + 1)))
        return self._result()

    def _is_filled(self, last: int) -> bool:
        """Write rows up to `last`. Return whether the output was full before that."""
        while True:
            self._row, self.used, bad, is_full = KERNEL.encode_rows(
                self._form,
                self._plan.table,
                self._plan.pool,
                *self._bound,
                self._row,
                last,
                self._prefix,
                powers_of_ten(),
                self._output,
                self.used,
                self._offsets,
                self._valid,
                self._bad,
            )
            for at in range(0, _BAD_NUMBERS * bad, _BAD_NUMBERS):
                row, node, code = self._bad[at : at + _BAD_NUMBERS]
                self._bad_rows.append(BadRow(row, *self._plan.reason(node, code)))
            if is_full or self._row == last:
                return bool(is_full)

    def _expected(self) -> int:
        """Return the bytes of all rows, if the rest is like those before."""
        return int(self.used / max(self._row, 1) * self._rows * 1.05) + _ROOM

    def _skip_row(self) -> None:
        self._bad_rows.append(BadRow(self._row, self._plan.nodes[0].path, TOO_LONG))
        self._row += 1
        self._offsets[4 * self._row : 4 * self._row + 4] = self.used.to_bytes(4, "little")

    def _result(self) -> EncodedColumn:
        valid = None if self._is_whole and not self._bad_rows else pa.py_buffer(self._valid)
        if 2 * self.used < self._output.size:
            self._output.resize(self.used, shrink_to_fit=True)
        values = pa.Array.from_buffers(BINARY, self._row, [valid, pa.py_buffer(self._offsets), self._output])
        return EncodedColumn(values, tuple(self._bad_rows))


def _encoded_by_python(form: int, plan: Plan, prefix: bytes, column: pa.Array, most: int) -> EncodedColumn:
    """Do without the kernel what `_Run` does with it."""
    output, offsets, valid = bytearray(), array("i", [0]), bytearray((len(column) + 7) // 8)
    bad_rows = []
    write = _WRITERS[form](plan.nodes[0])
    for row, value in enumerate(raw_values(plan.nodes[0], column)):
        start = len(output)
        if value is not None:
            output += prefix
            try:
                write(output, value)
                valid[row >> 3] |= 1 << (row & 7)
            except BadValue as bad:
                del output[start:]
                bad_rows.append(BadRow(row, bad.node.path, bad.reason))
            if len(output) > (most if row > 0 else MAX_COLUMN_BYTES):
                del output[start:]
                valid[row >> 3] &= ~(1 << (row & 7))
                if row > 0:
                    break
                bad_rows.append(BadRow(row, plan.nodes[0].path, TOO_LONG))
        offsets.append(len(output))
    buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(output)]
    return EncodedColumn(pa.Array.from_buffers(BINARY, len(offsets) - 1, buffers), tuple(bad_rows))


# ---- the formats ---------------------------------------------------------------------------------------------------


class _Made(NamedTuple):
    form: int
    root: Node


def _avro(column_format: ColumnFormat, data_type: pa.DataType) -> _Made:
    if column_format.schema is None:
        raise ConfigError(f"{column_format.field}.schema is missing: the format avro has one.")
    in_registry = bool(column_format.prefix) or column_format.header is not None
    schema = parse_schema(column_format.schema)
    return _Made(AVRO_FORM, avro_plan(schema, data_type, column_format.field, bare_bytes=in_registry))


def _json(column_format: ColumnFormat, data_type: pa.DataType) -> _Made:
    return _Made(JSON_FORM, json_plan(column_format.json, data_type, column_format.field))


def _json_schema(column_format: ColumnFormat, data_type: pa.DataType) -> _Made:
    schema = column_format.schema
    if schema is None:
        raise ConfigError(f"{column_format.field}.schema is missing: the format json-schema has one.")
    return _Made(JSON_FORM, json_schema_plan(schema, column_format.json, data_type, column_format.field))


def _protobuf(column_format: ColumnFormat, data_type: pa.DataType) -> _Made:
    if column_format.protobuf is None:
        raise ConfigError(f"{column_format.field}.schema is missing or not parsed: the format protobuf has one.")
    return _Made(PROTOBUF_FORM, protobuf_plan(column_format.protobuf, data_type, column_format.field))


_PLANS: Final[Mapping[str, Callable[[ColumnFormat, pa.DataType], _Made]]] = {
    AVRO: _avro,
    PROTOBUF: _protobuf,
    JSON: _json,
    JSON_SCHEMA: _json_schema,
}
