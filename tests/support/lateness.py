"""How late a busy machine wakes the threads of this process. Time limits in tests allow for it."""

from __future__ import annotations

import time
from typing import Final, Self

from support.background import Background

_PAUSE_S: Final = 0.01
_STALL_S: Final = 0.01
"""A shorter delay is normal for every thread."""


class Lateness(Background):
    """A thread that sleeps 10 ms at a time, and notes by how much longer it slept."""

    def __init__(self) -> None:
        super().__init__("lateness", _PAUSE_S)
        self._last = time.monotonic()
        self._stalls: list[tuple[float, float]] = []

    def stop(self) -> None:
        super().stop()
        self._step()  # after a stall other threads may wake before this one

    def _step(self) -> None:
        now = time.monotonic()
        if (late_s := now - self._last - _PAUSE_S) > _STALL_S:
            self._stalls.append((now, late_s))
        self._last = now

    def worst_s(self, window_s: float) -> float:
        """Return the longest total delay of this thread within any `window_s` seconds."""
        ends = [now for now, _ in self._stalls]
        return max((sum(late for at, late in self._stalls if end - window_s <= at <= end) for end in ends), default=0)


class Stopwatch(Lateness):
    """The time that the block takes: `took_s` by the clock, `own_s` without the lateness of the machine."""

    took_s = own_s = 0.0

    def __enter__(self) -> Self:
        self._began = self._last = time.monotonic()
        return super().__enter__()

    def stop(self) -> None:
        self.took_s = time.monotonic() - self._began
        super().stop()
        self.own_s = max(0.0, self.took_s - self.worst_s(self.took_s + _PAUSE_S))
