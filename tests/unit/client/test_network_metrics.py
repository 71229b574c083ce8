"""The metrics of a client's connections, with Kafka's names."""

from __future__ import annotations

import math

import pytest

from spark_kafka_sink.client.network_metrics import NetworkMetrics
from spark_kafka_sink.common.windows import Windows
from spark_kafka_sink.network.selector import SelectorSample

START_MS = 1_000_000
LATER_MS = START_MS + 40_000
"""40 seconds after the first count: rates are over this time."""
OPEN = 3

OF_ALL_NODES = {
    "outgoing-byte-rate": 400 / 40,
    "outgoing-byte-total": 400,
    "incoming-byte-rate": 90 / 40,
    "incoming-byte-total": 90,
    "request-rate": 4 / 40,
    "request-total": 4,
    "request-size-avg": 100,
    "request-size-max": 200,
    "response-rate": 2 / 40,
    "response-total": 2,
    "network-io-rate": 6 / 40,
    "network-io-total": 6,
    "connection-count": OPEN,
    "connection-creation-rate": 5 / 40,
    "connection-creation-total": 5,
    "connection-close-rate": 2 / 40,
    "connection-close-total": 2,
    "successful-authentication-rate": 6 / 40,
    "successful-authentication-total": 6,
    "failed-authentication-rate": 7 / 40,
    "failed-authentication-total": 7,
    "select-rate": 8 / 40,
    "select-total": 8,
    "io-time-ns-avg": 4_000_000_000 / 8,
    "io-time-ns-total": 4_000_000_000,
    "io-ratio": 4 / 40,
    "io-wait-time-ns-avg": 20_000_000_000 / 8,
    "io-wait-time-ns-total": 20_000_000_000,
    "io-wait-ratio": 20 / 40,
}
OF_NODE_1 = {
    "outgoing-byte-rate": 350 / 40,
    "outgoing-byte-total": 350,
    "incoming-byte-rate": 90 / 40,
    "incoming-byte-total": 90,
    "request-rate": 3 / 40,
    "request-total": 3,
    "request-size-avg": 350 / 3,
    "request-size-max": 200,
    "response-rate": 2 / 40,
    "response-total": 2,
    "request-latency-avg": 20,
    "request-latency-max": 30,
}


def counted() -> NetworkMetrics:
    """Three requests and two answers of node 1, and one request of node 2 without an answer."""
    metrics = NetworkMetrics()
    for size in (100, 200, 50):
        metrics.request_sent("1", size, START_MS)
    metrics.request_sent("2", 50, START_MS)
    for size, latency_ms in ((60, 10), (30, 30)):
        metrics.response_received("1", size, START_MS)
        metrics.request_answered("1", latency_ms, START_MS)
    return metrics


def polls() -> Windows[SelectorSample]:
    windows = Windows(SelectorSample)
    sample = windows.at(START_MS)
    sample.connections, sample.closed, sample.authentications, sample.failed_authentications = 5, 2, 6, 7
    sample.selects, sample.wait_ms, sample.io_ms = 8, 20_000, 4_000
    return windows


def test_metrics_of_all_nodes_are_made_from_frames_and_polls() -> None:
    assert counted().snapshot(polls(), OPEN, LATER_MS) == pytest.approx(OF_ALL_NODES)


def test_metrics_of_a_node_are_made_from_its_own_frames() -> None:
    by_node = counted().by_node(LATER_MS)
    assert by_node["node-1"] == pytest.approx(OF_NODE_1)
    assert by_node["node-2"]["outgoing-byte-total"] == 50
    assert math.isnan(by_node["node-2"]["request-latency-avg"]), "it has not answered"


def test_totals_outlive_the_windows_of_rates() -> None:
    long_after_ms = START_MS + 600_000
    metrics = counted().snapshot(polls(), OPEN, long_after_ms)
    for name, value in metrics.items():
        if name.endswith("-total") or name == "connection-count":
            assert value == OF_ALL_NODES[name], name
        elif name.endswith(("-rate", "-ratio")):
            assert value == 0, name
        else:
            assert math.isnan(value), name
