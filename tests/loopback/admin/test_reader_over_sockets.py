"""The driver's client over real sockets, from `connect` on, against the scripted cluster."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_server import ScriptedServer

import spark_kafka_sink
from spark_kafka_sink.admin.request_client import RequestClient
from spark_kafka_sink.admin.topic_reader import TopicReader
from spark_kafka_sink.admin.topics import TopicsMetadata
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import BootstrapResolutionError, KafkaTimeoutError
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.batch import seal
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.encoder import encode_rows

PARTITIONS = 3
BATCHES = 20


def fill(cluster: ScriptedCluster) -> None:
    cluster.create_topic("t", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        for batch in range(BATCHES):
            run = encode_rows(None, [f"{partition}/{batch}" * 50], None, [1_000], 0, 1_000)
            sealed = seal([run.chunk], 1, 1_000, 1_000, codec_for("none"))
            cluster.log("t", partition).append(b"".join(sealed.buffers), 0)


@contextlib.contextmanager
def reader(servers: list[str], timeout_ms: int = 10_000) -> Iterator[TopicReader]:
    config = ProducerConfig.from_mapping({"bootstrap.servers": ",".join(servers), "client.id": "reader"})
    rng = random.Random(5)
    clock = SystemClock()
    metadata = TopicsMetadata((), 20, 200, 300_000, rng)
    client = RequestClient.connect(config, metadata, clock, rng)
    try:
        yield TopicReader(client, metadata, clock, 20, timeout_ms, max_partition_bytes=600)
    finally:
        client.close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    cluster = ScriptedCluster(3)
    fill(cluster)
    with ScriptedServer(cluster) as server:
        yield server


def count(reader: TopicReader) -> list[int]:
    counts = [0] * PARTITIONS
    for partition, records in ((found.topic_partition.partition, found.records) for found in reader.read(["t"])):
        for record in records:
            assert record.offset == counts[partition]
            counts[partition] += 1
    return counts


def test_a_topic_is_read_whole(server: ScriptedServer) -> None:
    with reader(server.bootstrap_servers) as topic_reader:
        assert count(topic_reader) == [BATCHES] * PARTITIONS


def test_unreachable_bootstrap_server_is_skipped(server: ScriptedServer) -> None:
    servers = server.bootstrap_servers
    with server.lock:
        for partition in server.cluster.topics["t"].partitions:
            partition.leader_id = 2
        server.stop_node(0)
    with reader(servers) as topic_reader:
        assert count(topic_reader) == [BATCHES] * PARTITIONS


def test_reset_connections_lose_and_duplicate_no_record(server: ScriptedServer) -> None:
    counts = [0] * PARTITIONS
    with reader(server.bootstrap_servers) as topic_reader:
        for index, found in enumerate(topic_reader.read(["t"])):
            for record in found.records:
                assert record.offset == counts[found.topic_partition.partition]
                counts[found.topic_partition.partition] += 1
            if index % 10 == 5:
                server.cut(index % 3, reset=True)
    assert counts == [BATCHES] * PARTITIONS


def test_unknown_host_is_reported_before_a_connection() -> None:
    with (
        pytest.raises(BootstrapResolutionError, match=r"bootstrap\.servers.*no-such-host\.invalid"),
        reader(["no-such-host.invalid:9092"]),
    ):
        pass


def test_closed_port_is_reported_within_the_timeout(server: ScriptedServer) -> None:
    servers = server.bootstrap_servers[:1]
    server.stop_node(0)
    with (
        reader(servers, timeout_ms=500) as topic_reader,
        pytest.raises(KafkaTimeoutError, match=r"'t'.*refused"),
    ):
        topic_reader.partitions("t")


def test_every_broker_gets_the_clients_name_and_version(server: ScriptedServer) -> None:
    with reader(server.bootstrap_servers) as found:
        count(found)
    with server.lock:
        reported = [exchange.request for exchange in server.cluster.requests_of(ApiKey.API_VERSIONS)]
    assert len(reported) >= 3
    names = {(request.client_software_name, request.client_software_version) for request in reported}
    assert names == {("spark-kafka-sink", spark_kafka_sink.__version__)}
