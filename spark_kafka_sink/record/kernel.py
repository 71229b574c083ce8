"""The compiled kernel (`_kernel.c`, `_rows.c`, and those of serialization/), loaded once. None if it was not compiled.

The kernel's `RowTaker` turns rows of Python values into lists of cells, one list for each column. It takes rows of one
layout: rows of one type of tuples that have their names as `__fields__`, and dicts. While the iterator stands at a row,
it appends each cell to the list of its column: a bytearray as bytes, headers as keys and values. It does not take a row
of another type, with other names, or with a cell of another type: then the lists do not change. The caller has its own
code in Python that takes every row. Both give the same cells, as tests check.

    taker = RowTaker(row_type, names, plan, most_rows, most_bytes, header_bytes)

`names`: a tuple of the names of all cells. `plan`: a tuple of results of `bytes_step`, `typed_step` and `headers_step`,
at most one for each column of a record. `header_bytes`: bytes to count for a header besides its key and value. A taker
is full with `most_rows` rows, or with `most_bytes` of keys, values and headers.

    taker.take(iterator, rows, bytes)

takes rows up to these numbers of rows and bytes, or until it is full, and then returns (). It returns None at the end
of the iterator, and `(row,)` for a row that it does not take. Raises the iterator's errors; rows before the error stay
in the lists.

    taker.add(row)

returns NOT_TAKEN, HAS_ROOM or IS_FULL. `taker.rows` and `taker.size` are the rows and bytes so far. One thread only.
"""

from __future__ import annotations

import logging
import platform
import sys
from importlib import import_module
from typing import Any, Final

import pyarrow as pa

from spark_kafka_sink.record.arrow import value_bytes, value_offsets

log = logging.getLogger(__name__)

if sys.byteorder != "little":  # kernel, numpy code and decimals read numbers as Arrow has them on the others
    raise ImportError(
        f"spark_kafka_sink does not run on this processor ({platform.machine()}): it is big-endian, and the numbers in"
        " records would be wrong. Use a machine with x86-64 or ARM64."
    )


def column_buffers(column: pa.BinaryArray | None) -> tuple[Any, Any, Any, int]:
    """Return offsets, data, validity bits (None if no row is null), and the bit of the first row."""
    if column is None or column.null_count == len(column):
        # all null: same as no column
        return None, None, None, 0
    valid = column.buffers()[0] if column.null_count else None
    return value_offsets(column), value_bytes(column), valid, column.offset


_WITHOUT_KERNEL: Final = (
    "numpy encodes the records, at about a third of its speed, and plain Python writes columns with a format (Avro,"
    " Protobuf, JSON), at about a sixtieth"
)


def _load_kernel() -> Any:
    """Return the kernel, or None if it was not compiled (as in a zip of the package) or does not load."""
    try:
        return import_module("spark_kafka_sink.record._kernel")
    except ModuleNotFoundError:
        log.info("There is no compiled kernel: %s", _WITHOUT_KERNEL)
    except ImportError as cause:
        log.warning(
            "The compiled kernel does not load: %s. Install spark-kafka-sink on a machine like this one. %s",
            cause,
            _WITHOUT_KERNEL,
        )
    return None


KERNEL: Any = _load_kernel()


def has_kernel() -> bool:
    """Return whether the compiled kernel is loaded."""
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
"""None without the kernel."""


def bytes_step(position: int, cells: Cells) -> Step:
    """Append the cell at `position`: str, bytes or None as it is, a bytearray as bytes. Its length counts."""
    return _BYTES, position, cells, None, None, None


def typed_step(position: int, cells: Cells, allowed: tuple[type, ...]) -> Step:
    """Append the cell at `position`, of one of the types `allowed` and not of a subclass.

    The values of these types must be immutable.
    """
    return _TYPED, position, cells, allowed, None, None


def headers_step(position: int, counts: Cells, keys: Cells, values: Cells) -> Step:
    """Append the count of headers of the cell at `position`, their keys (str) and values (as in `bytes_step`).

    The cell is None, or a list or tuple of pairs, of rows with the fields key and value, or of dicts with these keys.
    """
    return _HEADERS, position, counts, None, keys, values
