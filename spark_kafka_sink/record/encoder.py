"""Records to bytes (format v2, org.apache.kafka.common.record.DefaultRecord): the runs of a block, and rows of `send`.

The compiled kernel writes each record of a run once, to its final place, without the GIL. Its numpy twin is for
installations without the kernel: it encodes all rows in their own order in one vectorised pass, and one take brings
them into the order of partitions. Both give the same bytes, as tests check. A few rows of `send` are encoded one by
one. Holds no state; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.arrow import (
    MAX_COLUMN_BYTES,
    Int64Array,
    binary_from_numpy,
    binary_scalar,
    byte_lengths,
    data_bytes,
    index_array,
    keep_freed_heap,
    null_mask,
    value_bytes,
    value_offsets,
)
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.headers import (
    Header,
    all_headers_upper_bound,
    encode_headers,
    headers_upper_bounds,
    tight_headers_sizes,
)
from spark_kafka_sink.record.kernel import KERNEL, column_buffers, has_kernel
from spark_kafka_sink.record.varints import (
    MINUS_ONE,
    ZERO,
    Field,
    Lengths,
    length_widths,
    merge,
    to_binary,
    total_width,
    varint,
    varint_fields,
    varint_width,
    zigzag,
)

if TYPE_CHECKING:
    from _typeshed import SizedBuffer


MAX_RECORD_OVERHEAD = 21
"""The most bytes of length (5), attributes (1), timestamp delta (10) and offset delta (5) of a record."""
_LEAST_FIELDS: Final = 3
"""Bytes of the attributes, and of both deltas in the first record of a batch."""

_MOST_OF_INT32: Final = 1 << 29
"""Up to so many bytes of values, lengths are int32, because each pass over them takes half the time."""

_EMPTY = binary_scalar(b"")
_NO_HEADERS = binary_scalar(b"\0")
_NULL: Final = varint(-1)
_FEW_ROWS: Final = 32
"""Up to this many rows are encoded one by one, because arrays have a fixed cost.

Batches of `send` are small if records come slowly, or go to many partitions.
"""

keep_freed_heap()


@dataclass(slots=True)
class EncodedRun:
    """Encoded records: their bytes, their count, the latest timestamp, and an upper bound of the largest size."""

    chunk: memoryview
    count: int
    max_timestamp_ms: int
    largest_record: int


def encode_array(
    columns: RecordColumns,
    offset_deltas: Int64Array,
    timestamp_deltas: Int64Array | None,
    pool: pa.MemoryPool | None = None,
) -> pa.BinaryArray:
    """Return one `binary` value per record.

    Deltas are int64, one per row, from the base of the batch. `timestamp_deltas` None means all zero. `pool`: memory
    pool of the result, None for the default pool of Arrow. Raises SerializationError if the block takes more than 2
    GiB.
    """
    rows = columns.num_rows
    if rows == 0:
        return binary_from_numpy(np.zeros(1, np.int32), np.zeros(0, np.uint8))
    value_lengths = byte_lengths(columns.value)
    value_size = varint_fields(zigzag(value_lengths))
    body: Int64Array = value_lengths if columns.value.null_count == 0 else np.maximum(value_lengths, 0)
    front: list[Field] = [ZERO]
    front += (ZERO,) if timestamp_deltas is None else varint_fields(zigzag(timestamp_deltas))
    front += varint_fields(zigzag(offset_deltas))
    between: list[pa.Array] = []
    key = columns.key
    if key is None or key.null_count == rows:
        front.append(MINUS_ONE)
        front += value_size
    else:
        key_lengths = byte_lengths(key)
        front += varint_fields(zigzag(key_lengths))
        between = [key, to_binary(value_size, rows)]
        body = body + (key_lengths if key.null_count == 0 else np.maximum(key_lengths, 0)) + total_width(value_size)
    tail: list[pa.Array | pa.Scalar] = [_NO_HEADERS]
    headers = None if columns.headers is None else encode_headers(columns.headers)
    if headers is not None:
        count = varint_fields(zigzag(headers.counts))
        tail = [to_binary(count, rows), headers.encoded]
        body = body + headers.lengths + total_width(count)
    else:
        body = body + 1
    front = merge(front)
    body = body + total_width(front)
    if int(body.sum()) + 5 * rows > MAX_COLUMN_BYTES:
        raise SerializationError(
            f"{rows} records take more than {MAX_COLUMN_BYTES} bytes together; hand over fewer rows at a time."
        )
    prefix = to_binary(merge([*varint_fields(zigzag(body)), *front]), rows)
    return pc.binary_join_element_wise(
        prefix, *between, columns.value, *tail, _EMPTY, null_handling="skip", memory_pool=pool
    )


def encode_columns(
    columns: RecordColumns, offset_deltas: Int64Array, timestamp_deltas: Int64Array | None
) -> tuple[memoryview, Int64Array]:
    """Return the bytes of all records, and the first byte of each: int64, num_rows + 1 entries. See encode_array."""
    encoded = encode_array(columns, offset_deltas, timestamp_deltas)
    return data_view(encoded), value_offsets(encoded).astype(np.int64)


def data_view(encoded: pa.BinaryArray) -> memoryview:
    """Return the bytes that value_offsets points into. No copy."""
    buffer = encoded.buffers()[2]
    return memoryview(b"" if buffer is None else buffer).toreadonly()


def encode_rows(
    keys: Sequence[bytes | str | None] | None,
    values: Sequence[bytes | str | None],
    headers: Sequence[Sequence[Header] | None] | None,
    timestamps_ms: Sequence[int],
    base_offset_delta: int,
    base_timestamp_ms: int,
) -> EncodedRun:
    """Encode rows of Python values, at least one, as consecutive records of one batch.

    The batch has `base_offset_delta` records already. Raises SerializationError for a row that does not fit.
    """
    if len(values) <= _FEW_ROWS:
        try:
            records = [
                _record(key, value, own or (), base_offset_delta + row, int(timestamp_ms) - int(base_timestamp_ms))
                for row, (value, key, own, timestamp_ms) in enumerate(
                    zip(values, keys or repeat(None), headers or repeat(()), timestamps_ms)  # noqa: B905
                )
            ]
        except (_NotBytesError, UnicodeEncodeError):
            pass  # text, or a value that columns refuse with its row
        else:
            chunk = memoryview(b"".join(records))
            return EncodedRun(chunk, len(records), int(max(timestamps_ms)), max(map(len, records)))
    columns = RecordColumns.from_rows(values, keys, headers)
    times = np.array(timestamps_ms, np.int64)
    deltas = np.arange(base_offset_delta, base_offset_delta + columns.num_rows, dtype=np.int64)
    chunk, bounds = encode_columns(columns, deltas, times - base_timestamp_ms)
    return EncodedRun(chunk, columns.num_rows, int(times.max()), int(np.diff(bounds).max()))


class _NotBytesError(Exception):
    """A part of a record is neither bytes nor None, or the name of a header is not str."""


def _record(key: Any, value: Any, headers: Sequence[Header], offset_delta: int, timestamp_delta: int) -> bytes:
    """Return one encoded record. Raises _NotBytesError if a part of it is not bytes."""
    parts = [b"\0", varint(timestamp_delta), varint(offset_delta)]
    _add(parts, key)
    _add(parts, value)
    parts.append(varint(len(headers)))
    for name, content in headers:
        if not isinstance(name, str):
            raise _NotBytesError
        _add(parts, name.encode())
        _add(parts, content)
    body = b"".join(parts)
    return varint(len(body)) + body


def _add(parts: list[bytes], content: Any) -> None:
    if content is None:
        parts.append(_NULL)
    elif isinstance(content, bytes):
        parts += (varint(len(content)), content)
    else:
        raise _NotBytesError


def record_size_upper_bound(key: bytes | None, value: bytes | None, headers: Sequence[Header] = ()) -> int:
    """Return the most bytes of this record in any batch (DefaultRecord.recordSizeUpperBound)."""
    size = MAX_RECORD_OVERHEAD + _sized(key) + _sized(value) + varint_width(len(headers))
    for name, content in headers:
        size += _sized(name.encode()) + _sized(content)
    return size


def _sized(content: bytes | None) -> int:
    return 1 if content is None else varint_width(len(content)) + len(content)


def columns_size_upper_bound(columns: RecordColumns) -> int:
    """Return the sum of record_size_upper_bounds and of the bytes under nulls, without reading each length."""
    size = columns.num_rows * (MAX_RECORD_OVERHEAD + 15) + data_bytes(columns.value)
    if columns.key is not None:
        size += data_bytes(columns.key)
    if columns.headers is not None:
        size += all_headers_upper_bound(columns.headers)
    return size


def record_size_upper_bounds(columns: RecordColumns) -> Lengths:
    """Return the most bytes of each record in a batch: int32 or int64, one per row. Lengths and counts take five bytes
    each.
    """
    sizes = _lengths(columns.value) + (MAX_RECORD_OVERHEAD + 15)
    if columns.key is not None:
        sizes = sizes + _lengths(columns.key)
    return sizes if columns.headers is None else sizes + headers_upper_bounds(columns.headers)


def tight_record_size_upper_bounds(columns: RecordColumns) -> Lengths:
    """Return record_size_upper_bound of each row: int32 or int64. Twice the work of record_size_upper_bounds."""
    sizes = _all_sized(columns.value) + MAX_RECORD_OVERHEAD
    sizes = sizes + (1 if columns.key is None else _all_sized(columns.key))
    if columns.headers is None:
        return sizes + 1
    counts, header_sizes = tight_headers_sizes(columns.headers)
    return sizes + length_widths(counts) + header_sizes


def lone_record_sizes(columns: RecordColumns) -> Lengths:
    """Return the bytes of each record if it is alone in its batch: int32 or int64, one per row."""
    bodies = tight_record_size_upper_bounds(columns) - (MAX_RECORD_OVERHEAD - _LEAST_FIELDS)
    return length_widths(bodies) + bodies


def parts_up_to(columns: RecordColumns, rows: int, size: int) -> Iterator[tuple[RecordColumns, int, int]]:
    """Yield parts of at most `rows` rows and `size` bytes, but at least one row, in their order and without a copy.

    With each: its bytes, and those of all rows from its first one on. Bytes are `lone_record_sizes`: a batch adds to a
    record one or two for its place, and some for a time that is far from that of the first record. If all rows are one
    part, it may have three bytes a record more or less, so that no length is read.
    """
    if columns.num_rows <= rows and (whole := _lone_size_by_mean(columns)) is not None and whole <= size:
        yield columns, whole, whole
        return
    ends = np.cumsum(lone_record_sizes(columns), dtype=np.int64)
    first, begin = 0, 0
    while first < columns.num_rows:
        last = int(np.searchsorted(ends, begin + size, side="right"))
        last = min(max(last, first + 1), first + rows, columns.num_rows)
        end = int(ends[last - 1])
        yield columns.slice(first, last - first), end - begin, int(ends[-1]) - begin
        first, begin = last, end


def _lone_size_by_mean(columns: RecordColumns) -> int | None:
    """Return the sum of lone_record_sizes as if all rows were as long as the mean one. None with headers and with
    nulls, which may hide bytes, and without rows.
    """
    rows, parts = columns.num_rows, [each for each in (columns.value, columns.key) if each is not None]
    if not rows or columns.headers is not None or any(each.null_count for each in parts):
        return None
    size = rows * (_LEAST_FIELDS + 3 - len(parts))  # no headers, and perhaps no key, take a byte each
    for each in parts:
        size += data_bytes(each) + rows * varint_width(data_bytes(each) // rows)
    return size + rows * varint_width(size // rows)


def _all_sized(column: pa.BinaryArray) -> Lengths:
    lengths = _lengths(column)
    return length_widths(lengths) + lengths


def _lengths(column: pa.BinaryArray) -> Lengths:
    """Return the bytes of each value, 0 for a null. int32 if no sum of a record's lengths can be too large for it."""
    offsets = value_offsets(column)
    if data_bytes(column) > _MOST_OF_INT32:
        offsets = offsets.astype(np.int64)
    lengths: Lengths = offsets[1:] - offsets[:-1]
    nulls = null_mask(column)
    if nulls is not None:
        lengths[nulls] = 0
    return lengths


_SLACK: Final = 16
"""Free bytes that the kernel requires after a record."""


class RunInput(NamedTuple):
    """Rows of `columns`, with row `order[i]` at place i (None: row i at place i).

    `times`: int64 ms by place, None if `now_ms` everywhere. `size`: the most bytes of the records.
    """

    columns: RecordColumns
    order: npt.NDArray[np.intp] | None
    times: Int64Array | None
    now_ms: int
    size: int


def encode_by_kernel(given: RunInput, table: Int64Array, pool: pa.MemoryPool | None) -> list[SizedBuffer]:
    """Return the bytes of each run. `table` has a row of four for each, as block.RunTable.

    Raises SerializationError if the offsets of a column do not fit its bytes.
    """
    columns = given.columns
    headers = None if columns.headers is None else encode_headers(columns.headers)
    counts = None if headers is None else np.ascontiguousarray(headers.counts)
    tail = (None, None) if headers is None else (value_offsets(headers.encoded), value_bytes(headers.encoded))
    out = pa.allocate_buffer(given.size + _SLACK, memory_pool=pool)
    try:
        chunks: list[SizedBuffer] = KERNEL.encode(
            columns.num_rows,
            given.now_ms,
            given.order,
            given.times,
            counts,
            table,
            out,
            column_buffers(columns.key),
            column_buffers(columns.value),
            tail,
        )
    except ValueError as error:
        raise SerializationError(f"The records could not be written: {error}.") from error
    return chunks


def encode_by_numpy(given: RunInput, table: Int64Array, pool: pa.MemoryPool | None) -> list[SizedBuffer]:
    """Return the same bytes as `encode_by_kernel`."""
    columns, order, times, now_ms, _ = given
    starts, ends, base_offsets, base_times = table.T
    first, last = int(starts[0]), int(ends[-1])
    if last - first < columns.num_rows:
        # Only these rows. The take also brings them into order.
        columns = columns.slice(first, last - first) if order is None else columns.take(order[first:last])
        order = None
    # Rows of a gap are encoded with the deltas of the run before it, and then not returned.
    widths = np.diff(starts, append=last)
    offset_deltas = np.arange(first, last) - np.repeat(starts - base_offsets, widths)
    timestamp_deltas: Int64Array | None = None
    if times is not None:
        timestamp_deltas = times[first:last] - np.repeat(base_times, widths)
    elif np.any(base_times != now_ms):
        timestamp_deltas = np.repeat(now_ms - base_times, widths)
    if order is not None:
        offset_deltas = _unsorted(offset_deltas, order)
        timestamp_deltas = None if timestamp_deltas is None else _unsorted(timestamp_deltas, order)
    encoded = encode_array(columns, offset_deltas, timestamp_deltas, pool)
    if order is not None:
        encoded = pc.take(encoded, index_array(order), memory_pool=pool)
    offsets, data = value_offsets(encoded), data_view(encoded)
    bounds = zip(offsets[starts - first].tolist(), offsets[ends - first].tolist(), strict=True)
    return [data[start:end] for start, end in bounds]


def _unsorted(values: Int64Array, order: npt.NDArray[np.intp]) -> Int64Array:
    """Return values in the original order of rows, from values in the order of partitions."""
    result = np.empty_like(values)
    result[order] = values
    return result


encode_runs = encode_by_kernel if has_kernel() else encode_by_numpy
