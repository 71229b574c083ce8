"""Cells of rows as columns, with the rows that no column can hold. test_dead_letters.py has whole rows."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from spark_kafka_sink.sink.loose_columns import Column, loose_columns

NOON = 1_700_000_000_000


def found(
    name: str, cells: Column, names: Column | None = None, values: Column | None = None, *, allows_early: bool = False
) -> tuple[list[Any], list[int]]:
    """Return the cells of the column, and the rows that were found."""
    given = {"value": [b"v"] * len(cells), name: cells}
    columns, faults = loose_columns(
        given, (names or [], values or []), lambda moment: int(moment.timestamp() * 1000), allows_early=allows_early
    )
    return columns[name].to_pylist(), [each.row for each in faults]


@pytest.mark.parametrize("name", ["value", "key", "topic"])
def test_texts_that_utf_8_cannot_hold_become_null(name: str) -> None:
    assert found(name, ["ü", "\ud800", None, "a\udc00b"]) == (["ü".encode(), None, None, None], [1, 3])
    assert found(name, [b"a", bytearray(b"b"), None]) == ([b"a", b"b", None], [])


def test_partitions_above_32_bits_become_null() -> None:
    assert found("partition", [0, None, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1]) == (
        [0, None, 2**31 - 1, None, -(2**31), None],
        [3, 5],
    )


@pytest.mark.parametrize(("allows_early", "rows"), [(False, [2, 3, 5, 6]), (True, [3, 5, 6])])
def test_times_that_no_record_can_have_become_null(allows_early: bool, rows: list[int]) -> None:
    early = datetime.datetime(1975, 1, 1, tzinfo=datetime.UTC)
    cells = [NOON, -1, 5, -2, early, 2**80, datetime.datetime(1960, 1, 1, tzinfo=datetime.UTC), None]
    times, faults = found("timestamp", cells, allows_early=allows_early)
    assert faults == rows
    assert [index for index, time in enumerate(times) if time is None] == sorted({1, 7, *rows})
    assert times[4] == early


def test_headers_keep_their_rows() -> None:
    names: Column = ["a", None, "\ud800", "b"]
    values: Column = [b"1", None, b"2", "\udfff"]
    headers, faults = found("headers", [1, 0, 2, 1], names, values)
    assert [[(each["key"], each["value"]) for each in row] for row in headers] == [
        [(b"a", b"1")],
        [],
        [(None, None), (b"", b"2")],
        [(b"b", None)],
    ]
    assert faults == [2, 3]
