"""Names of subjects, by strategy."""

from __future__ import annotations

import json

import pytest

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization.column_format import ColumnFormat
from spark_kafka_sink.serialization.subjects import record_name, subject_of

AVRO = ColumnFormat("value", "avro", '{"type": "record", "name": "order", "namespace": "shop", "fields": []}')


@pytest.mark.parametrize(
    ("strategy", "field", "subject"),
    [
        ("topic", "value", "orders-value"),
        ("topic", "key", "orders-key"),
        ("record", "value", "shop.order"),
        ("record", "key", "shop.order"),
        ("topic-record", "key", "orders-shop.order"),
    ],
)
def test_subject_of_each_strategy(strategy: str, field: str, subject: str) -> None:
    assert subject_of(ColumnFormat(field, "avro", AVRO.schema), strategy, "orders") == subject


def test_only_the_record_strategy_needs_no_topic() -> None:
    assert subject_of(AVRO, "record", None) == "shop.order"
    for strategy in ("topic", "topic-record"):
        with pytest.raises(ConfigError) as caught:
            subject_of(AVRO, strategy, None)
        assert str(caught.value) == (
            f"value.subject.name.strategy={strategy} needs the option topic: without it each row names its topic, and"
            " schemas are registered before the first row. Set topic, or value.subject.name.strategy=record."
        )
        assert caught.value.setting == "value.subject.name.strategy"


def test_unknown_strategy_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"^key\.subject\.name\.strategy must be one of topic, record, topic-record, not"
    ):
        subject_of(ColumnFormat("key", "avro", AVRO.schema), "Topic", "orders")


@pytest.mark.parametrize(
    ("name", "schema", "expected"),
    [
        ("avro", {"type": "record", "name": "a.b.order", "namespace": "shop"}, "a.b.order"),
        ("avro", {"type": "record", "name": "order", "namespace": ""}, "order"),
        ("avro", {"type": "enum", "name": "kind", "symbols": []}, "kind"),
        ("avro", '"long"', "long"),
        ("avro", {"type": "bytes", "logicalType": "decimal"}, "bytes"),
        ("json-schema", {"title": "an order"}, "an order"),
        ("protobuf", "package shop; message Order { message Line {} }", "shop.Order.Line"),
    ],
)
def test_name_of_the_record(name: str, schema: object, expected: str) -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    assert record_name(ColumnFormat("value", name, text, "Order.Line")) == expected


@pytest.mark.parametrize(
    ("name", "schema", "advice"),
    [
        ("avro", '["null", "long"]', "write a record"),
        ("avro", '{"type": "array", "items": "long"}', "write a record"),
        ("json-schema", '{"type": "object"}', "give it a title"),
        ("json-schema", '{"title": ""}', "give it a title"),
        ("json-schema", "true", "give it a title"),
    ],
)
def test_schema_without_a_name_is_an_error(name: str, schema: str, advice: str) -> None:
    with pytest.raises(SchemaError) as caught:
        record_name(ColumnFormat("value", name, schema))
    assert str(caught.value) == (
        f"value.schema has no name that the subject could have: {advice}, or set value.subject.name.strategy=topic."
    )


def test_schema_that_is_no_json_is_an_error() -> None:
    with pytest.raises(SchemaError, match=r"^value\.schema is not JSON: Expecting"):
        record_name(ColumnFormat("value", "avro", "{"))
