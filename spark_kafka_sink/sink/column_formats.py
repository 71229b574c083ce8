"""The formats of a DataFrame's columns, resolved on the driver before any task: the type that Arrow gives each column,
the check that its format takes that type, and the schema's id.

Spark's types become Arrow's by a table of this module: PySpark's own function differs between versions, and does not
say which field of a column it refuses. Runs in the driver's Python process or in a planning worker of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import spark_kafka_sink.sink.pyspark_versions  # noqa: F401 - raises if PySpark is missing or too old

# isort: split

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StructField, StructType, UserDefinedType

from spark_kafka_sink.common.errors import ConfigError, SchemaError
from spark_kafka_sink.serialization.column_format import AVRO
from spark_kafka_sink.serialization.format_options import Formats
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.schema import check_columns

if TYPE_CHECKING:
    from spark_kafka_sink.serialization.record_formats import ResolvedFormats

UTC: Final = "UTC"

_VARIANT: Final = pa.struct(
    [pa.field("value", pa.binary(), False), pa.field("metadata", pa.binary(), False, metadata={"variant": "true"})]
)
"""As Spark hands over a variant."""
_TYPES: Final[dict[str, Callable[[str], pa.DataType]]] = {
    "NullType": lambda _: pa.null(),
    "BooleanType": lambda _: pa.bool_(),
    "ByteType": lambda _: pa.int8(),
    "ShortType": lambda _: pa.int16(),
    "IntegerType": lambda _: pa.int32(),
    "LongType": lambda _: pa.int64(),
    "FloatType": lambda _: pa.float32(),
    "DoubleType": lambda _: pa.float64(),
    "StringType": lambda _: pa.string(),
    "CharType": lambda _: pa.string(),
    "VarcharType": lambda _: pa.string(),
    "BinaryType": lambda _: pa.binary(),
    "DateType": lambda _: pa.date32(),
    "TimestampType": lambda zone: pa.timestamp("us", zone),
    "TimestampNTZType": lambda _: pa.timestamp("us"),
    "DayTimeIntervalType": lambda _: pa.duration("us"),
    "TimeType": lambda _: pa.time64("ns"),
    "VariantType": lambda _: _VARIANT,
}
"""Class of PySpark, which may be missing in an older one → the Arrow type, in a time zone."""
_BY_CLASS: Final = {getattr(spark_types, name): make for name, make in _TYPES.items() if hasattr(spark_types, name)}
_NO_ARROW: Final = {
    "YearMonthIntervalType": "cast it to a string, or to a number of months",
    "CalendarIntervalType": "cast it to a string",
    "GeometryType": "make it bytes before, by st_asbinary",
    "GeographyType": "make it bytes before, by st_asbinary",
}
"""Class of PySpark → what to do with such a column, which no format takes from Spark."""


_of_streams: Final[dict[tuple[Hashable, ...], ResolvedFormats]] = {}
"""The resolved formats of streams, in the order in which they were resolved."""
_MOST_STREAMS: Final = 64


def with_column_formats(
    config: SinkConfig, schema: StructType, time_zone: str | None = None, stream: str | None = None
) -> SinkConfig:
    """Return `config` for the tasks that write a DataFrame of this schema: the formats of its columns are resolved.
    Without formats that is `config` itself. Blocks while it asks the registry.

    `time_zone`: the session's, in which the tasks get their timestamps; None if it is not known. `stream`: a run of a
    streaming query, whose later batches get the formats of the first one.

    Raises as `check_columns` and `schemas.resolved`.
    """
    if config.formats is None:
        return config
    fields = config.formats.fields
    columns = check_columns(schema, config.topic, fields)
    if missing := [field for field in fields if field not in columns]:
        raise SchemaError(
            f"{missing[0]}.format is set, and there is no column {missing[0]}: add one, or leave the option out. The"
            f" columns are: {', '.join(schema.names)}."
        )
    types = {field: arrow_type(columns[field], field, time_zone or UTC) for field in fields}
    formats = _in_zone(config.formats, time_zone)
    key = (stream, formats, config.topic, *types.items())
    found = None if stream is None else _of_streams.get(key)
    if found is None:
        found = _resolved(formats, types, config.topic)
        if stream is not None:
            _of_streams[key] = found
            for old in [*_of_streams][:-_MOST_STREAMS]:
                _of_streams.pop(old, None)  # another thread may have taken it out
    return replace(config, formats=None, column_formats=found)


def _in_zone(formats: Formats, zone: str | None) -> Formats:
    """Return the formats with the zone for times whose type has none, inside of a variant."""
    found: dict[str, Any] = {
        each.field: replace(each, json=replace(each.json, zone_of_variants=zone)) for each in formats.settings()
    }
    return replace(formats, **found)


def with_given_types(config: SinkConfig) -> SinkConfig:
    """Return `config` for a task that gets rows without a schema: the types are those of the given Avro schemas. A
    configuration whose formats are resolved already is returned as it is.

    Raises ConfigError if a format has no such schema, SchemaError if it does not say the types.
    """
    if config.formats is None:
        return config
    for each in config.formats.settings():
        if each.name != AVRO or each.schema is None or config.formats.registry is not None:
            raise ConfigError(
                f"{each.field}.format is set, and foreach and foreachPartition hand over rows, which do not tell the"
                " types of their fields. Give the sink the schema of the DataFrame: KafkaSink(options,"
                " schema=df.schema).",
                setting=f"{each.field}.format",
            )
    from spark_kafka_sink.serialization.avro_types import arrow_type_of

    types = {each.field: arrow_type_of(each.schema or "", each.field) for each in config.formats.settings()}
    return replace(config, formats=None, column_formats=_resolved(config.formats, types, config.topic))


def _resolved(formats: Formats, types: Mapping[str, pa.DataType], topic: str | None) -> ResolvedFormats:
    from spark_kafka_sink.serialization.schemas import (
        resolved,  # tasks import this module, and need none of it
    )

    return resolved(formats, types, topic)


def check_formats(config: SinkConfig, schema: StructType) -> None:
    """Raise as `with_column_formats`, but ask no registry."""
    if config.formats is not None:
        with_column_formats(replace(config, formats=replace(config.formats, registry=None)), schema)


def nullable_struct(schema: StructType) -> StructType:
    """Return the type with fields, elements and values of maps that may all be null.

    Spark gives `format` the type of each micro-batch's optimized plan: a part of the plan without new rows is left out,
    and a field that may be null in that part only may not be null any more. A schema that is made of such a type would
    change from batch to batch.
    """
    return StructType([StructField(each.name, _nullable(each.dataType), True, each.metadata) for each in schema.fields])


def _nullable(data_type: DataType) -> DataType:
    if isinstance(data_type, StructType):
        return nullable_struct(data_type)
    if isinstance(data_type, ArrayType):
        return ArrayType(_nullable(data_type.elementType), True)
    if isinstance(data_type, MapType):
        return MapType(_nullable(data_type.keyType), _nullable(data_type.valueType), True)
    return data_type


def arrow_type(data_type: DataType, path: str, time_zone: str = UTC) -> pa.DataType:
    """Return the Arrow type in which a task gets a column of this type. Raises SchemaError with the path of the field
    for a type that Spark does not hand over, or not in a form that a format takes.
    """
    make = next((_BY_CLASS[each] for each in type(data_type).__mro__ if each in _BY_CLASS), None)
    if make is not None:
        return make(time_zone)
    nested = next((_NESTED[each] for each in type(data_type).__mro__ if each in _NESTED), None)
    if nested is not None:
        return nested(data_type, path, time_zone)
    advice = _NO_ARROW.get(type(data_type).__name__, "cast it, or leave it out")
    raise SchemaError(f"{path} has the type {data_type.simpleString()}, which no format takes: {advice}.")


def _struct(data_type: Any, path: str, zone: str) -> pa.DataType:
    if twice := [name for name, count in Counter(data_type.names).items() if count > 1]:
        # Spark 4.0 gives the columns of a task a_0 and a_1 in place of them; 3.5 and 4.2 refuse them
        raise SchemaError(f"{path}: two fields have the name '{twice[0]}'. Rename one of them.")
    if cut := [name for name in data_type.names if "\0" in name]:  # Arrow's names end there
        raise SchemaError(f"{path}: the name {cut[0]!r} of a field has the character NUL. Rename the field.")
    return pa.struct(
        [
            _field(each.name, arrow_type(each.dataType, f"{path}.{each.name}", zone), each.nullable)
            for each in data_type.fields
        ]
    )


def _list(data_type: Any, path: str, zone: str) -> pa.DataType:
    element = arrow_type(data_type.elementType, f"{path}.element", zone)
    return pa.list_(_field("element", element, data_type.containsNull))


def _map(data_type: Any, path: str, zone: str) -> pa.DataType:
    key = arrow_type(data_type.keyType, f"{path}.key", zone)
    if pa.types.is_null(key):
        raise SchemaError(
            f"{path}.key has the type void, which no format takes: cast the map, as in CAST(map() AS MAP<STRING, INT>)."
        )
    value = arrow_type(data_type.valueType, f"{path}.value", zone)
    return pa.map_(_field("key", key, False), _field("value", value, data_type.valueContainsNull))


def _field(name: str, data_type: pa.DataType, nullable: bool) -> pa.Field:
    """Return a field. That of nulls is nullable, as pyarrow demands: in Spark the elements of `array()` are not."""
    return pa.field(name, data_type, nullable=nullable or pa.types.is_null(data_type))


_NESTED: Final[dict[type, Callable[[Any, str, str], pa.DataType]]] = {
    StructType: _struct,
    ArrayType: _list,
    MapType: _map,
    DecimalType: lambda data_type, _, __: pa.decimal128(data_type.precision, data_type.scale),
    UserDefinedType: lambda data_type, path, zone: arrow_type(data_type.sqlType(), path, zone),
}
