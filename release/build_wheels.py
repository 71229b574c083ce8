"""Build the source distribution, and a wheel for each platform, on this machine: see `make dist`.

The wheel in pure Python is built from the source distribution. For each platform zig compiles the kernel, and the wheel
is packed again with it. Ends with an error if a platform cannot be built or a check fails.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from release.check_packages import check
from release.compiled_module import read_module
from release.targets import NOT_BUILT, PACKAGE, PYTHON_TAG, ROOT, TARGETS, Target, run, tool

SOURCES: Final = tuple(sorted(ROOT.glob("spark_kafka_sink/*/_*.c")))
NO_URL: Final = (
    "No project URL: the packages have no project URLs, and README's links are plain names of files in the source"
    " distribution. To have both: make dist URL=https://host/owner/name"
)


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
    """Return the text of python3.def. `data`: the symbols that are not functions."""
    lines = [f"    {name} DATA" if name in data else f"    {name}" for name in sorted(symbols)]
    return "\n".join(["LIBRARY python3.dll", "EXPORTS", *lines, ""])


def import_library(folder: Path, symbols: Iterable[str]) -> Path:
    """Make python3.lib, which names what the kernel takes from python3.dll, and return its path."""
    from abi3info import DATAS

    definition, library = folder / "python3.def", folder / "python3.lib"
    definition.write_text(definition_file(symbols, {symbol.name for symbol in DATAS}))
    tool("ziglang", "dlltool", "-m", "i386:x86-64", "-D", "python3.dll", "-d", definition, "-l", library)
    return library


def compile_kernel(target: Target, folder: Path, headers: Path, windows: Iterable[Path]) -> Path:
    """Compile the kernel for a platform, and return the path of the module. `windows`: libraries for Windows."""
    output = folder / target.tags[0] / target.module
    output.parent.mkdir()
    libraries = windows if target.system == "windows" else ()
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
    """Build all packages into `output`. Raises RuntimeError if a tool fails."""
    environment = {"SPARK_KAFKA_SINK_KERNEL": "none"}
    print(f"Building into {output}", flush=True)
    tool("build", "--no-isolation", "--outdir", output, ROOT, environment=environment)
    (pure,) = output.glob("*-py3-none-any.whl")
    headers = copy_headers(work / "headers")
    windows: list[Path] = []
    for target in TARGETS:
        kernel = compile_kernel(target, work, headers, windows)
        if not windows:
            module = read_module(kernel.read_bytes(), target, work)
            windows = [import_library(work, module.python_names)]
        pack(pure, target, kernel, work, output)
        print(f"  {target.tags[-1]}", flush=True)
    for platform, reason in NOT_BUILT.items():
        print(f"  no kernel for {platform}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for the packages; emptied first")
    output = parser.parse_args().output.resolve()
    url: str | None = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["project_url"]()
    print(f"Project URL: {url}" if url else NO_URL, flush=True)
    work = ROOT / "build" / "dist"
    for folder in (output, work):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    if "SOURCE_DATE_EPOCH" not in os.environ and (ROOT / ".git").exists():
        # wheels of one commit have the same bytes
        os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    build(output, work)
    check(output, url)


if __name__ == "__main__":
    main()
