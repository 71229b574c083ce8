"""Avro schemas: those made of Arrow types are Spark's, and what is read of a given one."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.avro_schema import bytes_for_precision, parse_schema, schema_text


def schema(data_type: pa.DataType, *, null_first: bool = False) -> Any:
    return json.loads(schema_text(data_type, "value", "null-first" if null_first else "null-last"))


def field(data_type: pa.DataType, *, null_first: bool = False) -> Any:
    """The schema of a nullable field c."""
    return schema(pa.struct([("c", data_type)]), null_first=null_first)["fields"][0]


def decimal(size: int, precision: int, scale: int, namespace: str = "topLevelRecord.c") -> dict[str, Any]:
    return {
        "type": "fixed",
        "name": "fixed",
        "namespace": namespace,
        "size": size,
        "logicalType": "decimal",
        "precision": precision,
        "scale": scale,
    }


@pytest.mark.parametrize(
    ("data_type", "expected"),
    [
        (pa.bool_(), "boolean"),
        (pa.int8(), "int"),
        (pa.int16(), "int"),
        (pa.int32(), "int"),
        (pa.int64(), "long"),
        (pa.uint16(), "int"),
        (pa.uint32(), "long"),
        (pa.uint64(), "long"),
        (pa.float16(), "float"),
        (pa.float32(), "float"),
        (pa.float64(), "double"),
        (pa.string(), "string"),
        (pa.string_view(), "string"),
        (pa.dictionary(pa.int8(), pa.large_string()), "string"),
        (pa.large_binary(), "bytes"),
        (pa.binary(4), "bytes"),
        (pa.date32(), {"type": "int", "logicalType": "date"}),
        (pa.timestamp("us", "Europe/Berlin"), {"type": "long", "logicalType": "timestamp-micros"}),
        (pa.timestamp("us"), {"type": "long", "logicalType": "local-timestamp-micros"}),
        (pa.timestamp("ms", "UTC"), {"type": "long", "logicalType": "timestamp-millis"}),
        (pa.timestamp("ns", "UTC"), {"type": "long", "logicalType": "timestamp-nanos"}),
        (pa.time64("ns"), {"type": "long", "logicalType": "time-micros", "spark.sql.catalyst.type": "time(6)"}),
        (pa.duration("us"), {"type": "long", "spark.sql.catalyst.type": "interval day to second"}),
        (pa.decimal128(5, 2), decimal(3, 5, 2)),
        (pa.decimal128(9, 2), decimal(4, 9, 2)),
        (pa.decimal128(18, 0), decimal(8, 18, 0)),
        (pa.decimal128(38, 10), decimal(16, 38, 10)),
        (pa.list_(pa.int32()), {"type": "array", "items": ["int", "null"]}),
        (pa.list_(pa.field("element", pa.int32(), False)), {"type": "array", "items": "int"}),
        (pa.map_(pa.string(), pa.int64()), {"type": "map", "values": ["long", "null"]}),
    ],
    ids=str,
)
def test_schema_of_a_type_is_that_of_spark(data_type: pa.DataType, expected: Any) -> None:
    assert field(data_type) == {"name": "c", "type": [expected, "null"]}
    assert field(data_type, null_first=True)["default"] is None
    assert field(data_type, null_first=True)["type"][0] == "null"


def test_void_is_no_union() -> None:
    assert field(pa.null()) == {"name": "c", "type": "null"}
    assert field(pa.null(), null_first=True) == {"name": "c", "type": "null", "default": None}


def test_field_that_is_never_null_is_no_union() -> None:
    made = schema(pa.struct([pa.field("a", pa.int32(), False)]), null_first=True)
    assert made == {"type": "record", "name": "topLevelRecord", "fields": [{"name": "a", "type": "int"}]}


def test_namespaces_are_the_names_of_the_records_around() -> None:
    made = field(pa.struct([("b", pa.struct([("d", pa.decimal128(9, 2))]))]))["type"][0]
    assert (made["name"], made["namespace"]) == ("c", "topLevelRecord")
    inner = made["fields"][0]["type"][0]
    assert (inner["name"], inner["namespace"]) == ("b", "topLevelRecord.c")
    assert inner["fields"][0]["type"][0] == decimal(4, 9, 2, "topLevelRecord.c.b.d")
    in_a_list = field(pa.list_(pa.struct([("x", pa.int32())])))["type"][0]["items"][0]
    assert (in_a_list["name"], in_a_list["namespace"]) == ("c", "topLevelRecord")


def test_primitive_column_has_a_primitive_schema() -> None:
    assert schema(pa.string()) == "string"
    assert schema(pa.decimal128(9, 2))["namespace"] == "topLevelRecord"


VARIANT = pa.struct(
    [pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False, metadata={b"variant": b"true"})]
)


@pytest.mark.parametrize(
    ("data_type", "message"),
    [
        (pa.struct([("a b", pa.int32())]), "value: Avro does not allow the name 'a b'"),
        (pa.struct([("1a", pa.int32())]), "value: Avro does not allow the name '1a'"),
        (pa.struct([("x", pa.struct([("ä", pa.int32())]))]), "value.x: Avro does not allow the name 'ä'"),
        (pa.struct([("m", pa.map_(pa.int32(), pa.int32()))]), "value.m: Avro has only maps whose keys are strings"),
        (pa.struct([("v", pa.list_(VARIANT))]), "value.v.element: Avro has no type for a variant"),
        (pa.struct([("d", pa.decimal256(50, 2))]), "value.d: Avro has no type for the Arrow type decimal256"),
        (pa.struct([("i", pa.month_day_nano_interval())]), "value.i: Avro has no type for the Arrow type month_day"),
        (pa.struct([pa.field("a", pa.int32()), pa.field("a", pa.int32())]), "value: two fields have the name 'a'"),
    ],
)
def test_type_without_a_schema_names_the_path(data_type: pa.DataType, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        schema(data_type)
    assert message in str(caught.value)


@pytest.mark.parametrize("precision", range(1, 39))
def test_fixed_decimal_has_the_fewest_bytes_that_hold_all_digits(precision: int) -> None:
    most, size = 10**precision - 1, bytes_for_precision(precision)
    assert -(1 << (8 * size - 1)) <= -most
    assert most < 1 << (8 * size - 1)
    assert size == 1 or most >= 1 << (8 * size - 9)


def test_names_are_found_by_namespace() -> None:
    read = parse_schema(
        json.dumps(
            {
                "type": "record",
                "name": "a.b.R",
                "fields": [
                    {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["X"]}},
                    {"name": "again", "type": "E"},
                    {"name": "full", "type": ["null", "a.b.E"]},
                    {"name": "self", "type": ["null", "R"]},
                    {"name": "other", "type": {"type": "fixed", "name": "F", "namespace": "c", "size": 2}},
                    {"name": "wrapped", "type": {"type": {"type": "array", "items": "c.F"}}},
                ],
            }
        )
    )
    assert read.name == "a.b.R"
    assert read.fields["e"].name == "a.b.E"
    assert read.fields["again"] is read.fields["e"] is read.fields["full"].parts[1]
    assert read.fields["self"].parts[1] is read
    assert read.fields["wrapped"].parts[0] is read.fields["other"]
    assert read.fields["other"].name == "c.F"


def test_bare_name_of_a_primitive_is_a_schema() -> None:
    assert parse_schema("string").kind == parse_schema('"string"').kind == parse_schema('{"type":"string"}').kind


RECORD = '{"type":"record","name":"r","fields":%s}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("7", "has 7 where a type should be"),
        ('{"name":"x"}', "where a type should be"),
        ('"other.Thing"', "uses the type 'other.Thing', which it does not define before"),
        ('{"type":"record","name":"a b","fields":[]}', "which is not valid"),
        ('{"type":"record","name":"r"}', "'r' has no list of fields"),
        (RECORD % '[{"name":"a"}]', "has no name or no type"),
        (RECORD % '[{"name":"a-b","type":"int"}]', "Avro does not allow the name 'a-b'"),
        (RECORD % '[{"name":"a","type":"int"},{"name":"a","type":"int"}]', "has the field 'a' twice"),
        (RECORD % '[{"name":"a","type":{"type":"fixed","name":"r","size":1}}]', "defines 'r' twice"),
        ('{"type":"fixed","name":"f"}', "'f' has no valid size"),
        ('{"type":"enum","name":"e"}', "'e' has no list of symbols"),
        ('{"type":"fixed","name":"f","size":true}', "'f' has no valid size"),
        ('{"type":"fixed","name":"f","size":2147483648}', "'f' has no valid size"),
        ('{"type":"enum","name":"e","symbols":["A",1]}', "'e' has the symbol 1, which is not valid"),
        ('{"type":"enum","name":"e","symbols":["\\ud800"]}', 'has the symbol "\\ud800", which is not valid'),
        ('{"type":"enum","name":"e","symbols":["A","B","A"]}', "'e' has the symbol \"A\" twice"),
        ('{"type":"array","items":' * 5_000 + '"int"' + "}" * 5_000, "too many levels"),
        ("[" * 100_000, "too many levels"),
        ('{"type":"array"}', "where a type should be"),
        ('{"type":"fixed","name":"f","size":2,"logicalType":"decimal","precision":9}', "no room for a decimal of 9"),
        (
            '{"type":"bytes","logicalType":"decimal","precision":"9"}',
            'with the precision "9", which is no whole number',
        ),
        (
            '{"type":"bytes","logicalType":"decimal","precision":9,"scale":null}',
            "with the scale null, which is no whole number",
        ),
    ],
)
def test_text_that_is_no_schema_is_refused(text: str, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_schema(text)
    assert message in str(caught.value)
