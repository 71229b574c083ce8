"""OAUTHBEARER (RFC 7628): a bearer token, Kafka's extensions to it (KIP-342), and the cache that holds the token.

The connections of a client share the cache. The threads of slow steps use it: one of them fetches a token while the
others wait for it.
"""

from __future__ import annotations

import json
import logging
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    ConfigError,
    KafkaError,
    RetriableError,
    SaslAuthenticationError,
)
from spark_kafka_sink.common.texts import Secret, one_line

TokenProvider = Callable[[], tuple[str, int]]
"""Returns a new token and its end in ms since the epoch. It may block, and raise any error."""

_LONGEST_WAIT_S: Final = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RefreshRule:
    """When to fetch a token again: after `window_factor` of its life plus up to `window_jitter` of it, but not within
    `min_period_ms` of its beginning, and at least `buffer_ms` before its end. If the life is too short for both limits,
    only the factor counts. A failure is followed by a pause, which doubles each time. These are Kafka's sasl.login.*
    (org.apache.kafka.common.security.oauthbearer.internals.expiring.ExpiringCredentialRefreshingLogin).
    """

    window_factor: float = 0.8
    window_jitter: float = 0.05
    min_period_ms: int = 60_000
    buffer_ms: int = 300_000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 10_000

    def refresh_at_ms(self, start_ms: int, end_ms: int, rng: random.Random) -> int:
        life_ms = end_ms - start_ms
        window = min(self.window_factor + rng.random() * self.window_jitter, 1.0)  # above 1 the token has ended
        refresh_ms = start_ms + int(life_ms * window)
        if self.min_period_ms + self.buffer_ms > life_ms:
            return refresh_ms
        return max(min(refresh_ms, end_ms - self.buffer_ms), start_ms + self.min_period_ms)


@dataclass(frozen=True, slots=True)
class _Held:
    token: Secret
    refresh_at_ms: int
    end_ms: int
    wall_offset_ms: int
    """The time of day minus monotonic time, when the token was fetched."""

    def now_ms(self, clock: Clock) -> int:
        """Return the time of day, but not less than what has passed since the token was fetched: a wall clock that is
        set back makes no token live longer. Monotonic time alone stands still while the machine is suspended.
        """
        return max(clock.wall_ms(), clock.now_ms() + self.wall_offset_ms)


class TokenCache:
    """`get` returns a token that is valid now. A token's times are on the wall clock, as the provider's are. The time
    of the next attempt is monotonic, because a wall clock that is set back would delay the attempt.
    """

    def __init__(
        self,
        provider: TokenProvider,
        rule: RefreshRule,
        clock: Clock,
        rng: random.Random,
        longest_wait_s: float = _LONGEST_WAIT_S,
    ) -> None:
        """While one thread fetches a token, others wait for it, but at most `longest_wait_s`: the threads of
        connections that were closed meanwhile must end.
        """
        self._longest_wait_s = longest_wait_s
        self._provider = provider
        self._rule = rule
        self._clock = clock
        self._rng = rng
        self._lock = threading.Lock()
        self._held: _Held | None = None
        self._failures = 0
        self._not_before_ms = 0
        self._last_error: KafkaError | None = None

    def get(self) -> Secret:
        """Return a valid token. Raises SaslAuthenticationError if the provider refuses the credentials, RetriableError
        if it fails otherwise. During the pause after a failure it raises the same error without asking again. As long
        as the old token is valid, it is returned and nothing is raised.
        """
        if not self._lock.acquire(timeout=self._longest_wait_s):
            raise RetriableError("The token provider has been asked for a token and has not answered yet.")
        try:
            return self._get()
        finally:
            self._lock.release()

    def _get(self) -> Secret:
        held = self._held
        if held is not None and held.now_ms(self._clock) < held.refresh_at_ms:
            return held.token
        if self._clock.now_ms() >= self._not_before_ms:
            self._fetch()
        if self._last_error is None:
            assert self._held is not None
            return self._held.token
        if held is not None and held.now_ms(self._clock) < held.end_ms:  # the provider may have blocked
            return held.token
        raise type(self._last_error)(str(self._last_error))

    def _fetch(self) -> None:
        now_ms, monotonic_ms = self._clock.wall_ms(), self._clock.now_ms()
        try:
            token, end_ms = self._provider()
            self._held = self._checked(token, end_ms, now_ms, now_ms - monotonic_ms)
        except BaseException as error:  # such as SystemExit, which must end neither this thread nor the loop
            self._failures += 1
            rule = self._rule
            pause_ms = min(rule.retry_backoff_ms << min(self._failures - 1, 30), rule.retry_backoff_max_ms)
            self._not_before_ms = self._clock.now_ms() + pause_ms
            self._last_error = _without_secrets(error)
            log.warning("No new token for SASL OAUTHBEARER; trying again in %d ms: %s", pause_ms, self._last_error)
        else:
            self._failures, self._not_before_ms, self._last_error = 0, 0, None

    def _checked(self, token: object, end_ms: object, now_ms: int, wall_offset_ms: int) -> _Held:
        if not isinstance(token, str) or isinstance(end_ms, bool) or not isinstance(end_ms, int):
            raise SaslAuthenticationError(
                "The token provider must return a pair: a token (str) and its end (int, ms since the epoch)."
            )
        _check_token(token)  # here, because a file that is being written may be empty: then the old token is used
        if end_ms <= now_ms:
            raise RetriableError(f"The token provider returned a token that ended {now_ms - end_ms} ms ago.")
        refresh_at_ms = self._rule.refresh_at_ms(now_ms, end_ms, self._rng)
        return _Held(Secret(token), refresh_at_ms, end_ms, wall_offset_ms)


def _without_secrets(error: BaseException) -> KafkaError:
    """Return an error of this package as it is. Of another error show only the type: its text may show credentials."""
    if isinstance(error, (AuthenticationError, RetriableError)):
        return error
    return RetriableError(f"The token provider failed with {type(error).__name__}.")


# ---- the mechanism ---------------------------------------------------------------------------------------------------

_TOKEN: Final = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
_EXTENSION_NAME: Final = re.compile("[A-Za-z]+")
_EXTENSION_VALUE: Final = re.compile(r"[\x21-\x7e \t\r\n]+")
_LONGEST_ERROR: Final = 16_384
_ERROR_FIELDS: Final = ("status", "scope", "openid-configuration")


def check_extensions(extensions: Mapping[str, str]) -> None:
    """Raise ConfigError if a name or value would break the message or replace the token."""
    for name, value in extensions.items():
        if name == "auth" or not _EXTENSION_NAME.fullmatch(name):
            raise ConfigError(f"The SASL extension {name!r} needs another name: only letters, and not 'auth'.")
        if not _EXTENSION_VALUE.fullmatch(value):
            raise ConfigError(f"The SASL extension {name!r} has a value that is empty or not printable ASCII.")


class OAuthBearerMechanism:
    """Sends one message. A server that refuses it sends its reasons, gets an acknowledgement, and ends the login."""

    name: ClassVar[str] = "OAUTHBEARER"
    is_slow: ClassVar[bool] = True

    def __init__(self, token: Callable[[], Secret], extensions: Mapping[str, str]) -> None:
        """`token` returns a valid token, and may block. Raises ConfigError as `check_extensions` does."""
        check_extensions(extensions)
        self._token = token
        self._extensions = dict(extensions)
        self._sent: tuple[Secret, ...] = ()
        self._refusal: str | None = None

    @property
    def secrets(self) -> Sequence[Secret]:
        return self._sent

    def respond(self, challenge: bytes) -> bytes | None:
        if not self._sent:
            return self._begin(challenge)
        if self._refusal is not None:  # the server has given its reasons, so the login has failed whatever it says now
            raise SaslAuthenticationError(self._refusal)
        if not challenge:
            return None
        self._refusal = f"SASL OAUTHBEARER: the server refuses the token{_reasons(challenge, self._sent[0])}."
        return b"\x01"

    def _begin(self, challenge: bytes) -> bytes:
        if challenge:
            raise SaslAuthenticationError("SASL OAUTHBEARER: the server sent the first message, but the client must.")
        token = self._token()
        _check_token(token.reveal())
        self._sent = (token,)
        extensions = "".join(f"{name}={value}\x01" for name, value in self._extensions.items())
        return f"n,,\x01auth=Bearer {token.reveal()}\x01{extensions}\x01".encode()


def _check_token(token: str) -> None:
    """Raise SaslAuthenticationError for a token that would break the message. The text does not show it."""
    if not _TOKEN.fullmatch(token):
        found = "the token is empty" if not token else "a character is not allowed, such as a space or a line break"
        raise SaslAuthenticationError(
            f"SASL OAUTHBEARER: the token provider must return a valid bearer token (RFC 6750), and {found}."
        )


def _reasons(challenge: bytes, token: Secret) -> str:
    """Return the server's reasons for an error text (RFC 7628, section 3.2.2), without the token, which it may repeat.
    Reasons that are not JSON are ignored.
    """
    try:
        reasons = json.loads(challenge[:_LONGEST_ERROR].decode())
    except (ValueError, RecursionError):
        return ""
    if not isinstance(reasons, dict):
        return ""
    texts = {name: str(reasons[name]).replace(token.reveal(), "***") for name in _ERROR_FIELDS if name in reasons}
    return f": {', '.join(f'{name} {one_line(text)}' for name, text in texts.items())}" if texts else ""
