"""Limits of time in the rows of the fault matrix."""

from __future__ import annotations

import pytest
from support import scripted_stage
from support.lateness import Stopwatch
from support.scripted_stage import outcome_by


class Slow:
    """Takes 1.3 s, by no clock."""

    def flush(self, timeout: float) -> None:
        if timeout < 1.3:
            raise TimeoutError


@pytest.mark.parametrize(("late_s", "is_in_time"), [(0.25, True), (0.05, False)])
def test_lateness_of_machine_does_not_count_for_records(
    monkeypatch: pytest.MonkeyPatch, late_s: float, is_in_time: bool
) -> None:
    class Late(Stopwatch):
        def stop(self) -> None:
            super().stop()
            self.took_s, self.own_s = 1.3, 1.3 - late_s

    monkeypatch.setattr(scripted_stage, "Stopwatch", Late, raising=False)
    if is_in_time:
        outcome_by(1.1, Slow(), [])  # type: ignore[arg-type]
    else:
        with pytest.raises(AssertionError, match=r"1\.30 s"):
            outcome_by(1.1, Slow(), [])  # type: ignore[arg-type]
