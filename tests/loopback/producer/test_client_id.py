"""The client.id in the brokers' requests, over real sockets."""

from __future__ import annotations

import logging
import re

import pytest
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer

from spark_kafka_sink import KafkaProducer


def test_every_request_and_the_log_have_the_generated_client_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = ScriptedCluster(1)
    cluster.create_topic("t", partitions=1)
    with (
        ScriptedServer(cluster) as server,
        KafkaProducer({"bootstrap.servers": ",".join(server.bootstrap_servers)}) as producer,
    ):
        producer.send("t", b"value").result(timeout=20)
    assert re.fullmatch(r"producer-\d+", producer.client_id)
    assert {exchange.client_id for exchange in cluster.requests} == {producer.client_id}
    assert f"Producer {producer.client_id} (client.id) has started" in caplog.text
