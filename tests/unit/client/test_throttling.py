from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from spark_kafka_sink.client.throttling import client_throttle_ms
from spark_kafka_sink.protocol.messages import ApiKey


def response(version: int, throttle_ms: int = 250) -> Any:
    return SimpleNamespace(__version__=version, throttle_time=timedelta(milliseconds=throttle_ms))


@pytest.mark.parametrize(
    ("api_key", "first_version"),
    [
        (ApiKey.PRODUCE, 6), (ApiKey.FETCH, 8), (ApiKey.LIST_OFFSETS, 3), (ApiKey.METADATA, 6),
        (ApiKey.OFFSET_FETCH, 4), (ApiKey.FIND_COORDINATOR, 2), (ApiKey.API_VERSIONS, 2), (ApiKey.INIT_PRODUCER_ID, 1),
        (ApiKey.ADD_PARTITIONS_TO_TXN, 1), (ApiKey.ADD_OFFSETS_TO_TXN, 1), (ApiKey.END_TXN, 1),
        (ApiKey.TXN_OFFSET_COMMIT, 1), (ApiKey.CREATE_TOPICS, 3),
    ],
)  # fmt: skip
def test_the_client_waits_from_the_version_on_that_leaves_the_waiting_to_it(
    api_key: ApiKey, first_version: int
) -> None:
    assert client_throttle_ms(api_key, response(first_version - 1)) == 0
    assert client_throttle_ms(api_key, response(first_version)) == 250


def test_other_responses_do_not_throttle() -> None:
    assert client_throttle_ms(ApiKey.SASL_HANDSHAKE, SimpleNamespace(__version__=1)) == 0


def test_a_negative_throttle_is_none() -> None:
    assert client_throttle_ms(ApiKey.PRODUCE, response(9, -5)) == 0
