"""Spark's writes with a schema registry: the records are read back by Confluent's deserializers. The registry's schema
changes while a query runs. In the slow tests the registry is Apicurio.
"""

from __future__ import annotations

import json
import struct
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark.sql import DataFrame, SparkSession
from support.librdkafka import read_topic
from support.pyspark_capabilities import FAILURES, FORMAT
from support.schema_registry import SchemaRegistryServer

from spark_kafka_sink.local import Admin
from spark_kafka_sink.sink.kafka_sink import KafkaSink

IN_PROCESS, APICURIO = "in process", "Apicurio"
Query = Any
"""A StreamingQuery."""


@pytest.fixture(params=[IN_PROCESS, pytest.param(APICURIO, marks=pytest.mark.slow)])
def registry(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a registry."""
    if request.param == APICURIO:
        yield request.getfixturevalue("schema_registry").url
        return
    with SchemaRegistryServer() as server:
        yield server.url


def call(url: str, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
    request = urllib.request.Request(url + path, method=method, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def schema(*fields: str) -> str:
    """The Avro record of `rows`, with optional fields more."""
    own = [{"name": "id", "type": "long"}, {"name": "name", "type": ["string", "null"]}]
    more = [{"name": name, "type": ["null", "string"], "default": None} for name in fields]
    return json.dumps({"type": "record", "name": "topLevelRecord", "fields": [*own, *more]})


def register(url: str, subject: str, written: str) -> int:
    return int(call(url, "POST", f"/subjects/{subject}/versions", {"schema": written})["id"])


def rows(spark: SparkSession, first: int, last: int) -> DataFrame:
    return spark.range(first, last, 1, 2).selectExpr(
        "struct(concat('k', id % 3) AS region) AS key",
        "IF(id % 10 = 9, NULL, struct(id, IF(id % 3 = 0, NULL, concat('näme ', id)) AS name)) AS value",
    )


def options_of(kafka: Admin, topic: str, registry: str, **more: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "topic": topic,
        "value.format": "avro",
        "key.format": "json",
        "schema.registry.url": registry,
        **more,
    }


def ids_of(servers: str, topic: str) -> dict[int, int]:
    """Return row → the id of its value's schema."""
    values = [message.value() for message in read_topic(servers, topic) if message.value() is not None]
    return {value[5] >> 1: struct.unpack(">bI", value[:5])[1] for value in values}  # a row below 64 is one byte


def check(servers: str, topic: str, registry: str, expected: DataFrame) -> None:
    """Check that Confluent's deserializers read these rows."""
    wanted = sorted(
        (row.key.region, -1 if row.value is None else row.value.id, None if row.value is None else row.value.name)
        for row in expected.collect()
    )
    found = []
    with SchemaRegistryClient({"url": registry}) as client:
        read = AvroDeserializer(client)
        for message in read_topic(servers, topic):
            key = read(message.key(), SerializationContext(topic, MessageField.KEY))
            value = read(message.value(), SerializationContext(topic, MessageField.VALUE))
            found.append((key["region"], -1 if value is None else value["id"], value and value["name"]))
    assert sorted(found, key=str) == sorted(wanted, key=str)


class Stream:
    """A query over a folder of parquet files, which is started again and again from its checkpoint."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.source = str(folder / "rows")
        self.files = 0

    def add(self, first: int, last: int) -> None:
        rows(self.spark, first, last).coalesce(1).write.mode("append").parquet(self.source)

    def start(self, sink_options: dict[str, str], *, by_format: bool = False, keeps_running: bool = False) -> Query:
        schema = rows(self.spark, 0, 1).schema
        writer = self.spark.readStream.schema(schema).parquet(self.source).writeStream
        writer = writer.option("checkpointLocation", str(self.folder / "checkpoint"))
        if not keeps_running:
            writer = writer.trigger(availableNow=True)
        if by_format:
            return writer.format("kafka_sink").options(**sink_options).start()
        return writer.foreachBatch(KafkaSink(sink_options).write_batch).start()  # type: ignore[arg-type]

    def run(self, sink_options: dict[str, str], *, by_format: bool = False) -> None:
        self.start(sink_options, by_format=by_format).awaitTermination()


@pytest.mark.parametrize("way", ["write", "foreachBatch", pytest.param("format", marks=FORMAT.needed)])
def test_confluents_deserializer_reads_key_and_value(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, registry: str, way: str
) -> None:
    topic = new_topic()
    options = options_of(kafka_broker, topic, registry, **{"key.format": "avro"})
    if way == "write":
        report = KafkaSink(options).write(rows(spark, 0, 60))
        assert report.records == 60
    else:
        stream = Stream(spark, tmp_path)
        stream.add(0, 60)
        stream.run(options, by_format=way == "format")
    check(kafka_broker.bootstrap_servers, topic, registry, rows(spark, 0, 60))
    for field in ("key", "value"):
        assert call(registry, "GET", f"/subjects/{topic}-{field}/versions/latest")["version"] == 1


def test_a_running_query_keeps_its_schema_and_takes_the_newest_when_it_starts_again(
    spark: SparkSession, kafka_broker: Admin, new_topic: Callable[..., str], tmp_path: Path, registry: str
) -> None:
    """Another program registers a newer version in the meantime."""
    topic, servers = new_topic(), kafka_broker.bootstrap_servers
    subject = f"{topic}-value"
    options = options_of(kafka_broker, topic, registry, **{"schema.registry.use.latest.version": "true"})
    first = register(registry, subject, schema())
    stream = Stream(spark, tmp_path)
    stream.add(0, 8)
    query = stream.start(options, keeps_running=True)
    try:
        query.processAllAvailable()
        second = register(registry, subject, schema("more"))
        stream.add(20, 28)
        query.processAllAvailable()
    finally:
        query.stop()
    assert second != first
    assert ids_of(servers, topic) == dict.fromkeys([*range(8), *range(20, 28)], first)
    stream.add(40, 48)
    stream.run(options)
    assert ids_of(servers, topic) == dict.fromkeys([*range(8), *range(20, 28)], first) | dict.fromkeys(
        range(40, 48), second
    )


@pytest.mark.parametrize("by_format", [False, pytest.param(True, marks=FORMAT.needed)])
def test_an_own_schema_that_no_longer_fits_is_refused_with_the_registrys_words(
    spark: SparkSession,
    kafka_broker: Admin,
    new_topic: Callable[..., str],
    tmp_path: Path,
    registry: str,
    by_format: bool,
) -> None:
    topic = new_topic()
    subject = f"{topic}-value"
    call(registry, "PUT", f"/config/{subject}", {"compatibility": "BACKWARD"})
    register(registry, subject, '{"type":"record","name":"topLevelRecord","fields":[{"name":"id","type":"long"}]}')
    stream = Stream(spark, tmp_path)
    stream.add(0, 8)
    text = rf"refuses the schema of subject {subject}: .*(?i:compatib)"
    with pytest.raises(FAILURES, match=text):
        stream.run(options_of(kafka_broker, topic, registry), by_format=by_format)
    assert read_topic(kafka_broker.bootstrap_servers, topic) == []
