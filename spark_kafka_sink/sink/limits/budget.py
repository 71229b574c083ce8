"""The budget of a query: which task may send next, and when. Pure decisions: times come in as `now_ms`.

Each limit is a clock that every send moves on by the time that it takes at the limit. The next send may begin when all
these clocks are due. So a send that is larger than what is left goes through, and those after it wait longer.
A clock that is late, because tasks had nothing to send, may catch up only `BURST_MS`.

In any window of ten seconds at most `BURST_MS` and one send (of about `SLICE_MS`, see client.py) come on top of the
limit: 3.5 %. One thread uses it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Generic, TypeVar

Task = TypeVar("Task")

BURST_MS: Final = 250
"""What an idle query may save up. It also makes up for tasks and timers that are late."""
SLICE_MS: Final = 100
"""A task asks for about as much as the limit gives in this time, or for one record."""
FORGET_MS: Final = 60_000

Rates = tuple[int | None, int | None]
"""Records and bytes per second; None: no limit."""


class Budget(Generic[Task]):
    """The budget of one query. Tasks wait in the order in which they ask, each for one send at a time."""

    def __init__(self, rates: Rates, now_ms: int) -> None:
        self._ms_per_unit = [0.0 if rate is None else 1000 / rate for rate in rates]
        self._due_ms = [float(now_ms - BURST_MS)] * len(rates)
        self._waiting: deque[tuple[Task, tuple[int, int]]] = deque()
        self.last_used_ms = now_ms

    @property
    def waiting(self) -> list[Task]:
        """The tasks that wait, the next one first."""
        return [task for task, _ in self._waiting]

    def ask(self, task: Task, records: int, size: int) -> None:
        """Let `task` wait for a send of so many records and bytes."""
        self._waiting.append((task, (records, size)))

    def leave(self, task: Task) -> None:
        """Forget what `task` waits for, because it has ended. What it did not get stays for the other tasks."""
        self._waiting = deque(each for each in self._waiting if each[0] != task)

    def granted(self, now_ms: int) -> list[Task]:
        """Return the tasks that may send now. They wait no more."""
        tasks = []
        while self._waiting and self.wait_ms(now_ms) == 0:
            task, amounts = self._waiting.popleft()
            for at, amount in enumerate(amounts):
                begin = max(self._due_ms[at], now_ms - BURST_MS)
                self._due_ms[at] = begin + amount * self._ms_per_unit[at]
            self.last_used_ms = now_ms
            tasks.append(task)
        return tasks

    def wait_ms(self, now_ms: int) -> int:
        """Return the time until the next send may begin."""
        return max(0, math.ceil(max(self._due_ms) - now_ms))

    def is_forgettable(self, now_ms: int) -> bool:
        """Return whether a new budget would decide in the same way."""
        return not self._waiting and self.wait_ms(now_ms) == 0 and now_ms - self.last_used_ms >= FORGET_MS
