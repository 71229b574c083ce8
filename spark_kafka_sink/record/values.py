"""Python values as Arrow arrays of a known type: structs, lists and maps too, as PySpark has them in its rows.

A naive datetime is local time for a timestamp with a zone, as PySpark makes it. Each value must have the Python type of
its Arrow type: nothing is rounded, cut or read as another type. Arrays are made of buffers, because `pa.array` imports
pandas (arrow.py). Plain functions; any thread.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record.arrow import binary_array, int_array
from spark_kafka_sink.record.headers import field_names

Cells = Sequence[Any]
Numbers = Sequence[int]
"""The number of the row that each cell belongs to."""

_DAYS_OF_400_YEARS: Final = 146_097
_FIRST_DAY: Final = datetime.date(1970, 1, 1).toordinal()
_EPOCH: Final = datetime.datetime(1970, 1, 1)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_EXACT: Final = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""It rounds nothing. That of the thread has 28 digits by default."""
_NONE: Final = type(None)


def array_of(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    """Return `cells` as an array of `data_type`, None as null. `numbers`: of the rows, for errors.

    Raises SchemaError for a value of another Python type, and SerializationError for one outside the type's range, with
    the path, such as `value.address.zip`, and the row.
    """
    make = _MAKERS.get(data_type) or next((make for fits, make in _FAMILIES if fits(data_type)), None)
    if make is None:
        raise SchemaError(f"{path} has the Arrow type {data_type}, and Python values do not become such a type.")
    return make(cells, data_type, path, numbers)


def array_of_fitting(
    cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers
) -> tuple[pa.Array, Mapping[int, str]]:
    """Return `cells` as `array_of` does, with null in place of each one outside the type's range, and the reasons of
    these by their places. Raises SchemaError for a value of another Python type.
    """
    try:
        return array_of(cells, data_type, path, numbers), {}
    except SerializationError:
        reasons: dict[int, str] = {}
        for place, (cell, number) in enumerate(zip(cells, numbers, strict=True)):
            try:
                array_of([cell], data_type, path, [number])
            except SerializationError as refusal:
                reasons[place] = str(refusal)
        fitting = [None if place in reasons else cell for place, cell in enumerate(cells)]
        return array_of(fitting, data_type, path, numbers), reasons


def datetime_ms(moment: datetime.datetime) -> int:
    """Return milliseconds since 1970, rounded down. A naive datetime is local time; `fold` counts."""
    shift_days = 0
    if moment.year in (datetime.MINYEAR, datetime.MAXYEAR):
        # timestamp() looks a day back and ahead, outside the range of datetime; the calendar repeats after 400 years
        shift_days = _DAYS_OF_400_YEARS if moment.year == datetime.MAXYEAR else -_DAYS_OF_400_YEARS
        moment = (moment - datetime.timedelta(shift_days)).replace(fold=moment.fold)
    # seconds and microseconds apart: one float is not exact enough for both in distant years
    seconds = round(moment.timestamp() - moment.microsecond / 1e6) + shift_days * 86_400
    return seconds * 1000 + moment.microsecond // 1000


# ---- nested types ----------------------------------------------------------------------------------------------------


def _structs(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    names = [field.name for field in data_type]
    none = (None,) * len(names)
    rows = [
        none if cell is None else _fields(cell, names, path, number)
        for cell, number in zip(cells, numbers, strict=True)
    ]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    children = [
        array_of(column, field.type, f"{path}.{field.name}", numbers)
        for column, field in zip(columns, data_type, strict=True)
    ]
    return pa.Array.from_buffers(data_type, len(cells), [_validity(cells)], children=children)


def _fields(cell: Any, names: list[str], path: str, number: int) -> Sequence[Any]:
    """Return the values of the fields `names`. A plain tuple has them in their order."""
    own = field_names(cell)
    if isinstance(cell, Mapping):
        unknown = [name for name in cell if name not in names]
        if not unknown:
            return [cell.get(name) for name in names]
        _refuse_type(path, number, f"has the field {unknown[0]!r:.100}, which its type does not have")
    if not isinstance(cell, tuple):
        _refuse_type(path, number, f"is a {type(cell).__name__}; give a Row, a named tuple, a tuple or a dict")
    if len(cell) != len(names):
        _refuse_type(path, number, f"has {len(cell)} values for {len(names)} fields: {', '.join(names)}")
    if own is None or list(own) == names:
        return cell
    by_name = dict(zip(own, cell, strict=False))
    if by_name.keys() != set(names):
        _refuse_type(path, number, f"has the fields {', '.join(map(str, own))}; its type has {', '.join(names)}")
    return [by_name[name] for name in names]


def _variants(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    """PySpark's VariantVal, by its attributes: this room does not import pyspark."""
    for cell, number in zip(cells, numbers, strict=True):
        if type(cell).__name__ not in ("VariantVal", "NoneType"):
            _refuse_type(path, number, f"is a {type(cell).__name__}; give a VariantVal")
    children = [
        array_of([b"" if cell is None else getattr(cell, field.name) for cell in cells], field.type, path, numbers)
        for field in data_type
    ]
    return pa.Array.from_buffers(data_type, len(cells), [_validity(cells)], children=children)


def _lists(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    for cell, number in zip(cells, numbers, strict=True):
        if type(cell) not in (list, tuple, _NONE):
            _refuse_type(path, number, f"is a {type(cell).__name__}; give a list")
    items = [item for cell in cells if cell for item in cell]
    elements = array_of(items, data_type.value_type, f"{path}.element", _of_items(cells, numbers))
    return pa.Array.from_buffers(data_type, len(cells), [_validity(cells), _offsets(cells)], children=[elements])


def _maps(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    for cell, number in zip(cells, numbers, strict=True):
        if not isinstance(cell, (Mapping, _NONE)):
            _refuse_type(path, number, f"is a {type(cell).__name__}; give a dict")
    of_items = _of_items(cells, numbers)
    keys = array_of([key for cell in cells if cell for key in cell], data_type.key_type, f"{path}.key", of_items)
    _ = keys.null_count  # now they are counted: with pyarrow 14, a map whose keys are not counted yet ends the process
    values = [value for cell in cells if cell for value in cell.values()]
    items = array_of(values, data_type.item_type, f"{path}.value", of_items)
    entries = pa.Array.from_buffers(
        pa.struct([data_type.key_field, data_type.item_field]), len(of_items), [None], children=[keys, items]
    )
    return pa.Array.from_buffers(data_type, len(cells), [_validity(cells), _offsets(cells)], children=[entries])


def _of_items(cells: Cells, numbers: Numbers) -> Numbers:
    return [number for cell, number in zip(cells, numbers, strict=True) if cell for _ in cell]


def _offsets(cells: Cells) -> pa.Buffer:
    offsets = np.zeros(len(cells) + 1, np.int32)
    np.cumsum(np.fromiter((len(cell) if cell else 0 for cell in cells), np.int32, len(cells)), out=offsets[1:])
    return pa.py_buffer(offsets)


# ---- plain types -----------------------------------------------------------------------------------------------------


def _nulls(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    _check_types(cells, (), "None", path, numbers)
    return pa.nulls(len(cells), data_type)


def _booleans(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    _check_types(cells, (bool,), "a bool", path, numbers)
    bits = np.packbits(np.fromiter(map(bool, cells), np.bool_, len(cells)), bitorder="little")
    return pa.Array.from_buffers(data_type, len(cells), [_validity(cells), pa.py_buffer(bits)])


def _ints(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    _check_types(cells, (int,), "an int", path, numbers)
    limit = 1 << (data_type.bit_width - 1)
    for cell, number in zip(cells, numbers, strict=True):
        if cell is not None and not -limit <= cell < limit:
            _refuse(path, number, f"does not fit into {data_type.bit_width} bits")
    return int_array(cells, pa.int32() if limit <= 1 << 31 else data_type, path, numbers).cast(data_type)


def _floats(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    _check_types(cells, (float,), "a float", path, numbers)
    exact = np.fromiter((0.0 if cell is None else cell for cell in cells), np.float64, len(cells))
    with np.errstate(over="ignore"):
        values = exact.astype(np.float32 if data_type == pa.float32() else np.float64)
    too_large = np.isinf(values) & ~np.isinf(exact)
    if too_large.any():
        _refuse(path, numbers[int(too_large.argmax())], "is too large for a float of 32 bits")
    is_rounded = (values != exact) & ~np.isnan(exact)
    if is_rounded.any():
        _refuse(path, numbers[int(is_rounded.argmax())], "has more digits than a float of 32 bits: make it a double")
    return pa.Array.from_buffers(data_type, len(cells), [_validity(cells), pa.py_buffer(values)])


def _texts(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    _check_types(cells, (str,), "a str", path, numbers)
    return binary_array(cells, path, numbers).cast(data_type)


def _binaries(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    _check_types(cells, (bytes, bytearray), "bytes", path, numbers)
    return binary_array(cells, path, numbers).cast(data_type)


def _decimals(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    _check_types(cells, (Decimal,), "a Decimal", path, numbers)
    limit = 10**data_type.precision
    parts = []
    for cell, number in zip(cells, numbers, strict=True):
        scaled = Decimal(0) if cell is None else cell.scaleb(data_type.scale, _EXACT) if cell.is_finite() else cell
        if not scaled.is_finite() or scaled != scaled.to_integral_value() or scaled.copy_abs() >= limit:
            _refuse(path, number, f"does not fit into decimal({data_type.precision},{data_type.scale})")
        parts.append(int(scaled).to_bytes(16, "little", signed=True))
    return pa.Array.from_buffers(data_type, len(cells), [_validity(cells), pa.py_buffer(b"".join(parts))])


def _counted(
    kind: type, whose: str, count: Callable[[Any], int]
) -> Callable[[Cells, pa.DataType, str, Numbers], pa.Array]:
    """Return the maker of a type that Arrow stores as a count of days, microseconds or nanoseconds."""

    def make(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
        _check_types(cells, (kind,), whose, path, numbers)
        counts = [None if cell is None else count(cell) for cell in cells]
        stored = pa.int32() if data_type.bit_width == 32 else pa.int64()
        return int_array(counts, stored, path, numbers).cast(data_type)

    return make


def _naive_us(moment: datetime.datetime) -> int:
    return (moment.replace(tzinfo=None) - _EPOCH) // _MICROSECOND


def _naive_moments(cells: Cells, data_type: pa.DataType, path: str, numbers: Numbers) -> pa.Array:
    for cell, number in zip(cells, numbers, strict=True):
        if getattr(cell, "tzinfo", None) is not None:
            _refuse_type(path, number, "is a datetime with a time zone; its type has none")
    return _counted(datetime.datetime, "a datetime", _naive_us)(cells, data_type, path, numbers)


def _time_ns(time: datetime.time) -> int:
    return ((time.hour * 60 + time.minute) * 60 + time.second) * 1_000_000_000 + time.microsecond * 1000


def _is_variant(data_type: pa.DataType) -> bool:
    """Return whether it is the struct with which Spark hands over a variant."""
    return pat.is_struct(data_type) and any((of.metadata or {}).get(b"variant") == b"true" for of in data_type)


_Make = Callable[[Cells, pa.DataType, str, Numbers], pa.Array]

_MAKERS: Final[Mapping[pa.DataType, _Make]] = {
    pa.null(): _nulls,
    pa.bool_(): _booleans,
    pa.int8(): _ints,
    pa.int16(): _ints,
    pa.int32(): _ints,
    pa.int64(): _ints,
    pa.float32(): _floats,
    pa.float64(): _floats,
    pa.string(): _texts,
    pa.binary(): _binaries,
    pa.date32(): _counted(datetime.date, "a date", lambda day: day.toordinal() - _FIRST_DAY),
    pa.timestamp("us"): _naive_moments,
    pa.duration("us"): _counted(datetime.timedelta, "a timedelta", lambda time: time // _MICROSECOND),
    pa.time64("ns"): _counted(datetime.time, "a time", _time_ns),
}
_FAMILIES: Final[Sequence[tuple[Callable[[pa.DataType], bool], _Make]]] = (
    (
        lambda data_type: bool(pat.is_timestamp(data_type)) and data_type.unit == "us",
        _counted(datetime.datetime, "a datetime", lambda time: datetime_ms(time) * 1000 + time.microsecond % 1000),
    ),
    (pat.is_decimal128, _decimals),
    (_is_variant, _variants),
    (pat.is_struct, _structs),
    (pat.is_list, _lists),
    (pat.is_map, _maps),
)
"""Types with parameters."""


def _check_types(cells: Cells, kinds: tuple[type, ...], wanted: str, path: str, numbers: Numbers) -> None:
    """Raise SchemaError for the first cell that is neither None nor of one of `kinds`. A subclass does not
    count: a datetime is no date, and a bool no int.
    """
    allowed = {*kinds, _NONE}
    if not set(map(type, cells)) <= allowed:
        at = next(at for at, cell in enumerate(cells) if type(cell) not in allowed)
        _refuse_type(path, numbers[at], f"is a {type(cells[at]).__name__}; give {wanted}")


def _refuse(path: str, number: int, what: str) -> NoReturn:
    raise SerializationError(f"{path} of row {number} {what}.")


def _refuse_type(path: str, number: int, what: str) -> NoReturn:
    raise SchemaError(f"{path} of row {number} {what}.")


def _validity(cells: Cells) -> pa.Buffer | None:
    valid = np.fromiter((cell is not None for cell in cells), np.bool_, len(cells))
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
