"""A missing topic is created over real sockets, by the client that the driver keeps; then a producer writes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.sink.exactly_once import cluster as cluster_module
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.topic_creation import create_missing_topic

NOT_CONTROLLER = 41

Configure = Callable[..., SinkConfig]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(ScriptedCluster(3)) as started:
        yield started


@pytest.fixture
def configure(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    """`configure(max_block_ms, topic)` returns a configuration. The driver's clients are closed after the test."""
    kept: dict[tuple[int, object], cluster_module._Kept] = {}
    monkeypatch.setattr(cluster_module, "_CLIENTS", kept)

    def make(max_block_ms: int, topic: str = "orders") -> SinkConfig:
        servers = ",".join(server.bootstrap_servers)
        options = {"topic": topic, "topic.create": "if-missing", "topic.partitions": 2}
        return SinkConfig.from_options(
            {"kafka.bootstrap.servers": servers, "kafka.max.block.ms": max_block_ms, **options}
        )

    yield make
    for each in kept.values():
        if each.client is not None:
            each.client.close()


def test_producer_writes_to_the_topic_that_the_driver_has_created(server: ScriptedServer, configure: Configure) -> None:
    wanted = configure(20_000)
    for _ in range(2):
        create_missing_topic(wanted)
    assert len(server.cluster.topics["orders"].partitions) == 2
    assert len(server.cluster.requests_of(ApiKey.CREATE_TOPICS)) == 1
    with KafkaProducer({"bootstrap.servers": ",".join(server.bootstrap_servers)}) as producer:
        sent = producer.send("orders", value=b"v")
        producer.flush()
    assert sent.result().topic == "orders"


def test_topics_of_earlier_writes_are_not_asked_for_again(server: ScriptedServer, configure: Configure) -> None:
    """Bug: the driver's client asked for each topic that it had ever created, at every write."""
    for number in range(4):
        create_missing_topic(configure(20_000, f"orders-{number}"))
    asked = [len(exchange.request.topics or ()) for exchange in server.cluster.requests_of(ApiKey.METADATA)]
    assert max(asked) == 1


def test_brokers_that_never_create_it_cost_max_block_ms(server: ScriptedServer, configure: Configure) -> None:
    server.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(NOT_CONTROLLER), times=None)
    with pytest.raises(KafkaTimeoutError, match=r"neither found nor created within 2000 ms\. .*not the controller"):
        create_missing_topic(configure(2_000))


def test_threads_of_one_driver_share_the_client(server: ScriptedServer, configure: Configure) -> None:
    """Bug: two queries of one driver used the same connections at once. Their calls failed with "The request is done
    already", or after max.block.ms, or blamed a broker.
    """
    topics = ("orders", "returns")

    def ask(thread: int) -> None:
        wanted = configure(8_000, topics[thread % 2])
        for _ in range(10):
            create_missing_topic(wanted)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(ask, range(4))] == [None] * 4
    assert [len(server.cluster.topics[topic].partitions) for topic in topics] == [2, 2]
    assert len(server.cluster.requests_of(ApiKey.CREATE_TOPICS)) == 2
    assert len(cluster_module._CLIENTS) == 1
