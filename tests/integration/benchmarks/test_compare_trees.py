"""Two builds of the package, which write by turns in one Spark session. Here they are copies of this one."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import spark_kafka_sink
from spark_kafka_sink.local import Admin

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
PACKAGE = Path(spark_kafka_sink.__file__).parent
CELL = "keyed-lz4-4-100"
TINY = ["before", "--cells", CELL, "--records", "10000", "--rounds", "2", "--warm-up", "0", "--timeout", "100"]


@pytest.fixture
def compare_trees(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("compare_trees")


def copy_of_package(folder: Path, more: str) -> Path:
    """Return a folder with a copy of the package, and `more` code at its end."""
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / PACKAGE.name / "__init__.py").open("a") as file:
        file.write(f"\n{more}\n")
    return folder


def measured(compare_trees: ModuleType, kafka_broker: Admin, packages: tuple[Path, Path], *chosen: str) -> Any:
    settings = compare_trees.argument_parser().parse_args([*TINY, *chosen])
    return compare_trees.measure(kafka_broker, settings, packages)


@pytest.mark.parametrize(
    ("contender", "records"),
    [
        ("write", 10_000),
        pytest.param("format", 10_000, marks=pytest.mark.slow),
        pytest.param("foreach_partition", 2_500, marks=pytest.mark.slow),
    ],
)
def test_each_build_has_its_own_driver_code_and_workers(
    compare_trees: ModuleType, kafka_broker: Admin, tmp_path: Path, contender: str, records: int
) -> None:
    used = tmp_path / "used"
    note = f"with open({str(used)!r}, 'a') as _file:\n    _file.write(__file__ + chr(10))"
    before, after = (copy_of_package(tmp_path / name, note) for name in ("before", "after"))
    found = measured(compare_trees, kafka_broker, (before, after), "--contender", contender)
    assert found[CELL].records == records
    assert len(found[CELL].rounds) == 2
    imported = [Path(line).parents[1] for line in used.read_text().splitlines()]
    assert set(imported) == {before, after}
    assert min(imported.count(each) for each in (before, after)) >= 2  # the driver, and a worker


def test_build_that_loses_rows_is_not_measured(compare_trees: ModuleType, kafka_broker: Admin, tmp_path: Path) -> None:
    broken = "from spark_kafka_sink.sink.kafka_sink import KafkaSink\nKafkaSink.write = lambda *_: None"
    before, after = copy_of_package(tmp_path / "before", ""), copy_of_package(tmp_path / "after", broken)
    with pytest.raises(compare_trees.MeasurementError, match="contains 0 records of 10,000"):
        measured(compare_trees, kafka_broker, (before, after))


def test_run_that_fails_is_reported_with_the_end_of_its_log(
    compare_trees: ModuleType, kafka_broker: Admin, tmp_path: Path
) -> None:
    before = copy_of_package(tmp_path / "before", "raise OSError('no such build')")
    with pytest.raises(compare_trees.MeasurementError, match="no such build"):
        measured(compare_trees, kafka_broker, (before, before))
