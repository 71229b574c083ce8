"""A missing topic is created over real sockets, by the client that the driver keeps; then a producer writes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.topic_creation import create_missing_topic

NOT_CONTROLLER = 41


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(ScriptedCluster(3)) as started:
        yield started


@pytest.fixture
def configure(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], SinkConfig]]:
    """`configure(max_block_ms)` returns a configuration, and makes the driver's client for it."""
    clients: list[ClusterClient] = []

    def make(max_block_ms: int) -> SinkConfig:
        servers = ",".join(server.bootstrap_servers)
        topic = {"topic": "orders", "topic.create": "if-missing", "topic.partitions": 2}
        found = SinkConfig.from_options(
            {"kafka.bootstrap.servers": servers, "kafka.max.block.ms": max_block_ms, **topic}
        )
        clients.append(cluster_module.connect(found.producer))
        monkeypatch.setattr(cluster_module, "kept_client", lambda _: clients[-1])
        return found

    yield make
    for client in clients:
        client.close()


def test_producer_writes_to_the_topic_that_the_driver_has_created(
    server: ScriptedServer, configure: Callable[[int], SinkConfig]
) -> None:
    wanted = configure(20_000)
    for _ in range(2):
        create_missing_topic(wanted)
    assert len(server.cluster.topics["orders"].partitions) == 2
    assert len(server.cluster.requests_of(ApiKey.CREATE_TOPICS)) == 1
    with KafkaProducer({"bootstrap.servers": ",".join(server.bootstrap_servers)}) as producer:
        sent = producer.send("orders", value=b"v")
        producer.flush()
    assert sent.result().topic == "orders"


def test_brokers_that_never_create_it_cost_max_block_ms(
    server: ScriptedServer, configure: Callable[[int], SinkConfig]
) -> None:
    server.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(NOT_CONTROLLER), times=None)
    with pytest.raises(KafkaTimeoutError, match=r"neither found nor created within 2000 ms\. .*not the controller"):
        create_missing_topic(configure(2_000))
