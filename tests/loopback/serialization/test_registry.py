"""Schemas at a registry, over HTTP: registration, look-up, logins, TLS, several addresses, refusals, and nonsense."""

from __future__ import annotations

import json
import logging
import pickle
import re
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, dual_schema_id_deserializer
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from support.fresh_process import run_script, without
from support.schema_registry import Registry, SchemaRegistryServer, answering, dropping, free_port, hanging

from spark_kafka_sink.common.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigError,
    KafkaError,
    RegistryError,
    SchemaError,
)
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import ColumnFormat, FormatSettings
from spark_kafka_sink.serialization.format_options import Formats
from spark_kafka_sink.serialization.registry import registered
from spark_kafka_sink.serialization.registry_settings import RegistrySettings
from spark_kafka_sink.serialization.schemas import column_format, resolved

CANARY = "canary-p4ss"


def record(*fields: str, name: str = "order", **more: Any) -> str:
    """An Avro record of longs. A field that ends in ? has a default."""
    written = [
        {"name": each.rstrip("?"), "type": "long", **({"default": 0} if each.endswith("?") else {})} for each in fields
    ]
    return json.dumps({"type": "record", "name": name, "fields": written, **more})


AVRO = ColumnFormat("value", "avro", record("id"))
PROTO = 'syntax = "proto3"; package shop; message A {} message Order { message Line {} }'


@pytest.fixture
def server() -> Iterator[SchemaRegistryServer]:
    with SchemaRegistryServer() as started:
        yield started


def settings_for(*addresses: str, **more: object) -> RegistrySettings:
    given = {f"schema.registry.{key.replace('_', '.')}": value for key, value in more.items()}
    quick = {"schema.registry.retries.wait.ms": 1, "schema.registry.max.retries": 1, "schema.registry.timeout": 5}
    if location := given.pop("schema.registry.id.location", None):
        given["schema.id.location"] = location
    found = RegistrySettings.from_options({"schema.registry.url": ",".join(addresses), **quick, **given})
    assert found is not None
    return found


def ask(address: str, column: ColumnFormat = AVRO, strategy: str = "topic", **more: Any) -> ColumnFormat:
    return registered(column, settings_for(address, **more), strategy, "orders")


# ---- what a record begins with ---------------------------------------------------------------------------------------


def test_schema_is_registered_and_its_id_stands_before_each_value(server: SchemaRegistryServer) -> None:
    server.registry.put("other", record("x"))
    found = ask(server.url)
    assert found.prefix == struct.pack(">bI", 0, 2)
    assert (found.header, found.schema, found.field) == (None, AVRO.schema, "value")
    assert server.registry.subjects["orders-value"] == [2]
    assert ask(server.url) == found
    assert pickle.loads(pickle.dumps(found)) == found


def test_guid_of_the_schema_is_in_a_header(server: SchemaRegistryServer) -> None:
    column = ColumnFormat("key", "avro", record("id"))
    found = ask(server.url, column, id_location="header")
    guid = uuid.UUID(server.registry.by_id[1].guid)
    assert found.header == ("__key_schema_id", b"\1" + guid.bytes)
    assert found.prefix == b""


def test_guid_that_a_registration_does_not_tell_is_looked_up(server: SchemaRegistryServer) -> None:
    server.faults.append(answering(200, {"id": server.registry.put("orders-value", record("id"))}))
    assert ask(server.url, id_location="header").header is not None
    guid = server.registry.by_id[1].guid
    assert [each.split("?")[0] for each in server.asked] == [
        "POST /subjects/orders-value/versions", "POST /subjects/orders-value", f"GET /schemas/guids/{guid}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "indexes"),
    [(None, b"\0"), ("A", b"\0"), ("Order", b"\x02\x02"), ("shop.Order.Line", b"\x04\x02\x00")],
)
def test_message_indexes_follow_the_id_of_a_protobuf_schema(
    server: SchemaRegistryServer, message: str | None, indexes: bytes
) -> None:
    column = ColumnFormat("value", "protobuf", PROTO, message)
    assert ask(server.url, column).prefix == struct.pack(">bI", 0, 1) + indexes
    guid = uuid.UUID(server.registry.by_id[1].guid)
    assert ask(server.url, column, id_location="header").header == ("__value_schema_id", b"\1" + guid.bytes + indexes)
    assert server.registry.by_id[1].content["schemaType"] == "PROTOBUF"


def test_json_schema_is_registered_and_json_without_a_schema_is_left_alone(server: SchemaRegistryServer) -> None:
    column = ColumnFormat("value", "json-schema", '{"title": "order"}')
    assert ask(server.url, column).prefix == struct.pack(">bI", 0, 1)
    assert server.registry.by_id[1].content["schemaType"] == "JSON"
    text = ColumnFormat("value", "json", None)
    asked = list(server.asked)
    assert ask(server.url, text) == text
    assert server.asked == asked


@pytest.mark.parametrize(
    ("strategy", "subject"), [("topic", "orders-value"), ("record", "order"), ("topic-record", "orders-order")]
)
def test_subject_has_the_name_of_the_strategy(server: SchemaRegistryServer, strategy: str, subject: str) -> None:
    ask(server.url, strategy=strategy)
    assert list(server.registry.subjects) == [subject]


def test_subject_may_have_any_character(server: SchemaRegistryServer) -> None:
    column = ColumnFormat("value", "json-schema", '{"title": "a/b ü?&"}')
    ask(server.url, column, "record")
    assert list(server.registry.subjects) == ["a/b ü?&"]


@pytest.mark.parametrize("location", ["prefix", "header"])
def test_confluents_deserializer_reads_what_the_encoder_writes(server: SchemaRegistryServer, location: str) -> None:
    # with a header, Confluent's deserializer refuses a value of up to 5 bytes
    rows = [{"id": 1, "name": "a name"}, {"id": None, "name": "naïveté"}, {"id": -(2**62), "name": None}]
    column = pa.array([*rows, None], pa.struct({"id": pa.int64(), "name": pa.string()}))
    own = column_format(FormatSettings("value", "avro"), column.type)
    found = ask(server.url, own, id_location=location)
    values = ColumnEncoder(found, column.type).encode(column).values.to_pylist()
    headers: list[tuple[str, str | bytes | None]] = [] if found.header is None else [found.header]
    context = SerializationContext("orders", MessageField.VALUE, headers)
    with SchemaRegistryClient({"url": server.url}) as client:
        read = AvroDeserializer(client, conf={"schema.id.deserializer": dual_schema_id_deserializer})
        assert [read(value, context) for value in values] == [*rows, None]


# ---- which schema ----------------------------------------------------------------------------------------------------


def test_schema_that_is_not_registered_is_refused_without_auto_register(server: SchemaRegistryServer) -> None:
    with pytest.raises(
        SchemaError, match=re.escape("does not have the schema of subject orders-value: Subject 'orders")
    ):
        ask(server.url, auto_register_schemas=False)
    server.registry.put("orders-value", record("other"))
    with pytest.raises(SchemaError, match=r"subject orders-value: Schema not found \(40403\)\. Register it first, or"):
        ask(server.url, auto_register_schemas=False)
    server.registry.put("orders-value", record("id"))
    assert ask(server.url, auto_register_schemas=False).prefix == struct.pack(">bI", 0, 2)


def test_latest_version_replaces_the_schema_of_the_column(server: SchemaRegistryServer) -> None:
    server.registry.put("orders-value", record("id"))
    server.registry.put("orders-value", record("id", "more?"))
    found = ask(server.url, use_latest_version=True)
    assert (found.schema, found.prefix) == (record("id", "more?"), struct.pack(">bI", 0, 2))
    header = ask(server.url, use_latest_version=True, id_location="header").header
    assert header == ("__value_schema_id", b"\1" + uuid.UUID(server.registry.by_id[2].guid).bytes)


def test_schema_with_the_given_id_replaces_the_schema_of_the_column(server: SchemaRegistryServer) -> None:
    server.registry.put("orders-value", record("id"))
    server.registry.put("orders-value", record("id", "more?"))
    found = ask(server.url, use_schema_id=1)
    assert (found.schema, found.prefix) == (record("id"), struct.pack(">bI", 0, 1))
    assert ask(server.url, use_schema_id=1, id_location="header").header is not None


def test_id_of_another_subject_is_refused(server: SchemaRegistryServer) -> None:
    server.registry.put("other", record("id"))
    text = (
        r"does not have schema 1 as a version of subject orders-value: Schema 1 not found \(40403\)\. Register it"
        r" first, or leave out schema\.registry\.use\.schema\.id\.$"
    )
    with pytest.raises(SchemaError, match=text):
        ask(server.url, use_schema_id=1)


def test_schema_of_another_format_is_refused(server: SchemaRegistryServer) -> None:
    server.registry.put("orders-value", PROTO, "PROTOBUF")
    with pytest.raises(SchemaError, match=r"orders-value: it is PROTOBUF, and value\.format=avro needs AVRO\.$"):
        ask(server.url, use_latest_version=True)


def test_schema_with_references_is_refused(server: SchemaRegistryServer) -> None:
    references = [{"name": "shop.Item", "subject": "items", "version": 1}]
    server.registry.put("orders-value", record("id"), references=references)
    with pytest.raises(
        SchemaError, match=r"orders-value: it refers to another schema, shop\.Item, and this sink follows"
    ):
        ask(server.url, use_latest_version=True)


def rule(**fields: Any) -> dict[str, Any]:
    return {"name": "hide", "kind": "TRANSFORM", "mode": "WRITE", "type": "ENCRYPT", **fields}


@pytest.mark.parametrize(
    "which", [{}, {"auto_register_schemas": False}, {"use_latest_version": True}, {"use_schema_id": 1}]
)
@pytest.mark.parametrize("kind", ["domainRules", "encodingRules"])
@pytest.mark.parametrize("mode", ["WRITE", "WRITEREAD"])
def test_schema_with_a_rule_for_writers_is_refused(
    server: SchemaRegistryServer, which: dict[str, Any], kind: str, mode: str
) -> None:
    server.registry.put("orders-value", record("id"), ruleSet={kind: [rule(mode=mode)]})
    if not which:  # the registry answers a registration with the id of the schema that it has, and adds no version
        server.faults.append(answering(200, {"id": 1}))
    with pytest.raises(SchemaError, match=r"its rule hide \(ENCRYPT\) is for writers, .* would go out in clear"):
        ask(server.url, **which)


@pytest.mark.parametrize("harmless", [rule(mode="READ"), rule(disabled=True), rule(mode="UPGRADE")])
def test_rule_that_no_writer_runs_is_no_obstacle(server: SchemaRegistryServer, harmless: dict[str, Any]) -> None:
    server.registry.put("orders-value", record("id"), ruleSet={"domainRules": [harmless]})
    assert ask(server.url, use_latest_version=True).prefix == struct.pack(">bI", 0, 1)


SWAPPED = (
    '{"type": "record", "name": "value", "fields": [{"name": "b", "type": "long"}, {"name": "a", "type": "long"}]}'
)
OTHER_PROTO = 'syntax = "proto3"; message Other {} message Value { optional int64 b = 1; optional int64 a = 2; }'
OF_OTHER_IDS = {
    "avro": ("AVRO", SWAPPED, b"", b"\x04\x02"),
    "protobuf": ("PROTOBUF", OTHER_PROTO, b"\x02\x02", b"\x08\x02\x10\x01"),
}


@pytest.mark.parametrize("location", ["prefix", "header"])
@pytest.mark.parametrize("name", OF_OTHER_IDS)
def test_values_are_written_by_the_schema_of_their_id(server: SchemaRegistryServer, name: str, location: str) -> None:
    """Bug: two registries that do not share their schemas stood behind one address. One gave the schema an id that the
    other gave to another schema, and readers took the values of one field for those of another.
    """
    schema_type, schema, indexes, value = OF_OTHER_IDS[name]
    schema_id = server.registry.put("other", schema, schema_type)
    guid = server.registry.by_id[schema_id].guid
    server.faults.append(answering(200, {"id": schema_id, "guid": guid}))
    column = pa.array([{"a": 1, "b": 2}], pa.struct([pa.field(each, pa.int64(), nullable=False) for each in "ab"]))
    own = FormatSettings("value", name, message="Value" if name == "protobuf" else None)
    formats = Formats(own, None, settings_for(server.url, id_location=location))
    found = resolved(formats, {"value": column.type}, "orders").value
    assert found is not None
    encoded = ColumnEncoder(found.column_format, column.type).encode(column).values.to_pylist()
    if location == "header":
        assert found.column_format.header == ("__value_schema_id", b"\1" + uuid.UUID(guid).bytes + indexes)
        assert encoded == [value]
    else:
        assert encoded == [struct.pack(">bI", 0, schema_id) + indexes + value]


def test_values_are_written_by_the_schema_of_the_guid_in_the_header(server: SchemaRegistryServer) -> None:
    """Bug: the values were written by the schema of the id, which may be another one, and no reader uses that id."""
    own = pa.struct([pa.field(each, pa.int64(), nullable=False) for each in "ab"])
    text = column_format(FormatSettings("value", "avro"), own).schema
    assert text is not None
    guid = server.registry.by_id[server.registry.put("mine", text)].guid
    wrong_id = server.registry.put("other", SWAPPED)
    server.faults.append(answering(200, {"id": wrong_id, "guid": guid}))
    formats = Formats(FormatSettings("value", "avro"), None, settings_for(server.url, id_location="header"))
    found = resolved(formats, {"value": own}, "orders").value
    assert found is not None
    assert found.column_format.header == ("__value_schema_id", b"\1" + uuid.UUID(guid).bytes)
    assert found.column_format.schema == text


@pytest.mark.parametrize("location", ["prefix", "header"])
def test_schema_that_cannot_be_read_back_is_an_error(server: SchemaRegistryServer, location: str) -> None:
    """Bug: an answer without a schema counted as one, and the column was written without looking at it."""
    server.every = answering(200, {"id": 1, "guid": str(uuid.uuid4())})
    with pytest.raises(RegistryError, match="there is no schema in the answer"):
        ask(server.url, id_location=location)


NOT_YET = answering(404, {"error_code": 40403, "message": "Schema 1 not found"})


@pytest.mark.parametrize("location", ["prefix", "header"])
def test_new_schema_that_a_node_does_not_have_yet_is_asked_for_again(
    server: SchemaRegistryServer, location: str
) -> None:
    """Bug: behind one address was another node than the one that had registered it, and the query did not start."""
    schema_id = server.registry.put("orders-value", record("id"))
    server.faults += [answering(200, {"id": schema_id, "guid": server.registry.by_id[schema_id].guid}), NOT_YET]
    found = ask(server.url, id_location=location)
    assert (found.prefix == struct.pack(">bI", 0, schema_id)) is (location == "prefix")


def test_next_address_is_asked_if_one_never_gets_the_new_schema(server: SchemaRegistryServer) -> None:
    with SchemaRegistryServer() as behind:
        behind.every = NOT_YET
        behind.faults.append(answering(200, {"id": 1}))
        assert registered(AVRO, settings_for(behind.url, server.url), "topic", "orders").prefix
        behind.faults.append(answering(200, {"id": 7}))
        text = (
            rf"{behind.url}: it has given the schema the id 7, and .* 1 retries: Schema 1 not .* raise .*max\.retries"
        )
        with pytest.raises(RegistryError, match=text):
            ask(behind.url)


@pytest.mark.parametrize("kind", ["domainRules", "encodingRules"])
def test_rule_for_writers_is_refused_with_the_id_in_a_header(server: SchemaRegistryServer, kind: str) -> None:
    schema_id = server.registry.put("orders-value", record("id"), ruleSet={kind: [rule()]})
    server.faults.append(answering(200, {"id": schema_id, "guid": server.registry.by_id[schema_id].guid}))
    with pytest.raises(SchemaError, match=r"its rule hide \(ENCRYPT\) is for writers"):
        ask(server.url, id_location="header")


@pytest.mark.parametrize(
    ("name", "schema_type", "schema"),
    [
        ("avro", "AVRO", record("x")),
        ("json-schema", "JSON", '{"type": "object", "required": ["x"]}'),
    ],
)
def test_id_of_a_schema_that_the_column_does_not_fit_is_refused(
    server: SchemaRegistryServer, name: str, schema_type: str, schema: str
) -> None:
    """Bug: the values were written with this id, and no reader could read them."""
    server.faults.append(answering(200, {"id": server.registry.put("other", schema, schema_type)}))
    formats = Formats(FormatSettings("value", name), None, settings_for(server.url))
    with pytest.raises(SchemaError, match=r"^value\."):
        resolved(formats, {"value": pa.struct({"id": pa.int64()})}, "orders")


def test_registry_without_guids_cannot_give_a_header(server: SchemaRegistryServer) -> None:
    server.registry.has_guids = False
    with pytest.raises(
        SchemaError, match=r"needs a registry that gives schemas a GUID.*set schema\.id\.location=prefix"
    ):
        ask(server.url, id_location="header")
    assert ask(server.url).prefix == struct.pack(">bI", 0, 1)


@pytest.mark.parametrize("is_normal", [True, False])
def test_normalize_schemas_reaches_the_registry(server: SchemaRegistryServer, is_normal: bool) -> None:
    ask(server.url, normalize_schemas=is_normal)
    ask(server.url, normalize_schemas=is_normal, auto_register_schemas=False)
    posted = [path for path in server.asked if path.startswith("POST")]
    assert len(posted) == 2
    assert all(f"normalize={is_normal}" in path for path in posted)


# ---- refusals, in the registry's words -------------------------------------------------------------------------------


def test_schema_that_does_not_fit_the_earlier_versions_is_refused_in_the_registrys_words(
    server: SchemaRegistryServer,
) -> None:
    """Bug: the option that gives a new field its default was only on the page, not in the text."""
    ask(server.url)
    with pytest.raises(SchemaError) as caught:
        ask(server.url, ColumnFormat("value", "avro", record("id", "new")))
    assert str(caught.value) == (
        f"The schema registry at {server.url} refuses the schema of subject orders-value: Schema being registered is"
        ' incompatible with an earlier schema for subject "orders-value", details: [{errorType:'
        "'READER_FIELD_MISSING_DEFAULT_VALUE', description:'The field 'new' in the new schema has no default value and"
        " is missing in the old schema'}] (409). It must fit the subject's earlier versions: change the column's type,"
        " or the compatibility of the subject. With BACKWARD compatibility a new field needs a default:"
        " value.avro.nullable=null-first gives one to each field that may be null."
    )
    assert server.registry.subjects["orders-value"] == [1]
    server.registry.compatibility["orders-value"] = "NONE"
    assert ask(server.url, ColumnFormat("value", "avro", record("id", "new"))).prefix == struct.pack(">bI", 0, 2)


NO_JSON = "Expecting value: line 1 column 1 (char 0)"
HTML = b"<html><body>Sign in</body></html>"
ANSWERS: dict[str, tuple[Callable[..., None], type[KafkaError], str]] = {
    "401": (
        answering(401, {"error_code": 40101, "message": "Unknown user"}),
        AuthenticationError,
        "The schema registry at URL refuses the login: Unknown user (40101). Check"
        " schema.registry.basic.auth.user.info or the token.",
    ),
    "403": (
        answering(403, {"error_code": 40301, "message": "User is denied operation Write on Subject: orders-value"}),
        AuthorizationError,
        "The schema registry at URL refuses subject orders-value: User is denied operation Write on Subject:"
        " orders-value (40301). Grant this user read and write on it.",
    ),
    "422": (
        answering(422, {"error_code": 42201, "message": "Invalid schema.\nUndefined name: x"}),
        SchemaError,
        "The schema registry at URL refuses the schema of subject orders-value: Invalid schema.?Undefined name: x"
        " (42201).",
    ),
    "404 of another server": (
        answering(404, HTML),
        RegistryError,
        "NONE URL: it answered with status 404: b'<html><body>Sign in</body></html>'. Check the path of"
        " schema.registry.url.",
    ),
    "redirect": (
        answering(302, b""),
        RegistryError,
        "NONE URL: it answered with status 302: b''. Check the path of schema.registry.url.",
    ),
    "500": (
        answering(500, {"error_code": 50001, "message": "Error in the backend datastore"}),
        RegistryError,
        "NONE URL: it answered with status 500: Error in the backend datastore (50001).",
    ),
    "503 without JSON": (
        answering(503, b"upstream is away"),
        RegistryError,
        "NONE URL: it answered with status 503: b'upstream is away'.",
    ),
    "error without a message": (
        answering(409, {}),
        SchemaError,
        "The schema registry at URL refuses the schema of subject orders-value: it gave no reason. It must fit the"
        " subject's earlier versions: change the column's type, or the compatibility of the subject. With BACKWARD"
        " compatibility a new field needs a default: value.avro.nullable=null-first gives one to each field that may be"
        " null.",
    ),
    "HTML": (
        answering(200, HTML),
        RegistryError,
        f"NONE URL: its answer is not a schema registry's (JSONDecodeError: {NO_JSON}). Check the path of"
        " schema.registry.url.",
    ),
    "truncated JSON": (
        answering(200, b'{"id": 1'),
        RegistryError,
        "NONE URL: its answer is not a schema registry's (JSONDecodeError: Expecting ',' delimiter: line 1 column 9"
        " (char 8)). Check the path of schema.registry.url.",
    ),
    "nothing": (
        answering(200, b""),
        RegistryError,
        "NONE URL: its answer is not a schema registry's (AttributeError: 'NoneType' object has no attribute 'copy')."
        " Check the path of schema.registry.url.",
    ),
    "a list": (
        answering(200, []),
        RegistryError,
        "NONE URL: its answer is not a schema registry's (TypeError: pop expected at most 1 argument, got 2). Check"
        " the path of schema.registry.url.",
    ),
    "no id": (
        answering(200, {"hello": 1}),
        RegistryError,
        "NONE URL: its answer is not a schema registry's (ValueError: the schema's id is None). Check the path of"
        " schema.registry.url.",
    ),
    "an id that is text": (
        answering(200, {"id": "1"}),
        RegistryError,
        "NONE URL: its answer is not a schema registry's (ValueError: the schema's id is '1'). Check the path of"
        " schema.registry.url.",
    ),
    "an id that is too large": (
        answering(200, {"id": 2**31}),
        RegistryError,
        "NONE URL: its answer is not a schema registry's (ValueError: the schema's id is 2147483648). Check the path of"
        " schema.registry.url.",
    ),
    "a GUID that is none": (
        answering(200, {"id": 1, "guid": "x"}),
        RegistryError,
        "NONE URL: its answer is not a schema registry's (ValueError: badly formed hexadecimal UUID string). Check the"
        " path of schema.registry.url.",
    ),
    "connection dropped": (
        dropping,
        RegistryError,
        "NONE URL: Server disconnected without sending a response.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_each_answer_that_is_no_schema_is_an_error_with_its_words(server: SchemaRegistryServer, case: str) -> None:
    server.every, kind, text = ANSWERS[case]
    with pytest.raises(KafkaError) as caught:
        ask(server.url)
    none = "The schema of subject orders-value was not looked up, because no schema registry answered."
    assert str(caught.value) == text.replace("NONE", none).replace("URL", server.url)
    assert type(caught.value) is kind
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


@pytest.mark.parametrize("body", [{"schema": 5}, {"schema": None}, {"schema": "{}", "references": 3}, 17])
def test_schema_that_is_no_schema_is_an_error(server: SchemaRegistryServer, body: object) -> None:
    server.every = answering(200, {"id": 1, "version": 1, **body} if isinstance(body, dict) else body)
    with pytest.raises(RegistryError, match="its answer is not a schema registry's"):
        ask(server.url, use_latest_version=True)


# ---- several addresses, and time -------------------------------------------------------------------------------------


def test_nothing_listens_at_any_address() -> None:
    first, second = (f"http://localhost:{free_port()}" for _ in range(2))
    with pytest.raises(RegistryError) as caught:
        registered(AVRO, settings_for(first, second), "topic", "orders")
    refused = r"\[Errno 111\] Connection refused"
    assert re.fullmatch(
        "The schema of subject orders-value was not looked up, because no schema registry answered."
        f" {first}: {refused}. {second}: {refused}.",
        str(caught.value).replace("[Errno 111] ", "[Errno 111] "),
    )
    assert caught.value.setting == "schema.registry.url"


@pytest.mark.parametrize("fault", [dropping, answering(503, b""), answering(200, HTML), None])
def test_next_address_is_asked_if_one_does_not_answer(server: SchemaRegistryServer, fault: Any) -> None:
    with SchemaRegistryServer() as broken:
        broken.every = fault
        first = broken.url if fault is not None else f"http://localhost:{free_port()}"
        found = registered(AVRO, settings_for(first, server.url), "topic", "orders")
    assert found.prefix == struct.pack(">bI", 0, 1)
    assert len(broken.requests) == {dropping: 2, None: 0}.get(fault, len(broken.requests))


def test_next_address_is_not_asked_after_a_refusal(server: SchemaRegistryServer) -> None:
    with SchemaRegistryServer(Registry(readers_only=True)) as refusing, pytest.raises(AuthorizationError) as caught:
        registered(AVRO, settings_for(refusing.url, server.url), "topic", "orders")
    assert refusing.url in str(caught.value)
    assert server.asked == []


def test_registry_that_never_answers_costs_a_limited_time(server: SchemaRegistryServer) -> None:
    server.every = hanging
    with pytest.raises(RegistryError, match=f"{server.url}: timed out"):
        ask(server.url, timeout=0.05)
    assert len(server.requests) == 2  # max.retries=1


def test_error_that_passes_is_retried(server: SchemaRegistryServer) -> None:
    server.faults += [dropping]
    assert ask(server.url).prefix == struct.pack(">bI", 0, 1)
    server.faults += [answering(503, b"")]
    assert ask(server.url).prefix == struct.pack(">bI", 0, 1)


# ---- logins and TLS --------------------------------------------------------------------------------------------------


def test_user_and_password_are_sent(server: SchemaRegistryServer) -> None:
    server.registry.login = f"me:{CANARY}"
    with pytest.raises(AuthenticationError, match=r"refuses the login: HTTP 401 Unauthorized \(401\)"):
        ask(server.url, basic_auth_user_info="me:other")
    assert ask(server.url, basic_auth_user_info=f"me:{CANARY}").prefix
    host = server.url.removeprefix("http://")
    assert ask(f"http://me:{CANARY}@{host}").prefix
    with pytest.raises(AuthenticationError):
        ask(server.url)


def test_token_is_sent_with_the_names_of_the_cluster(server: SchemaRegistryServer) -> None:
    server.registry.token = CANARY
    bearer: dict[str, Any] = {"bearer_auth_credentials_source": "STATIC_TOKEN", "bearer_auth_logical_cluster": "lsrc-1"}
    assert ask(server.url, **bearer, bearer_auth_token=CANARY, bearer_auth_identity_pool_id="pool-1").prefix
    _, _, headers = server.requests[0]
    assert (headers["target-sr-cluster"], headers["Confluent-Identity-Pool-Id"]) == ("lsrc-1", "pool-1")
    with pytest.raises(AuthenticationError):
        ask(server.url, **bearer, bearer_auth_token="other")


OIDC: dict[str, Any] = {
    "bearer_auth_credentials_source": "OAUTHBEARER",
    "bearer_auth_client_id": "me",
    "bearer_auth_client_secret": CANARY,
    "bearer_auth_scope": "all",
    "bearer_auth_logical_cluster": "lsrc-1",
}


def test_token_comes_from_the_endpoint(server: SchemaRegistryServer) -> None:
    server.registry.token = "from-endpoint"
    with SchemaRegistryServer() as endpoint:
        endpoint.every = answering(200, {"access_token": "from-endpoint", "expires_in": 60, "token_type": "Bearer"})
        assert ask(server.url, **OIDC, bearer_auth_issuer_endpoint_url=f"{endpoint.url}/token").prefix


def test_endpoint_that_gives_no_token_is_named(server: SchemaRegistryServer) -> None:
    with SchemaRegistryServer() as endpoint:
        endpoint.every = answering(400, {"error": "invalid_client", "error_description": f"no {CANARY}"})
        with pytest.raises(AuthenticationError) as caught:
            ask(server.url, **OIDC, bearer_auth_issuer_endpoint_url=f"{endpoint.url}/token")
    assert f"No token for the schema registry came from {urlsplit(endpoint.url).netloc}:" in str(caught.value)
    assert "invalid_client" in str(caught.value)
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("life", [{}, {"expires_in": "60"}])
def test_token_without_its_end_is_an_error_of_the_endpoint(server: SchemaRegistryServer, life: dict[str, str]) -> None:
    """Bug: the error blamed the registry, and said to check its path."""
    server.registry.token = "from-endpoint"
    with SchemaRegistryServer() as endpoint:
        endpoint.every = answering(200, {"access_token": "from-endpoint", **life})
        with pytest.raises(AuthenticationError, match="no expires_in that is a number") as caught:
            ask(server.url, **OIDC, bearer_auth_issuer_endpoint_url=f"{endpoint.url}/token")
    assert urlsplit(endpoint.url).netloc in str(caught.value)


def test_token_endpoint_with_an_unknown_authority_says_how_to_name_it(
    server: SchemaRegistryServer, tmp_path: Path
) -> None:
    says = r"CERTIFICATE_VERIFY_FAILED.* by the variable SSL_CERT_FILE"
    with (
        SchemaRegistryServer(tls_folder=tmp_path) as endpoint,
        pytest.raises(AuthenticationError, match=says),
    ):
        ask(server.url, **OIDC, bearer_auth_issuer_endpoint_url=f"{endpoint.url}/token")


@pytest.mark.parametrize("answer", ["down", "in words"])
def test_a_token_endpoint_is_named_without_login_and_query(server: SchemaRegistryServer, answer: str) -> None:
    """Bug: the error showed the whole address, with what stood in its query."""
    with SchemaRegistryServer() as endpoint:
        words = f"no {CANARY} for {endpoint.url}/token?code={CANARY}"
        endpoint.every = answering(400, {"error": "invalid_client", "error_description": words})
        host = urlsplit(endpoint.url).netloc if answer == "in words" else "127.0.0.1:9"
        url = f"http://{host}/token?code={CANARY}-2&version=1"
        with pytest.raises(AuthenticationError) as caught:
            ask(server.url, **{**OIDC, "bearer_auth_client_secret": "other"}, bearer_auth_issuer_endpoint_url=url)
    assert f"No token for the schema registry came from {host}:" in str(caught.value)
    assert f"{CANARY}-2" not in str(caught.value)
    assert "?code=" not in str(caught.value)


def test_registry_with_tls_needs_its_authority(tmp_path: Path) -> None:
    with SchemaRegistryServer(tls_folder=tmp_path) as server:
        assert ask(server.url, ssl_ca_location=str(server.authority_file)).prefix
        with pytest.raises(
            RegistryError, match=r"CERTIFICATE_VERIFY_FAILED.*Name the authority .* by schema\.registry\.ssl"
        ):
            ask(server.url)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"ssl_ca_location": "absent.pem"}, "No such file or directory"),
        ({"ssl_ca_location": "key.pem"}, "no certificate or crl found|NO_CERTIFICATE_OR_CRL_FOUND"),
        ({"ssl_certificate_location": "absent.pem"}, "No such file or directory"),
        ({"ssl_certificate_location": "key.pem"}, "SSL"),
        ({"ssl_certificate_location": "key.pem", "ssl_key_password": CANARY}, "SSL"),
    ],
)
def test_file_that_cannot_be_used_is_an_error(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    (tmp_path / "key.pem").write_text("nothing")
    named: dict[str, Any] = {
        key: str(tmp_path / value) if value.endswith(".pem") else value for key, value in settings.items()
    }
    with pytest.raises(
        ConfigError, match=rf"The files of schema\.registry\.ssl\.\* cannot be used: .*({why})"
    ) as caught:
        ask("https://localhost:1", **named)
    assert CANARY not in str(caught.value)


def test_key_with_a_password_that_is_not_given_asks_nobody(tmp_path: Path) -> None:
    from support.certificates import Authority

    identity = Authority().issue().write(tmp_path / "client.pem", "password")
    with pytest.raises(ConfigError, match="the password must be that of the key"):
        ask("https://localhost:1", ssl_certificate_location=str(identity))


def test_no_secret_is_shown_even_if_the_registry_repeats_it(
    server: SchemaRegistryServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    login = "bWU6Y2FuYXJ5LXA0c3M="  # of the header
    server.every = answering(401, {"error_code": 401, "message": f"me:{CANARY}, {CANARY}, Basic {login} are wrong"})
    with pytest.raises(AuthenticationError) as caught:
        ask(f"http://me:{CANARY}@{server.url.removeprefix('http://')}")
    assert "***, ***, Basic *** are wrong" in str(caught.value)
    shown = f"{caught.value!r} {caught.value.__cause__!r} {caplog.text}"
    assert CANARY not in shown
    assert login not in shown


@pytest.mark.parametrize("status", [401, 500])
def test_no_fetched_token_is_shown_even_if_the_registry_repeats_it(server: SchemaRegistryServer, status: int) -> None:
    """Bug: only secrets of the options were left out of the error."""
    server.every = answering(status, {"error_code": status, "message": "not Bearer fetched.token.1234, at all"})
    with SchemaRegistryServer() as endpoint:
        endpoint.every = answering(200, {"access_token": "fetched.token.1234", "expires_in": 60})
        with pytest.raises(KafkaError, match=r"not Bearer \*\*\*, at all") as caught:
            ask(server.url, **OIDC, bearer_auth_issuer_endpoint_url=f"{endpoint.url}/token")
    assert "fetched" not in str(caught.value)


def test_no_escaped_secret_is_shown(server: SchemaRegistryServer) -> None:
    """Bug: an answer that is no JSON is shown as Python writes bytes, so a secret with other letters was not found."""
    password = "pässword-€"
    server.every = answering(500, f"no {password}".encode())
    with pytest.raises(RegistryError) as caught:
        ask(server.url, basic_auth_user_info=f"me:{password}")
    assert "***" in str(caught.value)
    assert "ssword" not in str(caught.value)


@pytest.mark.parametrize("proxy", [f"http://me:{CANARY}/x@localhost:3128", f"socks5://me:{CANARY}@localhost:3128"])
def test_proxy_that_cannot_be_used_is_an_error_without_its_login(proxy: str) -> None:
    """Bug: an error of the HTTP client showed a part of the password."""
    with pytest.raises(ConfigError, match=r"Check schema\.registry\.proxy, and the variables HTTP_PROXY") as caught:
        ask("http://localhost:1", proxy=proxy)
    assert CANARY not in f"{caught.value} {caught.value.__cause__}"


def test_login_over_plain_http_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    address = "http://user:pw@127.0.0.2:1"
    for _ in range(2):
        with pytest.raises(RegistryError):
            ask(address, max_retries=0)
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == [
        "The login to the schema registry goes over the network in clear: http://127.0.0.2:1. Use https."
    ]


# ---- the extra -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from spark_kafka_sink.serialization.column_format import ColumnFormat
from spark_kafka_sink.serialization.format_options import Formats
from spark_kafka_sink.serialization.registry import registered
from spark_kafka_sink.serialization.registry_settings import RegistrySettings

assert not [name for name in sys.modules if name.startswith("confluent_kafka")]
settings = RegistrySettings.from_options({"schema.registry.url": "http://localhost:1"})
try:
    registered(ColumnFormat("value", "avro", '"long"'), settings, "topic", "orders")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("missing", ["confluent_kafka", "authlib"])
def test_error_without_the_client_names_the_extra(tmp_path: Path, missing: str) -> None:
    done = run_script(without(missing) + SCRIPT, tmp_path, PYTHONPATH=str(Path(__file__).resolve().parents[3]))
    assert done.stdout.splitlines() == [
        f"ConfigError schema.registry.url needs Confluent's client on the driver, and {missing} is not installed: pip"
        " install 'spark-kafka-sink[registry]'."
    ]
