"""The driver's clients log in as producers do, and raise the error of a refusal at once."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.sasl import SaslListener
from support.scripted_server import ScriptedServer

from spark_kafka_sink.admin.request_client import RequestClient
from spark_kafka_sink.admin.topic_reader import TopicReader
from spark_kafka_sink.admin.topics import TopicsMetadata
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import SaslAuthenticationError


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    cluster = ScriptedCluster(2)
    cluster.create_topic("t", partitions=2)
    cluster.sasl = SaslListener(users={"alice": "canary"})
    with ScriptedServer(cluster) as server:
        yield server


def read(server: ScriptedServer, password: str) -> list[object]:
    config = ProducerConfig.from_mapping(
        {
            "bootstrap.servers": ",".join(server.bootstrap_servers),
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": f"ScramLoginModule required username=alice password={password};",
        }
    )
    rng, clock = random.Random(5), SystemClock()
    metadata = TopicsMetadata((), 20, 200, 300_000, rng)
    client = RequestClient.connect(config, metadata, clock, rng)
    try:
        return list(TopicReader(client, metadata, clock, 20, 20_000).read(["t"]))
    finally:
        client.close()


def test_driver_client_logs_in(server: ScriptedServer) -> None:
    server.cluster.sasl.mechanisms = ["SCRAM-SHA-512"]
    assert read(server, "canary") == []
    assert set(server.cluster.sasl.handshakes) == {"SCRAM-SHA-512"}


def test_refused_login_is_raised_at_once(server: ScriptedServer) -> None:
    server.cluster.sasl.mechanisms = ["SCRAM-SHA-512"]
    started_s = time.monotonic()
    with pytest.raises(SaslAuthenticationError, match="refuses the login by SASL SCRAM-SHA-512") as caught:
        read(server, "wrong-canary")
    assert "canary" not in str(caught.value)
    assert time.monotonic() - started_s < 5
