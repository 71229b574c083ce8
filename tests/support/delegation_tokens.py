"""Delegation tokens of a real cluster (KIP-48), requested by a client with another login."""

from __future__ import annotations

import base64
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

from kio.index import load_request_schema

from spark_kafka_sink.admin.request_client import RequestClient, Timer
from spark_kafka_sink.admin.topics import TopicsMetadata
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import error_for_code
from spark_kafka_sink.protocol.framing import encode_request

_TIMEOUT_MS = 20_000


class _TokenApi(IntEnum):
    CREATE_DELEGATION_TOKEN = 38
    EXPIRE_DELEGATION_TOKEN = 40
    DESCRIBE_DELEGATION_TOKEN = 41


@dataclass(frozen=True)
class _TokenRequest:
    api_key: Any
    values: Mapping[str, Any]
    purpose: str = ""
    oldest_version: int = 2
    latest_version: int = 2

    def build(self, version: int) -> Any:
        return load_request_schema(int(self.api_key), version)(**self.values)

    def encode(self, version: int, correlation_id: int, client_id: str | None) -> list[memoryview]:
        return encode_request(self.build(version), correlation_id, client_id)


@dataclass(frozen=True)
class DelegationToken:
    token_id: str
    hmac: bytes

    @property
    def jaas(self) -> str:
        password = base64.b64encode(self.hmac).decode()
        return f'ScramLoginModule required username="{self.token_id}" password="{password}" tokenauth="true";'


class TokenIssuer:
    """Requests tokens over a connection with these producer settings."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        clock, rng = SystemClock(), random.Random(1)
        self._clock = clock
        self._metadata = TopicsMetadata((), 20, 200, 300_000, rng)
        config = ProducerConfig.from_mapping(settings)
        self._client = RequestClient.connect(config, self._metadata, clock, rng)

    def create(self) -> DelegationToken:
        response = self._ask(_TokenApi.CREATE_DELEGATION_TOKEN, {"renewers": (), "max_lifetime": timedelta(hours=1)})
        token = DelegationToken(response.token_id, bytes(response.hmac))
        self._await(lambda: token.token_id in self._known(), "the broker does not show the token")
        return token

    def revoke(self, token: DelegationToken) -> None:
        values = {"hmac": token.hmac, "expiry_time_period": timedelta(milliseconds=-1)}
        self._ask(_TokenApi.EXPIRE_DELEGATION_TOKEN, values)
        self._await(lambda: token.token_id not in self._known(), "the broker still shows the token")

    def close(self) -> None:
        self._client.close()

    def _known(self) -> set[str]:
        response = self._ask(_TokenApi.DESCRIBE_DELEGATION_TOKEN, {"owners": None})
        return {token.token_id for token in response.tokens}

    def _await(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline_ms = self._clock.now_ms() + _TIMEOUT_MS
        while not condition():
            assert self._clock.now_ms() < deadline_ms, complaint
            self._clock.sleep_ms(20)

    def _ask(self, api: _TokenApi, values: Mapping[str, Any]) -> Any:
        timer = Timer(self._clock, _TIMEOUT_MS)
        assert self._client.await_metadata_update(timer)
        node = self._client.least_loaded_node()
        assert node is not None
        future = self._client.send(node, _TokenRequest(api, values))
        assert self._client.poll_until(future, timer), f"no answer to {api.name}"
        response = future.value().body
        if int(response.error_code):
            raise error_for_code(int(response.error_code), api.name)
        return response


@contextlib.contextmanager
def token_issuer(settings: Mapping[str, Any]) -> Iterator[TokenIssuer]:
    issuer = TokenIssuer(settings)
    try:
        yield issuer
    finally:
        issuer.close()
