"""Secured embedded brokers, checked by librdkafka: logins and permissions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from support.secured_broker import USERS, SecuredBroker
from support.token_signer import TokenSigner

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import LocalBrokerError, SaslAuthenticationError
from spark_kafka_sink.local import BrokerSecurity, EmbeddedKafka
from spark_kafka_sink.local.access import AccessAdmin, Permission


def foreign(broker: SecuredBroker, listener: str, **settings: Any) -> dict[str, Any]:
    """The settings of librdkafka for a listener."""
    conf = {key.replace("_", "."): value for key, value in settings.items()}
    conf |= broker.settings(listener)
    if "ssl.truststore.location" in conf:
        conf["ssl.ca.location"] = conf.pop("ssl.truststore.location")
    return conf


def gets_in(settings: dict[str, Any]) -> bool:
    try:
        return bool(AdminClient({"log_level": 0, **settings}).list_topics(timeout=3).brokers)
    except KafkaException:
        return False


def login(user: str, password: str, mechanism: str) -> dict[str, Any]:
    return {"sasl_username": user, "sasl_password": password, "sasl_mechanism": mechanism}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_user_logs_in_only_with_the_right_password(secured_broker: SecuredBroker, mechanism: str) -> None:
    right = login("alice", USERS["alice"], mechanism)
    wrong = login("alice", "other", mechanism)
    assert gets_in(foreign(secured_broker, "SASL_SSL", **right))
    assert gets_in(foreign(secured_broker, "SASL_PLAINTEXT", **right))
    assert not gets_in(foreign(secured_broker, "SASL_PLAINTEXT", **wrong))


def test_listener_with_client_authentication_requires_a_certificate(
    secured_broker: SecuredBroker, tmp_path: Path
) -> None:
    own = str(secured_broker.authority.issue(common_name="alice").write(tmp_path / "client.pem"))
    assert gets_in(foreign(secured_broker, "SSL"))
    assert not gets_in(foreign(secured_broker, "MTLS"))
    assert gets_in(foreign(secured_broker, "MTLS", ssl_certificate_location=own, ssl_key_location=own))


def test_users_are_added_and_removed_while_the_broker_runs(secured_broker: SecuredBroker) -> None:
    access = AccessAdmin(secured_broker.kafka.bootstrap_servers)

    def carol_gets_in(password: str) -> bool:
        return gets_in(foreign(secured_broker, "SASL_PLAINTEXT", **login("carol", password, "SCRAM-SHA-512")))

    assert not carol_gets_in("c=1,2")
    for password in ("c=1,2", "changed", "changed again"):
        access.set_password("carol", password, "SCRAM-SHA-512")
        assert carol_gets_in(password)
    assert not carol_gets_in("changed")
    access.remove_password("carol", "SCRAM-SHA-512")
    assert not carol_gets_in("changed again")


def test_missing_permission_is_denied(secured_broker: SecuredBroker) -> None:
    access = AccessAdmin(secured_broker.kafka.bootstrap_servers)
    secured_broker.admin.create_topic("granted")
    permissions = [Permission("User:joe", operation, "topic", "granted") for operation in ("write", "describe")]
    settings = foreign(secured_broker, "SASL_PLAINTEXT", **login("joe", USERS["joe"], "PLAIN"))

    def error_of_a_send() -> str | None:
        failures: list[str | None] = []

        def delivered(error: Any, _: Any) -> None:
            failures.append(error.name() if error else None)

        producer = Producer({"message.timeout.ms": 5000, "log_level": 0, **settings})
        producer.produce("granted", b"x", on_delivery=delivered)
        producer.flush(10)
        return failures[0]

    assert error_of_a_send() == "TOPIC_AUTHORIZATION_FAILED"
    access.grant(*permissions)
    assert error_of_a_send() is None
    access.revoke(*permissions)
    assert error_of_a_send() == "TOPIC_AUTHORIZATION_FAILED"


def test_unknown_listener_is_an_error(secured_broker: SecuredBroker) -> None:
    with pytest.raises(LocalBrokerError, match="no secured listener OTHER"):
        secured_broker.kafka.secured_servers("OTHER")


def test_only_tokens_signed_for_the_broker_are_accepted(
    own_kafka: Callable[..., EmbeddedKafka], tmp_path: Path
) -> None:
    signer, stranger = TokenSigner("kafka"), TokenSigner("kafka")
    security = BrokerSecurity(
        listeners={"TOKENS": "SASL_PLAINTEXT"},
        mechanisms=("OAUTHBEARER",),
        token_keys=signer.write_keys(tmp_path / "keys.json"),
        token_audience="kafka",
    )
    kafka = own_kafka(security=security)
    kafka.create_topic("tokens")

    def send(token: Callable[[], tuple[str, int]]) -> int:
        settings = {
            "bootstrap.servers": kafka.secured_servers("TOKENS"),
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.allow.cleartext.credentials": True,
            "sasl.oauthbearer.token.provider": token,
        }
        with KafkaProducer(settings) as producer:
            return int(producer.send("tokens", b"value").result(10).partition)

    assert send(signer.token) == 0
    for wrong in (stranger.token, TokenSigner("another", signer).token, signer.unsigned_token):
        with pytest.raises(SaslAuthenticationError):
            send(wrong)
