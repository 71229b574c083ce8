"""A pipeline of two flows into one sink, and its runs by `spark-pipelines`, each in processes of its own."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from support.exactly_once_streams import KEYS
from support.killed_spark import kill_session
from support.spark_classes import QUICK_JVM

from spark_kafka_sink.sink.exactly_once.operator import main
from spark_kafka_sink.sink.exactly_once.session import stream_prefix
from spark_kafka_sink.sink.options import SinkConfig

ROOT = Path(__file__).resolve().parents[3]
FLOWS = ("first", "second")
ROWS = 40
"""Of a file, which is a batch."""
LIMIT_S = 600
_SMALL = {
    "spark.ui.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.log.level": "ERROR",
    "spark.connect.grpc.binding.address": "127.0.0.1",
}


class Run(Protocol):
    """Run `spark-pipelines run` in the folder of a pipeline. Return the exit code and the end of the output."""

    def __call__(self, folder: Path, *arguments: str, **environment: str) -> tuple[int, str]: ...


@pytest.fixture
def run() -> Iterator[Run]:
    """Its processes end with the test."""
    started: list[subprocess.Popen[str]] = []
    settings = [text for key, value in _SMALL.items() for text in ("--conf", f"{key}={value}")]
    program = Path(sys.executable).with_name("spark-pipelines")
    own = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "JDK_JAVA_OPTIONS": QUICK_JVM}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK_", "SPARK_HOME"))}

    def run_pipeline(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
        process = subprocess.Popen(
            [program, "--remote", "local[2]", *settings, "run", *arguments],
            cwd=folder,
            env=kept | own | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said

    yield run_pipeline
    for process in started:
        if process.poll() is None:
            kill_session(process.pid)
            process.communicate()


class Pipeline:
    """A project folder of `spark-pipelines` with a sink of these options. `finish` and `run` run it."""

    def __init__(self, folder: Path, options: dict[str, str], run: Run) -> None:
        self.folder = folder
        self.options = options
        self._run = run
        (folder / "transformations").mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("two_flows.py"), folder / "transformations")
        (folder / "options.json").write_text(json.dumps(options))
        (folder / "spark-pipeline.yml").write_text(
            f"name: test\nstorage: {self.storage}\nlibraries:\n  - glob:\n      include: transformations/**\n"
        )
        for flow in FLOWS:
            (folder / flow).mkdir()

    @property
    def storage(self) -> str:
        return f"file://{self.folder}/storage"

    def prefix(self, flow: str, version: int = 0) -> str:
        """The prefix that the sink makes of the flow's checkpoint. Each full refresh makes another version."""
        location = f"{self.storage}/_checkpoints/rows/{flow}/{version}"
        return stream_prefix(SinkConfig.from_options(self.options), {"checkpointLocation": location})

    def write_file(self, flow: str, number: int) -> list[int]:
        """More input: a file of numbered rows. Return the numbers. Row n has key n % KEYS."""
        numbers = list(range(number * ROWS, (number + 1) * ROWS))
        new = self.folder / f"{number}.json"
        new.write_text("".join(json.dumps({"key": str(n % KEYS), "value": str(n)}) + "\n" for n in numbers))
        new.rename(self.folder / flow / new.name)
        return numbers

    def finish(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run the pipeline to its end, whatever that is."""
        return self._run(self.folder, *arguments, **environment)

    def run(self, *arguments: str) -> str:
        """Run the pipeline, which must succeed. Return what it printed."""
        code, said = self.finish(*arguments)
        assert code == 0, said
        return said

    def operate(self, command: str, prefix: str) -> None:
        """Run a command of `python -m spark_kafka_sink.transactions`."""
        servers = ["--bootstrap-servers", self.options["kafka.bootstrap.servers"]]
        out = io.StringIO()
        assert main([command, *servers, "--prefix", prefix], out, lambda _: prefix) == 0, out.getvalue()


@pytest.fixture
def make_pipeline(tmp_path: Path, run: Run) -> Callable[[dict[str, str]], Pipeline]:
    return lambda options: Pipeline(tmp_path / "pipeline", options, run)
