"""The binary encoding of Spark's variant (Parquet, VariantEncoding.md), in plain Python: the twin of `_variant.c`.

A variant is two strings of bytes: the value, and the metadata, which has the names of all fields. Every read is checked
against their lengths, and no byte belongs to two values: a walk ends after as many steps as there are bytes. No state
but that of one walk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple

from spark_kafka_sink.serialization.plan import NOT_VARIANT, TOO_DEEP, UNKNOWN_VARIANT

MOST_NESTED: Final = 1000
"""Arrays and objects around a value: as many as Spark's parse_json takes."""
_VERSION: Final = 1
_LENGTH: Final = 4
"""Bytes of the length of text and bytes."""
_PRIMITIVE, _SHORT_TEXT, _OBJECT = range(3)
"""The lowest two bits of a value's first byte. 3 is an array."""


class Of(IntEnum):
    """What a value is, in the order of `_variant.h`."""

    NULL = 0
    TRUE = 1
    FALSE = 2
    INTEGER = 3
    DOUBLE = 4
    FLOAT = 5
    DECIMAL = 6
    DATE = 7
    INSTANT = 8
    LOCAL = 9
    BYTES = 10
    TEXT = 11
    UUID = 12


class NotReadable(Exception):  # noqa: N818  not an error of the caller
    """A variant that cannot be read. `code`: why, as in plan.py."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _signed(of: bytes) -> int:
    return int.from_bytes(of, "little", signed=True)


def _nothing(_of: bytes) -> None:
    return None


def _float_of(layout: str) -> Callable[[bytes], Any]:
    return lambda of: struct.unpack(layout, of)[0]


def _decimal(of: bytes) -> tuple[int, int]:
    """Return the number without its point, and the digits after it."""
    most = {5: 9, 9: 18, 17: 38}[len(of)]
    number, scale = _signed(of[1:]), of[0]
    if scale > most or abs(number) >= 10**most:
        raise NotReadable(NOT_VARIANT)
    return number, scale


_PRIMITIVES: Final[dict[int, tuple[Of, int, Callable[[bytes], Any]]]] = {
    0: (Of.NULL, 0, _nothing),
    1: (Of.TRUE, 0, _nothing),
    2: (Of.FALSE, 0, _nothing),
    3: (Of.INTEGER, 1, _signed),
    4: (Of.INTEGER, 2, _signed),
    5: (Of.INTEGER, 4, _signed),
    6: (Of.INTEGER, 8, _signed),
    7: (Of.DOUBLE, 8, _float_of("<d")),
    8: (Of.DECIMAL, 5, _decimal),
    9: (Of.DECIMAL, 9, _decimal),
    10: (Of.DECIMAL, 17, _decimal),
    11: (Of.DATE, 4, _signed),
    12: (Of.INSTANT, 8, _signed),
    13: (Of.LOCAL, 8, _signed),
    14: (Of.FLOAT, 4, _float_of("<f")),
    15: (Of.BYTES, _LENGTH, bytes),
    16: (Of.TEXT, _LENGTH, bytes),
    20: (Of.UUID, 16, bytes),
}
"""The upper six bits of a primitive's first byte → what it is, the bytes after the first, and what they say."""


class _Nested(NamedTuple):
    """An array or object: how many members it has, and where it says what they are."""

    members: int
    ids: int
    id_size: int
    offsets: int
    offset_size: int
    data: int
    is_object: bool


class _Walk:
    def __init__(self, value: bytes, metadata: bytes) -> None:
        """Raise NotReadable for metadata of another version."""
        self._value, self._metadata = value, metadata
        self._left = len(value)
        """Bytes of the value that belong to no value that was read yet."""
        if not metadata or metadata[0] & 15 != _VERSION:
            raise NotReadable(NOT_VARIANT)

    def part(self, at: int) -> tuple[Of, Any] | _Nested:
        """Return the value at a place. Raises NotReadable."""
        if at >= len(self._value):
            raise NotReadable(NOT_VARIANT)
        basic, bits = self._value[at] & 3, self._value[at] >> 2
        if basic == _PRIMITIVE:
            return self._primitive(at, bits)
        if basic == _SHORT_TEXT:
            return Of.TEXT, self._taken(at, 1, bits)
        return self._nested(at, bits, is_object=basic == _OBJECT)

    def place(self, of: _Nested, index: int) -> int:
        """Return where a member begins."""
        return of.data + self._unsigned(of.offsets + index * of.offset_size, of.offset_size)

    def name(self, of: _Nested, index: int) -> bytes:
        """Return the name of an object's member. Raises NotReadable."""
        names = self._metadata
        number = self._unsigned(of.ids + index * of.id_size, of.id_size)
        width = (names[0] >> 6) + 1
        count = int.from_bytes(names[1 : 1 + width], "little")
        first = 1 + (count + 2) * width
        if len(names) < 1 + width or number >= count or first > len(names):
            raise NotReadable(NOT_VARIANT)
        start, end = (
            int.from_bytes(names[1 + place * width :][:width], "little") for place in (number + 1, number + 2)
        )
        if not start <= end <= len(names) - first:
            raise NotReadable(NOT_VARIANT)
        return names[first + start : first + end]

    def _unsigned(self, at: int, size: int) -> int:
        return int.from_bytes(self._value[at : at + size], "little")

    def _taken(self, at: int, before: int, size: int) -> bytes:
        """Take the bytes of one value: `before` and `size` more. Return the latter."""
        if before + size > min(len(self._value) - at, self._left):
            raise NotReadable(NOT_VARIANT)
        self._left -= before + size
        return self._value[at + before : at + before + size]

    def _primitive(self, at: int, number: int) -> tuple[Of, Any]:
        known = _PRIMITIVES.get(number)
        if known is None:
            raise NotReadable(UNKNOWN_VARIANT)
        kind, size, said = known
        if size > len(self._value) - at - 1:
            raise NotReadable(NOT_VARIANT)
        if kind in (Of.BYTES, Of.TEXT):
            return kind, self._taken(at, 1 + _LENGTH, self._unsigned(at + 1, _LENGTH))
        return kind, said(self._taken(at, 1, size))

    def _nested(self, at: int, bits: int, *, is_object: bool) -> _Nested:
        length = 4 if bits >> (4 if is_object else 2) & 1 else 1
        if length > len(self._value) - at - 1:
            raise NotReadable(NOT_VARIANT)
        members = self._unsigned(at + 1, length)
        ids, id_size = at + 1 + length, (bits >> 2 & 3) + 1 if is_object else 0
        offsets, offset_size = ids + members * id_size, (bits & 3) + 1
        data = offsets + (members + 1) * offset_size
        self._taken(at, 0, data - at)
        return _Nested(members, ids, id_size, offsets, offset_size, data, is_object)


def append_json(output: bytearray, value: bytes, metadata: bytes, text: Callable[[Of, Any], bytes]) -> None:
    """Append a variant as JSON. `text`: of a value that is neither array nor object, and of a name, which is Of.TEXT.

    `text` gets an int for INTEGER, DATE (days), INSTANT and LOCAL (microseconds), a float for DOUBLE and FLOAT, bytes
    for BYTES, TEXT (UTF-8) and UUID, and a pair for DECIMAL: the number without its point, and the digits after it.
    Raises NotReadable.
    """
    walk = _Walk(value, metadata)
    around: list[tuple[_Nested, int]] = []
    """The arrays and objects around the place, each with the number of its next member."""
    place = 0
    while True:
        part = walk.part(place)
        if isinstance(part, _Nested):
            if len(around) == MOST_NESTED:
                raise NotReadable(TOO_DEEP)
            output += b"{" if part.is_object else b"["
            around.append((part, 0))
        else:
            output += text(*part)
        while around and around[-1][1] == around[-1][0].members:
            output += b"}" if around.pop()[0].is_object else b"]"
        if not around:
            return
        nested, index = around.pop()
        output += b"," if index else b""
        if nested.is_object:
            output += text(Of.TEXT, walk.name(nested, index)) + b":"
        place = walk.place(nested, index)
        around.append((nested, index + 1))
