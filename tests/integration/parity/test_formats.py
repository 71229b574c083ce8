"""Generated rows of generated types, written by the encoder and by Spark's `to_json` and `to_avro`: none may differ.

The types are the columns of one table, so that Spark runs one job for each function.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pat
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.generated_columns import PARQUET_LEAVES, random_array, random_struct

from spark_kafka_sink.serialization.column_encoder import ColumnEncoder
from spark_kafka_sink.serialization.column_format import FormatSettings, JsonOptions
from spark_kafka_sink.serialization.schemas import column_format

pytestmark = pytest.mark.slow

TYPES, ROWS = 320, 70
LEAST_ROWS = 20_000
SEED = 20_000
ZONE = "America/New_York"


def as_spark_has_it(data_type: pa.DataType) -> pa.DataType:
    """Return the type with plain lists and strings. All fields may be null, as in a parquet file that Spark reads."""
    if pat.is_struct(data_type):
        return pa.struct([pa.field(of.name, as_spark_has_it(of.type)) for of in data_type] or [("f0", pa.int32())])
    if pat.is_map(data_type):
        return pa.map_(pa.string(), as_spark_has_it(data_type.item_type))
    if pat.is_list(data_type) or pat.is_large_list(data_type) or pat.is_fixed_size_list(data_type):
        return pa.list_(as_spark_has_it(data_type.value_type))
    return data_type


def has_map(data_type: pa.DataType) -> bool:
    if pat.is_map(data_type):
        return True
    if pat.is_struct(data_type):
        return any(has_map(of.type) for of in data_type)
    return pat.is_list(data_type) and has_map(data_type.value_type)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """A table of structs."""
    columns = {}
    for number in range(TYPES):
        rng = random.Random(SEED + number)
        data_type = as_spark_has_it(random_struct(rng, 3, leaves=PARQUET_LEAVES, least=1))
        columns[f"c{number}"] = random_array(rng, data_type, ROWS)
    return pa.table(columns)


@pytest.fixture(scope="module")
def frame(spark: SparkSession, table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = tmp_path_factory.mktemp("generated") / "rows.parquet"
    pq.write_table(table, path)
    return spark.read.option("datetimeRebaseMode", "CORRECTED").parquet(str(path))


def written(frame: DataFrame, expressions: Sequence[Any], folder: Path) -> pa.Table:
    """Return what Spark makes of the rows, in their order."""
    frame.select(*expressions).write.parquet(str(folder / "made"))
    return pq.read_table(folder / "made")


def check_column_count(compared: int, judge: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{judge}: 0 differences in {compared} rows of {TYPES} types")
    assert compared >= LEAST_ROWS


# Java 17 prints some numbers with one digit more than needed (JDK-4511638). The number is the same.
NUMBER = re.compile(r"-?\d+\.\d+(?:E-?\d+)?")


def same_text(own: str, spark: str) -> bool:
    """Whether two texts are the same but for the digits of floats and doubles that are equal."""
    if own == spark:
        return True
    if NUMBER.sub("#", own) != NUMBER.sub("#", spark):
        return False
    pairs = zip(NUMBER.findall(own), NUMBER.findall(spark), strict=True)
    return all(
        one == other
        or (len(one) <= len(other) and (float(one) == float(other) or np.float32(one) == np.float32(other)))
        for one, other in pairs
    )


@pytest.mark.parametrize("ignores_nulls", [True, False])
def test_json_is_that_of_to_json(
    spark: SparkSession,
    frame: DataFrame,
    table: pa.Table,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ignores_nulls: bool,
) -> None:
    from pyspark.sql.functions import to_json

    options = {"ignoreNullFields": str(ignores_nulls).lower(), "timeZone": ZONE}
    made = written(frame, [to_json(name, options).alias(name) for name in table.column_names], tmp_path)
    json_options = JsonOptions(ignore_null_fields=ignores_nulls, time_zone=ZONE)
    compared = longer = 0
    for name in table.column_names:
        column = table[name].combine_chunks()
        used = column_format(FormatSettings("value", "json", json=json_options), column.type)
        encoded = ColumnEncoder(used, column.type).encode(column)
        assert encoded.bad_rows == ()
        for own, theirs in zip(encoded.values.to_pylist(), made[name].to_pylist(), strict=True):
            assert (own is None) == (theirs is None), (SEED, name)
            if own is not None:
                assert same_text(own.decode(), theirs), (SEED, name, own.decode(), theirs)
                longer += own.decode() != theirs
            compared += 1
    check_column_count(compared, f"to_json, with {longer} rows in which Java prints longer numbers", capsys)


@pytest.mark.usefixtures("spark_avro")
def test_avro_is_that_of_to_avro(
    spark: SparkSession, frame: DataFrame, table: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark writes the entries of a map in no order: rows with maps are read back. For a column that may be null Spark
    writes a union, so it gets structs that may not; a null stays null.
    """
    from pyspark.sql.avro.functions import to_avro
    from pyspark.sql.functions import expr, when

    made = written(
        frame,
        [when(frame[name].isNotNull(), to_avro(expr(f"struct({name}.*)"))).alias(name) for name in table.column_names],
        tmp_path,
    )
    compared = 0
    for name in table.column_names:
        column = table[name].combine_chunks()
        used = column_format(FormatSettings("value", "avro"), column.type)
        encoded = ColumnEncoder(used, column.type).encode(column)
        assert encoded.bad_rows == ()
        schema = fastavro.parse_schema(json.loads(used.schema or "")) if has_map(column.type) else None
        for own, theirs in zip(encoded.values.to_pylist(), made[name].to_pylist(), strict=True):
            if own != theirs:
                assert schema is not None, (SEED, name, column.type)
                assert read(own, schema) == read(theirs, schema), (SEED, name, column.type)
            compared += 1
    check_column_count(compared, "to_avro", capsys)


def read(value: bytes, schema: Any) -> str:
    """Return a value's content. NaN is equal to itself in a text."""
    return repr(_sorted(fastavro.schemaless_reader(io.BytesIO(value), schema, None)))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(each) for each in value] if isinstance(value, list) else value
