"""The order of the trees in turns, and the ratios of the turns. No tree is built or measured."""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CELL = "keyed-lz4-4-100"


@pytest.fixture
def compare_trees(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("compare_trees")


def rounds_of(compare_trees: ModuleType, before: list[float], after: list[float]) -> tuple[list[str], list[Any]]:
    """A turn takes the next of the package's seconds, and half of it as processor time."""
    turns: list[str] = []
    seconds = {"before": before, "after": after}
    count = len(before)

    def turn(package: Path) -> Any:
        turns.append(package.name)
        taken = seconds[package.name].pop(0)
        return compare_trees.Timed(taken, taken / 2)

    return turns, list(compare_trees.rounds_of(count, turn, Path("before"), Path("after")))


def test_every_second_round_begins_with_after(compare_trees: ModuleType) -> None:
    turns, _ = rounds_of(compare_trees, [1.0] * 3, [1.0] * 3)
    assert turns == ["before", "after", "after", "before", "before", "after"]


def test_ratio_is_after_by_before_of_one_round(compare_trees: ModuleType) -> None:
    _, (first, second) = rounds_of(compare_trees, [2.0, 4.0], [1.0, 5.0])
    assert (first.rate_ratio, first.cpu_ratio) == (2.0, 0.5)
    assert (second.rate_ratio, second.cpu_ratio) == (0.8, 1.25)


def test_table_shows_medians_and_the_interval_of_ratios(compare_trees: ModuleType) -> None:
    _, rounds = rounds_of(compare_trees, [2.0, 1.0, 1.0], [1.0, 1.0, 1.25])
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(compare_trees.table_of({CELL: compare_trees.Measured(1_000_000, rounds)}))
    row = next(line for line in console.export_text().splitlines() if "keyed, lz4" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "keyed, lz4, 4 partitions, 100 B",
        "1,000,000",
        "1,000,000",
        "1.000 (0.800 - 2.000)",
        "0.50",
        "0.50",
        "1.000 (0.500 - 1.250)",
    ]


def test_interval_of_many_rounds_is_narrower_than_their_spread(compare_trees: ModuleType) -> None:
    ratios = [0.8 + 0.02 * number for number in range(21)]
    low, high = (float(each) for each in re.findall(r"[\d.]+", compare_trees.with_interval(ratios))[1:])
    assert 0.85 < low < 1.0 < high < 1.15


def test_unknown_commit_is_reported_before_anything_is_built(
    compare_trees: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_trees.main(["no-such-commit"]) == 1
    assert "no-such-commit" in capsys.readouterr().out


def test_package_that_python_does_not_import_is_refused(compare_trees: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(compare_trees.MeasurementError, match="does not import the sink from"):
        compare_trees.check_import(tmp_path)


def test_package_in_its_own_folder_is_imported(compare_trees: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "spark_kafka_sink").mkdir()
    (tmp_path / "spark_kafka_sink" / "__init__.py").touch()
    compare_trees.check_import(tmp_path)
