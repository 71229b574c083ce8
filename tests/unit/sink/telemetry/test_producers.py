"""Kafka's metrics of producers as instruments of OpenTelemetry: names, attributes, and nothing counted twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider, ObservableCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.resources import Resource
from support.fake_clock import FakeClock
from support.own_telemetry import KeptTelemetry
from support.scripted_producer import ScriptedPool, ScriptedProducer

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.sink.telemetry.producers import FRESH_MS, ProducerInstruments


class Counting(ScriptedProducer):
    """A producer with Kafka's three groups of metrics."""

    readings = 0
    has_sent = False

    def metrics(self) -> dict[str, float]:
        self.readings += 1
        return {
            "record-send-total": 7.0,
            "record-send-rate": 1.0,
            "buffer-available-bytes": 100.0,
            "request-latency-avg": math.nan,
            "io-ratio": math.nan,
        }

    def topic_metrics(self) -> dict[str, dict[str, float]]:
        metrics = {"record-send-total": 3.0, "record-send-rate": 1.0, "compression-rate": 0.5}
        return {"a": metrics, "b": metrics | {"record-send-total": 4.0}} if self.has_sent else {}

    def node_metrics(self) -> dict[str, dict[str, float]]:
        return {"node-1": {"request-latency-avg": 2.0, "request-total": 9.0}}


@pytest.fixture
def producer() -> Counting:
    return Counting(client_id="c")


def instruments(kept: KeptTelemetry, producer: Counting, clock: FakeClock) -> ProducerInstruments:
    pool = ScriptedPool(producer, clock)
    pool.acquire(ProducerConfig.from_mapping({"bootstrap.servers": "h:1"}))
    return ProducerInstruments(kept.telemetry.meter, pool, clock)


def values(kept: KeptTelemetry, name: str, *names: str) -> dict[tuple[Any, ...], float]:
    return {tuple(own.get(each) for each in names): value for own, value in kept.points(f"kafka.producer.{name}")}


def test_metrics_have_the_names_and_attributes_of_the_java_client(producer: Counting) -> None:
    kept, clock = KeptTelemetry(), FakeClock()
    producer.has_sent = True
    made = instruments(kept, producer, clock)
    made.observe_new()
    made.observe_new()
    assert values(kept, "record_send_total", "client-id", "topic") == {("c", "a"): 3.0, ("c", "b"): 4.0}
    assert values(kept, "request_latency_avg", "client-id", "node-id") == {("c", "node-1"): 2.0}
    assert values(kept, "buffer_available_bytes", "client-id", "topic") == {("c", None): 100.0}
    assert kept.names == {
        "kafka.producer.record_send_total",
        "kafka.producer.compression_rate",
        "kafka.producer.buffer_available_bytes",
        "kafka.producer.request_latency_avg",
        "kafka.producer.request_total",
    }


def test_idle_topics_do_not_bring_back_the_count_of_all_topics(producer: Counting) -> None:
    kept, clock = KeptTelemetry(), FakeClock()
    producer.has_sent = True
    made = instruments(kept, producer, clock)
    made.observe_new()
    producer.has_sent = False  # a topic that was idle for an hour is forgotten
    clock.advance(FRESH_MS + 1)
    assert values(kept, "record_send_total", "topic") == {}


def test_all_instruments_share_a_reading(producer: Counting) -> None:
    kept, clock = KeptTelemetry(), FakeClock()
    instruments(kept, producer, clock).observe_new()
    assert values(kept, "buffer_available_bytes") == {(): 100.0}
    assert producer.readings == 1
    clock.advance(FRESH_MS + 1)
    assert values(kept, "buffer_available_bytes") == {(): 100.0}
    assert producer.readings == 2


def test_metrics_of_a_new_topic_are_made_later(producer: Counting) -> None:
    kept, clock = KeptTelemetry(), FakeClock()
    made = instruments(kept, producer, clock)
    made.observe_new()
    assert values(kept, "compression_rate", "topic") == {}
    producer.has_sent = True
    clock.advance(FRESH_MS + 1)
    made.observe_new()
    assert values(kept, "compression_rate", "topic") == {("a",): 0.5, ("b",): 0.5}


class Forgetful(Counting):
    """A producer that forgets idle topics, as the real one does after an hour, and then counts from 0 again."""

    records: float | None = None
    errors = 0.0

    def topic_metrics(self) -> dict[str, dict[str, float]]:
        if self.records is None:
            return {}
        return {"rare": {"record-send-total": self.records, "record-error-total": self.errors}}


def test_total_of_a_topic_that_was_forgotten_goes_on() -> None:
    """Bug: a topic that had no record for an hour counted from 0 again, and receivers of deltas got -56 records."""
    producer, clock = Forgetful(client_id="c"), FakeClock()
    sums: dict[str, list[float]] = {}
    reader = InMemoryMetricReader({ObservableCounter: AggregationTemporality.DELTA})
    meters = MeterProvider([reader], Resource.get_empty(), shutdown_on_exit=False)
    pool = ScriptedPool(producer, clock)
    pool.acquire(ProducerConfig.from_mapping({"bootstrap.servers": "h:1"}))
    made = ProducerInstruments(meters.get_meter("test"), pool, clock)
    history: list[tuple[float | None, float]] = [
        (57.0, 3.0),
        (57.0, 0.0),
        (None, 0.0),
        (1.0, 0.0),
        (80.0, 2.0),
        (4.0, 2.0),
    ]
    for producer.records, producer.errors in history:
        clock.advance(FRESH_MS + 1)
        made.observe_new()
        data = reader.get_metrics_data()
        assert data is not None
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                assert isinstance(point, NumberDataPoint)
                sums.setdefault(metric.name, []).append(point.value)
    assert sums["kafka.producer.record_send_total"] == [57.0, 0.0, 1.0, 79.0, 4.0]
    assert sums["kafka.producer.record_error_total"] == [3.0, 0.0, 0.0, 2.0, 0.0]


def test_totals_of_a_producer_that_is_gone_are_dropped() -> None:
    """A worker makes many producers, one after the other."""
    clock = FakeClock()
    pool = ScriptedPool(lambda given: Counting(client_id=given.client_id), clock)
    made = ProducerInstruments(KeptTelemetry().telemetry.meter, pool, clock)
    known = []
    for number in range(3):
        producer = pool.acquire(ProducerConfig.from_mapping({"bootstrap.servers": "h:1", "client.id": str(number)}))
        clock.advance(FRESH_MS + 1)
        made.observe_new()
        known.append(len(made._totals._known))
        producer.has_failed = True  # type: ignore[misc]
        pool.release(producer)
    assert known == [2, 2, 2]
