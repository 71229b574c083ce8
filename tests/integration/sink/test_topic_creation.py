"""Topics that the driver creates before any task, by each interface that has a driver, on a real broker."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.librdkafka import read_values

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.common.errors import KafkaError, UnknownTopicOrPartitionError
from spark_kafka_sink.local.admin import Admin
from spark_kafka_sink.sink.exactly_once.cluster import connect
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.topic_creation import create_missing_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def topic(kafka_broker: Admin) -> Iterator[str]:
    """The name of a topic that does not exist."""
    name = f"made-{uuid.uuid4().hex[:8]}"
    yield name
    with contextlib.suppress(UnknownTopicOrPartitionError):
        kafka_broker.delete_topic(name)


def options(broker: Admin, topic: str, **more: object) -> dict[str, object]:
    given = {key.replace("_", "."): value for key, value in more.items()}
    return {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "topic": topic,
        "topic.create": "if-missing",
        "topic.partitions": "3",
        **given,
    }


def configs(broker: Admin, topic: str, name: str) -> str | None:
    with connect(SinkConfig.from_options(options(broker, topic)).producer) as client:
        return client.creation.configs(topic, [name], client.timer(30_000))[name]


def test_topic_is_created_with_its_settings_and_left_alone_afterwards(kafka_broker: Admin, topic: str) -> None:
    create_missing_topic(SinkConfig.from_options(options(kafka_broker, topic, topic_config_retention_ms="86400000")))
    assert len(kafka_broker.describe_topic(topic).partitions) == 3
    create_missing_topic(
        SinkConfig.from_options(options(kafka_broker, topic, topic_partitions=5, topic_config_retention_ms="1"))
    )
    assert len(kafka_broker.describe_topic(topic).partitions) == 3
    assert configs(kafka_broker, topic, "retention.ms") == "86400000"


def test_brokers_choose_what_is_not_given(kafka_broker: Admin, topic: str) -> None:
    create_missing_topic(SinkConfig.from_options(options(kafka_broker, topic, topic_partitions=None)))
    (partition,) = kafka_broker.describe_topic(topic).partitions
    assert len(partition.replicas) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"topic_replication_factor": 3}, r"[Rr]eplicat.* Set topic\.replication\.factor to at most"),
        ({"topic_config_zebra": 1}, r"zebra.* Correct topic\.config\.\*\.$"),
        ({"topic_config_retention_ms": "soon"}, r"retention\.ms.* Correct topic\.config\.\*\.$"),
    ],
)
def test_brokers_refuse_in_their_words(kafka_broker: Admin, topic: str, more: dict[str, object], words: str) -> None:
    with pytest.raises(KafkaError, match=rf"^Topic {topic}: .*{words}"):
        create_missing_topic(SinkConfig.from_options(options(kafka_broker, topic, **more)))


def test_threads_of_one_driver_create_their_topics(kafka_broker: Admin, topic: str) -> None:
    """Bug: threads used the connections that the driver keeps at once. Their writes failed before any task."""
    topics = [topic, f"{topic}-other"]

    def ask(thread: int) -> None:
        wanted = SinkConfig.from_options(options(kafka_broker, topics[thread % 2]))
        for _ in range(10):
            create_missing_topic(wanted)

    try:
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(ask, range(4))] == [None] * 4
        assert [len(kafka_broker.describe_topic(each).partitions) for each in topics] == [3, 3]
    finally:
        kafka_broker.delete_topic(topics[1])


def test_several_drivers_create_one_topic(kafka_broker: Admin, topic: str) -> None:
    failures: list[BaseException] = []
    config = SinkConfig.from_options(options(kafka_broker, topic)).producer
    start = threading.Barrier(4)

    def driver() -> None:
        try:
            with connect(config) as client:
                start.wait(30)
                client.creation.create_missing(topic, 3, None, {}, client.timer(30_000))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=driver) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(kafka_broker.describe_topic(topic).partitions) == 3


@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
@pytest.mark.parametrize("interface", ["write", "write_batch", "format", "stream"])
def test_rows_arrive_in_a_topic_that_was_missing(
    kafka_broker: Admin, spark: SparkSession, topic: str, tmp_path: Path, interface: str, guarantee: str
) -> None:
    given = {**options(kafka_broker, topic), "delivery.guarantee": guarantee, "kafka.max.block.ms": "30000"}
    text = {key: str(value) for key, value in given.items()}
    frame = spark.range(20, numPartitions=2).selectExpr("CAST(id AS STRING) AS value")
    if interface == "write":
        KafkaSink(given).write(frame)
    elif interface == "format":
        frame.write.format("kafka_sink").options(**text).mode("append").save()
    else:
        frame.write.parquet(str(tmp_path / "in"))
        writer = spark.readStream.schema("value STRING").parquet(str(tmp_path / "in")).writeStream
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        if interface == "stream":
            query = writer.format("kafka_sink").options(**text).start()
        else:
            query = writer.foreachBatch(KafkaSink(given).write_batch).start()  # type: ignore[arg-type]
        assert query.awaitTermination(120)
    assert len(kafka_broker.describe_topic(topic).partitions) == 3
    assert sorted(read_values(kafka_broker.bootstrap_servers, topic, 3)) == sorted(map(str, range(20)))
