"""constraints.txt has the versions that make installs: one for each package of setup.cfg, within its range."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("local", "test", "engine", "benchmark", "notebook", "registry")
"""The extras of make setup, make benchmark and make notebook, and one whose packages the tests have."""
NEWEST = {"test-pyspark", "constraints"}
"""Targets that take the newest versions: with another PySpark, and to make the file."""


def requirements() -> list[Requirement]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    sections = [setup["options"]["install_requires"], *(setup["options.extras_require"][name] for name in EXTRAS)]
    lines = [line.strip() for section in sections for line in section.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_each_package_has_one_version_within_its_range(requirement: Requirement) -> None:
    version = pinned()[requirement.name.lower()]
    assert requirement.specifier.contains(version, prereleases=True)


def test_make_installs_the_pinned_versions() -> None:
    rules = re.findall(r"^([$(\w)-]+):[^=\n]*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    installing = {target for target, recipe in rules if "--editable" in recipe}
    assert {"$(SETUP)", "measured", *NEWEST} <= installing
    assert {target for target, recipe in rules if "$(PINNED) --editable" in recipe} == installing - NEWEST
