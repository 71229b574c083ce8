"""Arrow arrays in the one shape that the encoder reads: contiguous `binary` with 32-bit offsets. And their memory.

Arrays with 32-bit offsets (`string`, `binary`, slices of them) are taken as they are, without a copy; `large_*` columns
get new offsets over the same bytes; view, fixed-size and dictionary columns are rewritten once, in C++. Python values
become arrays by buffers.

pyarrow's own conversions between Arrow and numpy or Python (`pa.array`, `pa.scalar`, `to_numpy`, a Python value for
`fill_null`) import pandas where that is installed, which costs memory and time in each of Spark's workers. So buffers
cross instead. Any thread may call; only the allocator's settings are state, and they hold for the whole process.
"""

from __future__ import annotations

import ctypes
import operator
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from spark_kafka_sink.common.errors import SchemaError, SerializationError

MAX_COLUMN_BYTES = 2**31 - 1
"""What 32-bit offsets can address, in one column and in one encoded block."""

BINARY = pa.binary()

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def combine(array: pa.Array | pa.ChunkedArray, name: str) -> pa.Array:
    """One array of a possibly chunked one; a single chunk is not copied. Raises SerializationError past 2 GiB,
    SchemaError for no array.
    """
    if isinstance(array, pa.Array):
        return array
    if not isinstance(array, pa.ChunkedArray):
        raise SchemaError(f"The column '{name}' is a {type(array).__name__}; it must be an Arrow array.")
    if array.num_chunks == 1:
        return array.chunk(0)
    if is_bytes_like(array.type) and pat.is_dictionary(array.type):
        # Arrow unites dictionaries only where none holds a null and the indices have room for all entries.
        array = pa.chunked_array([as_binary(chunk, name) for chunk in array.iterchunks()], BINARY)
    try:
        combined = array.combine_chunks()
    except pa.ArrowInvalid as error:
        raise too_large(name) from error
    if isinstance(combined, pa.ChunkedArray):
        raise too_large(name)
    return combined


def is_bytes_like(data_type: pa.DataType) -> bool:
    """Whether a column of this type can be a record's key or value: string or binary in any of Arrow's layouts."""
    if pat.is_dictionary(data_type):
        return not pat.is_dictionary(data_type.value_type) and is_bytes_like(data_type.value_type)
    return any(
        accepts(data_type)
        for accepts in (
            pat.is_binary,
            pat.is_string,
            pat.is_large_binary,
            pat.is_large_string,
            pat.is_binary_view,
            pat.is_string_view,
            pat.is_fixed_size_binary,
        )
    )


def as_binary(array: pa.Array, name: str) -> pa.BinaryArray:
    """`array` as `binary` (its UTF-8 bytes for strings), nulls kept. Raises SchemaError for another type,
    SerializationError past 2 GiB.
    """
    data_type = array.type
    if data_type == BINARY:
        return array
    if not is_bytes_like(data_type):
        raise SchemaError(f"The column '{name}' has the Arrow type {data_type}; it must be string or binary.")
    if pat.is_dictionary(data_type):
        return _decoded(as_binary(array.dictionary, name), array.indices, name)
    try:
        if pat.is_string_view(data_type) or pat.is_binary_view(data_type):
            if len(array):
                _check_views(array, name)
            array = array.cast(pa.binary_view())
        elif len(array) and (pat.is_large_string(data_type) or pat.is_large_binary(data_type)):
            array = _within_32_bits(array, name)
        elif pat.is_fixed_size_binary(data_type):
            array = _at_32_bits(array)
        return array.cast(BINARY)
    except pa.ArrowInvalid as error:
        raise too_large(name) from error


def _decoded(dictionary: pa.BinaryArray, indices: pa.Array, name: str) -> pa.BinaryArray:
    if len(dictionary) <= len(indices) or dictionary.null_count:
        lengths = pc.take(pc.binary_length(dictionary), indices)
    else:  # no look at the entries that no row has: many chunks and slices may share one large dictionary
        offsets = value_offsets(dictionary)
        starts, ends = (pc.take(index_array(each), indices) for each in (offsets[:-1], offsets[1:]))
        lengths = pc.subtract(ends, starts)
    if (pc.sum(lengths).as_py() or 0) > MAX_COLUMN_BYTES:
        raise too_large(name)
    return dictionary.take(indices)


def _within_32_bits(array: pa.Array, name: str) -> pa.Array:
    """A slice that lies far into its buffers copied to their beginning; everything else as it is."""
    offsets = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, array.offset * 8)
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first > MAX_COLUMN_BYTES:
        raise too_large(name)
    return array if last <= MAX_COLUMN_BYTES else array.take(index_array(np.arange(len(array))))


def _at_32_bits(array: pa.FixedSizeBinaryArray) -> pa.FixedSizeBinaryArray:
    """As `_within_32_bits`. The cast refuses what is too large, but counts offsets from the buffer's beginning."""
    ends_at = (array.offset + len(array)) * array.type.byte_width
    return array if ends_at <= MAX_COLUMN_BYTES else array.take(index_array(np.arange(len(array))))


def _check_views(array: pa.Array, name: str) -> None:
    """Raise SerializationError past 2 GiB, where the cast's offsets would wrap. A view begins with its length."""
    lengths = np.frombuffer(array.buffers()[1], np.int32, 4 * len(array), 16 * array.offset)[::4]
    nulls = null_mask(array)
    if int((lengths if nulls is None else lengths[~nulls]).sum(dtype=np.int64)) > MAX_COLUMN_BYTES:
        raise too_large(name)


def value_offsets(array: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """The len(array) + 1 offsets into the array's data buffer, slices included; no copy."""
    if len(array) == 0:
        return np.zeros(1, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)


def value_bytes(array: pa.BinaryArray) -> npt.NDArray[np.uint8]:
    """The array's whole data buffer (what value_offsets points into); no copy."""
    buffer = array.buffers()[2]
    return np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)


def null_mask(array: pa.Array) -> BoolArray | None:
    """True where null, one bool per row; None where nothing is null."""
    if array.null_count == 0:
        return None
    return ~_bits(array.buffers()[0], array.offset, len(array))


def bool_values(array: pa.BooleanArray) -> BoolArray:
    """The values of a boolean array without nulls, one bool per row."""
    return _bits(array.buffers()[1], array.offset, len(array))


def _bits(buffer: pa.Buffer, offset: int, count: int) -> BoolArray:
    first, skipped = divmod(offset, 8)
    octets = np.frombuffer(buffer, np.uint8, (skipped + count + 7) // 8, first)
    return np.unpackbits(octets, count=skipped + count, bitorder="little")[skipped:].view(np.bool_)


def int_values(array: pa.Array, null: int = 0) -> npt.NDArray[Any]:
    """The values of an int32 or int64 array in its own width, `null` where null; no copy where nothing is."""
    width = array.type.bit_width // 8
    if len(array) == 0:
        return np.zeros(0, f"i{width}")
    values = np.frombuffer(array.buffers()[1], f"i{width}", len(array), array.offset * width)
    nulls = null_mask(array)
    return values if nulls is None else np.where(nulls, values.dtype.type(null), values)


def byte_lengths(array: pa.BinaryArray) -> Int64Array:
    """Length in bytes of each value, -1 where null: int64, one per row."""
    offsets = value_offsets(array).astype(np.int64)
    lengths: Int64Array = offsets[1:] - offsets[:-1]
    nulls = null_mask(array)
    if nulls is not None:
        lengths[nulls] = -1
    return lengths


def data_bytes(array: pa.BinaryArray) -> int:
    """Bytes of all values, and of what nulls may stand on; without a look at each."""
    offsets = value_offsets(array)
    return int(offsets[-1]) - int(offsets[0])


def marked(column: pa.Array, marks: pa.BooleanArray) -> pa.Array:
    """The entries that `marks` (without nulls) is true for; all others are null. No copy of text and bytes."""
    count = marks.true_count
    if count == 0 or column.type not in (pa.string(), BINARY):
        return column.filter(marks)
    offsets, mask = value_offsets(column), bool_values(marks)
    ends = offsets[1:][mask]
    kept = np.concatenate([offsets[:-1][mask], ends[-1:]])
    if not np.array_equal(kept[1:], ends):  # there are bytes under a null
        return column.filter(marks)
    has_nulls = column.null_count > len(marks) - count
    valid = column.is_valid().filter(marks).buffers()[1] if has_nulls else None
    return pa.Array.from_buffers(column.type, count, [valid, pa.py_buffer(kept), column.buffers()[2]])


def binary_from_numpy(offsets: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> pa.BinaryArray:
    """A `binary` array over these buffers; no copy."""
    return pa.BinaryArray.from_buffers(BINARY, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def index_array(indices: npt.NDArray[Any]) -> pa.Array:
    """An int32 or int64 array over these integers of that width; no copy where they are contiguous."""
    data_type = pa.int32() if indices.itemsize == 4 else pa.int64()
    return pa.Array.from_buffers(data_type, len(indices), [None, pa.py_buffer(np.ascontiguousarray(indices))])


def binary_scalar(content: bytes) -> pa.BinaryScalar:
    """A `binary` scalar."""
    return binary_from_numpy(np.array([0, len(content)], np.int32), np.frombuffer(content + b"\0", np.uint8))[0]


def too_large(name: str) -> SerializationError:
    """The error for a column past MAX_COLUMN_BYTES."""
    return SerializationError(
        f"The column '{name}' holds more than {MAX_COLUMN_BYTES} bytes; hand over fewer rows at a time "
        "(spark.sql.execution.arrow.maxRecordsPerBatch)."
    )


def without(times: pa.Array, number: int) -> pa.Array:
    """`times` (int64) with nulls for `number`."""
    values = int_values(times, number)
    valid = np.packbits(values != number, bitorder="little")
    return pa.Array.from_buffers(times.type, len(times), [pa.py_buffer(valid), pa.py_buffer(values)])


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


# ---- memory --------------------------------------------------------------------------------------------------------

# Small records: a block's arrays are needed again for the next block, and memory that was returned to the kernel costs
# page faults. Large records: freed pieces leave holes that nothing of another size fits into, so they are returned.

LARGE_RECORD: Final = 64 << 10
"""Bytes of an average record from which on memory counts for more than page faults."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
_KEPT: Final = 4 << 20
_KEPT_OF_LARGE: Final = 128 << 10
SENT_POOL: Final = pa.jemalloc_memory_pool() if "jemalloc" in pa.supported_memory_backends() else None
"""For what lives until a broker has acknowledged it: blocks of small records, megabytes each, and compressed batches.
Arrow's default, mimalloc, keeps much more of freed memory than jemalloc.
"""


def keep_freed_heap() -> None:
    """Keep freed pieces of up to 4 MiB for the next block; glibc alone by itself begins to do so at 128 KiB."""
    _set_thresholds(_KEPT)


def pool_for(num_bytes: int, rows: int) -> pa.MemoryPool | None:
    """Where Arrow should take a block of this size from; None: its own default pool. From the first block of large
    records on, the process gives large pieces back to the kernel at once.
    """
    if num_bytes < LARGE_RECORD * rows:
        return SENT_POOL
    _set_thresholds(_KEPT_OF_LARGE)
    return pa.system_memory_pool()


def _set_thresholds(mapped: int) -> None:
    """mallopt(3): pieces from `mapped` bytes on are mapped one by one, and the heap's free end is cut at twice that.
    Other C libraries than glibc have no such settings; then nothing is done.
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, mapped)
        _mallopt(_M_TRIM_THRESHOLD, 2 * mapped)
