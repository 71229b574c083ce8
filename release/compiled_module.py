"""What a compiled module says about itself, on Linux, macOS and Windows, and whether its platform can load it."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from release.targets import OLDEST_MACOS, Target

START: Final = "PyInit__kernel"
"""The function that Python calls to load the module."""
_MEMORY: Final = {"memcpy", "memmove", "memset", "memcmp", "bcmp"}
"""clang makes `bcmp` of a `memcmp` whose result is only compared with 0. glibc and musl have had it since their first
releases.
"""
FROM_LIBC: Final = {"linux": _MEMORY, "macos": {*_MEMORY, "__memcpy_chk", "dyld_stub_binder"}}
"""What the kernel takes from the C library of each system, with what the compiler and linker add for it.

On Windows each name belongs to a library, so the libraries are checked instead.
"""
_MACHINES: Final = {
    "x64": "x86_64",
    "AArch64": "aarch64",
    0x01000007: "x86_64",
    0x0100000C: "aarch64",
    0x8664: "x86_64",
    0xAA64: "aarch64",
}
"""The numbers and names of processors in ELF (as pyelftools writes them), Mach-O and PE files."""


@dataclass(frozen=True)
class Module:
    """What a module says. `libraries`: those it needs. `taken`, `given`: the names that it imports and exports."""

    machine: str
    libraries: frozenset[str]
    taken: frozenset[str]
    given: frozenset[str]
    oldest: str = ""
    """The oldest release of macOS or Windows that loads it. Empty on Linux, where auditwheel reads it."""
    is_signed: bool = False

    @property
    def python_names(self) -> set[str]:
        """Return the names that it takes from Python."""
        return {name for name in self.taken if name.startswith(("Py", "_Py"))}


def read_module(content: bytes, target: Target, folder: Path) -> Module:
    """Return what a module says. `folder`: for a file with the same content, which some readers need."""
    if target.system == "linux":
        return _read_elf(content)
    if target.system == "windows":
        return _read_pe(content)
    path = folder / target.module
    path.write_bytes(content)
    return _read_macho(path)


def _read_elf(content: bytes) -> Module:
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(content))
    symbols = [symbol for symbol in elf.get_section_by_name(".dynsym").iter_symbols() if symbol.name]
    dynamic = elf.get_section_by_name(".dynamic").iter_tags()
    taken = {symbol.name for symbol in symbols if symbol.entry.st_shndx == "SHN_UNDEF"}
    return Module(
        _MACHINES[elf.get_machine_arch()],
        frozenset(tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"),
        frozenset(taken),
        frozenset(symbol.name for symbol in symbols if symbol.name not in taken),
    )


def _read_pe(content: bytes) -> Module:
    from pefile import PE

    pe: Any = PE(data=content)
    libraries = {
        entry.dll.decode(): [name.name.decode() for name in entry.imports] for entry in pe.DIRECTORY_ENTRY_IMPORT
    }
    return Module(
        _MACHINES[pe.FILE_HEADER.Machine],
        frozenset(libraries),
        frozenset(name for names in libraries.values() for name in names),
        frozenset(symbol.name.decode() for symbol in pe.DIRECTORY_ENTRY_EXPORT.symbols if symbol.name),
        f"{pe.OPTIONAL_HEADER.MajorSubsystemVersion}.{pe.OPTIONAL_HEADER.MinorSubsystemVersion}",
    )


def _read_macho(path: Path) -> Module:
    from macholib.MachO import MachO
    from macholib.SymbolTable import SymbolTable

    macho: Any = MachO(str(path))
    (header,) = macho.headers
    commands = {command.get_cmd_name(): content for command, content, _ in header.commands}
    symbols = SymbolTable(macho, header=header)
    minimum = int(commands["LC_BUILD_VERSION"].minos)
    return Module(
        _MACHINES[header.header.cputype],
        frozenset(name for _, _, name in header.walkRelocatables()),
        frozenset(name.decode().removeprefix("_") for _, name in symbols.undefsyms),
        frozenset(name.decode().removeprefix("_") for _, name in symbols.extdefsyms),
        f"{minimum >> 16}.{minimum >> 8 & 0xFF}",
        "LC_CODE_SIGNATURE" in commands,
    )


def _is_expected(library: str, target: Target) -> bool:
    """Return whether each machine of a platform has a library.

    musl finds itself under the name libc.so. Windows has the libraries api-ms-win-crt since Windows 10.
    """
    if target.system == "linux":
        return library == ("libc.so" if target.has_musl else "libc.so.6")
    if target.system == "macos":
        return library == "/usr/lib/libSystem.B.dylib"
    return library.lower() in ("python3.dll", "kernel32.dll") or library.lower().startswith("api-ms-win-crt-")


def module_faults(module: Module, target: Target) -> list[str]:
    """Return why the platform of `target` cannot load a module. A Mac with ARM64 loads signed modules only."""
    faults = [] if module.machine == target.machine else [f"is for {module.machine}, not {target.machine}"]
    odd = sorted(library for library in module.libraries if not _is_expected(library, target))
    faults += [f"needs {odd}, which the platform may not have"] if odd else []
    unknown = sorted(module.taken - module.python_names - FROM_LIBC.get(target.system, module.taken))
    faults += [f"takes {unknown} from elsewhere"] if unknown else []
    faults += [] if START in module.given else [f"does not export {START}"]
    if target.system == "macos":
        faults += [] if module.oldest == OLDEST_MACOS else [f"is for macOS {module.oldest}, not {OLDEST_MACOS}"]
        faults += [] if module.is_signed or target.machine == "x86_64" else ["is not signed"]
    return faults


def folder_faults(content: bytes, folders: Iterable[Path]) -> list[str]:
    """Return which folders of the machine that builds a compiled module names."""
    return [f"names the folder {folder}" for folder in folders if str(folder).encode() in content]
