"""Serves the metrics of a process's producers to Prometheus at http://<host>:<port>/metrics: all that their `metrics`,
`topic_metrics`, `node_metrics` and `connection_metrics` return.

For the options `metrics.port` and `metrics.host`. A machine has many Spark workers, each a process with its own
producers, so the option is a range, and a worker takes the first free port of it: one of each range, if sinks in one
worker have several. Needs the extra `prometheus`.

The application is prometheus_client's, the server Python's own, with bounds: at most `MAX_CONNECTIONS` at a time, each
closed when it sends nothing for `IDLE_S`. Its threads end with the process. They read the pool, which any thread may.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spark_kafka_sink.sink.producer_pool import ProducerPool

log = logging.getLogger(__name__)

_COUNTER: Final = "-total"
_DEAD_LETTERS: Final = "kafka_sink_dead_letters"
"""Prometheus adds _total."""
_Families = dict[str, CounterMetricFamily | GaugeMetricFamily]

MAX_CONNECTIONS: Final = 8
"""At a time; one more is closed at once. A Prometheus server needs one."""
IDLE_S: Final = 5.0
"""Seconds that a connection may be silent."""


class _Group(NamedTuple):
    """A group of Kafka's metrics, and how Prometheus sees it."""

    name: str
    prefix: str
    labels: tuple[str, ...]


_OF_PRODUCER: Final = _Group("producer-metrics", "kafka_producer", ("client_id", "producer"))
_OF_TOPIC: Final = _Group("producer-topic-metrics", "kafka_producer_topic", ("client_id", "producer", "topic"))
_OF_NODE: Final = _Group("producer-node-metrics", "kafka_producer_node", ("client_id", "producer", "node_id"))
_OF_CONNECTION: Final = _Group(
    "producer-connection-metrics", "kafka_producer_connection", ("client_id", "producer", "node_id", "address")
)
"""Not one of Kafka's."""


class PoolCollector(Collector):
    """Every metric of every producer in `pool`, read when it is asked for: `record-send-total` is
    kafka_producer_record_send_total, that of a topic kafka_producer_topic_record_send_total, a node's
    kafka_producer_node_…, a connection's kafka_producer_connection_… Labels: the client.id, a number that no other
    producer of the process has, topic, node_id, address. And kafka_sink_dead_letters_total, by topic. An average or
    maximum without events, NaN in `metrics`, is not served.
    """

    def __init__(self, pool: ProducerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        families: _Families = {}
        for client_id, number, producer in self._pool.producers():
            labels = (client_id, str(number))
            _add(families, _OF_PRODUCER, labels, producer.metrics())
            for topic, metrics in producer.topic_metrics().items():
                _add(families, _OF_TOPIC, (*labels, topic), metrics)
            for node_id, metrics in producer.node_metrics().items():
                _add(families, _OF_NODE, (*labels, node_id), metrics)
            for place, metrics in producer.connection_metrics().items():
                _add(families, _OF_CONNECTION, (*labels, *place), metrics)
        for topic, rows in self._pool.dead_letters().items():
            dead = CounterMetricFamily(_DEAD_LETTERS, "rows that went to the dead letters", labels=("topic",))
            families.setdefault(_DEAD_LETTERS, dead).add_metric((topic,), rows)
        return families.values()


def _add(families: _Families, group: _Group, labels: tuple[str, ...], metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        if math.isnan(value):
            continue  # no event to average: served, it would make every avg() and quantile() over workers NaN
        full_name = f"{group.prefix}_{name.removesuffix(_COUNTER).replace('-', '_')}"
        family = families.get(full_name)
        if family is None:
            kind = CounterMetricFamily if name.endswith(_COUNTER) else GaugeMetricFamily
            family = kind(full_name, f"{name} of {group.name}", labels=group.labels)
            families[full_name] = family
        family.add_metric(labels, value)


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, *_: object) -> None:
        """Log no request."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """One thread for each connection, of which there are at most MAX_CONNECTIONS."""

    daemon_threads = True

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments, **more)

    def server_bind(self) -> None:
        """Bind, without the library's look-up of a name for the address: the task waits for it, and nobody reads it."""
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread could not be started
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the library's
        log.debug("A connection to the metrics from %s failed", client_address, exc_info=True)


def start_server(host: str, port: int, registry: CollectorRegistry) -> MetricsServer:
    """Serve `registry` in its own thread. Raises OSError if the port is not free, UnicodeError for a host that no name
    can be, RuntimeError if the system starts no thread.
    """

    class Server(MetricsServer):
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

    server = make_server(host, port, make_wsgi_app(registry), Server, _Handler)
    try:
        threading.Thread(target=server.serve_forever, name="kafka-sink-metrics", daemon=True).start()
    except BaseException:
        server.server_close()
        raise
    return server


RETRY_MS: Final = 60_000
"""After this time a task looks again for a free port: the process that has it may have ended."""


_OF_ALL_PORTS: Final = (socket.gaierror, UnicodeError, RuntimeError)
"""Errors that do not depend on the port. A look-up of the host may take seconds, and the task waits for it."""


@dataclass(slots=True)
class _Shown:
    """Where the metrics of a pool are shown, and when to look again for a free port."""

    places: set[tuple[str, int]] = field(default_factory=set)
    due_ms: dict[tuple[str, range], int] = field(default_factory=dict)


_lock = threading.Lock()
_shown: Final[WeakKeyDictionary[ProducerPool, _Shown]] = WeakKeyDictionary()


def serve(pool: ProducerPool, host: str, ports: range, now_ms: int) -> None:
    """Serve the metrics of `pool` on the first free one of `ports`, unless one of them serves them already. If none is
    free, log a warning once, and try again after RETRY_MS; the rows are still written. `now_ms`: of the monotonic
    clock.
    """
    with _lock:
        shown = _shown.setdefault(pool, _Shown())
        if any(own == host and port in ports for own, port in shown.places):
            return
        due_ms = shown.due_ms.get((host, ports))
        if due_ms is not None and now_ms < due_ms:
            return
        shown.due_ms[host, ports] = now_ms + RETRY_MS
        registry = CollectorRegistry()
        registry.register(PoolCollector(pool))
        for port in ports:
            try:
                start_server(host, port, registry)
            except (OSError, UnicodeError, RuntimeError) as error:  # in use, not allowed, no address here; no thread
                refusal = error
                if isinstance(error, _OF_ALL_PORTS):
                    break
                continue
            shown.places.add((host, port))
            log.info("The producers of this process show their metrics at %s, port %d, path /metrics", host, port)
            return
    if due_ms is None:
        log.warning(
            "metrics.port=%d-%d: none of these ports is free at metrics.host=%s (%s), so the metrics of this process"
            " are not shown until one is; give a range with a port for each Python worker of the machine.",
            ports.start,
            ports.stop - 1,
            host,
            refusal,
        )
