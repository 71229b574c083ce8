"""The metrics of a pool's scripted producers, as Prometheus reads them over HTTP."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial

import prometheus_client
import psutil
import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink import prometheus
from spark_kafka_sink.sink.arrow_writer import write_arrow
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool
from spark_kafka_sink.sink.prometheus import PoolCollector, serve

SERVERS = {"bootstrap.servers": "127.0.0.1:9092"}


def config(**settings: str) -> ProducerConfig:
    return ProducerConfig.from_mapping({**SERVERS, **settings})


def pool() -> ProducerPool:
    return ScriptedPool(lambda given: ScriptedProducer(client_id=given.client_id))


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop the test's servers, which in a worker end with the process."""
    started = []

    start_server = prometheus.start_server

    def start(host: str, port: int, registry: prometheus_client.CollectorRegistry) -> prometheus.MetricsServer:
        started.append(start_server(host, port, registry))
        return started[-1]

    monkeypatch.setattr(prometheus, "start_server", start)
    yield
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture
def free_ports() -> range:
    """Two consecutive ports that were free a moment ago."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return range(port, port + 2)


def samples(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_dead_letters_are_counted_by_topic() -> None:
    producers = pool()
    for topic, rows in (("dead", 2), ("other", 1), ("dead", 3)):
        producers.count_dead_letters(topic, rows)
    (family,) = PoolCollector(producers).collect()
    found = {(sample.name, sample.labels["topic"]): sample.value for sample in family.samples}
    assert found == {
        ("kafka_sink_dead_letters_total", "dead"): 5,
        ("kafka_sink_dead_letters_total", "other"): 1,
    }


def test_totals_are_counters_and_the_rest_gauges() -> None:
    producers = pool()
    producers.acquire(config(**{"client.id": "orders"}))
    ((_, _, made),) = producers.producers()
    made.send_columns("t", RecordColumns(pa.array([b"value"])))
    made.metrics = lambda: {"record-send-total": 7.0, "request-latency-avg": 1.5}
    kinds = {family.name: family.type for family in PoolCollector(producers).collect()}
    assert kinds == {
        "kafka_producer_record_send": "counter",
        "kafka_producer_request_latency_avg": "gauge",
        "kafka_producer_topic_record_error": "counter",
        "kafka_producer_topic_compression_rate": "gauge",
        "kafka_producer_node_request": "counter",
        "kafka_producer_connection_ready": "gauge",
        "kafka_producer_connection_requests_in_flight": "gauge",
    }


def test_topics_nodes_and_connections_are_labels() -> None:
    producers = pool()
    producers.acquire(config(**{"client.id": "orders"})).send_columns("t", RecordColumns(pa.array([b"value"])))
    found = {sample.name: sample.labels for family in PoolCollector(producers).collect() for sample in family.samples}
    assert found["kafka_producer_topic_record_error_total"].keys() == {"client_id", "producer", "topic"}
    assert found["kafka_producer_topic_record_error_total"]["topic"] == "t"
    assert found["kafka_producer_node_request_total"]["node_id"] == "node-1"
    connection = found["kafka_producer_connection_ready"]
    assert connection.keys() == {"client_id", "producer", "node_id", "address"}
    assert (connection["node_id"], connection["address"]) == ("node-1", "h1:9092")


def test_each_open_producer_is_a_series() -> None:
    producers = pool()
    first, second = config(**{"client.id": "same"}), config(**{"client.id": "same", "acks": "1"})
    producers.release(producers.acquire(first))
    lent = producers.acquire(second)
    lent.has_failed = True  # type: ignore[misc]
    again = producers.acquire(second)
    reported = producers.producers()
    assert [client_id for client_id, _, _ in reported] == ["same"] * 3
    assert len({number for _, number, _ in reported}) == 3
    producers.release(lent)
    assert len(producers.producers()) == 2
    producers.release(again)


def test_the_metrics_are_served_once_at_the_first_free_port(stopping: None, free_ports: range) -> None:
    producers, elsewhere = pool(), pool()
    producers.acquire(config(**{"client.id": "orders"}))
    for _ in range(2):
        serve(producers, "127.0.0.1", free_ports, 0)
    serve(elsewhere, "127.0.0.1", free_ports, 0)
    ((labels, value),) = samples(free_ports[0])["kafka_producer_batch_send_total"]
    assert (labels["client_id"], value) == ("orders", 0.0)
    assert samples(free_ports[1]) == {}  # that pool has no producer


def test_missing_free_port_is_logged_and_stops_nothing(
    stopping: None, free_ports: range, caplog: pytest.LogCaptureFixture
) -> None:
    one = range(free_ports.start, free_ports.start + 1)
    serve(pool(), "127.0.0.1", one, 0)
    without = pool()
    with caplog.at_level(logging.WARNING):
        serve(without, "127.0.0.1", one, 0)
        serve(without, "127.0.0.1", one, 0)
    (record,) = caplog.records
    assert f"metrics.port={one.start}-{one.start}: none of these ports is free" in record.getMessage()
    assert "give a range" in record.getMessage()


def test_port_that_becomes_free_later_is_taken(
    stopping: None, free_ports: range, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a worker that began while an earlier application had all ports never showed its metrics."""
    one = free_ports[:1]
    producers = pool()
    producers.acquire(config(**{"client.id": "orders"}))
    with socket.create_server(("127.0.0.1", one[0])):
        for now_ms in (0, prometheus.RETRY_MS, 2 * prometheus.RETRY_MS):
            serve(producers, "127.0.0.1", one, now_ms)
    assert len(caplog.records) == 1
    serve(producers, "127.0.0.1", one, 3 * prometheus.RETRY_MS - 1)  # each try costs a task time
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", one[0]))
    serve(producers, "127.0.0.1", one, 3 * prometheus.RETRY_MS)
    assert "kafka_producer_batch_send_total" in samples(one[0])


def test_two_sinks_of_a_worker_show_their_metrics_each_in_its_own_range(stopping: None, free_ports: range) -> None:
    """Bug: the range of the second sink was ignored in silence if tasks of the first one had run in the worker."""
    producers = pool()
    producers.acquire(config(**{"client.id": "orders"}))
    serve(producers, "127.0.0.1", free_ports[:1], 0)
    serve(producers, "127.0.0.1", free_ports, 0)  # its first port shows them already
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", free_ports[1]))
    serve(producers, "127.0.0.1", free_ports[1:], 0)
    assert all("kafka_producer_batch_send_total" in samples(port) for port in free_ports)


def test_forbidden_ports_do_not_stop_the_task(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def start(_host: str, port: int, registry: prometheus_client.CollectorRegistry) -> None:
        tried.append(port)
        if port < 1024:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(prometheus, "start_server", start)
    serve(pool(), "127.0.0.1", range(1022, 1026), 0)
    assert tried == [1022, 1023, 1024]
    serve(pool(), "127.0.0.1", range(80, 81), 0)
    (record,) = caplog.records
    assert "metrics.port=80-80" in record.getMessage()
    assert "Permission denied" in record.getMessage()


def test_metrics_are_shown_to_this_machine_only(stopping: None, free_ports: range) -> None:
    """Bug: the server listened on every interface."""
    options = {"kafka.bootstrap.servers": "h:1", "metrics.port": str(free_ports[0])}
    config = SinkConfig.from_options(options)
    assert config.metrics_host == "127.0.0.1"
    assert SinkConfig.from_options({**options, "metrics.host": " 0.0.0.0 "}).metrics_host == "0.0.0.0"
    assert config.metrics_ports is not None
    serve(pool(), config.metrics_host, config.metrics_ports, 0)
    listening = {
        each.laddr.ip
        for each in psutil.Process().net_connections("tcp")
        if each.laddr and each.laddr.port in free_ports
    }
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize("host", ["", "a host", "h:1/x"])
def test_invalid_metrics_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.host"):
        SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "metrics.port": "9250", "metrics.host": host})


def test_a_metrics_host_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no effect without metrics\.port"):
        SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "metrics.host": "127.0.0.1"})


def test_idle_connections_cost_few_threads_for_a_while(
    stopping: None, free_ports: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: 300 connections that sent half a request kept 300 threads forever."""
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.5)
    before = threading.active_count()
    serve(pool(), "127.0.0.1", free_ports, 0)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", free_ports[0]))) for _ in range(12)]
        for each in idle[:6]:
            each.sendall(b"GET /metrics HT")
        for each in idle:
            each.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""  # closed by the server
        assert threading.active_count() <= before + 1 + prometheus.MAX_CONNECTIONS
    assert samples(free_ports[0]) == {}


def test_connections_beyond_the_maximum_are_closed_at_once(stopping: None, free_ports: range) -> None:
    assert 0 < prometheus._Handler.timeout <= 10
    serve(pool(), "127.0.0.1", free_ports, 0)
    with contextlib.ExitStack() as stack:
        connect = partial(socket.create_connection, ("127.0.0.1", free_ports[0]))
        idle = [stack.enter_context(connect()) for _ in range(prometheus.MAX_CONNECTIONS)]
        more = stack.enter_context(connect())
        more.settimeout(prometheus._Handler.timeout / 2)
        with contextlib.suppress(ConnectionResetError):
            assert more.recv(1) == b""
        for each in idle:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)


def test_task_serves_metrics_if_the_option_is_set(stopping: None, free_ports: range) -> None:
    options = {"kafka.bootstrap.servers": "h:1", "topic": "orders"}
    asked = SinkConfig.from_options({**options, "metrics.port": f"{free_ports[0]}-{free_ports[-1]}"})
    rows = [pa.RecordBatch.from_arrays([pa.array(["a"])], names=["value"])]
    list(write_arrow(asked, pool(), rows))
    assert "kafka_producer_record_retry_total" in samples(free_ports[0])


def test_a_task_listens_at_the_address_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[tuple[str, range]] = []
    monkeypatch.setattr(prometheus, "serve", lambda _, host, ports, _now_ms: asked_for.append((host, ports)))
    options = {"kafka.bootstrap.servers": "h:1", "topic": "orders", "metrics.port": "9250", "metrics.host": "0.0.0.0"}
    rows = [pa.RecordBatch.from_arrays([pa.array(["a"])], names=["value"])]
    list(write_arrow(SinkConfig.from_options(options), pool(), rows))
    assert asked_for == [("0.0.0.0", range(9250, 9251))]


@pytest.mark.parametrize(("text", "ports"), [("9250", range(9250, 9251)), (" 9250-9260 ", range(9250, 9261))])
def test_option_takes_a_port_or_a_range(text: str, ports: range) -> None:
    assert SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "metrics.port": text}).metrics_ports == ports


@pytest.mark.parametrize("text", ["", "0", "9260-9250", "1-65536", "a", "9250-", "-1"])
def test_option_with_another_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^metrics\.port="):
        SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "metrics.port": text})


def test_option_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., object] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "prometheus_client" else find(name, *more)
    )
    with pytest.raises(ConfigError, match=r"pip install 'spark-kafka-sink\[prometheus\]'"):
        SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "metrics.port": "9250"})


def test_executor_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the task failed with the name of a module, after it had begun its transaction."""
    asked = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "t", "metrics.port": "9250"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"prometheus_client, on the executors too: pip install"):
        TaskDelivery(asked, pool())


def test_server_looks_up_no_name(stopping: None, free_ports: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the task waited for a resolver that does not answer, for a name that nobody reads."""
    looked_up: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", looked_up.append)
    serve(pool(), "127.0.0.1", free_ports, 0)
    assert looked_up == []
    assert samples(free_ports[0]) == {}


def test_host_that_no_name_can_be_does_not_stop_the_task(free_ports: range, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: the task failed with the UnicodeError of the look-up."""
    serve(pool(), "a..b", free_ports, 0)
    assert "none of these ports is free at metrics.host=a..b" in caplog.text


def test_host_without_an_address_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the task waited for the resolver once for each port of the range."""
    asked: list[str] = []

    def look_up(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    serve(pool(), "metrics.invalid", range(9250, 9300), 0)
    assert asked == ["metrics.invalid"]
    assert "Temporary failure in name resolution" in caplog.text


def test_system_without_threads_does_not_stop_the_task(
    free_ports: range, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the task failed, although its rows do not need the server."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    serve(pool(), "127.0.0.1", free_ports, 0)
    assert "can't start new thread" in caplog.text
    with socket.socket() as again:  # the port is free again
        again.bind(("127.0.0.1", free_ports[0]))
