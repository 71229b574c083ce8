"""Install the packages of dist/ beside a PySpark that is already there, and write with them: see `make dist-test`.

For each Python given, in a new environment with PySpark and pandas, which PySpark's mapInArrow needs: the wheel in pure
Python, and the wheel that pip chooses for this machine. More versions of PySpark are tried with the first Python.
With `--source`, for the first Python also the wheels that pip builds from the source distribution, with and without a C
compiler, and tests of the source. This package comes from dist/ only, its dependencies from the package index.
Each package runs README's batch and README's stream into an embedded Kafka, and librdkafka counts the records.
Ends with an error if a write fails, if PySpark has changed, or if a kernel is missing or where none belongs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
RELEASE: Final = ROOT / "release"
NAME: Final = "spark-kafka-sink"
PIP: Final = ("-m", "pip", "--quiet", "--disable-pip-version-check")
RECORDS: Final = 1000
"""The rows of README's batch."""
TESTS: Final = ("tests/unit/record", "tests/unit/release", "tests/unit/test_setup.py")
NO_COMPILER: Final = {"CC": "there-is-no-compiler"}


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that change Python, PySpark or make."""
    odd = ("PYTHON", "PYSPARK", "SPARK_", "MAKE", "MFLAGS")
    return {name: value for name, value in variables.items() if not name.startswith(odd)}


def run(*command: str | Path, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command in a folder and return its output. Raises RuntimeError with all its output if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**clean_environment(os.environ), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


# ---- environments --------------------------------------------------------------------------------------------------


def packages_offered(dist: Path, kind: str) -> list[Path]:
    """Return what pip may choose from: all wheels, or the one in pure Python. Raises FileNotFoundError without it."""
    offered = sorted(dist.glob("*.whl" if kind == "kernel" else "*-py3-none-any.whl"))
    if not offered:
        raise FileNotFoundError(f"{dist} has no wheel: make dist builds them.")
    return offered


@dataclass(frozen=True)
class Environment:
    """A new environment of a Python. `folder` also holds the files that are made for it."""

    folder: Path

    @classmethod
    def make(cls, interpreter: str, folder: Path) -> Environment:
        folder.mkdir(parents=True)
        run(interpreter, "-m", "venv", folder / "environment", folder=folder)
        return cls(folder)

    @property
    def bin(self) -> Path:
        return self.folder / "environment" / "bin"

    def python(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> str:
        """Run the Python of this environment, which is also the first one of the PATH, as after `activate`."""
        path = {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        return run(self.bin / "python", *arguments, folder=self.folder, environment={**path, **(environment or {})})

    def choose(self, dist: Path, kind: str) -> Path:
        """Return the wheel that pip chooses from a folder, without the package index."""
        index, chosen = self.folder / "index" / kind, self.folder / "chosen" / kind
        index.mkdir(parents=True)
        for package in packages_offered(dist, kind):
            shutil.copy(package, index)
        self.python(*PIP, "download", "--no-index", "--find-links", index, "--no-deps", "-d", chosen, NAME)
        (wheel,) = chosen.iterdir()
        return wheel

    def build(self, source: Path, name: str, environment: Mapping[str, str]) -> Path:
        """Return the wheel that pip builds from the source distribution."""
        folder = self.folder / "built" / name
        self.python(*PIP, "wheel", "--no-deps", "--no-cache-dir", "-w", folder, source, environment=environment)
        (wheel,) = folder.iterdir()
        return wheel


# ---- writes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broker:
    """A running Kafka, and the environment whose librdkafka counts its records."""

    address: str
    environment: Environment

    def count(self, topic: str) -> int:
        return int(self.environment.python("-P", RELEASE / "count_records.py", self.address, topic))


def prepare_broker(interpreter: str, dist: Path, folder: Path) -> Environment:
    """Install the extra `local` from a wheel of dist/ into a new environment, and librdkafka."""
    environment = Environment.make(interpreter, folder)
    wheel = environment.choose(dist, "kernel")
    environment.python(*PIP, "install", f"{NAME}[local] @ {wheel.as_uri()}", "confluent-kafka")
    return environment


@contextmanager
def embedded_kafka(environment: Environment) -> Iterator[Broker]:
    """Run the embedded Kafka of an environment. Raises RuntimeError if it does not start."""
    command = [str(environment.bin / "python"), "-P", "-m", "spark_kafka_sink.local"]
    variables = clean_environment(os.environ)
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().strip() if process.stdout else ""
            if not address:
                raise RuntimeError("The embedded Kafka did not start.")
            yield Broker(address, environment)
        finally:
            process.terminate()


def write_faults(
    facts: Mapping[str, Any], *, kernel: bool, pyspark: str, folder: Path, counted: int, counted_of_stream: int | None
) -> list[str]:
    """Return what is wrong with a write. `facts`: the output of use_package.py. `folder`: that of the environment.
    `counted` and `counted_of_stream`: the committed records; None where PySpark has no `format` for a stream.
    """
    faults = [] if facts["pyspark"] == pyspark else [f"has PySpark {facts['pyspark']}, no longer {pyspark}"]
    faults += [] if facts["kernel"] is kernel else ["has no kernel" if kernel else "has a kernel"]
    faults += [] if Path(facts["folder"]).is_relative_to(folder) else [f"runs from {facts['folder']}"]
    if not facts["records"] == counted == RECORDS:
        faults.append(f"reports {facts['records']} records, and the topic has {counted}, not {RECORDS}")
    streamed = facts["streamed"]
    if (streamed is None) is not (counted_of_stream is None) or (streamed or 0) > (counted_of_stream or 0):
        faults.append(f"streams {streamed} rows, and the topic has {counted_of_stream}")
    return faults


class Candidate(NamedTuple):
    """A wheel to write with. `kernel`: whether it must have one. `how`: where it comes from."""

    wheel: Path
    kernel: bool
    how: str


@dataclass(frozen=True)
class Trial:
    """Wheels to write with in one environment, in which PySpark was installed before them."""

    environment: Environment
    pyspark: str
    candidates: Sequence[Candidate]

    @classmethod
    def prepare(cls, interpreter: str, dist: Path, folder: Path, pyspark: str, *, source: bool) -> Trial:
        """Install PySpark, then the first wheel with all that it needs. `source`: also build from the source."""
        environment = Environment.make(interpreter, folder)
        environment.python(*PIP, "install", f"pyspark=={pyspark}", "pandas<3")
        candidates = [
            Candidate(environment.choose(dist, "pure"), kernel=False, how="pure"),
            Candidate(environment.choose(dist, "kernel"), kernel=True, how="kernel"),
        ]
        if source:
            (archive,) = dist.glob("*.tar.gz")
            without = environment.build(archive, "without", NO_COMPILER)
            candidates += [
                Candidate(environment.build(archive, "with", {}), kernel=True, how="source"),
                Candidate(without, kernel=False, how="source-without-compiler"),
            ]
        environment.python(*PIP, "install", candidates[0].wheel)
        return cls(environment, pyspark, candidates)

    def write(self, broker: Broker) -> None:
        """Write with each wheel. Raises RuntimeError if a write fails or is not as it must be."""
        for wheel, kernel, how in self.candidates:
            self.environment.python(*PIP, "install", "--force-reinstall", "--no-deps", wheel)
            topic = f"{self.environment.folder.name}-{how}"
            said = self.environment.python("-P", RELEASE / "use_package.py", broker.address, topic)
            facts = json.loads(said.splitlines()[-1])
            counted = broker.count(topic)
            of_stream = None if self.pyspark.startswith("3.") else broker.count(f"{topic}-stream")
            faults = write_faults(
                facts,
                kernel=kernel,
                pyspark=self.pyspark,
                folder=self.environment.folder,
                counted=counted,
                counted_of_stream=of_stream,
            )
            said = f"{wheel.name} ({how}), Python {facts['python']}, PySpark {facts['pyspark']}"
            if faults:
                raise RuntimeError(f"{said} {' and '.join(faults)}")
            streamed = "" if of_stream is None else f" and {of_stream} of a stream"
            print(f"{said}: {counted} records{streamed}, {'compiled kernel' if kernel else 'numpy'}", flush=True)


def try_source(dist: Path, work: Path) -> None:
    """Run tests of the source distribution in an environment that its Makefile makes, as in a clone."""
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as held:
        held.extractall(work / "source", filter="data")
    (tree,) = (work / "source").iterdir()
    run("make", "setup", f"PYTHON={sys.executable}", folder=tree)
    said = run(tree / ".venv" / "bin" / "python", "-m", "pytest", *TESTS, "-q", folder=tree)
    print(f"{source.name}: {said.strip().splitlines()[-1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="interpreters, as paths or names")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--pyspark",
        action="append",
        help="a version that is there before; not the newest. May be given more than once (default: 4.1.4)",
    )
    parser.add_argument("--source", action="store_true", help="also try the source distribution")
    arguments = parser.parse_args()
    dist, work, began = arguments.dist.resolve(), ROOT / "build" / "dist-test", time.monotonic()
    shutil.rmtree(work, ignore_errors=True)
    print("Installing into new environments", flush=True)
    environment = prepare_broker(arguments.pythons[0], dist, work / "broker")
    first, *others = arguments.pyspark or ["4.1.4"]
    pairs = [(python, first) for python in arguments.pythons] + [(arguments.pythons[0], other) for other in others]
    trials = [
        Trial.prepare(python, dist, work / f"environment-{at}", pyspark, source=arguments.source and at == 0)
        for at, (python, pyspark) in enumerate(pairs)
    ]
    with embedded_kafka(environment) as broker:
        for trial in trials:
            trial.write(broker)
    if arguments.source:
        try_source(dist, work)
    shutil.rmtree(work)
    print(f"All of it took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
