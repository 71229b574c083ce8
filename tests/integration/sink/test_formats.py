"""Structs as JSON, Avro and Protobuf by every call that writes, at least once and exactly once. JSON is compared with
Spark's own `to_json`, Avro is read back by fastavro, Protobuf is compared with the official runtime.
"""

from __future__ import annotations

import datetime
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.generated_protobuf import message_class, message_of
from support.librdkafka import read_topic
from support.pyspark_capabilities import FAILURES, FORMAT, VARIANT

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.common.errors import SchemaError
from spark_kafka_sink.local import Admin
from spark_kafka_sink.serialization.format_options import formats_of_write
from spark_kafka_sink.serialization.schemas import resolved
from spark_kafka_sink.sink.column_formats import arrow_type
from spark_kafka_sink.sink.running_query import session_time_zone

ROWS = 300
ZONE = "America/New_York"
FIELDS = {
    "boolean": "id % 2 = 0",
    "tiny": "CAST(id % 100 AS TINYINT)",
    "small": "CAST(-id AS SMALLINT)",
    "int": "CAST(id * 7 AS INT)",
    "big": "id * 1000000007",
    "float": "CAST(id AS FLOAT) / 8",
    "double": "id * 0.125D - 3",
    "dec": "CAST(id / 3 AS DECIMAL(20, 6))",
    "wide": "CAST(-id AS DECIMAL(38, 10))",
    "text": r"concat('é\"\\\\ ', char(id % 128), id)",
    "bytes": "CAST(concat('b', id) AS BINARY)",
    "day": "date_add(DATE'1999-12-25', CAST(id AS INT))",
    "at": "timestamp_micros(id * 86400123457 - 9000000000000)",
    "local": "CAST(timestamp_micros(id * 3600123457) AS TIMESTAMP_NTZ)",
    "empty": "IF(id % 3 = 0, NULL, id)",
    "list": "IF(id % 5 = 0, NULL, array(id, NULL, id + 1))",
    "structs": "array(struct(id AS a), NULL, struct(id + 1 AS a))",
    # one entry: Spark hands the entries of a map to rows in no order
    "map": "IF(id % 4 = 0, map('n', CAST(NULL AS BIGINT)), map(concat('k', id), id))",
    "nested": "struct(id AS x, IF(id % 2 = 0, NULL, struct(CAST(id AS STRING) AS z)) AS y)",
}
"""Field → SQL over `id`."""
NEAR = {"float", "double"}
"""Numbers of these types are small fractions of two, which every Java prints alike."""

WITHOUT_NULLS = {
    **{name: sql for name, sql in FIELDS.items() if name != "local"},
    "list": "IF(id % 5 = 0, NULL, array(id, id + 1))",
    "structs": "array(struct(id AS a), struct(id + 1 AS a))",
    "map": "map(concat('k', id), id)",
}
"""The same for Protobuf, which has no timestamp without a zone, and no null in lists and maps."""

Call = Callable[[DataFrame, dict[str, Any], Path], object]


@pytest.fixture(scope="module")
def zone(spark: SparkSession) -> Iterator[None]:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", ZONE)
    spark.createDataFrame([], "a INT")  # makes this session the active one, after tests with sessions of their own
    yield
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.fixture(scope="module")
def rows(spark: SparkSession, zone: None, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    return stored(spark, FIELDS, tmp_path_factory)


@pytest.fixture(scope="module")
def rows_without_nulls(spark: SparkSession, zone: None, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    return stored(spark, WITHOUT_NULLS, tmp_path_factory)


def stored(spark: SparkSession, expressions: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    fields = ", ".join(f"{expression} AS `{name}`" for name, expression in expressions.items())
    # one row in seven is a tombstone
    made = spark.range(0, ROWS, 1, 3).selectExpr(
        "CAST(id AS STRING) AS key", f"IF(id % 7 = 6, NULL, struct({fields})) AS value"
    )
    folder = str(tmp_path_factory.mktemp("rows") / "parquet")
    made.write.parquet(folder)
    return spark.read.parquet(folder)


def run(rows: DataFrame, folder: Path, start: Callable[[Any], Any]) -> None:
    """Run a query over the files of `rows`, in one batch."""
    (source,) = {str(Path(file).parent) for file in rows.inputFiles()}
    stream = rows.sparkSession.readStream.schema(rows.schema).parquet(source)
    writer = stream.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    start(writer).start().awaitTermination()


CALLS: dict[str, Call] = {
    "writeStream.format": lambda rows, options, folder: run(
        rows, folder, lambda writer: writer.format("kafka_sink").options(**options)
    ),
    "writeStream.foreachBatch": lambda rows, options, folder: run(
        rows, folder, lambda writer: writer.foreachBatch(KafkaSink(options).write_batch)
    ),
    "writeStream.foreach": lambda rows, options, folder: run(
        rows, folder, lambda writer: writer.foreach(KafkaSink(options, schema=rows.schema))
    ),
    "write.format": lambda rows, options, folder: (
        rows.write.format("kafka_sink").options(**options).mode("append").save()
    ),
    "sink.write": lambda rows, options, folder: KafkaSink(options).write(rows),
    "foreachPartition": lambda rows, options, folder: rows.foreachPartition(
        KafkaSink(options, schema=rows.schema).write_partition
    ),
}
WITHOUT_A_DRIVER = ("writeStream.foreach", "foreachPartition")
GUARANTEES = [
    pytest.param(call, guarantee, marks=FORMAT.needed if call.endswith("format") else ())
    for guarantee in ("at-least-once", "exactly-once")
    for call in CALLS
    if guarantee == "at-least-once" or call not in WITHOUT_A_DRIVER
]


def written(
    call: Call, rows: DataFrame, broker: Admin, topic: str, folder: Path, **options: str
) -> dict[str, bytes | None]:
    """Write the rows, and return key → value of the topic."""
    given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, **options}
    call(rows, given, folder)
    records = read_topic(broker.bootstrap_servers, topic, 2)
    found = {record.key().decode(): record.value() for record in records if record.key() is not None}
    assert len(records) >= len(found) == ROWS
    return found


@pytest.mark.parametrize(("call", "guarantee"), GUARANTEES)
def test_json_is_that_of_to_json(
    rows: DataFrame, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, call: str, guarantee: str
) -> None:
    expected = {
        row.key: row.text and row.text.encode() for row in rows.selectExpr("key", "to_json(value) AS text").collect()
    }
    options = {"value.format": "json", "delivery.guarantee": guarantee}
    found = written(CALLS[call], rows, kafka_broker, new_topic(2), tmp_path, **options)
    differing = {key: (text, found[key]) for key, text in expected.items() if found[key] != text}
    assert differing == {}


def test_a_thread_has_the_time_zone_of_the_session(spark: SparkSession, zone: None) -> None:
    """Bug: a sink made in a thread of the user's own printed times in UTC: Spark has no active session there."""
    with ThreadPoolExecutor() as threads:
        assert threads.submit(session_time_zone).result(60) == session_time_zone() == ZONE


@VARIANT.needed
@pytest.mark.parametrize("call", ["writeStream.format", "write.format", "sink.write", "foreachPartition"])
def test_variants_are_those_of_to_json(
    spark: SparkSession, zone: None, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, call: str
) -> None:
    text = """concat('{"b":', id, ',"a":[true,null,"é",', id, '.25,{"c":"', id, '"}]}')"""
    variant = f"IF(id % 5 = 4, NULL, parse_json({text}))"
    made = spark.range(0, ROWS, 1, 3).selectExpr(
        "CAST(id AS STRING) AS key",
        f"struct(id, {variant} AS v, array({variant}) AS l, map('k', {variant}) AS m) AS value",
    )
    made.write.parquet(str(tmp_path / "rows"))
    rows = spark.read.parquet(str(tmp_path / "rows"))
    expected = {row.key: row.text.encode() for row in rows.selectExpr("key", "to_json(value) AS text").collect()}
    assert b'"v":{"a":[true,null,' in expected["0"]
    options = {"value.format": "json"}
    assert written(CALLS[call], rows, kafka_broker, new_topic(2), tmp_path, **options) == expected


@pytest.mark.parametrize("call", [pytest.param("write.format", marks=FORMAT.needed), "sink.write", "foreachPartition"])
def test_avro_is_read_back_by_fastavro(
    rows: DataFrame, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, call: str
) -> None:
    types = {"value": arrow_type(rows.schema["value"].dataType, "value")}
    made = resolved(formats_of_write({"value.format": "avro"}), types, None).value
    schema = fastavro.parse_schema(json.loads(made.column_format.schema))
    found = written(CALLS[call], rows, kafka_broker, new_topic(2), tmp_path, **{"value.format": "avro"})
    expected = {row.key: row.value and row.value.asDict(recursive=True) for row in rows.collect()}
    read = {
        key: None if value is None else fastavro.schemaless_reader(io.BytesIO(value), schema, None)
        for key, value in found.items()
    }
    assert {key: value and _plain(value) for key, value in read.items()} == {
        key: value and _plain(value) for key, value in expected.items()
    }


@pytest.mark.parametrize("call", [pytest.param("format", marks=FORMAT.needed), "foreachBatch"])
def test_each_batch_of_a_union_has_the_avro_schema_of_the_stream(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, call: str
) -> None:
    """Bug: by `format`, a batch with rows of the second part only had the schema of that part, without an error."""

    def part(name: str, files: int, number: str) -> DataFrame:
        for _ in range(files):
            spark.range(3).coalesce(1).write.mode("append").parquet(str(tmp_path / name))
        stream = spark.readStream.schema("id BIGINT").option("maxFilesPerTrigger", 1).parquet(str(tmp_path / name))
        return stream.selectExpr(f"struct({number} AS n) AS value")

    rows = part("nullable", 1, "id").union(part("never null", 2, "coalesce(id, 0L)"))
    topic = new_topic(1)
    options = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": topic, "value.format": "avro"}
    writer = rows.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    if call == "format":
        writer = writer.format("kafka_sink").options(**options)
    else:
        writer = writer.foreachBatch(KafkaSink(options).write_batch)  # type: ignore[arg-type]
    query = writer.start()
    query.awaitTermination()
    assert len(query.recentProgress) > 1
    values = [record.value() for record in read_topic(kafka_broker.bootstrap_servers, topic, 1)]
    assert sorted(values) == sorted([b"\0\0", b"\0\2", b"\0\4"] * 3)


def _plain(value: Any) -> Any:
    """Return a value in which equal times and bytes are equal, whichever library made them."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, Decimal):
        return value.normalize()
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone().replace(tzinfo=None)
    return value


@pytest.mark.parametrize(("call", "guarantee"), GUARANTEES)
def test_protobuf_is_that_of_the_official_runtime(
    rows_without_nulls: DataFrame,
    kafka_broker: Admin,
    new_topic: Callable[..., str],
    tmp_path: Path,
    call: str,
    guarantee: str,
) -> None:
    rows = rows_without_nulls
    options = {"value.format": "protobuf", "value.schema.message": "shop.Order"}
    data_type = arrow_type(rows.schema["value"].dataType, "value")
    made = resolved(formats_of_write(options), {"value": data_type}, None).value
    order = message_class(made.column_format.schema, "shop.Order")
    options |= {"delivery.guarantee": guarantee}
    found = written(CALLS[call], rows, kafka_broker, new_topic(2), tmp_path, **options)
    expected = {
        row.key: None
        if row.value is None
        else message_of(order(), _judged(row.value.asDict(recursive=True)), data_type).SerializeToString()
        for row in rows.collect()
    }
    differing = {key: (value, found[key]) for key, value in expected.items() if found[key] != value}
    assert differing == {}


def _judged(value: dict[str, Any]) -> dict[str, Any]:
    """Return a row as the judge takes it."""
    local = {name: each.astimezone(datetime.UTC) for name, each in value.items() if isinstance(each, datetime.datetime)}
    return {**value, "map": list(value["map"].items()), "bytes": bytes(value["bytes"]), **local}


def test_several_batches_of_large_values_keep_their_rows(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str]
) -> None:
    """The size of Arrow batches counts the texts of a struct."""
    topic = new_topic(2)
    large = spark.range(0, 400, 1, 2).selectExpr(
        "CAST(id AS STRING) AS key", "struct(id, repeat(CAST(id % 10 AS STRING), 100000) AS text) AS value"
    )
    options = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": topic, "value.format": "json"}
    for number in range(2):  # the second write knows the size of the first one's records
        report = KafkaSink(options).write(large)
        assert (report.records, number) == (400, number)
        assert report.bytes > 400 * 100_000


@pytest.mark.parametrize(
    ("expression", "options", "text"),
    [
        ("struct(id AS `a b`)", {"value.format": "avro"}, "value: Avro does not allow the name 'a b'"),
        ("struct(map(struct(id), id) AS m)", {"value.format": "json"}, r"value\.m\.key"),
        ("id", {"value.format": "json"}, "the format json takes a struct"),
        ("struct(array(array(id)) AS a)", {"value.format": "protobuf"}, r"value\.a\.element: Protobuf has no lists"),
        (
            "struct(id)",
            {"value.format": "avro", "value.schema": '{"type":"record","name":"r","fields":[]}'},
            r"value\.id",
        ),
    ],
)
def test_a_type_that_does_not_fit_is_refused_before_any_task(
    spark: SparkSession, kafka_broker: Admin, expression: str, options: dict[str, str], text: str
) -> None:
    rows = spark.range(3).selectExpr(f"{expression} AS value")
    given = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": "no-such-topic", **options}
    with pytest.raises(SchemaError, match=text):
        KafkaSink(given).write(rows)
    if FORMAT.is_there:
        with pytest.raises(FAILURES, match=text):
            rows.write.format("kafka_sink").options(**given).mode("append").save()


def test_a_row_that_does_not_fit_fails_the_write_with_its_path(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str]
) -> None:
    schema = '{"type":"record","name":"r","fields":[{"name":"a","type":"long"}]}'
    rows = spark.range(0, 100, 1, 1).selectExpr("struct(IF(id = 42, NULL, id) AS a) AS value")
    options = {"kafka.bootstrap.servers": kafka_broker.bootstrap_servers, "topic": new_topic(1)}
    with pytest.raises(FAILURES, match=r"value\.a of row 42: it is null"):
        KafkaSink({**options, "value.format": "avro", "value.schema": schema}).write(rows)
