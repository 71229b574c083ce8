"""Requests of client telemetry (KIP-714): ask which metrics the brokers want, and push them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import ClassVar, Final

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.protocol.building import VersionedRequest
from spark_kafka_sink.protocol.versions import ApiKey, Message, to_ms

DEFAULT_PUSH_INTERVAL_MS: Final = 300_000
"""The interval of a broker that gives none (ClientTelemetryReporter.DEFAULT_PUSH_INTERVAL_MS)."""
_LEAST_PUSH_INTERVAL_MS: Final = 100
"""The shortest interval that Kafka's brokers allow (ClientMetricsConfigs). A shorter one would keep the Sender busy."""


@dataclass(frozen=True, slots=True)
class GetTelemetrySubscriptionsRequest(VersionedRequest):
    """Ask which metrics the brokers want. Without a `client_instance_id` the broker gives the client one."""

    api_key: ClassVar[ApiKey] = ApiKey.GET_TELEMETRY_SUBSCRIPTIONS
    client_instance_id: uuid.UUID | None = None

    def build(self, version: int) -> Message:
        return self._fill(version, {"client_instance_id": self.client_instance_id})


@dataclass(frozen=True, slots=True)
class PushTelemetryRequest(VersionedRequest):
    """Push metrics: MetricsData of OpenTelemetry (protobuf), compressed by the codec of id `compression_type`.

    `is_terminating`: the client closes, and pushes no more.
    """

    api_key: ClassVar[ApiKey] = ApiKey.PUSH_TELEMETRY
    client_instance_id: uuid.UUID
    subscription_id: int
    is_terminating: bool
    compression_type: int
    metrics: bytes = field(repr=False)

    def build(self, version: int) -> Message:
        return self._fill(
            version,
            {
                "client_instance_id": self.client_instance_id,
                "subscription_id": self.subscription_id,
                "terminating": self.is_terminating,
                "compression_type": self.compression_type,
                "metrics": self.metrics,
            },
        )


@dataclass(frozen=True, slots=True)
class Subscription:
    """What the brokers want of one client.

    `prefixes`: those of the names of metrics; an empty prefix means all metrics, no prefix none. `codec_ids` are the
    codecs that the broker takes, the best one first. `max_bytes`: the most bytes of a push, compressed; 0 for no limit.
    `has_deltas`: counts are pushed as their increase since the last push, and otherwise as totals.
    """

    client_instance_id: uuid.UUID
    subscription_id: int
    prefixes: tuple[str, ...]
    push_interval_ms: int = DEFAULT_PUSH_INTERVAL_MS
    codec_ids: tuple[int, ...] = ()
    max_bytes: int = 0
    has_deltas: bool = True

    @classmethod
    def from_response(cls, response: Message) -> Subscription:
        """Read an answer to GetTelemetrySubscriptions that has no error. Raises ProtocolError without an instance id.

        Brokers write `*` for all metrics; the protocol's own word is an empty text.
        """
        if response.client_instance_id is None:
            raise ProtocolError("The answer to GetTelemetrySubscriptions has no client instance id.")
        interval_ms = to_ms(response.push_interval)
        return cls(
            response.client_instance_id,
            int(response.subscription_id),
            tuple("" if name == "*" else str(name) for name in response.requested_metrics),
            max(interval_ms, _LEAST_PUSH_INTERVAL_MS) if interval_ms > 0 else DEFAULT_PUSH_INTERVAL_MS,
            tuple(map(int, response.accepted_compression_types)),
            max(int(response.telemetry_max_bytes), 0),
            bool(response.delta_temporality),
        )
