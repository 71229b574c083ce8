"""Exponential backoff: one formula for metadata refreshes, reconnects, connection setup timeouts and retries."""

from __future__ import annotations

import random
from typing import Final, Self

FOREVER_MS: Final = 2**63 - 1
"""An endless delay: only an event from the network will change the state."""
COORDINATOR_BACKOFF_MS: Final = 20
"""The first wait for a coordinator, which loads its state or completes a transaction: both take milliseconds."""


class ExponentialBackoff:
    """`initial_ms * multiplier ** attempts`, spread by ±`jitter`, never above `max_ms`
    (org.apache.kafka.common.utils.ExponentialBackoff).

    A `max_ms` at or below `initial_ms` gives the constant `max_ms`, without jitter.
    """

    def __init__(self, initial_ms: int, multiplier: int, max_ms: int, jitter: float, rng: random.Random) -> None:
        self._initial_ms = min(initial_ms, max_ms)
        self._multiplier = multiplier
        self._max_ms = max_ms
        self._jitter = jitter
        self._rng = rng
        self._is_constant = max_ms <= initial_ms

    @classmethod
    def doubling(cls, initial_ms: int, max_ms: int, rng: random.Random) -> Self:
        """Return the backoff of Kafka's clients: each wait is twice the one before, with a jitter of 20 %."""
        return cls(initial_ms, 2, max_ms, 0.2, rng)

    def backoff_ms(self, attempts: int) -> int:
        """Return the wait in ms after `attempts` failures; about `initial_ms` for 0."""
        if self._is_constant:
            return self._initial_ms
        term = self._initial_ms
        for _ in range(attempts):
            if term >= self._max_ms or term == 0:
                break
            term *= self._multiplier
        spread = self._rng.uniform(1 - self._jitter, 1 + self._jitter)
        return min(int(min(term, self._max_ms) * spread), self._max_ms)
