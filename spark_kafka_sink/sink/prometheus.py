"""The producers of a process for Prometheus: what their `metrics`, `topic_metrics` and `node_metrics` return, at http://<host>:<port>/metrics.

For the option `metrics.port`. A machine has many Spark workers, each a process with producers of its own, so the option
is a range, and a worker takes the first port of it that is free. Needs the extra `prometheus`.

The server's threads are prometheus_client's; they end with the process. They read the pool, which any thread may.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from weakref import WeakSet

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spark_kafka_sink.sink.producer_pool import ProducerPool

log = logging.getLogger(__name__)

_COUNTER: Final = "-total"
_Families = dict[str, CounterMetricFamily | GaugeMetricFamily]


class _Group(NamedTuple):
    """A group of Kafka's metrics, and how Prometheus sees it."""

    name: str
    prefix: str
    labels: tuple[str, ...]


_OF_PRODUCER: Final = _Group("producer-metrics", "kafka_producer", ("client_id", "producer"))
_OF_TOPIC: Final = _Group("producer-topic-metrics", "kafka_producer_topic", ("client_id", "producer", "topic"))
_OF_NODE: Final = _Group("producer-node-metrics", "kafka_producer_node", ("client_id", "producer", "node_id"))


class PoolCollector(Collector):
    """Every metric of every producer in `pool`, read when it is asked for: `record-send-total` is
    kafka_producer_record_send_total, that of a topic kafka_producer_topic_record_send_total, and a node's
    kafka_producer_node_… Labels: the client.id, a number that no other producer of the process has, topic or node_id.
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
        return families.values()


def _add(families: _Families, group: _Group, labels: tuple[str, ...], metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        full_name = f"{group.prefix}_{name.removesuffix(_COUNTER).replace('-', '_')}"
        family = families.get(full_name)
        if family is None:
            kind = CounterMetricFamily if name.endswith(_COUNTER) else GaugeMetricFamily
            family = kind(full_name, f"{name} of Kafka's {group.name}", labels=group.labels)
            families[full_name] = family
        family.add_metric(labels, value)


_lock = threading.Lock()
_served: Final[WeakSet[ProducerPool]] = WeakSet()


def serve(pool: ProducerPool, ports: range) -> None:
    """Serve the metrics of `pool` on the first of `ports` that may be had, unless they are served already. Where none
    may be it says so once, in the log: rows are worth more than their metrics.
    """
    with _lock:
        if pool in _served:
            return
        _served.add(pool)
        registry = CollectorRegistry()
        registry.register(PoolCollector(pool))
        for port in ports:
            try:
                start_http_server(port, registry=registry)
            except OSError as error:  # taken, or not for this user
                refusal = error
                continue
            log.info("The producers of this process show their metrics at port %d, path /metrics", port)
            return
    log.warning(
        "metrics.port=%d-%d: none of these ports is free (%s), so the metrics of this process are not shown; give a"
        " range with a port for each Python worker of the machine.",
        ports.start,
        ports.stop - 1,
        refusal,
    )
