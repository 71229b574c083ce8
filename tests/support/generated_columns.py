"""Arrow types and arrays from a seed: nested, sliced at every level, with dictionaries, views and nulls.

Each array is built from the leaves up, so that every level has its own slice, its own nulls, and data under the nulls
of the level above.
"""

from __future__ import annotations

import random
import string
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

LEAVES: tuple[pa.DataType, ...] = (
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.binary(5),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
    pa.timestamp("ms", "America/New_York"),
    pa.timestamp("s"),
    pa.time64("us"),
    pa.time32("ms"),
    pa.duration("us"),
    pa.decimal128(9, 2),
    pa.decimal128(38, 10),
    pa.decimal128(18, 0),
    pa.null(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.uint16(), pa.large_string()),
    pa.dictionary(pa.int32(), pa.int64()),
    pa.dictionary(pa.int64(), pa.decimal128(5, 1)),
)
PARQUET_LEAVES: tuple[pa.DataType, ...] = (
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
    pa.decimal128(9, 2),
    pa.decimal128(38, 10),
    pa.decimal128(18, 0),
)
"""Those that Spark reads from parquet files."""
KEYS: tuple[pa.DataType, ...] = (pa.string(), pa.large_string(), pa.string_view())

Value = Callable[[random.Random, pa.DataType], Any]

_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""0001-01-01 and 9999-12-31."""
_TEXT = string.ascii_letters + string.digits + ' _-/"\\\n\t\x01\x1f\x7fäß€é\u2028😀漢'


def random_type(rng: random.Random, depth: int, *, leaves: Sequence[pa.DataType] = LEAVES) -> pa.DataType:
    """Return a leaf, or a nested type of at most `depth` levels."""
    kinds: Sequence[Callable[[], pa.DataType]] = (
        lambda: random_struct(rng, depth - 1, leaves=leaves),
        lambda: pa.list_(_field(rng, "element", depth, leaves)),
        lambda: pa.large_list(_field(rng, "element", depth, leaves)),
        lambda: pa.list_(_field(rng, "element", depth, leaves), rng.randrange(4)),
        lambda: pa.map_(rng.choice(KEYS), _field(rng, "value", depth, leaves)),
    )
    if depth <= 0 or rng.random() < 0.6:
        return rng.choice(leaves)
    return rng.choice(kinds)()


def _field(rng: random.Random, name: str, depth: int, leaves: Sequence[pa.DataType]) -> pa.Field:
    data_type = random_type(rng, depth - 1, leaves=leaves)
    return pa.field(name, data_type, pat.is_null(data_type) or rng.random() < 0.7)


def random_struct(
    rng: random.Random, depth: int, *, leaves: Sequence[pa.DataType] = LEAVES, least: int = 0
) -> pa.DataType:
    """Return a struct of up to seven fields, `least` at least."""
    count = rng.randint(least, 7)
    return pa.struct([_field(rng, f"f{number}", depth + 1, leaves) for number in range(count)])


# ---- arrays --------------------------------------------------------------------------------------------------------


def random_array(
    rng: random.Random, data_type: pa.DataType, rows: int, *, nullable: bool = True, value: Value | None = None
) -> pa.Array:
    """Return an array of a type: a slice of a longer one, more often than not. `value` returns a value of a leaf."""
    before, after = (rng.randrange(4), rng.randrange(4)) if rng.random() < 0.6 else (0, 0)
    made = _array(rng, data_type, before + rows + after, nullable and rng.random() < 0.8, value or random_value)
    return made.slice(before, rows)


def _mask(rng: random.Random, rows: int, nullable: bool) -> pa.Array | None:
    """Return which rows are null, or None for no row."""
    return pa.array([rng.random() < 0.25 for _ in range(rows)], pa.bool_()) if nullable else None


def _array(rng: random.Random, data_type: pa.DataType, rows: int, nullable: bool, value: Value) -> pa.Array:
    if pat.is_struct(data_type):
        fields = [data_type.field(number) for number in range(data_type.num_fields)]
        children = [random_array(rng, of.type, rows, nullable=of.nullable, value=value) for of in fields]
        if not children:
            return _empty_structs(rng, data_type, rows, nullable)
        return pa.StructArray.from_arrays(children, fields=fields, mask=_mask(rng, rows, nullable))
    if pat.is_dictionary(data_type):
        return _dictionary(rng, data_type, rows, nullable, value)
    if pat.is_fixed_size_list(data_type):
        size = data_type.list_size
        values = random_array(
            rng, data_type.value_type, rows * size, nullable=data_type.value_field.nullable, value=value
        )
        valid = _bits(rng, rows) if nullable else None
        return pa.Array.from_buffers(data_type, rows, [valid], children=[values])
    if pat.is_map(data_type) or pat.is_list(data_type) or pat.is_large_list(data_type):
        return _list(rng, data_type, rows, nullable, value)
    values = [value(rng, data_type) for _ in range(rows)]
    return pa.array([None if nullable and rng.random() < 0.25 else each for each in values], data_type)


def _bits(rng: random.Random, rows: int) -> pa.Buffer:
    return pa.py_buffer(rng.randbytes((rows + 7) // 8))


def _empty_structs(rng: random.Random, data_type: pa.DataType, rows: int, nullable: bool) -> pa.Array:
    return pa.Array.from_buffers(data_type, rows, [_bits(rng, rows) if nullable else None], children=[])


def _dictionary(rng: random.Random, data_type: pa.DataType, rows: int, nullable: bool, value: Value) -> pa.Array:
    entries = random_array(rng, data_type.value_type, 5, nullable=nullable, value=value)
    indices = [None if nullable and rng.random() < 0.2 else rng.randrange(5) for _ in range(rows)]
    return pa.DictionaryArray.from_arrays(pa.array(indices, data_type.index_type), entries)


def _list(rng: random.Random, data_type: pa.DataType, rows: int, nullable: bool, value: Value) -> pa.Array:
    offsets = [rng.randrange(3)]
    for _ in range(rows):
        offsets.append(offsets[-1] + rng.choice((0, 0, 1, 2, 5)))
    total = offsets[-1] + rng.randrange(3)
    layout = "<q" if pat.is_large_list(data_type) else "<i"
    packed = pa.py_buffer(b"".join(struct.pack(layout, offset) for offset in offsets))
    if pat.is_map(data_type):
        keys = random_array(rng, data_type.key_type, total, nullable=False, value=value)
        items = random_array(rng, data_type.item_type, total, nullable=data_type.item_field.nullable, value=value)
        child = pa.StructArray.from_arrays([keys, items], fields=[data_type.key_field, data_type.item_field])
    else:
        child = random_array(rng, data_type.value_type, total, nullable=data_type.value_field.nullable, value=value)
    return pa.Array.from_buffers(data_type, rows, [_bits(rng, rows) if nullable else None, packed], children=[child])


def random_text(rng: random.Random) -> str:
    """Return a string: mostly short, with quotes, controls and characters of up to four bytes."""
    return "".join(rng.choice(_TEXT) for _ in range(rng.choice((0, 1, 3, 7, 8, 9, 16, 40))))


def random_double(rng: random.Random) -> float:
    """Return any double but NaN: of random bits, of few digits, a whole number, infinite, or near a bound."""
    kind = rng.randrange(6)
    if kind == 0:
        (number,) = struct.unpack("<d", rng.randbytes(8))
        return 0.0 if number != number else float(number)
    choices = (
        rng.randrange(-(10**6), 10**6) / 100,
        float(rng.randrange(-100, 3000)),
        rng.choice(
            (0.0, -0.0, float("inf"), -float("inf"), 5e-324, 1e-323, 1.7976931348623157e308, 2.2250738585072014e-308)
        ),
        rng.choice((1e-3, 9.999e-4, 1e7, 9999999.999, 2e23, 1e23, 9007199254740993.0)) * rng.choice((1, -1)),
        rng.uniform(-1, 1) * 10.0 ** rng.randrange(-20, 20),
    )
    return choices[kind - 1]


def _random_int(rng: random.Random, bits: int, signed: bool) -> int:
    size = rng.randrange(bits) if rng.random() < 0.7 else bits - signed
    number = rng.getrandbits(size) if size else 0
    return -number - 1 if signed and rng.random() < 0.4 else number


def _float_of(rng: random.Random, bits: int) -> float:
    layout, size = ("<e", 2) if bits == 16 else ("<f", 4)
    (number,) = struct.unpack(layout, rng.randbytes(size))
    return 0.5 if number != number else float(number)


def random_value(rng: random.Random, data_type: pa.DataType) -> Any:
    """Return a value that pa.array takes for the type."""
    for is_kind, made in _VALUES:
        if is_kind(data_type):
            return made(rng, data_type)
    raise NotImplementedError(str(data_type))


def _units(rng: random.Random, data_type: pa.DataType) -> int:
    per_second = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[data_type.unit]
    first, last = _FIRST_DAY + 2, _LAST_DAY - 2
    days = rng.choice((rng.randint(first, last), rng.randint(0, 25_000), rng.randint(-40_000, 0)))
    if data_type.unit == "ns":
        days = rng.randint(-80_000, 80_000)
    return days * 86_400 * per_second + rng.randrange(86_400 * per_second)


def _time_units(rng: random.Random, data_type: pa.DataType) -> int:
    per_second = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[data_type.unit]
    return rng.choice(
        (0, 1, 86_400 * per_second - 1, rng.randrange(86_400) * per_second, rng.randrange(86_400 * per_second))
    )


def _decimal(rng: random.Random, data_type: pa.DataType) -> Any:
    from decimal import Decimal

    digits = rng.randrange(data_type.precision + 1)
    number = rng.randrange(10**digits) * rng.choice((1, -1))
    sign, numbers, _ = Decimal(number).as_tuple()
    return Decimal((sign, numbers, -data_type.scale))


_VALUES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[random.Random, pa.DataType], Any]], ...] = (
    (pat.is_null, lambda rng, of: None),
    (pat.is_boolean, lambda rng, of: rng.random() < 0.5),
    (pat.is_signed_integer, lambda rng, of: _random_int(rng, of.bit_width, True)),
    (pat.is_unsigned_integer, lambda rng, of: _random_int(rng, of.bit_width, False)),
    (pat.is_float64, lambda rng, of: random_double(rng)),
    (pat.is_floating, lambda rng, of: _float_of(rng, of.bit_width)),
    (pat.is_fixed_size_binary, lambda rng, of: rng.randbytes(of.byte_width)),
    (
        lambda of: pat.is_string(of) or pat.is_large_string(of) or pat.is_string_view(of),
        lambda rng, of: random_text(rng),
    ),
    (
        lambda of: pat.is_binary(of) or pat.is_large_binary(of) or pat.is_binary_view(of),
        lambda rng, of: rng.randbytes(rng.choice((0, 1, 2, 3, 12, 13, 30))),
    ),
    (pat.is_date32, lambda rng, of: rng.randint(_FIRST_DAY, _LAST_DAY)),
    (pat.is_timestamp, _units),
    (pat.is_time, _time_units),
    (pat.is_duration, lambda rng, of: rng.randrange(-(10**14), 10**14)),
    (pat.is_decimal, _decimal),
)
