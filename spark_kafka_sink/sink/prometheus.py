"""The producers of a process for Prometheus: what `producer.metrics()` says, at http://<host>:<port>/metrics.

For the option `metrics.port`. A machine has many Spark workers, each a process with producers of its own, so the option
is a range, and a worker takes the first port of it that is free. Needs the extra `prometheus`.

The server's threads are prometheus_client's; they end with the process. They read the pool, which any thread may.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final
from weakref import WeakSet

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spark_kafka_sink.sink.producer_pool import ProducerPool

log = logging.getLogger(__name__)

_LABELS: Final = ("client_id", "producer")
_COUNTER: Final = "-total"


class PoolCollector(Collector):
    """Every metric of every producer in `pool`, read when it is asked for: `record-send-total` is
    kafka_producer_record_send_total. Labels: the client.id, and a number that no other producer of the process has.
    """

    def __init__(self, pool: ProducerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for client_id, number, metrics in self._pool.metrics():
            for name, value in metrics.items():
                family = families.get(name)
                if family is None:
                    family = families[name] = _family(name)
                family.add_metric((client_id, str(number)), value)
        return families.values()


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily:
    full_name = f"kafka_producer_{name.removesuffix(_COUNTER).replace('-', '_')}"
    kind = CounterMetricFamily if name.endswith(_COUNTER) else GaugeMetricFamily
    return kind(full_name, f"{name} of Kafka's producer metrics", labels=_LABELS)


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
