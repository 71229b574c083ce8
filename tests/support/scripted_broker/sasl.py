"""A SASL listener: SaslHandshake, SaslAuthenticate, sessions that end, and refusals of other requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scram_server import ScramServer
from support.scripted_broker.exchange import Answer, Exchange

from spark_kafka_sink.protocol.versions import ApiKey

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

_OPEN_TO_ALL = {ApiKey.SASL_HANDSHAKE, ApiKey.API_VERSIONS, ApiKey.SASL_AUTHENTICATE}
_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}


@dataclass(slots=True)
class _Session:
    """The state of one connection."""

    connection: object
    mechanism: str | None = None
    scram: ScramServer | None = None
    is_refused: bool = False
    is_authenticated: bool = False
    is_renewing: bool = False
    ends_ms: int | None = None


@dataclass
class SaslListener:
    """The users and mechanisms of a cluster's listeners (`cluster.sasl`). With it the nodes require a login."""

    mechanisms: list[str] = field(default_factory=lambda: ["SCRAM-SHA-256"])
    users: dict[str, str] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    session_lifetime_ms: int = 0
    grace_ms: int = 0
    """A session lasts this much longer than reported, so that no test fails on a busy machine."""
    make_scram: Callable[..., ScramServer] = ScramServer
    refusal: str = "Authentication failed during authentication due to invalid credentials"
    handshakes: list[str] = field(default_factory=list)
    """The mechanism of every handshake."""
    received_tokens: list[bytes] = field(default_factory=list)
    """Every message of a client."""
    logins: list[tuple[str, bool]] = field(default_factory=list)
    """Mechanism, and whether it was a renewal, of every successful authentication."""
    expired: int = 0
    """Requests on a session that had ended."""
    _sessions: dict[int, _Session] = field(default_factory=dict)

    def admits(self, exchange: Exchange) -> bool:
        """Return whether the node answers the request."""
        session = self.session(exchange.connection)
        if exchange.api_key in _OPEN_TO_ALL:
            return not session.is_refused
        if session.ends_ms is not None and exchange.now_ms > session.ends_ms + self.grace_ms:
            self.expired += 1
            return False
        return session.is_authenticated and session.mechanism is None

    def session(self, connection: object) -> _Session:
        return self._sessions.setdefault(id(connection), _Session(connection))

    def shake_hands(self, exchange: Exchange) -> int:
        session = self.session(exchange.connection)
        mechanism = exchange.request.mechanism
        self.handshakes.append(mechanism)
        if mechanism not in self.mechanisms:
            session.is_refused = True
            return ErrorCode.unsupported_sasl_mechanism
        session.mechanism, session.is_renewing = mechanism, session.is_authenticated
        session.scram = self.make_scram(_HASHES[mechanism], self.users) if mechanism in _HASHES else None
        return 0

    def on_message(self, exchange: Exchange) -> bytes | None:
        """Return the answer to a client's message; None if it is refused."""
        session = self.session(exchange.connection)
        message = bytes(exchange.request.auth_bytes)
        self.received_tokens.append(message)
        answer, is_done = self._answer(session, message)
        if answer is None:
            session.is_refused = True
        elif is_done:
            self.logins.append((session.mechanism or "", session.is_renewing))
            session.mechanism, session.is_authenticated = None, True
            session.ends_ms = exchange.now_ms + self.session_lifetime_ms if self.session_lifetime_ms else None
        return answer

    def _answer(self, session: _Session, message: bytes) -> tuple[bytes | None, bool]:
        if session.mechanism == "PLAIN":
            _, user, password = message.decode().split("\0")
            return (b"" if self.users.get(user) == password else None), True
        if session.mechanism == "OAUTHBEARER":
            if message == b"\x01":
                return None, True
            token = message.decode().split("\x01")[1].removeprefix("auth=Bearer ")
            return (b"", True) if token in self.tokens else (b'{"status":"invalid_token"}', False)
        if session.scram is None:
            return None, True
        if message.startswith(b"n,"):
            return session.scram.on_client_first(message), False
        return session.scram.on_client_final(message), True


def respond_handshake(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    if cluster.sasl is None:
        return Answer(refuse_handshake(cluster, exchange, ErrorCode.illegal_sasl_state))
    error_code = cluster.sasl.shake_hands(exchange)
    return Answer({"error_code": error_code, "mechanisms": tuple(cluster.sasl.mechanisms)}, close=False)


def refuse_handshake(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return {"error_code": error_code, "mechanisms": ()}


def respond_authenticate(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    sasl = cluster.sasl
    if sasl is None or sasl.session(exchange.connection).mechanism is None:
        return Answer(refuse_authenticate(cluster, exchange, ErrorCode.illegal_sasl_state))
    answer = sasl.on_message(exchange)
    if answer is None:
        return Answer(refuse_authenticate(cluster, exchange, ErrorCode.sasl_authentication_failed), close=True)
    return Answer(
        {
            "error_code": 0,
            "error_message": None,
            "auth_bytes": answer,
            "session_lifetime": sasl.session_lifetime_ms,
        }
    )


def refuse_authenticate(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    text = None if cluster.sasl is None else cluster.sasl.refusal
    return {"error_code": error_code, "error_message": text, "auth_bytes": b""}
