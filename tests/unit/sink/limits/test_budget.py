"""Which task may send, and when: never more than the limit and 5 % in ten seconds, and 95 % of it while rows wait."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate
from typing import Final

import pytest

from spark_kafka_sink.sink.limits.budget import (
    AHEAD_MS,
    BURST_MS,
    FORGET_MS,
    MOST_AHEAD,
    SLICE_MS,
    SPARE_MS,
    Budget,
    Rates,
)

WINDOW_MS: Final = 10_000
NO_LIMIT: Final = 10**12


class Load:
    """Tasks that join and leave at random, and send as soon as they may, for 25 seconds."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.rate = self._rng.choice((40, 1_000, 123_457, 5_000_000))
        self.by_bytes = self._rng.random() < 0.5
        rates: Rates = (NO_LIMIT, self.rate) if self.by_bytes else (self.rate, None)
        self.budget: Budget[int] = Budget(rates, 0)
        self.grants: list[tuple[int, int]] = []
        """Time and amount of each send."""
        self.sends_of_a_slice = self._rng.choice((1, 4, 30))
        self._ahead: dict[int, tuple[int, int]] = {}
        """Amount and number of the sends that a task may make without a question."""
        self._asked: dict[int, int] = {}
        self._ready_ms: dict[int, int] = {}
        self._next_task = 0

    def run(self, tasks: int, end_ms: int = 25_000) -> None:
        self._join(tasks)
        timer_ms = 0
        for now_ms in range(end_ms):
            if self._rng.random() < 0.002:
                self._change(tasks, now_ms)
            for task in [task for task, ready_ms in self._ready_ms.items() if ready_ms <= now_ms]:
                if self._sends_ahead(task, now_ms):
                    continue
                self._ask(task)
                timer_ms = min(timer_ms, now_ms)
            if now_ms < timer_ms:
                continue
            for task, ahead in self.budget.granted(now_ms):
                amount = self._asked.pop(task)
                self._ahead[task] = amount, ahead
                self._sent(task, amount, now_ms)
            timer_ms = now_ms + self.budget.wait_ms(now_ms) + self._rng.randrange(20)  # timers are late

    def _sends_ahead(self, task: int, now_ms: int) -> bool:
        amount, left = self._ahead.get(task, (0, 0))
        if left:
            self._ahead[task] = amount, left - 1
            self._sent(task, amount, now_ms)
        return left > 0

    def _sent(self, task: int, amount: int, now_ms: int) -> None:
        self.grants.append((now_ms, amount))
        self._ready_ms[task] = now_ms + self._rng.randrange(1, 40 if self.sends_of_a_slice == 1 else 5)

    def _join(self, tasks: int, now_ms: int = 0) -> None:
        for _ in range(tasks):
            self._ready_ms[self._next_task] = now_ms
            self._next_task += 1

    def _change(self, tasks: int, now_ms: int) -> None:
        """Some tasks are killed, and as many start."""
        living = [*self._ready_ms, *self._asked]
        for task in self._rng.sample(living, self._rng.randint(0, len(living))):
            self.budget.leave(task)
            self._ready_ms.pop(task, None)
            self._asked.pop(task, None)
            self._ahead.pop(task, None)
        self._join(tasks - len(self._ready_ms) - len(self._asked), now_ms + self._rng.randrange(1, 40))

    def _ask(self, task: int) -> None:
        del self._ready_ms[task]
        most = max(1, self.rate * SLICE_MS // 1000 // self.sends_of_a_slice)
        amount = max(1, most if self._rng.random() < 0.7 else self._rng.randint(1, most))
        self._asked[task] = amount
        self.budget.ask(task, 1 if self.by_bytes else amount, amount)

    def windows(self) -> list[int]:
        """Return what was sent in the ten seconds from each send on."""
        times = [ms for ms, _ in self.grants]
        sums = [0, *accumulate(amount for _, amount in self.grants)]
        return [sums[bisect_left(times, ms + WINDOW_MS)] - sums[bisect_left(times, ms)] for ms in times]


@pytest.mark.parametrize("tasks", [1, 2, 7, 64])
@pytest.mark.parametrize("seed", range(6))
def test_any_ten_seconds_have_the_limit_within_five_percent(seed: int, tasks: int) -> None:
    load = Load(seed * 100 + tasks)
    load.run(tasks)
    windows = load.windows()
    full = [sent for (ms, _), sent in zip(load.grants, windows, strict=True) if ms <= 25_000 - WINDOW_MS]
    assert max(windows) <= 1.05 * load.rate * 10, f"seed {seed}, {load.rate} a second"
    assert min(full) >= 0.95 * load.rate * 10, f"seed {seed}, {load.rate} a second"


def granted(budget: Budget[str], now_ms: int) -> list[str]:
    return [task for task, _ in budget.granted(now_ms)]


@pytest.mark.parametrize("rates", [(1_000_000, None), (None, 1_000_000), (1_000_000, 10_000_000)])
def test_a_query_far_below_its_limit_sends_in_advance_what_would_be_lost(rates: Rates) -> None:
    budget: Budget[str] = Budget(rates, 0)
    budget.ask("small", 1_000, 1_000)
    assert budget.granted(0) == [("small", MOST_AHEAD)]  # 1 ms each, of 50
    budget.ask("large", 8_000, 8_000)
    assert budget.granted(0) == [("large", (AHEAD_MS - MOST_AHEAD) // 8)]
    budget.ask("other", 8_000, 8_000)
    assert budget.granted(0) == [("other", 0)], "all of a query's tasks share what is given in advance"
    budget.leave("large")
    budget.ask("small", 8_000, 8_000)  # what both had in advance is over
    assert budget.granted(1_000) == [("small", AHEAD_MS // 8)]


def test_what_is_sent_in_advance_is_paid_at_once() -> None:
    budget: Budget[str] = Budget((1_000, None), 0)
    budget.ask("t", 5, 0)
    ((_, ahead),) = budget.granted(0)
    assert ahead == AHEAD_MS // 5
    budget.ask("next", 300, 0)
    assert budget.granted(0) == [("next", 0)]
    assert budget.wait_ms(0) == (1 + ahead) * 5 + 300 - BURST_MS


def test_near_the_limit_nothing_is_sent_in_advance() -> None:
    budget: Budget[str] = Budget((1_000, None), 0)
    budget.ask("t", BURST_MS - SPARE_MS, 0)
    budget.ask("t", 1, 0)
    assert budget.granted(0) == [("t", 0), ("t", 0)]


def test_a_task_gets_nothing_in_advance_while_another_one_waits() -> None:
    budget: Budget[str] = Budget((1_000_000, None), 0)
    budget.ask("first", 1, 0)
    budget.ask("second", 1, 0)
    assert budget.granted(0) == [("first", 0), ("second", MOST_AHEAD)]


def test_idle_time_is_saved_only_up_to_the_burst() -> None:
    budget: Budget[str] = Budget((1_000, None), 0)
    for _ in range(1_000):
        budget.ask("t", 10, 0)
    assert len(granted(budget, 60_000)) == BURST_MS // 10 + 1


def test_a_large_send_makes_the_next_one_wait_its_time() -> None:
    budget: Budget[str] = Budget((None, 1_000), 0)
    budget.ask("large", 1, 20_000)
    budget.ask("next", 1, 1)
    assert granted(budget, 0) == ["large"]
    assert budget.wait_ms(0) == 20_000 - BURST_MS
    assert granted(budget, 20_000 - BURST_MS - 1) == []
    assert granted(budget, 20_000 - BURST_MS) == ["next"]


def test_the_tighter_of_two_limits_counts() -> None:
    budget: Budget[str] = Budget((1_000, 1_000), 0)
    budget.ask("t", 1_000, 2_000)
    budget.granted(0)
    assert budget.wait_ms(0) == 2_000 - BURST_MS


def test_tasks_take_turns_in_the_order_of_their_requests() -> None:
    budget: Budget[str] = Budget((10, None), 0)
    for task in "abc":
        budget.ask(task, 10, 0)
    turns = ""
    for now_ms in range(0, 8_000, 10):
        for task in granted(budget, now_ms):
            turns += task
            budget.ask(task, 10, 0)
    assert turns == "abcabcabc"


def test_a_task_that_leaves_costs_the_others_nothing() -> None:
    budget: Budget[str] = Budget((10, None), 0)
    budget.ask("first", 100, 0)
    budget.granted(0)
    budget.ask("killed", 1_000, 0)
    budget.ask("other", 1, 0)
    budget.leave("killed")
    assert granted(budget, 10_000 - BURST_MS) == ["other"]


def test_a_budget_is_forgotten_only_when_it_is_idle_and_paid() -> None:
    budget: Budget[str] = Budget((1, None), 0)
    assert not budget.is_forgettable(FORGET_MS - 1)
    assert budget.is_forgettable(FORGET_MS)
    budget.ask("t", 1_000, 0)
    assert not budget.is_forgettable(FORGET_MS)
    budget.granted(FORGET_MS)
    assert not budget.is_forgettable(2 * FORGET_MS)
