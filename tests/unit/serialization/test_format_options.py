from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization import column_format, subjects
from spark_kafka_sink.serialization.format_options import (
    OPTIONS,
    Formats,
    formats_of,
    formats_of_write,
    is_option,
)
from spark_kafka_sink.serialization.schemas import resolved

REGISTRY = {"schema.registry.url": "http://registry:8081"}
STRUCT = pa.struct([("id", pa.int64()), ("name", pa.string())])


def parsed(**options: object) -> Formats:
    found = formats_of({key.replace("__", ".").lower(): value for key, value in options.items()})
    assert found is not None
    return found


def test_without_options_there_are_no_formats() -> None:
    assert formats_of({"topic": "orders", "value.format": None}) is None


def test_each_column_has_its_own_settings() -> None:
    found = parsed(value__format="avro", value__avro__nullable="null-first", key__format="JSON")
    assert found.fields == ("value", "key")
    assert found.value is not None
    assert found.key is not None
    assert (found.value.name, found.value.nullable, found.value.json.ignore_null_fields) == ("avro", "null-first", True)
    assert (found.key.name, found.key.nullable, found.registry) == ("json", "null-last", None)


def test_options_of_json_are_those_of_to_json() -> None:
    found = parsed(value__format="json", value__json__ignoreNullFields="false", value__json__timeZone="Europe/Berlin")
    assert found.value is not None
    assert (found.value.json.ignore_null_fields, found.value.json.time_zone) == (False, "Europe/Berlin")


def test_json_schema_takes_the_options_of_json_and_a_schema() -> None:
    found = parsed(
        value__format="json-schema", value__schema='{"type": "object"}', value__json__ignoreNullFields="false"
    )
    assert found.value is not None
    assert (found.value.name, found.value.schema) == ("json-schema", '{"type": "object"}')
    assert not found.value.json.ignore_null_fields


def test_strategies_and_the_registry_are_parsed() -> None:
    found = formats_of({"value.format": "avro", "value.subject.name.strategy": "topic-record", **REGISTRY})
    assert found is not None
    assert found.value is not None
    assert found.registry is not None
    assert (found.value.strategy, found.registry.url) == ("topic-record", ("http://registry:8081",))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"value.schema": "{}"}, r"value\.schema has no effect without value\.format: set that too"),
        (
            {"key.avro.nullable": "null-first", "value.format": "avro"},
            r"key\.avro\.nullable has no effect without key\.",
        ),
        ({"value.format": "xml"}, r"value\.format='xml' must be one of avro, protobuf, json, json-schema"),
        ({"value.format": "json", "value.schema": "{}"}, r"value\.schema has no effect with value\.format=json"),
        ({"value.format": "avro", "value.json.timezone": "UTC"}, r"value\.json\.timeZone has no effect with"),
        ({"value.format": "avro", "value.avro.nullable": "first"}, r"must be one of null-last, null-first"),
        (
            {"value.format": "avro", "value.schema": '"long"', "value.avro.nullable": "null-first"},
            r"value\.avro\.nullable has no effect with value\.schema, which has its own unions",
        ),
        ({"value.format": "json", "value.json.ignorenullfields": "no"}, r"ignoreNullFields='no' must be true or false"),
        ({"value.format": "json", "value.json.dateformat": "dd"}, r"JSON is written as to_json writes it by default"),
        (
            {"value.format": "avro", "value.subject.name.strategy": "record"},
            r"value\.subject\.name\.strategy has no effect without schema\.registry\.url",
        ),
        (REGISTRY, r"schema\.registry\.url has no effect without value\.format or key\.format"),
        ({"value.format": "avro", "schema.id.location": "header"}, r"has no effect without schema\.registry\.url"),
        ({"value.format": "json", **REGISTRY}, "json has no schema to register"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        formats_of(options)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_known_in_lower_case(name: str) -> None:
    assert is_option(name.lower())


def test_other_options_are_not_known() -> None:
    assert [
        name for name in ("value", "topic", "value.formats", "schema.registry", "schema.id") if is_option(name)
    ] == []


def test_a_write_takes_names_in_any_case() -> None:
    assert formats_of_write({"VALUE.Format": "avro"}).fields == ("value",)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"value.formt": "avro"}, r"serialization has no option value\.formt: the nearest one is value\.format"),
        ({"colour": "red"}, "serialization has no option colour: leave it out"),
        ({}, r"serialization has no format: set value\.format or key\.format"),
        ({"value.format": "avro", "Value.Format": "avro"}, "given twice"),
        ("avro", "serialization takes a mapping of options, not str"),
    ],
)
def test_a_write_refuses_other_options(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        formats_of_write(options)


def test_formats_are_resolved_for_the_types_of_columns() -> None:
    types = {"value": STRUCT, "key": STRUCT}
    found = resolved(parsed(value__format="avro", key__format="json"), types, "orders")
    assert found.value is not None
    assert found.key is not None
    assert found.value.column_format.schema is not None
    assert '"name":"id"' in found.value.column_format.schema.replace(" ", "")
    assert (found.key.column_format.schema, found.key.data_type) == (None, STRUCT)
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_type_that_does_not_fit_its_schema_is_refused_with_its_path() -> None:
    schema = '{"type":"record","name":"r","fields":[{"name":"id","type":"string"},{"name":"name","type":"string"}]}'
    with pytest.raises(SchemaError, match=r"value\.id"):
        resolved(parsed(value__format="avro", value__schema=schema), {"value": STRUCT}, "orders")


def test_a_formats_repr_shows_no_secret() -> None:
    options = {"value.format": "avro", **REGISTRY, "schema.registry.basic.auth.user.info": "anna:hunter2"}
    assert "hunter2" not in repr(formats_of(options))


def test_strategies_are_those_of_the_registry() -> None:
    assert column_format.STRATEGIES == subjects.STRATEGIES


def test_one_id_is_no_schema_of_two_columns() -> None:
    one_id = {**REGISTRY, "schema.registry.use.schema.id": "7"}
    with pytest.raises(
        ConfigError,
        match=r"schema\.registry\.use\.schema\.id is the id of one schema, and value\.format=avro and"
        r" key\.format=json-schema need one each",
    ):
        formats_of({**one_id, "value.format": "avro", "key.format": "json-schema"})
    assert formats_of({**one_id, "value.format": "avro", "key.format": "json"}) is not None
    assert formats_of({**one_id, "value.format": "json", "key.format": "avro"}) is not None
