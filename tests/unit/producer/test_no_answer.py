"""The error of a request without an answer."""

from __future__ import annotations

from typing import Any

import pytest

from spark_kafka_sink.client.seams import ClientRequest, ClientResponse
from spark_kafka_sink.common.errors import (
    DisconnectError,
    KafkaError,
    ProtocolError,
    RequestTimedOutError,
    SaslAuthenticationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.producer.produce_response import _no_answer
from spark_kafka_sink.protocol.produce import ProduceRequest


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ({"authentication_error": SaslAuthenticationError("refused")}, SaslAuthenticationError, "refused"),
        ({"timed_out": True}, RequestTimedOutError, r"request\.timeout\.ms=30000"),
        ({"protocol_error": ProtocolError("nonsense")}, DisconnectError, "Node 3 was disconnected: nonsense"),
        ({}, DisconnectError, "Node 3 disconnected before it answered"),
    ],
)
def test_why(how: dict[str, Any], kind: type[KafkaError], text: str) -> None:
    error = _no_answer(response(disconnected=True, **how))
    assert type(error) is kind
    with pytest.raises(kind, match=text):
        raise error


def test_request_in_an_unsupported_version() -> None:
    error = UnsupportedVersionError("too old")
    assert _no_answer(response(version_mismatch=error)) is error


def test_an_answer() -> None:
    assert _no_answer(response(body=object())) is None


def response(**how: Any) -> ClientResponse:
    request = ClientRequest("3", ProduceRequest(-1, 1_000, {}), 1, 0, True, 30_000)
    return ClientResponse(request, received_ms=5, **how)
