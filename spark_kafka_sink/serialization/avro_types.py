"""The Arrow type for the values of an Avro schema: rows of Python do not tell their types, and the schema does.

It is the type that holds every value of the schema: microseconds for any timestamp, a string for an enum. Plain
functions; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.avro_schema import AvroType, parse_schema

MOST_DIGITS: Final = 38
"""Of a decimal of Spark."""
_PLAIN: Final[Mapping[str, pa.DataType]] = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}
_INSTANT: Final = pa.timestamp("us", "UTC")
_LOGICAL: Final[Mapping[tuple[str, str], pa.DataType]] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time64("ns"),
    ("long", "time-micros"): pa.time64("ns"),
    ("long", "timestamp-millis"): _INSTANT,
    ("long", "timestamp-micros"): _INSTANT,
    ("long", "timestamp-nanos"): _INSTANT,
    ("long", "local-timestamp-millis"): pa.timestamp("us"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("long", "local-timestamp-nanos"): pa.timestamp("us"),
}


def arrow_type_of(schema: str, path: str) -> pa.DataType:
    """Return the type for values of an Avro schema, given as text. `path`: of the column, for errors.

    Raises SchemaError for a schema that is none, that refers to itself, or that has a union of several types.
    """
    return _type_of(parse_schema(schema), path, ())


def _type_of(schema: AvroType, path: str, outer: tuple[AvroType, ...]) -> pa.DataType:
    if schema in outer:
        raise SchemaError(f"{path}: the Avro record '{schema.name}' refers to itself, and no column has such a type.")
    if schema.logical == "decimal" and schema.kind in ("bytes", "fixed"):
        return _decimal(schema, path)
    nested = _NESTED.get(schema.kind)
    if nested is not None:
        return nested(schema, path, (*outer, schema))
    return _LOGICAL.get((schema.kind, schema.logical or ""), _PLAIN[schema.kind])


def _decimal(schema: AvroType, path: str) -> pa.DataType:
    if not 0 <= schema.scale <= schema.precision or not 1 <= schema.precision <= MOST_DIGITS:
        raise SchemaError(
            f"{path}: the Avro schema has a decimal({schema.precision},{schema.scale}), and a column has a precision of"
            f" 1 to {MOST_DIGITS} and a scale of 0 to the precision. Correct the schema."
        )
    return pa.decimal128(schema.precision, schema.scale)


def _record(schema: AvroType, path: str, outer: tuple[AvroType, ...]) -> pa.DataType:
    return pa.struct([(name, _type_of(part, f"{path}.{name}", outer)) for name, part in schema.fields.items()])


def _array(schema: AvroType, path: str, outer: tuple[AvroType, ...]) -> pa.DataType:
    return pa.list_(pa.field("element", _type_of(schema.parts[0], f"{path}.element", outer)))


def _map(schema: AvroType, path: str, outer: tuple[AvroType, ...]) -> pa.DataType:
    return pa.map_(pa.string(), _type_of(schema.parts[0], f"{path}.value", outer))


def _union(schema: AvroType, path: str, outer: tuple[AvroType, ...]) -> pa.DataType:
    kinds = [part for part in schema.parts if part.kind != "null"]
    if len(kinds) > 1:
        raise SchemaError(
            f"{path}: the Avro schema has a {schema}, from which the type of the column is not known. Give it:"
            " KafkaSink(options, schema=df.schema)."
        )
    return _type_of(kinds[0], path, outer) if kinds else pa.null()


_NESTED: Final[Mapping[str, Callable[[AvroType, str, tuple[AvroType, ...]], pa.DataType]]] = {
    "record": _record,
    "array": _array,
    "map": _map,
    "union": _union,
}
