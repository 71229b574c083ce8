"""A producer's metrics as points of OpenTelemetry: their names, and what a count has gained since the last push.

The names are those of the Java client (KIP-714, TelemetryMetricNamingConvention): Kafka's group and name with dots, so
that `record-send-total` of a topic is `org.apache.kafka.producer.topic.record.send.total` with the label `topic`. A
metric whose name ends with -total is a count, every other one a gauge.

Differences from the Java client:

- A gauge without events is left out, and not pushed as NaN.
- A push that a broker refuses takes nothing from the next one. In Java the increase of its counts is lost.
- Counts may change from increases to totals and back. In Java they begin anew, so that some events count twice.
- The state of connections (`connection_metrics`) is left out, because Java has no such group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.protocol.telemetry import Subscription

PRODUCER_PREFIX: Final = "org.apache.kafka.producer."
"""The beginning of every name (ClientTelemetryProvider.DOMAIN, and the group producer-metrics)."""
_COUNT_SUFFIX: Final = ".total"


class Key(NamedTuple):
    """A metric: its full name, and its labels by name."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def is_count(self) -> bool:
        return self.name.endswith(_COUNT_SUFFIX)


class Point(NamedTuple):
    """A value to push. `since_ms`, for a count: the wall time in ms since when it counts. None: a gauge."""

    key: Key
    value: float
    since_ms: int | None = None


class _Count(NamedTuple):
    """A total, and a wall time in ms."""

    total: float
    at_ms: int


class TelemetryPoints:
    """Makes the points, and remembers the counts of the last push. Only the Sender's thread uses it.

    `started_ms`: the wall time in ms when the producer began to count.
    """

    def __init__(self, metrics: ProducerMetrics, started_ms: int) -> None:
        self._metrics = metrics
        self._begun: Mapping[Key, _Count] = {}
        """Each count with its total, and the time since when it counts."""
        self._pushed: dict[Key, _Count] = {}
        """The counts of earlier pushes, each with its last total and the time of that push."""
        self._pushed_before: dict[Key, _Count] = {}
        self._looked_ms = started_ms

    def of(self, subscription: Subscription, now_ms: int, wall_ms: int) -> list[Point]:
        """Return the points that the brokers want, those of the whole producer first, then topics and brokers."""
        readings = [(key, value) for key, value in _readings(self._metrics, now_ms) if not math.isnan(value)]
        self._look({key: value for key, value in readings if key.is_count}, wall_ms)
        wanted = ((key, value) for key, value in readings if key.name.startswith(subscription.prefixes))
        point_of = self._increase if subscription.has_deltas else self._total
        return [point_of(key) if key.is_count else Point(key, value) for key, value in wanted]

    def pushed(self, points: Iterable[Point], wall_ms: int) -> None:
        """Note that these points are on their way. The next increases count from here."""
        self._pushed_before = dict(self._pushed)
        for key in (point.key for point in points if point.since_ms is not None):
            self._pushed[key] = _Count(self._begun[key].total, wall_ms)

    def refused(self) -> None:
        """Note that no broker took the last push: the next one contains its increases."""
        self._pushed = self._pushed_before

    def _look(self, totals: Mapping[Key, float], wall_ms: int) -> None:
        """Take the current totals. One that is new, or less than before, counts since the look before this one: a topic
        or broker that was idle for an hour is forgotten, and counts from 0 again.
        """
        begun = {}
        for key, total in totals.items():
            known = self._begun.get(key)
            is_new = known is None or total < known.total
            begun[key] = _Count(total, self._looked_ms if known is None or is_new else known.at_ms)
            if is_new:
                self._pushed.pop(key, None)
        self._begun = begun
        self._pushed = {key: count for key, count in self._pushed.items() if key in begun}
        self._looked_ms = wall_ms

    def _increase(self, key: Key) -> Point:
        begun = self._begun[key]
        last = self._pushed.get(key, _Count(0.0, begun.at_ms))
        return Point(key, begun.total - last.total, last.at_ms)

    def _total(self, key: Key) -> Point:
        begun = self._begun[key]
        return Point(key, begun.total, begun.at_ms)


def _readings(metrics: ProducerMetrics, now_ms: int) -> Iterator[tuple[Key, float]]:
    for name, value in metrics.snapshot(now_ms).items():
        yield Key(PRODUCER_PREFIX + _dotted(name)), value
    for group, label, by_label in (
        ("topic.", "topic", metrics.by_topic(now_ms)),
        ("node.", "node_id", metrics.by_node(now_ms)),
    ):
        for labelled, values in by_label.items():
            for name, value in values.items():
                yield Key(PRODUCER_PREFIX + group + _dotted(name), ((label, labelled),)), value


def _dotted(name: str) -> str:
    return name.replace("-", ".")
