"""Authenticates one connection: Kafka's frames around a mechanism's messages, and again before the session ends.

ApiVersions, SaslHandshake, then SaslAuthenticate until the mechanism is complete (KIP-43, KIP-152). Only the configured
mechanism is tried. The mechanism itself decides what the server may see before the server has proved its identity.
Mirrors org.apache.kafka.common.security.authenticator.SaslClientAuthenticator. The selector's thread owns it; no I/O.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol, TypeVar

from spark_kafka_sink.common.errors import (
    AuthenticationError,
    KafkaError,
    ProtocolError,
    SaslAuthenticationError,
    UnsupportedSaslMechanismError,
    UnsupportedVersionError,
    error_for_code,
)
from spark_kafka_sink.common.texts import Secret, one_line
from spark_kafka_sink.protocol.framing import correlation_id_of, encode_request, parse_response
from spark_kafka_sink.protocol.handshake import ApiVersionsRequest, SaslAuthenticateRequest, SaslHandshakeRequest
from spark_kafka_sink.protocol.versions import Message, MessageType, NodeApiVersions, Request, to_ms

FIRST_CORRELATION_ID: Final = 2**31 - 8
"""An authentication uses the eight highest ids, and the network client never does. So its responses differ from those
that are in flight when a session is renewed.
"""
_CORRELATION_IDS: Final = 8
_MOST_MESSAGES: Final = 16
_VERSIONS_REQUEST_VERSION: Final = 0
"""The version that every broker knows."""
_EARLIEST: Final = 0.85
_LATEST: Final = 0.95
_SHORTEST_SESSION_MS: Final = 1_000
"""A broker refuses a second authentication within a second."""

log = logging.getLogger(__name__)

T = TypeVar("T")
_Reply = Callable[[Message, int], None]


class SaslMechanism(Protocol):
    """The client's side of one exchange (RFC 4422). It takes the server's message, returns the answer, and is used
    once.

    Neither `repr` nor an error shows a secret.
    """

    name: ClassVar[str]
    """The name in the server's list."""
    is_slow: ClassVar[bool]
    """`respond` computes or waits for long, so it must not run on the selector's thread."""

    @property
    def secrets(self) -> Sequence[Secret]:
        """The secrets that were sent in the clear. They are removed from the server's texts."""
        ...

    def respond(self, challenge: bytes) -> bytes | None:
        """Return the answer to `challenge`, which is b"" at the beginning, or None when the exchange is complete: the
        server has proved what it must.

        Raises SaslAuthenticationError if the server is not trusted or refuses the login, RetriableError if the answer
        needs something that is not available now, such as a token.
        """
        ...


class Step(Protocol[T]):  # type: ignore[misc]
    """A step that runs."""

    @property
    def is_done(self) -> bool: ...

    def result(self) -> T:
        """Return its value, or raise its error. Call it only when the step is done."""
        ...


class StepRunner(Protocol):
    """Starts a step. It calls `on_done` at its end, on any thread."""

    def __call__(self, run: Callable[[], T], on_done: Callable[[], None]) -> Step[T]: ...


def is_of_authentication(payload: bytes | bytearray) -> bool:
    """Return whether a response is for an authenticator, not for the network client."""
    return len(payload) >= 4 and correlation_id_of(payload) >= FIRST_CORRELATION_ID


class SaslAuthenticator:
    """Call `begin`, send what `take_outgoing` returns, and pass each frame to `receive`, until `is_complete`.

    Every method may raise an AuthenticationError, which is final, or another KafkaError. After that a new connection
    may succeed.
    """

    def __init__(
        self,
        description: str,
        make_mechanism: Callable[[], SaslMechanism],
        client_id: str,
        rng: random.Random,
        run_slow: StepRunner,
        wakeup: Callable[[], None],
        advice: str = "",
    ) -> None:
        """`description` names node and address for errors; `wakeup` ends the poll that waits, from any thread.
        `advice` is a sentence for the error of a refused login: what to check.
        """
        self._description = description
        self._make_mechanism = make_mechanism
        self._client_id = client_id
        self._rng = rng
        self._run_slow = run_slow
        self._wakeup = wakeup
        self._advice = advice
        self._correlation_ids = itertools.cycle(range(FIRST_CORRELATION_ID, FIRST_CORRELATION_ID + _CORRELATION_IDS))
        self._versions: NodeApiVersions | None = None
        self._mechanism: SaslMechanism | None = None
        self._outgoing: list[memoryview] | None = None
        self._awaited: tuple[int, MessageType, _Reply] | None = None
        self._step: Step[bytes | None] | None = None
        self._messages = 0
        self._session_ms = 0  # as the node said last; 0: no end
        self.is_complete = False
        self._renew_at_ms: int | None = None

    def begin(self) -> None:
        """Authenticate, or renew the session (KIP-368). Only the first time asks for the node's versions."""
        self.is_complete = False
        self._renew_at_ms = None
        self._mechanism = self._make_mechanism()
        self._messages = 0
        if self._versions is None:
            self._ask(ApiVersionsRequest("", ""), _VERSIONS_REQUEST_VERSION, self._on_versions)
        else:
            self._shake_hands()

    def is_due(self, now_ms: int) -> bool:
        """Return whether the session must be renewed now, by another `begin`."""
        return self.is_complete and self._renew_at_ms is not None and now_ms >= self._renew_at_ms

    def take_outgoing(self) -> list[memoryview] | None:
        """Return the next frame to send, once."""
        frame, self._outgoing = self._outgoing, None
        return frame

    def receive(self, payload: bytes | bytearray, now_ms: int) -> None:
        """Handle a frame, given without its size."""
        if self._awaited is None:
            raise ProtocolError(f"{self._description} sent {len(payload)} bytes although SASL had sent no request.")
        expected_id, request_type, on_reply = self._awaited
        if correlation_id_of(payload) != expected_id:
            raise ProtocolError(
                f"{self._description} sent correlation id {correlation_id_of(payload)} in the SASL exchange, instead of"
                f" {expected_id}."
            )
        self._awaited = None
        on_reply(parse_response(request_type, payload)[1], now_ms)

    def advance(self, now_ms: int) -> None:
        """Continue after a slow step that has ended."""
        if self._step is not None and self._step.is_done:
            step, self._step = self._step, None
            self._say(step.result(), now_ms)

    # ---- the exchange ----------------------------------------------------------------------------------------------

    def _on_versions(self, response: Message, _: int) -> None:
        if int(response.error_code):
            error = error_for_code(int(response.error_code), api="ApiVersions")
            raise error.reworded(f"{self._description}: {error}")
        self._versions = NodeApiVersions.from_response(response)
        self._shake_hands()

    def _shake_hands(self) -> None:
        request = SaslHandshakeRequest(self._current.name)
        self._ask(request, self._version_of(request), self._on_handshake)

    def _on_handshake(self, response: Message, now_ms: int) -> None:
        error_code = int(response.error_code)
        if error_code == UnsupportedSaslMechanismError.error_code:
            offered = one_line(", ".join(response.mechanisms)) or "none"
            raise UnsupportedSaslMechanismError(
                f"{self._description} does not offer sasl.mechanism={self._current.name}. It offers: {offered}."
                " This client tries only the configured mechanism."
            )
        if error_code:
            raise self._refusal(error_code, "", "SaslHandshake")
        self._respond(b"", now_ms)

    def _on_message(self, response: Message, now_ms: int) -> None:
        error_code = int(response.error_code)
        if error_code:
            raise self._refusal(error_code, response.error_message or "", "SaslAuthenticate")
        self._session_ms = to_ms(response.session_lifetime) if hasattr(response, "session_lifetime") else 0
        self._respond(bytes(response.auth_bytes), now_ms)

    def _respond(self, challenge: bytes, now_ms: int) -> None:
        mechanism = self._current
        self._messages += 1
        if self._messages > _MOST_MESSAGES:
            raise SaslAuthenticationError(
                f"{self._description}: SASL {mechanism.name} is not complete after {_MOST_MESSAGES} messages."
            )
        if mechanism.is_slow:
            self._step = self._run_slow(lambda: self._located(mechanism, challenge), self._wakeup)
            self.advance(now_ms)
        else:
            self._say(self._located(mechanism, challenge), now_ms)

    def _located(self, mechanism: SaslMechanism, challenge: bytes) -> bytes | None:
        try:
            return mechanism.respond(challenge)
        except KafkaError as error:
            raise error.reworded(f"{self._description}: {error}") from None
        except Exception as error:  # its text may show a secret
            kind = type(error).__name__
            raise SaslAuthenticationError(f"{self._description}: SASL {mechanism.name} failed with {kind}.") from None

    def _say(self, message: bytes | None, now_ms: int) -> None:
        if message is not None:
            request = SaslAuthenticateRequest(message)
            self._ask(request, self._version_of(request), self._on_message)
            return
        log.debug(
            "%s: logged in by %s, for %d ms (0: without end)", self._description, self._current.name, self._session_ms
        )
        self._mechanism = None
        self.is_complete = True
        if self._session_ms > 0:
            share = self._rng.uniform(_EARLIEST, _LATEST)
            self._renew_at_ms = now_ms + max(int(self._session_ms * share), _SHORTEST_SESSION_MS)

    # ---- frames ----------------------------------------------------------------------------------------------------

    @property
    def _current(self) -> SaslMechanism:
        assert self._mechanism is not None
        return self._mechanism

    def _ask(self, request: Request, version: int, on_reply: _Reply) -> None:
        entity, correlation_id = request.build(version), next(self._correlation_ids)
        self._outgoing = encode_request(entity, correlation_id, self._client_id)
        self._awaited = (correlation_id, type(entity), on_reply)

    def _version_of(self, request: Request) -> int:
        assert self._versions is not None
        try:
            return self._versions.usable_version(request)
        except UnsupportedVersionError as error:
            raise SaslAuthenticationError(
                f"{self._description} cannot authenticate us: {error} Is it a SASL listener?"
            ) from None

    def _refusal(self, error_code: int, message: str, api: str) -> KafkaError:
        """Return the server's error with node and mechanism, and without secrets."""
        for secret in self._current.secrets:
            message = message.replace(secret.reveal(), "***")
        error = error_for_code(error_code, message, api)
        text = f"{self._description} refuses the login by SASL {self._current.name}: {error}"
        if isinstance(error, SaslAuthenticationError) and self._advice:  # the others do not refuse the credentials
            text = f"{text.rstrip('.')}. {self._advice}"
        if isinstance(error, AuthenticationError) or error.retriable:
            return error.reworded(text)
        refusal = SaslAuthenticationError(text)
        refusal.error_code = error_code
        return refusal
