from __future__ import annotations

import json

import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.avro_types import arrow_type_of


def record(**fields: object) -> str:
    return json.dumps(
        {"type": "record", "name": "r", "fields": [{"name": name, "type": part} for name, part in fields.items()]}
    )


@pytest.mark.parametrize(
    ("schema", "data_type"),
    [
        ('"long"', pa.int64()),
        ('["null", "string"]', pa.string()),
        ('["null"]', pa.null()),
        ('{"type": "int", "logicalType": "date"}', pa.date32()),
        ('{"type": "int", "logicalType": "time-millis"}', pa.time64("ns")),
        ('{"type": "long", "logicalType": "timestamp-millis"}', pa.timestamp("us", "UTC")),
        ('{"type": "long", "logicalType": "local-timestamp-micros"}', pa.timestamp("us")),
        ('{"type": "long", "logicalType": "timestamp-nanos"}', pa.timestamp("us", "UTC")),
        ('{"type": "long", "logicalType": "local-timestamp-nanos"}', pa.timestamp("us")),
        ('{"type": "long", "logicalType": "of-another-program"}', pa.int64()),
        ('{"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}', pa.decimal128(9, 2)),
        ('{"type": "fixed", "name": "f", "size": 3}', pa.binary()),
        ('{"type": "enum", "name": "e", "symbols": ["A"]}', pa.string()),
        (
            record(a=["double", "null"], b={"type": "array", "items": "float"}, c={"type": "map", "values": "bytes"}),
            pa.struct(
                [
                    ("a", pa.float64()),
                    ("b", pa.list_(pa.field("element", pa.float32()))),
                    ("c", pa.map_(pa.string(), pa.binary())),
                ]
            ),
        ),
    ],
)
def test_a_schema_has_the_type_of_its_values(schema: str, data_type: pa.DataType) -> None:
    assert arrow_type_of(schema, "value") == data_type


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("{", "is not JSON"),
        (record(a=["int", "string"]), r"value\.a: the Avro schema has a union of int, string.*schema=df\.schema"),
        (record(next=["null", "r"]), r"value\.next: the Avro record 'r' refers to itself"),
        (record(d={"type": "bytes", "logicalType": "decimal"}), r"value\.d: the Avro schema has a decimal\(0,0\)"),
        (
            record(d={"type": "bytes", "logicalType": "decimal", "precision": 39}),
            r"value\.d: the Avro schema has a decimal\(39,0\), and a column has a precision of 1 to 38",
        ),
        (
            record(d={"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 3}),
            r"value\.d: the Avro schema has a decimal\(2,3\)",
        ),
    ],
)
def test_a_schema_without_such_a_type_is_refused(schema: str, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        arrow_type_of(schema, "value")


def test_a_type_that_is_used_twice_is_no_circle() -> None:
    point = {"type": "record", "name": "p", "fields": [{"name": "x", "type": "int"}]}
    inner = pa.struct([("x", pa.int32())])
    assert arrow_type_of(record(a=point, b="p"), "value") == pa.struct([("a", inner), ("b", inner)])
