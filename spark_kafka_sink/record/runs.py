"""A block's runs to bytes: by the compiled kernel (`_kernel.c`), or by its numpy twin where that was not compiled.

Holds no state; any thread. Both give the same bytes, which tests compare. The kernel writes each record once, where it
belongs, without the GIL; the twin encodes all rows in their own order in one vectorised pass, and one take brings them
into partition order.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.arrow_arrays import Int64Array, index_array, value_bytes, value_offsets
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import data_view, encode_array
from spark_kafka_sink.record.headers import encode_headers

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

log = logging.getLogger(__name__)

_SLACK: Final = 16
"""Bytes of room that the kernel wants to see beyond a record's own."""


class RunInput(NamedTuple):
    """Rows of `columns`; row number `order[i]` is at place i (None: at its own). `times`: int64 ms by place, None where
    it is `now_ms` everywhere. `size`: what the records take at most.
    """

    columns: RecordColumns
    order: npt.NDArray[np.intp] | None
    times: Int64Array | None
    now_ms: int
    size: int


def encode_by_kernel(given: RunInput, table: Int64Array, pool: pa.MemoryPool | None) -> list[SizedBuffer]:
    """The bytes of each run. `table`: a row of four for each, as block.RunTable. Raises SerializationError where the
    columns' own lengths do not fit their bytes.
    """
    columns = given.columns
    headers = None if columns.headers is None else encode_headers(columns.headers)
    counts = None if headers is None else np.ascontiguousarray(headers.counts)
    tail = (None, None) if headers is None else (value_offsets(headers.encoded), value_bytes(headers.encoded))
    out = pa.allocate_buffer(given.size + _SLACK, memory_pool=pool)
    try:
        chunks: list[SizedBuffer] = _kernel.encode(
            columns.num_rows,
            given.now_ms,
            given.order,
            given.times,
            counts,
            table,
            out,
            _buffers(columns.key),
            _buffers(columns.value),
            tail,
        )
    except ValueError as error:
        raise SerializationError(f"The records could not be written: {error}.") from error
    return chunks


def encode_by_numpy(given: RunInput, table: Int64Array, pool: pa.MemoryPool | None) -> list[SizedBuffer]:
    """As `encode_by_kernel`."""
    columns, order, times, now_ms, _ = given
    starts, ends, base_offsets, base_times = table.T
    first, last = int(starts[0]), int(ends[-1])
    if last - first < columns.num_rows:
        # Only these rows; the take brings them into order at once.
        columns = columns.slice(first, last - first) if order is None else columns.take(order[first:last])
        order = None
    # Rows of a gap belong to the run before it: they are encoded with its deltas, and then not handed out.
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


def _buffers(column: pa.BinaryArray | None) -> tuple[Any, Any, Any, int]:
    """Offsets, data, validity bits (None where nothing is null), and the bit of the first row."""
    if column is None or column.null_count == len(column):
        # all null: as if there were no column, whose offsets nobody reads
        return None, None, None, 0
    valid = column.buffers()[0] if column.null_count else None
    return value_offsets(column), value_bytes(column), valid, column.offset


def _unsorted(values: Int64Array, order: npt.NDArray[np.intp]) -> Int64Array:
    """Values of rows in partition order, back in the order in which the rows came."""
    result = np.empty_like(values)
    result[order] = values
    return result


def _load_kernel() -> Any:
    """None where it was not compiled, as in a zip of the package, and where it does not load on this machine."""
    try:
        return import_module("spark_kafka_sink.record._kernel")
    except ModuleNotFoundError:
        log.info("There is no compiled kernel: numpy encodes the records, at about a third of its speed")
    except ImportError as cause:
        log.warning(
            "The compiled kernel does not load: numpy encodes the records, at about a third of its speed. Install"
            " spark-kafka-sink on a machine like this one. %s",
            cause,
        )
    return None


_kernel: Any = _load_kernel()


def has_kernel() -> bool:
    """Whether the compiled kernel is there."""
    return _kernel is not None


encode_runs = encode_by_kernel if has_kernel() else encode_by_numpy
