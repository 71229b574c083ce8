from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.serialization.format_options import formats_of_write
from spark_kafka_sink.serialization.record_formats import RecordFormats, ResolvedFormats
from spark_kafka_sink.serialization.schemas import resolved

STRUCT = pa.struct([("id", pa.int64()), ("name", pa.string())])
ROWS = [{"id": 1, "name": "one"}, None, {"id": 3, "name": None}]
AVRO_ROWS = [b"\0\2\0\6one", None, b"\0\6\2"]
NO_NULL = '{"type":"record","name":"r","fields":[{"name":"id","type":"long"},{"name":"name","type":"string"}]}'


def formats(types: Mapping[str, pa.DataType], **options: str) -> ResolvedFormats:
    return resolved(formats_of_write({key.replace("_", "."): text for key, text in options.items()}), types, "t")


def test_both_columns_become_bytes_and_others_stay() -> None:
    columns = {
        "value": pa.array(ROWS, STRUCT),
        "key": pa.array([7, 8, None]),
        "partition": pa.array([0, 1, 2], pa.int32()),
    }
    types = {"value": STRUCT, "key": pa.int64()}
    (part,) = RecordFormats(formats(types, value_format="avro", key_format="avro")).parts(columns)
    assert part.columns["value"].to_pylist() == AVRO_ROWS
    assert part.columns["key"].to_pylist() == [b"\x0e", b"\x10", None]
    assert part.columns["partition"].to_pylist() == [0, 1, 2]
    assert (part.first_row, part.bad_rows) == (0, ())


def test_a_column_without_a_format_stays_text() -> None:
    columns = {"value": pa.array(ROWS, STRUCT), "key": pa.array(["a", "b", None])}
    (part,) = RecordFormats(formats({"value": STRUCT}, value_format="json")).parts(columns)
    assert part.columns["key"] is not None
    assert part.columns["key"].to_pylist() == ["a", "b", None]
    assert part.columns["value"].to_pylist() == [b'{"id":1,"name":"one"}', None, b'{"id":3}']


@pytest.mark.parametrize("most", [1, 9, 30, 1_000])
def test_a_batch_is_cut_at_the_most_bytes_and_no_row_is_lost(most: int) -> None:
    rows = [{"id": number, "name": "x" * (number % 9)} for number in range(50)]
    keys = [{"id": number, "name": "key" * (number % 5)} for number in range(50)]
    columns = {
        "value": pa.array(rows, STRUCT),
        "key": pa.array(keys, STRUCT),
        "partition": pa.array(range(50), pa.int32()),
    }
    types = {"value": STRUCT, "key": STRUCT}
    parts = [*RecordFormats(formats(types, value_format="json", key_format="json"), most).parts(columns)]
    found = [row for part in parts for row in zip(*(part.columns[name].to_pylist() for name in columns), strict=True)]
    assert [(json.loads(value), json.loads(key), number) for value, key, number in found] == [
        (row, key, number) for number, (row, key) in enumerate(zip(rows, keys, strict=True))
    ]
    assert [part.first_row for part in parts] == [
        sum(len(part.columns["value"]) for part in parts[:number]) for number in range(len(parts))
    ]
    assert len(parts) > (1 if most < 1_000 else 0)
    for part in parts:
        assert len(part.columns["value"]) == 1 or part.columns["value"].nbytes <= most + 4 * 60


def test_rows_that_do_not_fit_come_out_with_their_numbers() -> None:
    rows = [{"id": number, "name": None if number in (3, 40) else "x"} for number in range(50)]
    columns = {"value": pa.array(rows, STRUCT)}
    parts = [*RecordFormats(formats({"value": STRUCT}, value_format="avro", value_schema=NO_NULL), 40).parts(columns)]
    bad_rows = [bad for part in parts for bad in part.bad_rows]
    assert [(bad.row, bad.path) for bad in bad_rows] == [(3, "value.name"), (40, "value.name")]
    values = [value for part in parts for value in part.columns["value"].to_pylist()]
    assert [number for number, value in enumerate(values) if value is None] == [3, 40]


def test_an_error_names_path_row_and_reason_of_some_bad_rows() -> None:
    rows = pa.array([{"id": 1, "name": None}] * 5, STRUCT)
    (part,) = RecordFormats(formats({"value": STRUCT}, value_format="avro", value_schema=NO_NULL)).parts(
        {"value": rows}
    )
    with pytest.raises(SerializationError, match=r"value\.name of row 100: it is null") as error:
        part.check(first_row=100)
    text = str(error.value)
    assert "value.name of row 102" in text
    assert "And 2 more." in text


@pytest.mark.parametrize("given", [None, [[("h", b"1")], [("h", b"2")], None]])
def test_the_id_goes_into_a_header_of_each_record_that_is_not_null(given: list[object] | None) -> None:
    found = formats({"value": STRUCT}, value_format="avro")
    assert found.value is not None
    header = "__value_schema_id", b"\1" + bytes(16)
    found = replace(found, value=replace(found.value, column_format=replace(found.value.column_format, header=header)))
    columns = {"value": pa.array(ROWS, STRUCT)}
    if given is not None:
        columns["headers"] = pa.array(given, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))
    (part,) = RecordFormats(found).parts(columns)
    own = {"key": b"__value_schema_id", "value": header[1]}
    first, second = ([{"key": b"h", "value": value}] if given else [] for value in (b"1", b"2"))
    assert part.columns["headers"].to_pylist() == [[*first, own], second, [own]]
    assert part.columns["value"].to_pylist() == AVRO_ROWS


@pytest.mark.parametrize("names", [pa.string(), pa.binary(), pa.dictionary(pa.int8(), pa.string())], ids=str)
@pytest.mark.parametrize("place", ["header", "prefix", "nowhere"])
def test_a_row_does_not_keep_the_schema_id_of_its_source(place: str, names: pa.DataType) -> None:
    """Readers look at the first such header, before they look at the bytes."""
    found = formats({"value": STRUCT}, value_format="avro")
    assert found.value is not None
    own = ("__value_schema_id", b"\1" + bytes(16))
    places: dict[str, dict[str, Any]] = {
        "header": {"header": own},
        "prefix": {"prefix": b"\0\0\0\0\1"},
        "nowhere": {},
    }
    changed = places[place]
    found = replace(found, value=replace(found.value, column_format=replace(found.value.column_format, **changed)))
    stale = ("__value_schema_id", b"\1" + b"x" * 16)
    raw_key = ("__key_schema_id", b"\1" + b"k" * 16)
    given = [[("h", b"1"), stale, stale, raw_key], None, [], [stale], [("h", None)], None]
    values = pa.array([*ROWS, *ROWS], STRUCT)
    headers = pa.array(given, pa.list_(pa.struct([("key", names), ("value", pa.binary())])))
    parts = RecordFormats(found).parts({"value": values.slice(1), "headers": headers.slice(1)})
    read = [row for part in parts for row in part.columns["headers"].to_pylist()]
    pairs = [[(each["key"], each["value"]) for each in row or ()] for row in read]
    pairs = [[(key if isinstance(key, str) else key.decode(), value) for key, value in row] for row in pairs]
    added = [own] if place == "header" else []
    assert pairs == [[], added, added, [("h", None)], added]
    (first,) = RecordFormats(found).parts({"value": values.slice(0, 1), "headers": headers.slice(0, 1)})
    assert first.source["headers"].equals(headers.slice(0, 1)), "a dead letter has the row as it was"
    kept = [(each["key"].decode(), each["value"]) for each in first.columns["headers"][0].as_py()]
    assert kept == [("h", b"1"), raw_key, *added]


def test_no_rows_make_no_part() -> None:
    parts = RecordFormats(formats({"value": STRUCT}, value_format="avro")).parts({"value": pa.array([], STRUCT)})
    assert list(parts) == []


def test_columns_of_another_layout_get_their_own_encoder() -> None:
    large = pa.struct([("id", pa.int64()), ("name", pa.large_string())])
    encoders = RecordFormats(formats({"value": STRUCT}, value_format="avro"))
    for data_type in (STRUCT, large, STRUCT):
        (part,) = encoders.parts({"value": pa.array(ROWS, data_type)})
        assert part.columns["value"].to_pylist() == AVRO_ROWS
