"""The budget of a query: which task may send next, and when. Pure decisions: times come in as `now_ms`.

Each limit is a clock that every send moves on by the time that it takes at the limit. The next send may begin when all
these clocks are due. So a send that is larger than what is left goes through, and those after it wait longer.
A clock that is late, because tasks had nothing to send, may catch up only `BURST_MS`.

While a query is far below its limit, a task also gets further sends in advance, so that it need not ask for each one. A
question stops a task for some ms, because it waits for its turn in the server, and then in its own process. Such sends
are paid when they are given. They are taken only from what would be lost otherwise, and only few may be open.

In any window of ten seconds at most `BURST_MS`, one send (of about `SLICE_MS`, see limiter.py) and `AHEAD_MS` come on
top of the limit: 4 %. One thread uses it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar

Task = TypeVar("Task")

BURST_MS: Final = 250
"""What an idle query may save up. It also makes up for tasks and timers that are late."""
SLICE_MS: Final = 100
"""A task asks for about as much as the limit gives in this time, or for one record."""
AHEAD_MS: Final = 50
"""What all tasks of a query may have in advance. What a task does not use of it is lost."""
SPARE_MS: Final = BURST_MS // 2
"""What the query must have saved up after a task got sends in advance."""
MOST_AHEAD: Final = 15
"""Sends that a task may have in advance."""
FORGET_MS: Final = 60_000

Rates = tuple[int | None, int | None]
"""Records and bytes per second; None: no limit."""


class Grant(NamedTuple, Generic[Task]):
    """A task may send what it asked for, and `ahead` times as much later, without another question."""

    task: Task
    ahead: int


class Budget(Generic[Task]):
    """The budget of one query. Tasks wait in the order in which they ask, each for one send at a time."""

    def __init__(self, rates: Rates, now_ms: int) -> None:
        self._ms_per_unit = [0.0 if rate is None else 1000 / rate for rate in rates]
        self._due_ms = [float(now_ms - BURST_MS)] * len(rates)
        self._waiting: deque[tuple[Task, tuple[int, int]]] = deque()
        self._ahead_ms: dict[Task, float] = {}
        """The cost of what tasks may have in advance."""
        self.last_used_ms = now_ms

    @property
    def waiting(self) -> list[Task]:
        """The tasks that wait, the next one first."""
        return [task for task, _ in self._waiting]

    def ask(self, task: Task, records: int, size: int) -> None:
        """Let `task` wait for a send of so many records and bytes. What it had in advance is used, or lost."""
        self._ahead_ms.pop(task, None)
        self._waiting.append((task, (records, size)))

    def leave(self, task: Task) -> None:
        """Forget what `task` waits for, because it has ended. What it did not get stays for the other tasks."""
        self._ahead_ms.pop(task, None)
        self._waiting = deque(each for each in self._waiting if each[0] != task)

    def granted(self, now_ms: int) -> list[Grant[Task]]:
        """Return what is granted now. The tasks wait no more."""
        grants = []
        while self._waiting and self.wait_ms(now_ms) == 0:
            task, amounts = self._waiting.popleft()
            costs = [amount * per_unit for amount, per_unit in zip(amounts, self._ms_per_unit, strict=True)]
            self._due_ms = [max(due, now_ms - BURST_MS) + cost for due, cost in zip(self._due_ms, costs, strict=True)]
            ahead = self._ahead(max(costs), now_ms)
            self._due_ms = [due + ahead * cost for due, cost in zip(self._due_ms, costs, strict=True)]
            if ahead:
                self._ahead_ms[task] = ahead * max(costs)
            self.last_used_ms = now_ms
            grants.append(Grant(task, ahead))
        return grants

    def _ahead(self, cost: float, now_ms: int) -> int:
        """Return how many sends that cost so many ms are granted in advance: none to a task while others wait."""
        room_ms = min(now_ms - SPARE_MS - max(self._due_ms), AHEAD_MS - sum(self._ahead_ms.values()))
        return 0 if self._waiting or not cost else max(0, min(MOST_AHEAD, int(room_ms / cost)))

    def wait_ms(self, now_ms: int) -> int:
        """Return the time until the next send may begin."""
        return max(0, math.ceil(max(self._due_ms) - now_ms))

    def is_forgettable(self, now_ms: int) -> bool:
        """Return whether a new budget would decide in the same way."""
        return not self._waiting and self.wait_ms(now_ms) == 0 and now_ms - self.last_used_ms >= FORGET_MS
