"""The subject of a schema: the name under which the registry keeps its versions.

The strategies are Confluent's TopicNameStrategy, RecordNameStrategy and TopicRecordNameStrategy. Readers do not use the
subject; people and the registry's rules of compatibility do. No state; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.common.texts import shown
from spark_kafka_sink.serialization.column_format import AVRO, JSON_SCHEMA, PROTOBUF, ColumnFormat
from spark_kafka_sink.serialization.message_indexes import find_message

TOPIC: Final = "topic"
RECORD: Final = "record"
TOPIC_RECORD: Final = "topic-record"
_PRIMITIVES: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
STRATEGIES: Final = (TOPIC, RECORD, TOPIC_RECORD)


def subject_of(column_format: ColumnFormat, strategy: str, topic: str | None) -> str:
    """Return the subject. `topic` is the option; None if each row names its topic.

    Raises ConfigError for a strategy that needs the topic where there is none, or that is unknown, and SchemaError if
    the schema has no name and the strategy needs it.
    """
    field = column_format.field
    option = f"{field}.subject.name.strategy"
    if strategy not in STRATEGIES:
        raise ConfigError(f"{option} must be one of {', '.join(STRATEGIES)}, not {shown(strategy)}.", setting=option)
    if strategy == RECORD:
        return record_name(column_format)
    if topic is None:
        raise ConfigError(
            f"{option}={strategy} needs the option topic: without it each row names its topic, and schemas are"
            f" registered before the first row. Set topic, or {option}={RECORD}.",
            setting=option,
        )
    return f"{topic}-{field}" if strategy == TOPIC else f"{topic}-{record_name(column_format)}"


def record_name(column_format: ColumnFormat) -> str:
    """Return the full name of the Avro record or the Protobuf message, or the title of the JSON Schema. An Avro
    primitive has its own name.

    Raises SchemaError if the schema has none.
    """
    name = _NAMES[column_format.name](column_format)
    if name is None:
        field = column_format.field
        raise SchemaError(
            f"{field}.schema has no name that the subject could have: {_ADVICE[column_format.name]}, or set"
            f" {field}.subject.name.strategy={TOPIC}."
        )
    return name


def _avro_name(column_format: ColumnFormat) -> str | None:
    schema = _json(column_format)
    if isinstance(schema, dict) and schema.get("type") in _PRIMITIVES:
        schema = schema["type"]
    if schema in _PRIMITIVES:
        return str(schema)  # as Confluent's client names its subject
    if not isinstance(schema, dict) or not isinstance(schema.get("name"), str):
        return None
    name, namespace = schema["name"], schema.get("namespace")
    return f"{namespace}.{name}" if namespace and "." not in name else name


def _json_name(column_format: ColumnFormat) -> str | None:
    schema = _json(column_format)
    title = schema.get("title") if isinstance(schema, dict) else None
    return title if isinstance(title, str) and title else None


def _protobuf_name(column_format: ColumnFormat) -> str | None:
    return find_message(column_format.schema or "", column_format.message).name


def _json(column_format: ColumnFormat) -> Any:
    try:
        return json.loads(column_format.schema or "null")
    except ValueError as error:
        raise SchemaError(f"{column_format.field}.schema is not JSON: {error}.") from None


_NAMES: Final[Mapping[str, Callable[[ColumnFormat], str | None]]] = {
    AVRO: _avro_name,
    JSON_SCHEMA: _json_name,
    PROTOBUF: _protobuf_name,
}
_ADVICE: Final[Mapping[str, str]] = {
    AVRO: "write a record",
    JSON_SCHEMA: "give it a title",
    PROTOBUF: "give it a message",
}
