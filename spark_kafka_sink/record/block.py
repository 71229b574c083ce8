"""A block of columns in the order of partitions, cut into the runs that go to batches.

The thread that appends makes and uses it. The accumulator decides with Python ints where a run begins and ends. Then
`encode` writes the records of all runs in one pass (`encoder.py`), so that a run is a slice of the result.

The chunk of a run is a view: it keeps the buffer of its whole block in memory. The kernel has its own type of chunks,
which knows only its length and its bytes (for `memoryview`, `join`, sockets and codecs).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.arrow import MAX_COLUMN_BYTES, Int64Array, int_values, pool_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import (
    RunInput,
    encode_runs,
    record_size_upper_bounds,
    tight_record_size_upper_bounds,
)

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

RunTable: TypeAlias = array  # of "q"
"""Four numbers for each run: its first row, its end row, the records before it in the batch, and the base timestamp of
the batch in ms.

A run has rows of one partition, for one batch. The table is flat, because tuples would cost more than the encoding in a
block with a thousand partitions.
"""


class RowSizes:
    """Upper bounds of the bytes of rows as records, without the header of a batch. `sizes`: one for each row."""

    __slots__ = ("ends",)

    def __init__(self, sizes: npt.NDArray[np.int32] | Int64Array) -> None:
        ends = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=ends[1:])
        self.ends: memoryview = ends.data
        """Entry i: the bytes of all rows before row i. One entry more than rows."""

    @property
    def num_rows(self) -> int:
        return len(self.ends) - 1

    def size(self, start: int, end: int) -> int:
        """Return the most bytes of rows start..end-1."""
        ends = self.ends
        return ends[end] - ends[start]

    def last_fitting(self, start: int, end: int, room: int) -> int:
        """Return the greatest row e in start..end with size(start, e) <= room, or start if no record fits."""
        return max(start, bisect_right(self.ends, self.ends[start] + room, start, end + 1) - 1)


class Block(RowSizes):
    """Rows of `columns` grouped by partition, in their order within a partition. Row numbers count in this order.

    `partitions`: int32 array, one per row, or one int for all rows; not negative. Rows without a timestamp get
    `now_ms`. Sizes are upper bounds that cost one pass. If one is above `limit`, all are computed as exactly as for
    `send`, so that both refuse the same records. Raises SerializationError if the rows may take more than 2 GiB.
    """

    __slots__ = ("_columns", "_groups", "_now_ms", "_order", "_times", "largest_record", "partitions")

    partitions: list[int]
    """The partitions that have rows, ascending."""
    largest_record: int
    """An upper bound of the bytes of the largest record."""

    def __init__(
        self,
        columns: RecordColumns,
        partitions: npt.NDArray[np.int32] | int,
        now_ms: int,
        limit: int = MAX_COLUMN_BYTES,
    ) -> None:
        self._columns = columns
        self._now_ms = now_ms
        self._order: npt.NDArray[np.intp] | None = None
        rows = columns.num_rows
        if isinstance(partitions, int):
            self.partitions, self._groups = ([partitions], [0, rows]) if rows else ([], [0])
        else:
            self._order, self.partitions, self._groups = _group(partitions)
        sizes = record_size_upper_bounds(columns)
        self.largest_record = int(sizes.max()) if rows else 0
        if self.largest_record > limit:
            sizes = tight_record_size_upper_bounds(columns)
            self.largest_record = int(sizes.max())
        times = _times(columns, now_ms)
        if self._order is not None:
            sizes = sizes[self._order]
            times = None if times is None else times[self._order]
        super().__init__(sizes)
        if self.ends[rows] > MAX_COLUMN_BYTES:
            raise SerializationError(
                f"{rows} records may take more than {MAX_COLUMN_BYTES} bytes together; hand over fewer rows at a time."
            )
        self._times = times

    @property
    def groups(self) -> Iterator[tuple[int, int, int]]:
        """The (partition, start row, end row) of each partition, ascending."""
        bounds = self._groups
        return zip(self.partitions, bounds, islice(bounds, 1, None), strict=False)

    def timestamp_ms(self, row: int) -> int:
        return self._now_ms if self._times is None else int(self._times[row])

    def encode(self, runs: RunTable[int]) -> tuple[list[SizedBuffer], Iterable[int]]:
        """Encode all runs in one pass. Return the bytes and the latest timestamp in ms of each.

        Runs ascend and do not overlap. Rows between them are left out.
        """
        if not runs:
            return [], ()
        table = np.frombuffer(runs, np.int64).reshape(-1, 4)
        first, last = runs[0], runs[-3]
        pool = pool_for(self.size(first, last), last - first)
        given = RunInput(self._columns, self._order, self._times, self._now_ms, self.size(first, last))
        return encode_runs(given, table, pool), self._latest(table)

    def _latest(self, table: npt.NDArray[np.int64]) -> Iterable[int]:
        """Return the latest timestamp of each run."""
        if self._times is None:
            return repeat(self._now_ms, len(table))
        latest: list[int] = np.maximum.reduceat(np.append(self._times, 0), table[:, :2].ravel())[::2].tolist()
        return latest


def _group(partitions: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.intp] | None, list[int], list[int]]:
    """Return the stable order by partition, the partitions, and the first row of each with the end of the last.

    The order is None if the rows are in it already.
    """
    rows = len(partitions)
    if rows == 0:
        return None, [], [0]
    order: npt.NDArray[np.intp] | None = None
    if not bool(np.all(partitions[1:] >= partitions[:-1])):
        # numpy sorts 16-bit integers by radix, much faster than wider ones.
        narrow = partitions.astype(np.uint16) if int(partitions.max()) < 1 << 16 else partitions
        order = np.argsort(narrow, kind="stable")
        partitions = partitions[order]
    starts = np.concatenate([np.zeros(1, np.intp), np.flatnonzero(partitions[1:] != partitions[:-1]) + 1])
    return order, partitions[starts].tolist(), [*starts.tolist(), rows]


def _times(columns: RecordColumns, now_ms: int) -> Int64Array | None:
    """Return int64 milliseconds, one per row, or None if every row has `now_ms`."""
    column = columns.timestamp_ms
    if column is None or column.null_count == len(column):
        return None
    return int_values(column, now_ms)
