"""Avro schemas: read from their JSON (specification 1.12), and made of an Arrow type as Spark makes them.

The made schema equals that of Spark's `SchemaConverters.toAvroType`: the record `topLevelRecord`, records and fixed
decimals with the path of their parents as namespace, and a field that may be null as a union with null last, or null
first with null as default. Runs on the driver and at the start of a task; no state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.column_format import NULL_FIRST, NULL_LAST
from spark_kafka_sink.serialization.plan import list_field, plain_type, refuse_special

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Half of a character, which has no bytes in UTF-8."""
_MOST_BYTES: Final = 2**31 - 1
PRIMITIVES: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
TOP_RECORD: Final = "topLevelRecord"
CATALYST_TYPE: Final = "spark.sql.catalyst.type"
_FINER_THAN_MS: Final = frozenset(f"{of}timestamp-{unit}" for of in ("", "local-") for unit in ("micros", "nanos"))


# ---- reading -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class AvroType:
    """A type of a schema. A named type that is used twice is one object, so a recursive schema refers to itself."""

    kind: str
    """A primitive, or record, enum, fixed, array, map or union."""
    name: str = ""
    """The full name of a record, an enum or a fixed."""
    logical: str | None = None
    precision: int = 0
    scale: int = 0
    size: int = 0
    symbols: tuple[str, ...] = ()
    fields: dict[str, AvroType] = field(default_factory=dict)
    parts: tuple[AvroType, ...] = ()
    """The elements of an array, the values of a map, or the branches of a union."""
    outside: str = ""
    """Of a long: the logicalType of a timestamp that stands outside of it, where Avro ignores it."""

    def __str__(self) -> str:
        text = f"{self.kind} {self.name}" if self.name else self.kind
        if self.kind == "union":
            return f"union of {', '.join(map(str, self.parts))}"
        if self.logical == "decimal":
            return f"{text} (decimal({self.precision},{self.scale}))"
        return f"{text} ({self.logical})" if self.logical else text


def parse_schema(text: str) -> AvroType:
    """Return the type of a schema. Raises SchemaError if the text is no schema of Avro."""
    try:
        written = json.loads(text)
    except RecursionError:
        raise SchemaError("The Avro schema has too many levels.") from None
    except ValueError:
        if text.strip() not in PRIMITIVES:
            raise SchemaError("The Avro schema is not JSON.") from None
        written = text.strip()  # Confluent's registry also has the bare names of primitives
    try:
        return _Reader().type_of(written, "")
    except RecursionError:
        raise SchemaError("The Avro schema has too many levels.") from None


class _Reader:
    """Reads one schema, and keeps its named types."""

    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}

    def type_of(self, written: Any, namespace: str) -> AvroType:
        """Return the type of a schema's part. `namespace`: of the record around it."""
        if isinstance(written, str):
            return self._by_name(written, namespace)
        if isinstance(written, list):
            return AvroType("union", parts=tuple(self.type_of(part, namespace) for part in written))
        if not isinstance(written, dict) or "type" not in written:
            raise SchemaError(f"The Avro schema has {_shown(written)} where a type should be.")
        kind = written["type"]
        if not isinstance(kind, str):
            return self._part_of(written, "type", namespace)
        if kind in ("record", "error", "enum", "fixed"):
            return self._named_type(written, kind, namespace)
        if kind in ("array", "map"):
            part = self._part_of(written, "items" if kind == "array" else "values", namespace)
            return AvroType(kind, parts=(part,))
        found = self._by_name(kind, namespace)
        return _with_logical_type(AvroType(kind), written) if kind in PRIMITIVES else found

    def _part_of(self, written: Mapping[str, Any], key: str, namespace: str) -> AvroType:
        """Return the type that stands under `key`, which knows a logicalType that stands beside the key."""
        found = self.type_of(written.get(key), namespace)
        logical = written.get("logicalType")
        if isinstance(logical, str) and logical in _FINER_THAN_MS:
            for each in _values_of(found):
                if each.kind == "long" and each.logical is None:
                    each.outside = logical
        return found

    def _by_name(self, name: str, namespace: str) -> AvroType:
        if name in PRIMITIVES:
            return AvroType(name)
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        found = self._named.get(full) or self._named.get(name)
        if found is None:
            raise SchemaError(
                f"The Avro schema uses the type '{name}', which it does not define before. References to other schemas"
                " of a registry are not supported: put the type into the schema."
            )
        return found

    def _named_type(self, written: Mapping[str, Any], kind: str, namespace: str) -> AvroType:
        name = _full_name(written, namespace)
        made = _with_logical_type(AvroType("record" if kind == "error" else kind, name), written)
        if name in self._named:
            raise SchemaError(f"The Avro schema defines '{name}' twice.")
        self._named[name] = made
        if kind == "enum":
            made.symbols = _symbols_of(written, name)
        elif kind == "fixed":
            made.size = _size_of(written, name)
        else:
            inner = name.rpartition(".")[0]
            for each in _list_of(written, "fields", name):
                if not isinstance(each, dict) or not isinstance(each.get("name"), str) or "type" not in each:
                    raise SchemaError(f"A field of the Avro record '{name}' has no name or no type.")
                if each["name"] in made.fields:
                    raise SchemaError(f"The Avro record '{name}' has the field '{each['name']}' twice.")
                check_name(each["name"], name)
                made.fields[each["name"]] = self._part_of(each, "type", inner)
        if made.logical == "decimal" and kind == "fixed":
            _check_decimal(made)
        return made


def _shown(written: Any) -> str:
    return json.dumps(written)[:80]


def _full_name(written: Mapping[str, Any], namespace: str) -> str:
    name = written.get("name")
    if not isinstance(name, str) or not all(NAME.fullmatch(part) for part in name.split(".")):
        raise SchemaError(f"The Avro schema has a {written['type']} with the name {_shown(name)}, which is not valid.")
    if "." in name:
        return name
    own = written.get("namespace", namespace)
    return f"{own}.{name}" if own else name


def _list_of(written: Mapping[str, Any], key: str, name: str) -> list[Any]:
    found = written.get(key)
    if not isinstance(found, list):
        raise SchemaError(f"The Avro type '{name}' has no list of {key}.")
    return found


def _symbols_of(written: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for each in _list_of(written, "symbols", name):
        if not isinstance(each, str) or _SURROGATE.search(each):
            raise SchemaError(f"The Avro enum '{name}' has the symbol {_shown(each)}, which is not valid.")
        if each in found:
            raise SchemaError(f"The Avro enum '{name}' has the symbol {_shown(each)} twice.")
        found[each] = None
    return tuple(found)


def _size_of(written: Mapping[str, Any], name: str) -> int:
    size = written.get("size")
    if type(size) is not int or not 0 <= size <= _MOST_BYTES:
        raise SchemaError(f"The fixed Avro type '{name}' has no valid size.")
    return size


def _with_logical_type(made: AvroType, written: Mapping[str, Any]) -> AvroType:
    logical = written.get("logicalType")
    if isinstance(logical, str):
        made.logical = logical
        if logical == "decimal":
            made.precision, made.scale = _digits_of(written, "precision"), _digits_of(written, "scale")
    return made


def _values_of(found: AvroType) -> Iterator[AvroType]:
    """Yield the type, or those in unions, arrays and maps."""
    if found.kind not in ("union", "array", "map"):
        yield found
    for part in found.parts:
        yield from _values_of(part)


def _digits_of(written: Mapping[str, Any], key: str) -> int:
    """Return the precision or the scale of a decimal, 0 if the schema does not say it."""
    found = written.get(key, 0)
    if type(found) is not int:
        raise SchemaError(f"The Avro schema has a decimal with the {key} {_shown(found)}, which is no whole number.")
    return found


def _check_decimal(made: AvroType) -> None:
    if made.precision < 1 or bytes_for_precision(made.precision) > made.size:
        raise SchemaError(
            f"The fixed Avro type '{made.name}' of {made.size} bytes has no room for a decimal of {made.precision}"
            " digits."
        )


def bytes_for_precision(precision: int) -> int:
    """Return the bytes of two's complement for this many digits."""
    most: int = 10**precision - 1
    return (most.bit_length() + 8) // 8


def check_name(name: str, parent: str) -> None:
    """Raise SchemaError if Avro does not allow the name of a field."""
    if not NAME.fullmatch(name):
        raise SchemaError(
            f"{parent}: Avro does not allow the name '{name}'. A name has letters, digits and _, and no digit first."
            " Rename the field before."
        )


# ---- made of an Arrow type -----------------------------------------------------------------------------------------

_SIMPLE: Final[dict[pa.DataType, Any]] = {
    pa.null(): "null",
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.uint8(): "int",
    pa.uint16(): "int",
    pa.uint32(): "long",
    pa.uint64(): "long",
    pa.float16(): "float",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "bytes",
    pa.large_binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.date64(): {"type": "int", "logicalType": "date"},
}
if hasattr(pa, "string_view"):  # from pyarrow 16 on
    _SIMPLE.update({pa.string_view(): "string", pa.binary_view(): "bytes"})

_TIMESTAMP_UNITS: Final = {"s": "millis", "ms": "millis", "us": "micros", "ns": "nanos"}


def schema_text(data_type: pa.DataType, path: str, nullable: str = NULL_LAST) -> str:
    """Return the schema of a column as JSON. `path`: the column's name. `nullable`: null-last or null-first.

    The column itself is no union: a null is a record without a value. Raises SchemaError, with the path, for a type
    that Avro does not have and for a name that it does not allow.
    """
    return json.dumps(_Maker(nullable == NULL_FIRST).type_of(data_type, TOP_RECORD, "", path), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class _Maker:
    null_first: bool

    def type_of(self, data_type: pa.DataType, name: str, namespace: str, path: str) -> Any:
        """Return the schema of a type. `name`: of the field; `namespace`: the names of the records around it."""
        data_type = plain_type(data_type)
        simple = _SIMPLE.get(data_type)
        if simple is not None:
            return simple
        refuse_special(data_type, path, "Avro")
        if pat.is_struct(data_type):
            return self._record(data_type, name, namespace, path)
        if pat.is_decimal(data_type) and data_type.bit_width <= 128 and 0 <= data_type.scale <= data_type.precision:
            return _fixed_decimal(data_type, name, namespace)
        if pat.is_map(data_type):
            if not is_text(data_type.key_type):
                raise SchemaError(f"{path}: Avro has only maps whose keys are strings, not {data_type.key_type}.")
            return {"type": "map", "values": self._item(data_type.item_field, name, namespace, f"{path}.value")}
        if pat.is_list(data_type) or pat.is_large_list(data_type) or pat.is_fixed_size_list(data_type):
            item = self._item(list_field(data_type), name, namespace, f"{path}.element")
            return {"type": "array", "items": item}
        made = _of_unit(data_type)
        if made is None:
            raise SchemaError(f"{path}: Avro has no type for the Arrow type {data_type}. Cast the column, or drop it.")
        return made

    def _item(self, of: pa.Field, name: str, namespace: str, path: str) -> Any:
        return self._nullable(self.type_of(of.type, name, namespace, path), of.nullable)

    def _nullable(self, made: Any, nullable: bool) -> Any:
        if not nullable or made == "null":
            return made
        return ["null", made] if self.null_first else [made, "null"]

    def _record(self, data_type: pa.DataType, name: str, namespace: str, path: str) -> Any:
        inner = f"{namespace}.{name}" if namespace else name
        record: dict[str, Any] = {"type": "record", "name": name}
        if namespace:
            record["namespace"] = namespace
        fields: list[dict[str, Any]] = []
        for number in range(data_type.num_fields):
            of = data_type.field(number)
            check_name(of.name, path)
            if any(of.name == other["name"] for other in fields):
                raise SchemaError(f"{path}: two fields have the name '{of.name}', which Avro does not allow.")
            made = self._item(of, of.name, inner, f"{path}.{of.name}")
            entry: dict[str, Any] = {"name": of.name, "type": made}
            if self.null_first and (made == "null" or isinstance(made, list)):
                entry["default"] = None
            fields.append(entry)
        record["fields"] = fields
        return record


def is_text(data_type: pa.DataType) -> bool:
    """Return whether the values are strings, in any layout of Arrow."""
    return _SIMPLE.get(plain_type(data_type)) == "string"


def _fixed_decimal(data_type: pa.DataType, name: str, namespace: str) -> Any:
    return {
        "type": "fixed",
        "name": "fixed",
        "namespace": f"{namespace}.{name}" if namespace else name,
        "size": bytes_for_precision(data_type.precision),
        "logicalType": "decimal",
        "precision": data_type.precision,
        "scale": data_type.scale,
    }


def _of_unit(data_type: pa.DataType) -> Any:
    """Return the schema of a type with a unit, or of bytes of one size. None for another type."""
    if pat.is_timestamp(data_type):
        local = "" if data_type.tz else "local-"
        return {"type": "long", "logicalType": f"{local}timestamp-{_TIMESTAMP_UNITS[data_type.unit]}"}
    if pat.is_time32(data_type):
        return {"type": "int", "logicalType": "time-millis"}
    if pat.is_time64(data_type):
        return {"type": "long", "logicalType": "time-micros", CATALYST_TYPE: "time(6)"}
    if pat.is_duration(data_type):
        return {"type": "long", CATALYST_TYPE: "interval day to second"}
    return "bytes" if pat.is_fixed_size_binary(data_type) else None
