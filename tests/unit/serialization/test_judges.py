"""Generated rows of generated types, written by the encoder and by other libraries: no row may differ.

The slow tests take 400 types and more than 20,000 rows for each judge: fastavro, Confluent's AvroSerializer and
JSONSerializer. Spark's own functions judge in tests/integration/parity.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.types as pat
import pytest
from support.generated_columns import random_array, random_struct

from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import ColumnFormat, FormatSettings
from spark_kafka_sink.serialization.plan import plain_type
from spark_kafka_sink.serialization.schemas import column_format

TYPES, ROWS = 400, 90
LEAST_ROWS = 20_000
QUICK = range(5_000, 5_006)
MANY = range(10_000, 10_000 + TYPES)
TOPIC = "topic"

Judge = Callable[[int], int]
"""Compares the rows of one generated type, by its seed, and returns their number."""


def generated(seed: int) -> pa.Array:
    rng = random.Random(seed)
    return random_array(rng, random_struct(rng, 3, least=1), ROWS)


def is_list(data_type: pa.DataType) -> bool:
    return bool(pat.is_list(data_type) or pat.is_large_list(data_type) or pat.is_fixed_size_list(data_type))


def parts(value: Any, data_type: pa.DataType) -> Iterator[tuple[Any, pa.DataType]]:
    """Yield a value and all values in it, with their types."""
    data_type = plain_type(data_type)
    yield value, data_type
    if value is None:
        return
    if pat.is_struct(data_type):
        for of in data_type:
            yield from parts(value[of.name], of.type)
    elif pat.is_map(data_type):
        for _, item in value:
            yield from parts(item, data_type.item_type)
    elif is_list(data_type):
        for element in value:
            yield from parts(element, data_type.value_type)


def has_repeated_keys(value: Any, data_type: pa.DataType) -> bool:
    """Whether a map has a key twice, which a dict cannot hold."""
    maps = (each for each, of in parts(value, data_type) if pat.is_map(of) and each is not None)
    return any(len({key for key, _ in each}) < len(each) for each in maps)


def converted(value: Any, data_type: pa.DataType, leaf: Callable[[Any, pa.DataType], Any]) -> Any:
    """A value with its maps as dicts and `leaf` of each value that is not nested."""
    data_type = plain_type(data_type)
    if value is None:
        return None
    if pat.is_struct(data_type):
        return {of.name: converted(value[of.name], of.type, leaf) for of in data_type}
    if pat.is_map(data_type):
        return {key: converted(item, data_type.item_type, leaf) for key, item in value}
    if is_list(data_type):
        return [converted(element, data_type.value_type, leaf) for element in value]
    return leaf(value, data_type)


# ---- Avro ------------------------------------------------------------------------------------------------------------


def avro_leaf(value: Any, data_type: pa.DataType) -> Any:
    return value // timedelta(microseconds=1) if pat.is_duration(data_type) else value


def by_fastavro(seed: int) -> int:
    column = generated(seed)
    used = column_format(FormatSettings("value", "avro", nullable=("null-last", "null-first")[seed % 2]), column.type)
    encoded = ColumnEncoder(used, column.type).encode(column)
    schema = fastavro.parse_schema(json.loads(used.schema or ""))
    compared = 0
    for row, (value, given) in enumerate(zip(encoded.values.to_pylist(), column.to_pylist(), strict=True)):
        if given is None:
            assert value is None, (seed, row)
        elif not has_repeated_keys(given, column.type):
            output = io.BytesIO()
            fastavro.schemaless_writer(output, schema, converted(given, column.type, avro_leaf))
            assert value == output.getvalue(), (seed, row, column.type)
            compared += 1
    assert encoded.bad_rows == ()
    return compared


def by_avro_serializer(seed: int) -> int:
    column, registry = generated(seed), mock_registry()
    bare = column_format(FormatSettings("value", "avro"), column.type)
    module = pytest.importorskip("confluent_kafka.schema_registry.avro")
    return compare(seed, column, bare, registry, module.AvroSerializer(registry, bare.schema), avro_leaf, lambda it: it)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def clock(seconds: int, micros: int) -> str:
    fraction = f".{micros:06d}".rstrip("0") if micros else ""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{fraction}"


def json_leaf(value: Any, data_type: pa.DataType) -> Any:
    """A value as JSON has it, of which json.dumps makes a number or a string."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if pat.is_timestamp(data_type):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if pat.is_duration(data_type):
        size, sign = abs(value), "-" if value < timedelta(0) else ""
        return f"INTERVAL '{sign}{size.days} {clock(size.seconds, size.microseconds)}' DAY TO SECOND"
    if pat.is_time(data_type):
        return clock(value.hour * 3600 + value.minute * 60 + value.second, value.microsecond)
    if pat.is_date(data_type):
        return value.isoformat()
    if pat.is_decimal(data_type):
        return float(value) if data_type.scale > 0 else int(value)
    if pat.is_float16(data_type) or pat.is_float32(data_type):
        return float(str(np.float32(value)))  # the fewest digits, as in the text
    return value


def by_json_serializer(seed: int) -> int:
    column, registry = generated(seed), mock_registry()
    bare = column_format(FormatSettings("value", "json-schema"), column.type)
    module = pytest.importorskip("confluent_kafka.schema_registry.json_schema")
    serializer = module.JSONSerializer(bare.schema, registry)  # checks each row against the schema
    return compare(seed, column, bare, registry, serializer, json_leaf, json_value)


def json_value(record: bytes) -> Any:
    """Return the id of the schema and the parsed text. Null fields of objects are left out by Spark."""
    return record[:5], without_nulls(json.loads(record[5:]))


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


# ---- Confluent's serializers -----------------------------------------------------------------------------------------


def mock_registry() -> Any:
    module = pytest.importorskip("confluent_kafka.schema_registry")
    return module.SchemaRegistryClient.new_client({"url": "mock://"})


def compare(
    seed: int,
    column: pa.Array,
    bare: ColumnFormat,
    registry: Any,
    serializer: Any,
    leaf: Callable[[Any, pa.DataType], Any],
    meaning: Callable[[bytes], Any],
) -> int:
    """Compare all rows of a column with what a serializer makes of them."""
    from confluent_kafka.serialization import MessageField, SerializationContext

    context = SerializationContext(TOPIC, MessageField.VALUE)
    values, bad_rows = ColumnEncoder(bare, column.type).encode(column)
    bad = {each.row for each in bad_rows}
    expected = {}
    for row, given in enumerate(column.to_pylist()):
        if given is not None and row not in bad and not has_repeated_keys(given, column.type):
            expected[row] = serializer(converted(given, column.type, leaf), context)
    if not expected:
        return 0
    assert not bad or bare.name == "json-schema"  # NaN and infinity are no numbers there
    latest = registry.get_latest_version(f"{TOPIC}-value")
    used = ColumnFormat("value", bare.name, bare.schema, prefix=b"\0" + latest.schema_id.to_bytes(4, "big"))
    values = ColumnEncoder(used, column.type).encode(column).values
    for row, record in expected.items():
        assert meaning(values[row].as_py()) == meaning(record), (seed, row, column.type)
    return len(expected)


JUDGES: dict[str, Judge] = {
    "fastavro": by_fastavro,
    "AvroSerializer": by_avro_serializer,
    "JSONSerializer": by_json_serializer,
}


@pytest.mark.parametrize("judge", JUDGES)
def test_a_few_types_have_no_difference(judge: str) -> None:
    assert sum(map(JUDGES[judge], QUICK)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("judge", JUDGES)
def test_many_types_have_no_difference(judge: str) -> None:
    compared = sum(map(JUDGES[judge], MANY))
    print(f"{judge}: 0 differences in {compared} rows of {TYPES} types")
    assert compared >= LEAST_ROWS
