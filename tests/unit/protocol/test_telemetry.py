"""What an answer to GetTelemetrySubscriptions says."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from support.scripted_broker.responses import encode_response

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.protocol.framing import parse_response
from spark_kafka_sink.protocol.telemetry import (
    DEFAULT_PUSH_INTERVAL_MS,
    GetTelemetrySubscriptionsRequest,
    PushTelemetryRequest,
    Subscription,
)
from spark_kafka_sink.protocol.versions import ApiKey, request_type

CLIENT = uuid.UUID(int=7, version=4)
VALUES = {
    "client_instance_id": CLIENT,
    "subscription_id": -5,
    "accepted_compression_types": (4, 3, 99),
    "push_interval": 60_000,
    "telemetry_max_bytes": 1000,
    "delta_temporality": False,
    "requested_metrics": ("org.apache.kafka.producer.", "*"),
}


def subscription(**changes: Any) -> Subscription:
    frame = encode_response(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, 0, 1, {**VALUES, **changes})
    return Subscription.from_response(parse_response(request_type(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, 0), frame[4:])[1])


def test_answer_is_read_whole() -> None:
    prefixes = ("org.apache.kafka.producer.", "")
    assert subscription() == Subscription(CLIENT, -5, prefixes, 60_000, (4, 3, 99), 1000, has_deltas=False)


@pytest.mark.parametrize("interval_ms", [0, -1])
def test_answer_without_an_interval_means_five_minutes(interval_ms: int) -> None:
    """ClientTelemetryUtilsTest.testValidateIntervalMsInvalid."""
    assert subscription(push_interval=interval_ms).push_interval_ms == DEFAULT_PUSH_INTERVAL_MS == 5 * 60 * 1000


def test_interval_is_at_least_100_ms() -> None:
    assert subscription(push_interval=1).push_interval_ms == 100


def test_answer_without_an_instance_id_is_refused() -> None:
    """ClientTelemetryUtilsTest.testValidateClientInstanceId."""
    with pytest.raises(ProtocolError, match="no client instance id"):
        subscription(client_instance_id=None)


def test_negative_limit_of_bytes_means_no_limit() -> None:
    assert subscription(telemetry_max_bytes=-1).max_bytes == 0


def test_first_question_has_no_instance_id_and_later_ones_have_it() -> None:
    assert GetTelemetrySubscriptionsRequest().build(0).client_instance_id is None
    assert GetTelemetrySubscriptionsRequest(CLIENT).build(0).client_instance_id == CLIENT


def test_push_shows_no_metrics_in_its_text() -> None:
    assert "secret" not in repr(PushTelemetryRequest(CLIENT, 1, False, 0, b"secret"))
