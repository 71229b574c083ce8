"""Two drivers of one query that are alive at the same time: control passes between them at chosen requests.

`Fault.OTHER_DRIVER` runs another driver from begin to end while the first one stands still. Here each may stop in its
middle: a driver that was paused, and does not know yet that Spark has started the query again elsewhere.

Each driver has a thread, and one of the two always waits. So the same plan and switches give the same run.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from support.exactly_once_model.explore import Variant, describe
from support.exactly_once_model.named_writes import WRITE_FAULTS, NamedWrites
from support.exactly_once_model.world import TOPIC_FAULTS, Fault, Plan, ViolationError, World

T = TypeVar("T")
_NEVER = 10**9
_LAST_SWITCH = 45
_FAR, _NEAR = 25, 6
_LAST_FAULT = 80
_BESIDE = tuple(fault for fault in WRITE_FAULTS if fault not in {*TOPIC_FAULTS, Fault.LEFT_OUT})
_ENDS = re.compile(r"(commit|abort|init) ")
"""Requests by which a coordinator writes end markers."""


class InterleavedWorld(World):
    """`switches`: the numbers of the requests before which control passes to the other driver. The first one starts it.
    After the last one the driver that is in control runs to its end, and then the other one.
    """

    def __init__(self, plan: Plan, switches: Sequence[int], **given: Any) -> None:
        super().__init__({**plan, _NEVER: Fault.OTHER_DRIVER}, **given)  # a second driver explains what is refused
        self._switches = set(switches)
        self._turns = {True: threading.Semaphore(0), False: threading.Semaphore(0)}
        self._other: threading.Thread | None = None
        self._is_other_done = False
        self._broken: BaseException | None = None
        self._has_resumed = False
        self._began_late = False

    def request(self, name: str, effect: Callable[[], T]) -> T:
        if len(self.requests) in self._switches:
            self._switches.remove(len(self.requests))
            self._switch()
        if self._has_resumed and re.match(r"init P/\d", name):
            self._began_late = True
        self._has_resumed = False
        return super().request(name, effect)

    def may_lose(self) -> bool:
        """Also if a task was stopped between its check of the driver and its InitProducerId. Which batch was verified
        is not known here: requests of two drivers are mixed.
        """
        late = {Fault.EXPIRE, Fault.STALLED} & set(self.plan.values())
        return self._began_late or bool(late) or super().may_lose()

    def _run_once(self) -> bool:
        is_over = super()._run_once()
        if threading.current_thread() is not self._other and (is_over or self.lost or self.refused):
            self._finish_other()
        return is_over

    def _finish_other(self) -> None:
        while self._other is not None and not self._is_other_done:
            self._switch()

    def _switch(self) -> None:
        """Let the other driver run, and wait until it is this one's turn again."""
        is_other = threading.current_thread() is self._other
        if not is_other and self._is_other_done:
            return
        own = self._in_task, self._is_tampered, self.task_class
        self._in_task, self._is_tampered, self.task_class = 0, False, type(self).task_class
        if self._other is None:
            self._other = threading.Thread(target=self._run_other, daemon=True)
            self._other.start()
        else:
            self._turns[not is_other].release()
        self._turns[is_other].acquire()
        self._in_task, self._is_tampered, self.task_class = own
        self._has_resumed = True
        if self._broken is not None and not is_other:
            raise self._broken

    def _run_other(self) -> None:
        try:
            self._run_once()
        except BaseException as error:  # raised again in the first thread
            self._broken = error
        finally:
            self._is_other_done = True
            self._turns[False].release()


class InterleavedWrites(InterleavedWorld, NamedWrites):
    """Batch writes under one name, and the operator's `finish`."""

    def _settle(self) -> None:
        if threading.current_thread() is not self._other:
            self._finish_other()
        super()._settle()


def run_interleaved(
    plan: Plan, switches: Sequence[int], variant: Variant, world_class: type[InterleavedWorld] = InterleavedWorld
) -> Sequence[str]:
    """Return the requests of a run of two batches. Raises ViolationError, naming plan and switches."""
    world = world_class(plan, switches, version=variant[0], holds_epoch=variant[1])
    try:
        world.run()
    except ViolationError as error:
        text = describe(plan, variant, world.requests)
        raise ViolationError(f"{error}\nswitches before {sorted(switches)}, {text}") from error
    return world.requests


def run_drawn(seed: int, variant: Variant, world_class: type[InterleavedWorld]) -> None:
    """Run with random switches and up to two other faults, and again with end markers that are left out at one of the
    requests that make a coordinator write them. Raises ViolationError.
    """
    rng = random.Random(seed)
    switches = [rng.randrange(_LAST_SWITCH)]
    for _ in range(rng.choice((1, 2, 3, 4))):
        switches.append(switches[-1] + 1 + rng.randrange(rng.choice((_FAR, _NEAR))))
    plan = {rng.randrange(_LAST_FAULT): rng.choice(_BESIDE) for _ in range(rng.choice((0, 0, 1, 2)))}
    requests = run_interleaved(plan, switches, variant, world_class)
    ends = [number for number, name in enumerate(requests) if number >= switches[0] - 10 and _ENDS.match(name)]
    if ends and Fault.EXPIRE not in plan.values():  # as in `drawn`
        run_interleaved({**plan, rng.choice(ends): Fault.LEFT_OUT}, switches, variant, world_class)
