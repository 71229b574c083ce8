"""Python values as Arrow arrays, compared with those of pyarrow itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.arrow import binary_array, int_array, int_values, null_mask


class Text(str):
    pass


POOL: list[list[Any]] = [
    [b"a", b"", b"longer" * 100, b"\xff\x00"],
    ["a", "", "longer" * 100, "\0"],
    ["größe", "日本", "", "plain", "\U0001f600"],
    [b"a", None, b"", bytearray(b"xy"), bytearray()],
    ["a", None, "", "größe"],
    [b"a", "b", None, bytearray(b"c"), memoryview(b"defg")[::2], np.bytes_(b"h"), Text("ö")],
    [None],
    [None, ""],
    [memoryview(np.arange(3, dtype=np.int32).data), b"a"],
]


@pytest.mark.parametrize("pool", POOL, ids=lambda pool: repr(pool)[:30])
def test_bytes_and_text_become_the_arrays_of_pyarrow(pool: list[Any]) -> None:
    chance = random.Random(7)
    for count in (0, 1, 2, 7, 8, 9, 300):
        rows = [chance.choice(pool) for _ in range(count)]
        made = binary_array(rows, "value")
        made.validate(full=True)
        assert made.equals(pa.array(rows, pa.binary()))
        assert made.null_count == rows.count(None)
        assert binary_array(tuple(rows), "value").equals(made)


@pytest.mark.parametrize("data_type", [pa.int32(), pa.int64()], ids=str)
def test_ints_become_the_arrays_of_pyarrow(data_type: pa.DataType) -> None:
    limit = 2 ** (data_type.bit_width - 1)
    chance = random.Random(7)
    for pool in ([0, 1, -1, limit - 1, -limit], [None, 5, -limit], [None], [np.int32(4), np.int64(5), 6, None]):
        for count in (0, 1, 8, 9, 300):
            rows = [chance.choice(pool) for _ in range(count)]
            made = int_array(rows, data_type, "partition")
            made.validate(full=True)
            assert made.equals(pa.array(rows, data_type))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([b"a", 7, object()], "The value of row 1 is a int; give bytes, str or None."),
        ([0, b"a"], "The value of row 0 is a int"),
        ([None, b"a", 1.5], "The value of row 2 is a float"),
        (["a", None, "ö", ["b"]], "The value of row 3 is a list"),
        (["a", "\ud800"], "The value of row 1 is a str that is not valid Unicode: at place 0 is U.D800"),
        ([None, False], "The value of row 1 is a bool"),
    ],
)
def test_value_that_is_neither_bytes_nor_text_names_its_row(rows: list[Any], message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        binary_array(rows, "value")


def test_wrong_value_among_many_per_row_names_its_row() -> None:
    with pytest.raises(SerializationError, match="The header key of row 2 is a str that is not valid"):
        binary_array(["a", "\ud800", "b"], "header key", None, [0, 1, 1, 3])


@pytest.mark.parametrize(
    ("rows", "data_type", "message"),
    [
        (
            [1, 2**31],
            pa.int32(),
            "The partition of row 1 is 2147483648, and does not fit into 32 bits; give an int from -2147483648 to",
        ),
        ([1, None, -(2**31) - 1], pa.int32(), "row 2 is -2147483649, and"),
        ([2**63], pa.int64(), "row 0 is 9223372036854775808, and"),
        ([None, 1, "2"], pa.int32(), "row 2 is a str"),
        ([1, True], pa.int32(), "row 1 is a bool"),
        ([1, 1.5], pa.int64(), "row 1 is a float"),
        ([2**63, 1.5], pa.int64(), "row 0 is 9223372036854775808, and"),
    ],
)
def test_value_that_does_not_fit_an_int_names_its_row(rows: list[Any], data_type: pa.DataType, message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        int_array(rows, data_type, "partition")


def test_more_than_2_gib_is_refused_before_it_is_joined() -> None:
    for content in (bytes(1 << 20), "x" * (1 << 20)):
        with pytest.raises(SerializationError, match="'value' holds more than 2147483647 bytes"):
            binary_array([content] * 2048, "value")


def test_nulls_and_values_of_slices_are_those_of_their_rows() -> None:
    chance = random.Random(7)
    rows = [chance.choice([None, 1, -5]) for _ in range(100)]
    for data_type in (pa.int32(), pa.int64()):
        array = pa.array(rows, data_type)
        for start in range(20):
            part = array.slice(start, 100 - 3 * start)
            expected = rows[start : 100 - 2 * start]
            assert int_values(part, 9).tolist() == [9 if row is None else row for row in expected]
            mask = null_mask(part)
            assert mask is not None
            assert mask.tolist() == [row is None for row in expected]
    assert int_values(pa.array([], pa.int32())).tolist() == []
    assert int_values(pa.array([3, 4]).slice(1)).tolist() == [4]
    assert null_mask(pa.array([3, 4])) is None
