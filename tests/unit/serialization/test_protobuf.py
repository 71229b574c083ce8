"""Which Arrow types fit which fields of Protobuf, what is written for them, and how the others are refused."""

from __future__ import annotations

import random
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from support.generated_columns import random_array
from support.generated_protobuf import DoesNotFitError, ProtoFile, has_long_map, message_of, random_value

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import BadRow, FormatSettings
from spark_kafka_sink.serialization.schemas import column_format

# ---- judged by the official runtime --------------------------------------------------------------------------------


def judged(made: Any, value: dict[str, Any], data_type: pa.DataType) -> Any:
    try:
        return message_of(made(), value, data_type)
    except DoesNotFitError:
        return None


def check(seed: int, messages: int, rows: int) -> tuple[int, int]:
    """Compare the rows of generated messages. Return how many fit, and how many did not."""
    file = ProtoFile(seed, messages)
    fitting = refused = 0
    for number, (made, data_type) in enumerate(zip(file.classes(), file.types, strict=True)):
        rng = random.Random(f"{seed} {number}")
        column = random_array(rng, data_type, rows, value=random_value)
        used = column_format(FormatSettings("value", "protobuf", file.text, message=f"M{number}"), data_type)
        encoded = ColumnEncoder(used, data_type).encode(column)
        encoded.values.validate(full=True)
        bad = {each.row for each in encoded.bad_rows}
        for row, (value, given) in enumerate(zip(encoded.values.to_pylist(), column.to_pylist(), strict=True)):
            where = (seed, number, row, given)
            if given is None:
                assert value is None, where
                continue
            message = judged(made, given, data_type)
            assert (message is None) == (row in bad), where
            if message is None:
                assert value is None, where
                refused += 1
                continue
            expected = message.SerializeToString(deterministic=True)
            if has_long_map(given, data_type):
                value = made.FromString(value).SerializeToString(deterministic=True)
            assert value == expected, where
            fitting += 1
    return fitting, refused


@pytest.mark.parametrize("seed", range(3))
def test_bytes_are_those_of_the_official_runtime(seed: int) -> None:
    fitting, refused = check(seed, 20, 12)
    assert fitting > 100
    assert refused > 10


@pytest.mark.slow
def test_bytes_of_many_types_are_those_of_the_official_runtime() -> None:
    results = [check(seed, 110, 110) for seed in range(1000, 1003)]
    assert sum(fitting for fitting, _ in results) > 20_000
    assert sum(refused for _, refused in results) > 1000


# ---- single pairs --------------------------------------------------------------------------------------------------

PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";
enum Color { RED = 0; GREEN = 1; MINUS = -1; ROSE = 300; }
message Part { int32 n = 1; optional int32 o = 2; }
message Fields {
  bool b = 1;
  int32 i32 = 2; int64 i64 = 3; uint32 u32 = 4; uint64 u64 = 5; sint32 s32 = 6; sint64 s64 = 7;
  fixed32 f32 = 8; fixed64 f64 = 9; sfixed32 sf32 = 10; sfixed64 sf64 = 11;
  float float = 12; double double = 13; string text = 14; bytes bytes = 15;
  Color color = 16; Part part = 17;
  google.protobuf.Timestamp at = 18; google.protobuf.Duration span = 19;
  google.protobuf.StringValue maybe_text = 20; google.protobuf.Int64Value maybe_long = 21;
  repeated int32 numbers = 22; repeated int32 apart = 23 [packed = false]; repeated string texts = 24;
  map<string, int32> counts = 25; map<int32, Part> parts = 26; repeated Part part_list = 27;
  optional int32 some = 28;
  oneof choice { string a = 29; int32 b_choice = 30; Part c = 31; }
  google.protobuf.Value any = 32;
}
message Far { int32 n = 536870911; }
"""


def encode(column: pa.Array, proto: str = PROTO, message: str = "Fields") -> tuple[list[bytes | None], list[BadRow]]:
    used = column_format(FormatSettings("value", "protobuf", proto, message=message), column.type)
    encoded = ColumnEncoder(used, column.type).encode(column)
    return encoded.values.to_pylist(), list(encoded.bad_rows)


def one(name: str, value: Any, data_type: pa.DataType) -> pa.Array:
    return pa.StructArray.from_arrays([pa.array([value], data_type)], names=[name])


def key(number: int, wire: int) -> bytes:
    number = number << 3 | wire
    return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])


AT = -1_500_001
"""Microseconds: a time before 1970."""


@pytest.mark.parametrize(
    ("name", "data_type", "value", "expected"),
    [
        ("b", pa.bool_(), True, key(1, 0) + b"\x01"),
        ("b", pa.bool_(), False, b""),
        ("i32", pa.int64(), -1, key(2, 0) + b"\xff" * 9 + b"\x01"),
        ("i32", pa.date32(), 18263, key(2, 0) + b"\xd7\x8e\x01"),
        ("i32", pa.date64(), 86_400_000, key(2, 0) + b"\x01"),
        ("i64", pa.time64("us"), 300, key(3, 0) + b"\xac\x02"),
        ("i64", pa.time64("ns"), 300_000, key(3, 0) + b"\xac\x02"),
        ("i64", pa.time32("ms"), 1, key(3, 0) + b"\xe8\x07"),
        ("u64", pa.uint64(), 2**64 - 1, key(5, 0) + b"\xff" * 9 + b"\x01"),
        ("s32", pa.int8(), -1, key(6, 0) + b"\x01"),
        ("s64", pa.int64(), -(2**63), key(7, 0) + b"\xff" * 9 + b"\x01"),
        ("f32", pa.uint32(), 2**32 - 1, key(8, 5) + b"\xff" * 4),
        ("f64", pa.uint64(), 2**63, key(9, 1) + bytes(7) + b"\x80"),
        ("sf32", pa.int16(), -2, key(10, 5) + b"\xfe\xff\xff\xff"),
        ("sf64", pa.int64(), -2, key(11, 1) + b"\xfe" + b"\xff" * 7),
        ("float", pa.float32(), 0.0, b""),
        ("float", pa.float32(), -0.0, key(12, 5) + b"\0\0\0\x80"),
        ("float", pa.float16(), 0.5, key(12, 5) + struct.pack("<f", 0.5)),
        ("double", pa.float32(), 0.5, key(13, 1) + struct.pack("<d", 0.5)),
        ("text", pa.string(), "", b""),
        ("text", pa.string(), "x" * 200, key(14, 2) + b"\xc8\x01" + b"x" * 200),
        ("text", pa.decimal128(9, 2), Decimal("-1.50"), key(14, 2) + b"\x05-1.50"),
        ("bytes", pa.binary(2), b"\0\xff", key(15, 2) + b"\x02\0\xff"),
        ("color", pa.string(), "RED", b""),
        ("color", pa.string(), "ROSE", key(16, 0) + b"\xac\x02"),
        ("color", pa.int64(), -1, key(16, 0) + b"\xff" * 9 + b"\x01"),
        ("part", pa.struct([("n", pa.int32())]), {"n": 0}, key(17, 2) + b"\0"),
        ("part", pa.struct([("o", pa.int32())]), {"o": 0}, key(17, 2) + b"\x02\x10\0"),
        (
            "at",
            pa.timestamp("us", "UTC"),
            AT,
            key(18, 2) + b"\x11\x08" + b"\xfe" + b"\xff" * 8 + b"\x01\x10\x98\xc2\xb5\xee\x01",
        ),
        ("at", pa.timestamp("s", "Europe/Berlin"), 0, key(18, 2) + b"\0"),
        ("span", pa.duration("ms"), -500, key(19, 2) + b"\x0b\x10\x80\xb6\xca\x91\xfe\xff\xff\xff\xff\x01"),
        ("span", pa.duration("s"), 1, key(19, 2) + b"\x02\x08\x01"),
        ("maybe_text", pa.string(), "", key(20, 2) + b"\0"),
        ("maybe_text", pa.string(), "x", key(20, 2) + b"\x03\x0a\x01x"),
        ("maybe_text", pa.string(), None, b""),
        ("maybe_text", pa.struct([("value", pa.string())]), {"value": "x"}, key(20, 2) + b"\x03\x0a\x01x"),
        ("maybe_long", pa.int8(), 7, key(21, 2) + b"\x02\x08\x07"),
        ("numbers", pa.list_(pa.int32()), [], b""),
        ("numbers", pa.list_(pa.int32()), None, b""),
        ("numbers", pa.list_(pa.int32()), [0, 300], key(22, 2) + b"\x03\0\xac\x02"),
        ("apart", pa.list_(pa.int32()), [0, 1], key(23, 0) + b"\0" + key(23, 0) + b"\x01"),
        ("texts", pa.large_list(pa.string()), ["", "a"], key(24, 2) + b"\0" + key(24, 2) + b"\x01a"),
        ("counts", pa.map_(pa.string(), pa.int32()), [("", 0)], key(25, 2) + b"\x04\x0a\0\x10\0"),
        ("parts", pa.map_(pa.int8(), pa.struct([("n", pa.int8())])), [(0, {"n": 0})], key(26, 2) + b"\x04\x08\0\x12\0"),
        ("some", pa.int32(), 0, key(28, 0) + b"\0"),
        ("a", pa.string(), "", key(29, 2) + b"\0"),
        ("some", pa.null(), None, b""),
        ("numbers", pa.null(), None, b""),
    ],
    ids=str,
)
def test_value_is_written_as_its_protobuf_type(name: str, data_type: pa.DataType, value: Any, expected: bytes) -> None:
    assert encode(one(name, value, data_type)) == ([expected], [])


@pytest.mark.parametrize(
    ("name", "data_type", "value", "path", "reason"),
    [
        ("i32", pa.int64(), 2**31, "i32", "the number is out of the range of int32"),
        ("u32", pa.int32(), -1, "u32", "the number is out of the range of uint32"),
        ("i64", pa.uint64(), 2**63, "i64", "the number is out of the range of int64"),
        ("u64", pa.int64(), -1, "u64", "the number is out of the range of uint64"),
        ("sf32", pa.uint32(), 2**31, "sf32", "the number is out of the range of sfixed32"),
        ("maybe_long", pa.uint64(), 2**63, "maybe_long", "the number is out of the range of int64"),
        ("i32", pa.date64(), 86_400_000 * 2**31, "i32", "the number is out of the range of int32"),
        ("color", pa.string(), "red", "color", "the enum 'shop.Color' has no such value"),
        ("color", pa.int16(), 2, "color", "the enum 'shop.Color' has no such number"),
        ("color", pa.uint64(), 2**64 - 1, "color", "the enum 'shop.Color' has no such number"),
        (
            "at",
            pa.timestamp("s", "UTC"),
            253_402_300_800,
            "at",
            "it is not in the years 1 to 9999, which a Timestamp of Protobuf can hold",
        ),
        (
            "span",
            pa.duration("s"),
            -315_576_000_001,
            "span",
            "it is longer than the 10,000 years that a Duration of Protobuf can hold",
        ),
        (
            "i64",
            pa.time64("ns"),
            300_001,
            "i64",
            "it is not a whole number of the schema's unit, and its rest would be lost",
        ),
        (
            "numbers",
            pa.list_(pa.int32()),
            [1, None],
            "numbers.element",
            "it is null, and Protobuf has no null in lists and maps",
        ),
        (
            "counts",
            pa.map_(pa.string(), pa.int32()),
            [("a", None)],
            "counts.value",
            "it is null, and Protobuf has no null in lists and maps",
        ),
        (
            "part_list",
            pa.list_(pa.struct([("n", pa.int64())])),
            [{"n": 1}, {"n": 2**40}],
            "part_list.element.n",
            "the number is out of the range of int32",
        ),
    ],
    ids=str,
)
def test_row_that_does_not_fit_is_named(name: str, data_type: pa.DataType, value: Any, path: str, reason: str) -> None:
    if pa.types.is_temporal(data_type):
        parts = [
            pa.array([value], pa.int64()).cast(data_type)
            if pa.types.is_date(data_type)
            else pa.array([value]).view(data_type)
        ]
    else:
        parts = [pa.array([value], data_type)]
    column = pa.StructArray.from_arrays(parts, names=[name])
    assert encode(column) == ([None], [BadRow(0, f"value.{path}", reason)])


def test_text_that_is_no_utf8_is_a_bad_row() -> None:
    texts = [b"plain", b"long enough \xc3\xa4", b"\xc3", b"12345678\xff", b"\xed\xa0\x80", b""]
    strings = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())
    values, bad = encode(pa.StructArray.from_arrays([strings], names=["text"]))
    assert [each is None for each in values] == [False, False, True, True, True, False]
    assert set(bad) == {BadRow(row, "value.text", "the text is not UTF-8, which Protobuf demands") for row in (2, 3, 4)}


def test_only_one_member_of_a_oneof_may_have_a_value() -> None:
    part = pa.struct([("n", pa.int32())])
    data_type = pa.struct([("c", part), ("a", pa.string()), ("b_choice", pa.int32())])
    rows = [
        {"a": "", "b_choice": None, "c": None},
        {"a": None, "b_choice": 0, "c": None},
        {"a": None, "b_choice": None, "c": None},
        {"a": None, "b_choice": 0, "c": {"n": 0}},
    ]
    values, bad = encode(pa.array(rows, data_type))
    assert values == [key(29, 2) + b"\0", key(30, 0) + b"\0", b"", None]
    said = "another field of the oneof 'choice' has a value too, and only one may have one"
    assert bad == [BadRow(3, "value.c", said)]


def test_null_in_a_required_field_is_a_bad_row_and_a_missing_one_is_refused() -> None:
    fields = "required int32 n = 1; optional int32 o = 2 [default = 5]; repeated int32 r = 3;"
    proto = f'syntax = "proto2"; message R {{ {fields} }}'
    data_type = pa.struct([("n", pa.int32()), ("o", pa.int32()), ("r", pa.list_(pa.int32()))])
    values, bad = encode(pa.array([{"n": 0, "o": 5, "r": [1, 2]}, {"o": 1}], data_type), proto, "R")
    assert values == [b"\x08\0\x10\x05\x18\x01\x18\x02", None]
    assert bad == [BadRow(1, "value.n", "it is null, and the schema allows no null there")]
    with pytest.raises(
        SchemaError, match=r"value\.n: the Protobuf message 'R' requires this field, and the column has none"
    ):
        encode(pa.array([{"o": 1}], pa.struct([("o", pa.int32())])), proto, "R")
    missing = pa.StructArray.from_arrays([pa.nulls(1)], names=["n"])
    assert encode(missing, proto, "R")[1][0].path == "value.n"


def test_fields_are_written_by_their_numbers() -> None:
    data_type = pa.struct([("some", pa.int32()), ("text", pa.string()), ("b", pa.bool_())])
    values, _ = encode(pa.array([{"some": 1, "text": "x", "b": True}], data_type))
    assert values == [key(1, 0) + b"\x01" + key(14, 2) + b"\x01x" + key(28, 0) + b"\x01"]


def test_tag_may_have_five_bytes() -> None:
    assert encode(one("n", 1, pa.int32()), message="Far")[0] == [b"\xf8\xff\xff\xff\x0f\x01"]


def test_recursive_message_takes_a_column_as_deep_as_it_is() -> None:
    """google.protobuf.Value has lists of itself."""
    inner = pa.struct([("string_value", pa.string()), ("number_value", pa.float64())])
    values = pa.struct([("list_value", pa.struct([("values", pa.list_(inner))]))])
    column = pa.array(
        [{"any": {"list_value": {"values": [{"string_value": "a"}, {"number_value": 0.0}]}}}],
        pa.struct([("any", values)]),
    )
    listed = b"\x0a\x03\x1a\x01a" + b"\x0a\x09\x11" + bytes(8)
    assert encode(column)[0] == [key(32, 2) + bytes([len(listed) + 2]) + b"\x32" + bytes([len(listed)]) + listed]


@pytest.mark.parametrize("length", [0, 1, 125, 126, 127, 128, 16_383, 16_384, 70_000, 2_100_000])
def test_length_of_a_message_takes_as_many_bytes_as_it_needs(length: int) -> None:
    proto = 'syntax = "proto3"; message A { B b = 1; int32 last = 2; } message B { string s = 1; }'
    data_type = pa.struct([("b", pa.struct([("s", pa.string())])), ("last", pa.int32())])
    text = "ab" * (length // 2) + "c" * (length % 2)
    values, _ = encode(pa.array([{"b": {"s": text}, "last": 1}] * 3, data_type), proto, "A")
    from support.generated_protobuf import message_class

    made = message_class(proto, "A")()
    made.b.s = text
    made.last = 1
    assert values == [made.SerializeToString()] * 3


PART = pa.struct([("n", pa.int32())])


@pytest.mark.parametrize(
    ("name", "data_type", "message"),
    [
        ("b", pa.int8(), "the Arrow type int8 does not fit Protobuf's bool. Cast the column, or change the schema."),
        ("i32", pa.bool_(), "does not fit Protobuf's int32"),
        ("i32", pa.float64(), "does not fit Protobuf's int32"),
        ("i32", pa.string(), "does not fit Protobuf's int32"),
        ("i32", pa.time64("us"), "does not fit Protobuf's int32"),
        ("i64", pa.timestamp("us", "UTC"), "does not fit Protobuf's int64"),
        ("float", pa.float64(), "does not fit Protobuf's float"),
        ("double", pa.int32(), "does not fit Protobuf's double"),
        ("text", pa.binary(), "does not fit Protobuf's string"),
        ("text", pa.int32(), "does not fit Protobuf's string"),
        ("bytes", pa.string(), "does not fit Protobuf's bytes"),
        ("bytes", pa.decimal128(9, 2), "does not fit Protobuf's bytes"),
        ("color", pa.bool_(), "does not fit Protobuf's enum shop.Color"),
        ("part", pa.int32(), "does not fit Protobuf's shop.Part"),
        ("part", pa.map_(pa.string(), pa.int32()), "does not fit Protobuf's shop.Part"),
        ("at", pa.timestamp("us"), "A timestamp without a time zone is no point in time: cast it to a timestamp"),
        ("at", pa.int64(), "does not fit Protobuf's google.protobuf.Timestamp"),
        ("span", pa.time64("us"), "does not fit Protobuf's google.protobuf.Duration"),
        ("maybe_text", pa.int32(), "does not fit Protobuf's string"),
        ("numbers", pa.int32(), "does not fit Protobuf's repeated int32"),
        ("numbers", pa.list_(pa.list_(pa.int32())), "Protobuf has no list of lists: put the inner list into a struct"),
        ("numbers", pa.map_(pa.string(), pa.int32()), "does not fit Protobuf's repeated int32"),
        ("counts", pa.list_(pa.int32()), "does not fit Protobuf's map"),
        (
            "counts",
            pa.map_(pa.int32(), pa.int32()),
            "value.counts.key: the Arrow type int32 does not fit Protobuf's string",
        ),
        (
            "part",
            pa.struct([("x", pa.int32())]),
            "value.part.x: the Protobuf message 'shop.Part' has no field of this name",
        ),
        ("part", pa.struct([("N", pa.int32())]), "(but 'n': upper and lower case count)"),
    ],
    ids=str,
)
def test_pair_that_does_not_fit_is_refused_with_the_path(name: str, data_type: pa.DataType, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        encode(pa.StructArray.from_arrays([pa.nulls(0, data_type)], names=[name]))
    assert str(caught.value).startswith(f"value.{name}")
    assert message in str(caught.value)


def test_group_is_refused() -> None:
    proto = 'syntax = "proto2"; message M { optional group G = 1 { optional int32 n = 1; } }'
    with pytest.raises(
        SchemaError, match=r"value\.g: .* does not fit Protobuf's M\.G as a group .*Groups are not supported"
    ):
        encode(one("g", {"n": 1}, PART), proto, "M")


@pytest.mark.parametrize(
    ("kind", "value", "data_type"),
    [
        ("google.protobuf.Timestamp", 1, pa.timestamp("us", "UTC")),
        ("google.protobuf.Duration", 1, pa.duration("us")),
        ("google.protobuf.Int64Value", 1, pa.int64()),
        ("repeated google.protobuf.Duration", [1], pa.list_(pa.duration("us"))),
        ("google.protobuf.Timestamp", {"seconds": 1}, pa.struct([("seconds", pa.int64())])),
    ],
)
def test_known_type_that_is_delimited_is_refused(kind: str, value: Any, data_type: pa.DataType) -> None:
    """Bug: it was written with its length, where readers expect a group: they saw no value."""
    imports = "".join(f'import "google/protobuf/{name}.proto"; ' for name in ("timestamp", "duration", "wrappers"))
    proto = f'edition = "2023"; {imports} message M {{ {kind} v = 1 [features.message_encoding = DELIMITED]; }}'
    with pytest.raises(SchemaError, match=r"value\.v.* as a group .*Groups are not supported"):
        encode(one("v", value, data_type), proto, "M")


def test_column_that_is_no_struct_is_refused() -> None:
    with pytest.raises(SchemaError, match="value: the format protobuf takes a struct, not the Arrow type int32"):
        encode(pa.array([1], pa.int32()))


def test_two_fields_of_one_name_are_refused() -> None:
    column = pa.StructArray.from_arrays([pa.array([1])] * 2, names=["i32", "i32"])
    with pytest.raises(SchemaError, match="value: two fields have the name 'i32'"):
        encode(column)


def test_message_with_too_many_oneofs_is_refused() -> None:
    oneofs = " ".join(f"oneof o{number} {{ int32 f{number} = {number}; }}" for number in range(1, 66))
    proto = f'syntax = "proto3"; message M {{ {oneofs} }}'
    names = [f"f{number}" for number in range(1, 66)]
    column = pa.StructArray.from_arrays([pa.array([1], pa.int32())] * 65, names=names)
    with pytest.raises(SchemaError, match="value: the Protobuf message 'M' has more than 64 oneofs"):
        encode(column, proto, "M")
    assert encode(pa.StructArray.from_arrays([pa.array([1], pa.int32())] * 64, names=names[:64]), proto, "M")[1] == []


def test_type_that_is_too_deep_is_refused() -> None:
    proto = 'syntax = "proto3"; message M { M m = 1; }'
    data_type = pa.struct([])
    for _ in range(150):
        data_type = pa.struct([("m", data_type)])
    with pytest.raises(SchemaError, match="more than 100 levels"):
        encode(pa.nulls(1, data_type), proto, "M")
