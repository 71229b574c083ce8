"""The figures of docs/operating.md: each cell of the table of capacity is what the formula beside it gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_kafka_sink.sink.exactly_once.cluster import DECISION_PARTITIONS, MOST_REPLICAS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()
ROWS = {
    cells[0].strip(): [cell.strip() for cell in cells[1:]]
    for cells in (line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| "))
}
EXAMPLES = ((20, 16, 320, 6, 48), (1_000, 16, 16_000, 30, 300), (1_000, 16, 300, 30, 300))
"""Executors, cores, tasks, brokers, partitions."""
Formula = Callable[[int, int, int, int, int], str]
FORMULAS: dict[str, Formula] = {
    "T, B, P": lambda e, c, t, b, p: f"{t:,}, {b}, {p}",
    "Python workers": lambda e, c, t, b, p: f"{min(e * c, t):,}",
    "connections, at least once": lambda e, c, t, b, p: f"{min(e * c, t) * (b + 1):,}",
    "connections, exactly once": lambda e, c, t, b, p: f"{2 * min(e * c, t) * (b + 1):,}",
    "memory beside the JVM's heap, an executor": lambda e, c, t, b, p: f"{c * 182:,} MB",
    "of it `kafka.buffer.memory`": lambda e, c, t, b, p: f"{c * 32} MiB",
    "requests of an exactly-once batch, without Produce to further brokers": lambda e, c, t, b, p: f"{21 + 6 * t:,}",
    "control records of an exactly-once batch, at most": lambda e, c, t, b, p: f"{t * p:,}",
    "records in `__transaction_state` and `__consumer_offsets`, at least": lambda e, c, t, b, p: f"{7 * t:,}",
    "decision of a batch, compressed": lambda e, c, t, b, p: f"{16 * t / 1_000:.0f} kB",
    "consumer groups of the prefix": lambda e, c, t, b, p: f"{t:,}",
}


@pytest.mark.parametrize("what", FORMULAS)
def test_examples_are_what_the_formula_gives(what: str) -> None:
    assert ROWS[what][1:] == [FORMULAS[what](*example) for example in EXAMPLES]


def test_requests_are_those_that_were_counted() -> None:
    """docs/exactly-once.md has the counts of `make exactly-once-cost`, which a test compares with a run."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "exactly-once.md").read_text()
    counted = re.findall(r"^\| (\d+) \| [\d, +]+ = ([\d,]+) \|", page, re.MULTILINE)
    assert len(counted) == 3
    for tasks, requests in counted:
        assert int(requests.replace(",", "")) == 21 + 6 * int(tasks)


def test_decision_topic_is_the_one_that_the_sink_makes() -> None:
    assert f"It has {DECISION_PARTITIONS} partitions and" in PAGE
    assert MOST_REPLICAS == 3
