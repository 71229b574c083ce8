"""Variants as JSON, with the kernel and without it: the form in which Spark prints them, and bytes that are wrong."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import VariantVal
from support.generated_variants import (
    ALL_LEAVES,
    EMPTY_NAMES,
    LEAVES,
    TYPE,
    ZONE,
    array,
    column_of,
    metadata,
    obj,
    primitive,
    random_variant,
)

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.record.kernel import has_kernel
from spark_kafka_sink.serialization import column_encoder
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import (
    BadRow,
    ColumnFormat,
    EncodedColumn,
    FormatSettings,
    JsonOptions,
)
from spark_kafka_sink.serialization.schemas import column_format
from spark_kafka_sink.serialization.variant import MOST_NESTED

DEFAULT = JsonOptions(zone_of_variants=ZONE)
NOT_VARIANT = "its bytes are not those of a variant"
UNKNOWN = "the variant has a value of a type that Spark 4.2 does not know"
TOO_DEEP = "the variant has more than 1000 levels of arrays and objects"


@pytest.fixture(params=["kernel", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel, and without it."""
    if request.param == "python":
        monkeypatch.setattr(column_encoder, "KERNEL", None)
    elif not has_kernel():
        pytest.skip("there is no kernel")


def encode(column: pa.Array, options: JsonOptions = DEFAULT) -> EncodedColumn:
    return ColumnEncoder(ColumnFormat("value", "json", None, json=options), column.type).encode(column)


def text(value: bytes, names: bytes = EMPTY_NAMES, options: JsonOptions = DEFAULT) -> str:
    encoded = encode(column_of([(value, names)]), options)
    assert encoded.bad_rows == ()
    return str(encoded.values[0].as_py().decode())


def reason(value: bytes, names: bytes = EMPTY_NAMES, options: JsonOptions = DEFAULT) -> str:
    """Why a row is bad, with a good one before and after it."""
    good = (primitive(1), EMPTY_NAMES)
    encoded = encode(column_of([good, (value, names), good]), options)
    assert encoded.values.to_pylist() == [b"true", None, b"true"]
    ((row, path, why),) = encoded.bad_rows
    assert (row, path) == (1, "value")
    return why


# ---- the text of each kind of value --------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (primitive(0), "null"),
        (primitive(1), "true"),
        (primitive(2), "false"),
        (primitive(3, b"\xff"), "-1"),
        (primitive(4, b"\x00\x80"), "-32768"),
        (primitive(5, b"\xff\xff\xff\x7f"), "2147483647"),
        (primitive(6, bytes(7) + b"\x80"), "-9223372036854775808"),
        (primitive(7, struct.pack("<d", 1e7)), "1.0E7"),
        (primitive(7, struct.pack("<d", float("nan"))), '"NaN"'),
        (primitive(7, struct.pack("<d", float("-inf"))), '"-Infinity"'),
        (primitive(14, struct.pack("<f", 0.1)), "0.1"),
        (primitive(14, struct.pack("<f", float("inf"))), '"Infinity"'),
        (primitive(8, b"\x02" + struct.pack("<i", 1200)), "12"),
        (primitive(8, b"\x02" + struct.pack("<i", -1250)), "-12.5"),
        (primitive(8, b"\x00" + struct.pack("<i", 1200)), "1200"),
        (primitive(8, b"\x09" + struct.pack("<i", 1)), "0.000000001"),
        (primitive(8, b"\x05" + struct.pack("<i", 0)), "0"),
        (primitive(9, b"\x12" + struct.pack("<q", -(10**18 - 1))), "-0." + "9" * 18),
        (primitive(10, b"\x26" + (10**37).to_bytes(16, "little")), "0.1"),
        (primitive(10, b"\x01" + (1 - 10**38).to_bytes(16, "little", signed=True)), "-" + "9" * 37 + ".9"),
        (primitive(11, struct.pack("<i", 19_782)), '"2024-02-29"'),
        (primitive(11, struct.pack("<i", -719_893)), '"-0001-01-01"'),
        (primitive(11, struct.pack("<i", 3_670_688)), '"+12020-01-02"'),
        (primitive(13, struct.pack("<q", 1_577_934_245_123_400)), '"2020-01-02 03:04:05.1234"'),
        (primitive(13, struct.pack("<q", -1)), '"1969-12-31 23:59:59.999999"'),
        (primitive(13, struct.pack("<q", -(1 << 63))), '"-290308-12-21 19:59:05.224192"'),
        (primitive(15, struct.pack("<I", 3) + b"abc"), '"YWJj"'),
        (primitive(15, struct.pack("<I", 0)), '""'),
        (primitive(16, struct.pack("<I", 3) + b'a"\n'), r'"a\"\n"'),
        (b"\x01", '""'),
        (b"\x09\xff\x1f", '"\ufffd\\u001F"'),
        (primitive(20, bytes(range(16))), '"00010203-0405-0607-0809-0a0b0c0d0e0f"'),
        (array([]), "[]"),
        (array([primitive(3, b"\x05"), array([primitive(0)], 4)], 3, is_large=True), "[5,[null]]"),
        (obj([], []), "{}"),
        (array([primitive(1)]) + b"rest", "[true]"),
    ],
)
def test_each_kind_of_value_is_printed_as_spark_does(value: bytes, expected: str) -> None:
    assert text(value) == expected


@pytest.mark.usefixtures("way")
def test_an_objects_names_are_those_of_the_metadata_in_the_order_of_the_object() -> None:
    names = metadata(['b"', "a", "", "unused"], 4)
    value = obj([2, 1, 0], [primitive(1), primitive(2), obj([3], [primitive(0)], 2, 3)], 1, 4, is_large=True)
    assert text(value, names) == r'{"":true,"a":false,"b\"":{"unused":null}}'


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        ("UTC", "2020-07-01 00:00:00+00:00"),
        ("Europe/Berlin", "2020-07-01 02:00:00+02:00"),
        ("America/New_York", "2020-06-30 20:00:00-04:00"),
        ("+05:30", "2020-07-01 05:30:00+05:30"),
        ("+05:30:20", "2020-07-01 05:30:20+05:30"),
        ("-00:00:59", "2020-06-30 23:59:01+00:00"),
    ],
)
def test_a_timestamp_has_the_zone_of_the_option_or_of_the_session(zone: str, expected: str) -> None:
    value = primitive(12, struct.pack("<q", 1_593_561_600_000_000))
    assert text(value, options=JsonOptions(zone_of_variants=zone)) == f'"{expected}"'
    assert text(value, options=JsonOptions(time_zone=zone, zone_of_variants="Asia/Tokyo")) == f'"{expected}"'


@pytest.mark.usefixtures("way")
def test_a_timestamp_without_a_known_zone_is_a_bad_row_that_says_what_to_set() -> None:
    value = primitive(12, bytes(8))
    assert reason(value, options=JsonOptions()).endswith("time zone is not known here. Set value.json.timeZone")
    assert text(primitive(13, bytes(8)), options=JsonOptions()) == '"1970-01-01 00:00:00"'
    with pytest.raises(ConfigError, match="time zone 'Mars/Olympus' is not known"):
        text(value, options=JsonOptions(zone_of_variants="Mars/Olympus"))


# ---- generated -----------------------------------------------------------------------------------------------------


def generated(seed: int, count: int, leaves: Any = ALL_LEAVES) -> tuple[pa.Array, list[str | None]]:
    rng = random.Random(seed)
    made = [None if rng.random() < 0.1 else random_variant(rng, leaves=leaves) for _ in range(count)]
    return column_of([each and each[:2] for each in made]), [each and each[2] for each in made]


def texts(encoded: EncodedColumn) -> list[str | None]:
    assert encoded.bad_rows == ()
    return [None if value is None else value.decode() for value in encoded.values.to_pylist()]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(10))
def test_generated_variants_have_their_text(seed: int) -> None:
    column, expected = generated(seed, 60)
    assert texts(encode(column)) == expected, seed
    assert texts(encode(column.slice(7, 20))) == expected[7:27], seed


@pytest.mark.parametrize("seed", range(5))
def test_pyspark_reads_the_same_values(seed: int) -> None:
    """PySpark's own reader in Python, whose texts differ in form: numbers as numbers, the rest by structure."""
    column, expected = generated(seed, 60, LEAVES)
    for given, written in zip(column.to_pylist(), expected, strict=True):
        if given is not None and written is not None and "Infinity" not in written:  # PySpark prints no JSON for it
            read = json.loads(VariantVal(given["value"], given["metadata"]).toJson(), parse_float=Decimal)
            assert alike(read, json.loads(written, parse_float=Decimal)), (seed, written)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, (Decimal, int, float)) and not isinstance(one, bool):
        special = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
        return float(one) == float(special.get(str(other), other)) or one != one
    # a time is there in another zone
    return type(one) is type(other) and (one == other or (len(one) >= 19 and one[10] == other[10] == " "))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(10))
def test_variants_stand_in_structs_lists_maps_and_dictionaries(seed: int) -> None:
    rng = random.Random(seed)
    column, expected = generated(seed, 30)
    inner = pa.StructArray.from_arrays(
        [column, pa.array(range(30))], fields=[pa.field("v", TYPE), pa.field("n", pa.int64())]
    )
    kept = [f'"v":{one},' if one is not None else "" for one in expected]
    assert texts(encode(inner.slice(3))) == [f'{{{part}"n":{row}}}' for row, part in enumerate(kept)][3:]
    shown = [one or "null" for one in expected]
    offsets = pa.array([0, 1, 1, 9, 30], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, column, type=pa.list_(pa.field("element", TYPE)))
    assert texts(encode(lists)) == [f"[{','.join(shown[at:to])}]" for at, to in ((0, 1), (1, 1), (1, 9), (9, 30))]
    keys = pa.array([str(row) for row in range(30)])
    maps = pa.MapArray.from_arrays(offsets, keys, column)
    assert maps.type.item_type.field(1).metadata == {b"variant": b"true"}
    assert texts(encode(maps))[1:3] == ["{}", "{" + ",".join(f'"{row}":{shown[row]}' for row in range(1, 9)) + "}"]
    indices = pa.array([rng.randrange(30) for _ in range(50)], pa.int8())
    named = pa.DictionaryArray.from_arrays(indices, column)
    assert texts(encode(named)) == [expected[row] for row in indices.to_pylist()]


@pytest.mark.usefixtures("way")
def test_large_variants_make_the_output_grow() -> None:
    members = [primitive(16, struct.pack("<I", 5000) + b"\x01" * 5000) for _ in range(40)]
    names = [f"{number:03}" + "n" * 5000 for number in range(40)]
    value = obj(range(40), members, 4, 2)
    column = column_of([(value, metadata(names, 3))] * 3)
    expected = ",".join(f'"{name}":"{chr(92)}u0001' + r"\u0001" * 4999 + '"' for name in names)
    assert texts(encode(column)) == [f"{{{expected}}}"] * 3


# ---- bytes that are wrong ------------------------------------------------------------------------------------------


def deep(levels: int) -> bytes:
    value = primitive(0)
    for _ in range(levels):
        value = array([value], 2)
    return value


@pytest.mark.usefixtures("way")
def test_a_thousand_levels_are_written_and_more_are_a_bad_row() -> None:
    assert text(deep(MOST_NESTED)) == "[" * MOST_NESTED + "null" + "]" * MOST_NESTED
    assert reason(deep(MOST_NESTED + 1)) == TOO_DEEP


def sharing(levels: int) -> bytes:
    """Arrays whose 200 members are all the same array: 200 to the power of `levels` values."""
    value = primitive(0)
    for _ in range(levels):
        value = b"\x03" + bytes([200]) + bytes(201) + value
    return value


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("value", "names", "expected"),
    [
        (b"", EMPTY_NAMES, NOT_VARIANT),
        (primitive(1), b"", NOT_VARIANT),
        (primitive(1), b"\x02\x00\x00", NOT_VARIANT),
        (primitive(17, bytes(8)), EMPTY_NAMES, UNKNOWN),
        (primitive(63), EMPTY_NAMES, UNKNOWN),
        (primitive(6, bytes(7)), EMPTY_NAMES, NOT_VARIANT),
        (primitive(20, bytes(15)), EMPTY_NAMES, NOT_VARIANT),
        (primitive(8, b"\x0a" + bytes(4)), EMPTY_NAMES, NOT_VARIANT),
        (primitive(8, b"\x00" + struct.pack("<i", 10**9)), EMPTY_NAMES, NOT_VARIANT),
        (primitive(9, b"\x00" + struct.pack("<q", -(10**18))), EMPTY_NAMES, NOT_VARIANT),
        (primitive(10, b"\x00" + bytes(15) + b"\x80"), EMPTY_NAMES, NOT_VARIANT),
        (primitive(16, b"\xff\xff\xff\xff"), EMPTY_NAMES, NOT_VARIANT),
        (primitive(15, struct.pack("<I", 4) + b"abc"), EMPTY_NAMES, NOT_VARIANT),
        (primitive(16, b"\x00\x00"), EMPTY_NAMES, NOT_VARIANT),
        (b"\x0dab", EMPTY_NAMES, NOT_VARIANT),
        (b"\x13\xff\xff\xff\xff", EMPTY_NAMES, NOT_VARIANT),
        (b"\x43\x01\x00", EMPTY_NAMES, NOT_VARIANT),
        (b"\x03\x01\x00\x01", EMPTY_NAMES, NOT_VARIANT),
        (b"\x03\x01\x09\x01\x00", EMPTY_NAMES, NOT_VARIANT),
        (obj([0], [primitive(0)]), EMPTY_NAMES, NOT_VARIANT),
        (obj([1], [primitive(0)]), metadata(["a"]), NOT_VARIANT),
        (obj([0], [primitive(0)]), metadata(["abc"])[:-1], NOT_VARIANT),
        (obj([0], [primitive(0)]), b"\x01\x01\x02\x01ab", NOT_VARIANT),
        (obj([0], [primitive(0)]), b"\xc1\x01\x00", NOT_VARIANT),
        (obj([0], [primitive(0)]), b"\x01\xff", NOT_VARIANT),
        (sharing(8), EMPTY_NAMES, NOT_VARIANT),
        (b"\x03\x02\x00\x00\x01" + primitive(1), EMPTY_NAMES, NOT_VARIANT),
    ],
)
def test_bytes_that_are_no_variant_are_a_bad_row(value: bytes, names: bytes, expected: str) -> None:
    assert reason(value, names) == expected


@pytest.mark.usefixtures("way")
def test_a_bad_row_names_the_path_of_the_variant() -> None:
    column = pa.StructArray.from_arrays([column_of([(b"", b"")])], fields=[pa.field("v", TYPE)])
    assert encode(column).bad_rows == (BadRow(0, "value.v", NOT_VARIANT),)


def damaged(rng: random.Random, of: bytes) -> bytes:
    """Some bytes changed, or some left out, or both."""
    changed = bytearray(of)
    for _ in range(rng.randrange(4) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 2, 3, 255, rng.randrange(256)))
    if rng.random() < 0.3:
        return bytes(changed[: rng.randrange(len(changed) + 1)])
    return bytes(changed)


def check_damaged(seed: int, count: int, patch: pytest.MonkeyPatch) -> int:
    """Both ways write the same rows, and find the same rows bad. Returns how many."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        value, names, _ = random_variant(rng, 3)
        rows.append((damaged(rng, value), names if rng.random() < 0.5 else damaged(rng, names)))
    column = column_of(rows)
    encoded = encode(column)
    with patch.context() as inner:
        inner.setattr(column_encoder, "KERNEL", None)
        expected = encode(column)
    assert encoded.values.to_pylist() == expected.values.to_pylist(), seed
    assert encoded.bad_rows == expected.bad_rows, seed
    for value in encoded.values.drop_null().to_pylist():
        json.loads(value)
    return len(encoded.bad_rows)


@pytest.mark.skipif(not has_kernel(), reason="compares with the kernel")
@pytest.mark.parametrize("seed", range(10))
def test_damaged_variants_are_written_alike_or_bad_in_both_ways(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 20 < check_damaged(seed, 100, monkeypatch) < 100


@pytest.mark.slow
@pytest.mark.skipif(not has_kernel(), reason="compares with the kernel")
def test_many_damaged_variants_are_written_alike_or_bad_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(check_damaged(seed, 200, monkeypatch) for seed in range(100, 400)) > 10_000


# ---- types ---------------------------------------------------------------------------------------------------------


def struct_of(*fields: tuple[str, pa.DataType]) -> pa.DataType:
    marked = {b"variant": b"true"}
    return pa.struct([pa.field(name, kind, metadata=marked if name == "metadata" else None) for name, kind in fields])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(3), pa.dictionary(pa.int8(), pa.binary())])
def test_the_bytes_may_have_any_layout(kind: pa.DataType) -> None:
    data_type = struct_of(("metadata", kind), ("value", kind))
    names = pa.array([EMPTY_NAMES], pa.binary()).cast(kind)
    values = pa.array([b"\x09ab"], pa.binary()).cast(kind)
    column = pa.StructArray.from_arrays([names, values], fields=list(data_type))
    assert texts(encode(column)) == ['"ab"']


@pytest.mark.parametrize(
    "data_type",
    [
        struct_of(("metadata", pa.binary())),
        struct_of(("metadata", pa.binary()), ("value", pa.string())),
        struct_of(("metadata", pa.binary()), ("value", pa.binary()), ("typed_value", pa.int64())),
    ],
)
def test_another_struct_is_no_variant(data_type: pa.DataType) -> None:
    with pytest.raises(SchemaError, match=r"value\.v: a variant must be a struct of value and metadata, both binary"):
        ColumnEncoder(ColumnFormat("value", "json", None), pa.struct([("v", data_type)]))


def json_schema(data_type: pa.DataType, schema: Any = None) -> str:
    given = None if schema is None else json.dumps(schema)
    return column_format(FormatSettings("value", "json-schema", given, json=DEFAULT), data_type).schema or ""


def test_a_variants_json_schema_takes_any_value() -> None:
    made = json.loads(json_schema(pa.struct([("v", TYPE), ("l", pa.list_(TYPE))])))
    items = {"oneOf": [{"type": "null"}, {"type": "array", "items": {}}]}
    assert made["properties"] == {"v": {}, "l": items}
    assert json.loads(json_schema(TYPE)).keys() == {"$schema", "title"}


@pytest.mark.parametrize("schema", [True, {}, {"title": "any", "description": "of any kind"}, None])
def test_a_given_json_schema_may_take_any_value(schema: Any) -> None:
    wanted = {"properties": {} if schema is None else {"v": schema}}
    json_schema(pa.struct([("v", TYPE)]), {"type": "object", **wanted})


@pytest.mark.parametrize(
    ("schema", "limits"),
    [
        ({"type": "object"}, "type"),
        ({"oneOf": [{"type": "null"}, {}]}, "type"),
        ({"anyOf": [{}, {}]}, "oneOf or anyOf"),
    ],
)
def test_a_given_json_schema_that_limits_a_variant_is_refused(schema: Any, limits: str) -> None:
    with pytest.raises(SchemaError, match=rf"value\.v: a variant may be any value, .* limits it, by {limits}\."):
        json_schema(pa.struct([("v", TYPE)]), {"type": "object", "properties": {"v": schema}})


SPECIAL: Sequence[tuple[bytes, str]] = [
    (b"variant", "Take the format json or json-schema, make it a string before, by to_json"),
    (b"geometry", "Make it bytes before, by st_asbinary"),
    (b"geography", "Make it bytes before, by st_asbinary"),
]


GIVEN = {
    "avro": '{"type":"record","name":"r","fields":[{"name":"v","type":{"type":"record","name":"v","fields":'
    '[{"name":"x","type":"bytes"}]}}]}',
    "protobuf": 'syntax = "proto3"; message R { V v = 1; } message V { bytes x = 1; }',
}
"""Schemas that would take the struct, if it were one."""


@pytest.mark.parametrize(("kind", "advice"), SPECIAL)
@pytest.mark.parametrize("name", ["avro", "protobuf"])
@pytest.mark.parametrize("is_given", [True, False])
def test_avro_and_protobuf_refuse_it_and_say_what_to_do(kind: bytes, advice: str, name: str, is_given: bool) -> None:
    special = pa.struct([pa.field("x", pa.binary(), metadata={kind: b"true"})])
    settings = FormatSettings("value", name, GIVEN[name] if is_given else None)
    expected = f"{name.capitalize()} has no type for a {kind.decode()}. {advice}"
    with pytest.raises(SchemaError) as caught:
        column_format(settings, pa.struct([("v", special)]))
    assert str(caught.value).startswith(f"value.v: {expected}")
    with pytest.raises(SchemaError) as caught:
        column_format(settings, special)
    assert str(caught.value).startswith(f"value: {expected}")


@pytest.mark.parametrize("name", ["avro", "json", "json-schema", "protobuf"])
@pytest.mark.parametrize(
    "data_type",
    [
        pa.decimal256(50, 2),
        pa.month_day_nano_interval(),
        pa.sparse_union([pa.field("a", pa.int64())]),
        pa.run_end_encoded(pa.int32(), pa.string()),
        pa.list_view(pa.int64()),
    ],
    ids=str,
)
def test_other_types_without_a_form_are_refused_with_the_path(name: str, data_type: pa.DataType) -> None:
    with pytest.raises(SchemaError, match=r"^value\.a\.element: .*Cast the column"):
        column_format(FormatSettings("value", name), pa.struct([("a", pa.list_(data_type))]))


@pytest.mark.usefixtures("way")
def test_a_struct_that_spark_does_not_mark_is_no_variant() -> None:
    column = pa.array(
        [{"value": b"a", "metadata": None}], pa.struct([("value", pa.binary()), ("metadata", pa.binary())])
    )
    assert texts(encode(column)) == ['{"value":"YQ=="}']
