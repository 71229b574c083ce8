"""The subclasses in tests that `make test` leaves out override existing methods. Without this test a rename would break
them unseen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from support.killed_source import KilledSource, KilledWriter
from support.killed_spark import KilledDriver, KilledSink


def overriding() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    stand_ins = (KilledDriver, KilledSink, KilledSource, KilledWriter)
    return [
        (getattr(stand_in, name), getattr(stand_in.__base__, name))
        for stand_in in stand_ins
        for name, method in vars(stand_in).items()
        if inspect.isroutine(method)
    ]


@pytest.mark.parametrize(("method", "overridden"), overriding(), ids=lambda each: each.__qualname__)
def test_overrides_take_the_arguments_of_their_methods(
    method: Callable[..., Any], overridden: Callable[..., Any]
) -> None:
    assert list(inspect.signature(method).parameters) == list(inspect.signature(overridden).parameters)
