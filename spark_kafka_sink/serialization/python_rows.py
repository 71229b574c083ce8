"""The twin of the kernel's emitters in plain Python, for installations without the kernel: the same bytes, slowly. Here
for Avro and JSON, and the values of all formats.

An array becomes a list of raw values: integers for times, decimals without their scale, bytes for text, tuples for
structs, lists, and lists of pairs for maps. A writer appends one such value to an output. No state; any thread.
"""

from __future__ import annotations

import base64
import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_EVEN, ROUND_UP, Context, Decimal
from functools import lru_cache
from math import isfinite
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from spark_kafka_sink.record.arrow import as_binary
from spark_kafka_sink.serialization.plan import (
    AS_BYTES,
    FINITE,
    INEXACT,
    IS_NULL,
    KIND_OF_OPS,
    NO_SYMBOL,
    NO_ZONE,
    NOTHING,
    OF_SIZE,
    OUT_OF_RANGE,
    REASONS,
    REQUIRED,
    SECOND,
    SYMBOL,
    TOO_LARGE,
    UNION,
    UNSIZED,
    WITHOUT_NULLS,
    WRONG_SIZE,
    How,
    Kind,
    Node,
    Op,
    plain_array,
)
from spark_kafka_sink.serialization.time_zones import FOUR_CENTURIES
from spark_kafka_sink.serialization.variant import NotReadable, Of, append_json

Write = Callable[[bytearray, Any], None]
"""Appends a value to an output. Raises BadValue."""

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class BadValue(Exception):  # noqa: N818  not an error of the caller
    """A value that its node does not allow."""

    def __init__(self, node: Node, code: int) -> None:
        super().__init__(node.path)
        self.node = node
        self.reason = node.reasons.get(code) or REASONS[code]


# ---- raw values ----------------------------------------------------------------------------------------------------


def raw_values(node: Node, column: pa.Array) -> list[Any]:
    """Return a raw value for each row, None for a null."""
    column = plain_array(column)
    if node.op is Op.DICT:
        return _raw_entries(node, column)
    return _RAW.get(KIND_OF_OPS[node.op], _raw_numbers)(node, column)


def _raw_numbers(_node: Node, column: pa.Array) -> list[Any]:
    if pa.types.is_boolean(column.type) or pa.types.is_integer(column.type):
        return list(column.to_pylist())
    width = column.type.bit_width
    return list(column.view(pa.int32() if width == 32 else pa.int64()).to_pylist())


def _raw_floats(node: Node, column: pa.Array) -> list[Any]:
    if node.op is not Op.F16:
        return list(column.to_pylist())
    bits = column.view(pa.uint16()).to_pylist()
    return [None if half is None else struct.unpack("<e", struct.pack("<H", half))[0] for half in bits]


def _raw_nulls(_node: Node, column: pa.Array) -> list[Any]:
    return [None] * len(column)


def _raw_bytes(node: Node, column: pa.Array) -> list[Any]:
    return list(as_binary(column, node.path).to_pylist())


def _raw_decimals(node: Node, column: pa.Array) -> list[Any]:
    data, width = column.buffers()[1], node.arg
    return [
        int.from_bytes(data[(column.offset + row) * width : (column.offset + row + 1) * width], "little", signed=True)
        if is_valid
        else None
        for row, is_valid in enumerate(column.is_valid().to_pylist())
    ]


def _raw_structs(node: Node, column: pa.Array) -> list[Any]:
    nothing = [None] * len(column)
    children = [
        raw_values(child, column.field(child.source)) if child.source >= 0 else nothing for child in node.children
    ]
    rows = zip(*children, strict=True) if children else [()] * len(column)
    return [row if is_valid else None for row, is_valid in zip(rows, column.is_valid().to_pylist(), strict=True)]


def _bounds(node: Node, column: pa.Array) -> list[int]:
    """Return where the elements of each row begin, and where the last end."""
    if node.op is Op.LIST_FIXED:
        return [(column.offset + row) * node.arg for row in range(len(column) + 1)]
    return list(column.offsets.to_pylist()) if len(column) else [0]


def _raw_lists(node: Node, column: pa.Array) -> list[Any]:
    bounds = _bounds(node, column)
    first = bounds[0]
    own = column.values.slice(first, bounds[-1] - first)  # not those of other slices
    if node.op is Op.MAP:
        keys, values = (raw_values(child, own.field(at)) for at, child in enumerate(node.children))
        elements: list[Any] = list(zip(keys, values, strict=True))
    else:
        elements = raw_values(node.children[0], own)
    places = [bound - first for bound in bounds]
    valid = column.is_valid().to_pylist()
    return [elements[places[row] : places[row + 1]] if is_valid else None for row, is_valid in enumerate(valid)]


def _raw_entries(node: Node, column: pa.Array) -> list[Any]:
    entries = raw_values(node.children[0], column.dictionary)
    return [None if index is None else entries[index] for index in column.indices.to_pylist()]


_RAW: Final[Mapping[Kind, Callable[[Node, pa.Array], list[Any]]]] = {
    Kind.NULL: _raw_nulls,
    Kind.FLOATING: _raw_floats,
    Kind.TEXT: _raw_bytes,
    Kind.BYTES: _raw_bytes,
    Kind.DECIMAL: _raw_decimals,
    Kind.STRUCT: _raw_structs,
    Kind.VARIANT: _raw_structs,
    Kind.LIST: _raw_lists,
    Kind.MAP: _raw_lists,
}


# ---- Avro ----------------------------------------------------------------------------------------------------------


def _long(number: int) -> bytes:
    zigzag = (number << 1) ^ (number >> 63)
    made = bytearray()
    while zigzag >= 0x80:
        made.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*made, zigzag])


def avro_writer(node: Node) -> Write:
    """Return what writes a value or null, with the number of its branch if it stands in a union."""
    if node.op is Op.DICT:
        return avro_writer(replaced_null(node))
    write = _AVRO[KIND_OF_OPS[node.op]](node)
    branch = b"" if node.value_branch < 0 else _long(node.value_branch)

    def written(output: bytearray, value: Any) -> None:
        if value is not None:
            output += branch
            write(output, value)
        elif node.null_branch >= 0:
            output += _long(node.null_branch)
        elif node.op is not Op.ABSENT or node.how != NOTHING:
            raise BadValue(node, IS_NULL)

    return written


def replaced_null(node: Node) -> Node:
    """Return the node of a dictionary's values, as one of values without a dictionary."""
    while node.op is Op.DICT:
        node = node.children[0]
    return node


def _scaled(node: Node, value: int) -> int:
    """Return a time in the schema's unit."""
    if node.how == How.MULTIPLIED:
        return value * node.arg
    if node.how == How.EXACTLY_DIVIDED and value % node.arg:
        raise BadValue(node, INEXACT)
    return value // node.arg


def _avro_integer(node: Node) -> Write:
    is_scaled = node.how != How.PLAIN
    least, most = (-(1 << 31), (1 << 31) - 1) if is_scaled and node.other else (_LEAST, _MOST)

    def write(output: bytearray, value: int) -> None:
        number = _scaled(node, value) if is_scaled else value
        if not least <= number <= most:
            raise BadValue(node, OUT_OF_RANGE)
        output += _long(number)

    return write


def _avro_float(node: Node) -> Write:
    layout = "<d" if node.op is Op.F64 else "<f"
    return lambda output, value: output.extend(struct.pack(layout, value))


def _symbols(extra: bytes) -> dict[bytes, int]:
    symbols: dict[bytes, int] = {}
    at = 0
    while at < len(extra):
        (size,) = struct.unpack_from("<i", extra, at)
        symbols.setdefault(extra[at + 4 : at + 4 + size], len(symbols))
        at += 4 + size
    return symbols


def _avro_bytes(node: Node) -> Write:
    symbols = _symbols(node.extra) if node.how == SYMBOL else {}

    def write(output: bytearray, value: bytes) -> None:
        if node.how == SYMBOL:
            if value not in symbols:
                raise BadValue(node, NO_SYMBOL)
            output += _long(symbols[value])
            return
        if node.how == OF_SIZE and len(value) != node.other:
            raise BadValue(node, WRONG_SIZE)
        if node.how not in (OF_SIZE, UNSIZED):
            output += _long(len(value))
        output += value

    return write


def _avro_decimal(node: Node) -> Write:
    limit = int.from_bytes(node.extra, "little")

    def write(output: bytearray, value: int) -> None:
        size = node.other
        if abs(value) >= limit:  # readers would round it
            raise BadValue(node, TOO_LARGE)
        if node.how == AS_BYTES:
            size = (value if value >= 0 else ~value).bit_length() // 8 + 1
            output += _long(size)
        try:
            output += value.to_bytes(size, "big", signed=True)
        except OverflowError:
            raise BadValue(node, TOO_LARGE) from None

    return write


def _avro_struct(node: Node) -> Write:
    writers = [avro_writer(child) for child in node.children]

    def write(output: bytearray, value: tuple[Any, ...]) -> None:
        for one, part in zip(writers, value, strict=True):
            one(output, part)

    def write_member(output: bytearray, value: tuple[Any, ...]) -> None:
        found = [place for place, part in enumerate(value) if part is not None]
        if len(found) > 1:
            raise BadValue(node.children[found[1]], SECOND)
        if found:
            writers[found[0]](output, value[found[0]])
        elif node.null_branch < 0:
            raise BadValue(node, IS_NULL)
        else:
            output += _long(node.null_branch)

    return write_member if node.how == UNION else write


def _avro_list(node: Node) -> Write:
    (write_element,) = [avro_writer(child) for child in node.children]

    def write(output: bytearray, value: list[Any]) -> None:
        output += _long(len(value)) if value else b""
        for element in value:
            write_element(output, element)
        output.append(0)

    return write


def _avro_map(node: Node) -> Write:
    write_key, write_value = (avro_writer(child) for child in node.children)

    def write(output: bytearray, value: list[tuple[Any, Any]]) -> None:
        output += _long(len(value)) if value else b""
        for key, part in value:
            write_key(output, key)
            write_value(output, part)
        output.append(0)

    return write


def _nothing(node: Node) -> Write:
    def write(_output: bytearray, _value: Any) -> None:
        raise AssertionError(f"{node.path} has a value, and its type has none")

    return write


_AVRO: Final[Mapping[Kind, Callable[[Node], Write]]] = {
    Kind.NULL: _nothing,
    Kind.BOOLEAN: lambda _: lambda output, value: output.append(value),
    Kind.INTEGER: _avro_integer,
    Kind.FLOATING: _avro_float,
    Kind.TEXT: _avro_bytes,
    Kind.BYTES: _avro_bytes,
    Kind.DECIMAL: _avro_decimal,
    Kind.STRUCT: _avro_struct,
    Kind.LIST: _avro_list,
    Kind.MAP: _avro_map,
}


# ---- JSON ----------------------------------------------------------------------------------------------------------

_PLAIN_TEXT: Final = re.compile(rb'[^\x00-\x1f"\\\x80-\xff]*')
_HALF_OF_A_PAIR: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
_ESCAPES: Final = str.maketrans(
    {
        **{chr(code): f"\\u{code:04X}" for code in range(32)},
        '"': '\\"',
        "\\": r"\\",
        "\b": r"\b",
        "\t": r"\t",
        "\n": r"\n",
        "\f": r"\f",
        "\r": r"\r",
    }
)


def json_string(text: bytes) -> bytes:
    """Return a string as JSON, with U+FFFD for bytes that are no UTF-8: as many as Java's decoder writes."""
    if not _PLAIN_TEXT.fullmatch(text):
        whole = _HALF_OF_A_PAIR.sub("\ufffd".encode(), text)
        text = whole.decode("utf-8", "replace").translate(_ESCAPES).encode()
    return b'"' + text + b'"'


def json_writer(node: Node) -> Write:
    """Return what writes a value or null."""
    write = json_writer(node.children[0]) if node.op is Op.DICT else _JSON[KIND_OF_OPS[node.op]](node)

    def written(output: bytearray, value: Any) -> None:
        if value is None:
            if node.null_branch == REQUIRED:
                raise BadValue(node, IS_NULL)
            output += b"null"
        else:
            write(output, value)

    return written


def _texted(text_of: Callable[[Node, Any], str]) -> Callable[[Node], Write]:
    return lambda node: lambda output, value: output.extend(text_of(node, value).encode())


def _integer_text(node: Node, value: int) -> str:
    if node.how == How.PLAIN:
        return str(value)
    return f'"{_TIMES[How(node.how)](node, value)}"'


def number_text(number: float, digits: Sequence[int], exponent: int) -> str:
    """Return Java's text of a number that is not 0: its digits, times 10 to the exponent."""
    sign = "-" if number < 0 else ""
    text = "".join(map(str, digits)).rstrip("0")
    exponent += len(digits) - len(text)
    point = len(text) + exponent
    if -3 < point <= 0:
        return f"{sign}0.{'0' * -point}{text}"
    if 0 < point <= 7:
        whole = text.ljust(point, "0")
        return f"{sign}{whole[:point]}.{whole[point:] or '0'}"
    return f"{sign}{text[0]}.{text[1:] or '0'}E{point - 1}"


def java_text(number: float, *, is_float: bool) -> str:
    """Return the text of a double or float as Java 19 and later print it, between quotes if JSON has no such number."""
    if number != number or number in (float("inf"), float("-inf")):
        return '"NaN"' if number != number else '"Infinity"' if number > 0 else '"-Infinity"'
    if number == 0:
        return "-0.0" if str(number)[0] == "-" else "0.0"
    shortest = _shortest_float(number) if is_float else Decimal(repr(number))
    _, digits, exponent = shortest.as_tuple()
    if len("".join(map(str, digits)).rstrip("0")) == 1:  # of two digits, the nearest may be another
        _, digits, exponent = _of_two_digits(number).as_tuple()
    return number_text(number, digits, int(exponent))


def _floating_text(node: Node, number: float) -> str:
    if node.how == FINITE and not isfinite(number):
        raise BadValue(node, OUT_OF_RANGE)
    return java_text(number, is_float=node.op is not Op.F64)


def _as_float(number: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return float("inf")


def _shortest_float(number: float) -> Decimal:
    """Return the nearest of the shortest numbers that lead back to a float. Below a power of two floats are denser, so
    there the one above it may be shorter than the nearest.
    """
    for digits in range(1, 9):
        for rounding in (ROUND_HALF_EVEN, ROUND_UP):
            found = Context(prec=digits, rounding=rounding).create_decimal_from_float(number)
            if _as_float(float(found)) == number:
                return found
    return Context(prec=9, rounding=ROUND_HALF_EVEN).create_decimal_from_float(number)


def _of_two_digits(number: float) -> Decimal:
    return Decimal(f"{Decimal(number):.1e}")


def decimal_text(node: Node, value: int) -> str:
    """Return BigDecimal.toString."""
    digits, scale = str(abs(value)), node.other
    sign, exponent = "-" if value < 0 else "", len(digits) - 1 - scale
    if scale == 0:
        return sign + digits
    if scale > 0 and exponent >= -6:
        digits = digits.rjust(scale + 1, "0")
        return f"{sign}{digits[:-scale]}.{digits[-scale:]}"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    power = f"E{exponent:+d}" if exponent else ""
    return f"{sign}{digits[0]}{fraction}{power}"


# ---- JSON: times ---------------------------------------------------------------------------------------------------

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAYS_OF_400_YEARS: Final = 146_097
_FURTHEST: Final = 1 << 45


def _date_text(days: int) -> str:
    """Return yyyy-MM-dd, with a sign before years that have more than four digits or are negative."""
    eras, rest = divmod(days, _DAYS_OF_400_YEARS)  # from 1970 to 2370, which datetime knows
    day = _EPOCH + timedelta(days=rest)
    year = day.year + 400 * eras
    sign = "-" if year < 0 else "+" if year > 9999 else ""
    return f"{sign}{abs(year):04d}-{day.month:02d}-{day.day:02d}"


def _clock_text(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _fraction_text(units: int, in_a_second: int) -> str:
    return "." + str(units).rjust(len(str(in_a_second)) - 1, "0").rstrip("0") if units else ""


@lru_cache(maxsize=16)
def _changes(extra: bytes) -> tuple[Sequence[int], Sequence[int]]:
    flat = array("q", extra)
    return flat[::2], flat[1::2]


def _zone_offset(node: Node, seconds: int) -> int:
    starts, offsets = _changes(node.extra)
    if seconds >= node.other:
        seconds = node.other - FOUR_CENTURIES + (seconds - node.other) % FOUR_CENTURIES
    return offsets[bisect_right(starts, seconds) - 1]


def _timestamp_text(node: Node, value: int) -> str:
    seconds, units = divmod(value, node.arg)
    if abs(seconds) > _FURTHEST:
        raise BadValue(node, OUT_OF_RANGE)
    offset = _zone_offset(node, seconds) if node.extra else 0
    days, of_day = divmod(seconds + offset, 86_400)
    text = f"{_date_text(days)}T{_clock_text(of_day)}.{units * 1000 // node.arg:03d}"
    return text + _offset_text(offset) if node.extra else text


def _offset_text(offset: int) -> str:
    if offset == 0:
        return "Z"
    clock = _clock_text(abs(offset))
    return ("-" if offset < 0 else "+") + (clock if offset % 60 else clock[:-3])


def _time_text(node: Node, value: int) -> str:
    if not 0 <= value < 86_400 * node.arg:
        raise BadValue(node, OUT_OF_RANGE)
    return _clock_text(value // node.arg) + _fraction_text(value % node.arg, node.arg)


def _interval_text(node: Node, value: int) -> str:
    seconds, units = divmod(abs(value), node.arg)
    days, of_day = divmod(seconds, 86_400)
    sign = "-" if value < 0 else ""
    return f"INTERVAL '{sign}{days} {_clock_text(of_day)}{_fraction_text(units, node.arg)}' DAY TO SECOND"


_TIMES: Final[Mapping[How, Callable[[Node, int], str]]] = {
    How.DATE: lambda node, value: _date_text(value // node.arg),
    How.TIMESTAMP: _timestamp_text,
    How.TIME: _time_text,
    How.INTERVAL: _interval_text,
}


# ---- JSON: variants, as Variant.toJson of Spark prints them ----------------------------------------------------------


def _plain_decimal(_node: Node, value: tuple[int, int]) -> str:
    """Return BigDecimal.toPlainString, without zeros at the end of the fraction."""
    number, scale = value
    digits = str(abs(number)).rjust(scale + 1, "0")
    whole, fraction = digits[: len(digits) - scale], digits[len(digits) - scale :].rstrip("0")
    return f"{'-' if number < 0 else ''}{whole}{'.' if fraction else ''}{fraction}"


def _local_text(_node: Node, micros: int, offset: int = 0) -> str:
    seconds, units = divmod(micros, 1_000_000)
    days, of_day = divmod(seconds + offset, 86_400)
    return f"{_date_text(days)} {_clock_text(of_day)}{_fraction_text(units, 1_000_000)}"


def _instant_text(node: Node, micros: int) -> str:
    if not node.extra:
        raise BadValue(node, NO_ZONE)
    offset = _zone_offset(node, micros // 1_000_000)
    minutes = abs(offset) // 60
    sign = "-" if offset < 0 and minutes else "+"
    return f"{_local_text(node, micros, offset)}{sign}{minutes // 60:02d}:{minutes % 60:02d}"


def _in_quotes(text_of: Callable[[Node, Any], str]) -> Callable[[Node, Any], bytes]:
    return lambda node, value: f'"{text_of(node, value)}"'.encode()


_VARIANTS: Final[Mapping[Of, Callable[[Node, Any], bytes]]] = {
    Of.NULL: lambda _, __: b"null",
    Of.TRUE: lambda _, __: b"true",
    Of.FALSE: lambda _, __: b"false",
    Of.INTEGER: lambda _, value: b"%d" % value,
    Of.DOUBLE: lambda _, value: java_text(value, is_float=False).encode(),
    Of.FLOAT: lambda _, value: java_text(value, is_float=True).encode(),
    Of.DECIMAL: lambda node, value: _plain_decimal(node, value).encode(),
    Of.DATE: _in_quotes(lambda _, value: _date_text(value)),
    Of.INSTANT: _in_quotes(_instant_text),
    Of.LOCAL: _in_quotes(_local_text),
    Of.BYTES: _in_quotes(lambda _, value: base64.b64encode(value).decode()),
    Of.TEXT: lambda _, value: json_string(value),
    Of.UUID: _in_quotes(lambda _, value: str(UUID(bytes=value))),
}


def _json_variant(node: Node) -> Write:
    def text(kind: Of, value: Any) -> bytes:
        return _VARIANTS[kind](node, value)

    def write(output: bytearray, value: tuple[bytes | None, bytes | None]) -> None:
        own, metadata = value
        try:
            append_json(output, own or b"", metadata or b"", text)
        except NotReadable as refusal:
            raise BadValue(node, refusal.code) from None

    return write


# ---- JSON: nested values -------------------------------------------------------------------------------------------


def _json_struct(node: Node) -> Write:
    parts = [(child.name, json_writer(child)) for child in node.children]
    is_left_out = [node.how == WITHOUT_NULLS and child.null_branch != REQUIRED for child in node.children]

    def write(output: bytearray, value: tuple[Any, ...]) -> None:
        start = len(output)
        for (name, write_part), left_out, part in zip(parts, is_left_out, value, strict=True):
            if part is not None or not left_out:
                output += name
                write_part(output, part)
        output[start : start + 1] = b"{"  # in place of the first name's comma
        output += b"}"

    return write


def _json_list(node: Node) -> Write:
    write_element = json_writer(node.children[0])

    def write(output: bytearray, value: list[Any]) -> None:
        output += b"["
        for place, element in enumerate(value):
            output += b"," if place else b""
            write_element(output, element)
        output += b"]"

    return write


def _json_map(node: Node) -> Write:
    key_node = node.children[0]
    write_key, write_value = (json_writer(child) for child in node.children)

    def write(output: bytearray, value: list[tuple[Any, Any]]) -> None:
        output += b"{"
        for place, (key, part) in enumerate(value):
            if key is None:
                raise BadValue(key_node, IS_NULL)
            output += b"," if place else b""
            text = bytearray()
            write_key(text, key)
            output += text if text.startswith(b'"') else b'"' + text + b'"'
            output += b":"
            write_value(output, part)
        output += b"}"

    return write


_JSON: Final[Mapping[Kind, Callable[[Node], Write]]] = {
    Kind.NULL: _nothing,
    Kind.BOOLEAN: _texted(lambda _, value: "true" if value else "false"),
    Kind.INTEGER: _texted(_integer_text),
    Kind.FLOATING: _texted(_floating_text),
    Kind.TEXT: lambda _: lambda output, value: output.extend(json_string(value)),
    Kind.BYTES: lambda _: lambda output, value: output.extend(b'"' + base64.b64encode(value) + b'"'),
    Kind.DECIMAL: _texted(decimal_text),
    Kind.STRUCT: _json_struct,
    Kind.VARIANT: _json_variant,
    Kind.LIST: _json_list,
    Kind.MAP: _json_map,
}
