"""The schema of a column: given by the user or made of the column's type, and checked against that type.

Runs once, on the driver. It knows no registry: `registry.registered` adds the schema's id afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import pyarrow as pa

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.serialization.avro_schema import schema_text
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import AVRO, JSON, JSON_SCHEMA, PROTOBUF, ColumnFormat, FormatSettings
from spark_kafka_sink.serialization.json_schema import json_schema_text
from spark_kafka_sink.serialization.protobuf_parser import parse_proto
from spark_kafka_sink.serialization.protobuf_text import proto_text


def column_format(settings: FormatSettings, data_type: pa.DataType) -> ColumnFormat:
    """Return how a column of `data_type` becomes bytes: with the given schema, or with one made of the type.

    Raises SchemaError, with the column's path, if the type does not fit, and ConfigError for settings that do not go
    together.
    """
    schema = _SCHEMAS[_checked(settings)](settings, data_type)
    made = parsed(ColumnFormat(settings.field, settings.name, schema, settings.message, json=settings.json))
    ColumnEncoder(made, data_type)  # raises its errors on the driver
    return made


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
    return settings.name


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
