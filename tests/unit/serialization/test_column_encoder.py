"""The bytes of generated columns, judged by fastavro, Confluent's serializer and Python's json; bad rows and limits."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.types as pat
import pytest
from support.generated_columns import random_array, random_struct

from spark_kafka_sink.common.errors import ConfigError, SchemaError, SerializationError
from spark_kafka_sink.record.kernel import has_kernel
from spark_kafka_sink.serialization import column_encoder
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import BadRow, ColumnFormat, FormatSettings, JsonOptions
from spark_kafka_sink.serialization.plan import plain_type
from spark_kafka_sink.serialization.schemas import column_format

QUICK, SLOW = range(30), range(1000, 1700)
ROWS = 12
NULLABLE = ("null-last", "null-first")


def made(column: pa.Array, name: str, **settings: Any) -> tuple[ColumnFormat, list[bytes | None]]:
    """The format of a column, and its encoded values; no row is bad."""
    used = column_format(FormatSettings("value", name, **settings), column.type)
    encoded = ColumnEncoder(used, column.type).encode(column)
    assert encoded.bad_rows == ()
    assert encoded.values.type == pa.binary()
    encoded.values.validate(full=True)
    return used, encoded.values.to_pylist()


def generated(seed: int, rows: int = ROWS) -> pa.Array:
    rng = random.Random(seed)
    return random_array(rng, random_struct(rng, 3), rows)


# ---- Avro, judged by fastavro --------------------------------------------------------------------------------------


def as_avro(value: Any, data_type: pa.DataType) -> Any:
    """A Python value as fastavro takes it: maps are dicts, and intervals microseconds."""
    data_type = plain_type(data_type)
    if value is None:
        return None
    if pat.is_struct(data_type):
        return {of.name: as_avro(value[of.name], of.type) for of in data_type}
    if pat.is_map(data_type):
        return {key: as_avro(item, data_type.item_type) for key, item in value}
    if pat.is_list(data_type) or pat.is_large_list(data_type) or pat.is_fixed_size_list(data_type):
        return [as_avro(element, data_type.value_type) for element in value]
    if pat.is_duration(data_type):
        return value // timedelta(microseconds=1)
    return value


def has_repeated_keys(column: pa.Array) -> bool:
    """Whether a map has a key twice, which a dict cannot hold."""

    def repeats(value: Any, data_type: pa.DataType) -> bool:
        data_type = plain_type(data_type)
        if value is None:
            return False
        if pat.is_struct(data_type):
            return any(repeats(value[of.name], of.type) for of in data_type)
        if pat.is_map(data_type):
            keys = [key for key, _ in value]
            return len(set(keys)) < len(keys) or any(repeats(item, data_type.item_type) for _, item in value)
        if pat.is_list(data_type) or pat.is_large_list(data_type) or pat.is_fixed_size_list(data_type):
            return any(repeats(element, data_type.value_type) for element in value)
        return False

    return any(repeats(value, column.type) for value in column.to_pylist())


def check_avro(seed: int) -> int:
    column = generated(seed)
    used, values = made(column, "avro", nullable=NULLABLE[seed % 2])
    assert used.schema is not None
    schema = fastavro.parse_schema(json.loads(used.schema))
    compared = 0
    for row, (value, given) in enumerate(zip(values, column.to_pylist(), strict=True)):
        if given is None:
            assert value is None
            continue
        if has_repeated_keys(column.slice(row, 1)):
            continue
        output = io.BytesIO()
        fastavro.schemaless_writer(output, schema, as_avro(given, column.type))
        assert value == output.getvalue(), (seed, row, column.type)
        compared += 1
    return compared


@pytest.mark.parametrize("seed", QUICK)
def test_avro_is_what_fastavro_writes(seed: int) -> None:
    check_avro(seed)


@pytest.mark.slow
def test_avro_of_many_types_is_what_fastavro_writes() -> None:
    assert sum(check_avro(seed) for seed in SLOW) > 5000


@pytest.mark.parametrize("seed", range(500, 505))
def test_avro_is_what_the_serializer_of_confluent_writes(seed: int) -> None:
    avro = pytest.importorskip("confluent_kafka.schema_registry.avro")
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.serialization import MessageField, SerializationContext

    column = generated(seed)
    bare = column_format(FormatSettings("value", "avro"), column.type)
    registry = SchemaRegistryClient.new_client({"url": "mock://"})
    serialize = avro.AvroSerializer(registry, bare.schema)
    context = SerializationContext("topic", MessageField.VALUE)
    rows = [row for row in range(ROWS) if column[row].is_valid and not has_repeated_keys(column.slice(row, 1))]
    expected = [serialize(as_avro(column[row].as_py(), column.type), context) for row in rows]
    (version,) = registry.get_versions("topic-value")
    number = registry.get_version("topic-value", version).schema_id
    used = ColumnFormat("value", "avro", bare.schema, prefix=b"\0" + number.to_bytes(4, "big"))
    values = ColumnEncoder(used, column.type).encode(column).values
    assert [values[row].as_py() for row in rows] == expected


# ---- JSON, judged by Python's json ---------------------------------------------------------------------------------


class Number(str):
    """The text of a number with a point or an exponent."""


def parsed(text: bytes) -> Any:
    """JSON as Python values; objects as lists of pairs, so that repeated names and their order can be seen."""
    return json.loads(text.decode(), parse_float=Number, object_pairs_hook=lambda pairs: ("object", pairs))


def clock(seconds: int, micros: int) -> str:
    fraction = f".{micros:06d}".rstrip("0") if micros else ""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{fraction}"


def time_text(value: Any, data_type: pa.DataType) -> str:
    """A date or time as to_json prints it."""
    if pat.is_timestamp(data_type):
        return str(value.isoformat(timespec="milliseconds").replace("+00:00", "Z"))
    if pat.is_duration(data_type):
        size = abs(value)
        sign = "-" if value < timedelta(0) else ""
        return f"INTERVAL '{sign}{size.days} {clock(size.seconds, size.microseconds)}' DAY TO SECOND"
    if pat.is_time(data_type):
        return clock(value.hour * 3600 + value.minute * 60 + value.second, value.microsecond)
    return str(value.isoformat())


def same(read: Any, value: Any, data_type: pa.DataType, nulls: bool) -> bool:
    """Whether parsed JSON says the value. `nulls`: whether structs have their null fields."""
    data_type = plain_type(data_type)
    if value is None:
        return read is None
    if pat.is_struct(data_type):
        fields = [of for of in data_type if nulls or value[of.name] is not None]
        return (
            read[0] == "object"
            and [name for name, _ in read[1]] == [of.name for of in fields]
            and all(same(part, value[name], data_type.field(name).type, nulls) for name, part in read[1])
        )
    if pat.is_map(data_type):
        pairs = list(zip(read[1], value, strict=True))
        return all(
            name == str(key) and same(part, item, data_type.item_type, nulls) for (name, part), (key, item) in pairs
        )
    if pat.is_list(data_type) or pat.is_large_list(data_type) or pat.is_fixed_size_list(data_type):
        return all(same(part, each, data_type.value_type, nulls) for part, each in zip(read, value, strict=True))
    return same_leaf(read, value, data_type)


def same_leaf(read: Any, value: Any, data_type: pa.DataType) -> bool:
    if pat.is_floating(data_type):
        if value in (float("inf"), float("-inf")):
            return bool(read == ("Infinity" if value > 0 else "-Infinity"))
        number = pa.array([float(read)], pa.float64()).cast(
            data_type if not pat.is_float16(data_type) else pa.float32()
        )
        digits = len(read.lstrip("-0.").split("E")[0].replace(".", "").rstrip("0"))
        return isinstance(read, Number) and number[0].as_py() == value and digits <= 17
    if pat.is_decimal(data_type):
        return str(read) == str(value)
    if isinstance(value, bytes):
        return base64.b64decode(read, validate=True) == value
    if pat.is_temporal(data_type):
        return bool(read == time_text(value, data_type))
    return bool(type(read) is type(value) and read == value)


def check_json(seed: int) -> int:
    column, nulls = generated(seed), seed % 2 == 0
    _, values = made(column, "json", json=JsonOptions(ignore_null_fields=not nulls))
    for row, (value, given) in enumerate(zip(values, column.to_pylist(), strict=True)):
        if value is None or given is None:
            assert value is given, (seed, row)
        else:
            assert same(parsed(value), given, column.type, nulls), (seed, row, value, given)
    return len(values)


@pytest.mark.parametrize("seed", QUICK)
def test_json_says_the_values(seed: int) -> None:
    check_json(seed)


@pytest.mark.slow
def test_json_of_many_types_says_the_values() -> None:
    assert sum(check_json(seed) for seed in SLOW) > 8000


# ---- parts of a column ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["avro", "json"])
@pytest.mark.parametrize("most_bytes", [0, 1, 100, 1000, 10_000])
def test_rows_beyond_the_limit_are_left(name: str, most_bytes: int) -> None:
    column = pa.array([{"a": "x" * (row * 7 % 90), "b": row} if row % 5 else None for row in range(200)])
    _, whole = made(column, name)
    encoder = ColumnEncoder(column_format(FormatSettings("value", name), column.type), column.type)
    parts, left = [], column
    while len(left):
        values = encoder.encode(left, most_bytes).values
        assert len(values) > 0
        size = sum(len(value or b"") for value in values.to_pylist())
        assert size <= most_bytes + 256 or len(values) == 1
        parts += values.to_pylist()
        left = left.slice(len(values))
    assert parts == whole


def test_first_row_is_encoded_however_large_it_is() -> None:
    column = pa.array([{"a": "x" * 100_000}, {"a": "y"}])
    encoder = ColumnEncoder(column_format(FormatSettings("value", "avro"), column.type), column.type)
    encoded = encoder.encode(column, 100)
    assert [len(value) for value in encoded.values.to_pylist()] == [100_004]
    assert encoder.encode(column.slice(1), 100).values.to_pylist() == [b"\0\x02y"]


def test_prefix_stands_before_each_value_and_not_before_a_null() -> None:
    column = pa.array([{"a": 1}, None, {"a": None}])
    bare = column_format(FormatSettings("value", "avro"), column.type)
    used = ColumnFormat("value", "avro", bare.schema, prefix=b"\0\0\0\0\7")
    values = ColumnEncoder(used, column.type).encode(column).values
    assert values.to_pylist() == [b"\0\0\0\0\7\0\2", None, b"\0\0\0\0\7\2"]
    assert values.null_count == 1


@pytest.mark.parametrize("name", ["avro", "json"])
def test_empty_columns_and_slices(name: str) -> None:
    column = pa.array([{"a": [1, 2]}, {"a": None}, None])
    assert made(column.slice(3), name)[1] == []
    assert made(column.slice(2), name)[1] == [None]
    assert made(column.slice(1, 1), name)[1] == [made(column, name)[1][1]]


class Tagged(pa.ExtensionType):  # type: ignore[misc]
    """A type of the user's own."""

    def __init__(self, storage: pa.DataType) -> None:
        super().__init__(storage, "tests.tagged")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""


@pytest.mark.parametrize("is_tagged", [False, True])
def test_null_entry_of_a_dictionary_is_a_null(is_tagged: bool) -> None:
    """Bug: under an extension type it became an empty value, which is no tombstone."""
    entries = pa.array([{"a": 1}, None])
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), entries)
    if is_tagged:
        column = pa.ExtensionArray.from_storage(Tagged(column.type), column)
    assert made(column, "json")[1] == [b'{"a":1}', None, b'{"a":1}']


class OwnBool8(pa.ExtensionType):  # type: ignore[misc]
    """As Arrow's own type, which pyarrow has from 18 on."""

    def __init__(self) -> None:
        super().__init__(pa.int8(), "arrow.bool8")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("bool8", [OwnBool8, getattr(pa, "bool8", OwnBool8)], ids=["own", "arrow"])
@pytest.mark.parametrize("name", ["avro", "protobuf", "json", "json-schema"])
def test_boolean_that_is_stored_as_a_byte_is_a_boolean(
    name: str, bool8: Callable[[], pa.DataType], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a column of `arrow.bool8` was written as the number 1 or 0."""

    def column_of(values: pa.Array) -> pa.Array:
        columns = {
            "a": values,
            "b": pa.ListArray.from_arrays(pa.array([0, 1, 1, 2, 3, 3, 3], pa.int32()), values[3:]),
            "c": pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 4, 3, 1], pa.int8()), values),
            "d": pa.StructArray.from_arrays([values], names=["e"], mask=pa.array([False] * 5 + [True])),
        }
        return pa.StructArray.from_arrays(list(columns.values()), names=list(columns)).slice(1)

    if not is_compiled:
        monkeypatch.setattr(column_encoder, "KERNEL", None)
    stored = pa.array([1, 0, None, 2, -1, 1], pa.int8())
    expected = made(column_of(stored.cast(pa.bool_())), name)
    assert made(column_of(pa.ExtensionArray.from_storage(bool8(), stored)), name) == expected


def test_format_and_results_pickle() -> None:
    column = pa.array([{"a": 1}])
    used, _ = made(column, "avro")
    assert pickle.loads(pickle.dumps(used)) == used
    assert pickle.loads(pickle.dumps(BadRow(1, "value.a", "it is null"))) == BadRow(1, "value.a", "it is null")


# ---- what does not fit ---------------------------------------------------------------------------------------------

SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "r",
        "fields": [
            {"name": "n", "type": "int"},
            {"name": "e", "type": {"type": "enum", "name": "color", "symbols": ["RED", "GREEN"]}},
            {"name": "f", "type": {"type": "fixed", "name": "two", "size": 2}},
            {"name": "d", "type": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 1}},
        ],
    }
)
TYPE = pa.struct([("n", pa.int32()), ("e", pa.string()), ("f", pa.binary()), ("d", pa.decimal128(4, 1))])
GOOD = {"n": 1, "e": "GREEN", "f": b"ab", "d": Decimal("1.5")}


def test_bad_rows_are_null_and_named_and_the_others_are_encoded() -> None:
    rows = [GOOD, {**GOOD, "n": None}, {**GOOD, "e": "BLUE"}, None, {**GOOD, "f": b"abc"}, GOOD]
    used = column_format(FormatSettings("value", "avro", SCHEMA), TYPE)
    encoded = ColumnEncoder(used, TYPE).encode(pa.array(rows, TYPE))
    good = b"\x02\x02ab\x02\x0f"
    assert encoded.values.to_pylist() == [good, None, None, None, None, good]
    assert encoded.values.null_count == 4
    assert encoded.bad_rows == (
        BadRow(1, "value.n", "it is null, and the schema allows no null there"),
        BadRow(2, "value.e", "the enum 'color' has no such symbol"),
        BadRow(4, "value.f", "the value has not the 2 bytes of the fixed type 'two'"),
    )


def test_any_number_of_bad_rows_is_named() -> None:
    rows = [GOOD if row % 7 == 0 else {**GOOD, "n": None} for row in range(5000)]
    used = column_format(FormatSettings("value", "avro", SCHEMA), TYPE)
    encoded = ColumnEncoder(used, TYPE).encode(pa.array(rows, TYPE))
    assert [bad.row for bad in encoded.bad_rows] == [row for row in range(5000) if row % 7]
    assert encoded.values.null_count == len(encoded.bad_rows)


def test_bad_row_does_not_leave_bytes_behind() -> None:
    """Also if the row is bad only after many of its bytes, and the output had to grow for them."""
    data_type = pa.struct([("a", pa.string()), ("n", pa.int32())])
    schema = json.dumps(
        {"type": "record", "name": "r", "fields": [{"name": "a", "type": "string"}, {"name": "n", "type": "int"}]}
    )
    column = pa.array([{"a": "x" * 5000, "n": None if row % 2 else row} for row in range(100)], data_type)
    encoded = ColumnEncoder(column_format(FormatSettings("value", "avro", schema), data_type), data_type).encode(column)
    assert [len(value) for value in encoded.values.drop_null().to_pylist()] == [5003] * 14 + [5003] * 18 + [5004] * 18
    assert len(encoded.bad_rows) == 50


def test_column_of_another_type_is_refused() -> None:
    used = column_format(FormatSettings("value", "avro", SCHEMA), TYPE)
    with pytest.raises(SchemaError, match=r"value: the column has the Arrow type struct<a: int64>"):
        ColumnEncoder(used, TYPE).encode(pa.array([{"a": 1}]))


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"key.format must be one of avro"):
        ColumnEncoder(ColumnFormat("key", "xml", None), TYPE)


@pytest.mark.skipif(not has_kernel(), reason="the twin reads by Arrow's own code")
@pytest.mark.parametrize("name", ["avro", "json"])
@pytest.mark.parametrize(
    ("offsets", "data_type"),
    [
        ([0, 5, 3, 8], pa.string()),
        ([0, 3, 400, 8], pa.string()),
        ([0, -4, 3, 5], pa.binary()),
        ([0, 1, 900, 3], pa.list_(pa.int32())),
        ([0, 2, 1, 3], pa.list_(pa.int32())),
    ],
)
def test_offsets_outside_of_their_buffer_are_an_error(name: str, offsets: list[int], data_type: pa.DataType) -> None:
    packed = pa.py_buffer(b"".join(offset.to_bytes(4, "little", signed=True) for offset in offsets))
    if pat.is_list(data_type):
        damaged = pa.Array.from_buffers(data_type, 3, [None, packed], children=[pa.array([1, 2, 3], pa.int32())])
    else:
        damaged = pa.Array.from_buffers(data_type, 3, [None, packed, pa.py_buffer(b"abcdefgh")])
    whole = pa.StructArray.from_arrays([damaged], names=["a"])
    encoder = ColumnEncoder(column_format(FormatSettings("value", name), whole.type), whole.type)
    with pytest.raises(SerializationError, match="value: the column's Arrow buffers contradict each other"):
        encoder.encode(whole)


@pytest.mark.skipif(not has_kernel(), reason="the twin reads by Arrow's own code")
@pytest.mark.parametrize("name", ["avro", "json"])
def test_index_outside_of_its_dictionary_is_an_error(name: str) -> None:
    damaged = pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int8()), pa.array(["a", "b"]), safe=False)
    whole = pa.StructArray.from_arrays([damaged], names=["a"])
    encoder = ColumnEncoder(column_format(FormatSettings("value", name), whole.type), whole.type)
    with pytest.raises(SerializationError, match="an offset or an index"):
        encoder.encode(whole)


def test_timestamps_are_read_back_with_their_logical_types() -> None:
    now = datetime(2024, 5, 6, 7, 8, 9, 123456, UTC)
    column = pa.array([{"t": now}], pa.struct([("t", pa.timestamp("us", "UTC"))]))
    used, values = made(column, "avro")
    assert used.schema is not None
    assert fastavro.schemaless_reader(io.BytesIO(values[0] or b""), json.loads(used.schema), None) == {"t": now}
