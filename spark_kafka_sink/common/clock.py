"""Time as an argument.

A loop's owner holds a `Clock` and reads it; everything below takes `now_ms`. Times are whole milliseconds of a
monotonic clock and mean nothing outside the process; `wall_ms` is the time of day, for what others read or have said:
the timestamps of records, decisions and reports, the end of a token.
"""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

NEVER_MS: Final = -(2**62)
"""The time of something that has not happened yet; any wait counted from it is long over."""


class Clock(Protocol):
    """The seam at which tests put a clock of their own."""

    def now_ms(self) -> int:
        """Monotonic time in ms."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since the epoch."""
        ...

    def sleep_ms(self, duration_ms: int) -> None:
        """Let `duration_ms` pass."""
        ...

    def wait(self, condition: threading.Condition, timeout_ms: int) -> None:
        """Wait on `condition`, which the caller holds, until notified or until `timeout_ms` have passed. May wake
        early.
        """
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def sleep_ms(self, duration_ms: int) -> None:
        time.sleep(duration_ms / 1000)

    def wait(self, condition: threading.Condition, timeout_ms: int) -> None:
        condition.wait(min(timeout_ms / 1000, threading.TIMEOUT_MAX))  # beyond that it raises
