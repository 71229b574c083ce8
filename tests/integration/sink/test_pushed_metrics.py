"""Metrics of Spark's Python workers, pushed to a real broker with a plugin (KIP-714)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession
from support.metrics_receiver import MetricsReceiver, subscribe

from spark_kafka_sink import KafkaSink
from spark_kafka_sink.local import EmbeddedKafka

LIMIT_S = 60
SENT = "org.apache.kafka.producer.topic.record.send.total"


def test_workers_push_each_row_of_a_write_once(
    spark: SparkSession, own_kafka: Callable[..., EmbeddedKafka], tmp_path: Path
) -> None:
    """The producers stay in their workers after the write, and push on; none is closed, so none pushes for the last
    time.
    """
    receiver = MetricsReceiver("4.3.1", tmp_path)
    kafka = own_kafka(plugins=[receiver.jar], properties=receiver.properties)
    client, topic = f"query-{uuid.uuid4().hex[:8]}", "pushed"
    subscribe(kafka.bootstrap_servers, "of-query", SENT, 200, f"client_id={client}")
    rows = spark.range(0, 1_000, 1, 2).selectExpr("CAST(id AS STRING) AS value")
    options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "kafka.client.id": client, "topic": topic}
    assert KafkaSink(options).write(rows).records == 1_000

    def pushed() -> float:
        return sum(sum(push.values.values()) for push in receiver.pushes() if push.client_id == client)

    deadline = time.monotonic() + LIMIT_S
    while pushed() < 1_000:
        assert time.monotonic() < deadline, receiver.pushes()
        time.sleep(0.1)
    pushes = [push for push in receiver.pushes() if push.client_id == client]
    assert pushed() == 1_000
    assert {key for push in pushes for key in push.values} == {(SENT, (("topic", topic),))}
    assert not any(push.is_terminating for push in pushes)
