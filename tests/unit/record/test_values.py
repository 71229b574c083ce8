"""Python values as Arrow arrays: equal to pyarrow's own conversion where that has one, and refused otherwise."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row, types

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record.values import array_of, array_of_fitting

POINT = pa.struct([("x", pa.int32()), ("y", pa.string())])
DAY = datetime.date(2024, 2, 29)


class Point(NamedTuple):
    x: int
    y: str


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    os.environ.pop("TZ", None)
    time.tzset()


def made(cells: list[Any], data_type: pa.DataType) -> pa.Array:
    array = array_of(cells, data_type, "value", range(100, 100 + len(cells)))
    array.validate(full=True)
    assert array.type == data_type
    return array


EQUAL: list[tuple[pa.DataType, list[Any]]] = [
    (pa.null(), [None, None]),
    (pa.bool_(), [True, None, False, True]),
    (pa.int8(), [-128, None, 127]),
    (pa.int16(), [-32_768, 32_767]),
    (pa.int32(), [-(2**31), None, 2**31 - 1]),
    (pa.int64(), [-(2**63), None, 2**63 - 1]),
    (pa.float32(), [0.5, None, float("inf")]),
    (pa.float64(), [0.1, None, -1e308]),
    (pa.string(), ["é", None, ""]),
    (pa.binary(), [b"\0\xff", None, b""]),
    (pa.decimal128(5, 2), [Decimal("1.20"), None, Decimal("-999.99"), Decimal(7)]),
    (pa.decimal128(38, 10), [Decimal("1234567890123456789012345678.0123456789")]),
    (pa.date32(), [DAY, None, datetime.date(1, 1, 1)]),
    (pa.timestamp("us"), [datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999), None]),
    (pa.timestamp("us", "UTC"), [datetime.datetime(1969, 12, 31, 23, 0, 0, 7, datetime.UTC), None]),
    (pa.duration("us"), [datetime.timedelta(-1, 5, 7), None]),
    (pa.time64("ns"), [datetime.time(23, 59, 59, 999_999), None]),
    (POINT, [{"x": 1, "y": "a"}, None, {"x": None, "y": None}]),
    (pa.list_(pa.int64()), [[1, None], None, [], [2]]),
    (pa.map_(pa.string(), pa.int32()), [{"a": 1, "b": None}, None, {}]),
    (pa.map_(pa.int16(), pa.int32()), [{1: 1}, None]),  # Bug: with pyarrow 14 the process ended
    (pa.list_(pa.field("element", POINT, nullable=False)), [[{"x": 1, "y": "a"}], None]),
    (pa.struct([("a", pa.list_(POINT)), ("m", pa.map_(pa.string(), POINT))]), [None, {"a": [{"x": 1, "y": "a"}]}]),
    (pa.int32(), []),
    (POINT, []),
]


@pytest.mark.parametrize(("data_type", "cells"), EQUAL, ids=lambda each: str(each)[:40])
def test_values_become_what_arrow_makes_of_them(data_type: pa.DataType, cells: list[Any]) -> None:
    assert made(cells, data_type).equals(pa.array(cells, data_type))


@pytest.mark.parametrize(
    "cell", [Row(x=1, y="a"), Row(y="a", x=1), Point(1, "a"), (1, "a"), {"y": "a", "x": 1}], ids=repr
)
def test_a_struct_is_a_row_a_tuple_or_a_dict(cell: Any) -> None:
    assert made([cell, None], POINT).to_pylist() == [{"x": 1, "y": "a"}, None]


def test_a_field_that_a_dict_lacks_is_null() -> None:
    assert made([{"x": 1}], POINT).to_pylist() == [{"x": 1, "y": None}]


def test_the_largest_decimals_are_taken_whatever_the_context_of_the_thread_is() -> None:
    """Bug: the size was compared after rounding to 28 digits, or to those of the thread's context."""
    for precision, scale in ((38, 0), (38, 38), (28, 3), (5, 2)):
        nines = f"{'9' * precision}E-{scale}"
        cells = [Decimal(nines), None, Decimal(f"-{nines}")]
        with localcontext(prec=3):
            assert made(cells, pa.decimal128(precision, scale)).to_pylist() == cells


def test_a_double_is_not_rounded_to_a_float() -> None:
    """Bug: with an Avro schema of float, doubles lost digits by rows in silence. By columns they are refused."""
    cells = [0.5, -0.0, float("-inf"), 1.401298464324817e-45, None, 3.4028234663852886e38, 0.10000000149011612]
    assert [repr(each) for each in made(cells, pa.float32()).to_pylist()] == [repr(each) for each in cells]
    (not_a_number,) = made([float("nan")], pa.float32()).to_pylist()
    assert not_a_number != not_a_number
    with pytest.raises(SerializationError, match="has more digits than a float"):
        made([0.1], pa.float32())


def test_bytearrays_become_bytes() -> None:
    assert made([bytearray(b"ab"), b"c"], pa.binary()).to_pylist() == [b"ab", b"c"]


@pytest.mark.usefixtures("in_berlin")
def test_a_naive_datetime_is_local_time() -> None:
    """PySpark makes it so. `fold` says which of the two hours it is, when clocks go back."""
    moments = [
        datetime.datetime(2024, 7, 1, 12, 0, 0, 5),
        datetime.datetime(2024, 10, 27, 2, 30),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1),
    ]
    counts = made(moments, pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
    assert counts == [1_719_828_000_000_005, 1_729_989_000_000_000, 1_729_992_600_000_000]


@pytest.mark.parametrize(
    ("data_type", "cell", "text"),
    [
        (pa.int64(), True, "is a bool; give an int"),
        (pa.int64(), "1", "is a str; give an int"),
        (pa.float64(), 1, "is a int; give a float"),
        (pa.bool_(), 1, "is a int; give a bool"),
        (pa.string(), b"a", "is a bytes; give a str"),
        (pa.binary(), "a", "is a str; give bytes"),
        (pa.decimal128(5, 2), 1.5, "is a float; give a Decimal"),
        (pa.date32(), datetime.datetime(2024, 1, 1), "is a datetime; give a date"),
        (pa.timestamp("us", "UTC"), DAY, "is a date; give a datetime"),
        (pa.timestamp("us"), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), "is a datetime with a time zone"),
        (POINT, (1,), "has 1 values for 2 fields: x, y"),
        (POINT, Row(x=1, z=2), "has the fields x, z; its type has x, y"),
        (POINT, {"x": 1, "z": 2}, "has the field 'z', which its type does not have"),
        (POINT, [1, "a"], "is a list; give a Row"),
        (POINT, Row(x="1", y="a"), r"value\.x of row 101 is a str; give an int"),
        (pa.list_(pa.int32()), {1}, "is a set; give a list"),
        (pa.list_(POINT), [(1, "a"), (2, 3)], r"value\.element\.y of row 101 is a int; give a str"),
        (pa.map_(pa.string(), pa.int32()), [("a", 1)], "is a list; give a dict"),
        (pa.map_(pa.string(), pa.int32()), {"a": "b"}, r"value\.value of row 101 is a str"),
        (pa.map_(pa.string(), pa.int32()), {1: 1}, r"value\.key of row 101 is a int"),
        (pa.null(), 1, "is a int; give None"),
        (pa.large_string(), "a", "Python values do not become such a type"),
    ],
)
def test_a_value_of_another_type_is_refused(data_type: pa.DataType, cell: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        made([None, cell], data_type)
    with pytest.raises(SchemaError, match=text):
        array_of_fitting([None, cell], data_type, "value", [100, 101])


OUT_OF_RANGE: list[tuple[pa.DataType, Any, str]] = [
    (pa.int32(), 2**31, "value of row 101 does not fit into 32 bits"),
    (pa.int8(), -129, "does not fit into 8 bits"),
    (pa.float32(), 1e39, "is too large for a float of 32 bits"),
    (pa.float32(), 0.1, "value of row 101 has more digits than a float of 32 bits: make it a double"),
    (pa.float32(), 1e-46, "has more digits than a float of 32 bits"),
    (pa.string(), "\ud800", "is a str that is not valid Unicode"),
    (pa.decimal128(5, 2), Decimal("1.234"), r"does not fit into decimal\(5,2\)"),
    (pa.decimal128(5, 2), Decimal("1000"), r"does not fit into decimal\(5,2\)"),
    (pa.decimal128(5, 2), Decimal("NaN"), r"does not fit into decimal\(5,2\)"),
    (pa.decimal128(5, 2), Decimal(f"1.{'0' * 120}1"), r"does not fit into decimal\(5,2\)"),
    (pa.decimal128(5, 2), Decimal("9E+999999"), r"does not fit into decimal\(5,2\)"),
    (pa.decimal128(38, 0), Decimal(10**38), r"does not fit into decimal\(38,0\)"),
    (pa.list_(pa.struct([("n", pa.int8())])), [(1,), (400,)], r"value\.element\.n of row 101 does not fit into 8 bits"),
    (pa.map_(pa.string(), pa.int8()), {"a": 400}, r"value\.value of row 101 does not fit into 8 bits"),
    (pa.map_(pa.string(), pa.int8()), {"\udfff": 4}, r"value\.key of row 101 is a str that is not valid Unicode"),
]


@pytest.mark.parametrize(("data_type", "cell", "text"), OUT_OF_RANGE)
def test_a_value_outside_its_type_is_refused(data_type: pa.DataType, cell: Any, text: str) -> None:
    with pytest.raises(SerializationError, match=text):
        made([None, cell], data_type)


@pytest.mark.parametrize(("data_type", "cell", "text"), OUT_OF_RANGE)
def test_cells_outside_their_type_are_null_and_named_if_asked_for(data_type: pa.DataType, cell: Any, text: str) -> None:
    column, reasons = array_of_fitting([None, cell, None, cell], data_type, "value", [100, 101, 102, 103])
    assert column.type == data_type
    assert column.to_pylist() == [None] * 4
    assert sorted(reasons) == [1, 3]
    assert re.search(text, reasons[1])
    assert "of row 103" in reasons[3]


def test_cells_that_fit_are_the_same_if_asked_for_the_others() -> None:
    cells = [(1, "a"), None, (2**40, "b"), (2, None)]
    column, reasons = array_of_fitting(cells, POINT, "value", range(4))
    assert column.to_pylist() == [{"x": 1, "y": "a"}, None, None, {"x": 2, "y": None}]
    assert [*reasons] == [2]
    assert array_of_fitting(cells[:2], POINT, "value", range(2)) == (made(cells[:2], POINT), {})


SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.text(),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
}


@given(st.data())
def test_nested_values_come_back(data: st.DataObject) -> None:
    scalar, cells = data.draw(st.sampled_from([*SCALARS.items()]))
    data_type = pa.struct([("l", pa.list_(scalar)), ("m", pa.map_(pa.string(), pa.list_(scalar)))])
    lists = st.none() | st.lists(st.none() | cells, max_size=3)
    maps = st.none() | st.dictionaries(st.text(), lists, max_size=3)
    rows = data.draw(st.lists(st.none() | st.fixed_dictionaries({"l": lists, "m": maps}), max_size=5))
    assert [_as_dicts(row) for row in made(rows, data_type).to_pylist()] == rows


def _as_dicts(row: Any) -> Any:
    return row and {**row, "m": None if row["m"] is None else dict(row["m"])}


VARIANT = pa.struct(
    [pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False, {"variant": "true"})]
)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_variants_are_their_two_parts(kind: type) -> None:
    if not hasattr(types, "VariantVal"):
        pytest.skip("PySpark 3.5 has no variants")
    array = made([types.VariantVal(kind(b"\x0c\x07"), kind(b"\1\0\0")), None], VARIANT)
    assert array.to_pylist() == [{"value": b"\x0c\x07", "metadata": b"\1\0\0"}, None]


def test_other_values_in_place_of_a_variant_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"^value of row 101 is a tuple; give a VariantVal\.$"):
        made([None, (b"", b"")], VARIANT)
