"""The commands and files that build the wheels of a release. Nothing is compiled."""

from __future__ import annotations

from pathlib import Path

from release.build_wheels import compile_command, definition_file, platform_metadata
from release.targets import TARGETS

BY_TAG = {target.tags[-1]: target for target in TARGETS}
PURE = "Wheel-Version: 1.0\nGenerator: setuptools\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n"


def test_manylinux2014_is_compiled_against_glibc_2_17() -> None:
    command = compile_command(BY_TAG["manylinux2014_aarch64"], Path("h"), Path("out.so"))
    assert command[:3] == ["cc", "-target", "aarch64-linux-gnu.2.17"]
    assert {"-fPIC", "-O3", "-fwrapv"} <= set(command)
    assert command[-2:] == ["-o", Path("out.so")]


def test_windows_is_linked_with_the_import_library() -> None:
    command = compile_command(BY_TAG["win_amd64"], Path("h"), Path("_kernel.pyd"), [Path("python3.lib")])
    assert Path("python3.lib") in command
    assert "-fPIC" not in command


def test_module_of_mac_has_a_name_without_a_folder() -> None:
    """Bug: the linker wrote the path of its output into the modules for macOS."""
    command = compile_command(BY_TAG["macosx_11_0_arm64"], Path("h"), Path("/a/b.so"))
    assert "-Wl,-install_name,_kernel.abi3.so" in command


def test_definition_file_marks_data() -> None:
    assert definition_file(["PyList_New", "PyDict_Type"], {"PyDict_Type"}) == (
        "LIBRARY python3.dll\nEXPORTS\n    PyDict_Type DATA\n    PyList_New\n"
    )


def test_platform_metadata_has_a_tag_for_each_platform() -> None:
    assert platform_metadata(PURE, ("manylinux_2_17_x86_64", "manylinux2014_x86_64")) == (
        "Wheel-Version: 1.0\nGenerator: setuptools\nRoot-Is-Purelib: false\n"
        "Tag: cp311-abi3-manylinux_2_17_x86_64\nTag: cp311-abi3-manylinux2014_x86_64\n"
    )
