"""Time as an argument.

The owner of a loop holds a `Clock` and reads it; all code below takes `now_ms`. Times are whole milliseconds of a
monotonic clock, without meaning outside the process. `wall_ms` is the time of day, for times that other parties read or
give: timestamps of records, decisions and reports, and the end of a token.
"""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

NEVER_MS: Final = -(2**62)
"""The time of an event that has not happened yet. Every wait since then is over."""


class Clock(Protocol):
    """The seam for the clock of a test."""

    def now_ms(self) -> int:
        """Return monotonic time in ms."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since the epoch."""
        ...

    def sleep_ms(self, duration_ms: int) -> None:
        """Sleep for `duration_ms`."""
        ...

    def wait(self, condition: threading.Condition, timeout_ms: int) -> None:
        """Wait on `condition`, which the caller holds, until notified or until `timeout_ms` have passed.

        May return early.
        """
        ...


class SystemClock:
    """The clock of the machine."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def sleep_ms(self, duration_ms: int) -> None:
        time.sleep(duration_ms / 1000)

    def wait(self, condition: threading.Condition, timeout_ms: int) -> None:
        condition.wait(min(timeout_ms / 1000, threading.TIMEOUT_MAX))  # a longer timeout would raise


def lock_timeout(limit_s: float | None) -> float:
    """Return the `timeout` of `Lock.acquire` for a limit in seconds, None for no limit. A longer one would raise."""
    return -1 if limit_s is None else min(max(0.0, limit_s), threading.TIMEOUT_MAX)
