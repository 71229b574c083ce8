"""From the options of formats to what tasks need: the schema of each column, given by the user or made of the column's
type, checked against that type, and its id at the schema registry.

Runs on the driver, once and before any task. No other code talks to the registry. Plain functions; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import pyarrow as pa

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization.avro_schema import PRIMITIVES, schema_text
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import AVRO, JSON, JSON_SCHEMA, PROTOBUF, ColumnFormat, FormatSettings
from spark_kafka_sink.serialization.format_options import Formats
from spark_kafka_sink.serialization.json_schema import json_schema_text
from spark_kafka_sink.serialization.message_indexes import message_name
from spark_kafka_sink.serialization.protobuf_parser import parse_proto
from spark_kafka_sink.serialization.protobuf_text import proto_text
from spark_kafka_sink.serialization.record_formats import ResolvedFormat, ResolvedFormats
from spark_kafka_sink.serialization.registry import registered


def resolved(formats: Formats, types: Mapping[str, pa.DataType], topic: str | None) -> ResolvedFormats:
    """Return the formats for columns of these Arrow types, with the ids of the registry. Blocks while it asks the
    registry.

    `types`: `value` and `key`, as far as they have a format. `topic`: that of every row, None if rows name their own.
    Raises SchemaError for a type that does not fit, ConfigError, and KafkaError if the registry cannot be used.
    """
    found = {each.field: _resolved(formats, each, types[each.field], topic) for each in formats.settings()}
    return ResolvedFormats(**found)


def _resolved(formats: Formats, settings: FormatSettings, data_type: pa.DataType, topic: str | None) -> ResolvedFormat:
    found = column_format(settings, data_type)
    if formats.registry is not None:
        # Refused before the registry has the schema: it might not accept a corrected one after it.
        ColumnEncoder(replace(found, prefix=b"\0"), data_type)
        found = parsed(registered(found, formats.registry, settings.strategy, topic))
        ColumnEncoder(found, data_type)  # refuses a type that does not fit the registry's schema
    return ResolvedFormat(found, data_type)


def column_format(settings: FormatSettings, data_type: pa.DataType) -> ColumnFormat:
    """Return how a column of `data_type` becomes bytes: with the given schema, or with one made of the type.

    Raises SchemaError, with the column's path, if the type does not fit, and ConfigError for settings that do not go
    together.
    """
    schema = _SCHEMAS[_checked(settings)](settings, data_type)
    made = parsed(ColumnFormat(settings.field, settings.name, schema, _message(settings), json=settings.json))
    ColumnEncoder(made, data_type)  # raises its errors on the driver
    return made


def _message(settings: FormatSettings) -> str | None:
    """Return the name of the message: of the given schema's first one, because the text that a registry has may begin
    with another message. None if there is no schema, and no name.
    """
    if settings.name != PROTOBUF or settings.schema is None or settings.message is not None:
        return settings.message
    return f".{message_name(settings.schema, None)}"


def parsed(column_format: ColumnFormat) -> ColumnFormat:
    """Return the format with its schema parsed for tasks: Protobuf's, for which tasks have no parser.

    Raises SchemaError for a text that is no schema, and ConfigError if the parser is missing.
    """
    if column_format.name != PROTOBUF or column_format.schema is None:
        return column_format
    found = parse_proto(column_format.schema, column_format.message, column_format.field)
    return replace(column_format, protobuf=found)


def _checked(settings: FormatSettings) -> str:
    if settings.name not in _SCHEMAS:
        raise ConfigError(f"{settings.field}.format must be one of {', '.join(_SCHEMAS)}, not '{settings.name}'.")
    if settings.schema is not None:
        _check_text(settings, settings.schema)
    return settings.name


def _check_text(settings: FormatSettings, schema: str) -> None:
    """Raise SchemaError, with the option, for a text that is the name of a file, for example."""
    remedy = "give the text of the schema, not the name of a file."
    if settings.name == PROTOBUF:
        if "message" not in schema:
            raise SchemaError(f"{settings.field}.schema has no message: {remedy}")
    elif settings.name == JSON_SCHEMA or (settings.name == AVRO and schema.strip() not in PRIMITIVES):
        try:
            json.loads(schema)
        except RecursionError:
            return  # refused with its path
        except ValueError as error:
            raise SchemaError(f"{settings.field}.schema is not JSON ({error}): {remedy}") from None


def _avro_schema(settings: FormatSettings, data_type: pa.DataType) -> str:
    if settings.schema is not None:
        return settings.schema
    return schema_text(data_type, settings.field, settings.nullable)


def _json_schema(settings: FormatSettings, data_type: pa.DataType) -> str:
    if settings.schema is not None:
        return settings.schema
    return json_schema_text(data_type, settings.field, settings.json)


def _protobuf_schema(settings: FormatSettings, data_type: pa.DataType) -> str:
    if settings.schema is not None:
        return settings.schema
    return proto_text(data_type, settings.field, settings.message)


def _no_schema(settings: FormatSettings, _data_type: pa.DataType) -> None:
    if settings.schema is not None:
        raise ConfigError(
            f"{settings.field}.schema is not used by the format json. Leave it out, or choose json-schema."
        )


_SCHEMAS: Final[Mapping[str, Callable[[FormatSettings, pa.DataType], str | None]]] = {
    AVRO: _avro_schema,
    PROTOBUF: _protobuf_schema,
    JSON: _no_schema,
    JSON_SCHEMA: _json_schema,
}
