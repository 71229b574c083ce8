"""This machine: the versions of what the sink needs, the kernel, PySpark and Java.

`gather` reads them, with the standard library only, so that it can also say what is missing. `judge` decides.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Final

from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.common.version import VERSION
from spark_kafka_sink.doctor.findings import Area, Finding, not_checked, ok, problem

REQUIRED: Final = ("pyarrow>=14", "numpy>=1.23", "kio>=0.6.5,<0.7", "crc32c>=2.7", "lz4>=4.3", "javaproperties>=0.8.1")
"""As in setup.cfg; a zip of the package has no metadata to ask."""
OLDEST_PYSPARK: Final = "3.5"
OLDEST_WITH_FORMAT: Final = "4.0"
_OLDEST_JAVA: Final = 17
"""For Spark 4. Spark 3.5 also runs on 8 and 11."""
_FIRST_TOO_NEW_JAVA: Final = 23
_OLDEST_WITH_ANY_NEW_JAVA: Final = "4.2"
"""Earlier ones have a Hadoop before 3.5, which calls what Java has removed (HADOOP-19212)."""
_SPEC: Final = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][\w.]*)")
_KERNEL: Final = "spark_kafka_sink.record._kernel"
_AREA: Final = Area.MACHINE


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution. `version` is None if it is missing. `needs` is such as `pyarrow>=14`, `by` who needs it. `error`:
    why it does not load.
    """

    needs: str
    version: str | None
    by: str = "spark-kafka-sink"
    error: str = ""

    @property
    def name(self) -> str:
        return re.split(r"[<>=!~\[; ]", self.needs)[0]


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of this process's machine."""

    packages: tuple[Package, ...]
    has_kernel: bool
    kernel_error: str = ""
    """Why a compiled kernel does not load; empty if there is none."""
    pyspark: str | None = None
    pyspark_needs: tuple[Package, ...] = ()
    java: str | None = None
    """The version by `java -version`; None if no Java runs."""
    java_home: str = ""
    is_remote: bool = False
    """Whether Spark Connect is used, which needs no Java here."""
    python: str = field(default_factory=lambda: sys.executable or "python")
    folder: str = field(default_factory=lambda: str(Path(__file__).parents[1]))
    """From which Python takes this package: in a checkout not where pip has installed it."""


def gather(environment: Mapping[str, str] = os.environ, timeout_s: float = 10.0) -> Machine:
    """Look at this process and machine. Imports the packages, the kernel and PySpark, and runs `java -version`."""
    has_kernel, kernel_error = _kernel()
    pyspark = _pyspark()
    java_home = environment.get("JAVA_HOME", "")
    return Machine(
        packages=tuple(_required(each) for each in REQUIRED),
        has_kernel=has_kernel,
        kernel_error=kernel_error,
        pyspark=pyspark,
        pyspark_needs=_needs_of_pyspark() if pyspark is not None else (),
        java=_java(java_home, timeout_s),
        java_home=java_home,
        is_remote=bool(environment.get("SPARK_REMOTE")) or _version("pyspark-client") is not None,
    )


def judge(machine: Machine) -> list[Finding]:
    found = [ok(_AREA, "spark-kafka-sink", f"{VERSION}, on Python {platform.python_version()} ({machine.python})")]
    found += [_package(each, machine) for each in machine.packages]
    found += [_kernel_finding(machine), *_pyspark_findings(machine), _java_finding(machine)]
    return found


# ---- decisions -------------------------------------------------------------------------------------------------------


def fits(version: str, needs: str) -> bool:
    """Return whether a version is one of `pyarrow>=14` or `kio>=0.6.5,<0.7`. Ends such as `rc1` do not count."""
    return all(_COMPARE[sign](_compared(version, bound)) for sign, bound in _SPEC.findall(needs))


_COMPARE: Final = {
    ">=": lambda order: order >= 0,
    "<=": lambda order: order <= 0,
    "==": lambda order: order == 0,
    "!=": lambda order: order != 0,
    "<": lambda order: order < 0,
    ">": lambda order: order > 0,
}


def _compared(version: str, bound: str) -> int:
    one, other = (_numbers(each) for each in (version, bound))
    longest = max(len(one), len(other))
    left, right = (each + (0,) * (longest - len(each)) for each in (one, other))
    return (left > right) - (left < right)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _package(package: Package, machine: Machine) -> Finding:
    needed = package.needs.partition(";")[0].strip()
    if package.version is None:
        seen = f"not installed; {package.by} needs {needed}"
        return problem("package-missing", _AREA, package.name, seen, python=machine.python, package=needed)
    if not fits(package.version, needed):
        seen = f"{package.version}; {package.by} needs {needed}"
        return problem("package-too-old", _AREA, package.name, seen, python=machine.python, package=needed)
    if package.error:
        seen = f"{package.version} does not load: {package.error}"
        return problem("package-missing", _AREA, package.name, seen, python=machine.python, package=needed)
    return ok(_AREA, package.name, package.version)


def _kernel_finding(machine: Machine) -> Finding:
    if machine.has_kernel:
        return ok(_AREA, "kernel", "compiled and loaded")
    if machine.kernel_error:
        return problem("kernel-does-not-load", _AREA, "kernel", machine.kernel_error)
    return problem("kernel-missing", _AREA, "kernel", f"there is no compiled one in {machine.folder}")


def _pyspark_findings(machine: Machine) -> list[Finding]:
    if machine.pyspark is None or _compared(machine.pyspark, OLDEST_PYSPARK) < 0:
        seen = "none that can be imported" if machine.pyspark is None else f"{machine.pyspark}, before {OLDEST_PYSPARK}"
        return [problem("pyspark-missing", _AREA, "pyspark", seen, python=machine.python)]
    found = [ok(_AREA, "pyspark", machine.pyspark)]
    if _compared(machine.pyspark, OLDEST_WITH_FORMAT) < 0:
        seen = f'{machine.pyspark} has no format("kafka_sink")'
        found = [problem("pyspark-without-format", _AREA, "pyspark", seen)]
    for each in machine.pyspark_needs:
        if each.version is None and each.name == "pandas":
            seen = f"not installed; {each.by} needs {each.needs} for mapInArrow"
            found.append(problem("pandas-missing", _AREA, each.name, seen, python=machine.python, package=each.needs))
        elif each.version is None or not fits(each.version, each.needs):
            found.append(_package(each, machine))
    return found


def _java_finding(machine: Machine) -> Finding:
    if machine.java is None:
        if machine.is_remote:
            return not_checked(_AREA, "Java", "none here, and Spark Connect needs none")
        where = f"JAVA_HOME={machine.java_home} has none that runs" if machine.java_home else "no java in PATH"
        return problem("java-missing", _AREA, "Java", where)
    numbers = _numbers(machine.java)
    major = numbers[1] if numbers[:1] == (1,) and len(numbers) > 1 else (numbers or (0,))[0]  # Java 8 says 1.8
    if machine.pyspark is None or machine.is_remote:
        return ok(_AREA, "Java", machine.java)
    if major < _OLDEST_JAVA and _compared(machine.pyspark, "4") >= 0:
        return problem("java-too-old", _AREA, "Java", f"{machine.java}; Spark {machine.pyspark} needs {_OLDEST_JAVA}")
    if major >= _FIRST_TOO_NEW_JAVA and _compared(machine.pyspark, _OLDEST_WITH_ANY_NEW_JAVA) < 0:
        seen = f"{machine.java}; Spark {machine.pyspark} needs one before {_FIRST_TOO_NEW_JAVA}"
        return problem("java-too-new", _AREA, "Java", seen)
    return ok(_AREA, "Java", machine.java)


# ---- facts -----------------------------------------------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
    try:  # on a path without metadata, as of --py-files or of a platform's own PySpark
        return str(import_module(name).__version__)
    except (ImportError, AttributeError):
        return None


def _required(needs: str) -> Package:
    """Look for a package of this sink, whose module has its name."""
    name = Package(needs, None).name
    version = _version(name)
    try:
        if version is not None:
            import_module(name)
    except Exception as error:  # such as an AttributeError with another numpy
        return Package(needs, version, error=one_line(f"{type(error).__name__}: {' '.join(str(error).split())}"))
    return Package(needs, version)


def _kernel() -> tuple[bool, str]:
    """Return whether the kernel is loaded, and why a compiled one is not."""
    try:
        import_module(_KERNEL)
    except ModuleNotFoundError:
        return False, ""
    except ImportError as error:
        return False, str(error)
    return True, ""


def _pyspark() -> str | None:
    try:
        return str(import_module("pyspark").__version__)
    except (ImportError, AttributeError):
        return None


def _needs_of_pyspark() -> tuple[Package, ...]:
    """Return what PySpark's own metadata ask for its SQL; nothing without metadata."""
    for name in ("pyspark", "pyspark-client", "pyspark-connect"):
        try:
            return tuple(_of_sql(metadata.requires(name) or (), f"PySpark {metadata.version(name)}"))
        except metadata.PackageNotFoundError:
            continue
    return ()


def _of_sql(requirements: Iterable[str], by: str) -> Iterable[Package]:
    for each in requirements:
        needs, _, marker = each.partition(";")
        name = Package(needs, None).name
        if name in {"pandas", "pyarrow"} and re.search(r"""extra\s*==\s*['"]sql['"]""", marker):
            yield Package(needs.strip(), _version(name), by)


def _java(java_home: str, timeout_s: float) -> str | None:
    """Return what `java -version` says; None if there is no Java, or it does not answer."""
    java = str(Path(java_home) / "bin" / "java") if java_home else shutil.which("java")
    if java is None:
        return None
    try:
        ended = subprocess.run(  # noqa: S603 - the user's own Java, as Spark finds it
            [java, "-version"], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "([^"]+)"', ended.stderr + ended.stdout)
    return found[1] if found and ended.returncode == 0 else None
