"""The frames of a login: their order, the error of each refusal, slow steps, and when a session is renewed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from support.scripted_broker.responses import encode_response

from spark_kafka_sink.common.errors import (
    BrokerError,
    IllegalSaslStateError,
    KafkaError,
    ProtocolError,
    RequestTimedOutError,
    RetriableError,
    SaslAuthenticationError,
    UnsupportedSaslMechanismError,
)
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.network.sasl.authenticator import (
    FIRST_CORRELATION_ID,
    SaslAuthenticator,
    is_of_authentication,
)
from spark_kafka_sink.protocol.versions import ApiKey

CANARY = "canary-secret"
SPOKEN = (
    {"api_key": ApiKey.SASL_HANDSHAKE, "min_version": 0, "max_version": 1},
    {"api_key": ApiKey.SASL_AUTHENTICATE, "min_version": 0, "max_version": 2},
)
Answer = bytes | None | Exception


class Mechanism:
    """Gives `answers` in order. Raises those that are exceptions."""

    name: ClassVar[str] = "TEST"
    is_slow: ClassVar[bool] = False
    secrets: Sequence[Secret] = (Secret(CANARY),)

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)
        self.received: list[bytes] = []

    def respond(self, challenge: bytes) -> bytes | None:
        self.received.append(challenge)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class SlowMechanism(Mechanism):
    is_slow = True


class LaterStep:
    """A step that ends when the test calls `finish`."""

    def __init__(self, run: Callable[[], Any], on_done: Callable[[], None]) -> None:
        self.run = run
        self.on_done = on_done
        self.is_done = False

    def finish(self) -> None:
        self.is_done = True
        self.on_done()

    def result(self) -> Any:
        return self.run()


class Rig:
    """An authenticator, and the requests and responses of its node."""

    def __init__(self, *mechanisms: Mechanism, seed: int = 1) -> None:
        self.mechanisms = list(mechanisms)
        self.steps: list[LaterStep] = []
        self.woken = 0
        self.authenticator = SaslAuthenticator(
            "Node 7 at there:1",
            lambda: self.mechanisms.pop(0),
            "client",
            random.Random(seed),
            self._later,
            self._wake,
            "Check this.",
        )
        self.asked: list[tuple[int, int, int]] = []
        """(api key, version, correlation id) of each request."""

    def _later(self, run: Callable[[], Any], on_done: Callable[[], None]) -> LaterStep:
        self.steps.append(LaterStep(run, on_done))
        return self.steps[-1]

    def _wake(self) -> None:
        self.woken += 1

    def take(self) -> bytes:
        frame = self.authenticator.take_outgoing()
        assert frame is not None
        data = b"".join(frame)
        self.asked.append(struct.unpack_from(">hhi", data, 4))
        assert data[12:20] == struct.pack(">h", 6) + b"client", "each request of a login has the client.id"
        return data

    def answer(self, now_ms: int = 0, **values: Any) -> None:
        api_key, version, correlation_id = self.asked[-1]
        frame = encode_response(api_key, version, correlation_id, {"error_code": 0, **values})
        self.authenticator.receive(frame[4:], now_ms)

    def shake_hands(self) -> None:
        self.authenticator.begin()
        self.take()
        self.answer(api_keys=SPOKEN)
        self.take()
        self.answer(mechanisms=("TEST",))

    def say(self, message: bytes = b"", now_ms: int = 0, **values: Any) -> None:
        self.answer(now_ms, auth_bytes=message, **values)


def test_login_sends_versions_mechanism_and_messages() -> None:
    mechanism = Mechanism([b"one", b"two", None])
    rig = Rig(mechanism)
    rig.shake_hands()
    assert b"one" in rig.take()
    rig.say(b"server one")
    assert b"two" in rig.take()
    assert not rig.authenticator.is_complete
    rig.say(b"server two")
    assert rig.authenticator.is_complete
    assert mechanism.received == [b"", b"server one", b"server two"]
    assert [asked[:2] for asked in rig.asked] == [
        (ApiKey.API_VERSIONS, 0),
        (ApiKey.SASL_HANDSHAKE, 1),
        (ApiKey.SASL_AUTHENTICATE, 2),
        (ApiKey.SASL_AUTHENTICATE, 2),
    ]
    assert [asked[2] for asked in rig.asked] == [FIRST_CORRELATION_ID + number for number in range(4)]
    assert rig.authenticator.take_outgoing() is None
    assert not rig.authenticator.is_due(2**62)


def test_ids_of_logins_differ_from_ids_of_requests() -> None:
    assert is_of_authentication(struct.pack(">i", FIRST_CORRELATION_ID))
    assert is_of_authentication(struct.pack(">i", 2**31 - 1) + b"x")
    assert not is_of_authentication(struct.pack(">i", FIRST_CORRELATION_ID - 1))
    assert not is_of_authentication(b"\x7f\xff\xff")


def test_renewal_asks_for_no_versions_and_uses_a_new_mechanism() -> None:
    rig = Rig(Mechanism([b"one", None]), Mechanism([b"again", None]))
    rig.shake_hands()
    rig.take()
    rig.say(now_ms=1_000, session_lifetime=10_000)
    assert not rig.authenticator.is_due(1_000 + 8_499)
    assert rig.authenticator.is_due(1_000 + 9_500)
    rig.authenticator.begin()
    assert not rig.authenticator.is_complete
    rig.take()
    rig.answer(mechanisms=())
    assert b"again" in rig.take()
    rig.say()
    assert rig.authenticator.is_complete
    assert not rig.authenticator.is_due(2**62), "the last session counts, and it has no end"
    assert [asked[0] for asked in rig.asked][3:] == [ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE]


def test_session_without_a_lifetime_has_no_end() -> None:
    rig = Rig(Mechanism([b"one", None]))
    rig.authenticator.begin()
    rig.take()
    rig.answer(api_keys=(SPOKEN[0], {"api_key": ApiKey.SASL_AUTHENTICATE, "min_version": 0, "max_version": 0}))
    rig.take()
    rig.answer(mechanisms=("TEST",))
    rig.take()
    rig.say()
    assert rig.asked[-1][:2] == (ApiKey.SASL_AUTHENTICATE, 0)
    assert rig.authenticator.is_complete
    assert not rig.authenticator.is_due(2**62)


def test_refused_handshake_sends_no_credentials() -> None:
    mechanism = Mechanism([b"one", None])
    rig = Rig(mechanism)
    rig.authenticator.begin()
    rig.take()
    rig.answer(api_keys=SPOKEN)
    rig.take()
    with pytest.raises(IllegalSaslStateError, match=r"^Node 7 at there:1 refuses the login by SASL TEST: .*\w"):
        rig.answer(error_code=IllegalSaslStateError.error_code, mechanisms=("TEST",))
    assert mechanism.received == []
    assert rig.authenticator.take_outgoing() is None


def test_error_says_that_the_node_offers_no_mechanism() -> None:
    rig = Rig(Mechanism([b"one", None]))
    rig.authenticator.begin()
    rig.take()
    rig.answer(api_keys=SPOKEN)
    rig.take()
    with pytest.raises(UnsupportedSaslMechanismError, match="It offers: none"):
        rig.answer(error_code=UnsupportedSaslMechanismError.error_code, mechanisms=())


def test_renewal_may_take_as_many_messages_as_a_login() -> None:
    rig = Rig(*(Mechanism([b"one", b"two", None]) for _ in range(20)))
    rig.shake_hands()
    for number in range(20):
        if number:
            rig.authenticator.begin()
            rig.take()
            rig.answer(mechanisms=())
        rig.take()
        rig.say()
        rig.take()
        rig.say(session_lifetime=10_000)
        assert rig.authenticator.is_complete


@given(st.integers(2_000, 10**12), st.integers(0, 2**32))
def test_session_is_renewed_at_85_to_95_percent(lifetime_ms: int, seed: int) -> None:
    rig = Rig(Mechanism([b"one", None]), seed=seed)
    rig.shake_hands()
    rig.take()
    rig.say(now_ms=500, session_lifetime=lifetime_ms)
    assert not rig.authenticator.is_due(500 + lifetime_ms * 85 // 100 - 1)
    assert rig.authenticator.is_due(500 + lifetime_ms * 95 // 100 + 1)


@pytest.mark.parametrize("lifetime_ms", [1, 999])
def test_no_session_is_renewed_within_a_second(lifetime_ms: int) -> None:
    rig = Rig(Mechanism([b"one", None]))
    rig.shake_hands()
    rig.take()
    rig.say(session_lifetime=lifetime_ms)
    assert not rig.authenticator.is_due(999)
    assert rig.authenticator.is_due(1_000)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_unsupported_mechanism_is_named_with_the_offered_ones() -> None:
    rig = Rig(Mechanism([b"secret"]))
    rig.authenticator.begin()
    rig.take()
    rig.answer(api_keys=SPOKEN)
    rig.take()
    with pytest.raises(UnsupportedSaslMechanismError, match=r"Node 7.*sasl\.mechanism=TEST\. It offers: PLAIN, A\?B\."):
        rig.answer(error_code=ErrorCode.unsupported_sasl_mechanism, mechanisms=("PLAIN", "A\nB"))
    assert rig.authenticator.take_outgoing() is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.sasl_authentication_failed, SaslAuthenticationError),
        (ErrorCode.illegal_sasl_state, IllegalSaslStateError),
        (ErrorCode.unsupported_sasl_mechanism, UnsupportedSaslMechanismError),
        (ErrorCode.request_timed_out, RequestTimedOutError),
        (ErrorCode.unknown_server_error, SaslAuthenticationError),
        (ErrorCode.invalid_request, SaslAuthenticationError),
    ],
)
def test_refusal_becomes_the_error_of_its_code(code: int, kind: type[KafkaError]) -> None:
    rig = Rig(Mechanism([b"one"]))
    rig.shake_hands()
    rig.take()
    with pytest.raises(kind, match=r"there:1 refuses the login by SASL TEST: no, not with \*\*\*\?!") as caught:
        rig.say(error_code=code, error_message=f"no, not with {CANARY}\n!")
    assert type(caught.value) is kind
    refuses_credentials = code == ErrorCode.sasl_authentication_failed
    assert str(caught.value).endswith("!. Check this." if refuses_credentials else "!")


def test_refusal_without_text_has_the_sentence_of_its_code() -> None:
    rig = Rig(Mechanism([b"one"]))
    rig.shake_hands()
    rig.take()
    with pytest.raises(SaslAuthenticationError, match="SASL authentication failed"):
        rig.say(error_code=ErrorCode.sasl_authentication_failed, error_message=None)


@pytest.mark.parametrize("kind", [SaslAuthenticationError, RetriableError])
def test_refusal_by_the_mechanism_names_the_node(kind: type[KafkaError]) -> None:
    rig = Rig(Mechanism([kind("the server is no good")]))
    with pytest.raises(kind, match="Node 7 at there:1: the server is no good"):
        rig.shake_hands()


def test_unexpected_error_of_a_mechanism_shows_only_its_type() -> None:
    rig = Rig(Mechanism([ValueError(CANARY)]))
    with pytest.raises(SaslAuthenticationError, match="SASL TEST failed with ValueError") as caught:
        rig.shake_hands()
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_exchange_without_end_is_refused() -> None:
    rig = Rig(Mechanism([b"on"] * 100))
    rig.shake_hands()
    for _ in range(15):
        rig.take()
        rig.say(b"and on")
    rig.take()
    with pytest.raises(SaslAuthenticationError, match="16 messages"):
        rig.say(b"and on")


def test_response_without_apis_is_not_a_refused_login() -> None:
    rig = Rig(Mechanism([b"secret"]))
    rig.authenticator.begin()
    rig.take()
    with pytest.raises(ProtocolError, match="names no api at all"):
        rig.answer(api_keys=())
    assert rig.authenticator.take_outgoing() is None


@pytest.mark.parametrize(
    "spoken", [SPOKEN[1:], ({"api_key": ApiKey.SASL_HANDSHAKE, "min_version": 0, "max_version": 0},)]
)
def test_node_without_the_framed_handshake_gets_nothing(spoken: tuple[Any, ...]) -> None:
    rig = Rig(Mechanism([b"secret"]))
    rig.authenticator.begin()
    rig.take()
    with pytest.raises(SaslAuthenticationError, match="SASL listener"):
        rig.answer(api_keys=spoken)
    assert rig.authenticator.take_outgoing() is None


def test_node_without_the_framed_exchange_gets_no_message() -> None:
    rig = Rig(Mechanism([b"secret"]))
    rig.authenticator.begin()
    rig.take()
    rig.answer(api_keys=SPOKEN[:1])
    rig.take()
    with pytest.raises(SaslAuthenticationError, match="SASL listener"):
        rig.answer(mechanisms=("TEST",))
    assert rig.authenticator.take_outgoing() is None


def test_refused_versions_request_raises() -> None:
    rig = Rig(Mechanism([b"one"]))
    rig.authenticator.begin()
    rig.take()
    with pytest.raises(BrokerError):
        rig.answer(error_code=ErrorCode.not_controller)


def test_answer_with_another_id_or_without_request_raises() -> None:
    rig = Rig(Mechanism([b"one", None]))
    rig.authenticator.begin()
    rig.take()
    with pytest.raises(ProtocolError, match="correlation id 5"):
        rig.authenticator.receive(struct.pack(">i", 5), 0)
    rig.answer(api_keys=SPOKEN)
    rig.take()
    rig.answer(mechanisms=())
    rig.take()
    rig.say()
    with pytest.raises(ProtocolError, match="SASL had sent no request"):
        rig.authenticator.receive(struct.pack(">i", FIRST_CORRELATION_ID), 0)


# ---- slow steps ------------------------------------------------------------------------------------------------------


def test_slow_step_runs_beside_and_is_awaited() -> None:
    mechanism = SlowMechanism([b"one", None])
    rig = Rig(mechanism)
    rig.shake_hands()
    rig.authenticator.advance(0)
    assert rig.authenticator.take_outgoing() is None
    assert mechanism.received == []
    rig.steps[0].finish()
    assert rig.woken == 1
    rig.authenticator.advance(0)
    assert b"one" in rig.take()
    rig.authenticator.advance(0)
    assert rig.authenticator.take_outgoing() is None, "the result of a step is sent once"
    rig.say(session_lifetime=10_000)
    assert not rig.authenticator.is_complete
    rig.steps[1].finish()
    rig.authenticator.advance(5_000)
    assert rig.authenticator.is_complete
    assert not rig.authenticator.is_due(5_000 + 8_400)


def test_failed_slow_step_raises_with_the_node() -> None:
    rig = Rig(SlowMechanism([SaslAuthenticationError("no")]))
    rig.shake_hands()
    rig.steps[0].finish()
    with pytest.raises(SaslAuthenticationError, match="Node 7 at there:1: no"):
        rig.authenticator.advance(0)


def test_message_during_a_slow_step_is_a_protocol_error() -> None:
    rig = Rig(SlowMechanism([b"one"]))
    rig.shake_hands()
    with pytest.raises(ProtocolError, match="SASL had sent no request"):
        rig.say(b"hurry")


@given(st.binary(max_size=200))
def test_any_bytes_of_a_node_end_in_a_kafka_error(payload: bytes) -> None:
    for steps in range(3):
        rig = Rig(Mechanism([b"one", None]))
        rig.authenticator.begin()
        rig.take()
        if steps >= 1:
            rig.answer(api_keys=SPOKEN)
            rig.take()
        if steps >= 2:
            rig.answer(mechanisms=())
            rig.take()
        correlation_id = struct.pack(">i", rig.asked[-1][2])
        try:
            rig.authenticator.receive(correlation_id + payload, 0)
        except KafkaError:
            continue
        assert not rig.authenticator.is_complete or steps == 2
