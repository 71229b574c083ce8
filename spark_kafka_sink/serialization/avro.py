"""The plan of a column for Avro: the fields of an Arrow type, matched by name with those of an Avro schema.

The pairs of types are those that Spark's `to_avro` takes (AvroSerializer.scala), and the types of Arrow that Spark does
not have. A pair that would lose something without a word is refused. Two losses are the schema's own: a timestamp in
`timestamp-millis` is rounded down to milliseconds, and so is one in a plain `long`, as in Spark.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.avro_schema import AvroType, is_text
from spark_kafka_sink.serialization.plan import (
    AS_BYTES,
    AS_FIXED,
    MOST_DEPTH,
    NO_SYMBOL,
    NOTHING,
    OF_SIZE,
    PER_SECOND,
    RECORD,
    SIZED,
    SYMBOL,
    UNION,
    UNSIZED,
    WRONG_SIZE,
    How,
    Kind,
    Node,
    Op,
    kind_of,
    list_field,
    plain_type,
    refuse_special,
    storage,
    with_dictionaries,
)

MOST_BRANCHES: Final = 63


def avro_plan(schema: AvroType, data_type: pa.DataType, path: str, *, bare_bytes: bool = False) -> Node:
    """Return the node that writes a column of `data_type` as `schema`. `path`: the column's name.

    `bare_bytes`: a schema that is only `bytes` is written without the length, as Confluent's serializers do. Its
    readers take the bytes as they are, whatever the logicalType is, so a decimal in `bytes` alone is refused. Raises
    SchemaError, with the path, if the type does not fit.
    """
    if bare_bytes and schema.kind == "bytes":
        if schema.logical == "decimal":
            raise SchemaError(
                f"{path}: the Avro schema is a decimal in bytes, and with a schema registry readers take such a value"
                " for plain bytes. Put the decimal into a record, or give a schema with 'fixed' in place of 'bytes'."
            )
        if kind_of(plain_type(data_type), path) is Kind.BYTES:
            return with_dictionaries(data_type, _stored(data_type, path, how=UNSIZED))
    return _node(data_type, schema, path)


def _node(data_type: pa.DataType, schema: AvroType, path: str, source: int = -1, depth: int = 0) -> Node:
    """Return the node of a field: the value, the union around it, and the dictionaries above it."""
    if depth > MOST_DEPTH:
        raise SchemaError(f"{path}: the type has more than {MOST_DEPTH} levels.")
    null_branch = value_branch = -1
    plain = plain_type(data_type)
    if schema.kind == "union":
        if len(schema.parts) > MOST_BRANCHES:
            raise SchemaError(f"{path}: the union in the Avro schema has more than {MOST_BRANCHES} branches.")
        kinds = [part.kind for part in schema.parts]
        null_branch = kinds.index("null") if "null" in kinds else -1
        values = [number for number, kind in enumerate(kinds) if kind != "null"]
        if pat.is_struct(plain) and len(values) > 1:
            return _union(data_type, schema, values, null_branch, path, source, depth)
        if pat.is_null(plain) and null_branch >= 0:
            return Node(Op.ABSENT, path, null_branch=null_branch, source=source)
        if len(values) != 1:
            raise SchemaError(
                f"{path}: the Avro schema has a {schema}. Only a union of null and one type is written, or a union of"
                " several types from a struct with the fields member0, member1 and so on."
            )
        value_branch = values[0]
        schema = schema.parts[value_branch]
    made = _value(plain, schema, path, depth)
    made = replace(made, null_branch=null_branch, value_branch=value_branch, source=source)
    return with_dictionaries(data_type, made)


def _value(data_type: pa.DataType, schema: AvroType, path: str, depth: int) -> Node:
    """Return the node of a value that is not null."""
    refuse_special(data_type, path, "Avro")
    node = _VALUES[kind_of(data_type, path)](data_type, schema, path, depth)
    if node is None:
        raise _misfit(path, data_type, schema)
    return node


def _misfit(path: str, data_type: pa.DataType, schema: AvroType) -> SchemaError:
    return SchemaError(
        f"{path}: the Arrow type {data_type} does not fit Avro's {schema}. Cast the column, or change the schema."
    )


def _stored(data_type: pa.DataType, path: str, *, how: int = 0, arg: int = 0, other: int = 0) -> Node:
    found = storage(plain_type(data_type), path)
    return Node(found.op, path, how=how, arg=found.arg or arg, other=other)


# ---- simple values -------------------------------------------------------------------------------------------------


def _null(_data_type: pa.DataType, schema: AvroType, path: str, _depth: int) -> Node | None:
    return Node(Op.ABSENT, path, how=NOTHING) if schema.kind == "null" else None


def _number(data_type: pa.DataType, schema: AvroType, path: str, _depth: int) -> Node | None:
    fits = schema.kind == _NUMBERS[storage(data_type, path).op] and schema.logical != "decimal"
    return _stored(data_type, path) if fits else None


def _text(data_type: pa.DataType, schema: AvroType, path: str, _depth: int) -> Node | None:
    if schema.kind == "string":
        return _stored(data_type, path, how=SIZED)
    if schema.kind != "enum":
        return None
    encoded = [symbol.encode() for symbol in schema.symbols]
    return Node(
        storage(data_type, path).op,
        path,
        how=SYMBOL,
        other=len(encoded),
        extra=b"".join(struct.pack("<i", len(symbol)) + symbol for symbol in encoded),
        reasons={NO_SYMBOL: f"the enum '{schema.name}' has no such symbol"},
    )


def _bytes(data_type: pa.DataType, schema: AvroType, path: str, _depth: int) -> Node | None:
    if schema.logical == "decimal":
        return None
    if schema.kind == "bytes":
        return _stored(data_type, path, how=SIZED)
    if schema.kind != "fixed" or (pat.is_fixed_size_binary(data_type) and data_type.byte_width != schema.size):
        return None
    found = storage(data_type, path)
    said = f"the value has not the {schema.size} bytes of the fixed type '{schema.name}'"
    return Node(found.op, path, how=OF_SIZE, arg=found.arg, other=schema.size, reasons={WRONG_SIZE: said})


def _decimal(data_type: pa.DataType, schema: AvroType, path: str, _depth: int) -> Node | None:
    fits = schema.logical == "decimal" and (schema.precision, schema.scale) == (data_type.precision, data_type.scale)
    if not fits or schema.kind not in ("fixed", "bytes"):
        return None
    if schema.size > 100:
        raise SchemaError(f"{path}: the fixed type '{schema.name}' has more than 100 bytes for a decimal.")
    how, limit = AS_BYTES if schema.kind == "bytes" else AS_FIXED, 10**schema.precision
    node = _stored(data_type, path, how=how, other=schema.size)
    return replace(node, extra=limit.to_bytes(16, "little"))


# ---- times ---------------------------------------------------------------------------------------------------------


def _date(data_type: pa.DataType, schema: AvroType, path: str, _depth: int) -> Node | None:
    if schema.kind != "int" or schema.logical not in (None, "date"):
        return None
    if pat.is_date64(data_type):
        return _stored(data_type, path, how=How.EXACTLY_DIVIDED, arg=86_400_000, other=1)
    return _stored(data_type, path)


def _scaled(data_type: pa.DataType, schema: AvroType, path: str, per_second: int, divided: How) -> Node:
    """Return the node of a time in another unit. `divided`: how a finer unit of Arrow is divided."""
    own, is_int = PER_SECOND[data_type.unit], int(schema.kind == "int")
    if own == per_second:
        return _stored(data_type, path)
    if own < per_second:
        return _stored(data_type, path, how=How.MULTIPLIED, arg=per_second // own, other=is_int)
    return _stored(data_type, path, how=divided, arg=own // per_second, other=is_int)


def _timestamp(data_type: pa.DataType, schema: AvroType, path: str, _depth: int) -> Node | None:
    local = "" if data_type.tz else "local-"
    units = {
        None: 1000,
        f"{local}timestamp-millis": 1000,
        f"{local}timestamp-micros": 1_000_000,
        f"{local}timestamp-nanos": 1_000_000_000,
    }
    if schema.kind != "long" or schema.logical not in units:
        return None
    if schema.outside:
        raise SchemaError(
            f"{path}: the Avro schema has the logicalType {schema.outside} outside of the type long. Avro ignores it"
            " there, and the timestamp would be written in milliseconds. Write it into the type:"
            f' {{"type": "long", "logicalType": "{schema.outside}"}}.'
        )
    return _scaled(data_type, schema, path, units[schema.logical], How.DIVIDED)


def _time(data_type: pa.DataType, schema: AvroType, path: str, _depth: int) -> Node | None:
    units = {("int", "time-millis"): 1000, ("long", "time-micros"): 1_000_000}
    per_second = units.get((schema.kind, schema.logical or ""))
    return None if per_second is None else _scaled(data_type, schema, path, per_second, How.EXACTLY_DIVIDED)


def _duration(data_type: pa.DataType, schema: AvroType, path: str, _depth: int) -> Node | None:
    if schema.kind != "long" or schema.logical is not None:
        return None
    return _scaled(data_type, schema, path, 1_000_000, How.EXACTLY_DIVIDED)


# ---- nested values -------------------------------------------------------------------------------------------------


def _struct(data_type: pa.DataType, schema: AvroType, path: str, depth: int) -> Node | None:
    if schema.kind != "record":
        return None
    own: dict[str, int] = {}
    for number in range(data_type.num_fields):
        name = data_type.field(number).name
        if name in own:
            raise SchemaError(f"{path}: two fields have the name '{name}'. Rename one of them.")
        own[name] = number
    extra = [name for name in own if name not in schema.fields]
    if extra:
        raise SchemaError(
            f"{path}.{extra[0]}: the Avro record '{schema.name}' has no field of this name{_hint(extra[0], schema)}."
            " Rename or drop the column's field, or add it to the schema."
        )
    children = []
    for name, part in schema.fields.items():
        if name in own:
            number = own[name]
            children.append(_node(data_type.field(number).type, part, f"{path}.{name}", number, depth + 1))
        else:
            children.append(_missing(part, f"{path}.{name}"))
    return Node(Op.STRUCT, path, how=RECORD, children=tuple(children))


def _hint(name: str, schema: AvroType) -> str:
    alike = [other for other in schema.fields if other.lower() == name.lower()]
    return f" (but '{alike[0]}': upper and lower case count)" if alike else ""


def _missing(schema: AvroType, path: str) -> Node:
    """Return the node of a field that only the schema has: null."""
    if schema.kind == "null":
        return Node(Op.ABSENT, path, how=NOTHING)
    kinds = [part.kind for part in schema.parts] if schema.kind == "union" else []
    if "null" not in kinds:
        raise SchemaError(
            f"{path}: the column has no such field, and the Avro schema allows no null there. Add the field to the"
            " column, or make it nullable in the schema."
        )
    return Node(Op.ABSENT, path, null_branch=kinds.index("null"))


def _union(
    data_type: pa.DataType, schema: AvroType, values: list[int], null_branch: int, path: str, source: int, depth: int
) -> Node:
    """Return the node of a union with several types: of a struct with the fields member0, member1 and so on."""
    plain = plain_type(data_type)
    names = [plain.field(number).name for number in range(plain.num_fields)]
    if names != [f"member{number}" for number in range(len(values))]:
        raise SchemaError(
            f"{path}: the Avro schema has a union of {len(values)} types, so the struct must have the fields member0 to"
            f" member{len(values) - 1} in this order."
        )
    children = []
    for number, branch in enumerate(values):
        member = plain.field(number).type
        made = _value(plain_type(member), schema.parts[branch], f"{path}.{names[number]}", depth + 1)
        children.append(with_dictionaries(member, replace(made, value_branch=branch, source=number)))
    node = Node(Op.STRUCT, path, how=UNION, children=tuple(children), null_branch=null_branch, source=source)
    return with_dictionaries(data_type, node)


def _list(data_type: pa.DataType, schema: AvroType, path: str, depth: int) -> Node | None:
    if schema.kind != "array":
        return None
    child = _node(list_field(data_type).type, schema.parts[0], f"{path}.element", depth=depth + 1)
    found = storage(data_type, path)
    return Node(found.op, path, children=(child,), arg=found.arg)


def _map(data_type: pa.DataType, schema: AvroType, path: str, depth: int) -> Node | None:
    if schema.kind != "map" or not is_text(data_type.key_type):
        return None
    key = _node(data_type.key_type, AvroType("string"), f"{path}.key", depth=depth + 1)
    value = _node(data_type.item_type, schema.parts[0], f"{path}.value", depth=depth + 1)
    return Node(Op.MAP, path, children=(key, value))


_NUMBERS: Final[Mapping[Op, str]] = {
    Op.BOOL: "boolean",
    **dict.fromkeys((Op.I8, Op.I16, Op.I32, Op.U8, Op.U16), "int"),
    **dict.fromkeys((Op.I64, Op.U32, Op.U64), "long"),
    **dict.fromkeys((Op.F16, Op.F32), "float"),
    Op.F64: "double",
}
_VALUES: Final[Mapping[Kind, Callable[[pa.DataType, AvroType, str, int], Node | None]]] = {
    Kind.NULL: _null,
    Kind.BOOLEAN: _number,
    Kind.INTEGER: _number,
    Kind.FLOATING: _number,
    Kind.TEXT: _text,
    Kind.BYTES: _bytes,
    Kind.DECIMAL: _decimal,
    Kind.DATE: _date,
    Kind.TIMESTAMP: _timestamp,
    Kind.TIME: _time,
    Kind.DURATION: _duration,
    Kind.STRUCT: _struct,
    Kind.MAP: _map,
    Kind.LIST: _list,
}
