"""The metadata names invalid listeners: records for other nodes arrive, and records for these nodes fail in time."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.sasl import SaslListener
from support.scripted_server import ScriptedServer

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import KafkaTimeoutError, SaslAuthenticationError
from spark_kafka_sink.protocol.versions import ApiKey

LIMITS = {"max.block.ms": 1_000, "delivery.timeout.ms": 1_000, "request.timeout.ms": 500, "linger.ms": 0}
PASSWORD = "canary-Pa55word"


@pytest.fixture
def cluster() -> ScriptedCluster:
    cluster = ScriptedCluster(2)
    cluster.create_topic("t", partitions=2, leaders=[0, 1])
    return cluster


@pytest.fixture
def server(cluster: ScriptedCluster) -> Iterator[ScriptedServer]:
    with ScriptedServer(cluster) as server:
        yield server


def advertise(server: ScriptedServer, host: str, port: int) -> None:
    """Add node 1 at this address to the metadata from now on."""

    def lie(values: dict[str, Any]) -> Mapping[str, Any]:
        brokers = [
            {**broker, "host": host, "port": port} if broker["node_id"] == 1 else broker for broker in values["brokers"]
        ]
        return {**values, "brokers": brokers}

    with server.lock:
        server.cluster.on(ApiKey.METADATA, faults.change(lie), times=None)


@contextlib.contextmanager
def listener(answer: bytes) -> Iterator[int]:
    """Accept every connection, send `answer`, and go on listening."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        ending = threading.Event()

        def serve() -> None:
            taken = []
            while not ending.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = server.accept()
                    connection.sendall(answer)
                    taken.append(connection)
            for connection in taken:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            ending.set()
            thread.join(10)


def check(server: ScriptedServer) -> None:
    """A record for node 0 arrives while one for node 1 fails in time."""
    with KafkaProducer({"bootstrap.servers": server.bootstrap_servers[0], **LIMITS}) as producer:
        started_s = time.monotonic()
        lost = producer.send("t", b"for the rogue", partition=1)
        assert producer.send("t", b"for the other", partition=0).result(10).offset == 0
        with pytest.raises(KafkaTimeoutError, match=r"for t-1 .*delivery\.timeout\.ms"):
            lost.result(10)
        assert time.monotonic() - started_s < 5
    assert [[record.value for record in records] for records in server.cluster.records("t")] == [[b"for the other"], []]


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("", 9092),
        ("a\0b", 9092),
        ("a b\n", 9092),
        ("x" * 300, 9092),
        ("\u00e9" * 80, 9092),
        ("..", 9092),
        ("[::1", 9092),
        ("127.0.0.1", 0),
        ("127.0.0.1", -1),
        ("127.0.0.1", 70_000),
        ("127.0.0.1", 2**31 - 1),
        ("127.0.0.1", 1),
        ("255.255.255.255", 9092),
    ],
)
def test_invalid_address_fails_only_its_own_records(server: ScriptedServer, host: str, port: int) -> None:
    advertise(server, host, port)
    check(server)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x08" + bytes(8),
        random.Random(7).randbytes(5_000),
    ],
    ids=["silence", "HTTP", "TLS", "SSH", "2 GB", "-1", "zeroes", "noise"],
)
def test_listener_of_another_protocol_fails_only_its_own_records(server: ScriptedServer, answer: bytes) -> None:
    with listener(answer) as port:
        advertise(server, "127.0.0.1", port)
        check(server)


def test_server_that_does_not_know_the_password_is_refused(server: ScriptedServer, cluster: ScriptedCluster) -> None:
    """The server accepts every user by SCRAM, to get the records. It cannot prove that it knows the password, and gets
    none.
    """
    cluster.sasl = SaslListener(users={"alice": PASSWORD})
    rogue = ScriptedCluster(2)
    rogue.create_topic("t", partitions=2, leaders=[0, 1])
    rogue.sasl = SaslListener(users={"alice": "another"})
    with ScriptedServer(rogue) as other:
        with other.lock:
            rogue.on(ApiKey.SASL_AUTHENTICATE, _let_in(rogue), times=None)
        advertise(server, "127.0.0.1", rogue.nodes[1].port)
        settings = {
            "bootstrap.servers": server.bootstrap_servers[0],
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.jaas.config": f"ScramLoginModule required username=alice password='{PASSWORD}';",
        }
        with KafkaProducer(settings) as producer:
            assert producer.send("t", b"x", partition=0).result(10).offset == 0
            with pytest.raises(SaslAuthenticationError, match="is wrong"):
                producer.send("t", b"secret", partition=1).result(10)
    assert rogue.requests_of(ApiKey.PRODUCE) == []
    tokens = b"".join(rogue.sasl.received_tokens)
    assert PASSWORD.encode() not in tokens


def _let_in(rogue: ScriptedCluster) -> faults.Hook:
    def hook(cluster: Any, exchange: Any, proceed: Any) -> Any:
        answer = proceed()
        if answer.values["error_code"]:
            return dataclasses.replace(
                answer, values={"error_code": 0, "error_message": None, "auth_bytes": b"v=AAAA"}, close=False
            )
        return answer

    return hook
