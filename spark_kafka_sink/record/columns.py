"""The columns of a block of records, checked and in the shape that the encoder reads.

A value: any thread may read it, nothing changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.record.arrow_arrays import as_binary, combine, index_array
from spark_kafka_sink.record.headers import Header, decoded_chunks, headers_from_rows, normalise_headers
from spark_kafka_sink.record.row_arrays import binary_array, int_array


@dataclass(frozen=True, eq=False)
class RecordColumns:
    """Records as Arrow arrays of one length.

    `value` and `key`: string or binary in any layout (large, view, fixed size, dictionary), kept as `binary`; a null
    is a null on the wire; `key` None = no keys. `headers`: list<struct<key: string, value: binary>>; a null or empty
    list = none, a null value stays null, a name that is null or not UTF-8 is refused. `timestamp_ms`: int64,
    milliseconds since 1970; None or a null entry = the time of the append. `partition`: int32; None or a null entry =
    not set. Chunked arrays are combined; slices are taken as they are.

    Raises SchemaError for a wrong type or length, SerializationError for contents that cannot be written (a nameless
    header, more than 2 GiB in a column); both name the column.
    """

    value: pa.Array
    key: pa.Array | None = None
    headers: pa.Array | None = None
    timestamp_ms: pa.Array | None = None
    partition: pa.Array | None = None

    def __post_init__(self) -> None:
        value = as_binary(combine(self.value, "value"), "value")
        self._set("value", value)
        if self.key is not None:
            self._set("key", as_binary(combine(self.key, "key"), "key"))
        if self.headers is not None:
            self._set("headers", normalise_headers(combine(decoded_chunks(self.headers), "headers")))
        if self.timestamp_ms is not None:
            self._set("timestamp_ms", _of_type(self.timestamp_ms, "timestamp_ms", pa.int64()))
        if self.partition is not None:
            self._set("partition", _of_type(self.partition, "partition", pa.int32()))
        for name in ("key", "headers", "timestamp_ms", "partition"):
            column = getattr(self, name)
            if column is not None and len(column) != len(value):
                raise SchemaError(f"The column '{name}' has {len(column)} rows, the column 'value' has {len(value)}.")

    @property
    def num_rows(self) -> int:
        return len(self.value)

    def slice(self, offset: int, length: int) -> RecordColumns:
        """Rows offset..offset+length-1; no copy."""
        return self._map(lambda column: column.slice(offset, length))

    def take(self, order: Any) -> RecordColumns:
        """The rows at `order` (a numpy or Arrow array of integers), in that order: one copy of each column."""
        indices = order if isinstance(order, pa.Array) else index_array(order.astype(np.int64, copy=False))
        return self._map(lambda column: column.take(indices))

    def _map(self, change: Callable[[pa.Array], pa.Array]) -> RecordColumns:
        changed = object.__new__(RecordColumns)  # not by the checks: these columns have passed them
        for name in ("value", "key", "headers", "timestamp_ms", "partition"):
            column = getattr(self, name)
            changed._set(name, None if column is None else change(column))
        return changed

    @classmethod
    def from_rows(
        cls,
        values: Sequence[bytes | str | None],
        keys: Sequence[bytes | str | None] | None = None,
        headers: Sequence[Sequence[Header] | None] | None = None,
        timestamps_ms: Sequence[int | None] | None = None,
        partitions: Sequence[int | None] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> RecordColumns:
        """Columns of Python values, one entry per row. `numbers`: the number of each row in errors, its index where
        None. Raises SerializationError naming the column and the first row that does not fit.
        """
        times = None if timestamps_ms is None else int_array(timestamps_ms, pa.int64(), "timestamp_ms", numbers)
        return cls(
            value=binary_array(values, "value", numbers),
            key=None if keys is None else binary_array(keys, "key", numbers),
            headers=None if headers is None else headers_from_rows(headers, numbers),
            timestamp_ms=times,
            partition=None if partitions is None else int_array(partitions, pa.int32(), "partition", numbers),
        )

    def _set(self, name: str, column: pa.Array) -> None:
        object.__setattr__(self, name, column)


def _of_type(column: pa.Array | pa.ChunkedArray, name: str, data_type: pa.DataType) -> pa.Array:
    array = combine(column, name)
    if array.type != data_type:
        raise SchemaError(f"The column '{name}' has the Arrow type {array.type}; it must be {data_type}.")
    return array
