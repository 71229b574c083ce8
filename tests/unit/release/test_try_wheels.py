"""Which packages pip may choose from in `make dist-test`. Nothing is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

RELEASE = Path(__file__).resolve().parents[3] / "release"


@pytest.fixture
def try_wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(RELEASE)
    return importlib.import_module("try_wheels")


def test_pure_python_is_offered_alone_or_beside_the_kernels(try_wheels: ModuleType, tmp_path: Path) -> None:
    pure, kernel = tmp_path / "a-1-py3-none-any.whl", tmp_path / "a-1-cp311-abi3-win_amd64.whl"
    for name in (pure, kernel, tmp_path / "a-1.tar.gz"):
        name.touch()
    assert try_wheels.packages_offered(tmp_path, "kernel") == [kernel, pure]
    assert try_wheels.packages_offered(tmp_path, "pure") == [pure]


def test_folder_without_wheels_is_an_error_that_names_make_dist(try_wheels: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no wheel: make dist builds them"):
        try_wheels.packages_offered(tmp_path, "kernel")
