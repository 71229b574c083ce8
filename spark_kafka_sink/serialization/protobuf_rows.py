"""The twin of the kernel's emitter of Protobuf in plain Python: the same bytes, slowly. See python_rows.py."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from spark_kafka_sink.serialization.message_indexes import varint
from spark_kafka_sink.serialization.plan import (
    AS_DOUBLE,
    BITS_32,
    BITS_64,
    INEXACT,
    INSTANT,
    IS_NULL,
    KIND_OF_OPS,
    NO_SYMBOL,
    NOT_UTF8,
    OUT_OF_RANGE,
    PACKED,
    REQUIRED,
    SECOND,
    SPAN,
    SYMBOL,
    VARINT,
    WITHOUT_DEFAULT,
    WRAPPED,
    ZIGZAG,
    Kind,
    Node,
    Op,
)
from spark_kafka_sink.serialization.python_rows import BadValue, Write, decimal_text, replaced_null

_SECONDS: Final = {INSTANT: (-62_135_596_800, 253_402_300_799), SPAN: (-315_576_000_000, 315_576_000_000)}
_NANOS: Final = 1_000_000_000
_MASK: Final = (1 << 64) - 1

Content = Callable[[Any], bytes]
"""Returns the bytes of a value. Raises BadValue."""


def protobuf_writer(node: Node) -> Write:
    """Return what writes the message of a struct, without a length."""
    content = _message(replaced_null(node))
    return lambda output, value: output.extend(content(value))


def _field(node: Node) -> Content:
    """Return what gives the bytes of a field with its tag; none for a null that is left out."""
    value_node = replaced_null(node)
    kind = KIND_OF_OPS[value_node.op]
    written = _REPEATED[kind](value_node) if kind in _REPEATED else _tagged(value_node, _CONTENTS[kind](value_node))

    def field(value: Any) -> bytes:
        if value is not None:
            return written(value)
        if node.null_branch == REQUIRED:
            raise BadValue(node, IS_NULL)
        return b""

    return field


def _tagged(node: Node, content: Content) -> Content:
    """Return what gives a value with its tag; none for a 0 that is left out."""
    if node.value_branch == WRAPPED:
        outer, inner = node.name[:-1], node.name[-1:]
        return lambda value: outer + _sized(_unless_default(inner, content(value)))
    if node.value_branch == WITHOUT_DEFAULT:
        return lambda value: _unless_default(node.name, content(value))
    return lambda value: node.name + content(value)


def _unless_default(tag: bytes, content: bytes) -> bytes:
    """Return tag and content. If no bit of the content is set, the value is 0 or empty: return nothing."""
    return tag + content if any(content) else b""


def _sized(content: bytes) -> bytes:
    return varint(len(content)) + content


# ---- values without their tag --------------------------------------------------------------------------------------


def _integer(node: Node) -> Content:
    if node.how in _SECONDS:
        return lambda value: _seconds(node, value)
    runs = tuple(struct.iter_unpack("<qq", node.extra))

    def content(value: int) -> bytes:
        if node.arg > 1:
            if value % node.arg:
                raise BadValue(node, INEXACT)
            value //= node.arg
        value *= max(node.other, 1)
        if runs and not any(least <= value <= most for least, most in runs):
            raise BadValue(node, OUT_OF_RANGE)
        return _NUMBERS[node.how](value)

    return content


_NUMBERS: Final[Mapping[int, Callable[[int], bytes]]] = {
    VARINT: varint,
    ZIGZAG: lambda number: varint((number << 1) ^ (number >> 63)),
    BITS_32: lambda number: (number & _MASK >> 32).to_bytes(4, "little"),
    BITS_64: lambda number: (number & _MASK).to_bytes(8, "little"),
}


def _seconds(node: Node, value: int) -> bytes:
    """Return the message Timestamp or Duration with its length."""
    least, most = _SECONDS[node.how]
    seconds, units = divmod(abs(value), node.arg) if node.how == SPAN else divmod(value, node.arg)
    sign = -1 if node.how == SPAN and value < 0 else 1
    if not least <= sign * seconds <= most:
        raise BadValue(node, OUT_OF_RANGE)
    numbers = (sign * seconds, sign * units * (_NANOS // node.arg))
    parts = [bytes([tag << 3]) + varint(number) for tag, number in enumerate(numbers, 1) if number]
    return _sized(b"".join(parts))


def _floating(node: Node) -> Content:
    layout = "<d" if node.op is Op.F64 or node.how == AS_DOUBLE else "<f"
    return lambda value: struct.pack(layout, value)


def _text(node: Node) -> Content:
    numbers = dict(_pairs(node.extra)) if node.how == SYMBOL else {}

    def content(value: bytes) -> bytes:
        if node.how == SYMBOL:
            if value not in numbers:
                raise BadValue(node, NO_SYMBOL)
            return numbers[value]
        try:
            value.decode()
        except UnicodeDecodeError:
            raise BadValue(node, NOT_UTF8) from None
        return _sized(value)

    return content


def _pairs(extra: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield each name of an enum with its number, as they stand in `extra`."""
    entries: list[bytes] = []
    at = 0
    while at < len(extra):
        (size,) = struct.unpack_from("<i", extra, at)
        entries.append(extra[at + 4 : at + 4 + size])
        at += 4 + size
    return zip(entries[::2], entries[1::2], strict=True)


def _message(node: Node) -> Content:
    fields = [(child, _field(child)) for child in node.children]

    def content(value: tuple[Any, ...]) -> bytes:
        made: list[bytes] = []
        chosen: set[int] = set()
        for (child, field), part in zip(fields, value, strict=True):
            made.append(field(part))
            if child.null_branch >= 0 and part is not None:
                if child.null_branch in chosen:
                    raise BadValue(child, SECOND)
                chosen.add(child.null_branch)
        return b"".join(made)

    return content


_CONTENTS: Final[Mapping[Kind, Callable[[Node], Content]]] = {
    Kind.NULL: lambda _: lambda _value: b"",
    Kind.BOOLEAN: lambda _: lambda value: bytes([value]),
    Kind.INTEGER: _integer,
    Kind.FLOATING: _floating,
    Kind.TEXT: _text,
    Kind.BYTES: lambda _: _sized,
    Kind.DECIMAL: lambda node: lambda value: _sized(decimal_text(node, value).encode()),
    Kind.STRUCT: lambda node: _then_sized(_message(node)),
}


def _then_sized(content: Content) -> Content:
    return lambda value: _sized(content(value))


# ---- lists and maps ------------------------------------------------------------------------------------------------


def _list(node: Node) -> Content:
    (element,) = [_field(child) for child in node.children]
    if node.how != PACKED:
        return lambda value: b"".join(map(element, value))
    return lambda value: node.name + _sized(b"".join(map(element, value))) if value else b""


def _map(node: Node) -> Content:
    key, part = (_field(child) for child in node.children)
    return lambda value: b"".join(node.name + _sized(key(name) + part(each)) for name, each in value)


_REPEATED: Final[Mapping[Kind, Callable[[Node], Content]]] = {Kind.LIST: _list, Kind.MAP: _map}
