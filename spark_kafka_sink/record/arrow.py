"""Arrow arrays in the one layout that the encoder reads: contiguous `binary` with 32-bit offsets. And their memory.

Arrays with 32-bit offsets (`string`, `binary`, slices of them) are used as they are, without a copy. `large_*` columns
get new offsets over the same bytes. View, fixed-size and dictionary columns are rewritten once, in C++. Python values
become arrays by way of buffers.

pyarrow's own conversions between Arrow and numpy or Python (`pa.array`, `pa.scalar`, `to_numpy`, a Python value for
`fill_null`) import pandas if it is installed, which costs memory and time in each of Spark's workers. So only buffers
are exchanged. Any thread may call. The only state is the settings of the allocator, for the whole process.
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
"""The most bytes that 32-bit offsets can address, in a column or an encoded block."""

BINARY = pa.binary()

_HAS_VIEWS = hasattr(pat, "is_binary_view")
"""Whether this pyarrow has arrays of views: from 16 on."""
_CASTS_VIEWS = int(pa.__version__.split(".")[0]) >= 18
"""Whether it can also make other arrays of them."""

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def combine(array: pa.Array | pa.ChunkedArray, name: str) -> pa.Array:
    """Return one array for a possibly chunked array. A single chunk is not copied.

    Raises SerializationError above 2 GiB, SchemaError for anything but an array.
    """
    if isinstance(array, pa.Array):
        return array
    if not isinstance(array, pa.ChunkedArray):
        raise SchemaError(f"The column '{name}' is a {type(array).__name__}; it must be an Arrow array.")
    if array.num_chunks == 1:
        return array.chunk(0)
    if is_bytes_like(array.type):
        # Arrow unites dictionaries only if none has a null and the indices have room for all entries. And it joins
        # chunks without a look at their offsets.
        array = pa.chunked_array([checked(as_binary(chunk, name), name) for chunk in array.iterchunks()], BINARY)
    try:
        combined = array.combine_chunks()
    except pa.ArrowInvalid as error:
        raise too_large(name) from error
    if isinstance(combined, pa.ChunkedArray):
        raise too_large(name)
    return combined


def is_bytes_like(data_type: pa.DataType) -> bool:
    """Return whether a column of this type can be a key or value: string or binary in any layout of Arrow."""
    if pat.is_dictionary(data_type):
        return not pat.is_dictionary(data_type.value_type) and is_bytes_like(data_type.value_type)
    return any(
        accepts(data_type)
        for accepts in (
            pat.is_binary,
            pat.is_string,
            pat.is_large_binary,
            pat.is_large_string,
            _is_view,
            pat.is_fixed_size_binary,
        )
    )


def _is_view(data_type: pa.DataType) -> bool:
    return _HAS_VIEWS and (pat.is_binary_view(data_type) or pat.is_string_view(data_type))


def as_binary(array: pa.Array, name: str) -> pa.BinaryArray:
    """Return `array` as `binary` (strings as UTF-8), with its nulls.

    Raises SchemaError for another type, SerializationError above 2 GiB and if views, large offsets or a dictionary
    are damaged. Offsets of 32 bits are not checked here: the kernel does it.
    """
    data_type = array.type
    if data_type == BINARY:
        return array
    if not is_bytes_like(data_type):
        raise SchemaError(f"The column '{name}' has the Arrow type {data_type}; it must be string or binary.")
    if pat.is_dictionary(data_type):
        return _decoded(as_binary(array.dictionary, name), array.indices, name)
    try:
        if _is_view(data_type) and not _CASTS_VIEWS:
            return _copied_views(array, name)
        if _is_view(data_type):
            array = checked(array.cast(pa.binary_view()), name)
            if len(array):
                _check_views(array, name)
        elif len(array) and (pat.is_large_string(data_type) or pat.is_large_binary(data_type)):
            array = _within_32_bits(checked(array.cast(pa.large_binary()), name), name)
        elif pat.is_fixed_size_binary(data_type):
            array = _from_first_row(array)
        return array.cast(BINARY)
    except pa.ArrowInvalid as error:
        raise too_large(name) from error


def _copied_views(array: pa.Array, name: str) -> pa.BinaryArray:
    """Copy views value by value, for a pyarrow that has no other way."""
    if len(checked(array, name)):
        _check_views(array, name)
    values = array.to_pylist()
    return pa.array(values, pa.string() if pat.is_string_view(array.type) else BINARY).cast(BINARY)


def checked(array: pa.Array, name: str) -> pa.Array:
    """Return a binary array of any layout if its offsets, or its views, lie within its buffers. Arrow's functions do
    not look: they would read other memory of the process, or end it. Raises SerializationError.
    """
    try:
        array.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowIndexError) as error:
        raise damaged(name, error) from error
    return array


def damaged(name: str, error: object) -> SerializationError:
    return SerializationError(
        f"The column '{name}' is damaged where its values are found: {error}. Correct it where it is made, or read it"
        " again; pyarrow's validate(full=True) says whether a table is whole."
    )


def _decoded(dictionary: pa.BinaryArray, indices: pa.Array, name: str) -> pa.BinaryArray:
    checked(dictionary, name)
    if _size_of_entries(dictionary, indices, name) > MAX_COLUMN_BYTES:
        raise too_large(name)
    return dictionary.take(indices)


def _size_of_entries(dictionary: pa.BinaryArray, indices: pa.Array, name: str) -> int:
    """Return the bytes of these entries of a dictionary together. Raises SerializationError for an index beyond it."""
    try:
        if len(dictionary) <= len(indices) or dictionary.null_count:
            lengths = pc.take(pc.binary_length(dictionary), indices)
        else:  # many chunks and slices may share one large dictionary: only entries of these rows
            offsets = value_offsets(dictionary)
            starts, ends = (pc.take(index_array(each), indices) for each in (offsets[:-1], offsets[1:]))
            lengths = pc.subtract(ends, starts)
    except pa.ArrowIndexError as error:
        raise damaged(name, error) from error
    return pc.sum(lengths).as_py() or 0


def _within_32_bits(array: pa.Array, name: str) -> pa.Array:
    """Return a copy if the slice lies too far into its buffers for 32-bit offsets, else the array itself."""
    offsets = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, array.offset * 8)
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first > MAX_COLUMN_BYTES:
        raise too_large(name)
    return array if last <= MAX_COLUMN_BYTES else array.take(index_array(np.arange(len(array))))


def _from_first_row(array: pa.FixedSizeBinaryArray) -> pa.FixedSizeBinaryArray:
    """Return an array that begins where its buffers begin, if the cast needs that. The cast counts its offsets of 32
    bits from there. And in pyarrow 14 and 15 it crashes for a slice without nulls.
    """
    width, data = array.type.byte_width, array.buffers()[1]
    if array.offset and len(array) and array.null_count == 0 and data is not None:
        return pa.Array.from_buffers(array.type, len(array), [None, data.slice(array.offset * width)])
    ends_at = (array.offset + len(array)) * width
    return array if ends_at <= MAX_COLUMN_BYTES else array.take(index_array(np.arange(len(array))))


def _check_views(array: pa.Array, name: str) -> None:
    """Raise SerializationError above 2 GiB, where offsets of the cast would wrap."""
    if _size_of_views(array) > MAX_COLUMN_BYTES:
        raise too_large(name)


def _size_of_views(array: pa.Array) -> int:
    """Return the bytes of all values of a view array. A view has 16 bytes and begins with its length."""
    lengths = np.frombuffer(array.buffers()[1], np.int32, 4 * len(array), 16 * array.offset)[::4]
    nulls = null_mask(array)
    return int((lengths if nulls is None else lengths[~nulls]).sum(dtype=np.int64))


def value_size(array: pa.Array) -> int:
    """Return the bytes of all values of a string or binary array in any layout. Bytes under nulls may count."""
    data_type = array.type
    if len(array) == 0:
        return 0
    if pat.is_dictionary(data_type):
        return _size_of_entries(as_binary(array.dictionary, "dictionary"), array.indices, "dictionary")
    if _is_view(data_type):
        return _size_of_views(array)
    if pat.is_fixed_size_binary(data_type):
        return len(array) * int(data_type.byte_width)
    if pat.is_large_string(data_type) or pat.is_large_binary(data_type):
        offsets = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, array.offset * 8)
        return int(offsets[-1] - offsets[0])
    return data_bytes(array)


def value_offsets(array: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """Return the len(array) + 1 offsets into the data buffer of an array or slice. No copy."""
    if len(array) == 0:
        return np.zeros(1, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)


def value_bytes(array: pa.BinaryArray) -> npt.NDArray[np.uint8]:
    """Return the whole data buffer of the array, for `value_offsets`. No copy."""
    buffer = array.buffers()[2]
    return np.frombuffer(buffer, np.uint8) if buffer is not None else np.zeros(0, np.uint8)


def null_mask(array: pa.Array) -> BoolArray | None:
    """Return one bool per row, True for a null, or None if no row is null."""
    if array.null_count == 0:
        return None
    return ~_bits(array.buffers()[0], array.offset, len(array))


def bool_values(array: pa.BooleanArray) -> BoolArray:
    """Return the values of a boolean array without nulls, one bool per row."""
    return _bits(array.buffers()[1], array.offset, len(array))


def _bits(buffer: pa.Buffer, offset: int, count: int) -> BoolArray:
    first, skipped = divmod(offset, 8)
    octets = np.frombuffer(buffer, np.uint8, (skipped + count + 7) // 8, first)
    return np.unpackbits(octets, count=skipped + count, bitorder="little")[skipped:].view(np.bool_)


def int_values(array: pa.Array, null: int = 0) -> npt.NDArray[Any]:
    """Return the values of an int32 or int64 array in its own width, `null` for nulls. No copy if no row is null."""
    width = array.type.bit_width // 8
    if len(array) == 0:
        return np.zeros(0, f"i{width}")
    values = np.frombuffer(array.buffers()[1], f"i{width}", len(array), array.offset * width)
    nulls = null_mask(array)
    return values if nulls is None else np.where(nulls, values.dtype.type(null), values)


def byte_lengths(array: pa.BinaryArray) -> Int64Array:
    """Return the bytes of each value, -1 for a null: int64, one per row."""
    offsets = value_offsets(array).astype(np.int64)
    lengths: Int64Array = offsets[1:] - offsets[:-1]
    nulls = null_mask(array)
    if nulls is not None:
        lengths[nulls] = -1
    return lengths


def data_bytes(array: pa.BinaryArray) -> int:
    """Return the bytes of all values, and of the bytes under nulls, without reading each length."""
    offsets = value_offsets(array)
    return int(offsets[-1]) - int(offsets[0])


def marked(column: pa.Array, marks: pa.BooleanArray) -> pa.Array:
    """Return the entries for which `marks` (without nulls) is true. All others are null. Texts are not copied."""
    count = marks.true_count
    if count == 0 or column.type not in (pa.string(), BINARY):
        return column.filter(marks)
    offsets, mask = value_offsets(column), bool_values(marks)
    ends = offsets[1:][mask]
    kept = np.concatenate([offsets[:-1][mask], ends[-1:]])
    if not np.array_equal(kept[1:], ends):  # bytes under a null
        return column.filter(marks)
    has_nulls = column.null_count > len(marks) - count
    valid = column.is_valid().filter(marks).buffers()[1] if has_nulls else None
    return pa.Array.from_buffers(column.type, count, [valid, pa.py_buffer(kept), column.buffers()[2]])


def binary_from_numpy(offsets: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> pa.BinaryArray:
    """Return a `binary` array over these buffers. No copy."""
    return pa.BinaryArray.from_buffers(BINARY, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def index_array(indices: npt.NDArray[Any]) -> pa.Array:
    """Return an int32 or int64 array, by the width of `indices`. No copy if they are contiguous."""
    data_type = pa.int32() if indices.itemsize == 4 else pa.int64()
    return pa.Array.from_buffers(data_type, len(indices), [None, pa.py_buffer(np.ascontiguousarray(indices))])


def binary_scalar(content: bytes) -> pa.BinaryScalar:
    """Return a `binary` scalar."""
    return binary_from_numpy(np.array([0, len(content)], np.int32), np.frombuffer(content + b"\0", np.uint8))[0]


def too_large(name: str) -> SerializationError:
    """Return the error for a column above MAX_COLUMN_BYTES."""
    return SerializationError(
        f"The column '{name}' holds more than {MAX_COLUMN_BYTES} bytes; hand over fewer rows at a time "
        "(spark.sql.execution.arrow.maxRecordsPerBatch)."
    )


def without(times: pa.Array, number: int) -> pa.Array:
    """Return `times` (int64) with nulls in place of `number`."""
    values = int_values(times, number)
    valid = np.packbits(values != number, bitorder="little")
    return pa.Array.from_buffers(times.type, len(times), [pa.py_buffer(valid), pa.py_buffer(values)])


_NONE = type(None)
_LONGEST_INT_BITS: Final = 300
Bounds = Sequence[int] | npt.NDArray[np.int32]
"""The index of the first cell of each row, in a column with several cells per row."""


def binary_array(
    rows: Sequence[Any], name: str, numbers: Sequence[int] | None = None, bounds: Bounds | None = None
) -> pa.BinaryArray:
    """Return a `binary` array of bytes-like objects, str (as UTF-8) and None.

    `numbers`: the number of each row for errors, its index if None. `bounds`: None if each row has one cell. Raises
    SerializationError with the column and the first row that does not fit, or above 2 GiB.
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
    """Return an array of `data_type` (int32 or int64) of ints and None. `numbers` as for `binary_array`.

    Raises SerializationError with the column and the first row that is no int or out of range.
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
    """Return offsets and bytes of all rows, or None unless all are bytes-like or ASCII. No Python code per row."""
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
    """Return each row as bytes."""
    if set(map(type, rows)) == {str}:
        try:
            return list(map(str.encode, rows))
        except UnicodeEncodeError:
            pass  # half of a surrogate pair; the loop finds its row
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
    """Return the error text for a str that UTF-8 cannot encode. `whose` names the value."""
    at = cause.start
    return (
        f"{whose} is a str that is not valid Unicode: at place {at} is U+{ord(cause.object[at]):04X}, one half of a"
        " surrogate pair, which UTF-8 cannot hold. Correct the text where it is made, or give bytes."
    )


def exact_int(number: Any) -> int:
    """Return the int of an int of Python or numpy. Raises TypeError for a bool or another type."""
    if isinstance(number, (bool, np.bool_)):
        raise TypeError("a bool is not an int here")
    return operator.index(number)


def int_text(number: int) -> str:
    """Return the number for an error text. Python does not print thousands of digits."""
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
"""From this average size on, memory matters more than page faults."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
_KEPT: Final = 4 << 20
_KEPT_OF_LARGE: Final = 128 << 10
SENT_POOL: Final = pa.jemalloc_memory_pool() if "jemalloc" in pa.supported_memory_backends() else None
"""The pool of bytes that wait for their acknowledgement: blocks of small records, and compressed batches.

Of freed memory mimalloc, the default of Arrow, keeps much more than jemalloc.
"""


def keep_freed_heap() -> None:
    """Keep freed pieces of up to 4 MiB for the next block. The default of glibc is 128 KiB."""
    _set_thresholds(_KEPT)


def pool_for(num_bytes: int, rows: int) -> pa.MemoryPool | None:
    """Return the pool for a block of this size, or None for the default pool of Arrow.

    From the first block of large records on, the process returns large pieces to the kernel at once.
    """
    if num_bytes < LARGE_RECORD * rows:
        return SENT_POOL
    _set_thresholds(_KEPT_OF_LARGE)
    return pa.system_memory_pool()


def _set_thresholds(mapped: int) -> None:
    """Map pieces from `mapped` bytes on one by one, and cut the free end of the heap at twice that (mallopt(3)).

    C libraries other than glibc have no such settings.
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, mapped)
        _mallopt(_M_TRIM_THRESHOLD, 2 * mapped)
