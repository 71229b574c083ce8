"""Check the packages of a release, as far as their files show: twine, abi3audit, auditwheel, and what is inside."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from release.compiled_module import folder_faults, module_faults, read_module
from release.targets import PACKAGE, ROOT, TARGETS, Target, run, tool

LABELS: Final = {"Homepage", "Source", "Documentation", "Changelog", "Issues"}
"""The project URLs of a package whose release has a URL."""


def wheel_faults(names: Iterable[str], metadata: str, target: Target | None) -> list[str]:
    """Return what is wrong with a wheel that has these files. `target`: None for the wheel in pure Python."""
    compiled = [name for name in names if name.endswith((".so", ".pyd"))]
    expected = [f"{PACKAGE}/{target.module}"] if target else []
    pure = Parser().parsestr(metadata)["Root-Is-Purelib"]
    faults = [] if compiled == expected else [f"has {compiled}, not {expected}"]
    return faults if pure == ("false" if target else "true") else [*faults, f"says Root-Is-Purelib: {pure}"]


def metadata_faults(metadata: str, url: str | None) -> list[str]:
    """Return what is wrong with the metadata of a package. `url`: that of the repository; None if it was not given."""
    fields = Parser().parsestr(metadata)
    urls = dict(line.split(", ", 1) for line in fields.get_all("Project-URL", []))
    expected = LABELS if url else set()
    faults = [] if set(urls) == expected else [f"has the project URLs {sorted(urls)}, not {sorted(expected)}"]
    foreign = sorted(given for given in urls.values() if url and not given.startswith(url))
    faults += [f"has the project URLs {foreign}, which do not begin with {url}"] if foreign else []
    faults += [] if fields["License-Expression"] == "Apache-2.0" else ["has no SPDX licence"]
    links = re.findall(r"\]\(([^)\s]+)\)", str(fields.get_payload()))
    relative = [link for link in links if "://" not in link and not link.startswith("#")]
    return [*faults, f"has the relative links {relative}"] if relative else faults


def missing_files(tracked: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the files of the repository that the source distribution lacks, except settings of git and CI."""
    held = {name.partition("/")[2] for name in names}
    return sorted(name for name in tracked if name not in held and not name.startswith((".ci/", ".git")))


def target_of(wheel: Path) -> Target | None:
    """Return the platform of a wheel, by its name. None for the wheel in pure Python."""
    found = [target for target in TARGETS if target.tags[0] in wheel.stem.split("-")[-1].split(".")]
    return found[0] if found else None


def check_wheel(wheel: Path, url: str | None) -> None:
    """Raise RuntimeError if the wheel does not run on every platform of its tags, as far as its file shows."""
    target = target_of(wheel)
    with zipfile.ZipFile(wheel) as held, TemporaryDirectory() as folder:
        (name,) = (name for name in held.namelist() if name.endswith(".dist-info/WHEEL"))
        faults = wheel_faults(held.namelist(), held.read(name).decode(), target)
        faults += metadata_faults(held.read(name.replace("/WHEEL", "/METADATA")).decode(), url)
        if target and not faults:
            content = held.read(f"{PACKAGE}/{target.module}")
            faults = folder_faults(content, (ROOT, Path.home()))
            faults += module_faults(read_module(content, target, Path(folder)), target)
    if faults:
        raise RuntimeError(f"{wheel.name} {' and '.join(faults)}")
    if target:
        tool("abi3audit", "--strict", wheel)
    if target and target.system == "linux" and not target.has_musl:
        # auditwheel knows Alpine's name of musl only, and zig's modules name libc.so
        said = tool("auditwheel", "show", wheel)
        if f'"{target.tags[0]}"' not in said:
            raise RuntimeError(f"{wheel.name} is not for {target.tags[0]}:\n{said}")


def check_source(source: Path, url: str | None) -> None:
    """Raise RuntimeError if the source distribution lacks a file of the repository, or its metadata is wrong."""
    with tarfile.open(source) as held:
        names = held.getnames()
        metadata = held.extractfile(f"{names[0].partition('/')[0]}/PKG-INFO")
        faults = metadata_faults(metadata.read().decode() if metadata else "", url)
    if (ROOT / ".git").exists():
        missing = missing_files(run("git", "ls-files").splitlines(), names)
        faults += [f"lacks {missing}: add them to MANIFEST.in"] if missing else []
    if faults:
        raise RuntimeError(f"{source.name} {' and '.join(faults)}")


def check(output: Path, url: str | None) -> None:
    """Raise RuntimeError if a package is missing or wrong."""
    packages = sorted(output.iterdir())
    tool("twine", "check", "--strict", *packages)
    wheels = [path for path in packages if path.suffix == ".whl"]
    if len(wheels) != len(TARGETS) + 1:
        raise RuntimeError(f"{output} has {len(wheels)} wheels, not {len(TARGETS) + 1}")
    for wheel in wheels:
        check_wheel(wheel, url)
    (source,) = output.glob("*.tar.gz")
    check_source(source, url)
    print("Checked: twine check --strict, abi3audit --strict, auditwheel show, and the files inside")
    for path in packages:
        print(f"{path.stat().st_size / 1024:7.0f} KiB  {path.name}")
