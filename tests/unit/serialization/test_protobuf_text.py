"""The .proto file that is made of a column's type: read by protoc, and written by."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pyarrow.types as pat
import pytest
from support.generated_columns import LEAVES, random_array, random_struct
from support.generated_protobuf import DoesNotFitError, has_long_map, message_class, message_of

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import FormatSettings
from spark_kafka_sink.serialization.plan import plain_type
from spark_kafka_sink.serialization.protobuf_text import proto_text
from spark_kafka_sink.serialization.schemas import column_format

LINE = pa.struct([("sku", pa.string()), pa.field("amount", pa.int32(), nullable=False)])
TYPE = pa.struct(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("flag", pa.bool_()),
        ("price", pa.decimal128(9, 2)),
        ("day", pa.date32()),
        ("clock", pa.time64("ns")),
        ("at", pa.timestamp("us", "UTC")),
        ("took", pa.duration("us")),
        ("ship_to", pa.struct([("zip", pa.dictionary(pa.int8(), pa.string()))])),
        ("lines", pa.list_(LINE)),
        ("tags", pa.list_(pa.string())),
        ("counts", pa.map_(pa.int32(), LINE)),
    ]
)
TEXT = """\
syntax = "proto3";
package shop.v1;
import "google/protobuf/duration.proto";
import "google/protobuf/timestamp.proto";
message Order {
  int64 id = 1;
  optional bool flag = 2;
  optional string price = 3;
  optional int32 day = 4;
  optional int64 clock = 5;
  google.protobuf.Timestamp at = 6;
  google.protobuf.Duration took = 7;
  message ShipTo {
    optional string zip = 1;
  }
  ShipTo ship_to = 8;
  message Lines {
    optional string sku = 1;
    int32 amount = 2;
  }
  repeated Lines lines = 9;
  repeated string tags = 10;
  message Counts {
    optional string sku = 1;
    int32 amount = 2;
  }
  map<int32, Counts> counts = 11;
}
"""


def test_file_of_a_type() -> None:
    assert proto_text(TYPE, "value", "shop.v1.Order") == TEXT
    assert column_format(FormatSettings("value", "protobuf", message="shop.v1.Order"), TYPE).schema == TEXT
    assert proto_text(pa.struct([]), "value", None) == 'syntax = "proto3";\nmessage topLevelRecord {\n}\n'


def test_messages_have_names_that_nothing_else_has() -> None:
    inner = pa.struct([("x", pa.int32())])
    data_type = pa.struct([("a", inner), ("A", pa.int32()), ("B", inner), ("M", inner), ("_", inner), ("_1", inner)])
    made = column_format(FormatSettings("value", "protobuf", message="M"), data_type)
    assert made.protobuf is not None
    names = {each.name for each in made.protobuf.messages}
    assert names == {"M", "M.ARecord", "M.BRecord", "M.MRecord", "M.Record", "M.Record1"}


# ---- generated types -----------------------------------------------------------------------------------------------

_LEAVES = [of for of in LEAVES if not pat.is_null(of) and of not in (pa.timestamp("us"), pa.timestamp("s"))]


def writable(data_type: pa.DataType, *, in_list: bool = False) -> pa.DataType:
    """Return a type like this one: without lists in lists, and without nulls in lists and maps."""
    plain = plain_type(data_type)
    if pat.is_struct(plain):
        return pa.struct([pa.field(of.name, writable(of.type), of.nullable) for of in plain])
    if pat.is_map(plain):
        item = pa.field("value", writable(plain.item_type, in_list=True), nullable=False)
        return pa.int32() if in_list else pa.map_(plain.key_type, item)
    if pat.is_list(plain) or pat.is_large_list(plain) or pat.is_fixed_size_list(plain):
        item = pa.field("element", writable(plain.value_type, in_list=True), nullable=False)
        return pa.int32() if in_list else pa.list_(item)
    return data_type


def check(seed: int, rows: int) -> int:
    rng = random.Random(seed)
    data_type = writable(random_struct(rng, 3, leaves=_LEAVES))
    column = random_array(rng, data_type, rows)
    used = column_format(FormatSettings("value", "protobuf"), data_type)
    encoded = ColumnEncoder(used, data_type).encode(column)
    made = message_class(used.schema or "", "topLevelRecord")
    compared = 0
    for value, given in zip(encoded.values.to_pylist(), column.to_pylist(), strict=True):
        if given is None or value is None:
            continue
        expected = message_of(made(), given, data_type).SerializeToString(deterministic=True)
        is_same_order = not has_long_map(given, data_type)
        read = value if is_same_order else made.FromString(value).SerializeToString(deterministic=True)
        assert read == expected, (seed, given)
        compared += 1
    # a dictionary may have null as an entry, in a list too
    assert len(encoded.bad_rows) == sum(unfit(made, given, data_type) for given in column.to_pylist()), seed
    return compared


def unfit(made: Any, given: Any, data_type: pa.DataType) -> bool:
    if given is None:
        return False
    try:
        message_of(made(), given, data_type)
    except DoesNotFitError:
        return True
    return False


@pytest.mark.parametrize("seed", range(6))
def test_made_schema_is_that_of_the_bytes(seed: int) -> None:
    check(seed, 20)


@pytest.mark.slow
def test_made_schemas_of_many_types_are_those_of_the_bytes() -> None:
    assert sum(check(seed, 40) for seed in range(100, 200)) > 2000


# ---- what Protobuf does not have -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_type", "message"),
    [
        (
            pa.null(),
            "value.c: Protobuf has no type for the Arrow type null. Cast the column, drop it, or give the schema.",
        ),
        (
            pa.timestamp("us"),
            "value.c: Protobuf has no type for the Arrow type timestamp[us]. A timestamp without",
        ),
        (
            pa.list_(pa.list_(pa.int8())),
            "value.c.element: Protobuf has no lists and maps in lists and maps. Put",
        ),
        (pa.map_(pa.string(), pa.list_(pa.int8())), "value.c.value: Protobuf has no lists and maps in lists and maps."),
        (pa.map_(pa.float64(), pa.int8()), "value.c.key: keys of a map are strings, integers or booleans in Protobuf"),
        (pa.map_(LINE, pa.int8()), "value.c.key: keys of a map are strings, integers or booleans in Protobuf"),
        (pa.decimal256(50, 2), "value.c: values of the Arrow type decimal256(50, 2) cannot be written"),
        (
            pa.struct([("value", pa.binary()), pa.field("metadata", pa.binary(), metadata={b"variant": b"true"})]),
            "value.c: Protobuf has no type for a variant.",
        ),
    ],
    ids=str,
)
def test_type_that_protobuf_does_not_have_is_refused(data_type: pa.DataType, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        proto_text(pa.struct([("c", data_type)]), "value", None)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["a b", "1a", "a-b", "é", ""])
def test_name_that_protobuf_does_not_allow_is_refused(name: str) -> None:
    with pytest.raises(SchemaError, match=r"value\.s: Protobuf does not allow the name") as caught:
        proto_text(pa.struct([("s", pa.struct([(name, pa.int8())]))]), "value", None)
    assert f"'{name}'" in str(caught.value)


def test_fields_with_one_name_in_json_are_refused() -> None:
    with pytest.raises(SchemaError, match="value: the fields 'ship_to' and 'shipTo' have the same name in the"):
        proto_text(pa.struct([("ship_to", pa.int8()), ("shipTo", pa.int8())]), "value", None)
    with pytest.raises(SchemaError, match="value: the fields 'a' and 'a' have the same name"):
        proto_text(pa.struct([("a", pa.int8()), ("a", pa.int8())]), "value", None)
    assert column_format(FormatSettings("value", "protobuf"), pa.struct([("ab", pa.int8()), ("aB", pa.int8())])).schema


@pytest.mark.parametrize("message", ["a b", "shop.", "..Order", "1", "shop..Order", "Ordér", "."])
def test_message_that_is_no_name_is_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=r"key\.schema\.message=.* is no name of a Protobuf message"):
        proto_text(pa.struct([]), "key", message)


def test_dot_before_the_name_only_says_that_it_is_full() -> None:
    """Bug: the text on two messages of a registry's schema says to write it, and then it was refused."""
    assert proto_text(pa.struct([]), "value", ".shop.Order") == proto_text(pa.struct([]), "value", "shop.Order")


def test_column_that_is_no_struct_is_refused() -> None:
    with pytest.raises(SchemaError, match="value: the format protobuf takes a struct, not the Arrow type string"):
        proto_text(pa.string(), "value", None)


def test_type_that_is_too_deep_is_refused() -> None:
    data_type = pa.struct([])
    for _ in range(150):
        data_type = pa.struct([("m", data_type)])
    with pytest.raises(SchemaError, match="more than 100 levels"):
        proto_text(data_type, "value", None)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (None, "google.protobuf.Timestamp"),
        ("google.Order", "google.protobuf.Timestamp"),
        ("shop.Order", "google.protobuf.Timestamp"),
        ("com.google.Order", ".google.protobuf.Timestamp"),
        ("com.google.shop.Order", ".google.protobuf.Timestamp"),
    ],
)
def test_time_is_found_in_every_package(message: str | None, kind: str) -> None:
    """Bug: in a package with google in it protoc looked for the type there, and no message could have a time."""
    data_type = pa.struct([("at", pa.timestamp("us", "UTC"))])
    assert f"  {kind} at = 1;" in proto_text(data_type, "value", message)
    assert kind in (column_format(FormatSettings("value", "protobuf", None, message), data_type).schema or "")


def test_map_whose_entry_would_have_no_name_is_refused_with_its_path() -> None:
    """Bug: TypeError for the name that Spark gives to the first field of a tuple."""
    data_type = pa.struct([("_1", pa.map_(pa.string(), pa.int64()))])
    with pytest.raises(SchemaError, match=r"^value\._1: Protobuf does not allow the name '_1' for a map: .*'1Entry'"):
        proto_text(data_type, "value", None)
