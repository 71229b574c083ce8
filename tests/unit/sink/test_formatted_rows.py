"""Rows whose columns have formats, written to a scripted producer."""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    UserDefinedType,
)
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink.common.errors import KafkaError, SchemaError, SerializationError
from spark_kafka_sink.sink import kafka_sink as kafka_sink_module
from spark_kafka_sink.sink.column_formats import with_column_formats
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.formatted_rows import CHUNK_BYTES, FormattedWriter, row_writer
from spark_kafka_sink.sink.kafka_sink import KafkaSink
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.rows import PartitionWriter

NAMES = StructType([StructField("a", LongType()), StructField("b", StringType())])
FRAME = StructType([StructField("key", StringType()), StructField("value", NAMES)])
NO_NULL = '{"type":"record","name":"r","fields":[{"name":"a","type":"long"},{"name":"b","type":"string"}]}'


class Bench:
    def __init__(self, topic: str | None = "orders", schema: StructType = FRAME, **options: str) -> None:
        given = {key.replace("_", "."): text for key, text in options.items()} or {"value.format": "json"}
        config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": topic, **given})
        self.producer = ScriptedProducer()
        self.pool = ScriptedPool(self.producer)
        self.delivery = TaskDelivery(with_column_formats(config, schema), self.pool)
        self.writer = row_writer(self.delivery)

    def written(self, rows: list[Any], *names: str) -> list[tuple[Any, ...]]:
        self.writer.write(iter(rows))
        self.writer.finish()
        return self.rows(*names)

    def rows(self, *names: str) -> list[tuple[Any, ...]]:
        return [row for sent in self.producer.sent for row in sent.rows(*(names or ("value",)))]


def test_without_formats_rows_have_the_plain_writer() -> None:
    config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "t"})
    assert type(row_writer(TaskDelivery(config, ScriptedPool(ScriptedProducer())))) is PartitionWriter


def test_rows_of_any_kind_become_bytes_in_their_order() -> None:
    rows = [
        Row(key="k1", value=Row(a=1, b="x")),
        Row(value=Row(a=2, b=None), key=None),
        {"value": {"a": 3}, "key": "k3"},
        Row(key="k4", value=None),
        Row(key="k5", value=(5, "y")),
    ]
    assert Bench().written(rows, "key", "value") == [
        (b"k1", b'{"a":1,"b":"x"}'),
        (None, b'{"a":2}'),
        (b"k3", b'{"a":3}'),
        (b"k4", None),
        (b"k5", b'{"a":5,"b":"y"}'),
    ]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1_000, 20_000])
def test_no_row_is_lost_between_chunks(count: int) -> None:
    bench = Bench()
    for number in range(count):
        bench.writer.add(Row(key=str(number), value=Row(a=number, b="b")))
    bench.writer.finish()
    assert [(int(key), json.loads(value)["a"]) for key, value in bench.rows("key", "value")] == [
        (number, number) for number in range(count)
    ]
    assert bench.producer.flushes == 1
    assert bench.pool.lent == 0


def test_chunks_of_large_rows_are_small() -> None:
    bench = Bench()
    large = "x" * (CHUNK_BYTES // 4)
    rows = [Row(key="k", value=Row(a=number, b=large)) for number in range(50)]
    taken_at_once = []

    def counted() -> Iterator[Row]:
        for number, row in enumerate(rows):
            taken_at_once.append(number - sum(sent.columns.num_rows for sent in bench.producer.sent))
            yield row

    bench.writer.write(counted())
    bench.writer.finish()
    assert len(bench.rows()) == 50
    assert max(taken_at_once[40:]) <= 10


def test_a_row_counts_as_it_was_when_it_was_taken() -> None:
    """A function may return one dict for all rows."""
    one: dict[str, Any] = {"key": "k", "value": {"a": 0, "b": "b"}}

    def same() -> Iterator[Mapping[str, Any]]:
        for number in range(100):
            one["value"]["a"] = number
            yield one

    bench = Bench()
    bench.writer.write(same())
    bench.writer.finish()
    assert [json.loads(value)["a"] for (value,) in bench.rows()] == list(range(100))


@pytest.mark.parametrize("make", [list, tuple, deque, iter], ids=["list", "tuple", "deque", "iterator"])
def test_a_row_does_not_keep_the_schema_id_of_its_source(make: Callable[[list[Any]], Any]) -> None:
    given = [
        ("__value_schema_id", b"\1" + bytes(16)),
        {"key": "__value_schema_id", "value": b"2"},
        Row(value=b"3", key=b"__value_schema_id"),
        ("h", b"4"),
        ("__key_schema_id", b"5"),
    ]
    bench = Bench(value_format="avro")
    found = bench.written([{"key": "k", "value": {"a": 1, "b": None}, "headers": make(given)}], "headers")
    assert found == [([{"key": b"h", "value": b"4"}, {"key": b"__key_schema_id", "value": b"5"}],)]


def test_topic_partition_and_headers_go_with_their_row() -> None:
    schema = StructType([*FRAME.fields, StructField("topic", StringType())])
    bench = Bench(None, schema, value_format="avro")
    rows = [
        Row(topic="t2", value=Row(a=1, b=None), partition=3, headers=[Row(key="h", value=bytearray(b"1"))]),
        Row(topic="t1", value=Row(a=2, b=None), partition=None, headers=None),
    ]
    bench.writer.write(rows)
    bench.writer.finish()
    found = {sent.topic: sent.rows("value", "partition", "headers") for sent in bench.producer.sent}
    assert found == {
        "t2": [(b"\0\2\2", 3, [{"key": b"h", "value": b"1"}])],
        "t1": [(b"\0\4\2", None, [])],
    }


def test_key_and_value_may_both_have_a_format() -> None:
    schema = StructType([StructField("key", NAMES), StructField("value", NAMES)])
    bench = Bench(schema=schema, value_format="json", key_format="avro")
    rows = [Row(key=Row(a=1, b="x"), value=Row(a=2, b="y")), Row(key=None, value=Row(a=3, b=None))]
    assert bench.written(rows, "key", "value") == [(b"\0\2\0\2x", b'{"a":2,"b":"y"}'), (None, b'{"a":3}')]


@pytest.mark.parametrize(
    ("row", "error", "text"),
    [
        (Row(key="k"), SchemaError, "Required attribute 'value' not found"),
        (Row(key=1, value=None), SchemaError, "key attribute unsupported type int"),
        (("k", None), SchemaError, "Row 40 is a tuple without names"),
        (Row(key="k", value=Row(a="1", b="b")), SchemaError, r"value\.a of row 40 is a str; give an int"),
        (Row(key="k", value="text"), SchemaError, "value of row 40 is a str; give a Row"),
    ],
)
def test_a_row_that_cannot_be_written_fails_the_task(row: Any, error: type[KafkaError], text: str) -> None:
    bench = Bench()
    good = Row(key="k", value=Row(a=1, b="b"))
    with pytest.raises(error, match=text):
        bench.written([good] * 40 + [row])
    with pytest.raises(error, match=text):  # whoever goes on does not succeed
        bench.writer.finish()
    bench.writer.abandon()
    assert bench.pool.lent == 0


@pytest.mark.parametrize("row", [Row(value=None), {"Key": None, "value": None}])
def test_a_row_without_a_column_that_has_a_format_is_refused(row: Any) -> None:
    """Bug: it became a record without a key, in any partition."""
    schema = StructType([StructField("key", NAMES), StructField("value", NAMES)])
    bench = Bench(schema=schema, value_format="json", key_format="json")
    with pytest.raises(SchemaError, match=r"key\.format is set, and there is no column key in row 1: .*The columns"):
        bench.written([Row(key=None, value=None), row])
    with pytest.raises(SchemaError, match="no column key in row 1"):
        bench.writer.finish()


class PlaceType(UserDefinedType):
    """A type of a user, stored as a struct."""

    @classmethod
    def sqlType(cls) -> StructType:  # noqa: N802 - PySpark's
        return NAMES

    def serialize(self, obj: Place) -> tuple[int, str]:
        return obj.a, obj.b


@dataclass
class Place:
    a: int
    b: str
    __UDT__: ClassVar[PlaceType] = PlaceType()


def test_a_user_defined_type_is_what_it_is_stored_as() -> None:
    """Bug: Spark hands rows the user's own objects, and they were refused. By columns they are written."""
    kinds = StructType([StructField("one", PlaceType()), StructField("more", ArrayType(PlaceType()))])
    bench = Bench(schema=StructType([StructField("value", kinds)]), value_format="json")
    place = Place(1, "x")

    def rows() -> Iterator[Row]:
        yield Row(value=Row(one=place, more=[place, None]))
        place.a = 2
        yield Row(value=Row(one=None, more=None))

    bench.writer.write(rows())
    bench.writer.finish()
    assert bench.rows() == [(b'{"one":{"a":1,"b":"x"},"more":[{"a":1,"b":"x"},null]}',), (b"{}",)]


class SecretType(UserDefinedType):
    """A type whose objects are plain texts, which do not tell the type."""

    @classmethod
    def sqlType(cls) -> StringType:  # noqa: N802 - PySpark's
        return StringType()

    def serialize(self, obj: str) -> str:
        return obj.encode().hex()


SECRETS = StructType(
    [
        StructField("one", SecretType()),
        StructField("more", ArrayType(SecretType())),
        StructField("by_name", MapType(StringType(), SecretType())),
        StructField("a", StringType()),
    ]
)


def sink_of_rows(monkeypatch: pytest.MonkeyPatch, data_type: DataType) -> tuple[KafkaSink, ScriptedProducer]:
    producer = ScriptedProducer()
    monkeypatch.setattr(kafka_sink_module, "process_pool", lambda: ScriptedPool(producer))
    options = {"kafka.bootstrap.servers": "h:1", "topic": "orders", "value.format": "json"}
    return KafkaSink(options, schema=StructType([StructField("value", data_type)])), producer


@pytest.mark.parametrize("make", [Row, dict, lambda **fields: Row(*SECRETS.names)(*fields.values())])
def test_a_user_defined_type_counts_whatever_its_objects_are(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]
) -> None:
    """Bug: a type was known only by its objects. A str of one was written as it is, and by columns as it is stored."""
    sink, producer = sink_of_rows(monkeypatch, ArrayType(SECRETS))
    value = make(one="x", more=["y", None], by_name={"n": "z"}, a="a")
    pickle.loads(pickle.dumps(sink)).write_partition([Row(value=[value, None]), Row(value=None)])
    stored = b'[{"one":"78","more":["79",null],"by_name":{"n":"7a"},"a":"a"},null]'
    assert [row for sent in producer.sent for row in sent.rows("value")] == [(stored,), (None,)]


def test_a_value_that_a_user_defined_type_cannot_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, _ = sink_of_rows(monkeypatch, SECRETS)
    rows = [Row(value=None), Row(value=Row(one=5, more=None, by_name=None, a=None))]
    with pytest.raises(SchemaError, match="value of row 1 has a value that its user-defined type cannot serialize"):
        sink.write_partition(rows)


def test_a_row_that_does_not_fit_its_schema_is_named() -> None:
    bench = Bench(value_format="avro", value_schema=NO_NULL)
    rows = [Row(key="k", value=Row(a=number, b=None if number == 50 else "b")) for number in range(60)]
    with pytest.raises(SerializationError, match=r"value\.b of row 50: it is null"):
        bench.written(rows)


def test_the_writer_takes_the_type_of_the_schema() -> None:
    bench = Bench()
    assert isinstance(bench.writer, FormattedWriter)
    formats = bench.delivery.config.column_formats
    assert formats is not None
    assert formats.value is not None
    assert formats.value.data_type == pa.struct([("a", pa.int64()), ("b", pa.string())])
