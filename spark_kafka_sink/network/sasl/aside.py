"""Steps that compute or wait for long, on a thread beside the loop: each its own, which ends with the step.

The loop asks whether the step is done; the thread wakes it when it is. A step that nobody asks about any more, because
its connection is gone, ends by itself and its result is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from spark_kafka_sink.common.errors import RetriableError

T = TypeVar("T")


class Step(Protocol[T]):  # type: ignore[misc]
    """A step under way."""

    @property
    def is_done(self) -> bool: ...

    def result(self) -> T:
        """What it gave, or raises what it raised. Only when it is done."""
        ...


class StepRunner(Protocol):
    """Begins a step; `on_done` is called when it has ended, from whatever thread it ran on."""

    def __call__(self, run: Callable[[], T], on_done: Callable[[], None]) -> Step[T]: ...


class _AsideStep(Generic[T]):
    def __init__(self, run: Callable[[], T], on_done: Callable[[], None]) -> None:
        self._run = run
        self._on_done = on_done
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.is_done = False
        threading.Thread(target=self._work, name="spark-kafka-sink-sasl", daemon=True).start()

    def _work(self) -> None:
        try:
            self._value.append(self._run())
        except BaseException as error:  # it is the loop's to judge
            self._error = error
        self.is_done = True
        self._on_done()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


def run_aside(run: Callable[[], T], on_done: Callable[[], None]) -> Step[T]:
    """The `StepRunner` of a client. Raises RetriableError where the system gives it no thread."""
    try:
        return _AsideStep(run, on_done)
    except RuntimeError as error:  # this login's failure alone, not that of the loop's turn
        raise RetriableError(f"No thread for a slow step of the login: {error}.") from None
