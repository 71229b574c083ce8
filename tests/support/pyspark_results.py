"""A pytest plugin that writes what passes with which PySpark. docs/pyspark-versions.md is made of its files.

    pytest --pyspark-results tests/pyspark_results ...

It writes FOLDER/<version of PySpark>.json. Runs of parts add to the file. With other packages than before it begins
again. A test that was renamed leaves its old name until its file runs whole.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("pyspark", "pyarrow", "pandas", "numpy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pyspark-results", type=Path, metavar="FOLDER", help="write what passes with this PySpark")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--pyspark-results")
    if folder is not None:
        config.pluginmanager.register(Results(folder), "pyspark results of this run")


def versions() -> dict[str, str]:
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=True).stderr.split('"')[1]
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {**packages, "python": platform.python_version(), "java": java}


class Results:
    """The outcome of each test: "passed", "skipped: " and the reason, or "failed"."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outcomes: dict[str, str] = {}
        self._whole_files: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        options = session.config.option
        if not (options.keyword or options.markexpr or any("::" in argument for argument in session.config.args)):
            self._whole_files = {file_of(item.nodeid) for item in session.items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._outcomes[report.nodeid] = f"skipped: {reason.removeprefix('Skipped: ')}"
        elif report.when == "call":
            self._outcomes.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self) -> None:
        if not self._outcomes:
            return
        found = versions()
        path = self._folder / f"{found['pyspark']}.json"
        earlier = json.loads(path.read_text()) if path.exists() else {}
        kept: dict[str, Any] = earlier["tests"] if earlier.get("versions") == found else {}
        kept = {name: outcome for name, outcome in kept.items() if file_of(name) not in self._whole_files}
        tests = dict(sorted({**kept, **self._outcomes}.items()))
        self._folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"versions": found, "tests": tests}, indent=1) + "\n")


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read(folder: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Yield the versions and the outcomes of each file, the oldest PySpark first."""
    for path in sorted(folder.glob("*.json"), key=lambda each: tuple(map(int, each.stem.split(".")[:2]))):
        content = json.loads(path.read_text())
        yield content["versions"], content["tests"]
