"""A table, by `KafkaProducer.write` and a registry over HTTP, to a broker over TCP; read back by Confluent's
deserializers, which fetch the schemas.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, dual_schema_id_deserializer
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from support.generated_protobuf import message_class
from support.schema_registry import SchemaRegistryServer
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

ROWS = 500
VALUE = pa.struct(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("inner", pa.struct([("x", pa.float64()), ("ok", pa.bool_())])),
    ]
)
KEY = pa.struct([("region", pa.string()), ("number", pa.int32())])
PROTO = """
syntax = "proto3";
package shop;
message Key { string region = 1; int32 number = 2; }
message Order {
  message Inner { double x = 1; bool ok = 2; }
  int64 id = 1;
  optional string name = 2;
  repeated string tags = 3;
  Inner inner = 4;
}
"""
MESSAGES = {"value": "shop.Order", "key": "shop.Key"}


def table() -> pa.Table:
    """Rows of structs; one value in ten is a tombstone, and one key in seven null."""
    values = [
        {
            "id": row,
            "name": None if row % 3 == 0 else f"näme {row}",
            "tags": [f"t{row}", "x" * (row % 40)],
            "inner": {"x": row / 4, "ok": row % 2 == 0},
        }
        for row in range(ROWS)
    ]
    keys = [{"region": f"r{row % 5} with a name", "number": row} for row in range(ROWS)]
    return pa.table(
        {
            "value": pa.array([None if row % 10 == 9 else value for row, value in enumerate(values)], VALUE),
            "key": pa.array([None if row % 7 == 6 else key for row, key in enumerate(keys)], KEY),
            "headers": pa.array(
                [[{"key": "row", "value": b"%d" % row}] for row in range(ROWS)],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )


@pytest.fixture
def registry() -> Iterator[SchemaRegistryServer]:
    with SchemaRegistryServer() as started:
        yield started


@pytest.fixture
def broker() -> Iterator[tuple[ScriptedCluster, str]]:
    cluster = ScriptedCluster(1)
    cluster.create_topic("orders", partitions=3)
    with ScriptedServer(cluster) as server:
        yield cluster, ",".join(server.bootstrap_servers)


def written(servers: str, options: Mapping[str, str]) -> int:
    with KafkaProducer({"bootstrap.servers": servers}) as producer:
        return int(producer.write(table(), "orders", serialization=options).records)


def deserializer(kind: str, field: str, client: SchemaRegistryClient) -> Any:
    conf = {"schema.id.deserializer": dual_schema_id_deserializer}
    if kind == "protobuf":
        module = pytest.importorskip("confluent_kafka.schema_registry.protobuf")
        # it has the message's class, and needs no schema of the registry
        read = module.ProtobufDeserializer(message_class(PROTO, MESSAGES[field]), conf)
        return lambda content, context: as_dict(read(content, context))
    if kind == "avro":
        return AvroDeserializer(client, conf=conf)
    module = pytest.importorskip("confluent_kafka.schema_registry.json_schema")
    return module.JSONDeserializer(None, schema_registry_client=client, conf=conf)


def as_dict(message: Any) -> dict[str, Any]:
    """The fields of a message as the table has them: an optional field without a value is null."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            found[field.name] = list(value)
        elif field.message_type is not None:
            found[field.name] = as_dict(value)
        else:
            found[field.name] = value if not field.has_presence or message.HasField(field.name) else None
    return found


def without_nulls(value: Any) -> Any:
    """A value as the JSON Schema's deserializer returns it: null fields are left out."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return value


@pytest.mark.parametrize("location", ["prefix", "header"])
@pytest.mark.parametrize(
    ("value", "key"), [("avro", "avro"), ("avro", "json-schema"), ("json-schema", "avro"), ("protobuf", "protobuf")]
)
def test_confluents_deserializers_read_key_and_value(
    registry: SchemaRegistryServer, broker: tuple[ScriptedCluster, str], value: str, key: str, location: str
) -> None:
    cluster, servers = broker
    options = {"value.format": value, "key.format": key, "schema.registry.url": registry.url}
    for field, form in (("value", value), ("key", key)):
        if form == "protobuf":
            options |= {f"{field}.schema": PROTO, f"{field}.schema.message": MESSAGES[field]}
    assert written(servers, {**options, "schema.id.location": location}) == ROWS
    asked = len(registry.requests)
    expected = table().select(["value", "key"]).to_pylist()
    seen = set()
    with SchemaRegistryClient({"url": registry.url}) as client:
        read = {"value": deserializer(value, "value", client), "key": deserializer(key, "key", client)}
        for record in (each for partition in cluster.records("orders") for each in partition):
            headers: list[tuple[str, Any]] = [(name.decode(), content) for name, content in record.headers]
            row = int(dict(headers)["row"] or b"")
            seen.add(row)
            for field, place, content, form in (
                ("value", MessageField.VALUE, record.value, value),
                ("key", MessageField.KEY, record.key, key),
            ):
                given = expected[row][field]
                found = (
                    None if content is None else read[field](content, SerializationContext("orders", place, headers))
                )
                assert found == (without_nulls(given) if form == "json-schema" else given), (row, field)
                has_header = f"__{field}_schema_id" in dict(headers)
                assert has_header == (location == "header" and given is not None)
    assert seen == set(range(ROWS))
    assert asked == 4  # a registration and a look-up for each column
    assert sorted(registry.registry.subjects) == ["orders-key", "orders-value"]


def test_records_have_the_ids_of_their_own_subjects(
    registry: SchemaRegistryServer, broker: tuple[ScriptedCluster, str]
) -> None:
    cluster, servers = broker
    options = {"value.format": "avro", "key.format": "avro", "schema.registry.url": registry.url}
    written(servers, options)
    ids = {field: registry.registry.subjects[f"orders-{field}"][-1] for field in ("value", "key")}
    assert ids["value"] != ids["key"]
    for record in (each for partition in cluster.records("orders") for each in partition):
        for field, content in (("value", record.value), ("key", record.key)):
            assert content is None or content[:5] == struct.pack(">bI", 0, ids[field])


def test_a_refused_schema_sends_nothing(registry: SchemaRegistryServer, broker: tuple[ScriptedCluster, str]) -> None:
    cluster, servers = broker
    registry.registry.put("orders-value", '{"type":"record","name":"topLevelRecord","fields":[]}')
    with pytest.raises(SchemaError, match=r'incompatible with an earlier schema for subject "orders-value".*\(409\)'):
        written(servers, {"value.format": "avro", "key.format": "json", "schema.registry.url": registry.url})
    assert [record for partition in cluster.records("orders") for record in partition] == []
