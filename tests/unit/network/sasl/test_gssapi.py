"""GSSAPI with a scripted context: the offer of security layers, and the texts of errors."""

from __future__ import annotations

import enum
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from spark_kafka_sink.common.errors import RetriableError, SaslAuthenticationError
from spark_kafka_sink.network.sasl.gssapi import GssapiMechanism, KerberosLogin


@dataclass
class Context:
    """Complete after `rounds` tokens. It wraps by putting W in front."""

    rounds: int = 2
    is_mutual: bool = True
    received: list[bytes | None] = field(default_factory=list)
    error: Exception | None = None

    @property
    def complete(self) -> bool:
        return len(self.received) >= self.rounds

    def step(self, token: bytes | None) -> bytes | None:
        if self.error is not None:
            raise self.error
        self.received.append(token)
        return None if self.complete else b"token-%d" % len(self.received)

    def unwrap(self, message: bytes) -> bytes:
        assert message.startswith(b"W")
        return message[1:]

    def wrap(self, message: bytes) -> bytes:
        return b"W" + message


class GSSError(Exception):
    """Like the library's own errors: with a minor code."""

    def __init__(self, text: str, min_code: int = 1) -> None:
        super().__init__(text)
        self.min_code = min_code


def test_login_ends_without_a_security_layer() -> None:
    context = Context()
    mechanism = GssapiMechanism(lambda: context)
    assert mechanism.respond(b"") == b"token-1"
    assert mechanism.respond(b"server token") == b""
    assert context.received == [None, b"server token"]
    assert mechanism.respond(b"W\x07\x00\xff\xff") == b"W\x01\x00\x00\x00"
    assert mechanism.respond(b"") is None


@pytest.mark.parametrize(
    "offer", [b"W\x06\x00\xff\xff", b"W\x00\x00\x00\x00", b"W\x01", b"W\x01\x00\x00\x00\x00", b"W"]
)
def test_required_security_layer_is_refused(offer: bytes) -> None:
    mechanism = GssapiMechanism(lambda: Context(rounds=1))
    mechanism.respond(b"")
    with pytest.raises(SaslAuthenticationError, match="security layer"):
        mechanism.respond(offer)


def test_server_without_proof_is_refused() -> None:
    mechanism = GssapiMechanism(lambda: Context(rounds=1, is_mutual=False))
    mechanism.respond(b"")
    with pytest.raises(SaslAuthenticationError, match="prove its identity"):
        mechanism.respond(b"W\x01\x00\x00\x00")


def test_exchange_of_more_than_ten_messages_is_refused() -> None:
    mechanism = GssapiMechanism(lambda: Context(rounds=1000))
    for _ in range(10):
        mechanism.respond(b"x")
    with pytest.raises(SaslAuthenticationError, match="10 messages"):
        mechanism.respond(b"x")


def test_message_after_the_end_is_refused() -> None:
    mechanism = GssapiMechanism(lambda: Context(rounds=1))
    mechanism.respond(b"")
    mechanism.respond(b"W\x01\x00\x00\x00")
    with pytest.raises(SaslAuthenticationError, match="after the end"):
        mechanism.respond(b"x")


def test_error_of_the_library_is_final() -> None:
    mechanism = GssapiMechanism(lambda: Context(error=GSSError("Server not found in Kerberos database\n")))
    with pytest.raises(SaslAuthenticationError, match=r"GSSAPI: Server not found in Kerberos database\?"):
        mechanism.respond(b"")


@pytest.mark.parametrize(
    ("text", "code"), [("Cannot contact any KDC", 2529639068), ("Request is a replay", 2529638946)]
)
def test_unreachable_kdc_and_replay_errors_are_retriable(text: str, code: int) -> None:
    mechanism = GssapiMechanism(lambda: Context(error=GSSError(text, code)))
    with pytest.raises(RetriableError, match=text):
        mechanism.respond(b"")


class Library(types.ModuleType):
    """The part of the package gssapi that a login uses. It keeps each call. Messages of the peer are in upper case."""

    class RequirementFlag(enum.Flag):
        mutual_authentication = 2
        replay_detection = 4
        out_of_sequence_detection = 8
        integrity = 32

    MechType = types.SimpleNamespace(kerberos="kerberos")
    NameType = types.SimpleNamespace(kerberos_principal="principal", hostbased_service="service")

    def __init__(self, has_proof: bool) -> None:
        super().__init__("gssapi")
        self.has_proof = has_proof
        self.credentials: dict[str, Any] = {}

    def Name(self, name: str, kind: str) -> tuple[str, str]:  # noqa: N802
        return name, kind

    def Credentials(self, **asked: Any) -> str:  # noqa: N802
        self.credentials = asked
        return "credentials"

    def SecurityContext(self, name: Any, creds: Any, mech: str, usage: str, flags: Any) -> Any:  # noqa: N802
        assert (name, creds, mech, usage) == (("kafka@host", "service"), "credentials", "kerberos", "initiate")
        mutual = self.RequirementFlag.mutual_authentication
        assert set(flags) == set(self.RequirementFlag)
        return types.SimpleNamespace(
            complete=True,
            actual_flags=mutual if self.has_proof else self.RequirementFlag.integrity,
            step=lambda token: b"token",
            unwrap=lambda message: types.SimpleNamespace(message=message.lower(), encrypted=False),
            wrap=lambda message, encrypt: types.SimpleNamespace(message=b"ENCRYPTED" if encrypt else message.upper()),
        )


@pytest.mark.parametrize("has_proof", [True, False])
def test_context_of_the_library_wraps_and_unwraps(monkeypatch: pytest.MonkeyPatch, has_proof: bool) -> None:
    monkeypatch.setitem(sys.modules, "gssapi", Library(has_proof))
    context = KerberosLogin("kafka").open_context("host")
    assert context.complete
    assert context.is_mutual == has_proof
    assert context.step(None) == b"token"
    assert context.unwrap(b"OFFER") == b"offer"
    assert context.wrap(b"choice") == b"CHOICE"


@pytest.mark.parametrize(
    ("login", "name", "store"),
    [
        (KerberosLogin("kafka"), None, None),
        (KerberosLogin("kafka", ticket_cache="/t"), None, {"ccache": "/t"}),
        (KerberosLogin("kafka", "me", "/k"), ("me", "principal"), {"client_keytab": "/k", "ccache": "MEMORY:me"}),
        (KerberosLogin("kafka", None, "/k", "/t"), None, {"client_keytab": "/k", "ccache": "MEMORY:/k"}),
    ],
)
def test_ticket_comes_from_the_configured_credentials(
    monkeypatch: pytest.MonkeyPatch, login: KerberosLogin, name: Any, store: Any
) -> None:
    library = Library(has_proof=True)
    monkeypatch.setitem(sys.modules, "gssapi", library)
    login.open_context("host")
    assert library.credentials == {"name": name, "mechs": ["kerberos"], "usage": "initiate", "store": store}
