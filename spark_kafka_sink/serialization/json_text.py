"""The plan of a column for JSON, in the form of Spark's `to_json`.

- A struct is an object with its fields in order, without those that are null (`ignoreNullFields`). Nulls in lists and
  maps are always written.
- Numbers are plain; float and double have the fewest digits that lead back to them, as Java 19 and later print them
  (older ones sometimes print one digit more). NaN and infinities are strings. Decimals keep their scale.
- Bytes are base64. Text that is no UTF-8 has U+FFFD in place of what is wrong.
- Dates are `yyyy-MM-dd`, timestamps `yyyy-MM-dd'T'HH:mm:ss.SSS`, rounded down to milliseconds, with the offset of their
  zone (`Z` for none), if they have a zone. A time has its fraction without zeros at the end.
- A variant is the JSON of its values. As Spark prints it, its times differ from those of columns: `2024-02-29
  12:00:00.5+01:00`, with all their microseconds.
- Keys of maps are strings; numbers and booleans as they are printed.

Runs on the driver and at the start of a task; no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
import pyarrow.types as pat

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization.column_format import JsonOptions
from spark_kafka_sink.serialization.plan import (
    MOST_DEPTH,
    NO_ZONE,
    OUT_OF_RANGE,
    PER_SECOND,
    VARIANT,
    WHAT_INSTEAD,
    WITH_NULLS,
    WITHOUT_NULLS,
    ZONE_IS_MISSING,
    How,
    Kind,
    Node,
    Op,
    kind_of,
    list_field,
    plain_type,
    special_kind,
    storage,
    with_dictionaries,
)
from spark_kafka_sink.serialization.time_zones import Zone, zone_table

_DEFAULT_PATTERNS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "timestamp_format": ("timestampFormat", ("yyyy-MM-dd'T'HH:mm:ss[.SSS][XXX]", "yyyy-MM-dd'T'HH:mm:ss.SSSXXX")),
    "timestamp_ntz_format": ("timestampNTZFormat", ("yyyy-MM-dd'T'HH:mm:ss[.SSS]", "yyyy-MM-dd'T'HH:mm:ss.SSS")),
    "date_format": ("dateFormat", ("yyyy-MM-dd",)),
}


def check_json_options(options: JsonOptions) -> None:
    """Raise ConfigError for a pattern or a time zone that is not supported."""
    for attribute, (option, patterns) in _DEFAULT_PATTERNS.items():
        given = getattr(options, attribute)
        if given is not None and given not in patterns:
            raise ConfigError(
                f"{option} must be {patterns[0]}, not {given}. For another pattern turn the field into text with"
                " date_format before."
            )
    if options.time_zone is not None:
        zone_table(options.time_zone)


def json_plan(options: JsonOptions, data_type: pa.DataType, path: str) -> Node:
    """Return the node that writes a column of `data_type`. `path`: the column's name.

    Raises SchemaError, with the path, for a type that `to_json` does not take, and ConfigError for options that are not
    supported.
    """
    check_json_options(options)
    is_taken = options.takes_any_type or kind_of(plain_type(data_type), path) in (Kind.STRUCT, Kind.MAP, Kind.LIST)
    if not is_taken:
        raise SchemaError(
            f"{path}: the format json takes a struct, a map, an array or a variant, as to_json does, not the Arrow type"
            f" {data_type}. Put it into a struct, or leave the format out."
        )
    return _Maker(options).node(data_type, path)


def quoted(text: str) -> bytes:
    """Return a string as JSON, with the escapes of the Jackson library."""
    return b'"' + text.translate(_ESCAPES).encode("utf-8", "replace") + b'"'


_ESCAPES: Final = {
    **{code: f"\\u{code:04X}" for code in range(32)},
    **{
        ord(plain): escaped
        for plain, escaped in zip('"\\\b\t\n\f\r', ('\\"', r"\\", r"\b", r"\t", r"\n", r"\f", r"\r"), strict=True)
    },
}


def _is_bytes(data_type: pa.DataType) -> bool:
    return kind_of(plain_type(data_type), "") is Kind.BYTES


@dataclass(frozen=True, slots=True)
class _Maker:
    options: JsonOptions

    def node(self, data_type: pa.DataType, path: str, source: int = -1, depth: int = 0, name: bytes = b"") -> Node:
        """Return the node of a field. `name`: what stands before the value in an object."""
        if depth > MOST_DEPTH:
            raise SchemaError(f"{path}: the type has more than {MOST_DEPTH} levels.")
        plain = plain_type(data_type)
        made = replace(self._value(plain, path, depth), name=name, source=source)
        return with_dictionaries(data_type, made)

    def _value(self, data_type: pa.DataType, path: str, depth: int) -> Node:
        special = special_kind(data_type)
        if special == VARIANT:
            return self._variant(data_type, path, depth)
        if special is not None:
            raise SchemaError(f"{path}: a {special} cannot be written as JSON. {WHAT_INSTEAD[special]}.")
        found = storage(data_type, path)
        node = Node(found.op, path, arg=found.arg)
        make = _VALUES.get(kind_of(data_type, path))
        return node if make is None else make(self, node, data_type, depth)

    def struct(self, node: Node, data_type: pa.DataType, depth: int) -> Node:
        """Return the node of an object."""
        how = WITHOUT_NULLS if self.options.ignore_null_fields else WITH_NULLS
        children = []
        for number in range(data_type.num_fields):
            of = data_type.field(number)
            name = b"," + quoted(of.name) + b":"
            children.append(self.node(of.type, f"{node.path}.{of.name}", number, depth + 1, name))
        return replace(node, how=how, children=tuple(children))

    def list(self, node: Node, data_type: pa.DataType, depth: int) -> Node:
        """Return the node of an array."""
        return replace(node, children=(self.node(list_field(data_type).type, f"{node.path}.element", depth=depth + 1),))

    def map(self, node: Node, data_type: pa.DataType, depth: int) -> Node:
        """Return the node of an object with the keys of a map."""
        value = self.node(data_type.item_type, f"{node.path}.value", depth=depth + 1)
        return replace(node, children=(self._key(data_type, node.path, depth), value))

    def decimal(self, node: Node, data_type: pa.DataType, _depth: int) -> Node:
        """Return the node of a number with its scale."""
        if not -200 <= data_type.scale <= 100:
            raise SchemaError(f"{node.path}: the scale of {data_type} must be from -200 to 100.")
        return replace(node, other=data_type.scale)

    def _variant(self, data_type: pa.DataType, path: str, depth: int) -> Node:
        fields = [data_type.field(number) for number in range(data_type.num_fields)]
        places = {of.name: number for number, of in enumerate(fields)}
        if places.keys() != {"value", "metadata"} or not all(_is_bytes(of.type) for of in fields):
            raise SchemaError(
                f"{path}: a variant must be a struct of value and metadata, both binary, not {data_type}."
            )
        parts = tuple(
            self.node(fields[places[name]].type, path, places[name], depth + 1) for name in ("value", "metadata")
        )
        zone = self.options.time_zone or self.options.zone_of_variants
        table = Zone(b"", 0) if zone is None else zone_table(zone)
        reasons = {
            NO_ZONE: f"{ZONE_IS_MISSING} Set {path.partition('.')[0]}.json.timeZone",
        }
        return Node(
            Op.VARIANT,
            path,
            children=parts,
            arg=PER_SECOND["us"],
            other=table.repeats_from,
            extra=table.changes,
            reasons=reasons,
        )

    def _key(self, data_type: pa.DataType, path: str, depth: int) -> Node:
        key = plain_type(data_type.key_type)
        if kind_of(key, f"{path}.key") not in _KEYS:
            raise SchemaError(
                f"{path}.key: keys of the Arrow type {key} have no fixed form in JSON (to_json prints internal"
                " numbers or addresses). Cast the keys to strings before."
            )
        return self.node(data_type.key_type, f"{path}.key", depth=depth + 1)


# ---- dates and times -----------------------------------------------------------------------------------------------


def _date(_maker: _Maker, node: Node, data_type: pa.DataType, _depth: int) -> Node:
    return replace(node, how=How.DATE, arg=86_400_000 if pat.is_date64(data_type) else 1)


def _timestamp(maker: _Maker, node: Node, data_type: pa.DataType, _depth: int) -> Node:
    zone = Zone(b"", 0)
    if data_type.tz:
        zone = zone_table(maker.options.time_zone or data_type.tz)
    reasons = {OUT_OF_RANGE: "the timestamp is a million years or more away"}
    return replace(
        node,
        how=How.TIMESTAMP,
        arg=PER_SECOND[data_type.unit],
        other=zone.repeats_from,
        extra=zone.changes,
        reasons=reasons,
    )


def _time(_maker: _Maker, node: Node, data_type: pa.DataType, _depth: int) -> Node:
    reasons = {OUT_OF_RANGE: "the time of day is below 0 or not below 24 hours"}
    return replace(node, how=How.TIME, arg=PER_SECOND[data_type.unit], reasons=reasons)


def _interval(_maker: _Maker, node: Node, data_type: pa.DataType, _depth: int) -> Node:
    return replace(node, how=How.INTERVAL, arg=PER_SECOND[data_type.unit])


_VALUES: Final[Mapping[Kind, Callable[[_Maker, Node, pa.DataType, int], Node]]] = {
    Kind.DECIMAL: _Maker.decimal,
    Kind.DATE: _date,
    Kind.TIMESTAMP: _timestamp,
    Kind.TIME: _time,
    Kind.DURATION: _interval,
    Kind.STRUCT: _Maker.struct,
    Kind.LIST: _Maker.list,
    Kind.MAP: _Maker.map,
}
"""The kinds whose values are not simply printed."""
_KEYS: Final = (Kind.TEXT, Kind.BOOLEAN, Kind.INTEGER, Kind.FLOATING, Kind.DECIMAL)
"""Keys of maps that have a fixed form."""
