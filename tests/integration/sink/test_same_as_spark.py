"""JSON and Avro schemas of generated rows are those that Spark itself makes: to_json, and the schema of to_avro."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.generated_columns import PARQUET_LEAVES, random_array, random_struct

from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import FormatSettings, JsonOptions
from spark_kafka_sink.serialization.schemas import column_format

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NUMBER = re.compile(r"-?\d+\.\d+(?:E-?\d+)?")
ZONE = "America/New_York"


def spark_type(data_type: pa.DataType) -> pa.DataType:
    """The type without what Spark does not read: large lists, lists of one size, and structs without fields."""
    if pa.types.is_struct(data_type):
        if data_type.num_fields == 0:
            return pa.int32()
        return pa.struct([pa.field(of.name, spark_type(of.type), of.nullable) for of in data_type])
    if pa.types.is_map(data_type):
        item = data_type.item_field
        return pa.map_(pa.string(), pa.field("value", spark_type(item.type), item.nullable))
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type) or pa.types.is_fixed_size_list(data_type):
        of = data_type.value_field
        return pa.list_(pa.field("element", spark_type(of.type), of.nullable))
    return data_type


def generated(seed: int, rows: int) -> pa.Array:
    rng = random.Random(seed)
    return random_array(rng, spark_type(random_struct(rng, 2, leaves=PARQUET_LEAVES, least=2)), rows)


@pytest.fixture
def zone(spark: SparkSession) -> Iterator[str]:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", ZONE)
    yield ZONE
    spark.conf.set("spark.sql.session.timeZone", before or "UTC")


def same(ours: str, sparks: str) -> bool:
    """Whether two texts are equal, but for numbers that an older Java prints with one digit more."""
    if ours == sparks:
        return True
    if NUMBER.sub("#", ours) != NUMBER.sub("#", sparks):
        return False
    pairs = zip(NUMBER.findall(ours), NUMBER.findall(sparks), strict=True)
    return all(one == other or is_same_number(one, other) for one, other in pairs)


def is_same_number(one: str, other: str) -> bool:
    floats = pa.array([float(one), float(other)], pa.float64())
    narrow = floats.cast(pa.float32())
    return bool(floats[0].as_py() == floats[1].as_py() or (len(one) < 15 and narrow[0].as_py() == narrow[1].as_py()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ignore", [True, False])
def test_json_is_that_of_to_json(spark: SparkSession, zone: str, seed: int, ignore: bool, tmp_path: Path) -> None:
    from pyarrow import parquet
    from pyspark.sql import functions as f

    column = generated(seed, 50)
    parquet.write_table(pa.table({"n": pa.array(range(50), pa.int64()), "value": column}), tmp_path / "rows.parquet")
    made = spark.read.option("datetimeRebaseMode", "CORRECTED").parquet(str(tmp_path))
    options = {"ignoreNullFields": str(ignore).lower()}
    expected = [row.text for row in made.orderBy("n").select(f.to_json("value", options).alias("text")).collect()]
    settings = FormatSettings("value", "json", json=JsonOptions(ignore_null_fields=ignore, time_zone=zone))
    encoded = ColumnEncoder(column_format(settings, column.type), column.type).encode(column)
    assert encoded.bad_rows == ()
    for value, text in zip(encoded.values.to_pylist(), expected, strict=True):
        if value is None or text is None:
            assert value is text
        else:
            assert same(value.decode(), text), f"ours:  {value.decode()}\nSpark: {text}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_avro_schema_is_that_of_spark(spark: SparkSession, seed: int) -> None:
    from pyspark.sql.pandas.types import from_arrow_type

    data_type = generated(seed, 0).type
    jvm: Any = spark._jvm
    of_spark = jvm.org.apache.spark.sql.types.DataType.fromJson(from_arrow_type(data_type, True).json())
    expected = jvm.org.apache.spark.sql.avro.SchemaConverters.toAvroType(of_spark, False, "topLevelRecord", "")
    schema = column_format(FormatSettings("value", "avro"), data_type).schema
    assert json.loads(schema or "") == json.loads(expected.toString())
