"""Which Arrow types fit which Avro types, what is written for them, and how the others are refused."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.serialization.avro_schema import schema_text
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import BadRow, ColumnFormat, FormatSettings
from spark_kafka_sink.serialization.schemas import column_format


def record(**fields: Any) -> str:
    return json.dumps(
        {"type": "record", "name": "r", "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}
    )


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def encode(column: pa.Array, schema: str) -> tuple[list[bytes | None], tuple[BadRow, ...]]:
    used = column_format(FormatSettings("value", "avro", schema), column.type)
    encoded = ColumnEncoder(used, column.type).encode(column)
    return encoded.values.to_pylist(), encoded.bad_rows


def zigzag(number: int) -> bytes:
    number, made = (number << 1) ^ (number >> 63), bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


FIXED = {"type": "fixed", "name": "f", "size": 3}
ENUM = {"type": "enum", "name": "e", "symbols": ["A", "BB"]}
AT = 1_577_934_245_123_456


@pytest.mark.parametrize(
    ("data_type", "value", "avro", "expected"),
    [
        (pa.int8(), -3, "int", zigzag(-3)),
        (pa.uint16(), 65535, "int", zigzag(65535)),
        (pa.int64(), -(2**63), "long", zigzag(-(2**63))),
        (pa.uint32(), 2**32 - 1, "long", zigzag(2**32 - 1)),
        (pa.uint64(), 2**63 - 1, "long", zigzag(2**63 - 1)),
        (pa.string(), "BB", ENUM, zigzag(1)),
        (pa.string(), "äb", "string", b"\x06\xc3\xa4b"),
        (pa.string(), "u", logical("string", "uuid"), b"\x02u"),
        (pa.binary(), b"abc", FIXED, b"abc"),
        (pa.binary(3), b"abc", FIXED, b"abc"),
        (pa.binary(3), b"abc", "bytes", b"\x06abc"),
        (pa.date32(), 18263, logical("int", "date"), zigzag(18263)),
        (pa.date64(), 18263 * 86_400_000, logical("int", "date"), zigzag(18263)),
        (pa.timestamp("us", "UTC"), AT, logical("long", "timestamp-micros"), zigzag(AT)),
        (pa.timestamp("us", "UTC"), AT, logical("long", "timestamp-millis"), zigzag(AT // 1000)),
        (pa.timestamp("us", "UTC"), -1, logical("long", "timestamp-millis"), zigzag(-1)),
        (pa.timestamp("us", "UTC"), -1001, "long", zigzag(-2)),
        (pa.timestamp("us"), AT, logical("long", "local-timestamp-micros"), zigzag(AT)),
        (pa.timestamp("s"), 7, logical("long", "local-timestamp-millis"), zigzag(7000)),
        (pa.timestamp("ns", "UTC"), 1_999, logical("long", "timestamp-micros"), zigzag(1)),
        (pa.time32("s"), 7, logical("int", "time-millis"), zigzag(7000)),
        (pa.time64("ns"), 7000, logical("long", "time-micros"), zigzag(7)),
        (pa.duration("ms"), -7, "long", zigzag(-7000)),
        (pa.bool_(), True, ["null", "boolean"], b"\x02\x01"),
        (pa.bool_(), None, ["null", "boolean"], b"\x00"),
        (pa.bool_(), None, ["boolean", "null"], b"\x02"),
        (pa.bool_(), False, ["boolean"], b"\x00\x00"),
        (pa.null(), None, ["int", "null"], b"\x02"),
        (pa.null(), None, "null", b""),
        (pa.list_(pa.int32()), [], {"type": "array", "items": ["int", "null"]}, b"\x00"),
        (pa.list_(pa.int32()), [1, None], {"type": "array", "items": ["int", "null"]}, b"\x04\x00\x02\x02\x00"),
        (pa.map_(pa.string(), pa.int32()), [("k", 1)], {"type": "map", "values": "int"}, b"\x02\x02k\x02\x00"),
    ],
    ids=str,
)
def test_value_is_written_as_its_avro_type(data_type: pa.DataType, value: Any, avro: Any, expected: bytes) -> None:
    column = pa.StructArray.from_arrays([pa.array([value], data_type)], names=["c"])
    assert encode(column, record(c=avro)) == ([expected], ())


@pytest.mark.parametrize(
    ("unscaled", "in_bytes"),
    [(0, "00"), (1, "01"), (-1, "ff"), (127, "7f"), (128, "0080"), (-128, "80"), (-129, "ff7f"), (10**37, None)],
)
@pytest.mark.parametrize("size", [16, 17, 20])
def test_decimals_are_twos_complement(unscaled: int, in_bytes: str | None, size: int) -> None:
    numbers = pa.py_buffer(unscaled.to_bytes(16, "little", signed=True))
    column = pa.StructArray.from_arrays([pa.Array.from_buffers(pa.decimal128(38, 4), 1, [None, numbers])], names=["c"])
    decimal = {"logicalType": "decimal", "precision": 38, "scale": 4}
    fixed, _ = encode(column, record(c={"type": "fixed", "name": "f", "size": size, **decimal}))
    assert fixed == [unscaled.to_bytes(size, "big", signed=True)]
    if in_bytes is not None:
        length = len(in_bytes) // 2
        assert encode(column, record(c={"type": "bytes", **decimal}))[0] == [zigzag(length) + bytes.fromhex(in_bytes)]


LIMITS = [(5, 99_999), (9, 999_999_999), (18, 10**18 - 1), (19, 10**19 - 1), (20, 10**20 - 1), (38, 10**38 - 1)]


@pytest.mark.parametrize(("precision", "most"), LIMITS)
@pytest.mark.parametrize("kind", ["bytes", "fixed"])
def test_a_decimal_with_more_digits_than_its_precision_is_a_bad_row(precision: int, most: int, kind: str) -> None:
    """Bug: only the number of bytes was checked, and readers round: 1234.56 in decimal(5,2) was read as 1234.6."""
    unscaled = [most, -most, most + 1, -most - 1, 2**127 - 1, -(2**127)]
    numbers = pa.py_buffer(b"".join(number.to_bytes(16, "little", signed=True) for number in unscaled))
    decimals = pa.Array.from_buffers(pa.decimal128(precision, 2), len(unscaled), [None, numbers])
    written = {"type": kind, "name": "f", "size": 20, "logicalType": "decimal", "precision": precision, "scale": 2}
    values, bad_rows = encode(pa.StructArray.from_arrays([decimals], names=["c"]), record(c=written))
    reason = "the decimal has more digits than the schema allows"
    assert bad_rows == tuple(BadRow(row, "value.c", reason) for row in range(2, 6))
    assert values[0] is not None
    assert values[0].endswith(most.to_bytes(16, "big").lstrip(b"\0"))


@pytest.mark.parametrize("width", [32, 64])
def test_a_narrow_decimal_with_more_digits_is_a_bad_row(width: int) -> None:
    numbers = pa.py_buffer(
        b"".join(number.to_bytes(width // 8, "little", signed=True) for number in (99, -99, 100, -100))
    )
    data_type = getattr(pa, f"decimal{width}")(2, 1)
    column = pa.StructArray.from_arrays([pa.Array.from_buffers(data_type, 4, [None, numbers])], names=["c"])
    values, bad_rows = encode(column, record(c=logical("bytes", "decimal", precision=2, scale=1)))
    assert values[:2] == [b"\x02\x63", b"\x02\x9d"]
    assert [row.row for row in bad_rows] == [2, 3]


@pytest.mark.parametrize(
    ("data_type", "avro"),
    [
        (pa.int32(), "long"),
        (pa.int64(), "int"),
        (pa.int64(), "double"),
        (pa.float64(), "float"),
        (pa.float32(), "double"),
        (pa.bool_(), "int"),
        (pa.string(), "bytes"),
        (pa.string(), FIXED),
        (pa.binary(), "string"),
        (pa.binary(4), FIXED),
        (pa.binary(), logical("bytes", "decimal", precision=9, scale=2)),
        (pa.decimal128(9, 2), logical("bytes", "decimal", precision=9, scale=3)),
        (pa.decimal128(9, 2), logical("bytes", "decimal", precision=10, scale=2)),
        (pa.decimal128(9, 2), "bytes"),
        (pa.date32(), "long"),
        (pa.date32(), logical("int", "time-millis")),
        (pa.timestamp("us"), logical("long", "timestamp-micros")),
        (pa.timestamp("us", "UTC"), logical("long", "local-timestamp-micros")),
        (pa.timestamp("us", "UTC"), "int"),
        (pa.time64("us"), "long"),
        (pa.duration("us"), logical("long", "timestamp-micros")),
        (pa.null(), "int"),
        (pa.int32(), "null"),
        (pa.list_(pa.int32()), {"type": "map", "values": "int"}),
        (pa.map_(pa.int32(), pa.int32()), {"type": "map", "values": "int"}),
        (pa.struct([("a", pa.int32())]), "int"),
        (pa.int32(), {"type": "record", "name": "x", "fields": []}),
    ],
    ids=str,
)
def test_pair_that_does_not_fit_is_refused_with_the_path(data_type: pa.DataType, avro: Any) -> None:
    column_type = pa.struct([("c", data_type)])
    with pytest.raises(SchemaError, match=r"value\.c: the Arrow type .* does not fit Avro's") as caught:
        column_format(FormatSettings("value", "avro", record(c=avro)), column_type)
    assert "Cast the column, or change the schema." in str(caught.value)


def test_time_finer_than_milliseconds_is_a_bad_row_in_time_millis() -> None:
    column = pa.StructArray.from_arrays([pa.array([1_000_000, 1_500_000], pa.time64("ns"))], names=["c"])
    values, bad_rows = encode(column, record(c=logical("int", "time-millis")))
    assert values == [zigzag(1), None]
    assert bad_rows == (
        BadRow(1, "value.c", "it is not a whole number of the schema's unit, and its rest would be lost"),
    )


def test_time_that_is_no_int_is_a_bad_row() -> None:
    days = 1 << 31
    column = pa.StructArray.from_arrays(
        [pa.array([86_400_000 * (days - 1), 86_400_000 * days], pa.int64()).view(pa.date64())], names=["c"]
    )
    values, bad_rows = encode(column, record(c=logical("int", "date")))
    assert values == [zigzag(days - 1), None]
    assert bad_rows == (BadRow(1, "value.c", "the number is out of the range that can be written"),)


def test_fields_are_matched_by_name_in_the_order_of_the_schema() -> None:
    column = pa.array([{"b": "x", "a": 1}], pa.struct([("b", pa.string()), ("a", pa.int32())]))
    assert encode(column, record(a="int", more=["null", "string"], b="string"))[0] == [b"\x02\x00\x02x"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"a": "int", "b": "string", "c": "int"},
            "value.c: the column has no such field, and the Avro schema allows no null",
        ),
        ({"a": "int"}, "value.b: the Avro record 'r' has no field of this name."),
        ({"a": "int", "B": "string"}, "(but 'B': upper and lower case count)"),
        ({"a": ["null", "int", "string"], "b": "string"}, "value.a: the Avro schema has a union of null, int, string"),
    ],
)
def test_fields_that_do_not_match_are_refused(fields: dict[str, Any], message: str) -> None:
    data_type = pa.struct([("a", pa.int32()), ("b", pa.string())])
    with pytest.raises(SchemaError) as caught:
        column_format(FormatSettings("value", "avro", record(**fields)), data_type)
    assert message in str(caught.value)


def test_recursive_schema_takes_a_column_as_deep_as_it_is() -> None:
    schema = record(n="int", next=["null", "r"])
    inner = pa.struct([("n", pa.int32())])
    column = pa.array(
        [{"n": 1, "next": {"n": 2}}, {"n": 3, "next": None}], pa.struct([("n", pa.int32()), ("next", inner)])
    )
    assert encode(column, schema)[0] == [b"\x02\x02\x04\x00", b"\x06\x00"]


@pytest.mark.parametrize(("schema", "expected"), [("null", b""), (["null", "string"], b"\x00")])
def test_dictionary_of_nothing_but_nulls_is_written(schema: object, expected: bytes) -> None:
    """Bug: the kernel said that the schema allows no null, and the schema had the type null."""
    nulls = pa.array([None, None]).dictionary_encode()
    assert encode(pa.StructArray.from_arrays([nulls], names=["c"]), record(c=schema))[0] == [expected, expected]


def test_union_of_several_types_takes_a_struct_of_members() -> None:
    data_type = pa.struct([("member0", pa.int32()), ("member1", pa.dictionary(pa.int8(), pa.string()))])
    rows = [
        {"member0": 1, "member1": None},
        {"member0": None, "member1": "x"},
        {"member0": None, "member1": None},
        None,
    ]
    members = pa.StructArray.from_arrays(
        [
            pa.array([1, None, None, None], pa.int32()),
            pa.array([None, "x", None, None]).dictionary_encode().cast(data_type.field(1).type),
        ],
        fields=list(data_type),
        mask=pa.array([row is None for row in rows]),
    )
    column = pa.StructArray.from_arrays([members], names=["c"])
    assert encode(column, record(c=["int", "null", "string"]))[0] == [b"\x00\x02", b"\x04\x02x", b"\x02", b"\x02"]
    assert encode(column.slice(2), record(c=["int", "string"])) == (
        [None, None],
        tuple(BadRow(row, "value.c", "it is null, and the schema allows no null there") for row in (0, 1)),
    )
    with pytest.raises(SchemaError, match="must have the fields member0 to member2 in this order"):
        encode(column, record(c=["int", "string", "boolean"]))


def test_second_value_in_a_union_is_a_bad_row() -> None:
    """Bug: the first member was written, and the value of the other one was lost without an error, as in to_avro."""
    data_type = pa.struct([("member0", pa.int32()), ("member1", pa.string()), ("member2", pa.bool_())])
    rows = [{"member0": 1, "member2": False}, {"member1": "x"}, {"member0": 1, "member1": "", "member2": True}]
    column = pa.StructArray.from_arrays([pa.array(rows, data_type)], names=["c"])
    values, bad_rows = encode(column, record(c=["null", "int", "string", "boolean"]))
    assert values == [None, b"\x04\x02x", None]
    reason = "another member of the union has a value too, and only one may have one"
    assert bad_rows == (BadRow(0, "value.c.member2", reason), BadRow(2, "value.c.member1", reason))


def test_schema_of_bytes_has_no_length_if_a_registry_knows_it() -> None:
    """Confluent's serializers write such values as they are, Spark's to_avro with their length."""
    column = pa.array([b"abc", None])
    bare = ColumnFormat("key", "avro", '"bytes"')
    assert ColumnEncoder(bare, column.type).encode(column).values.to_pylist() == [b"\x06abc", None]
    known = ColumnFormat("key", "avro", '"bytes"', prefix=b"\0\0\0\0\1")
    assert ColumnEncoder(known, column.type).encode(column).values.to_pylist() == [b"\0\0\0\0\1abc", None]
    by_header = ColumnFormat("key", "avro", '"bytes"', header=("__key_schema_id", b"x"))
    assert ColumnEncoder(by_header, column.type).encode(column).values.to_pylist() == [b"abc", None]


@pytest.mark.parametrize("data_type", [pa.binary(3), pa.large_binary(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("schema", ["bytes", logical("bytes", "x")], ids=str)
def test_any_bytes_have_no_length_if_a_registry_knows_the_schema(data_type: pa.DataType, schema: Any) -> None:
    """Bug: bytes of one size, and those with a logicalType, had a length that readers took for a part of the value."""
    known = ColumnFormat("key", "avro", json.dumps(schema), prefix=b"\0\0\0\0\1")
    column = pa.array([b"abc", None], data_type)
    assert ColumnEncoder(known, data_type).encode(column).values.to_pylist() == [b"\0\0\0\0\1abc", None]


DECIMAL = {"logicalType": "decimal", "precision": 9, "scale": 2}


@pytest.mark.parametrize("known", [{"prefix": b"\0\0\0\0\1"}, {"header": ("__value_schema_id", b"x")}], ids=str)
def test_decimal_in_bytes_alone_is_refused_with_a_registry(known: dict[str, Any]) -> None:
    """Bug: it was written with a length, and Confluent's readers took the length for a part of the value."""
    data_type = pa.decimal128(9, 2)
    alone = json.dumps({"type": "bytes", **DECIMAL})
    with pytest.raises(SchemaError, match=r"^value: the Avro schema is a decimal in bytes, .* Put the decimal into a"):
        ColumnEncoder(ColumnFormat("value", "avro", alone, **known), data_type)
    column = pa.array([Decimal("1.28"), None], data_type)
    assert encode(column, alone)[0] == [b"\x04\x00\x80", None]
    prefix = known.get("prefix", b"")
    for schema, expected in (
        (schema_text(data_type, "value"), b"\x00\x00\x00\x80"),
        (json.dumps(["null", {"type": "bytes", **DECIMAL}]), b"\x02\x04\x00\x80"),
    ):
        values = ColumnEncoder(ColumnFormat("value", "avro", schema, **known), data_type).encode(column).values
        assert values.to_pylist() == [prefix + expected, None]
    inside = pa.StructArray.from_arrays([column[:1]], names=["c"])
    in_a_record = ColumnFormat("value", "avro", record(c={"type": "bytes", **DECIMAL}), **known)
    assert ColumnEncoder(in_a_record, inside.type).encode(inside).values.to_pylist() == [prefix + b"\x04\x00\x80"]


TIME = pa.timestamp("us", "UTC")
MICROS = {"logicalType": "timestamp-micros"}
INSIDE = {"type": "long", **MICROS}


def field(**written: Any) -> str:
    return json.dumps({"type": "record", "name": "r", "fields": [{"name": "c", **written}]})


@pytest.mark.parametrize(
    ("schema", "data_type", "path"),
    [
        (field(type="long", **MICROS), TIME, "value.c"),
        (field(type=["null", "long"], **MICROS), TIME, "value.c"),
        (field(type="long", logicalType="timestamp-nanos"), TIME, "value.c"),
        (field(type={"type": "long"}, logicalType="local-timestamp-micros"), pa.timestamp("us"), "value.c"),
        (field(type={"type": {"type": "long"}, **MICROS}), TIME, "value.c"),
        (field(type={"type": "array", "items": "long", **MICROS}), pa.list_(TIME), "value.c.element"),
        (field(type={"type": "array", "items": "long"}, **MICROS), pa.list_(TIME), "value.c.element"),
        (
            field(type={"type": "map", "values": ["long", "null"], **MICROS}),
            pa.map_(pa.string(), TIME),
            "value.c.value",
        ),
    ],
    ids=str,
)
def test_timestamp_with_its_logical_type_outside_of_long_is_refused(
    schema: str, data_type: pa.DataType, path: str
) -> None:
    """Bug: Avro ignores it there, and the timestamp was written in milliseconds, a factor of 1000 without an error."""
    with pytest.raises(
        SchemaError, match=rf"^{path}: the Avro schema has the logicalType \S+ outside of the type long"
    ):
        encode(pa.array([], pa.struct([("c", data_type)])), schema)


@pytest.mark.parametrize(
    ("schema", "data_type", "expected"),
    [
        (field(type="long", **MICROS), pa.int64(), zigzag(AT)),
        (field(type=INSIDE, **MICROS), TIME, zigzag(AT)),
        (field(type=["null", INSIDE], logicalType="timestamp-nanos"), TIME, b"\x02" + zigzag(AT)),
        (field(type="long", logicalType="timestamp-millis"), TIME, zigzag(AT // 1000)),
        (field(type="long", logicalType="our-own"), TIME, zigzag(AT // 1000)),
        (field(type="long", logicalType=["no", "name"]), TIME, zigzag(AT // 1000)),
    ],
    ids=str,
)
def test_logical_type_outside_that_changes_no_value_is_ignored(
    schema: str, data_type: pa.DataType, expected: bytes
) -> None:
    column = pa.array([{"c": AT}], pa.struct([("c", pa.int64())])).cast(pa.struct([("c", data_type)]))
    assert encode(column, schema)[0] == [expected]


def test_number_beyond_the_range_of_long_is_a_bad_row() -> None:
    column = pa.StructArray.from_arrays([pa.array([2**63, 1], pa.uint64())], names=["c"])
    values, bad_rows = encode(column, record(c="long"))
    assert values == [None, b"\x02"]
    assert bad_rows == (BadRow(0, "value.c", "the number is out of the range that can be written"),)
    seconds = pa.StructArray.from_arrays([pa.array([2**62, 1], pa.timestamp("s", "UTC"))], names=["c"])
    assert encode(seconds, record(c=logical("long", "timestamp-micros")))[0] == [None, zigzag(1_000_000)]


def test_type_that_is_too_deep_is_refused() -> None:
    data_type = pa.int32()
    for _ in range(150):
        data_type = pa.list_(data_type)
    with pytest.raises(SchemaError, match="more than 100 levels"):
        column_format(FormatSettings("value", "avro"), pa.struct([("c", data_type)]))
