"""Arrow arrays in the one shape that the encoder reads: contiguous `binary` with 32-bit offsets.

Holds no state; any thread. What has 32-bit offsets already (`string`, `binary`, slices of them) is taken as it is,
without a copy; `large_*` columns get new offsets over the same bytes; view, fixed-size and dictionary columns are
rewritten once, in C++.

What crosses between Arrow and numpy does so by buffers: pyarrow's own ways (`pa.array`, `pa.scalar`, `to_numpy`, a
Python value for `fill_null`) import pandas where it is installed.
"""

from __future__ import annotations

from typing import Any

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
