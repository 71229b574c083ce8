"""The formats of a DataFrame's columns, resolved without Spark, and its types as Arrow's."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CalendarIntervalType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    YearMonthIntervalType,
)

from spark_kafka_sink.common.errors import KafkaError, SchemaError
from spark_kafka_sink.serialization import format_options, schemas
from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import ColumnFormat
from spark_kafka_sink.sink import column_formats
from spark_kafka_sink.sink.column_formats import arrow_type, check_formats, with_column_formats
from spark_kafka_sink.sink.options import SinkConfig

_HAS_GEOMETRY = hasattr(spark_types, "GeometryType")
ORDER = StructType([StructField("id", LongType(), nullable=False), StructField("name", StringType())])
REGISTRY = {"schema.registry.url": "http://127.0.0.1:9"}

EVERY = StructType(
    [
        StructField(str(number), data_type, nullable=number % 2 == 0)
        for number, data_type in enumerate(
            [
                NullType(),
                BooleanType(),
                ByteType(),
                ShortType(),
                IntegerType(),
                LongType(),
                FloatType(),
                DoubleType(),
                StringType(),
                BinaryType(),
                DateType(),
                TimestampType(),
                TimestampNTZType(),
                DayTimeIntervalType(),
                DecimalType(12, 3),
                ArrayType(TimestampType(), containsNull=False),
                MapType(StringType(), ArrayType(ORDER), valueContainsNull=False),
                ORDER,
                *([spark_types.TimeType()] if hasattr(spark_types, "TimeType") else []),
                *([spark_types.VariantType()] if hasattr(spark_types, "VariantType") else []),
            ]
        )
    ]
)


def config(**options: str) -> SinkConfig:
    given = {key.replace("_", "."): text for key, text in options.items()}
    return SinkConfig.from_options({"kafka.bootstrap.servers": "h1:9092", "topic": "orders", **given})


def frame(**columns: DataType) -> StructType:
    return StructType([StructField(name, data_type) for name, data_type in columns.items()])


def test_types_are_those_that_spark_hands_over() -> None:
    made = arrow_type(EVERY, "value", "Asia/Tokyo")
    assert made == to_arrow_type(EVERY, timezone="Asia/Tokyo")
    assert [field.nullable for field in made] == [field.nullable for field in EVERY.fields]


@pytest.mark.parametrize(
    ("data_type", "text"),
    [
        (YearMonthIntervalType(), "interval year to month, which no format takes: cast it to a string"),
        (CalendarIntervalType(), "interval, which no format takes: cast it to a string"),
        *([(spark_types.GeometryType(4326), ".*make it bytes before, by st_asbinary")] if _HAS_GEOMETRY else []),
        *([(spark_types.GeographyType(4326), ".*make it bytes before, by st_asbinary")] if _HAS_GEOMETRY else []),
    ],
)
def test_a_type_that_no_format_takes_is_refused_with_its_path(data_type: DataType, text: str) -> None:
    nested = frame(a=ArrayType(frame(b=MapType(StringType(), data_type))))
    with pytest.raises(SchemaError, match=rf"value\.a\.element\.b\.value has the type {text}"):
        arrow_type(nested, "value")


def test_two_fields_of_one_name_are_refused_with_their_path() -> None:
    """Bug: on its way to Python Spark 4.0 renames them, and JSON had the fields a_0 and a_1."""
    twins = StructType([StructField("a", LongType()), StructField("A", LongType()), StructField("a", LongType())])
    with pytest.raises(SchemaError, match=r"value\.s\.element: two fields have the name 'a'\. Rename one of them"):
        arrow_type(StructType([StructField("s", ArrayType(twins))]), "value")
    assert [field.name for field in arrow_type(StructType(twins.fields[:2]), "value")] == ["a", "A"]


def test_field_name_with_nul_is_refused_with_its_path() -> None:
    """Bug: the task failed without saying why."""
    deep = StructType([StructField("in", StructType([StructField("a\0b", LongType())]))])
    with pytest.raises(SchemaError, match=r"value\.in: the name 'a\\x00b' of a field has the character NUL"):
        arrow_type(deep, "value")


def test_an_array_without_a_type_for_its_elements_is_taken() -> None:
    """Bug: `array()` raised pyarrow's ValueError, "A null type field may not be non-nullable"."""
    empty = frame(a=ArrayType(NullType(), containsNull=False), m=MapType(StringType(), NullType(), False))
    made = arrow_type(empty, "value")
    assert made.field("a").type == pa.list_(pa.field("element", pa.null()))
    found = with_column_formats(config(value_format="json"), frame(value=empty)).column_formats
    assert found is not None
    assert found.value is not None
    encoder = ColumnEncoder(found.value.column_format, made)
    assert encoder.encode(pa.array([{"a": [], "m": []}], made)).values.to_pylist() == [b'{"a":[],"m":{}}']


def test_a_map_without_a_type_for_its_keys_is_refused_with_its_path() -> None:
    """Bug: `map()` raised the same ValueError."""
    with pytest.raises(SchemaError, match=r"value\.m\.key has the type void, which no format takes: cast the map"):
        arrow_type(frame(m=MapType(NullType(), NullType(), False)), "value")


def test_without_formats_the_configuration_is_the_same() -> None:
    own = config()
    assert with_column_formats(own, frame(value=StringType())) is own


def test_tasks_get_the_formats_and_no_registry() -> None:
    found = with_column_formats(config(value_format="avro", key_format="json"), frame(key=ORDER, value=ORDER))
    assert found.formats is None
    assert found.column_formats is not None
    assert [each.column_format.field for each in found.column_formats.columns()] == ["value", "key"]
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (frame(value=ORDER), r"key\.format is set, and there is no column key"),
        (frame(key=ORDER), "Required attribute 'value' not found"),
        (frame(value=frame(a=CalendarIntervalType()), key=ORDER), r"value\.a has the type interval"),
        (frame(value=ORDER, key=ORDER, partition=StringType()), "partition attribute unsupported type string"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(schema: StructType, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        with_column_formats(config(value_format="avro", key_format="json"), schema)


def test_only_the_last_check_asks_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> ColumnFormat:
        raise KafkaError("the registry was asked")

    monkeypatch.setattr(schemas, "registered", refuse)
    with_registry = replace(
        config(value_format="avro"), formats=format_options.formats_of({"value.format": "avro", **REGISTRY})
    )
    check_formats(with_registry, frame(value=ORDER))
    with pytest.raises(KafkaError, match="the registry was asked"):
        with_column_formats(with_registry, frame(value=ORDER))


def test_the_batches_of_a_run_share_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def registered(column_format: ColumnFormat, *_: object) -> ColumnFormat:
        asked.append(column_format)
        return replace(column_format, prefix=bytes([len(asked)]))

    monkeypatch.setattr(schemas, "registered", registered)
    monkeypatch.setattr(column_formats, "_of_streams", {})
    given = replace(
        config(value_format="avro"), formats=format_options.formats_of({"value.format": "avro", **REGISTRY})
    )

    def prefix(schema: StructType, stream: str | None) -> bytes:
        found = with_column_formats(given, schema, stream=stream).column_formats
        assert found is not None
        assert found.value is not None
        return found.value.column_format.prefix

    first, other = frame(value=ORDER), frame(value=frame(a=LongType()))
    assert [prefix(first, "run-1"), prefix(first, "run-1"), prefix(first, "run-2"), prefix(other, "run-2")] == [
        b"\1",
        b"\1",
        b"\2",
        b"\3",
    ]
    assert [prefix(first, None), prefix(first, None)] == [b"\4", b"\5"]
    for number in range(100):
        prefix(first, f"later-{number}")
    assert len(column_formats._of_streams) == 64
    assert prefix(first, "run-1") == bytes([len(asked)])
