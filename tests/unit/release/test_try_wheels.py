"""Which packages pip may choose from in `make dist-test`, and which writes fail it. Nothing is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from release.try_wheels import clean_environment, packages_offered, write_faults

FACTS: dict[str, Any] = {"python": "3.14.0", "pyspark": "4.1.4", "folder": "/e/lib/package", "kernel": True}
FACTS |= {"records": 1000, "streamed": 3}


def test_wheel_in_pure_python_is_offered_by_itself_or_beside_the_kernels(tmp_path: Path) -> None:
    pure, kernel = tmp_path / "a-1-py3-none-any.whl", tmp_path / "a-1-cp311-abi3-win_amd64.whl"
    for name in (pure, kernel, tmp_path / "a-1.tar.gz"):
        name.touch()
    assert packages_offered(tmp_path, "kernel") == [kernel, pure]
    assert packages_offered(tmp_path, "pure") == [pure]


def test_folder_without_wheels_is_an_error_that_names_make_dist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no wheel: make dist builds them"):
        packages_offered(tmp_path, "kernel")


def test_environment_does_not_take_settings_of_another_python() -> None:
    variables = {"PATH": "/bin", "PYTHONPATH": "/a", "PYSPARK_PYTHON": "/b", "SPARK_HOME": "/c", "MAKEFLAGS": "-j"}
    assert clean_environment(variables) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("changed", "counted", "of_stream", "faults"),
    [
        ({}, 1000, 3, []),
        ({}, 1000, 4, []),  # a batch was committed while the stream stopped
        ({"streamed": None}, 1000, None, []),
        ({"pyspark": "4.2.0"}, 1000, 3, ["has PySpark 4.2.0, no longer 4.1.4"]),
        ({"kernel": False}, 1000, 3, ["has no kernel"]),
        ({"folder": "/repository/package"}, 1000, 3, ["runs from /repository/package"]),
        ({}, 999, 3, ["reports 1000 records, and the topic has 999, not 1000"]),
        ({"records": 999}, 999, 3, ["reports 999 records, and the topic has 999, not 1000"]),
        ({}, 1000, 2, ["streams 3 rows, and the topic has 2"]),
        ({"streamed": None}, 1000, 3, ["streams None rows, and the topic has 3"]),
        ({}, 1000, None, ["streams 3 rows, and the topic has None"]),
    ],
)
def test_write_that_is_not_as_it_must_be_is_refused(
    changed: Mapping[str, Any], counted: int, of_stream: int | None, faults: list[str]
) -> None:
    facts, folder = {**FACTS, **changed}, Path("/e")
    found = write_faults(
        facts, kernel=True, pyspark="4.1.4", folder=folder, counted=counted, counted_of_stream=of_stream
    )
    assert found == faults


def test_kernel_in_the_wheel_in_pure_python_is_refused() -> None:
    faults = write_faults(FACTS, kernel=False, pyspark="4.1.4", folder=Path("/e"), counted=1000, counted_of_stream=3)
    assert faults == ["has a kernel"]
