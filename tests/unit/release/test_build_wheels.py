"""The wheels of a release: commands, files and checks. Nothing is compiled or installed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

RELEASE = Path(__file__).resolve().parents[3] / "release"
KERNEL = "spark_kafka_sink/record/_kernel.abi3.so"
PURE = "Wheel-Version: 1.0\nGenerator: setuptools\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n"


@pytest.fixture
def build_wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(RELEASE)
    return importlib.import_module("build_wheels")


def target(build_wheels: ModuleType, tag: str) -> object:
    (found,) = (target for target in build_wheels.TARGETS if tag in target.tags)
    return found


def test_targets_are_those_of_the_install_table(build_wheels: ModuleType) -> None:
    platforms = {re.sub(r"_\d+_\d+_|2014_", "_", target.tags[-1]) for target in build_wheels.TARGETS}
    linux = {f"{libc}_{machine}" for libc in ("manylinux", "musllinux") for machine in ("x86_64", "aarch64")}
    assert platforms == linux | {"macosx_x86_64", "macosx_arm64", "win_amd64"}


def test_manylinux2014_is_compiled_against_glibc_2_17(build_wheels: ModuleType) -> None:
    command = build_wheels.compile_command(target(build_wheels, "manylinux2014_aarch64"), Path("h"), Path("out.so"))
    assert command[:3] == ["cc", "-target", "aarch64-linux-gnu.2.17"]
    assert {"-fPIC", "-O3", "-fwrapv"} <= set(command)
    assert command[-2:] == ["-o", Path("out.so")]


def test_windows_is_linked_with_the_import_library(build_wheels: ModuleType) -> None:
    windows = target(build_wheels, "win_amd64")
    command = build_wheels.compile_command(windows, Path("h"), Path("_kernel.pyd"), [Path("python3.lib")])
    assert Path("python3.lib") in command
    assert "-fPIC" not in command


def test_module_of_mac_has_a_name_without_a_folder(build_wheels: ModuleType) -> None:
    """Bug: the linker wrote the path of its output into the modules for macOS."""
    command = build_wheels.compile_command(target(build_wheels, "macosx_11_0_arm64"), Path("h"), Path("/a/b.so"))
    assert "-Wl,-install_name,_kernel.abi3.so" in command


def test_module_that_names_a_folder_of_the_machine_is_refused(build_wheels: ModuleType) -> None:
    folders = [Path("/a/tree"), Path("/home/me")]
    assert build_wheels.folder_faults(b"\0/a/tree/build/k.so\0", folders) == ["names the folder /a/tree"]
    assert build_wheels.folder_faults(b"\0_kernel.abi3.so\0", folders) == []


def test_definition_file_marks_data(build_wheels: ModuleType) -> None:
    assert build_wheels.definition_file(["PyList_New", "PyDict_Type"], {"PyDict_Type"}) == (
        "LIBRARY python3.dll\nEXPORTS\n    PyDict_Type DATA\n    PyList_New\n"
    )


def test_platform_metadata_has_a_tag_for_each_platform(build_wheels: ModuleType) -> None:
    assert build_wheels.platform_metadata(PURE, ("manylinux_2_17_x86_64", "manylinux2014_x86_64")) == (
        "Wheel-Version: 1.0\nGenerator: setuptools\nRoot-Is-Purelib: false\n"
        "Tag: cp311-abi3-manylinux_2_17_x86_64\nTag: cp311-abi3-manylinux2014_x86_64\n"
    )


def test_wheel_with_its_kernel_has_no_fault(build_wheels: ModuleType) -> None:
    mac = target(build_wheels, "macosx_11_0_arm64")
    assert build_wheels.wheel_faults([KERNEL], build_wheels.platform_metadata(PURE, ("x",)), mac) == []
    assert build_wheels.wheel_faults(["a.py"], PURE, None) == []


@pytest.mark.parametrize(
    ("names", "metadata", "tag", "fault"),
    [
        ([], "Root-Is-Purelib: false\n", "win_amd64", "has [], not ['spark_kafka_sink/record/_kernel.pyd']"),
        ([KERNEL], "Root-Is-Purelib: true\n", "macosx_11_0_arm64", "says Root-Is-Purelib: true"),
        ([KERNEL], PURE, None, f"has ['{KERNEL}'], not []"),
    ],
)
def test_wheel_with_another_kernel_than_its_tags_say_is_refused(
    build_wheels: ModuleType, names: list[str], metadata: str, tag: str | None, fault: str
) -> None:
    assert build_wheels.wheel_faults(names, metadata, tag and target(build_wheels, tag)) == [fault]


@pytest.mark.parametrize(
    ("machine", "libraries", "names", "faults"),
    [
        ("AArch64", {"libc.so"}, {"memcpy", "PyList_New", "_Py_Dealloc"}, []),
        ("x64", {"libc.so"}, {"memcpy"}, ["is for x64, not AArch64"]),
        ("AArch64", {"libc.so.6"}, {"memcpy"}, ["needs ['libc.so.6'], not only libc.so"]),
        ("AArch64", {"libc.so"}, {"__memcpy_chk"}, ["takes ['__memcpy_chk'] from elsewhere"]),
    ],
)
def test_module_for_musl_takes_names_from_python_and_libc_only(
    build_wheels: ModuleType, machine: str, libraries: set[str], names: set[str], faults: list[str]
) -> None:
    elf = build_wheels.Elf(machine, libraries, names)
    assert build_wheels.elf_faults(elf, target(build_wheels, "musllinux_1_2_aarch64")) == faults


def test_wheel_is_matched_with_its_target_by_its_name(build_wheels: ModuleType) -> None:
    name = "spark_kafka_sink-0.1.0-cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
    assert build_wheels.target_of(Path(name)) == target(build_wheels, "manylinux2014_x86_64")
    assert build_wheels.target_of(Path("spark_kafka_sink-0.1.0-py3-none-any.whl")) is None


def test_source_distribution_that_lacks_a_tracked_file_is_found(build_wheels: ModuleType) -> None:
    tracked = [".ci/run", ".gitignore", "docs/options.md", "setup.py"]
    assert build_wheels.missing_files(tracked, ["name-1.0", "name-1.0/setup.py"]) == ["docs/options.md"]
    assert build_wheels.missing_files(tracked, ["name-1.0/setup.py", "name-1.0/docs/options.md"]) == []


def test_command_that_fails_is_an_error_with_its_output(build_wheels: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="ended with 3:\nno such thing"):
        build_wheels.run("sh", "-c", "echo no such thing; exit 3")
