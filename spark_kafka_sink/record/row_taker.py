"""Rows of Python values to lists of cells, one list for each column, in C where the kernel is compiled (`_rows.c`).

A `RowTaker` takes the rows of one layout: rows of one type of tuples that have their names as `__fields__`, and dicts.
It appends each cell of a row to the list of its column, while the iterator stands at the row: a bytearray as bytes,
headers as their keys and values. A row of another type, with other names, or with a cell of another type is left to
its caller, and nothing of it is in the lists. So a taker decides nothing: the caller's own way of taking rows, which
takes every row, gives the same cells for those that a taker takes, and tests compare both.

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

from typing import Any, Final

from spark_kafka_sink.record.runs import _kernel

NOT_TAKEN: Final = 0
HAS_ROOM: Final = 1
IS_FULL: Final = 2

Cells = list[Any]
Step = tuple[int, int, Cells, tuple[type, ...] | None, Cells | None, Cells | None]

_BYTES: Final = 0
_TYPED: Final = 1
_HEADERS: Final = 2

RowTaker: Any = getattr(_kernel, "RowTaker", None)
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
