"""The cluster's transaction.version changes while a query runs: an upgrade of its brokers is finished, or taken back.

Brokers go by the version of each request (org.apache.kafka.coordinator.transaction.TransactionCoordinator). A client
learns of the change with its next connection, so a driver and its tasks may use both versions beside each other, and a
transaction that began under one may be ended under the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from support.exactly_once_model.world import Plan, World

T = TypeVar("T")
_LAST_CHANGE = 50
_LONGEST = 25


@dataclass(frozen=True)
class Change:
    """`before`: the number of the request before which the version changes; with `back`, it changes back before that
    one. `is_driver_told`, `are_tasks_told`: clients that have new connections by then. A driver that starts later has
    one in any case.
    """

    before: int
    is_driver_told: bool
    are_tasks_told: bool
    back: int | None = None

    def __call__(self, plan: Plan, **given: Any) -> ChangedVersion:
        return ChangedVersion(plan, self, **given)

    @classmethod
    def drawn(cls, seed: int) -> Change:
        rng = random.Random(seed)
        before = rng.randrange(_LAST_CHANGE)
        return cls(before, *rng.choice(TOLD), rng.choice((None, before + rng.randrange(1, _LONGEST))))


TOLD = ((True, True), (True, False), (False, True), (False, False))


class ChangedVersion(World):
    """The world of a `Change`."""

    def __init__(self, plan: Plan, change: Change, **given: Any) -> None:
        super().__init__(plan, **given)
        self._change = change
        self._version_of_old_tasks = self.version

    def request(self, name: str, effect: Callable[[], T]) -> T:
        if len(self.requests) in {self._change.before, self._change.back}:
            self.version = 3 - self.version
            self.cluster.finalized_features["transaction.version"] = self.version
        return super().request(name, effect)

    def version_of_driver(self, connected_under: int) -> int:
        return self.version if self._change.is_driver_told else connected_under

    def version_of_task(self) -> int:
        return self.version if self._change.are_tasks_told else self._version_of_old_tasks
