"""Which compiled modules are refused, by what their files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from release.compiled_module import Module, folder_faults, module_faults
from release.targets import TARGETS

BY_TAG = {target.tags[-1]: target for target in TARGETS}
LOADS = {
    "manylinux2014_x86_64": Module("x86_64", frozenset({"libc.so.6"}), frozenset({"memcpy"}), frozenset()),
    "musllinux_1_2_aarch64": Module("aarch64", frozenset({"libc.so"}), frozenset({"memset"}), frozenset()),
    "macosx_11_0_x86_64": Module(
        "x86_64", frozenset({"/usr/lib/libSystem.B.dylib"}), frozenset({"memmove"}), frozenset(), "11.0"
    ),
    "macosx_11_0_arm64": Module(
        "aarch64", frozenset({"/usr/lib/libSystem.B.dylib"}), frozenset(), frozenset(), "11.0", is_signed=True
    ),
    "win_amd64": Module(
        "x86_64",
        frozenset({"python3.dll", "KERNEL32.dll", "api-ms-win-crt-heap-l1-1-0.dll"}),
        frozenset({"malloc"}),
        frozenset(),
    ),
}
"""A module for each platform, but for the names that all of them have."""


def module(tag: str, **changed: Any) -> Module:
    made = LOADS[tag]
    taken = made.taken | {"PyList_New", "_Py_Dealloc"}
    return replace(made, **{"taken": taken, "given": frozenset({"PyInit__kernel"}), **changed})


@pytest.mark.parametrize("tag", LOADS)
def test_module_that_its_platform_loads_has_no_fault(tag: str) -> None:
    assert module_faults(module(tag), BY_TAG[tag]) == []


@pytest.mark.parametrize(
    ("tag", "changed", "fault"),
    [
        ("musllinux_1_2_aarch64", {"machine": "x86_64"}, "is for x86_64, not aarch64"),
        ("musllinux_1_2_aarch64", {"libraries": {"libc.so.6"}}, "needs ['libc.so.6'], which the platform may not have"),
        ("musllinux_1_2_aarch64", {"taken": {"__memcpy_chk"}}, "takes ['__memcpy_chk'] from elsewhere"),
        ("manylinux2014_x86_64", {"given": set()}, "does not export PyInit__kernel"),
        ("win_amd64", {"libraries": {"python311.dll"}}, "needs ['python311.dll'], which the platform may not have"),
        ("macosx_11_0_x86_64", {"taken": {"malloc"}}, "takes ['malloc'] from elsewhere"),
        ("macosx_11_0_x86_64", {"oldest": "15.0"}, "is for macOS 15.0, not 11.0"),
        ("macosx_11_0_arm64", {"is_signed": False}, "is not signed"),
    ],
)
def test_module_that_its_platform_may_not_load_is_refused(tag: str, changed: Mapping[str, Any], fault: str) -> None:
    assert module_faults(module(tag, **changed), BY_TAG[tag]) == [fault]


def test_module_that_names_a_folder_of_the_machine_is_refused() -> None:
    folders = [Path("/a/tree"), Path("/home/me")]
    assert folder_faults(b"\0/a/tree/build/k.so\0", folders) == ["names the folder /a/tree"]
    assert folder_faults(b"\0_kernel.abi3.so\0", folders) == []
