"""The cells of a block of rows as Arrow columns, for the search of rows that can never be written.

`rows.RowBlock` makes records, and refuses the whole block for one wrong cell. Here a cell that no Arrow column can hold
becomes null, and its row is named; the other faults are left to record/sifting.py. Only sinks with dead letters use
this. Holds no state; any thread.
"""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa

from spark_kafka_sink.common.errors import KafkaError, SchemaError, SerializationError
from spark_kafka_sink.record.arrow import binary_array, int_array, int_text
from spark_kafka_sink.record.columns import (
    FIRST_USUAL_MS,
    LAST_MS,
    NO_TIMESTAMP,
    before_1970_text,
    early_text,
    late_text,
)
from spark_kafka_sink.record.headers import headers_from_cells
from spark_kafka_sink.record.sifting import Columns, Unwritable
from spark_kafka_sink.sink.schema import ALLOW_EARLY, HEADERS, KEY, PARTITION, TIMESTAMP, TOPIC, VALUE

Column = list[Any]
_INT32: Final = range(-(2**31), 2**31)
_TIME_TYPE: Final = pa.timestamp("ms", "UTC")


class _Faults:
    """The rows that cannot be written, each with its first fault."""

    def __init__(self) -> None:
        self.by_row: dict[int, Unwritable] = {}

    def note(self, row: int, error: type[KafkaError], reason: str, *lost: str) -> None:
        """Note a fault. `lost`: the column whose cell is not as it was."""
        fault = Unwritable(row, error, reason, lost=frozenset(lost))
        self.by_row[row] = self.by_row.get(row, fault).joined(fault)


def loose_columns(
    cells: Mapping[str, Column],
    header_cells: tuple[Column, Column],
    in_ms: Callable[[datetime.datetime], int],
    *,
    allows_early: bool,
) -> tuple[Columns, Sequence[Unwritable]]:
    """Return the columns, and the rows of which it is known already that they cannot be written.

    `cells`: those of `RowBlock`, of types that it allows; headers as the number of each row. `header_cells`: names, of
    which some may be None, and values. `in_ms` gives the time of a datetime.
    """
    faults = _Faults()
    columns = {name: _binary(cells[name], name, faults) for name in (VALUE, KEY, TOPIC) if name in cells}
    if HEADERS in cells:
        columns[HEADERS] = _headers(cells[HEADERS], *header_cells, faults)
    if PARTITION in cells:
        columns[PARTITION] = _partitions(cells[PARTITION], faults)
    if TIMESTAMP in cells:
        times = [in_ms(cell) if isinstance(cell, datetime.datetime) else cell for cell in cells[TIMESTAMP]]
        is_number = [type(cell) is int and not allows_early for cell in cells[TIMESTAMP]]
        columns[TIMESTAMP] = _times(times, is_number, faults)
    return columns, list(faults.by_row.values())


def _binary(cells: Column, name: str, faults: _Faults) -> pa.Array:
    try:
        return binary_array(cells, name)
    except SerializationError:
        clean = list(cells)
        for row in _no_texts(cells):
            faults.note(row, SerializationError, f"the {name} is a text that UTF-8 cannot hold", name)
            clean[row] = None
        return binary_array(clean, name)


def _no_texts(cells: Column) -> list[int]:
    """Return the places of texts with one half of a surrogate pair."""
    texts = ((at, cell) for at, cell in enumerate(cells) if isinstance(cell, str))
    return [at for at, text in texts if any("\ud800" <= letter <= "\udfff" for letter in text)]


def _headers(counts: Column, names: Column, values: Column, faults: _Faults) -> pa.Array:
    try:
        return headers_from_cells(counts, names, values)
    except SerializationError:
        ends = list(accumulate(counts))
        cleaned = []
        for cells, what in ((names, "name"), (values, "value")):
            clean = list(cells)
            for at in _no_texts(cells):
                reason = f"the {what} of a header is a text that UTF-8 cannot hold"
                faults.note(bisect_right(ends, at), SerializationError, reason, HEADERS)
                clean[at] = "" if what == "name" else None
            cleaned.append(clean)
        return headers_from_cells(counts, *cleaned)


def _partitions(cells: Column, faults: _Faults) -> pa.Array:
    clean = list(cells)
    for row, cell in enumerate(cells):
        if cell is not None and cell not in _INT32:
            faults.note(row, SerializationError, f"partition {int_text(cell)} does not fit into 32 bits")
            clean[row] = None
    return int_array(clean, pa.int32(), PARTITION)


def _times(cells: Sequence[int | None], is_number: Sequence[bool], faults: _Faults) -> pa.Array:
    """Return times as timestamps. `is_number`: whether a number before 1980 is refused."""
    clean = list(cells)
    whose = "The timestamp"
    for row, ms in enumerate(cells):
        if ms is None:
            continue
        if ms == NO_TIMESTAMP:
            clean[row] = None
        elif ms < 0:
            faults.note(row, SchemaError, before_1970_text(whose, f"{int_text(ms)} ms"))
            clean[row] = None
        elif ms > LAST_MS:
            faults.note(row, SchemaError, late_text(whose, ms))
            clean[row] = None
        elif ms < FIRST_USUAL_MS and is_number[row]:
            faults.note(row, SchemaError, early_text(whose, ms) + ALLOW_EARLY)
            clean[row] = None
    return int_array(clean, pa.int64(), TIMESTAMP).cast(_TIME_TYPE)
