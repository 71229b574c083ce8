"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings


def test_stalled_machine_fails_no_hypothesis_example() -> None:
    assert settings().deadline is None
