"""Python environments without the package, archives of it, a standalone cluster, and `submit`, which runs
write_job.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
SPARK_HOME = Path(pyspark.__file__).parent
WRITE_JOB = Path(__file__).with_name("write_job.py")
DISTRIBUTION = "spark-kafka-sink"
SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
SMALL = {
    "spark.ui.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.task.maxFailures": "1",
    "spark.sql.shuffle.partitions": "2",
}
LIMIT_S = 400


def environment(**more: str) -> dict[str, str]:
    """This process's environment, without the test session's Spark settings, and without this checkout on any path."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK_", "PYTHONPATH", "SPARK_"))}
    cache = os.environ.get("SPARK_KAFKA_SINK_CACHE")
    return {
        **kept,
        **({"SPARK_KAFKA_SINK_CACHE": cache} if cache else {}),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        **more,
    }


@dataclass(frozen=True)
class Told:
    """The output of a run of write_job.py."""

    done: list[str]
    places: list[dict[str, str]]


def run(command: Sequence[str | Path], folder: Path, variables: Mapping[str, str]) -> Told:
    """Run a command; fail with the end of its log if it fails."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return Told(
        [line["done"] for line in lines if "done" in line],
        [place for line in lines for place in line.get("places", ())],
    )


@pytest.fixture
def submit(tmp_path: Path) -> Callable[..., Told]:
    """`submit(master, arguments, flags, variables)`: run write_job.py under spark-submit, in a new folder."""

    def spark_submit(
        master: str,
        arguments: Sequence[str],
        flags: Sequence[str | Path] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Told:
        settings = [text for key, value in SMALL.items() for text in ("--conf", f"{key}={value}")]
        binary = SPARK_HOME / "bin" / "spark-submit"
        command = [binary, "--master", master, "--driver-memory", "512m", *settings, *flags, WRITE_JOB, *arguments]
        return run(command, tmp_path, environment(**(variables or {"PYSPARK_PYTHON": sys.executable})))

    return spark_submit


# ---- packages for a cluster ----------------------------------------------------------------------------------------


def new_environment(folder: Path) -> Path:
    """Make an empty virtual environment; return its folder of packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=LIMIT_S)
    return folder / SITE_PACKAGES


def is_importable(python: Path, module: str) -> bool:
    command = [str(python), "-c", f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"]
    done = subprocess.run(command, env=environment(), cwd=python.parent, timeout=LIMIT_S, check=False)
    return done.returncode == 0


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the package's dependencies and without the package."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    packages = new_environment(folder)
    # Only the path: packages that a .pth file adds there, such as an editable install, stay out.
    (packages / "dependencies.pth").write_text(f"{Path(pyspark.__file__).parents[1]}\n")
    python = folder / "bin" / "python"
    assert is_importable(python, "kio")
    assert not is_importable(python, "spark_kafka_sink")
    return python


def dependencies(name: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add the dependencies of `name` to `found`, except PySpark, which a cluster has."""
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name != "pyspark" and requirement.name not in found:
            found[requirement.name] = importlib.metadata.distribution(requirement.name)
            dependencies(requirement.name, found)


@pytest.fixture(scope="session")
def packed_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, its dependencies, and pandas for PySpark's mapInArrow, in a virtual environment, as an archive of
    venv-pack.
    """
    folder = tmp_path_factory.mktemp("packed")
    packages = new_environment(folder / "environment")
    found: dict[str, importlib.metadata.Distribution] = {}
    dependencies(DISTRIBUTION, found)
    found["pandas"] = importlib.metadata.distribution("pandas")
    dependencies("pandas", found)
    for distribution in found.values():
        for file in distribution.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), target)
    shutil.copytree(ROOT / "spark_kafka_sink", packages / "spark_kafka_sink")
    shutil.copyfile(ROOT / "pyspark_kafka_sink.py", packages / "pyspark_kafka_sink.py")
    archive = folder / "environment.tar.gz"
    pack = [Path(sys.executable).with_name("venv-pack"), "--prefix", folder / "environment", "--output", archive]
    subprocess.run([*map(str, pack), "--compress-level", "1", "--quiet"], check=True, timeout=LIMIT_S)
    shutil.rmtree(folder / "environment")
    return archive


@pytest.fixture(scope="session")
def zipped_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only the package, as --py-files takes it."""
    path = tmp_path_factory.mktemp("zipped") / "spark_kafka_sink.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(ROOT / "pyspark_kafka_sink.py", "pyspark_kafka_sink.py")
        for file in (ROOT / "spark_kafka_sink").rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(ROOT))
    return path


# ---- a standalone cluster ------------------------------------------------------------------------------------------


def started(stack: ExitStack, log: Path, pattern: str, *command: str | Path) -> str:
    """Start a process that ends with the stack; return the text that matches `pattern` in its log."""
    file = stack.enter_context(log.open("w"))
    process = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file, env=environment(), cwd=log.parent)
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)
    deadline = time.monotonic() + 60
    while (match := re.search(pattern, log.read_text())) is None:
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)
    return match[0]


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Spark master with one worker of two cores; each runs in its own process."""
    folder = tmp_path_factory.mktemp("standalone")
    spark_class, deploy = SPARK_HOME / "bin" / "spark-class", "org.apache.spark.deploy"
    ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        master: list[str | Path] = [spark_class, f"{deploy}.master.Master", *ports]
        address = started(stack, folder / "master.log", r"spark://127\.0\.0\.1:\d+", *master)
        worker: list[str | Path] = [spark_class, f"{deploy}.worker.Worker", *ports, "--cores", "2", "--memory", "1g"]
        registered = "Successfully registered with master"
        started(stack, folder / "worker.log", registered, *worker, "--work-dir", folder / "work", address)
        yield address
