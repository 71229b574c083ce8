"""The schema of a column: given or made, and the name that subjects take from it."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization import schemas
from spark_kafka_sink.serialization.column_format import ColumnFormat, FormatSettings, JsonOptions
from spark_kafka_sink.serialization.format_options import Formats
from spark_kafka_sink.serialization.registry_settings import RegistrySettings
from spark_kafka_sink.serialization.schemas import column_format, resolved

TYPE = pa.struct([("a", pa.int32())])
GIVEN = '{"type":"record","name":"R","namespace":"n","fields":[{"name":"a","type":["null","int"]}]}'


def test_given_schema_stays_as_it_is() -> None:
    assert column_format(FormatSettings("value", "avro", GIVEN), TYPE) == ColumnFormat("value", "avro", GIVEN)


def test_schema_is_made_of_the_type() -> None:
    made = column_format(FormatSettings("key", "avro", nullable="null-first"), TYPE)
    assert json.loads(made.schema or "") == {
        "type": "record",
        "name": "topLevelRecord",
        "fields": [{"name": "a", "type": ["null", "int"], "default": None}],
    }


def test_json_has_no_schema_and_keeps_its_options() -> None:
    options = JsonOptions(ignore_null_fields=False)
    assert column_format(FormatSettings("value", "json", json=options), TYPE) == ColumnFormat(
        "value", "json", None, json=options
    )
    with pytest.raises(ConfigError, match=r"value\.schema is not used by the format json"):
        column_format(FormatSettings("value", "json", GIVEN), TYPE)


def test_type_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"key\.b: the Avro record 'n\.R' has no field of this name"):
        column_format(FormatSettings("key", "avro", GIVEN), pa.struct([("a", pa.int32()), ("b", pa.int32())]))


@pytest.mark.parametrize("text", ["{", "schemas/order.avsc", "s3://bucket/order.json"])
@pytest.mark.parametrize("name", ["avro", "json-schema", "protobuf"])
@pytest.mark.parametrize("field", ["value", "key"])
def test_schema_that_is_no_text_of_one_is_refused_with_its_option(field: str, name: str, text: str) -> None:
    why = "has no message" if name == "protobuf" else r"is not JSON \(.+\)"
    with pytest.raises(
        SchemaError, match=rf"^{field}\.schema {why}: give the text of the schema, not the name of a file"
    ):
        column_format(FormatSettings(field, name, text), TYPE)


def test_bare_name_of_a_primitive_is_an_avro_schema() -> None:
    assert column_format(FormatSettings("value", "avro", " int "), pa.int32()).schema == " int "
    with pytest.raises(SchemaError, match=r"value\.schema is not JSON"):
        column_format(FormatSettings("value", "json-schema", "int"), TYPE)


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"value\.format must be one of .*, not 'xml'"):
        column_format(FormatSettings("value", "xml"), TYPE)


def test_schema_that_no_reader_of_a_registry_reads_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that has it might refuse a corrected one as incompatible."""
    asked: list[ColumnFormat] = []
    monkeypatch.setattr(schemas, "registered", lambda found, *_: asked.append(found) or found)
    registry = RegistrySettings.from_options({"schema.registry.url": "http://127.0.0.1:1"})
    decimal = '{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}'
    given = Formats(FormatSettings("value", "avro", decimal), registry=registry)
    with pytest.raises(SchemaError, match="value: the Avro schema is a decimal in bytes"):
        resolved(given, {"value": pa.decimal128(9, 2)}, "orders")
    assert asked == []
    resolved(Formats(FormatSettings("value", "avro"), registry=registry), {"value": pa.decimal128(9, 2)}, "orders")
    assert len(asked) == 1
