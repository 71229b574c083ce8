"""The bytes of a push, read by OpenTelemetry's own messages."""

from __future__ import annotations

from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    AGGREGATION_TEMPORALITY_DELTA,
    MetricsData,
)

from spark_kafka_sink.producer.otlp import encode
from spark_kafka_sink.producer.telemetry_points import Key, Point

AT_MS, SINCE_MS = 1_700_000_000_123, 1_699_999_999_000


def read(points: list[Point], labels: dict[str, str] | None = None, has_deltas: bool = True) -> MetricsData:
    data = MetricsData()
    data.ParseFromString(encode(points, labels or {}, AT_MS, has_deltas))
    return data


def test_values_times_and_labels_are_those_of_the_points() -> None:
    """SinglePointMetricTest, and KafkaMetricsCollectorTest for the kinds of metrics."""
    data = read([Point(Key("a", (("topic", "Größe"),)), 1.5), Point(Key("b.total"), 3.0, SINCE_MS)])
    (scope,) = data.resource_metrics[0].scope_metrics
    gauge, count = scope.metrics
    (point,) = gauge.gauge.data_points
    assert (gauge.name, point.as_double, point.time_unix_nano) == ("a", 1.5, AT_MS * 1_000_000)
    assert [(each.key, each.value.string_value) for each in point.attributes] == [("topic", "Größe")]
    assert not gauge.HasField("sum")
    (point,) = count.sum.data_points
    assert (count.name, point.as_double, point.start_time_unix_nano) == ("b.total", 3.0, SINCE_MS * 1_000_000)
    assert count.sum.is_monotonic
    assert count.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_DELTA


def test_totals_are_marked_as_totals() -> None:
    (metric,) = (
        read([Point(Key("b.total"), 3.0, SINCE_MS)], has_deltas=False).resource_metrics[0].scope_metrics[0].metrics
    )
    assert metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE


def test_points_of_one_name_are_in_one_metric() -> None:
    points = [Point(Key("a", (("topic", topic),)), 1.0) for topic in "xyz"]
    (metric,) = read(points).resource_metrics[0].scope_metrics[0].metrics
    assert [point.attributes[0].value.string_value for point in metric.gauge.data_points] == ["x", "y", "z"]


def test_labels_of_the_producer_stand_at_the_resource() -> None:
    """ClientTelemetryReporterTest.testProducerLabels."""
    (of_producer,) = read([Point(Key("a"), 1.0)], {"transactional_id": "t"}).resource_metrics
    assert [(each.key, each.value.string_value) for each in of_producer.resource.attributes] == [
        ("transactional_id", "t")
    ]


def test_no_point_ends_before_it_begins_when_the_clock_is_set_back() -> None:
    (metric,) = read([Point(Key("b.total"), 3.0, AT_MS + 5_000)]).resource_metrics[0].scope_metrics[0].metrics
    (point,) = metric.sum.data_points
    assert point.time_unix_nano == point.start_time_unix_nano
