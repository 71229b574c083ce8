"""A clock that moves only by calls."""

from __future__ import annotations

import threading
from collections.abc import Callable


class FakeClock:
    """`common.clock.Clock` for one thread. `wait` calls `on_wait` in place of other threads."""

    def __init__(self, now_ms: int = 1_000_000, wall_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._wall_offset_ms = wall_ms - now_ms
        self.on_wait: Callable[[int], object] | None = None
        """Called with the timeout in ms, without the lock of the condition waited on; it may move the clock. Without it
        a wait lasts its whole timeout."""

    def now_ms(self) -> int:
        return self._now_ms

    def wall_ms(self) -> int:
        return self._now_ms + self._wall_offset_ms

    def set_wall(self, wall_ms: int) -> None:
        """Set the wall clock, as an administrator or NTP does."""
        self._wall_offset_ms = wall_ms - self._now_ms

    def advance(self, duration_ms: int) -> None:
        if duration_ms < 0:
            raise ValueError(f"time does not go back: {duration_ms}")
        self._now_ms += duration_ms

    def advance_to(self, now_ms: int) -> None:
        self.advance(max(0, now_ms - self._now_ms))

    def sleep_ms(self, duration_ms: int) -> None:
        self.advance(max(0, duration_ms))

    def wait(self, condition: threading.Condition, timeout_ms: int) -> None:
        if self.on_wait is None:
            self.advance(max(0, timeout_ms))
            return
        condition.release()
        try:
            self.on_wait(timeout_ms)
        finally:
            condition.acquire()
