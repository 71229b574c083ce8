"""Variants from a seed, with the JSON that Spark prints for them: an encoder of the binary form, for tests.

It is written for tests alone, from the public description of the format (Parquet, VariantEncoding.md): numbers wider
than they need be, names in any order, and names that no value has.
"""

from __future__ import annotations

import base64
import datetime
import random
import struct
import uuid
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pyarrow as pa
from support.generated_columns import random_double, random_text

from spark_kafka_sink.serialization.json_text import quoted

TYPE = pa.struct(
    [pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False, metadata={"variant": "true"})]
)
ZONE = "America/St_Johns"
EMPTY_NAMES = b"\x01\x00\x00"
_EPOCH = datetime.datetime(1970, 1, 1)
_US = datetime.timedelta(microseconds=1)


class Made(NamedTuple):
    """The bytes of a value, and its JSON."""

    value: bytes
    text: str


def primitive(number: int, content: bytes = b"") -> bytes:
    """Return a value of the primitive type with this number."""
    return bytes([number << 2]) + content


def array(members: Sequence[bytes], width: int = 1, *, is_large: bool = False) -> bytes:
    """Return an array with offsets of `width` bytes."""
    header = bytes([(is_large << 4 | (width - 1) << 2) | 3])
    return header + _count(members, is_large) + _offsets(members, width) + b"".join(members)


def obj(
    ids: Sequence[int], members: Sequence[bytes], width: int = 1, id_width: int = 1, *, is_large: bool = False
) -> bytes:
    """Return an object whose names have these numbers."""
    header = bytes([(is_large << 6 | (id_width - 1) << 4 | (width - 1) << 2) | 2])
    packed = b"".join(number.to_bytes(id_width, "little") for number in ids)
    return header + _count(members, is_large) + packed + _offsets(members, width) + b"".join(members)


def metadata(names: Sequence[str], width: int = 1) -> bytes:
    """Return metadata with these names."""
    packed = [name.encode() for name in names]
    return (
        bytes([(width - 1) << 6 | 1])
        + len(names).to_bytes(width, "little")
        + _offsets(packed, width)
        + b"".join(packed)
    )


def _count(members: Sequence[bytes], is_large: bool) -> bytes:
    return len(members).to_bytes(4 if is_large else 1, "little")


def _offsets(members: Sequence[bytes], width: int) -> bytes:
    places = [0]
    for member in members:
        places.append(places[-1] + len(member))
    return b"".join(place.to_bytes(width, "little") for place in places)


def string(text: str) -> str:
    """Return a JSON string."""
    return quoted(text).decode()


# ---- values of each kind -------------------------------------------------------------------------------------------


def _integer(rng: random.Random) -> Made:
    size = rng.choice((1, 2, 4, 8))
    number = rng.choice((0, 1, -1, -(1 << 8 * size - 1), (1 << 8 * size - 1) - 1, rng.randrange(-100, 100)))
    return Made(primitive({1: 3, 2: 4, 4: 5, 8: 6}[size], number.to_bytes(size, "little", signed=True)), str(number))


def _decimal(rng: random.Random) -> Made:
    kind, size, most = rng.choice(((8, 4, 9), (9, 8, 18), (10, 16, 38)))
    scale = rng.choice((0, 2, most, rng.randrange(most + 1)))
    digits = rng.randrange(most + 1)
    number = rng.choice((1, -1)) * rng.randrange(10**digits) // 10 ** rng.randrange(4) * rng.choice((1, 10, 100))
    number = number if abs(number) < 10**most else 0
    plain = f"{Decimal(number).scaleb(-scale, _WIDE):f}"
    text = plain.rstrip("0").rstrip(".") if "." in plain else plain
    content = bytes([scale]) + number.to_bytes(size, "little", signed=True)
    return Made(primitive(kind, content), "0" if number == 0 else text)


def _double(rng: random.Random) -> Made:
    number = float(rng.randrange(-1000, 1000)) / 8 if rng.random() < 0.7 else random_double(rng)
    return Made(primitive(7, struct.pack("<d", number)), _java(number))


def _float(rng: random.Random) -> Made:
    number = rng.randrange(-8000, 8000) / 8
    return Made(primitive(14, struct.pack("<f", number)), _java(number))


def _java(number: float) -> str:
    """Return the text of a double: its digits by Python's repr, its form by Double.toString's documentation."""
    if number != number or abs(number) == float("inf"):
        return '"NaN"' if number != number else '"Infinity"' if number > 0 else '"-Infinity"'
    if number == 0:
        return str(number)
    if abs(number) in (5e-324, 1e-323):
        return f"{'-' if number < 0 else ''}{'4.9E-324' if abs(number) == 5e-324 else '9.9E-324'}"
    sign, digits, _ = Decimal(repr(number)).normalize().as_tuple()
    power = Decimal(repr(number)).adjusted()
    shown = "".join(map(str, digits))
    minus = "-" if sign else ""
    if -3 <= power < 7:
        plain = f"{Decimal(repr(number)).normalize():f}"
        return plain if "." in plain else f"{plain}.0"
    return f"{minus}{shown[0]}.{shown[1:] or '0'}E{power}"


def _date(rng: random.Random) -> Made:
    day = datetime.date.fromordinal(rng.randint(1, datetime.date.max.toordinal()))
    return Made(primitive(11, struct.pack("<i", (day - _EPOCH.date()).days)), f'"{day.isoformat()}"')


def _moment(rng: random.Random) -> datetime.datetime:
    moment = datetime.datetime(rng.choice((2, 1883, 1969, 1970, 2024, 9998)), rng.randint(1, 12), rng.randint(1, 28))
    micros = rng.choice((0, 1, 500_000, rng.randrange(10**6)))
    return moment + datetime.timedelta(seconds=rng.randrange(86_400), microseconds=micros)


def _spelled(moment: datetime.datetime) -> str:
    fraction = f".{moment.microsecond:06d}".rstrip("0") if moment.microsecond else ""
    return f"{moment.replace(tzinfo=None).isoformat(' ', 'seconds')}{fraction}"


def _instant(rng: random.Random) -> Made:
    moment = _moment(rng)
    local = moment.replace(tzinfo=datetime.UTC).astimezone(ZoneInfo(ZONE))
    seconds = round((local.utcoffset() or datetime.timedelta()).total_seconds())
    offset = f"{'-' if seconds < 0 else '+'}{abs(seconds) // 3600:02d}:{abs(seconds) // 60 % 60:02d}"
    return Made(primitive(12, struct.pack("<q", (moment - _EPOCH) // _US)), f'"{_spelled(local)}{offset}"')


def _local(rng: random.Random) -> Made:
    moment = _moment(rng)
    return Made(primitive(13, struct.pack("<q", (moment - _EPOCH) // _US)), f'"{_spelled(moment)}"')


def _bytes(rng: random.Random) -> Made:
    content = rng.randbytes(rng.choice((0, 1, 2, 3, 40)))
    shown = base64.b64encode(content).decode()
    return Made(primitive(15, struct.pack("<I", len(content)) + content), f'"{shown}"')


def _text(rng: random.Random) -> Made:
    text = random_text(rng)
    content = text.encode()
    if len(content) < 64 and rng.random() < 0.8:
        return Made(bytes([len(content) << 2 | 1]) + content, string(text))
    return Made(primitive(16, struct.pack("<I", len(content)) + content), string(text))


def _uuid(rng: random.Random) -> Made:
    content = rng.randbytes(16)
    return Made(primitive(20, content), f'"{uuid.UUID(bytes=content)}"')


def _constant(rng: random.Random) -> Made:
    number = rng.randrange(3)
    return Made(primitive(number), ("null", "true", "false")[number])


_WIDE = Context(prec=60)
LEAVES: tuple[Callable[[random.Random], Made], ...] = (
    _constant,
    _integer,
    _decimal,
    _double,
    _float,
    _date,
    _instant,
    _local,
    _bytes,
    _text,
)
ALL_LEAVES = (*LEAVES, _uuid)
"""With the one that PySpark 4.2 does not read in Python."""


def random_variant(
    rng: random.Random, depth: int = 4, leaves: Sequence[Callable[[random.Random], Made]] = ALL_LEAVES
) -> tuple[bytes, bytes, str]:
    """Return value, metadata and JSON of a variant with at most `depth` levels of arrays and objects."""
    names = sorted({random_text(rng) for _ in range(rng.choice((3, 12, 300)))})
    rng.shuffle(names)
    width = rng.choice([size for size in (1, 2, 3, 4) if len("".join(names).encode()) < 1 << 8 * size])
    made = _value(rng, names, depth, leaves)
    return made.value, metadata(names, width), made.text


def _value(rng: random.Random, names: Sequence[str], depth: int, leaves: Any) -> Made:
    if depth == 0 or rng.random() < 0.3:
        made: Made = rng.choice(leaves)(rng)
        return made
    members = [_value(rng, names, depth - 1, leaves) for _ in range(rng.choice((0, 1, 3, 6)))]
    size = sum(len(member.value) for member in members)
    width = rng.choice([width for width in (1, 2, 3, 4) if size < 1 << 8 * width])
    values, is_large = [member.value for member in members], rng.random() < 0.3
    if rng.random() < 0.5:
        return Made(array(values, width, is_large=is_large), f"[{','.join(member.text for member in members)}]")
    ids = sorted(
        rng.sample(range(len(names)), min(len(members), len(names))), key=lambda number: names[number].encode()
    )
    id_width = rng.choice([width for width in (1, 2, 3, 4) if len(names) <= 1 << 8 * width])
    members, values = members[: len(ids)], values[: len(ids)]
    fields = [f"{string(names[number])}:{member.text}" for number, member in zip(ids, members, strict=True)]
    return Made(obj(ids, values, width, id_width, is_large=is_large), f"{{{','.join(fields)}}}")


def column_of(variants: Sequence[tuple[bytes, bytes] | None]) -> pa.Array:
    """Return variants as Spark hands them over."""
    rows = [None if each is None else {"value": each[0], "metadata": each[1]} for each in variants]
    return pa.array(rows, TYPE)
