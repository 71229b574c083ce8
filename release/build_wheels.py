"""Build the source distribution, and a wheel for each platform, on this machine: see `make dist`.

The wheel in pure Python is built from the source distribution. For each platform zig compiles the kernel, and the wheel
is packed again with it. Ends with an error if a platform cannot be built or a check fails.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import BinaryIO, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = "spark_kafka_sink/record"
SOURCES: Final = tuple(ROOT / PACKAGE / name for name in ("_kernel.c", "_rows.c"))
PYTHON_TAG: Final = "cp311-abi3"
"""The kernel uses Python's stable interface of 3.11 only, so one wheel is for every Python from 3.11 on."""


@dataclass(frozen=True)
class Target:
    """A platform: the tags of its wheel, zig's name for it, and how its Python finds and links the kernel."""

    tags: tuple[str, ...]
    zig: str
    module: str = "_kernel.abi3.so"
    flags: tuple[str, ...] = ("-fPIC",)


# as Python's own build: the interpreter has the symbols. Without a name the linker writes the path of its output
_MAC: Final = ("-undefined", "dynamic_lookup", "-Wl,-install_name,_kernel.abi3.so")
TARGETS: Final = (
    Target(("manylinux_2_17_x86_64", "manylinux2014_x86_64"), "x86_64-linux-gnu.2.17"),
    Target(("manylinux_2_17_aarch64", "manylinux2014_aarch64"), "aarch64-linux-gnu.2.17"),
    Target(("musllinux_1_2_x86_64",), "x86_64-linux-musl"),
    Target(("musllinux_1_2_aarch64",), "aarch64-linux-musl"),
    Target(("macosx_11_0_x86_64",), "x86_64-macos.11.0", flags=_MAC),
    Target(("macosx_11_0_arm64",), "aarch64-macos.11.0", flags=_MAC),
    Target(("win_amd64",), "x86_64-windows-gnu", module="_kernel.pyd", flags=()),
)
FROM_LIBC: Final = {"memcpy", "memmove", "memset", "memcmp"}
"""What the kernel takes from the C library, with what the linker adds for it."""
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
    return run(sys.executable, "-m", name, *arguments, environment=environment)


# ---- the kernel ----------------------------------------------------------------------------------------------------


def compile_command(target: Target, headers: Path, output: Path, libraries: Iterable[Path] = ()) -> list[str | Path]:
    """Return zig's arguments. The optimisation and overflow flags are those of Python's own build."""
    flags = ("-shared", "-O3", "-DNDEBUG", "-fwrapv", "-fno-strict-aliasing", "-Wall", "-Werror", "-g0", "-s")
    return ["cc", "-target", target.zig, *flags, *target.flags, "-I", headers, *SOURCES, *libraries, "-o", output]


def copy_headers(folder: Path) -> Path:
    """Copy the headers of the Python that runs, with a configuration for every platform, and return their folder."""
    shutil.copytree(sysconfig.get_path("include"), folder)
    shutil.copy(ROOT / "release" / "pyconfig.h", folder / "pyconfig.h")
    return folder


def definition_file(symbols: Iterable[str], data: Iterable[str]) -> str:
    """Return the text of python3.def. `data`: names of symbols that are no functions."""
    lines = [f"    {name} DATA" if name in data else f"    {name}" for name in sorted(symbols)]
    return "\n".join(["LIBRARY python3.dll", "EXPORTS", *lines, ""])


@dataclass(frozen=True)
class Elf:
    """What a compiled module of Linux says: its machine, the libraries that it needs, and the names that it takes."""

    machine: str
    libraries: set[str]
    names: set[str]

    @property
    def python_names(self) -> set[str]:
        return {name for name in self.names if name.startswith(("Py", "_Py"))}


def read_elf(stream: BinaryIO) -> Elf:
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(stream)
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    dynamic = elf.get_section_by_name(".dynamic").iter_tags()
    return Elf(
        elf.get_machine_arch(),
        {tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"},
        {symbol.name for symbol in symbols if symbol.entry.st_shndx == "SHN_UNDEF" and symbol.name},
    )


def import_library(folder: Path, symbols: Iterable[str]) -> Path:
    """Make python3.lib, which names what the kernel takes from python3.dll, and return its path."""
    from abi3info import DATAS

    definition, library = folder / "python3.def", folder / "python3.lib"
    definition.write_text(definition_file(symbols, {symbol.name for symbol in DATAS}))
    tool("ziglang", "dlltool", "-m", "i386:x86-64", "-D", "python3.dll", "-d", definition, "-l", library)
    return library


def compile_kernel(target: Target, folder: Path, headers: Path, windows: Iterable[Path]) -> Path:
    output = folder / target.tags[0] / target.module
    output.parent.mkdir()
    libraries = windows if target.module.endswith(".pyd") else ()
    tool("ziglang", *compile_command(target, headers, output, libraries))
    return output


# ---- the wheels ----------------------------------------------------------------------------------------------------


def platform_metadata(pure: str, tags: Iterable[str]) -> str:
    """Return the file WHEEL for a platform, from that of the wheel in pure Python."""
    kept = [line for line in pure.strip().splitlines() if not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    return "\n".join([*kept, "Root-Is-Purelib: false", *(f"Tag: {PYTHON_TAG}-{tag}" for tag in tags), ""])


def pack(pure: Path, target: Target, kernel: Path, work: Path, output: Path) -> None:
    """Pack the wheel in pure Python again, with the kernel and the tags of a platform."""
    tool("wheel", "unpack", pure, "--dest", work / "wheel")
    (unpacked,) = (work / "wheel").iterdir()
    (metadata,) = unpacked.glob("*.dist-info/WHEEL")
    metadata.write_text(platform_metadata(metadata.read_text(), target.tags))
    shutil.copy(kernel, unpacked / PACKAGE / target.module)
    tool("wheel", "pack", unpacked, "--dest-dir", output)
    shutil.rmtree(work / "wheel")


def build(output: Path, work: Path) -> None:
    environment = {"SPARK_KAFKA_SINK_KERNEL": "none"}
    print(f"Building into {output}", flush=True)
    tool("build", "--no-isolation", "--outdir", output, ROOT, environment=environment)
    (pure,) = output.glob("*-py3-none-any.whl")
    headers = copy_headers(work / "headers")
    windows: list[Path] = []
    for target in TARGETS:
        kernel = compile_kernel(target, work, headers, windows)
        if not windows:
            with kernel.open("rb") as stream:
                windows = [import_library(work, read_elf(stream).python_names)]
        pack(pure, target, kernel, work, output)
        print(f"  built for {' and '.join(target.tags)}", flush=True)
    for platform, why in NOT_BUILT.items():
        print(f"  not built for {platform}: {why}. pip takes the wheel in pure Python.")


# ---- the checks ----------------------------------------------------------------------------------------------------


def wheel_faults(names: Iterable[str], metadata: str, target: Target | None) -> list[str]:
    """Return what is wrong with a wheel that has these files. `target`: None for the wheel in pure Python."""
    compiled = [name for name in names if name.endswith((".so", ".pyd"))]
    expected = [f"{PACKAGE}/{target.module}"] if target else []
    pure = Parser().parsestr(metadata)["Root-Is-Purelib"]
    faults = [] if compiled == expected else [f"has {compiled}, not {expected}"]
    return faults if pure == ("false" if target else "true") else [*faults, f"says Root-Is-Purelib: {pure}"]


def missing_files(tracked: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the files of the repository that the source distribution lacks, but for settings of git and CI."""
    held = {name.partition("/")[2] for name in names}
    return sorted(name for name in tracked if name not in held and not name.startswith((".ci/", ".git")))


def folder_faults(content: bytes, folders: Iterable[Path]) -> list[str]:
    """Return which folders of the machine that builds a compiled module names."""
    return [f"names the folder {folder}" for folder in folders if str(folder).encode() in content]


def elf_faults(elf: Elf, target: Target) -> list[str]:
    """Return why a compiled module may not load on this Linux.

    musl finds itself under the name libc.so, which auditwheel does not know: it knows Alpine's name only.
    """
    machine = {"x86_64": "x64", "aarch64": "AArch64"}[target.zig.partition("-")[0]]
    library = "libc.so" if target.zig.endswith("-musl") else "libc.so.6"
    faults = [f"is for {elf.machine}, not {machine}"] if elf.machine != machine else []
    faults += [f"needs {sorted(elf.libraries)}, not only {library}"] if elf.libraries != {library} else []
    unknown = sorted(elf.names - elf.python_names - FROM_LIBC)
    return [*faults, f"takes {unknown} from elsewhere"] if unknown else faults


def target_of(wheel: Path) -> Target | None:
    found = [target for target in TARGETS if target.tags[0] in wheel.stem.split("-")[-1].split(".")]
    return found[0] if found else None


def check_wheel(wheel: Path) -> None:
    """Raise RuntimeError if the wheel does not run on every platform of its tags, as far as its file shows."""
    target = target_of(wheel)
    with zipfile.ZipFile(wheel) as held:
        (name,) = (name for name in held.namelist() if name.endswith(".dist-info/WHEEL"))
        faults = wheel_faults(held.namelist(), held.read(name).decode(), target)
        if target and not faults:
            content = held.read(f"{PACKAGE}/{target.module}")
            faults = folder_faults(content, (ROOT, Path.home()))
            faults += elf_faults(read_elf(io.BytesIO(content)), target) if "linux" in target.zig else []
    if faults:
        raise RuntimeError(f"{wheel.name} {' and '.join(faults)}")
    if target:
        tool("abi3audit", "--strict", wheel)
    if target and "manylinux" in target.tags[0]:
        said = tool("auditwheel", "show", wheel)
        if f'"{target.tags[0]}"' not in said:
            raise RuntimeError(f"{wheel.name} is not for {target.tags[0]}:\n{said}")


def check(output: Path) -> None:
    packages = sorted(output.iterdir())
    tool("twine", "check", "--strict", *packages)
    wheels = [path for path in packages if path.suffix == ".whl"]
    if len(wheels) != len(TARGETS) + 1:
        raise RuntimeError(f"{output} has {len(wheels)} wheels, not {len(TARGETS) + 1}")
    for wheel in wheels:
        check_wheel(wheel)
    (source,) = output.glob("*.tar.gz")
    if (ROOT / ".git").exists():
        with tarfile.open(source) as held:
            missing = missing_files(run("git", "ls-files").splitlines(), held.getnames())
        if missing:
            raise RuntimeError(f"{source.name} lacks {missing}: add them to MANIFEST.in")
    print("Checked: twine check --strict, abi3audit --strict, auditwheel show, and the files inside")
    for path in packages:
        print(f"{path.stat().st_size / 1024:7.0f} KiB  {path.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for the packages; emptied first")
    output = parser.parse_args().output.resolve()
    work = ROOT / "build" / "dist"
    for folder in (output, work):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    if "SOURCE_DATE_EPOCH" not in os.environ and (ROOT / ".git").exists():
        # wheels of one commit have the same bytes
        os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    build(output, work)
    check(output)


if __name__ == "__main__":
    main()
