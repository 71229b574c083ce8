"""Python values as Arrow arrays, made of buffers.

Not by `pa.array`: like every way by which pyarrow itself turns Python or numpy values into Arrow ones, it imports
pandas where that is installed, for 40 MB and 0.4 s in each of Spark's workers.

Holds no state; any thread.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.arrow_arrays import BINARY, MAX_COLUMN_BYTES, BoolArray, too_large

_NONE = type(None)
_LONGEST_INT_BITS: Final = 300
Bounds = Sequence[int] | npt.NDArray[np.int32]
"""Where the cells of each row begin, in a column of which a row may hold several."""


def binary_array(
    rows: Sequence[Any], name: str, numbers: Sequence[int] | None = None, bounds: Bounds | None = None
) -> pa.BinaryArray:
    """A `binary` array of bytes-like objects, str (as UTF-8) and None.

    `numbers`: the number of each row in errors, its index where None. `bounds`: None where each row holds one. Raises
    SerializationError naming the column and the first row that does not fit, or for more than 2 GiB.
    """
    found: set[type] = set()
    joined = _joined(rows, name)
    if joined is None:
        found = set(map(type, rows))
        if found == {_NONE}:
            return pa.nulls(len(rows), BINARY)
        texts = rows
        if _NONE in found:
            empty = "" if str in found else b""
            texts = [empty if row is None else row for row in rows]
            joined = _joined(texts, name)
        if joined is None:
            joined = _joined(_encoded(texts, name, numbers, bounds), name)
        assert joined is not None
    offsets, data = joined
    nulls: BoolArray | None = None
    if _NONE in found:
        nulls = np.zeros(len(rows), np.bool_)
        nulls[[row for row in np.flatnonzero(offsets[1:] == offsets[:-1]).tolist() if rows[row] is None]] = True
    return pa.BinaryArray.from_buffers(BINARY, len(rows), [_validity(nulls), pa.py_buffer(offsets), pa.py_buffer(data)])


def int_array(rows: Sequence[Any], data_type: pa.DataType, name: str, numbers: Sequence[int] | None = None) -> pa.Array:
    """An array of `data_type` (int32 or int64) of ints and None; `numbers` as for `binary_array`. Raises
    SerializationError naming the column and the first row that is neither or is out of range.
    """
    found = set(map(type, rows))
    limits = np.iinfo(np.int32 if data_type.bit_width == 32 else np.int64)
    nulls: BoolArray | None = None
    ints = rows
    if _NONE in found:
        nulls = np.array([row is None for row in rows], np.bool_)
        ints = [0 if row is None else row for row in rows]
    try:
        if not found <= {int, _NONE}:
            ints = list(map(exact_int, ints))
        values = np.fromiter(ints, np.int64, len(ints))
    except (TypeError, OverflowError):
        raise _first_misfit_int(ints, name, limits, numbers) from None
    if len(values) and (values.min() < limits.min or values.max() > limits.max):
        raise _first_misfit_int(ints, name, limits, numbers)
    values = values.astype(limits.dtype, copy=False)
    return pa.Array.from_buffers(data_type, len(rows), [_validity(nulls), pa.py_buffer(values)])


def _joined(rows: Sequence[Any], name: str) -> tuple[npt.NDArray[np.int32], bytes] | None:
    """Offsets and bytes of all rows; None where they are not all bytes-like or all ASCII. Nothing but C for a row."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    if not len(rows):
        return offsets, b""
    try:
        ends = np.fromiter(map(len, rows), np.int64, len(rows)).cumsum()
        total = int(ends[-1])
        if total > MAX_COLUMN_BYTES:
            raise too_large(name)
        if isinstance(rows[0], str):
            text = "".join(rows)
            data = text.encode() if text.isascii() else b""
        else:
            data = b"".join(rows)
    except TypeError:
        return None
    if len(data) != total:
        return None  # not ASCII, or views of wider items than bytes
    offsets[1:] = ends
    return offsets, data


def _encoded(rows: Sequence[Any], name: str, numbers: Sequence[int] | None, bounds: Bounds | None) -> list[bytes]:
    """Each row as bytes."""
    if set(map(type, rows)) == {str}:
        try:
            return list(map(str.encode, rows))
        except UnicodeEncodeError:
            pass  # a lone surrogate; the loop finds its row
    encoded: list[bytes] = []
    for index, row in enumerate(rows):
        try:
            encoded.append(row.encode() if isinstance(row, str) else memoryview(row).tobytes())
        except (TypeError, UnicodeEncodeError) as cause:
            place = index if bounds is None else bisect_right(bounds, index) - 1
            whose = f"The {name} of row {_number(numbers, place)}"
            if isinstance(cause, UnicodeEncodeError):
                raise SerializationError(not_unicode(whose, cause)) from None
            raise SerializationError(f"{whose} is a {type(row).__name__}; give bytes, str or None.") from None
    return encoded


def not_unicode(whose: str, cause: UnicodeEncodeError) -> str:
    """The text of an error for a str that UTF-8 cannot hold, which is the value that `whose` names."""
    at = cause.start
    return (
        f"{whose} is a str that is not valid Unicode: at place {at} is U+{ord(cause.object[at]):04X}, one half of a"
        " surrogate pair, which UTF-8 cannot hold. Correct the text where it is made, or give bytes."
    )


def exact_int(number: Any) -> int:
    """Return an int for one of Python's or numpy's. Raises TypeError for a bool and for anything else."""
    if isinstance(number, (bool, np.bool_)):
        raise TypeError("a bool is not an int here")
    return operator.index(number)


def int_text(number: int) -> str:
    """Return the number for an error text. Python refuses to write out thousands of digits."""
    return str(number) if number.bit_length() <= _LONGEST_INT_BITS else f"an int of {number.bit_length()} bits"


def _first_misfit_int(rows: Sequence[Any], name: str, limits: Any, numbers: Sequence[int] | None) -> SerializationError:
    for index, row in enumerate(rows):
        whose = f"The {name} of row {_number(numbers, index)}"
        try:
            if limits.min <= exact_int(row) <= limits.max:
                continue
        except TypeError:
            return SerializationError(f"{whose} is a {type(row).__name__}; give an int or None.")
        return SerializationError(
            f"{whose} is {int_text(exact_int(row))}, and does not fit into {limits.bits} bits; give an int from"
            f" {limits.min} to {limits.max}, or None."
        )
    raise AssertionError("every row fits")


def _number(numbers: Sequence[int] | None, index: int) -> int:
    return index if numbers is None else numbers[index]


def _validity(nulls: BoolArray | None) -> pa.Buffer | None:
    return None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
