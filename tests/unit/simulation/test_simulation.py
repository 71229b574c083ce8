"""A whole producer keeps its guarantees under random faults, seed by seed (see support/simulation/checker.py).

SIMULATION_SEEDS=2000 tries more seeds than usual. SIMULATION_SEED=123 tries that one, with the producer's log lines in
its timeline.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from support.simulation.driver import Simulation

_DEFAULT_SEEDS = 400
_SEEDS_IN_A_TEST = 50


def _ranges() -> list[range]:
    one = os.environ.get("SIMULATION_SEED")
    if one is not None:
        return [range(int(one), int(one) + 1)]
    count = int(os.environ.get("SIMULATION_SEEDS", _DEFAULT_SEEDS))
    return [range(first, min(first + _SEEDS_IN_A_TEST, count)) for first in range(0, count, _SEEDS_IN_A_TEST)]


def _broken_promises(seed: int) -> str:
    """Return the findings of a seed with all events before them, or an empty text."""
    if not (findings := Simulation(seed).run()):
        return ""
    again = Simulation(seed, verbose=True)
    again.run()
    reported = "\n".join(f" - {finding}" for finding in findings)
    return (
        f"seed {seed}: {len(findings)} promises broken\n{reported}\n"
        f"Replay: SIMULATION_SEED={seed} pytest tests/unit/simulation\n{again.timeline}"
    )


@pytest.mark.parametrize("seeds", _ranges(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_every_guarantee_holds_under_random_faults(seeds: range) -> None:
    for seed in seeds:
        broken = _broken_promises(seed)
        assert not broken, broken


def test_a_seed_decides_everything() -> None:
    for seed in (3, 11, 17):
        first, second = Simulation(seed, verbose=True), Simulation(seed, verbose=True)
        first.run()
        second.run()
        assert first.timeline == second.timeline


def test_simulation_covers_its_cases() -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        run = Simulation(seed)
        run.run()
        for topic in run.world.cluster.topics.values():
            counts["recognised duplicates"] += sum(partition.log.duplicates for partition in topic.partitions)
            batches = [batch for partition in topic.partitions for batch in partition.log.batches]
            counts["new epochs"] += any(batch.header.producer_epoch > 0 for batch in batches)
        for call in run.ledger:
            counts["refused calls"] += call.raised is not None
            for outcome in call.outcomes:
                counts["acknowledged" if outcome.error is None else type(outcome.error).__name__] += outcome.count
    expected = {"acknowledged": 2_000, "recognised duplicates": 20, "new epochs": 5, "refused calls": 3}
    expected |= {"KafkaTimeoutError": 100, "ProducerClosedError": 5, "RecordTooLargeError": 10}
    assert all(counts[what] >= least for what, least in expected.items()), counts
