"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings


def test_no_example_of_a_property_fails_because_the_machine_stalls_in_it() -> None:
    assert settings().deadline is None
