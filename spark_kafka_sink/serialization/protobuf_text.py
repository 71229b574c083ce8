"""The .proto file (proto3) of a column: made of its Arrow type.

The fields have the numbers 1, 2, 3 and so on, in the order of the column. So a new column must be the last one. A field
that may be null is `optional`, and a struct is a message inside of its parent's. Protobuf has no type for a decimal,
which is text, for a date (days since 1970) and for a time of day (microseconds). Runs on the driver; no state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization.avro_schema import TOP_RECORD
from spark_kafka_sink.serialization.plan import MOST_DEPTH, Kind, kind_of, list_field, plain_type, refuse_special
from spark_kafka_sink.serialization.protobuf import DURATION, TIMESTAMP

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNNAMED: Final = "Cast the column, drop it, or give the schema."
_NO_KEYS: Final = ("float", "double", "bytes", TIMESTAMP, DURATION)


def proto_text(data_type: pa.DataType, path: str, message: str | None) -> str:
    """Return the .proto file of a column. `path`: the column's name. `message`: the name of the message, with the
    package if it has one; None: topLevelRecord.

    Raises SchemaError, with the path, for a type that Protobuf does not have and for a name that it does not allow, and
    ConfigError for a `message` that is no name.
    """
    full_name = (message or TOP_RECORD).removeprefix(".")  # a dot before it says only that it is full
    package, _, name = full_name.rpartition(".")
    if not all(_NAME.fullmatch(part) for part in full_name.split(".")):
        raise ConfigError(
            f"{path}.schema.message={message!r:.100} is no name of a Protobuf message, such as shop.Order.",
            setting=f"{path}.schema.message",
        )
    plain = plain_type(data_type)
    refuse_special(plain, path, "Protobuf")
    if kind_of(plain, path) is not Kind.STRUCT:
        raise SchemaError(
            f"{path}: the format protobuf takes a struct, not the Arrow type {data_type}. Put it into a struct, or"
            " leave the format out."
        )
    maker = _Maker(package)
    lines = list(maker.message(plain, name, path, 0))
    head = ['syntax = "proto3";', *([f"package {package};"] if package else [])]
    return "\n".join([*head, *(f'import "{file}";' for file in sorted(maker.imports)), *lines, ""])


def _integer(data_type: pa.DataType) -> str:
    unsigned = "" if pa.types.is_signed_integer(data_type) else "u"
    return f"{unsigned}int{64 if data_type.bit_width == 64 else 32}"


_TYPES: Final[Mapping[Kind, Callable[[pa.DataType], str | None]]] = {
    Kind.BOOLEAN: lambda _: "bool",
    Kind.INTEGER: _integer,
    Kind.FLOATING: lambda of: "double" if pa.types.is_float64(of) else "float",
    Kind.TEXT: lambda _: "string",
    Kind.BYTES: lambda _: "bytes",
    Kind.DECIMAL: lambda _: "string",
    Kind.DATE: lambda _: "int32",
    Kind.TIME: lambda _: "int64",
    Kind.TIMESTAMP: lambda of: TIMESTAMP if of.tz else None,
    Kind.DURATION: lambda _: DURATION,
}
"""Kind → the type of Protobuf. None: it has none."""


@dataclass(frozen=True, slots=True)
class _Maker:
    package: str
    imports: set[str] = field(default_factory=set)

    def message(self, data_type: pa.DataType, name: str, path: str, depth: int) -> Iterator[str]:
        """Yield the lines of a message."""
        if depth > MOST_DEPTH:
            raise SchemaError(f"{path}: the type has more than {MOST_DEPTH} levels.")
        fields = [data_type.field(number) for number in range(data_type.num_fields)]
        _check_names([of.name for of in fields], path)
        taken = {name, *(of.name for of in fields), *(f"{_camel(of.name)}Entry" for of in fields)}
        space = "  " * depth
        yield f"{space}message {name} {{"
        for number, of in enumerate(fields, 1):
            inner = _free_name(_camel(of.name), taken)
            label, kind, lines = self._field(of, inner, f"{path}.{of.name}", depth)
            yield from lines
            yield f"{space}  {label}{kind} {of.name} = {number};"
        yield f"{space}}}"

    def _field(self, of: pa.Field, inner: str, path: str, depth: int) -> tuple[str, str, list[str]]:
        """Return the label of a field, its type, and the lines of a message that it needs, named `inner`."""
        plain = plain_type(of.type)
        kind = kind_of(plain, path)
        if kind is Kind.LIST:
            item, lines = self._item(list_field(plain).type, inner, f"{path}.element", depth)
            return "repeated ", item, lines
        if kind is Kind.MAP:
            if not _NAME.fullmatch(_camel(of.name)):
                raise SchemaError(
                    f"{path}: Protobuf does not allow the name '{of.name}' for a map: its entry would be the message"
                    f" '{_camel(of.name)}Entry'. Rename the field before."
                )
            key, _ = self._item(plain.key_type, inner, f"{path}.key", depth)
            if key.removeprefix(".") in _NO_KEYS or kind_of(plain_type(plain.key_type), path) is Kind.STRUCT:
                raise SchemaError(
                    f"{path}.key: keys of a map are strings, integers or booleans in Protobuf, not {plain.key_type}."
                    f" {_UNNAMED}"
                )
            item, lines = self._item(plain.item_type, inner, f"{path}.value", depth)
            return "", f"map<{key}, {item}>", lines
        item, lines = self._item(plain, inner, path, depth)
        return "" if lines or "." in item or not of.nullable else "optional ", item, lines

    def _item(self, data_type: pa.DataType, inner: str, path: str, depth: int) -> tuple[str, list[str]]:
        """Return the type of a value that is no list, and the lines of the message that it needs."""
        plain = plain_type(data_type)
        kind = kind_of(plain, path)
        refuse_special(plain, path, "Protobuf")
        if kind is Kind.STRUCT:
            return inner, list(self.message(plain, inner, path, depth + 1))
        if kind in (Kind.LIST, Kind.MAP):
            raise SchemaError(
                f"{path}: Protobuf has no lists and maps in lists and maps. Put the inner one into a struct."
            )
        make = _TYPES.get(kind)
        made = None if make is None else make(plain)
        if made is None:
            local = " A timestamp without a time zone is no point in time." if kind is Kind.TIMESTAMP else ""
            raise SchemaError(f"{path}: Protobuf has no type for the Arrow type {data_type}.{local} {_UNNAMED}")
        if "." not in made:
            return made, []
        self.imports.add(f"{made.lower().replace('.', '/')}.proto")
        # com.google would be taken for the google of the type. Other files keep the text that registries have.
        return f".{made}" if "google" in self.package.split(".")[1:] else made, []


def _camel(name: str) -> str:
    """Return a field's name as protoc makes that of a map's entry of it."""
    return _json_name(f"_{name}")


def _json_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def _free_name(name: str, taken: set[str]) -> str:
    """Return a name for a message that nothing in the same message has, and take it."""
    if not _NAME.fullmatch(name):
        name = f"Record{name}"
    while name in taken:
        name += "Record"
    taken.add(name)
    return name


def _check_names(names: list[str], path: str) -> None:
    """Raise SchemaError for names of fields that Protobuf does not allow."""
    in_json: dict[str, str] = {}
    for name in names:
        if not _NAME.fullmatch(name):
            raise SchemaError(
                f"{path}: Protobuf does not allow the name '{name}'. A name has letters, digits and _, and no digit"
                " first. Rename the field before."
            )
        other = in_json.setdefault(_json_name(name), name)
        if other != name or names.count(name) > 1:
            raise SchemaError(
                f"{path}: the fields '{other}' and '{name}' have the same name in the JSON form of Protobuf, which does"
                " not allow that. Rename one of them."
            )
