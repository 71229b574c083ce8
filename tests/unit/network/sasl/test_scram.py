"""SCRAM: the examples of the RFCs, and servers that must be refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scram_server import ScramServer

from spark_kafka_sink.common.errors import ConfigError, SaslAuthenticationError
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.network.sasl.scram import ScramSha256Mechanism, ScramSha512Mechanism, new_nonce

PASSWORD = "pencil-canary"
OURS = "fyko+d2lbbFgONRv9qkxdawL"
HASHES = {ScramSha256Mechanism: "sha256", ScramSha512Mechanism: "sha512"}


class ScramSha1Mechanism(ScramSha256Mechanism):
    """Only for the example of RFC 5802."""

    name: ClassVar[str] = "SCRAM-SHA-1"
    _hash: ClassVar[str] = "sha1"


def client(username: str = "user", password: str = PASSWORD, nonce: str = OURS) -> ScramSha256Mechanism:
    return ScramSha256Mechanism(username, Secret(password), nonce=lambda: nonce)


def started(nonce: str = OURS) -> ScramSha256Mechanism:
    mechanism = client(nonce=nonce)
    mechanism.respond(b"")
    return mechanism


def refused(mechanism: ScramSha256Mechanism, challenge: bytes, why: str) -> str:
    with pytest.raises(SaslAuthenticationError, match=re.escape(why)) as caught:
        mechanism.respond(challenge)
    assert "SCRAM-SHA-256" in str(caught.value)
    assert PASSWORD not in str(caught.value)
    return str(caught.value)


def answer_to_proof(mechanism: ScramSha256Mechanism, server: ScramServer) -> bytes | None:
    """Return what `server` says to the proof of `mechanism`: None if the proof is wrong."""
    first = mechanism.respond(b"")
    assert first is not None
    final = mechanism.respond(server.on_client_first(first))
    assert final is not None
    return server.on_client_final(final)


def servers_proof(mechanism: ScramSha256Mechanism, server: ScramServer) -> bytes:
    proof = answer_to_proof(mechanism, server)
    assert proof is not None
    return proof


@pytest.mark.parametrize(
    ("made", "messages"),
    [
        (
            lambda: ScramSha1Mechanism("user", Secret("pencil"), nonce=lambda: "fyko+d2lbbFgONRv9qkxdawL"),
            (
                b"n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL",
                b"r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
                b"c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
                b"v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
            ),
        ),
        (
            lambda: ScramSha256Mechanism("user", Secret("pencil"), nonce=lambda: "rOprNGfwEbeRWgbNEkqO"),
            (
                b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
                b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
                b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
                b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
                b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
            ),
        ),
    ],
    ids=["RFC 5802", "RFC 7677"],
)
def test_examples_of_the_rfcs_succeed(made: Callable[[], ScramSha256Mechanism], messages: tuple[bytes, ...]) -> None:
    mechanism = made()
    first, server_first, final, server_final = messages
    assert mechanism.respond(b"") == first
    assert mechanism.respond(server_first) == final
    assert mechanism.respond(server_final) is None


@pytest.mark.parametrize("made", HASHES)
@pytest.mark.parametrize("username", ["user", "a,b=c", "=2C", "Jörg", "x" * 300])
@pytest.mark.parametrize("is_token", [False, True])
def test_server_that_knows_the_password_completes_the_login(
    made: type[ScramSha256Mechanism], username: str, is_token: bool
) -> None:
    server = ScramServer(HASHES[made], {username: PASSWORD})
    mechanism = made(username, Secret(PASSWORD), is_token)
    proof = servers_proof(mechanism, server)
    assert (server.username, server.is_token) == (username, is_token)
    assert server.is_authenticated
    assert mechanism.respond(proof) is None


def test_server_refuses_another_password() -> None:
    server = ScramServer("sha256", {"user": "another"})
    mechanism = client()
    assert answer_to_proof(mechanism, server) is None


def test_each_exchange_has_its_own_valid_nonce() -> None:
    nonces = {new_nonce() for _ in range(100)}
    assert len(nonces) == 100
    assert all(re.fullmatch(r"[\x21-\x2b\x2d-\x7e]{32,}", nonce) for nonce in nonces)


SALT = "QSXCR+Q6sek8bf92"


@pytest.mark.parametrize(
    ("server_first", "why"),
    [
        (f"r={OURS},s={SALT},i=4096", "nonce"),
        (f"r=other{OURS},s={SALT},i=4096", "nonce"),
        (f"r={OURS[:-1]},s={SALT},i=4096", "nonce"),
        (f"r={OURS}\u00e9,s={SALT},i=4096", "nonce"),
        (f"r={OURS} x,s={SALT},i=4096", "nonce"),
        (f"r={OURS}abc,s={SALT},i=4095", "iterations"),
        (f"r={OURS}abc,s={SALT},i=1", "iterations"),
        (f"r={OURS}abc,s={SALT},i=0", "iterations"),
        (f"r={OURS}abc,s={SALT},i=-4096", "iterations"),
        (f"r={OURS}abc,s={SALT},i=1000001", "iterations"),
        (f"r={OURS}abc,s={SALT},i=2147483647", "iterations"),
        (f"r={OURS}abc,s={SALT},i={'9' * 4000}", "iterations"),
        (f"r={OURS}abc,s={SALT},i=04096", "iterations"),
        (f"r={OURS}abc,s={SALT},i=+4096", "iterations"),
        (f"r={OURS}abc,s={SALT},i=4_096", "iterations"),
        (f"r={OURS}abc,s={SALT},i=\u0664\u0660\u0669\u0666", "iterations"),
        (f"r={OURS}abc,s={SALT},i=", "iterations"),
        (f"r={OURS}abc,s=,i=4096", "salt"),
        (f"r={OURS}abc,s=****,i=4096", "salt"),
        (f"r={OURS}abc,s=*{SALT},i=4096", "salt"),
        (f"r={OURS}abc,s=\u00e9,i=4096", "salt"),
        (f"m=x,r={OURS}abc,s={SALT},i=4096", "m="),
        (f"r={OURS}abc,s={SALT},i=4096,m=x", "m="),
        (f"r={OURS}abc,s={SALT}", "in this order"),
        (f"s={SALT},r={OURS}abc,i=4096", "in this order"),
        (f"r={OURS}abc,r={OURS}abc,s={SALT},i=4096", "twice"),
        ("e=other-error", "it said: other-error"),
        (f"r={OURS}abc,s={SALT},i=4096,e=no", "it said: no"),
        ("", "0 bytes"),
        ("r", "attributes"),
        (",", "attributes"),
        (f"r={OURS}abc,s={SALT},i=4096,", "attributes"),
        (f"r={OURS}abc,s={SALT},i=4096,x=\0", "attributes"),
        ("r=" + "a" * 5000, "5002 bytes"),
    ],
)
def test_invalid_first_server_message_is_refused(server_first: str, why: str) -> None:
    refused(started(), server_first.encode(), why)


def test_first_server_message_that_is_not_utf_8_is_refused() -> None:
    refused(started(), b"r=\xff\xfe", "UTF-8")


def test_error_of_the_server_is_shown_in_one_line() -> None:
    text = refused(started(), b"e=no\nFATAL root logged in\x1b[2J", "it said")
    assert "\n" not in text
    assert "\x1b" not in text


def test_unknown_extensions_are_ignored() -> None:
    server = ScramServer("sha256", {"user": PASSWORD}, twist_first=lambda text: text + ",x=y")
    mechanism = client()
    assert mechanism.respond(servers_proof(mechanism, server)) is None


@pytest.mark.parametrize(
    ("server_final", "why"),
    [
        ("", "0 bytes"),
        ("x=y", "no v="),
        ("x=y,v=AAAA", "no v="),
        ("v=", "signature"),
        ("v=!!!!", "signature"),
        ("v=AAAA", "is wrong"),
        ("v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=", "is wrong"),
        ("e=invalid-proof", "it said: invalid-proof"),
        ("v=AAAA,e=invalid-proof", "it said: invalid-proof"),
        ("m=x,v=AAAA", "m="),
    ],
)
def test_invalid_final_server_message_is_refused(server_final: str, why: str) -> None:
    mechanism = started()
    mechanism.respond(f"r={OURS}abc,s={SALT},i=4096".encode())
    refused(mechanism, server_final.encode(), why)


def test_signature_of_another_exchange_is_refused() -> None:
    """A man in the middle who has recorded one exchange cannot replay it."""
    received = ScramServer("sha256", {"user": PASSWORD})
    first = client(nonce="one")
    proof = servers_proof(first, received)
    assert first.respond(proof) is None
    second = started("two")
    second.respond(f"r=two{received.nonce},s={SALT},i=4096".encode())
    refused(second, proof, "is wrong")


def test_message_after_the_end_is_refused() -> None:
    server = ScramServer("sha256", {"user": PASSWORD})
    mechanism = client()
    mechanism.respond(servers_proof(mechanism, server))
    refused(mechanism, b"more", "after its last message")


def test_server_that_speaks_first_is_refused() -> None:
    refused(client(), b"r=abc", "sent the first message")


@pytest.mark.parametrize(("username", "password"), [("", "x"), ("x", ""), ("a\0b", "x")])
def test_unusable_credentials_are_refused(username: str, password: str) -> None:
    with pytest.raises(ConfigError, match="SCRAM-SHA-256"):
        client(username, password)


@pytest.mark.parametrize("made", HASHES)
def test_password_is_never_shown(made: type[ScramSha256Mechanism]) -> None:
    mechanism = made("user", Secret(PASSWORD))
    mechanism.respond(b"")
    assert PASSWORD not in repr(mechanism) + str(mechanism) + repr(vars(mechanism))


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode), st.booleans())
def test_arbitrary_server_message_is_refused(challenge: bytes, is_last: bool) -> None:
    mechanism = started()
    if is_last:
        mechanism.respond(f"r={OURS}abc,s={SALT},i=4096".encode())
    with pytest.raises(SaslAuthenticationError):
        mechanism.respond(challenge)


@given(st.integers(min_value=0, max_value=200), st.integers(min_value=1, max_value=255))
def test_proof_with_a_flipped_byte_is_refused(at: int, mask: int) -> None:
    server = ScramServer("sha256", {"user": PASSWORD})
    mechanism = client()
    proof = bytearray(servers_proof(mechanism, server))
    proof[at % (len(proof) - 4)] ^= mask  # base64 does not use every bit of the last four
    with pytest.raises(SaslAuthenticationError):
        mechanism.respond(bytes(proof))
