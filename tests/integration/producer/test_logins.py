"""Every login to a real broker: accepted, refused, revoked, and renewed under load."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession
from support.delegation_tokens import TokenIssuer, token_issuer
from support.librdkafka import read_values
from support.logins import refused_login
from support.secured_broker import USERS, SecuredBroker

from spark_kafka_sink import KafkaProducer, KafkaSink
from spark_kafka_sink.common.errors import IllegalSaslStateError
from spark_kafka_sink.local.access import AccessAdmin, Permission

MODULE = "org.apache.kafka.common.security"
MODULES = {
    "PLAIN": "plain.PlainLoginModule",
    "SCRAM-SHA-256": "scram.ScramLoginModule",
    "SCRAM-SHA-512": "scram.ScramLoginModule",
}
PASSWORDS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


def unsigned_token(subject: str, life_s: float = 3_600) -> str:
    """A token for a broker without a key (RFC 7515, appendix A.5)."""
    now_s = time.time()
    parts = ({"alg": "none"}, {"sub": subject, "iat": now_s - 10, "exp": now_s + life_s})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


def alices_token() -> tuple[str, int]:
    return unsigned_token("alice"), int((time.time() + 3_600) * 1_000)


def expired_token() -> tuple[str, int]:
    """A provider that reports a wrong end for its expired token."""
    return unsigned_token("alice", -5), int((time.time() + 3_600) * 1_000)


def credentials(mechanism: str, user: str = "alice", password: str = USERS["alice"]) -> dict[str, Any]:
    quoted = password.replace("\\", "\\\\").replace('"', '\\"')
    return {
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f'{MODULE}.{MODULES[mechanism]} required username="{user}" password="{quoted}";',
    }


def bearer(provider: Callable[[], tuple[str, int]]) -> dict[str, Any]:
    return {"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.token.provider": provider}


@pytest.fixture
def topic(secured_broker: SecuredBroker, fresh_name: str) -> str:
    secured_broker.admin.create_topic(fresh_name, 2)
    return fresh_name


@pytest.fixture
def issuer(secured_broker: SecuredBroker) -> Iterator[TokenIssuer]:
    with token_issuer({**secured_broker.settings("SASL_SSL"), **credentials("SCRAM-SHA-256")}) as issuer:
        yield issuer


def send_one(settings: dict[str, Any], topic: str, value: bytes = b"in") -> None:
    with KafkaProducer(settings) as producer:
        assert producer.send(topic, value, partition=0).result(30).offset >= 0


@pytest.mark.parametrize("listener", ["SASL_SSL", "SASL_PLAINTEXT"])
@pytest.mark.parametrize("mechanism", [*PASSWORDS, "OAUTHBEARER"])
def test_every_mechanism_logs_in(secured_broker: SecuredBroker, topic: str, mechanism: str, listener: str) -> None:
    own = bearer(alices_token) if mechanism == "OAUTHBEARER" else credentials(mechanism)
    settings = {**secured_broker.settings(listener), **own}
    if listener == "SASL_PLAINTEXT":
        settings["sasl.allow.cleartext.credentials"] = "true"
    send_one(settings, topic)
    assert read_values(secured_broker.kafka.bootstrap_servers, topic, 2) == ["in"]


@pytest.mark.parametrize("mechanism", PASSWORDS)
def test_wrong_password_or_user_is_refused(secured_broker: SecuredBroker, topic: str, mechanism: str) -> None:
    settings = secured_broker.settings("SASL_SSL")
    for user, password in (("alice", "wrong"), ("alice", USERS["bob"]), ("nobody", USERS["alice"])):
        error = refused_login({**settings, **credentials(mechanism, user, password)}, topic, USERS.values())
        assert f"SASL {mechanism}" in str(error)
    assert read_values(secured_broker.kafka.bootstrap_servers, topic, 2) == []


def test_expired_token_is_refused(secured_broker: SecuredBroker, topic: str) -> None:
    error = refused_login({**secured_broker.settings("SASL_SSL"), **bearer(expired_token)}, topic, USERS.values())
    assert "OAUTHBEARER" in str(error)


def test_login_to_a_listener_without_sasl_is_refused(secured_broker: SecuredBroker, topic: str) -> None:
    settings = {**secured_broker.settings("SSL"), "security.protocol": "SASL_SSL", **credentials("SCRAM-SHA-256")}
    with KafkaProducer(settings) as producer, pytest.raises(IllegalSaslStateError):
        producer.send(topic, b"out").result(30)


def test_removed_user_is_refused(secured_broker: SecuredBroker, topic: str) -> None:
    access = AccessAdmin(secured_broker.kafka.bootstrap_servers)
    access.set_password("carol", "carols-secret")
    access.grant(
        Permission("User:carol", "write", "topic", topic),
        Permission("User:carol", "describe", "topic", topic),
        Permission("User:carol", "idempotent_write", "cluster"),
    )
    settings = {**secured_broker.settings("SASL_SSL"), **credentials("SCRAM-SHA-256", "carol", "carols-secret")}
    send_one(settings, topic)
    access.remove_password("carol")
    refused_login(settings, topic, USERS.values())


def test_delegation_token_works_until_it_is_revoked(
    secured_broker: SecuredBroker, topic: str, issuer: TokenIssuer
) -> None:
    token = issuer.create()
    settings = {
        **secured_broker.settings("SASL_SSL"),
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.jaas.config": token.jaas,
    }
    send_one(settings, topic)
    without = {**settings, "sasl.jaas.config": token.jaas.replace(' tokenauth="true"', "")}
    refused_login(without, topic, USERS.values())
    issuer.revoke(token)
    refused_login(settings, topic, USERS.values())
    assert read_values(secured_broker.kafka.bootstrap_servers, topic, 2) == ["in"]


def test_short_sessions_are_renewed_under_load_without_loss(
    secured_broker: SecuredBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**secured_broker.settings("SASL_PLAINTEXT"), **credentials("SCRAM-SHA-512"), "linger.ms": 0}
    sent = 0
    with caplog.at_level(logging.DEBUG, "spark_kafka_sink"), KafkaProducer(settings) as producer:
        futures = []
        deadline_s = time.monotonic() + 10.5
        while time.monotonic() < deadline_s:
            futures.append(producer.send(topic, b"%d" % sent, partition=0))
            sent += 1
            time.sleep(0.001)
        assert [future.result(30).offset for future in futures] == list(range(sent))
    assert read_values(secured_broker.kafka.bootstrap_servers, topic, 2) == [str(number) for number in range(sent)]
    logins = [
        record.message for record in caplog.records if "logged in by SCRAM-SHA-512, for 5000 ms" in record.message
    ]
    assert len(logins) >= 3  # the bootstrap connection, the node's, and its renewals
    # One is allowed: the broker ends a session 0.3 s after its renewal was due. Without renewal both would be lost.
    assert len([record.message for record in caplog.records if "lost (ready)" in record.message]) <= 1


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "OAUTHBEARER"])
def test_dataframe_is_written_with_the_login(
    secured_broker: SecuredBroker, topic: str, spark: SparkSession, mechanism: str
) -> None:
    found_token, end_ms = alices_token()
    own = bearer(lambda: (found_token, end_ms)) if mechanism == "OAUTHBEARER" else credentials(mechanism)
    settings = secured_broker.settings("SASL_SSL", "kafka.") | {f"kafka.{key}": value for key, value in own.items()}
    sink = KafkaSink(settings, topic=topic)
    assert "secret" not in repr(sink)
    report = sink.write(spark.range(1_000).selectExpr("CAST(id AS STRING) AS value"))
    assert report.records == 1_000
    found = read_values(secured_broker.kafka.bootstrap_servers, topic, 2)
    assert sorted(map(int, found)) == list(range(1_000))
