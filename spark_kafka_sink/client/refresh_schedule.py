"""When metadata may and must be fetched: ages, and pauses that grow. No lock of its own; `Metadata` holds its own
around every call.
"""

from __future__ import annotations

import random

from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.common.clock import NEVER_MS


class RefreshSchedule:
    """The pause after a fetch grows in two ways: while fetches fail, and while they succeed but bring nothing new
    (KIP-580, KAFKA-15868).

    Times in ms. A pause is drawn once, when a fetch ends, so that asking twice gives the same answer.
    """

    def __init__(self, backoff_ms: int, backoff_max_ms: int, expire_ms: int, rng: random.Random) -> None:
        self.expire_ms = expire_ms
        self.last_refresh_ms = NEVER_MS
        self.last_successful_refresh_ms = NEVER_MS
        self._backoff = ExponentialBackoff.doubling(backoff_ms, backoff_max_ms, rng)
        self._failures = 0
        self._failure_pause_ms = self._backoff.backoff_ms(0)
        self._equivalent_responses = 0
        self._equivalent_pause_ms = 0

    def time_to_expire(self, now_ms: int) -> int:
        """How long until what is known is too old; 0 = it is."""
        return max(self.last_successful_refresh_ms + self.expire_ms - now_ms, 0)

    def time_to_allow_update(self, now_ms: int) -> int:
        """The rest of the pause since the last fetch."""
        if self.last_successful_refresh_ms + self.expire_ms <= now_ms:
            self.brought_news()  # a refresh for age alone does not try again, so its pause does not grow
        pause_ms = max(self._failure_pause_ms, self._equivalent_pause_ms)
        left_ms = self.last_refresh_ms + pause_ms - now_ms
        return left_ms if left_ms > 0 else 0

    def time_to_next_update(self, now_ms: int, is_wanted: bool) -> int:
        """How long until the next fetch: when one `is_wanted`, or what is known is too old, and the pause is over."""
        pause_ms = self.time_to_allow_update(now_ms)
        if is_wanted:
            return pause_ms
        age_ms = self.last_successful_refresh_ms + self.expire_ms - now_ms
        return age_ms if age_ms > pause_ms else pause_ms

    def at_once(self) -> None:
        """No pause before the next fetch."""
        self.last_refresh_ms = NEVER_MS
        self.brought_news()

    def succeeded(self, is_partial: bool, now_ms: int) -> None:
        """A fetch was answered. Counts as bringing nothing new until `brought_news` says otherwise."""
        self.last_refresh_ms = now_ms
        if not is_partial:
            self.last_successful_refresh_ms = now_ms
        self._failures = 0
        self._failure_pause_ms = self._backoff.backoff_ms(0)
        self._equivalent_pause_ms = self._backoff.backoff_ms(self._equivalent_responses)
        self._equivalent_responses += 1

    def failed(self, now_ms: int) -> None:
        """A fetch brought nothing."""
        self.last_refresh_ms = now_ms
        self._failure_pause_ms = self._backoff.backoff_ms(self._failures)
        self._failures += 1
        self.brought_news()

    def brought_news(self) -> None:
        """Something is new, or newly wanted: the pause for lack of news starts over."""
        self._equivalent_responses = 0
        self._equivalent_pause_ms = 0
