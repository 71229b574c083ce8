"""Client telemetry (KIP-714) of a producer with its own thread, over real sockets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fresh_process import run_script
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.telemetry import TelemetryReceiver
from support.scripted_server import ScriptedServer

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError
from spark_kafka_sink.producer import telemetry
from spark_kafka_sink.producer.futures import RecordMetadata
from spark_kafka_sink.protocol.versions import ApiKey

SENT = "record.send.total"
LIMIT_S = 20
PUSH = ApiKey.PUSH_TELEMETRY


@contextlib.contextmanager
def collecting(**subscription: Any) -> Iterator[tuple[ScriptedServer, TelemetryReceiver]]:
    cluster = ScriptedCluster(1)
    cluster.create_topic("t", partitions=1)
    receiver = cluster.telemetry = TelemetryReceiver(**subscription)
    with ScriptedServer(cluster) as server:
        yield server, receiver


def producer_at(server: ScriptedServer) -> KafkaProducer:
    return KafkaProducer({"bootstrap.servers": ",".join(server.bootstrap_servers), "linger.ms": "0"})


def test_pushes_come_by_themselves_and_the_last_one_with_the_close() -> None:
    with collecting(interval_ms=100) as (server, receiver):
        with producer_at(server) as producer:
            assert producer.client_instance_id(LIMIT_S) in receiver.instances
            for _ in range(3):
                producer.send("t", b"value").result(LIMIT_S)
            deadline = time.monotonic() + LIMIT_S
            while len(receiver.pushes) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            futures = [producer.send("t", b"value") for _ in range(4)]
        assert all(future.result(0).offset >= 0 for future in futures)
        assert [push.is_terminating for push in receiver.pushes] == [False] * (len(receiver.pushes) - 1) + [True]
        assert sum(push.value(SENT) for push in receiver.pushes) == 7


@pytest.mark.parametrize(
    ("timeout", "last_push_ms", "least"), [(None, 1_000, 0.9), (0.2, 60_000, 0.15), (0, 60_000, 0)]
)
def test_close_is_within_its_limit_if_the_broker_does_not_answer(
    timeout: float | None, last_push_ms: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "LAST_PUSH_MS", last_push_ms)
    with collecting(interval_ms=3_600_000) as (server, _):
        with server.lock:
            server.cluster.on(PUSH, faults.lose_request(), times=None)
        producer = producer_at(server)
        producer.send("t", b"value").result(LIMIT_S)
        assert producer.client_instance_id(LIMIT_S) is not None
        started = time.monotonic()
        producer.close(timeout)
        assert least <= time.monotonic() - started < LIMIT_S


def test_callback_cannot_wait_for_the_client_instance_id() -> None:
    raised: list[IllegalStateError] = []

    def ask(metadata: RecordMetadata, error: KafkaError | None) -> None:
        try:
            producer.client_instance_id(1)
        except IllegalStateError as misuse:
            raised.append(misuse)

    with collecting() as (server, _), producer_at(server) as producer:
        producer.send("t", b"value", on_completion=ask).result(LIMIT_S)
    assert len(raised) == 1


_SEND = """
import sys
from spark_kafka_sink import KafkaProducer
with KafkaProducer({"bootstrap.servers": sys.argv[1]}) as producer:
    producer.send("t", b"value").result(20)
    assert producer.client_instance_id(20 if sys.argv[2] == "asked" else 0) is not None or sys.argv[2] != "asked"
loaded = sorted(name for name in sys.modules if name.startswith(("opentelemetry", "google.protobuf")))
print("loaded", len(loaded))
"""


@pytest.mark.parametrize(("plugin", "metrics", "loads"), [(False, (), False), (True, (), False), (True, ("*",), True)])
def test_nothing_is_imported_before_a_broker_wants_metrics(
    tmp_path: Path, plugin: bool, metrics: tuple[str, ...], loads: bool
) -> None:
    with collecting(metrics=metrics) as (server, _):
        if not plugin:
            server.cluster.telemetry = None
        servers = ",".join(server.bootstrap_servers)
        done = run_script(_SEND, tmp_path, servers, "asked" if plugin else "")
    assert (done.stdout.strip() != "loaded 0") is loads
