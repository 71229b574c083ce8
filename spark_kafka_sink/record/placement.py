"""Which rows of a block know their partition, by number or by key, and which may go anywhere.

Holds no state; any thread. What "anywhere" becomes is the sticky partitioner's choice, not this room's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.arrow_arrays import BoolArray, int_values, null_mask
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.murmur2 import Int32Array, partitions_for_keys


class Placement(NamedTuple):
    """`placed` with `partitions` (int32, one per row) for a Block, and `free`, which has no partition yet; None where
    there are no rows.
    """

    placed: RecordColumns | None
    partitions: Int32Array | None
    free: RecordColumns | None


def place(
    columns: RecordColumns,
    partition_count: int,
    ignore_keys: bool = False,
    whose: str = "the topic",
    first_row: int = 0,
) -> Placement:
    """Each row's own partition where it has one, else that of its key; rows without either, in their order, are free.

    `ignore_keys` is partitioner.ignore.keys. An error says `whose` partitions they are, and counts rows from
    `first_row`. Raises SerializationError naming the first row whose partition the topic does not have.
    """
    rows = columns.num_rows
    given = None if _all_null(columns.partition) else columns.partition
    key = None if ignore_keys or _all_null(columns.key) else columns.key
    if given is None and key is None:
        return Placement(None, None, columns if rows else None)
    partitions = np.full(rows, -1, np.int32)
    free = np.ones(rows, np.bool_)
    if key is not None:
        partitions = partitions_for_keys(key, partition_count)
        free = _or_false(null_mask(key), rows)
    if given is not None:
        unset = _or_false(null_mask(given), rows)
        explicit = int_values(given)
        _check(explicit, unset, partition_count, whose, first_row)
        partitions = np.where(unset, partitions, explicit)
        free &= unset
    if partition_count == 1:  # anywhere is there, and rows keep their order among each other
        partitions, free = np.zeros(rows, np.int32), np.zeros(rows, np.bool_)
    if not free.any():
        return Placement(columns, partitions, None)
    known = np.flatnonzero(~free)
    placed = columns.take(known) if len(known) else None
    return Placement(placed, partitions[known] if len(known) else None, columns.take(np.flatnonzero(free)))


def highest_partition(columns: RecordColumns) -> int | None:
    """The highest partition that a row asks for, None where no row asks for one."""
    if columns.partition is None:
        return None
    highest: int | None = pc.max(columns.partition).as_py()
    return highest


def _all_null(column: pa.Array | None) -> bool:
    return column is None or column.null_count == len(column)


def _or_false(mask: BoolArray | None, rows: int) -> BoolArray:
    return np.zeros(rows, np.bool_) if mask is None else mask


def _check(explicit: npt.NDArray[np.int32], unset: BoolArray, partition_count: int, whose: str, first_row: int) -> None:
    wrong = np.flatnonzero(((explicit < 0) | (explicit >= partition_count)) & ~unset)
    if len(wrong):
        row = int(wrong[0])
        raise SerializationError(
            f"Row {first_row + row} asks for partition {int(explicit[row])}; {whose} has 0 to {partition_count - 1}:"
            " change the column partition, or leave it null."
        )
