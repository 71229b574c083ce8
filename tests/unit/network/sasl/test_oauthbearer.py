"""OAUTHBEARER: the messages, and the cache of the token."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_clock import FakeClock

from spark_kafka_sink.common.errors import ConfigError, RetriableError, SaslAuthenticationError
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.network.sasl.oauthbearer import OAuthBearerMechanism, RefreshRule, TokenCache

TOKEN = "canary.token-1_x~/+=="


def mechanism(token: str = TOKEN, **extensions: str) -> OAuthBearerMechanism:
    return OAuthBearerMechanism(lambda: Secret(token), extensions)


def test_token_without_extensions_is_sent() -> None:
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
def test_malformed_extension_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="extension"):
        OAuthBearerMechanism(lambda: Secret(TOKEN), {name: value})


@pytest.mark.parametrize("token", ["", "a b", "a\x01auth=Bearer b", "a\r\nb", "t\u00f6ken", "=a"])
def test_malformed_token_is_not_sent_and_not_shown(token: str) -> None:
    with pytest.raises(SaslAuthenticationError, match="valid bearer token") as caught:
        mechanism(token).respond(b"")
    assert token not in str(caught.value) or token == ""


def test_refusal_is_acknowledged_and_stays() -> None:
    made = mechanism()
    made.respond(b"")
    assert made.respond(json.dumps({"status": "invalid_token", "scope": "kafka\nFATAL"}).encode()) == b"\x01"
    for _ in range(2):
        with pytest.raises(
            SaslAuthenticationError, match=r"refuses the token: status invalid_token, scope kafka\?FATAL"
        ):
            made.respond(b"")


def test_refusal_that_repeats_the_token_hides_it() -> None:
    made = mechanism()
    made.respond(b"")
    made.respond(json.dumps({"status": f"no good: {TOKEN}", "scope": "x" * 490 + TOKEN}).encode())
    with pytest.raises(SaslAuthenticationError, match=r"status no good: \*\*\*, scope x+\*\*\*") as caught:
        made.respond(b"")
    assert TOKEN[:4] not in str(caught.value)


@given(
    st.binary(min_size=1, max_size=300) | st.just(b"[" * 16_000) | st.just(b'["status"]') | st.just(b'{"status": {}}')
)
def test_refusal_with_any_reasons_raises(challenge: bytes) -> None:
    made = mechanism()
    made.respond(b"")
    assert made.respond(challenge) == b"\x01"
    with pytest.raises(SaslAuthenticationError, match="refuses the token") as caught:
        made.respond(b"")
    assert len(str(caught.value)) < 2_000


def test_server_that_speaks_first_gets_no_token() -> None:
    with pytest.raises(SaslAuthenticationError, match="sent the first message"):
        mechanism().respond(b"hello")


def test_token_is_never_shown() -> None:
    made = mechanism()
    made.respond(b"")
    assert TOKEN not in repr(made) + str(vars(made))
    assert [secret.reveal() for secret in made.secrets] == [TOKEN]


HOUR_MS = 3_600_000
CANARY = "canary-secret"


class Provider:
    """Returns token-1, token-2, ..., each valid for `life_ms`, or raises."""

    def __init__(self, clock: FakeClock, life_ms: int = HOUR_MS) -> None:
        self.clock = clock
        self.life_ms = life_ms
        self.calls = 0
        self.error: BaseException | None = None
        self.takes_ms = 0

    def __call__(self) -> tuple[str, int]:
        self.calls += 1
        self.clock.advance(self.takes_ms)
        if self.error is not None:
            raise self.error
        return f"token-{self.calls}", self.clock.wall_ms() + self.life_ms


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def provider(clock: FakeClock) -> Provider:
    return Provider(clock)


@pytest.fixture
def cache(clock: FakeClock, provider: Provider) -> TokenCache:
    return TokenCache(provider, RefreshRule(), clock, random.Random(1))


def test_token_is_fetched_at_first_use_and_kept(cache: TokenCache, provider: Provider, clock: FakeClock) -> None:
    assert provider.calls == 0
    assert [cache.get().reveal() for _ in range(3)] == ["token-1"] * 3
    clock.advance(HOUR_MS * 79 // 100)
    assert cache.get().reveal() == "token-1"
    clock.advance(HOUR_MS * 7 // 100)
    assert cache.get().reveal() == "token-2"
    assert provider.calls == 2


@given(st.integers(1, 10**9), st.integers(0, 2**32))
def test_renewal_time_lies_within_lifetime_and_rule(life_ms: int, seed: int) -> None:
    rule = RefreshRule()
    at_ms = rule.refresh_at_ms(1_000, 1_000 + life_ms, random.Random(seed))
    assert 1_000 <= at_ms <= 1_000 + life_ms
    if life_ms >= rule.min_period_ms + rule.buffer_ms:
        assert 1_000 + rule.min_period_ms <= at_ms <= 1_000 + life_ms - rule.buffer_ms


@pytest.mark.parametrize(
    ("rule", "at_ms"),
    [
        (RefreshRule(0.5, 0.2, 0, 0), 600_000),
        (RefreshRule(0.5, 0.2, 700_000, 0), 700_000),
        (RefreshRule(0.5, 0.2, 0, 450_000), 550_000),
        (RefreshRule(0.5, 0.2, 700_000, 300_000), 700_000),
        (RefreshRule(0.5, 0.2, 700_000, 301_000), 600_000),
        (RefreshRule(0.5, 2.0, 0, 0), 1_000_000),
    ],
    ids=["window", "least period", "buffer", "both just fit", "both too long", "beyond the end"],
)
def test_refresh_time_follows_the_rule(rule: RefreshRule, at_ms: int) -> None:
    class Half(random.Random):
        def random(self) -> float:
            return 0.5

    assert rule.refresh_at_ms(7, 1_000_007, Half()) == at_ms + 7


@pytest.mark.parametrize("life_ms", [300_000, 7 * 60_000])
def test_expired_token_is_not_returned_for_any_window(provider: Provider, clock: FakeClock, life_ms: int) -> None:
    """The largest allowed factor and jitter add up to more than a lifetime."""
    provider.life_ms = life_ms
    cache = TokenCache(provider, RefreshRule(window_factor=1.0, window_jitter=0.25), clock, random.Random(1))
    assert cache.get().reveal() == "token-1"
    clock.advance(life_ms)
    assert cache.get().reveal() == "token-2"


def test_failed_renewal_leaves_the_token_in_use_until_its_end(
    cache: TokenCache, provider: Provider, clock: FakeClock
) -> None:
    cache.get()
    clock.advance(HOUR_MS * 9 // 10)
    provider.error = RetriableError("the endpoint is away")
    assert cache.get().reveal() == "token-1"
    clock.advance(HOUR_MS // 10)
    with pytest.raises(RetriableError, match="away"):
        cache.get()
    provider.error = None
    clock.advance(10_000)
    assert cache.get().reveal() == "token-4"


def test_failures_are_not_repeated_at_once_and_the_pause_doubles(
    cache: TokenCache, provider: Provider, clock: FakeClock
) -> None:
    provider.error = RetriableError("the endpoint is away")
    for _ in range(60):
        with pytest.raises(RetriableError, match="away"):
            cache.get()
        clock.advance(1_000)
    assert provider.calls == 12  # at 0, 1, 2, 3, 4, 6, 10, 17, 27, 37, 47 and 57 seconds
    provider.error = None
    clock.advance(10_000)
    assert cache.get().reveal() == f"token-{provider.calls}"


def test_wall_clock_set_back_does_not_delay_an_attempt(cache: TokenCache, provider: Provider, clock: FakeClock) -> None:
    provider.error = RetriableError("the endpoint is away")
    with pytest.raises(RetriableError, match="away"):
        cache.get()
    provider.error = None
    clock.set_wall(clock.wall_ms() - HOUR_MS)
    clock.advance(100)
    assert cache.get().reveal() == "token-2"


@pytest.mark.parametrize("is_endpoint_away", [False, True])
def test_wall_clock_set_back_keeps_no_expired_token(
    cache: TokenCache, provider: Provider, clock: FakeClock, is_endpoint_away: bool
) -> None:
    """Bug: the token was sent for as much longer as the clock was set back. A broker refused it, and the producer had
    failed for good.
    """
    assert cache.get().reveal() == "token-1"
    clock.set_wall(clock.wall_ms() - HOUR_MS)
    clock.advance(HOUR_MS)
    if is_endpoint_away:
        provider.error = RetriableError("the endpoint is away")
        with pytest.raises(RetriableError, match="away"):
            cache.get()
    else:
        assert cache.get().reveal() == "token-2"


def test_token_is_fetched_again_after_the_machine_was_suspended(cache: TokenCache, clock: FakeClock) -> None:
    """Monotonic time stands still meanwhile."""
    assert cache.get().reveal() == "token-1"
    clock.set_wall(clock.wall_ms() + HOUR_MS)
    assert cache.get().reveal() == "token-2"


def test_pause_begins_at_the_failure_of_the_provider(cache: TokenCache, provider: Provider, clock: FakeClock) -> None:
    provider.error = RetriableError("the endpoint is away")
    provider.takes_ms = 20_000
    for _ in range(2):
        with pytest.raises(RetriableError, match="away"):
            cache.get()
    assert provider.calls == 1
    clock.advance(100)
    with pytest.raises(RetriableError, match="away"):
        cache.get()
    assert provider.calls == 2


def test_token_that_ends_during_a_failed_fetch_is_not_returned(
    cache: TokenCache, provider: Provider, clock: FakeClock
) -> None:
    """A broker refuses an expired token, and the refusal is final."""
    cache.get()
    provider.error = RetriableError("the endpoint is away")
    provider.takes_ms = 20_000
    clock.advance(HOUR_MS - 20_000)
    with pytest.raises(RetriableError, match="away"):
        cache.get()


def test_refusal_is_final(cache: TokenCache, provider: Provider) -> None:
    provider.error = SaslAuthenticationError("no such client")
    for _ in range(2):
        with pytest.raises(SaslAuthenticationError, match="no such client"):
            cache.get()
    assert provider.calls == 1


def test_foreign_error_shows_only_its_type(
    cache: TokenCache, provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    provider.error = ValueError(f"bad secret {CANARY}")
    with caplog.at_level(logging.DEBUG), pytest.raises(RetriableError, match="ValueError") as caught:
        cache.get()
    assert CANARY not in str(caught.value) + caplog.text
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
def test_base_exception_of_a_provider_is_retriable(
    cache: TokenCache, provider: Provider, clock: FakeClock, error: type[BaseException]
) -> None:
    """It would end the Sender's thread, and so the producer."""
    provider.error = error(CANARY)
    with pytest.raises(RetriableError, match=f"failed with {error.__name__}"):
        cache.get()
    provider.error = None
    clock.advance(1_000)
    assert cache.get().reveal() == "token-2"


@pytest.mark.parametrize(
    "given_back", [None, "token", ("token", None), ("token", True), (b"token", 10**15), ("t", 2e12), ("t", "2e12")]
)
def test_malformed_result_of_a_provider_is_refused(clock: FakeClock, given_back: Any) -> None:
    cache = TokenCache(lambda: given_back, RefreshRule(), clock, random.Random(1))
    if isinstance(given_back, tuple):
        with pytest.raises(SaslAuthenticationError, match="must return a pair"):
            cache.get()
    else:
        with pytest.raises(RetriableError):
            cache.get()


@pytest.mark.parametrize("token", ["", "token-2\n"])
def test_malformed_new_token_leaves_the_old_one_in_use(clock: FakeClock, token: str) -> None:
    """Bug: a token file was empty for a moment, while another program wrote it. The empty token replaced the old one,
    which was valid, and the login failed for good.
    """
    given_back = ["token-1", token, "token-3"]
    cache = TokenCache(lambda: (given_back.pop(0), clock.wall_ms() + HOUR_MS), RefreshRule(), clock, random.Random(1))
    cache.get()
    clock.advance(HOUR_MS * 9 // 10)
    assert cache.get().reveal() == "token-1"
    clock.advance(1_000)
    assert cache.get().reveal() == "token-3"


@pytest.mark.parametrize("token", ["", "a b"])
def test_malformed_first_token_is_refused(clock: FakeClock, token: str) -> None:
    cache = TokenCache(lambda: (token, clock.wall_ms() + HOUR_MS), RefreshRule(), clock, random.Random(1))
    with pytest.raises(SaslAuthenticationError, match="valid bearer token"):
        cache.get()


@pytest.mark.parametrize("ago_ms", [0, 1])
def test_expired_token_is_refused(clock: FakeClock, provider: Provider, cache: TokenCache, ago_ms: int) -> None:
    provider.life_ms = -ago_ms
    with pytest.raises(RetriableError, match=f"ended {ago_ms} ms ago"):
        cache.get()


def test_concurrent_gets_make_one_call(clock: FakeClock) -> None:
    entered, release = threading.Event(), threading.Event()
    calls = []

    def provider() -> tuple[str, int]:
        calls.append(1)
        entered.set()
        assert release.wait(10)
        return "token", clock.wall_ms() + HOUR_MS

    cache = TokenCache(provider, RefreshRule(), clock, random.Random(1))
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get().reveal())) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    release.set()
    for thread in threads:
        thread.join(10)
    assert found == ["token"] * 5
    assert len(calls) == 1


def test_wait_for_a_hanging_provider_is_limited(clock: FakeClock) -> None:
    entered, release = threading.Event(), threading.Event()

    def provider() -> tuple[str, int]:
        entered.set()
        assert release.wait(10)
        return "token", clock.wall_ms() + HOUR_MS

    cache = TokenCache(provider, RefreshRule(), clock, random.Random(1), longest_wait_s=0.01)
    first = threading.Thread(target=cache.get)
    first.start()
    assert entered.wait(10)
    with pytest.raises(RetriableError, match="has not answered yet"):
        cache.get()
    release.set()
    first.join(10)
    assert cache.get().reveal() == "token"


def test_new_token_resets_the_pause(
    cache: TokenCache, provider: Provider, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        for _ in range(3):
            provider.error = OSError()
            with pytest.raises(RetriableError):
                cache.get()
            clock.advance(10_000)
        provider.error = None
        cache.get()
        clock.advance(HOUR_MS)
    texts = [text for text in caplog.messages if text.startswith("No new token")]
    assert [re.findall("[0-9]+", text)[0] for text in texts] == ["100", "200", "400"] * 2
