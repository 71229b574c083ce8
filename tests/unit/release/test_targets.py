"""The platforms of a release."""

from __future__ import annotations

import re

import pytest

from release.targets import TARGETS, run


def test_targets_are_those_of_the_table_of_wheels() -> None:
    platforms = {re.sub(r"_\d+_\d+_|2014_", "_", target.tags[-1]) for target in TARGETS}
    linux = {f"{libc}_{machine}" for libc in ("manylinux", "musllinux") for machine in ("x86_64", "aarch64")}
    assert platforms == linux | {"macosx_x86_64", "macosx_arm64", "win_amd64"}


def test_target_has_the_processor_and_system_of_its_tags() -> None:
    words = {"manylinux": "linux", "musllinux": "linux", "macosx": "macos", "win": "windows"}
    for target in TARGETS:
        tag = target.tags[0]
        assert target.system == words[tag.partition("_")[0]]
        assert tag.endswith({"x86_64": ("x86_64", "amd64"), "aarch64": ("aarch64", "arm64")}[target.machine])
        assert target.has_musl is tag.startswith("musl")


def test_command_that_fails_is_an_error_with_its_output() -> None:
    with pytest.raises(RuntimeError, match="ended with 3:\nno such thing"):
        run("sh", "-c", "echo no such thing; exit 3")
