"""OAUTHBEARER as in production: a token endpoint over https, and a real broker that validates the endpoint's tokens
with the keys of a JWKS endpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority
from support.identity_provider import CLIENT_ID, CLIENT_SECRET, IdentityProvider, identity_provider, key_server
from support.librdkafka import read_values
from support.logins import refused_login
from support.token_signer import TokenSigner

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import SaslAuthenticationError
from spark_kafka_sink.local import BrokerSecurity, EmbeddedKafka

AUDIENCE = "kafka"


@dataclass(frozen=True)
class ValidatingBroker:
    kafka: EmbeddedKafka
    authority_file: Path
    signer: TokenSigner
    keys_url: str


@pytest.fixture(scope="module")
def broker(
    module_kafka: Callable[..., EmbeddedKafka], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ValidatingBroker]:
    folder = tmp_path_factory.mktemp("validating-broker")
    authority, signer = Authority(), TokenSigner(AUDIENCE)
    with key_server(signer) as keys_url:
        security = BrokerSecurity(
            listeners={"TOKENS": "SASL_SSL"},
            keystore=authority.issue().write(folder / "broker.pem"),
            mechanisms=("OAUTHBEARER",),
            token_keys=keys_url,
            token_audience=AUDIENCE,
        )
        kafka = module_kafka(security=security)
        yield ValidatingBroker(kafka, authority.write(folder / "authority.pem"), signer, keys_url)


@pytest.fixture
def provider(broker: ValidatingBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IdentityProvider]:
    with identity_provider(tmp_path, broker.signer, broker.keys_url) as provider:
        monkeypatch.setenv("SSL_CERT_FILE", str(provider.endpoint.authority_file))
        yield provider


@pytest.fixture
def topic(broker: ValidatingBroker, fresh_name: str) -> str:
    broker.kafka.create_topic(fresh_name)
    return fresh_name


def settings(broker: ValidatingBroker, provider: IdentityProvider, secret: str = CLIENT_SECRET) -> dict[str, Any]:
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
    return {
        "bootstrap.servers": broker.kafka.secured_servers("TOKENS"),
        "security.protocol": "SASL_SSL",
        "ssl.truststore.location": str(broker.authority_file),
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": provider.endpoint.url,
        "sasl.jaas.config": f'{module} required clientId="{CLIENT_ID}" clientSecret="{secret}" scope="produce";',
        "linger.ms": 0,
    }


def refusal(given: dict[str, Any], topic: str) -> str:
    return str(refused_login(given, topic, ["canary"]))


def send_until(deadline_s: float, producer: KafkaProducer, topic: str) -> None:
    while time.monotonic() < deadline_s:
        producer.send(topic, b"late").result(10)
        time.sleep(0.01)


def test_records_arrive_with_a_token_requested_once(
    broker: ValidatingBroker, provider: IdentityProvider, topic: str
) -> None:
    with KafkaProducer(settings(broker, provider)) as producer:
        futures = [producer.send(topic, b"%d" % number) for number in range(100)]
        assert [future.result(30).offset for future in futures] == list(range(100))
    assert read_values(broker.kafka.bootstrap_servers, topic) == [str(number) for number in range(100)]
    ((_, _, form),) = provider.endpoint.requests
    assert form == "grant_type=client_credentials&scope=produce"
    assert len(provider.given) == 1


def test_wrong_client_secret_is_reported_in_the_endpoints_words(
    broker: ValidatingBroker, provider: IdentityProvider, topic: str
) -> None:
    reported = refusal(settings(broker, provider, "another canary"), topic)
    assert "The token endpoint localhost:" in reported
    assert "HTTP status 401, invalid_client, unknown client or wrong secret" in reported
    assert provider.given == []


def test_expired_token_is_refused_by_the_broker(
    broker: ValidatingBroker, provider: IdentityProvider, topic: str
) -> None:
    provider.life_s, provider.reported_life_s = -120, 300
    text = refusal(settings(broker, provider), topic)
    assert 'refuses the login by SASL OAUTHBEARER: {"status":"invalid_token"}' in text
    assert provider.given
    assert read_values(broker.kafka.bootstrap_servers, topic) == []


@pytest.mark.parametrize("of_the_provider", [True, False], ids=["of another audience", "signed with another key"])
def test_token_for_another_audience_is_refused_by_the_broker(
    broker: ValidatingBroker, provider: IdentityProvider, topic: str, of_the_provider: bool
) -> None:
    provider.signer = TokenSigner("another", broker.signer) if of_the_provider else TokenSigner(AUDIENCE)
    text = refusal(settings(broker, provider), topic)
    assert 'refuses the login by SASL OAUTHBEARER: {"status":"invalid_token"}' in text
    assert provider.given
    assert read_values(broker.kafka.bootstrap_servers, topic) == []


def test_session_is_renewed_until_the_client_is_revoked(
    broker: ValidatingBroker, provider: IdentityProvider, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker's session ends with its token: here after 3 to 4 s, because a token's end is in whole seconds."""
    provider.life_s, provider.reported_life_s = 4, 3
    futures: list[Any] = []
    with caplog.at_level(logging.DEBUG, "spark_kafka_sink"), KafkaProducer(settings(broker, provider)) as producer:
        deadline_s = time.monotonic() + 30
        while len(provider.given) < 4 and time.monotonic() < deadline_s:
            futures.append(producer.send(topic, b"%d" % len(futures)))
            time.sleep(0.002)
        assert [future.result(30).offset for future in futures] == list(range(len(futures)))
        # One is allowed: the broker ends a session 0.5 s after its renewal was due. Without renewal it would be three.
        assert len([record.message for record in caplog.records if "lost (ready)" in record.message]) <= 1

        provider.revoke_client()
        with pytest.raises(SaslAuthenticationError, match="HTTP status 401, invalid_client"):
            send_until(deadline_s, producer, topic)
    assert len(set(provider.given)) == len(provider.given) == 4
    assert len([record for record in caplog.records if "logged in by OAUTHBEARER" in record.message]) >= 4
    values = read_values(broker.kafka.bootstrap_servers, topic)
    assert [value for value in values if value != "late"] == [str(number) for number in range(len(futures))]
