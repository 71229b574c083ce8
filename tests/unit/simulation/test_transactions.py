"""Transactions keep their guarantees under random faults, seed by seed (see support/simulation/transactions.py).

TRANSACTION_SEEDS=2000 tries more seeds than usual. TRANSACTION_SEED=123 tries that one.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from support.simulation.transactions import TransactionRun

_DEFAULT_SEEDS = 60
_SEEDS_IN_A_TEST = 30


def _ranges() -> list[range]:
    one = os.environ.get("TRANSACTION_SEED")
    if one is not None:
        return [range(int(one), int(one) + 1)]
    count = int(os.environ.get("TRANSACTION_SEEDS", _DEFAULT_SEEDS))
    return [range(first, min(first + _SEEDS_IN_A_TEST, count)) for first in range(0, count, _SEEDS_IN_A_TEST)]


@pytest.mark.parametrize("seeds", _ranges(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_transactions_are_whole_and_in_order_under_random_faults(seeds: range) -> None:
    for seed in seeds:
        run = TransactionRun(seed)
        findings = run.run()
        reported = "\n".join(f" - {finding}" for finding in findings)
        assert not findings, (
            f"seed {seed}: {len(findings)} promises broken\n{reported}\n"
            f"Replay: TRANSACTION_SEED={seed} pytest tests/unit/simulation/test_transactions.py\n{run.timeline}"
        )


def test_a_seed_decides_everything() -> None:
    for seed in (3, 11):
        first, second = TransactionRun(seed), TransactionRun(seed)
        first.run()
        second.run()
        assert first.timeline == second.timeline


def test_simulation_of_transactions_covers_its_cases() -> None:
    counts: Counter[str] = Counter()
    for seed in range(20):
        run = TransactionRun(seed)
        run.run()
        counts.update(run.counts)
    acts = ("_another_commits", "_another_aborts_and_begins", "_reader_fails_in_a_commit", "_reader_commits")
    expected = {"commit": 20, "abort": 20, "offsets": 10, "another producer's commit": 5, **dict.fromkeys(acts, 2)}
    assert all(counts[what] >= least for what, least in expected.items()), counts
