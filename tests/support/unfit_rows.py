"""Numbered rows whose value is Avro and whose key is JSON with a schema. Every fourth one does not fit, each time for
another reason.
"""

from __future__ import annotations

import io
import json
from typing import Any, Final

import fastavro
import pyarrow as pa

from spark_kafka_sink.serialization.column_format import FormatSettings
from spark_kafka_sink.serialization.record_formats import ResolvedFormat, ResolvedFormats
from spark_kafka_sink.serialization.schemas import column_format

VALUE_TYPE: Final = pa.struct(
    [
        ("n", pa.int64()),
        ("color", pa.string()),
        ("two", pa.binary()),
        ("list", pa.list_(pa.int32())),
        ("map", pa.map_(pa.string(), pa.int32())),
        ("inner", pa.struct([("text", pa.string())])),
    ]
)
KEY_TYPE: Final = pa.struct([("key", pa.int64()), ("ratio", pa.float64())])
SCHEMA: Final[dict[str, Any]] = {
    "type": "record",
    "name": "row",
    "fields": [
        {"name": "n", "type": "long"},
        {"name": "color", "type": {"type": "enum", "name": "color", "symbols": ["RED", "GREEN"]}},
        {"name": "two", "type": {"type": "fixed", "name": "two", "size": 2}},
        {"name": "list", "type": {"type": "array", "items": "int"}},
        {"name": "map", "type": {"type": "map", "values": "int"}},
        {"name": "inner", "type": {"type": "record", "name": "inner", "fields": [{"name": "text", "type": "string"}]}},
    ],
}
KEY_SCHEMA: Final = {
    "type": "object",
    "required": ["key"],
    "properties": {"key": {"type": "integer"}, "ratio": {"type": "number"}},
}
CHANGES: Final[tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]] = (
    ("value.color", {"color": "BLUE"}, {}),
    ("value.two", {"two": b"abc"}, {}),
    ("value.list.element", {"list": [1, None]}, {}),
    ("value.map.value", {"map": [("a", None)]}, {}),
    ("value.inner.text", {"inner": {"text": None}}, {}),
    ("value.inner", {"inner": None}, {}),
    ("key.ratio", {}, {"ratio": float("nan")}),
    ("key.key", {}, {"key": None}),
)
"""Kinds of rows that do not fit: the path, and what their value and their key have in place of a good row's."""


def is_bad(number: int) -> bool:
    return number % 4 == 1


def kind_of(number: int) -> int:
    return number // 4 % len(CHANGES)


def formats() -> ResolvedFormats:
    value = column_format(FormatSettings("value", "avro", json.dumps(SCHEMA)), VALUE_TYPE)
    key = column_format(FormatSettings("key", "json-schema", json.dumps(KEY_SCHEMA)), KEY_TYPE)
    return ResolvedFormats(ResolvedFormat(value, VALUE_TYPE), ResolvedFormat(key, KEY_TYPE))


def row_of(number: int, keys: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return value and key of a row."""
    value = {
        "n": number,
        "color": "GREEN" if number % 2 else "RED",
        "two": b"%02d" % (number % 100),
        "list": [number, 7],
        "map": [("k", number)],
        "inner": {"text": f"row {number}"},
    }
    key = {"key": number % keys, "ratio": number / 8}
    if is_bad(number):
        _, of_value, of_key = CHANGES[kind_of(number)]
        value |= of_value
        key |= of_key
    return value, key


def columns(numbers: list[int], keys: int) -> dict[str, pa.Array]:
    """Return rows as the columns of a batch, with their number in a header."""
    rows = [row_of(number, keys) for number in numbers]
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return {
        "value": pa.array([value for value, _ in rows], VALUE_TYPE),
        "key": pa.array([key for _, key in rows], KEY_TYPE),
        "headers": pa.array([[{"key": "n", "value": b"%d" % number}] for number in numbers], headers),
    }


def read_value(value: bytes) -> Any:
    return fastavro.schemaless_reader(io.BytesIO(value), fastavro.parse_schema(SCHEMA), None)


def check_good(message: Any, keys: int) -> int:
    """Check that a record has the whole row. Return its number."""
    read = read_value(message.value())
    number = int(dict(message.headers())["n"])
    value, key = row_of(number, keys)
    assert read == {**value, "map": dict(value["map"])}
    assert json.loads(message.key()) == key
    assert not is_bad(number)
    return number


def check_letter(message: Any, keys: int) -> int:
    """Check that a dead letter has the row, as JSON where it does not fit, and the reason. Return its number."""
    headers = dict(message.headers())
    number = int(headers["n"])
    assert is_bad(number)
    path, _, _ = CHANGES[kind_of(number)]
    field = path.partition(".")[0]
    value, key = row_of(number, keys)
    assert headers["__sink.errors.as.json"] == field.encode()
    assert headers["__sink.errors.exception.message"].decode().startswith(f"{path}: "), (number, headers)
    if field == "value":
        shown = json.loads(message.value())
        assert (shown["n"], shown["color"], shown["list"]) == (number, value["color"], value["list"])
        assert json.loads(message.key()) == key
    else:
        read = read_value(message.value())
        assert read["n"] == number
        assert json.loads(message.key())["key"] == key["key"]
    return number
