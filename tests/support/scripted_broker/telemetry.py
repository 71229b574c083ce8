"""GetTelemetrySubscriptions and PushTelemetry: one subscription for all clients, and the pushes that came.

The rules are those of Kafka's ClientMetricsManager and ClientMetricsInstance: nothing before the interval is over, the
subscription's id changes with it, and nothing comes after a terminating push. With one difference, which the KIP asks
for and Kafka 4.3 does not do: a client may ask at once after UNKNOWN_SUBSCRIPTION_ID.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

from spark_kafka_sink.record.codecs import codec_by_id

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

_NEVER_MS = -(2**62)
_MOST_BYTES = 10_000_000


class Value(NamedTuple):
    """One value of a push. Times are ms since 1970; `since_ms` is None for a gauge."""

    value: float
    at_ms: int
    since_ms: int | None = None
    is_delta: bool = False


class Push(NamedTuple):
    """A push that was taken. `values` by name and labels."""

    at_ms: int
    client_instance_id: uuid.UUID
    is_terminating: bool
    codec_id: int
    size: int
    labels: dict[str, str]
    values: dict[tuple[str, tuple[tuple[str, str], ...]], Value]

    def value(self, name: str, **labels: str) -> float:
        """Return the value of org.apache.kafka.producer.`name`."""
        return self.values[f"org.apache.kafka.producer.{name}", tuple(labels.items())].value

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}


@dataclass(slots=True)
class _Instance:
    version: int
    got_ms: int = _NEVER_MS
    pushed_ms: int = _NEVER_MS
    may_ask: bool = False
    has_ended: bool = False


@dataclass(slots=True)
class TelemetryReceiver:
    """The plugin of the brokers, with one subscription. `subscribe` changes it."""

    metrics: Sequence[str] = ("*",)
    interval_ms: int = 10_000
    codec_ids: Sequence[int] = (4, 3, 1, 2)
    max_bytes: int = 1 << 20
    has_deltas: bool = True
    node_ids: frozenset[int] | None = None
    """The nodes with the plugin; None: all."""
    version: int = 1
    pushes: list[Push] = field(default_factory=list)
    instances: dict[uuid.UUID, _Instance] = field(default_factory=dict)

    def subscribe(self, *metrics: str, **more: Any) -> None:
        """Replace the subscription's metrics, and other settings by name. Without metrics: delete it."""
        self.metrics = metrics
        for name, value in more.items():
            setattr(self, name, value)
        self.version += 1

    def instance(self, client_instance_id: uuid.UUID) -> _Instance:
        known = self.instances.get(client_instance_id)
        if known is None or known.version != self.version:
            known = self.instances[client_instance_id] = _Instance(self.version)
        return known


def respond_subscriptions(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    receiver = _receiver(cluster)
    number = len(receiver.instances) + 1
    found = exchange.request.client_instance_id or uuid.UUID(int=number, version=4)
    instance = receiver.instance(found)
    last_ms = max(instance.got_ms, instance.pushed_ms)
    if exchange.now_ms - last_ms < receiver.interval_ms and not instance.may_ask:
        return Answer(refuse(cluster, exchange, ErrorCode.throttling_quota_exceeded))
    instance.got_ms, instance.may_ask = exchange.now_ms, False
    return Answer(
        {
            "client_instance_id": found,
            "subscription_id": receiver.version,
            "accepted_compression_types": tuple(receiver.codec_ids),
            "push_interval": receiver.interval_ms,
            "telemetry_max_bytes": receiver.max_bytes,
            "delta_temporality": receiver.has_deltas,
            "requested_metrics": tuple(receiver.metrics),
        }
    )


def respond_push(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    receiver, request = _receiver(cluster), exchange.request
    instance = receiver.instance(request.client_instance_id)
    code = _refusal(receiver, instance, request, exchange.now_ms)
    instance.has_ended |= request.terminating
    if code is not None:
        instance.may_ask = code == ErrorCode.unknown_subscription_id
        return Answer(refuse(cluster, exchange, code))
    receiver.pushes.append(_read(request, exchange.now_ms))
    return Answer({"error_code": 0})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"error_code": error_code}


def _receiver(cluster: ScriptedCluster) -> TelemetryReceiver:
    assert cluster.telemetry is not None, "a client sent telemetry to a broker that does not offer it"
    return cluster.telemetry


def _refusal(receiver: TelemetryReceiver, instance: _Instance, request: Any, now_ms: int) -> ErrorCode | None:
    if instance.has_ended:
        return ErrorCode.invalid_request
    is_early = instance.got_ms <= instance.pushed_ms and now_ms - instance.pushed_ms < receiver.interval_ms
    if is_early and not request.terminating:
        return ErrorCode.throttling_quota_exceeded
    instance.pushed_ms = now_ms
    if request.subscription_id != receiver.version:
        return ErrorCode.unknown_subscription_id
    return ErrorCode.telemetry_too_large if len(request.metrics) > receiver.max_bytes else None


def _read(request: Any, now_ms: int) -> Push:
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData  # most tests push nothing

    data = MetricsData()
    data.ParseFromString(codec_by_id(int(request.compression_type)).decompress(request.metrics, _MOST_BYTES))
    (of_producer,) = data.resource_metrics
    (scope,) = of_producer.scope_metrics
    return Push(
        now_ms,
        request.client_instance_id,
        request.terminating,
        int(request.compression_type),
        len(request.metrics),
        dict(_labels(of_producer.resource.attributes)),
        {
            (metric.name, _labels(point.attributes)): _value(metric, point)
            for metric in scope.metrics
            for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points
        },
    )


def _labels(attributes: Any) -> tuple[tuple[str, str], ...]:
    return tuple((each.key, each.value.string_value) for each in attributes)


def _value(metric: Any, point: Any) -> Value:
    at_ms = point.time_unix_nano // 1_000_000
    if not metric.HasField("sum"):
        return Value(point.as_double, at_ms)
    assert metric.sum.is_monotonic
    return Value(
        point.as_double, at_ms, point.start_time_unix_nano // 1_000_000, metric.sum.aggregation_temporality == 1
    )
