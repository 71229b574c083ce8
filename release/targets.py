"""The platforms with a compiled kernel, and how a release runs its tools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = "spark_kafka_sink/record"
PYTHON_TAG: Final = "cp311-abi3"
"""The kernel uses Python's stable interface of 3.11 only, so one wheel is for every Python from 3.11 on."""


@dataclass(frozen=True)
class Target:
    """A platform: the tags of its wheel, zig's name for it, and how its Python finds and links the kernel."""

    tags: tuple[str, ...]
    zig: str
    module: str = "_kernel.abi3.so"
    flags: tuple[str, ...] = ("-fPIC",)

    @property
    def machine(self) -> str:
        """Return the processor: x86_64 or aarch64."""
        return self.zig.partition("-")[0]

    @property
    def system(self) -> str:
        """Return linux, macos or windows."""
        return self.zig.split("-")[1].partition(".")[0]

    @property
    def has_musl(self) -> bool:
        return self.zig.endswith("-musl")


# as Python's own build: the interpreter has the symbols. Without a name the linker writes the path of its output
_MAC: Final = ("-undefined", "dynamic_lookup", "-Wl,-install_name,_kernel.abi3.so")
OLDEST_MACOS: Final = "11.0"
TARGETS: Final = (
    Target(("manylinux_2_17_x86_64", "manylinux2014_x86_64"), "x86_64-linux-gnu.2.17"),
    Target(("manylinux_2_17_aarch64", "manylinux2014_aarch64"), "aarch64-linux-gnu.2.17"),
    Target(("musllinux_1_2_x86_64",), "x86_64-linux-musl"),
    Target(("musllinux_1_2_aarch64",), "aarch64-linux-musl"),
    Target(("macosx_11_0_x86_64",), f"x86_64-macos.{OLDEST_MACOS}", flags=_MAC),
    Target(("macosx_11_0_arm64",), f"aarch64-macos.{OLDEST_MACOS}", flags=_MAC),
    Target(("win_amd64",), "x86_64-windows-gnu", module="_kernel.pyd", flags=()),
)
NOT_BUILT: Final = {
    "Windows on ARM64": "pyarrow has no wheels there",
    "other processors of Linux (ppc64le, s390x, riscv64)": "pyarrow has no wheels there",
    "Python without the GIL (3.13t, 3.14t)": "it has no stable interface",
}
"""Platforms without a kernel, and why. pip takes the wheel in pure Python there."""


def run(*command: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises RuntimeError with the output if the command fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def tool(name: str, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a tool of release/requirements.txt. Returns and raises as `run` does."""
    return run(sys.executable, "-m", name, *arguments, environment=environment)
