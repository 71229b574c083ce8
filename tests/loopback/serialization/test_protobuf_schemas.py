"""Protobuf schemas at a registry, over HTTP: the frame of Confluent's serializer, and the registry's own schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import (
    SchemaRegistryClient,
    header_schema_id_serializer,
    prefix_schema_id_serializer,
)
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from support.generated_protobuf import message_class, message_of
from support.schema_registry import SchemaRegistryServer

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.format_options import formats_of_write
from spark_kafka_sink.serialization.record_formats import ResolvedFormat
from spark_kafka_sink.serialization.schemas import resolved

PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
message First { int64 id = 1; string name = 2; google.protobuf.Timestamp at = 3; }
message Second {
  message Inner { message Deep { int64 id = 1; string name = 2; google.protobuf.Timestamp at = 3; } }
  int64 id = 1;
  string name = 2;
}
"""
TYPE = pa.struct([("id", pa.int64()), ("name", pa.string())])
ROWS: list[dict[str, Any]] = [{"id": -5, "name": "näme"}, {"id": 0, "name": ""}, {"id": None, "name": "x" * 300}]
COLUMN = pa.array([*ROWS, None], TYPE)


@pytest.fixture
def server() -> Iterator[SchemaRegistryServer]:
    with SchemaRegistryServer() as started:
        yield started


def asked(server: SchemaRegistryServer, **options: Any) -> ResolvedFormat:
    given = {"value.format": "protobuf", "schema.registry.url": server.url}
    given |= {key.replace("__", "."): value for key, value in options.items()}
    found = resolved(formats_of_write(given), {"value": TYPE}, "orders").value
    assert found is not None
    return found


def encoded(found: ResolvedFormat) -> list[bytes | None]:
    result = ColumnEncoder(found.column_format, TYPE).encode(COLUMN)
    assert result.bad_rows == ()
    values: list[bytes | None] = result.values.to_pylist()
    return values


@pytest.mark.parametrize("message", ["shop.First", "shop.Second", "shop.Second.Inner.Deep"])
@pytest.mark.parametrize("location", ["prefix", "header"])
def test_frame_is_that_of_confluents_serializer(server: SchemaRegistryServer, message: str, location: str) -> None:
    found = asked(server, value__schema=PROTO, value__schema__message=message, schema__id__location=location)
    values = encoded(found)
    made = message_class(PROTO, message)
    write_id = prefix_schema_id_serializer if location == "prefix" else header_schema_id_serializer
    with SchemaRegistryClient({"url": server.url}) as client:
        # it registers the schema in another form, under another id
        serialize = ProtobufSerializer(made, client, {"schema.id.serializer": write_id})
        for row, value in zip(ROWS, values, strict=False):
            headers: list[tuple[str, Any]] = []
            context = SerializationContext("orders", MessageField.VALUE, headers)
            expected_value = serialize(message_of(made(), row, TYPE), context)
            if location == "prefix":
                assert value is not None
                assert expected_value == b"\0\0\0\0\2" + value[5:]
                assert value[:5] == b"\0\0\0\0\1"
            else:
                assert expected_value == value
                (name, own), (given_name, given) = found.column_format.header or ("", b""), headers[0]
                assert (name, own[:1], own[17:]) == (given_name, given[:1], given[17:])
        read = ProtobufDeserializer(made, {}, client)
        headers = [] if found.column_format.header is None else [found.column_format.header]
        context = SerializationContext("orders", MessageField.VALUE, headers)
        expected = [message_of(made(), row, TYPE) for row in ROWS]
        # with a header Confluent's deserializer refuses a value of up to 5 bytes
        sizes = [len(value or b"") for value in values]
        pairs = zip(values, expected, sizes, strict=False)
        assert all(read(value, context) == each for value, each, size in pairs if size > 5)
    assert values[3] is None


def test_schema_that_is_made_of_the_type_is_registered(server: SchemaRegistryServer) -> None:
    found = asked(server, value__subject__name__strategy="record", value__schema__message="shop.v1.Order")
    assert list(server.registry.subjects) == ["shop.v1.Order"]
    assert server.registry.by_id[1].content["schema"] == found.column_format.schema
    assert found.column_format.prefix == b"\0\0\0\0\1\0"
    assert found.column_format.protobuf is not None
    assert found.column_format.protobuf.root == "shop.v1.Order"


def test_rows_are_written_by_the_latest_schema_of_the_registry(server: SchemaRegistryServer) -> None:
    latest = 'syntax = "proto3"; message Other {} message Order { string name = 9; int64 more = 4; sint64 id = 7; }'
    server.registry.put("orders-value", "message Old {}", "PROTOBUF")
    server.registry.put("orders-value", latest, "PROTOBUF")
    found = asked(server, schema__registry__use__latest__version=True, value__schema__message="Order")
    values = encoded(found)
    assert found.column_format.schema == latest
    assert values[0] == b"\0\0\0\0\2" + b"\x02\x02" + b"\x38\x09\x4a\x05n\xc3\xa4me"


REFUND_FIRST = "message Refund { string name = 1; int64 id = 2; } message Order { int64 id = 1; string name = 2; }"


@pytest.mark.parametrize("option", ["use__latest__version", "use__schema__id"])
def test_message_of_a_given_schema_is_not_the_first_one_that_the_registry_has(
    server: SchemaRegistryServer, option: str
) -> None:
    """Bug: rows were written as another message, in which readers of Order saw other values, or none."""
    server.registry.put("orders-value", f'syntax = "proto3"; {REFUND_FIRST}', "PROTOBUF")
    given = 'syntax = "proto3"; message Order { int64 id = 1; string name = 2; }'
    found = asked(server, value__schema=given, **{f"schema__registry__{option}": 1 if "id" in option else True})
    assert found.column_format.prefix == b"\0\0\0\0\1\x02\x02"
    assert found.column_format.protobuf is not None
    assert found.column_format.protobuf.root == "Order"


def test_several_messages_of_the_registry_need_a_name(server: SchemaRegistryServer) -> None:
    server.registry.put("orders-value", f'syntax = "proto3"; {REFUND_FIRST}', "PROTOBUF")
    text = (
        r"orders-value: it has the messages Refund, Order\. Say which one the column is: value\.schema\.message=Refund"
    )
    with pytest.raises(ConfigError, match=text):
        asked(server, schema__registry__use__latest__version=True)
    given = 'syntax = "proto3"; message Other { int64 id = 1; string name = 2; }'
    with pytest.raises(SchemaError, match=r"has no message \.Other\. It has: Refund, Order"):
        asked(server, value__schema=given, schema__registry__use__latest__version=True)


def test_latest_schema_that_the_column_does_not_fit_is_refused(server: SchemaRegistryServer) -> None:
    server.registry.put("orders-value", 'syntax = "proto3"; message Order { string name = 9; }', "PROTOBUF")
    with pytest.raises(SchemaError, match=r"value\.id: the Protobuf message 'Order' has no field of this name"):
        asked(server, schema__registry__use__latest__version=True)


def test_references_to_the_files_of_google_are_no_obstacle(server: SchemaRegistryServer) -> None:
    """Confluent's serializer registers them, with skip.known.types=False."""
    known = {"name": "google/protobuf/timestamp.proto", "subject": "google/protobuf/timestamp.proto", "version": 1}
    server.registry.put("orders-value", PROTO, "PROTOBUF", references=[known])
    options = {"schema__registry__use__latest__version": True, "value__schema__message": "First"}
    assert asked(server, **options).column_format.schema == PROTO
    server.registry.put("orders-value", PROTO, "PROTOBUF", references=[known, {**known, "name": "shop/item.proto"}])
    with pytest.raises(SchemaError, match=r"it refers to another schema, shop/item\.proto, and this sink follows no"):
        asked(server, **options)
