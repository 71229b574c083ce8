"""The lateness of the machine does not count in the duration of a test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support import lateness
from support.fake_clock import FakeClock
from support.lateness import Stopwatch

PAUSE_S = 60
"""So long that the thread is not awake before it is stopped."""


@pytest.mark.parametrize(("passes_s", "own_s"), [(1, 1), (PAUSE_S, PAUSE_S), (PAUSE_S + 3, PAUSE_S)])
def test_stall_at_the_end_of_block_is_counted(monkeypatch: pytest.MonkeyPatch, passes_s: int, own_s: int) -> None:
    clock = FakeClock()
    monkeypatch.setattr(lateness, "_PAUSE_S", PAUSE_S)
    monkeypatch.setattr(lateness, "time", SimpleNamespace(monotonic=lambda: clock.now_ms() / 1_000))
    with Stopwatch() as watch:
        clock.advance(passes_s * 1_000)
    assert (watch.took_s, watch.own_s) == (passes_s, own_s)
