"""Metrics as points: names, labels, and since when each count counts. Times are ms since 1970."""

from __future__ import annotations

import math
import uuid
from typing import Any, cast

from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.telemetry_points import Key, Point, TelemetryPoints
from spark_kafka_sink.protocol.telemetry import Subscription

STARTED, FIRST, SECOND, THIRD = 1_000, 5_000, 9_000, 13_000
SENT = Key("org.apache.kafka.producer.record.send.total")
SENT_TO_A = Key("org.apache.kafka.producer.topic.record.send.total", (("topic", "A-b"),))


class Metrics:
    """Metrics that a test sets."""

    def __init__(self) -> None:
        self.own: dict[str, float] = {}
        self.topics: dict[str, dict[str, float]] = {}
        self.nodes: dict[str, dict[str, float]] = {}

    def snapshot(self, now_ms: int) -> dict[str, float]:
        return self.own

    def by_topic(self, now_ms: int) -> dict[str, dict[str, float]]:
        return self.topics

    def by_node(self, now_ms: int) -> dict[str, dict[str, float]]:
        return self.nodes


def points_of(metrics: Metrics) -> TelemetryPoints:
    return TelemetryPoints(cast("ProducerMetrics", metrics), STARTED)


def wanted(*prefixes: str, has_deltas: bool = True) -> Subscription:
    return Subscription(uuid.uuid4(), 1, prefixes or ("",), has_deltas=has_deltas)


def push(points: TelemetryPoints, wall_ms: int, **more: Any) -> dict[Key, tuple[float, int | None]]:
    """Return value and begin of each pushed point."""
    made = points.of(wanted(**more), 0, wall_ms)
    points.pushed(made, wall_ms)
    return {point.key: (point.value, point.since_ms) for point in made}


def test_names_have_dots_and_labels_have_underscores() -> None:
    """TelemetryMetricNamingConventionTest."""
    metrics = Metrics()
    metrics.own = {"record-send-total": 7.0, "io-wait-time-ns-avg": 0.5, "batch-size-max": math.nan}
    metrics.topics = {"A-b": {"byte-rate": 1.0}}
    metrics.nodes = {"node--1": {"request-latency-avg": 2.0}}
    assert points_of(metrics).of(wanted(), 0, FIRST) == [
        Point(SENT, 7.0, STARTED),
        Point(Key("org.apache.kafka.producer.io.wait.time.ns.avg"), 0.5),
        Point(Key("org.apache.kafka.producer.topic.byte.rate", (("topic", "A-b"),)), 1.0),
        Point(Key("org.apache.kafka.producer.node.request.latency.avg", (("node_id", "node--1"),)), 2.0),
    ]


def test_increases_begin_where_the_last_push_ended() -> None:
    """KafkaMetricsCollectorTest.testDeltaMetrics..."""
    metrics = Metrics()
    points = points_of(metrics)
    metrics.own = {"record-send-total": 7.0}
    assert push(points, FIRST)[SENT] == (7.0, STARTED)
    metrics.own = {"record-send-total": 9.0}
    assert push(points, SECOND)[SENT] == (2.0, FIRST)
    assert push(points, THIRD)[SENT] == (0.0, SECOND)


def test_totals_count_since_the_start() -> None:
    metrics = Metrics()
    points = points_of(metrics)
    metrics.own = {"record-send-total": 7.0}
    assert push(points, FIRST, has_deltas=False)[SENT] == (7.0, STARTED)
    metrics.own = {"record-send-total": 9.0}
    assert push(points, SECOND, has_deltas=False)[SENT] == (9.0, STARTED)


def test_count_of_a_new_topic_begins_after_the_look_that_did_not_see_it() -> None:
    metrics = Metrics()
    points = points_of(metrics)
    metrics.own = {"record-send-total": 1.0}
    push(points, FIRST)
    metrics.topics = {"A-b": {"record-send-total": 4.0}}
    assert push(points, SECOND)[SENT_TO_A] == (4.0, FIRST)
    assert push(points, THIRD)[SENT_TO_A] == (0.0, SECOND)


def test_topic_that_was_forgotten_counts_from_zero_again() -> None:
    metrics = Metrics()
    points = points_of(metrics)
    metrics.topics = {"A-b": {"record-send-total": 4.0}}
    push(points, FIRST)
    metrics.topics = {}
    push(points, SECOND)
    metrics.topics = {"A-b": {"record-send-total": 6.0}}
    assert push(points, THIRD)[SENT_TO_A] == (6.0, SECOND)


def test_topic_that_was_forgotten_between_two_looks_has_no_negative_increase() -> None:
    metrics = Metrics()
    points = points_of(metrics)
    metrics.topics = {"A-b": {"record-send-total": 4.0}}
    push(points, FIRST)
    metrics.topics = {"A-b": {"record-send-total": 3.0}}
    assert push(points, SECOND)[SENT_TO_A] == (3.0, FIRST)
    assert push(points, THIRD, has_deltas=False)[SENT_TO_A] == (3.0, FIRST)


def test_increases_of_a_refused_push_are_in_the_next_one() -> None:
    metrics = Metrics()
    points = points_of(metrics)
    metrics.own = {"record-send-total": 7.0}
    push(points, FIRST)
    metrics.own = {"record-send-total": 9.0}
    push(points, SECOND)
    points.refused()
    metrics.own = {"record-send-total": 10.0}
    assert push(points, THIRD)[SENT] == (3.0, FIRST)


def test_metric_that_is_wanted_later_has_its_whole_count_from_the_start() -> None:
    metrics = Metrics()
    points = points_of(metrics)
    metrics.own = {"record-send-total": 7.0, "byte-total": 70.0}
    points.pushed(points.of(wanted(SENT.name), 0, FIRST), FIRST)
    metrics.own = {"record-send-total": 8.0, "byte-total": 80.0}
    assert push(points, SECOND)[Key("org.apache.kafka.producer.byte.total")] == (80.0, STARTED)


def test_points_that_were_left_out_of_a_push_keep_their_increase() -> None:
    metrics = Metrics()
    points = points_of(metrics)
    metrics.own = {"record-send-total": 7.0, "byte-total": 70.0}
    made = points.of(wanted(), 0, FIRST)
    points.pushed(made[:1], FIRST)
    metrics.own = {"record-send-total": 8.0, "byte-total": 80.0}
    again = push(points, SECOND)
    assert again[SENT] == (1.0, FIRST)
    assert again[Key("org.apache.kafka.producer.byte.total")] == (80.0, STARTED)
