"""OAUTHBEARER: the message, extensions, and a server that refuses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_kafka_sink.common.errors import ConfigError, SaslAuthenticationError
from spark_kafka_sink.common.secret import Secret
from spark_kafka_sink.network.sasl.oauthbearer import OAuthBearerMechanism

TOKEN = "canary.token-1_x~/+=="


def mechanism(token: str = TOKEN, **extensions: str) -> OAuthBearerMechanism:
    return OAuthBearerMechanism(lambda: Secret(token), extensions)


def test_the_token_alone() -> None:
    made = mechanism()
    assert made.respond(b"") == f"n,,\x01auth=Bearer {TOKEN}\x01\x01".encode()
    assert made.respond(b"") is None


def test_extensions_follow_the_token() -> None:
    made = mechanism(logicalCluster="lkc-1", identityPoolId="pool-2")
    expected = f"n,,\x01auth=Bearer {TOKEN}\x01logicalCluster=lkc-1\x01identityPoolId=pool-2\x01\x01"
    assert made.respond(b"") == expected.encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auth", "x"),
        ("a1", "x"),
        ("", "x"),
        ("a=b", "x"),
        ("a", ""),
        ("a", "\x01"),
        ("a", "x\x01auth=Bearer y"),
        ("a", "\u00e9"),
    ],
)
def test_extensions_that_would_break_out(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="extension"):
        OAuthBearerMechanism(lambda: Secret(TOKEN), {name: value})


@pytest.mark.parametrize("token", ["", "a b", "a\x01auth=Bearer b", "a\r\nb", "t\u00f6ken", "=a"])
def test_what_is_no_token_is_not_sent_and_not_shown(token: str) -> None:
    with pytest.raises(SaslAuthenticationError, match="no bearer token") as caught:
        mechanism(token).respond(b"")
    assert token not in str(caught.value) or token == ""


def test_a_refusal_is_acknowledged_and_stays_one() -> None:
    made = mechanism()
    made.respond(b"")
    assert made.respond(json.dumps({"status": "invalid_token", "scope": "kafka\nFATAL"}).encode()) == b"\x01"
    for _ in range(2):
        with pytest.raises(
            SaslAuthenticationError, match=r"refuses the token: status invalid_token, scope kafka\?FATAL"
        ):
            made.respond(b"")


def test_reasons_that_repeat_the_token_are_told_without_it() -> None:
    made = mechanism()
    made.respond(b"")
    made.respond(json.dumps({"status": f"no good: {TOKEN}", "scope": "x" * 490 + TOKEN}).encode())
    with pytest.raises(SaslAuthenticationError, match=r"status no good: \*\*\*, scope x+\*\*\*") as caught:
        made.respond(b"")
    assert TOKEN[:4] not in str(caught.value)


@given(
    st.binary(min_size=1, max_size=300) | st.just(b"[" * 16_000) | st.just(b'["status"]') | st.just(b'{"status": {}}')
)
def test_whatever_reasons_a_server_gives_it_is_a_refusal(challenge: bytes) -> None:
    made = mechanism()
    made.respond(b"")
    assert made.respond(challenge) == b"\x01"
    with pytest.raises(SaslAuthenticationError, match="refuses the token") as caught:
        made.respond(b"")
    assert len(str(caught.value)) < 2_000


def test_a_server_that_speaks_first_hears_no_token() -> None:
    with pytest.raises(SaslAuthenticationError, match="spoke first"):
        mechanism().respond(b"hello")


def test_nothing_shows_the_token() -> None:
    made = mechanism()
    made.respond(b"")
    assert TOKEN not in repr(made) + str(vars(made))
    assert [secret.reveal() for secret in made.secrets] == [TOKEN]
