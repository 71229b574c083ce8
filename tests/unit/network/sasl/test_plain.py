"""PLAIN: its one message, and what the message must not contain."""

from __future__ import annotations

import pytest

from spark_kafka_sink.common.errors import ConfigError, SaslAuthenticationError
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.network.sasl.plain import PlainMechanism


def test_message_has_name_and_password_after_nuls() -> None:
    mechanism = PlainMechanism("Jörg", Secret("tanz=a,b"))
    assert mechanism.respond(b"") == b"\0J\xc3\xb6rg\0tanz=a,b"
    assert mechanism.respond(b"") is None
    assert not mechanism.is_slow


def test_challenge_is_refused_before_credentials_are_sent() -> None:
    with pytest.raises(SaslAuthenticationError, match="7 bytes"):
        PlainMechanism("user", Secret("canary")).respond(b"give me")


def test_bytes_with_the_acceptance_are_ignored() -> None:
    """Bug: a login was refused that the server had accepted. Tencent's sends a few bytes with it."""
    mechanism = PlainMechanism("user", Secret("canary"))
    mechanism.respond(b"")
    assert mechanism.respond(b"welcome") is None


@pytest.mark.parametrize(
    ("username", "password"),
    [("", "canary"), ("user", ""), ("us\0er", "canary"), ("user", "can\0ary"), ("user\0", "canary")],
)
def test_empty_fields_and_nul_are_refused(username: str, password: str) -> None:
    with pytest.raises(ConfigError, match="PLAIN") as caught:
        PlainMechanism(username, Secret(password))
    assert "canary" not in str(caught.value)


def test_password_is_never_shown() -> None:
    mechanism = PlainMechanism("user", Secret("canary"))
    mechanism.respond(b"")
    assert "canary" not in repr(mechanism) + str(vars(mechanism))
