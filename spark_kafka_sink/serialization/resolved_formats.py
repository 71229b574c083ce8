"""From the options of formats to what tasks need: the schema of each column, checked against its type, and its id.

Runs on the driver, once and before any task. No other code talks to the schema registry. Plain functions; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import FormatSettings
from spark_kafka_sink.serialization.format_options import Formats
from spark_kafka_sink.serialization.record_formats import ResolvedFormat, ResolvedFormats
from spark_kafka_sink.serialization.registry import registered
from spark_kafka_sink.serialization.schemas import column_format, parsed


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
        found = parsed(registered(found, formats.registry, settings.strategy, topic))
        ColumnEncoder(found, data_type)  # refuses a type that does not fit the registry's schema
    return ResolvedFormat(found, data_type)
