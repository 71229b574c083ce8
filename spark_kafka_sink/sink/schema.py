"""The columns of a DataFrame that can be written, checked on the driver before any task, with the errors of Spark's own
Kafka sink. Names and errors that rows and Arrow batches share.

`projection` selects the columns that go to the tasks, under fixed names. Other columns stay in the JVM, and a timestamp
without a time zone gets the session's there. A timestamp stays one, so that the task knows its unit. Plain functions of
the schema. Reference: org.apache.spark.sql.kafka010.KafkaWriter (validateQuery), KafkaRowWriter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import spark_kafka_sink.sink.pyspark_versions  # noqa: F401 - raises if PySpark is missing or too old

# isort: split

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    CharType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.sink.options import EARLY_OPTION

log = logging.getLogger(__name__)

VALUE, KEY, TOPIC, PARTITION, HEADERS, TIMESTAMP = "value", "key", "topic", "partition", "headers", "timestamp"
_ALLOWED: Final[Mapping[str, str]] = {
    VALUE: "string or binary",
    KEY: "string or binary",
    TOPIC: "string",
    PARTITION: "int",
    HEADERS: "array<struct<key:string,value:binary>>",
    TIMESTAMP: "timestamp or bigint",
}
"""Column → the types that it may have, in Spark's words."""

NULL_TOPIC: Final = (
    "[KAFKA_NULL_TOPIC_IN_DATA] The Kafka message data sent to the producer contains a null topic. Use the `topic`"
    " option for setting a default topic."
)
NO_TOPIC: Final = (
    "topic option required when no 'topic' attribute is present. Use the topic option for setting a topic."
)
NO_VALUE: Final = "Required attribute 'value' not found"
CAST_TIMESTAMP: Final = (
    ": CAST(timestamp AS TIMESTAMP) gives it the time of the record. Rename or drop the column if it is no such time"
)
SET_FORMAT: Final = ", unless {column}.format says what it becomes: avro or json, for example"
_ADVICE: Final[Mapping[str, str]] = {
    TIMESTAMP: CAST_TIMESTAMP,
    VALUE: SET_FORMAT.format(column=VALUE),
    KEY: SET_FORMAT.format(column=KEY),
}
ALLOW_EARLY: Final = f" If the date is right, set {EARLY_OPTION}=true."


TEXTS: Final = (StringType, CharType, VarcharType)
"""Spark keeps the last two in a schema with spark.sql.preserveCharVarcharTypeInfo=true."""


def _is_text_or_bytes(data_type: DataType) -> bool:
    return isinstance(data_type, (*TEXTS, BinaryType))


def _is_headers(data_type: DataType) -> bool:
    element = data_type.elementType if isinstance(data_type, ArrayType) else None
    if not isinstance(element, StructType):
        return False
    if [field.name.lower() for field in element.fields] != [KEY, VALUE]:
        return False
    return isinstance(element.fields[0].dataType, TEXTS) and isinstance(element.fields[1].dataType, BinaryType)


_RULES: Final[Mapping[str, Callable[[DataType], bool]]] = {
    VALUE: _is_text_or_bytes,
    KEY: _is_text_or_bytes,
    TOPIC: lambda data_type: isinstance(data_type, TEXTS),
    PARTITION: lambda data_type: isinstance(data_type, IntegerType),
    HEADERS: _is_headers,
    TIMESTAMP: lambda data_type: isinstance(data_type, (TimestampType, TimestampNTZType, LongType)),
}


def by_position(schema: StructType) -> list[str]:
    """Return a unique name for each column. `projection` uses these names."""
    return [f"c{position}" for position in range(len(schema.fields))]


def projection(schema: StructType, topic_option: str | None, formatted: Collection[str] = ()) -> list[str]:
    """SQL expressions of the columns that the tasks get, in the order of the rules, over columns named by
    `by_position`; `topic` only if the option is not set. Raises as `check_columns`.
    """
    positions = _positions(schema)
    columns = check_columns(schema, topic_option, formatted)
    return [_expression(name, positions[name], data_type) for name, data_type in columns.items()]


def needs_projection(schema: StructType, topic_option: str | None, formatted: Collection[str] = ()) -> bool:
    """Return whether `projection` would change more than the order of columns. Raises as `check_columns`."""
    columns = check_columns(schema, topic_option, formatted)
    # `columns` has only one of two columns with the same name
    return len(columns) != len(schema.names) or isinstance(columns.get(TIMESTAMP), TimestampNTZType)


def check_columns(schema: StructType, topic_option: str | None, formatted: Collection[str] = ()) -> dict[str, DataType]:
    """Return the columns that are written and their types, in the order of the rules; `topic` only if the option is not
    set. Names are case-sensitive; of columns with the same name the first one counts. The columns `formatted` have a
    format: their types are checked with it (column_formats.py).

    Raises SchemaError: no topic, no `value`, or a column of a wrong type.
    """
    types = {name: schema.fields[position].dataType for name, position in _positions(schema).items()}
    if topic_option is None and TOPIC not in types:
        raise SchemaError(NO_TOPIC)
    if VALUE not in types:
        raise SchemaError(f"{NO_VALUE}. The columns are: {', '.join(schema.names)}.")
    columns = {}
    for name, fits in _RULES.items():
        data_type = types.get(name)
        if data_type is None or (name == TOPIC and topic_option is not None):
            continue
        if name not in formatted and not fits(data_type):
            raise wrong_type(name, data_type.simpleString())
        columns[name] = data_type
    warn_of_case(schema.names, topic_option)
    return columns


def warn_of_case(names: Sequence[Any], topic_option: str | None) -> None:
    """Log a warning for each column, such as `Key`, that is ignored only because of its case: once in a process."""
    for name in names:
        meant = str(name).lower()
        if name != meant and meant in _ALLOWED and meant not in names and not (meant == TOPIC and topic_option):
            _warn_once(str(name), meant)


@lru_cache(64)
def _warn_once(name: str, meant: str) -> None:
    log.warning("The column %s is ignored, because names are case-sensitive. Rename it to %s, or drop it", name, meant)


def refuse_without_zone(columns: Mapping[str, DataType]) -> None:
    """Raise SchemaError for a column `timestamp` without a time zone, where the session's is not known: its hour
    depends on it. `columns`: those of `check_columns`.
    """
    if isinstance(columns.get(TIMESTAMP), TimestampNTZType):
        raise SchemaError(
            f"{TIMESTAMP} attribute unsupported type timestamp_ntz. {TIMESTAMP} must be a(n) timestamp or bigint:"
            f" CAST({TIMESTAMP} AS TIMESTAMP_LTZ) reads it in the session's time zone"
        )


def _positions(schema: StructType) -> dict[str, int]:
    return {name: position for position, name in reversed(list(enumerate(schema.names)))}


def _expression(name: str, position: int, data_type: DataType) -> str:
    if name == TIMESTAMP and isinstance(data_type, TimestampNTZType):
        # _LTZ: spark.sql.timestampType may make TIMESTAMP one without a zone
        return f"CAST(c{position} AS TIMESTAMP_LTZ) AS `{name}`"
    return f"c{position} AS `{name}`"


def wrong_type(column: str, found: str) -> SchemaError:
    """Return the error for a column of the type `found`, in Spark's words."""
    advice = _ADVICE.get(column, "")
    return SchemaError(f"{column} attribute unsupported type {found}. {column} must be a(n) {_ALLOWED[column]}{advice}")
