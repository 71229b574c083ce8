"""Kafka's metrics of producers as instruments of OpenTelemetry: names, attributes, and nothing counted twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
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
