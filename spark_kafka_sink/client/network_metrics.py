"""The metrics of a client's connections, for all nodes and for each, with the Java client's names.

The I/O thread counts: a few additions for each frame, none for a record. Any thread may read. Reference:
org.apache.kafka.common.network.Selector.SelectorMetrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from spark_kafka_sink.client.connection_states import ConnectionReading
from spark_kafka_sink.common.windows import Reading, Sample, Windows, WindowsByKey, average, peak
from spark_kafka_sink.network.selector import SelectorSample

NS_PER_MS: Final = 1_000_000
_MOST_NAMED: Final = 3


@dataclass(slots=True)
class FrameSample(Sample):
    """Frames that were sent or received whole. Sizes are bytes and include the frame's size field. Times are ms."""

    requests: int = 0
    request_bytes: int = 0
    responses: int = 0
    response_bytes: int = 0
    answered: int = 0
    """Requests of the client's user with a response."""
    latency_ms: int = 0
    max_request_bytes: int = 0
    max_latency_ms: int = 0


class NetworkMetrics:
    """Counts the frames of all nodes."""

    def __init__(self) -> None:
        self._all = Windows(FrameSample)
        self._by_node = WindowsByKey(FrameSample)

    def request_sent(self, node_id: str, size: int, now_ms: int) -> None:
        """A frame of `size` bytes was sent whole."""
        for sample in (self._all.at(now_ms), self._by_node.at(node_id, now_ms)):
            sample.requests += 1
            sample.request_bytes += size
            if size > sample.max_request_bytes:
                sample.max_request_bytes = size

    def response_received(self, node_id: str, size: int, now_ms: int) -> None:
        """A frame of `size` bytes was received whole."""
        for sample in (self._all.at(now_ms), self._by_node.at(node_id, now_ms)):
            sample.responses += 1
            sample.response_bytes += size

    def request_answered(self, node_id: str, latency_ms: int, now_ms: int) -> None:
        """A response to a request of the client's user came, `latency_ms` after the request was made."""
        sample = self._by_node.at(node_id, now_ms)
        sample.answered += 1
        sample.latency_ms += latency_ms
        if latency_ms > sample.max_latency_ms:
            sample.max_latency_ms = latency_ms

    def snapshot(self, selector: Windows[SelectorSample], connection_count: int, now_ms: int) -> dict[str, float]:
        """Return the metrics of all nodes together (group producer-metrics), with the selector's counts."""
        frames, polls = self._all.read(now_ms), selector.read(now_ms)
        recent, total, per_s = polls.recent, polls.total, 1 / polls.window_s
        operations = frames.recent.requests + frames.recent.responses
        return {
            **_of_frames(frames),
            "network-io-rate": operations / frames.window_s,
            "network-io-total": float(frames.total.requests + frames.total.responses),
            "connection-count": float(connection_count),
            "connection-creation-rate": recent.connections * per_s,
            "connection-creation-total": float(total.connections),
            "connection-close-rate": recent.closed * per_s,
            "connection-close-total": float(total.closed),
            "successful-authentication-rate": recent.authentications * per_s,
            "successful-authentication-total": float(total.authentications),
            "failed-authentication-rate": recent.failed_authentications * per_s,
            "failed-authentication-total": float(total.failed_authentications),
            "select-rate": recent.selects * per_s,
            "select-total": float(total.selects),
            "io-time-ns-avg": average(recent.io_ms * NS_PER_MS, recent.selects),
            "io-time-ns-total": float(total.io_ms * NS_PER_MS),
            "io-ratio": recent.io_ms / 1000 * per_s,
            "io-wait-time-ns-avg": average(recent.wait_ms * NS_PER_MS, recent.selects),
            "io-wait-time-ns-total": float(total.wait_ms * NS_PER_MS),
            "io-wait-ratio": recent.wait_ms / 1000 * per_s,
        }

    def by_node(self, now_ms: int) -> dict[str, dict[str, float]]:
        """Return the metrics of group producer-node-metrics by the tag node-id: "node-" and the node's id, which is
        negative for an address of bootstrap.servers.
        """
        return {
            f"node-{node_id}": {
                **_of_frames(frames),
                "request-latency-avg": average(frames.recent.latency_ms, frames.recent.answered),
                "request-latency-max": peak(frames.recent.max_latency_ms, frames.recent.answered),
            }
            for node_id, frames in self._by_node.read(now_ms).items()
        }


def _of_frames(frames: Reading[FrameSample]) -> dict[str, float]:
    recent, total, per_s = frames.recent, frames.total, 1 / frames.window_s
    return {
        "outgoing-byte-rate": recent.request_bytes * per_s,
        "outgoing-byte-total": float(total.request_bytes),
        "incoming-byte-rate": recent.response_bytes * per_s,
        "incoming-byte-total": float(total.response_bytes),
        "request-rate": recent.requests * per_s,
        "request-total": float(total.requests),
        "request-size-avg": average(recent.request_bytes, recent.requests),
        "request-size-max": peak(recent.max_request_bytes, recent.requests),
        "response-rate": recent.responses * per_s,
        "response-total": float(total.responses),
    }


def by_connection(
    readings: Mapping[str, ConnectionReading], in_flight: Callable[[str], int]
) -> dict[tuple[str, str], dict[str, float]]:
    """Return the state of each connection by "node-" with the node's id, and `host:port`."""
    return {
        (f"node-{node_id}", reading.address): {
            "ready": float(reading.is_ready),
            "requests-in-flight": float(in_flight(node_id)),
            "throttle-time-left": float(reading.throttle_ms),
        }
        for node_id, reading in readings.items()
    }


def throttles(connections: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """Return the brokers that take nothing from this client now, as sentences for the end of an error. Their answers
    say so, and are no errors. `connections`: as of `by_connection`.
    """
    texts = []
    for (node, address), state in connections.items():
        if left_ms := state["throttle-time-left"]:
            broker = f"{address} (id {node.removeprefix('node-')})"
            texts.append(f" {broker} throttles this client for {left_ms:.0f} ms more: is there a quota?")
    return "".join(texts[:_MOST_NAMED])
