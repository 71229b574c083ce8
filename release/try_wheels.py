"""Install the packages of dist/ into new environments, and use the kernel there: see `make dist-test`.

For each Python given: once the wheel that pip chooses for this machine, and once the wheel in pure Python. This package
comes from dist/ only, its dependencies from the package index. With `--source`, tests of the source run too.
Ends with an error if a kernel is missing, or is there where none belongs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
NAME: Final = "spark-kafka-sink"
QUIET: Final = ("-m", "pip", "--quiet", "--disable-pip-version-check")
USE: Final = """
import logging
import sys
import sysconfig
from pathlib import Path

import spark_kafka_sink
from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.record.kernel import KERNEL

installed = Path(spark_kafka_sink.__file__)
assert installed.is_relative_to(sysconfig.get_path("platlib")), installed
assert (KERNEL is not None) is (sys.argv[1] == "kernel"), KERNEL
logging.disable()
producer = KafkaProducer({"bootstrap.servers": "127.0.0.1:1", "delivery.timeout.ms": 2000, "request.timeout.ms": 1000})
producer.close(0)
print("Python", sys.version.split()[0], spark_kafka_sink.__version__, KERNEL.__file__ if KERNEL else "numpy")
"""
"""What runs in each environment, in a folder of its own: with no broker, a producer begins and ends."""


def run(*command: str | Path, folder: Path) -> str:
    """Run a command in a folder, with nothing of this environment. Raises CalledProcessError if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def packages_offered(dist: Path, kind: str) -> list[Path]:
    """Return what pip may choose from: all wheels, or the one in pure Python. Raises FileNotFoundError without it."""
    offered = sorted(dist.glob("*.whl" if kind == "kernel" else "*-py3-none-any.whl"))
    if not offered:
        raise FileNotFoundError(f"{dist} has no wheel: make dist builds them.")
    return offered


def choose(python: Path, dist: Path, kind: str, work: Path) -> Path:
    """Return the wheel that pip chooses for this Python. Nothing comes from the package index here."""
    index, chosen = work / "index", work / "chosen"
    index.mkdir()
    for package in packages_offered(dist, kind):
        shutil.copy(package, index)
    run(python, *QUIET, "download", "--no-index", "--find-links", index, "--no-deps", "-d", chosen, NAME, folder=work)
    (wheel,) = chosen.iterdir()
    return wheel


def try_wheel(interpreter: str, dist: Path, kind: str, work: Path) -> None:
    """`kind`: kernel or pure."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    run(interpreter, "-m", "venv", work / "environment", folder=work)
    python = work / "environment" / "bin" / "python"
    wheel = choose(python, dist, kind, work)
    run(python, *QUIET, "install", wheel, folder=work)
    print(f"{wheel.name}: {run(python, '-c', USE, kind, folder=work).strip()}", flush=True)
    shutil.rmtree(work)


def try_source(dist: Path, work: Path) -> None:
    """Run tests of the source distribution in a new environment that is made as its README says."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as held:
        held.extractall(work, filter="data")
    (tree,) = work.iterdir()
    run("make", "setup", f"PYTHON={sys.executable}", folder=tree)
    said = run(tree / ".venv" / "bin" / "python", "-m", "pytest", "tests/unit/record", "-q", folder=tree)
    print(f"{source.name}: {said.strip().splitlines()[-1]}", flush=True)
    shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="interpreters, as paths or names")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--source", action="store_true", help="also run tests of the source distribution")
    arguments = parser.parse_args()
    work = ROOT / "build" / "dist-test"
    for interpreter in arguments.pythons:
        for kind in ("kernel", "pure"):
            try_wheel(interpreter, arguments.dist.resolve(), kind, work)
    if arguments.source:
        try_source(arguments.dist.resolve(), work)


if __name__ == "__main__":
    main()
