"""Plans of faults: all of them up to a depth, or random ones from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from support.exactly_once_model.world import SET_BACKS, TOPIC_FAULTS, Fault, Plan, ViolationError, World

Variant = tuple[int, bool]
"""Transaction version, and whether the driver keeps its epoch between batches."""
VARIANTS: Sequence[Variant] = ((2, False), (2, True), (1, False), (1, True))
_LAST_REQUEST = 70


def length_of(world_class: Callable[..., World], plan: Plan, variant: Variant, batches: int) -> int:
    """Return the number of requests of a run. Raises ViolationError, naming the plan."""
    world = world_class(plan, version=variant[0], holds_epoch=variant[1], batches=batches)
    try:
        world.run()
    except ViolationError as error:
        raise ViolationError(f"{error}\n{describe(plan, variant, world.requests)}") from error
    return len(world.requests)


def describe(plan: Plan, variant: Variant, requests: Sequence[str]) -> str:
    faults = ", ".join(f"{number}: {fault.name}" for number, fault in sorted(plan.items()))
    lines = [
        f"{'->' if number in plan else '  '} {number} {name}  {plan[number].value if number in plan else ''}"
        for number, name in enumerate(requests)
    ]
    return f"version {variant[0]}, holds_epoch={variant[1]}, plan {{{faults}}}\n" + "\n".join(lines)


def explore(
    world_class: Callable[..., World],
    variant: Variant,
    depth: int,
    kinds: Sequence[Fault] = tuple(Fault),
    batches: int = 2,
) -> int:
    """Run every plan of up to `depth` faults, and return their number. Raises ViolationError at the first violation."""

    def deeper(plan: Plan, start: int, left: int) -> int:
        length = length_of(world_class, plan, variant, batches)
        if left == 0:
            return 1
        return 1 + sum(
            deeper({**plan, number: kind}, number + 1, left - 1) for number in range(start, length) for kind in kinds
        )

    return deeper({}, 0, depth)


def drawn(seed: int) -> tuple[Plan, Variant]:
    """Return a random plan of two to five faults.

    If a decision topic and coordinators have both forgotten a query before its second batch, nothing shows that. Such
    faults are not combined. Nor does a transaction time out while it writes an end marker that was left out: the driver
    must have died in these milliseconds, and comes back too late. Coordinators that lose records have their own plans.
    """
    rng = random.Random(seed)
    count = rng.choice((2, 2, 3, 4, 5))
    excluded = SET_BACKS | rng.choice((TOPIC_FAULTS, {Fault.LONG_REST, Fault.RESTORE}))
    excluded |= rng.choice(({Fault.LEFT_OUT}, {Fault.EXPIRE, Fault.LONG_REST}))
    kinds = [fault for fault in Fault if fault not in excluded]
    return {rng.randrange(_LAST_REQUEST): rng.choice(kinds) for _ in range(count)}, rng.choice(VARIANTS)
