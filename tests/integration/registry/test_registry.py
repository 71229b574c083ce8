"""Schemas at a real registry: registered, looked up, refused, and found by Confluent's deserializer."""

from __future__ import annotations

import json
import struct
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from support.generated_protobuf import message_class

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.local import SchemaRegistry
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import ColumnFormat, FormatSettings
from spark_kafka_sink.serialization.registry import registered
from spark_kafka_sink.serialization.registry_settings import RegistrySettings
from spark_kafka_sink.serialization.schemas import column_format

pytestmark = pytest.mark.slow

JSON_SCHEMA = '{"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}'
Reader = Callable[[SchemaRegistryClient, str], Any]
"""Makes a deserializer that knows the writer's schema."""
PROTO = 'syntax = "proto3"; package shop; message A {} message Order { message Line { int32 n = 1; } }'


@pytest.fixture
def topic() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


def avro(*fields: str) -> str:
    return json.dumps(
        {"type": "record", "name": "order", "fields": [{"name": name, "type": "long"} for name in fields]}
    )


def ask(registry: SchemaRegistry, column: ColumnFormat, topic: str, **more: object) -> ColumnFormat:
    given = {f"schema.registry.{key.replace('_', '.')}": value for key, value in more.items()}
    settings = RegistrySettings.from_options({"schema.registry.url": registry.url, **given})
    assert settings is not None
    return registered(column, settings, "topic", topic)


def value(schema: str) -> ColumnFormat:
    return ColumnFormat("value", "avro", schema)


def schema_id(column: ColumnFormat) -> int:
    magic, number = struct.unpack(">bI", column.prefix[:5])
    assert magic == 0
    return int(number)


def call(registry: SchemaRegistry, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
    request = urllib.request.Request(registry.url + path, method=method, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_schema_is_registered_once_and_found_by_its_id(schema_registry: SchemaRegistry, topic: str) -> None:
    column = value(avro("id"))
    found = ask(schema_registry, column, topic)
    assert ask(schema_registry, column, topic) == found
    assert ask(schema_registry, column, topic, auto_register_schemas=False) == found
    assert ask(schema_registry, column, topic, use_schema_id=schema_id(found)).prefix == found.prefix
    stored = call(schema_registry, "GET", f"/schemas/ids/{schema_id(found)}")
    assert json.loads(stored["schema"]) == json.loads(avro("id"))
    assert call(schema_registry, "GET", f"/subjects/{topic}-value/versions") == [1]


def avro_deserializer(client: SchemaRegistryClient, schema: str) -> Any:
    return AvroDeserializer(client)


def json_deserializer(client: SchemaRegistryClient, schema: str) -> Any:
    return JSONDeserializer(schema, schema_registry_client=client)


def protobuf_deserializer(client: SchemaRegistryClient, schema: str) -> Any:
    """It does not ask the registry, because it would ask for a schema in bytes, which Apicurio does not have."""
    return ProtobufDeserializer(message_class(schema, "shop.Order"), {"use.deprecated.format": False})


@pytest.mark.parametrize(
    ("settings", "deserializer"),
    [
        (FormatSettings("value", "avro"), avro_deserializer),
        (FormatSettings("value", "json-schema"), json_deserializer),
        (FormatSettings("value", "protobuf", message="shop.Order"), protobuf_deserializer),
    ],
    ids=["avro", "json-schema", "protobuf"],
)
def test_confluents_deserializers_read_what_the_encoder_writes(
    schema_registry: SchemaRegistry, topic: str, settings: FormatSettings, deserializer: Reader
) -> None:
    rows = [{"id": 1, "name": "a name"}, {"id": 7, "name": "naïveté"}, {"id": -(2**53), "name": ""}]
    column = pa.array([*rows, None], pa.struct({"id": pa.int64(), "name": pa.string()}))
    found = ask(schema_registry, column_format(settings, column.type), topic)
    values = ColumnEncoder(found, column.type).encode(column).values.to_pylist()
    context = SerializationContext(topic, MessageField.VALUE)
    with SchemaRegistryClient({"url": schema_registry.url}) as client:
        stored = call(schema_registry, "GET", f"/schemas/ids/{schema_id(found)}")["schema"]
        read = deserializer(client, stored)
        assert [as_row(read(value, context)) for value in values] == [*rows, None]


def as_row(value: Any) -> Any:
    """Return a row of a deserializer as a dictionary. Protobuf's is a message."""
    return value if value is None or isinstance(value, dict) else {"id": value.id, "name": value.name}


def test_newest_version_is_used(schema_registry: SchemaRegistry, topic: str) -> None:
    first = ask(schema_registry, value(avro("id")), topic)
    second = ask(schema_registry, value(avro("id", "more")), topic)
    found = ask(schema_registry, value(avro("id")), topic, use_latest_version=True)
    assert schema_id(first) != schema_id(second)
    assert found.prefix == second.prefix
    assert json.loads(found.schema or "") == json.loads(avro("id", "more"))


def test_schema_that_does_not_fit_is_refused_in_the_registrys_words(
    schema_registry: SchemaRegistry, topic: str
) -> None:
    ask(schema_registry, value(avro("id")), topic)
    call(schema_registry, "PUT", f"/config/{topic}-value", {"compatibility": "BACKWARD"})
    with pytest.raises(SchemaError, match=rf"refuses the schema of subject {topic}-value: .*(?i:compatib)"):
        ask(schema_registry, value(avro("id", "new")), topic)
    assert call(schema_registry, "GET", f"/subjects/{topic}-value/versions") == [1]


def test_schema_that_is_not_there_is_refused(schema_registry: SchemaRegistry, topic: str) -> None:
    with pytest.raises(SchemaError, match=rf"does not have the schema of subject {topic}-value: .*\(404\d\d\)"):
        ask(schema_registry, value(avro("id")), topic, auto_register_schemas=False)


def test_other_formats_are_registered_with_their_type(schema_registry: SchemaRegistry, topic: str) -> None:
    line = ask(schema_registry, ColumnFormat("value", "protobuf", PROTO, "Order.Line"), topic)
    assert line.prefix[5:] == b"\x04\x02\x00"
    assert call(schema_registry, "GET", f"/schemas/ids/{schema_id(line)}")["schemaType"] == "PROTOBUF"
    key = ask(schema_registry, ColumnFormat("key", "json-schema", JSON_SCHEMA), topic)
    assert call(schema_registry, "GET", f"/schemas/ids/{schema_id(key)}")["schemaType"] == "JSON"
    assert {f"{topic}-key", f"{topic}-value"} <= set(call(schema_registry, "GET", "/subjects"))
