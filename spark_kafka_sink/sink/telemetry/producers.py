"""Kafka's own metrics of a worker's producers, as instruments of OpenTelemetry.

Names and attributes are those of OpenTelemetry's instrumentation of the Java client: `record-send-total` of a topic is
`kafka.producer.record_send_total` with `client-id` and `topic`. Of a metric that Kafka has for producers and also for
topics or nodes, only the latter is sent, because a sum over both would count twice. Rates are left out: receivers
compute them of the totals. The attribute `producer` is a number that no other producer of the process has.

Read each OTEL_METRIC_EXPORT_INTERVAL, by the thread that sends: nothing is counted for it before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool

_TOTAL: Final = "-total"
_RATE: Final = "-rate"
_NO_RATE: Final = frozenset({"compression-rate"})
"""Its name ends like that of a rate, and it is a ratio."""
FRESH_MS: Final = 100
"""All instruments of one sending share one reading of the producers."""

Reading = Mapping[str, list[Observation]]


class ProducerInstruments:
    """The instruments of the producers in a pool."""

    def __init__(self, meter: Meter, pool: ProducerPool, clock: Clock) -> None:
        self._meter = meter
        self._pool = pool
        self._clock = clock
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._finer: set[str] = set()
        """Names of metrics that topics or nodes have, or had: idle ones are forgotten."""
        self._totals = _Totals()
        self._reading: Reading = {}
        self._read_ms: int | None = None

    def observe_new(self) -> None:
        """Make the instruments of metrics that had none: a producer has those of topics once it has sent a record."""
        for name in self._read().keys() - self._known:
            self._known.add(name)
            make = (
                self._meter.create_observable_counter if name.endswith(_TOTAL) else self._meter.create_observable_gauge
            )
            full_name = f"kafka.producer.{name.replace('-', '_')}"
            make(full_name, [self._observer(name)], description=f"{name} of Kafka's producers")

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: self._read().get(name, ())

    def _read(self) -> Reading:
        with self._lock:
            now_ms = self._clock.now_ms()
            if self._read_ms is None or now_ms - self._read_ms > FRESH_MS:
                self._reading, self._read_ms = _reading(self._pool, self._finer, self._totals), now_ms
            return self._reading


class _Totals:
    """Keeps totals from going down. A topic or node that was idle for an hour is forgotten, and counts from 0 when it
    returns. OpenTelemetry has no such thing: it would send the difference as an increase below 0.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], tuple[float, float]] = {}
        """By producer, name, and topic or node: what earlier counts came to, and the present one."""
        self._read: set[tuple[int, str, str]] = set()

    def of(self, producer: int, name: str, place: str, value: float) -> float:
        """Return the total that the metric has had since its producer was made."""
        key = (producer, name, place)
        self._read.add(key)
        earlier, last = self._known.get(key, (0.0, 0.0))
        if value < last:
            earlier += last
        self._known[key] = (earlier, value)
        return earlier + value

    def end_reading(self, producers: Container[int]) -> None:
        """End one reading of all `producers` that there are. What was not read is forgotten, and counts anew."""
        self._known = {
            key: (earlier, last) if key in self._read else (earlier + last, 0.0)
            for key, (earlier, last) in self._known.items()
            if key[0] in producers
        }
        self._read = set()


def _reading(pool: ProducerPool, finer: set[str], totals: _Totals) -> Reading:
    """Return the values of each metric, by Kafka's name. NaN is no value."""
    found: dict[str, list[Observation]] = {}
    numbers: set[int] = set()
    for client_id, number, producer in pool.producers():
        numbers.add(number)
        own: dict[str, Any] = {"client-id": client_id, "producer": number}
        for name, value, more in _values(producer, finer):
            if math.isnan(value) or (name.endswith(_RATE) and name not in _NO_RATE):
                continue
            place = next(iter(more.values()), "")
            shown = totals.of(number, name, place, value) if name.endswith(_TOTAL) else value
            found.setdefault(name, []).append(Observation(shown, {**own, **more}))
    totals.end_reading(numbers)
    return found


def _values(producer: Producer, finer: set[str]) -> Iterator[tuple[str, float, Mapping[str, str]]]:
    """Yield name, value and attributes."""
    by_topic, by_node = producer.topic_metrics(), producer.node_metrics()
    finer.update(name for group in (by_topic, by_node) for metrics in group.values() for name in metrics)
    for name, value in producer.metrics().items():
        if name not in finer:
            yield name, value, {}
    for attribute, group in (("topic", by_topic), ("node-id", by_node)):
        for place, metrics in group.items():
            for name, value in metrics.items():
                yield name, value, {attribute: place}
