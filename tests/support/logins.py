"""Logins that a broker refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pytest
from support.lateness import Stopwatch

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import SaslAuthenticationError

_QUICK_S: Final = 6.0


def refused_login(settings: Mapping[str, Any], topic: str, secrets: Iterable[str] = ()) -> SaslAuthenticationError:
    """Return the error of a send whose login is refused. It comes at once, and holds none of `secrets`."""
    with KafkaProducer(settings) as producer:
        with Stopwatch() as watch, pytest.raises(SaslAuthenticationError) as caught:
            producer.send(topic, b"out").result(30)
        assert watch.own_s < _QUICK_S
    error = caught.value
    told = str(error) + repr(error.__cause__) + repr(error.__context__)
    assert [secret for secret in secrets if secret in told] == []
    return error
