"""The driver's checks of a DataFrame's schema, in the words of Spark's own sink."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    CharType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.sink.schema import _warn_once, by_position, check_columns, needs_projection, projection

TEXT, BYTES, INT, LONG = StringType(), BinaryType(), IntegerType(), LongType()
HEADERS = ArrayType(StructType([StructField("key", TEXT), StructField("value", BYTES)]))


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, data_type) for name, data_type in columns.items()])


def test_only_written_columns_go_to_tasks() -> None:
    given = schema(extra=INT, headers=HEADERS, partition=INT, value=TEXT, key=BYTES)
    assert projection(given, "orders") == ["c3 AS `value`", "c4 AS `key`", "c2 AS `partition`", "c1 AS `headers`"]


def test_the_topic_option_wins_over_the_column() -> None:
    given = schema(value=TEXT, topic=TEXT)
    assert projection(given, "orders") == ["c0 AS `value`"]
    assert projection(given, None) == ["c0 AS `value`", "c1 AS `topic`"]


def test_only_timestamps_without_a_zone_are_cast() -> None:
    made = "CAST(c1 AS TIMESTAMP_LTZ) AS `timestamp`"
    assert projection(schema(value=TEXT, timestamp=TimestampType()), "t")[1] == "c1 AS `timestamp`"
    assert projection(schema(value=TEXT, timestamp=TimestampNTZType()), "t")[1] == made
    assert projection(schema(value=TEXT, timestamp=LONG), "t")[1] == "c1 AS `timestamp`"


def test_column_in_another_case_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: rows with the columns `Key` and `Partition` were written without a key to any partition, in silence."""
    _warn_once.cache_clear()
    given = schema(value=TEXT, Key=TEXT, PARTITION=INT, Timestamp=LONG, timestamp=LONG, Topic=TEXT, Other=TEXT)
    for _ in range(2):
        assert [*check_columns(given, "orders")] == ["value", "timestamp"]
    assert caplog.messages == [
        "The column Key is ignored, because names are case-sensitive. Rename it to key, or drop it",
        "The column PARTITION is ignored, because names are case-sensitive. Rename it to partition, or drop it",
    ]
    with pytest.raises(SchemaError, match="topic option required"):
        check_columns(given, None)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"key": TEXT, "topic": TEXT}, "Required attribute 'value' not found"),
        ({"value": TEXT}, "topic option required when no 'topic' attribute is present"),
        ({"value": INT, "topic": TEXT}, "value attribute unsupported type int. value must be a(n) string or binary"),
        ({"value": TEXT, "topic": TEXT, "key": INT}, "key attribute unsupported type int. key must be a(n) string or"),
        ({"value": TEXT, "topic": INT}, "topic attribute unsupported type int. topic must be a(n) string"),
        ({"value": TEXT, "topic": TEXT, "partition": LONG}, "partition attribute unsupported type bigint"),
        (
            {"value": TEXT, "topic": TEXT, "headers": ArrayType(TEXT)},
            "headers attribute unsupported type array<string>",
        ),
        ({"value": TEXT, "topic": TEXT, "headers": TEXT}, "headers attribute unsupported type string"),
        ({"value": TEXT, "topic": TEXT, "timestamp": DateType()}, "timestamp attribute unsupported type date"),
        (
            {"value": TEXT, "topic": TEXT, "timestamp": TEXT},
            "bigint: CAST(timestamp AS TIMESTAMP) gives it the time of",
        ),
        ({"value": TEXT, "topic": TEXT, "timestamp": TEXT}, "Rename or drop the column if it is no such time"),
    ],
)
def test_a_wrong_schema_is_refused_in_sparks_words(columns: dict[str, DataType], text: str) -> None:
    with pytest.raises(SchemaError) as refused:
        projection(schema(**columns), None)
    assert text in str(refused.value)


def test_topic_column_is_not_checked_if_option_set() -> None:
    assert projection(schema(value=TEXT, topic=INT), "orders") == ["c0 AS `value`"]


def test_names_are_case_sensitive_and_the_first_counts() -> None:
    fields = [StructField("VALUE", INT), StructField("value", TEXT), StructField("value", INT), StructField("Key", INT)]
    assert by_position(StructType(fields)) == ["c0", "c1", "c2", "c3"]
    assert projection(StructType(fields), "orders") == ["c1 AS `value`"]


@pytest.mark.parametrize(
    ("fields", "topic", "is_needed"),
    [
        ([("value", TEXT)], "orders", False),
        ([("timestamp", LONG), ("value", BYTES), ("key", TEXT), ("headers", HEADERS), ("partition", INT)], "o", False),
        ([("value", TEXT), ("topic", TEXT)], None, False),
        ([("value", TEXT), ("topic", TEXT)], "orders", True),
        ([("value", TEXT), ("extra", TEXT)], "orders", True),
        ([("value", TEXT), ("Value", TEXT)], "orders", True),
        ([("value", TEXT), ("value", TEXT)], "orders", True),
        ([("value", TEXT), ("timestamp", TimestampType())], "orders", False),
        ([("value", TEXT), ("timestamp", TimestampNTZType())], "orders", True),
    ],
)
def test_only_written_columns_need_no_projection(
    fields: list[tuple[str, DataType]], topic: str | None, is_needed: bool
) -> None:
    given = StructType([StructField(name, data_type) for name, data_type in fields])
    assert needs_projection(given, topic) == is_needed


def test_needs_projection_refuses_a_wrong_schema() -> None:
    with pytest.raises(SchemaError, match="Required attribute 'value' not found"):
        needs_projection(schema(key=TEXT), "orders")


def test_the_fields_of_headers_may_be_written_in_capitals() -> None:
    headers = ArrayType(StructType([StructField("KEY", TEXT), StructField("Value", BYTES)]))
    assert projection(schema(value=TEXT, headers=headers), "orders")[1] == "c1 AS `headers`"


def test_char_and_varchar_are_strings() -> None:
    """Bug: with spark.sql.preserveCharVarcharTypeInfo=true such columns were refused, and by rows they were written."""
    headers = ArrayType(StructType([StructField("key", CharType(3)), StructField("value", BYTES)]))
    columns = {"value": CharType(3), "key": VarcharType(5), "topic": VarcharType(9), "headers": headers}
    assert check_columns(schema(**columns), None) == columns


def test_missing_topic_is_reported_before_missing_value() -> None:
    with pytest.raises(SchemaError, match=r"^topic option required"):
        projection(schema(key=TEXT), None)
