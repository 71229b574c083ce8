"""A thread that works until it is stopped. Its error is raised in the test's thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Final, Self

LIMIT_S: Final = 120


class Background(ABC):
    """A context manager: works until the block ends."""

    def __init__(self, name: str, pause_s: float) -> None:
        self._pause_s = pause_s
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the current step, and begin no other. Raises the error of the thread."""
        self._ended.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), f"the thread {self._thread.name} hangs"
        if self._failure is not None:
            raise self._failure

    @abstractmethod
    def _step(self) -> None:
        """Do one step in the thread, every `pause_s`."""

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._pause_s):
                self._step()
        except BaseException as failure:
            self._failure = failure
