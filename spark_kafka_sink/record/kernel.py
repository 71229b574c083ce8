"""The compiled kernel (`_kernel.c`, `_rows.c`): loaded once, None where it was not compiled.

A `RowTaker` of the kernel turns rows of Python values into lists of cells, one list for each column. It takes the rows
of one layout: rows of one type of tuples that have their names as `__fields__`, and dicts. It appends each cell of a
row to the list of its column, while the iterator stands at the row: a bytearray as bytes, headers as their keys and
values. A row of another type, with other names, or with a cell of another type is left to its caller, and nothing of
it is in the lists. So a taker decides nothing: the caller's own way of taking rows, which takes every row, gives the
same cells for those that a taker takes, and tests compare both.

    taker = RowTaker(row_type, names, plan, most_rows, most_bytes, header_bytes)

`names`: a tuple, of all cells of a row. `plan`: a tuple of what `bytes_step`, `typed_step` and `headers_step` make, at
most one for each column of a record. `header_bytes`: what a header counts besides its key and value. A taker is full
with `most_rows` rows, or with `most_bytes` of keys, values and headers.

    taker.take(iterator, rows, bytes)

takes rows until it has taken so many, or is full. It returns () then, None where the iterator is at its end, and
`(row,)` for a row that it does not take. Raises what the iterator raises; the rows before stay in the lists.

    taker.add(row)

returns NOT_TAKEN, HAS_ROOM or IS_FULL. `taker.rows` and `taker.size` are the rows and bytes so far. One thread only.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from spark_kafka_sink.record.arrow import value_bytes, value_offsets

if TYPE_CHECKING:
    pass


log = logging.getLogger(__name__)


def column_buffers(column: pa.BinaryArray | None) -> tuple[Any, Any, Any, int]:
    """Offsets, data, validity bits (None where nothing is null), and the bit of the first row."""
    if column is None or column.null_count == len(column):
        # all null: as if there were no column, whose offsets nobody reads
        return None, None, None, 0
    valid = column.buffers()[0] if column.null_count else None
    return value_offsets(column), value_bytes(column), valid, column.offset


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


KERNEL: Any = _load_kernel()


def has_kernel() -> bool:
    """Whether the compiled kernel is there."""
    return KERNEL is not None


NOT_TAKEN: Final = 0
HAS_ROOM: Final = 1
IS_FULL: Final = 2

Cells = list[Any]
Step = tuple[int, int, Cells, tuple[type, ...] | None, Cells | None, Cells | None]

_BYTES: Final = 0
_TYPED: Final = 1
_HEADERS: Final = 2

RowTaker: Any = getattr(KERNEL, "RowTaker", None)
"""None where the kernel was not compiled."""


def bytes_step(position: int, cells: Cells) -> Step:
    """Append the cell at `position`: a str, bytes or None as it is, a bytearray as bytes. Its length counts."""
    return _BYTES, position, cells, None, None, None


def typed_step(position: int, cells: Cells, allowed: tuple[type, ...]) -> Step:
    """Append the cell at `position`, which is of one of the types `allowed` and not of a subclass. They must be types
    whose values cannot be changed.
    """
    return _TYPED, position, cells, allowed, None, None


def headers_step(position: int, counts: Cells, keys: Cells, values: Cells) -> Step:
    """Append how many headers the cell at `position` holds, and their keys (str) and values (as of `bytes_step`). The
    cell is None, or a list or tuple of pairs, of rows with the fields key and value, or of dicts with these keys.
    """
    return _HEADERS, position, counts, None, keys, values
