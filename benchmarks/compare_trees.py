"""Compare `KafkaSink.write` of two commits: `make compare BEFORE=<commit>`.

    python benchmarks/compare_trees.py HEAD~10                               the five cells, fifteen minutes
    python benchmarks/compare_trees.py HEAD~10 --after HEAD~5                two commits, without this tree's changes
    python benchmarks/compare_trees.py HEAD~10 --cells keyed-lz4-4-100 --records 100000 --rounds 2 --warm-up 0

The script builds the package of both commits, each in its own folder under build/compare/, and keeps it there for the
next time. AFTER is this working tree with its changes, without files that git does not track. Both packages run with
the libraries of this environment and with this tree's contenders: only the package differs.

A cell has one process with one Spark session, whose compiled code and memory both packages share: a process for each
would differ by more than the packages do. Spark's Python workers belong to one package. The two take turns on one
broker: before and after, after and before, `--rounds` times. A turn is one run, and writes to a new topic, which must
contain as many records as were written. The ratio of a round is after / before. The table shows the median of the
rounds' ratios, and the interval in which it is with a chance of 90 %.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Final, NamedTuple, Self

from benchmark import (
    AT_REST,
    BROKER_NOTE,
    MOST_WARM_UPS,
    WORKER,
    MeasurementError,
    add_measuring_arguments,
    machine,
)
from broker import QUICK_DELETION, Broker, count_records, warm_topic
from cells import COMBINATIONS, COMMON, Assignment, cell_of
from contenders import CONTENDERS, compiler_seconds, seconds_since
from figures import Timed, title
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.local.jvm import CURRENT

ROOT = Path(__file__).resolve().parents[1]
BUILDS = ROOT / "build" / "compare"
OURS = {name: contender for name, contender in CONTENDERS.items() if name in ("write", "format", "foreach_partition")}
KERNEL = "spark_kafka_sink/record/_kernel"
STOPS_WITHIN_S: Final = 30.0
DRAWS: Final = 2000

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


# ---- the packages ----------------------------------------------------------------------------------------------------


def output_of(*command: str | Path) -> str:
    """Run a command, and return its stdout. Raises MeasurementError with its stderr, if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasurementError(f"{' '.join(map(str, command))} failed:\n{done.stderr.strip()}")
    return done.stdout.strip()


def commit_of_working_tree() -> str:
    """Return a commit of the tracked files with their changes, or the last commit. Changes no branch or file."""
    return output_of("git", "stash", "create") or "HEAD"


def build(commit: str) -> Path:
    """Install the commit's package, without its dependencies, and return the folder to import it from.

    Raises MeasurementError if there is no such commit, or if its package or kernel cannot be built.
    """
    folder = BUILDS / output_of("git", "rev-parse", "--verify", f"{commit}^{{tree}}")[:12]
    if not (folder / "spark_kafka_sink").exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=BUILDS) as scratch:
            archive, source, built = (Path(scratch, name) for name in ("source.tar", "source", "built"))
            output_of("git", "archive", "--output", archive, commit)
            with tarfile.open(archive) as files:
                files.extractall(source, filter="data")
            output_of(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", built, source)
            if (source / f"{KERNEL}.c").exists() and not list(built.glob(f"{KERNEL}*.so")):
                raise MeasurementError(f"The compiled kernel of {commit} was not built: is there a C compiler?")
            built.rename(folder)
    check_import(folder)
    return folder


def check_import(package: Path) -> None:
    """Raise MeasurementError if Python would import the sink from elsewhere."""
    command = [sys.executable, "-c", "import spark_kafka_sink; print(spark_kafka_sink.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    found = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, check=False)
    if not found.stdout.startswith(f"{package}{os.sep}"):
        raise MeasurementError(f"Python does not import the sink from {package}: {found.stdout or found.stderr}")


# ---- measuring -------------------------------------------------------------------------------------------------------


class Turns:
    """A process with one Spark session, in which the packages write by turns. Usable as a context manager."""

    def __init__(self, broker: Broker, settings: argparse.Namespace, cell: str) -> None:
        self._broker = broker
        self._timeout_s = settings.timeout
        self.cell = cell
        self.records = CONTENDERS[settings.contender].records(cell_of(cell), settings.records)
        servers, cores = broker.bootstrap_servers, cell_of(cell).slots or settings.cores
        self._work = Assignment(
            settings.contender,
            cell,
            servers,
            "",
            self.records,
            0,
            0.0,
            cores,
            options=settings.option,
            takes_turns=True,
        )

    def __enter__(self) -> Self:
        self._folder = TemporaryDirectory()  # Spark's workers import from their folder first: nothing is in this one
        self._log = TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), self._work.as_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=self._folder.name,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": ""},
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End the process: it stops when its stdin ends."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def turn(self, package: Path) -> Timed:
        """Write the rows of the cell to a new topic, which must contain as many records afterwards. Raises
        MeasurementError.
        """
        topic, partitions = f"{self.cell}-{uuid.uuid4().hex[:6]}", cell_of(self.cell).partitions
        try:
            warm_topic(self._broker, topic, partitions)
            timed = self._ask({"package": str(package), "topic": topic})
            found = count_records(self._broker.bootstrap_servers, topic) - partitions
            self._broker.delete_topic(topic)
        except KafkaError as error:
            raise MeasurementError(f"{self.cell}, its topic: {error}") from error
        if found != self.records:
            raise MeasurementError(f"{self.cell}: the topic contains {found:,} records of {self.records:,}")
        return timed

    def _ask(self, turn: Mapping[str, str]) -> Timed:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        too_late = threading.Timer(self._timeout_s, process.kill)
        too_late.start()
        try:
            with suppress(BrokenPipeError):
                print(json.dumps(turn), file=process.stdin, flush=True)
            while line := process.stdout.readline():
                if line.startswith("{"):
                    answer = json.loads(line)
                    return Timed(answer["seconds"], answer["cpu_s"])
        finally:
            too_late.cancel()
        self._log.seek(0)
        last = "".join(self._log.readlines()[-25:])
        raise MeasurementError(
            f"The run in {self.cell} failed, or was not done after {self._timeout_s:.0f} s (--timeout). The end of its"
            f" log:\n{last}"
        )


class Measured(NamedTuple):
    """The rounds of a cell. `records`: those of one run."""

    records: int
    rounds: list[Round]


class Round(NamedTuple):
    """A turn of each package, in one cell."""

    before: Timed
    after: Timed

    @property
    def rate_ratio(self) -> float:
        return self.before.seconds / self.after.seconds

    @property
    def cpu_ratio(self) -> float:
        return self.after.cpu_s / self.before.cpu_s


def rounds_of(count: int, turn: Callable[[Path], Timed], before: Path, after: Path) -> Iterator[Round]:
    """Yield rounds. Every second one begins with `after`, so that a drift of the machine affects both."""
    for number in range(count):
        if number % 2 == 0:
            first = turn(before)
            yield Round(first, turn(after))
        else:
            first = turn(after)
            yield Round(turn(before), first)


def measure(
    broker: Broker,
    settings: argparse.Namespace,
    packages: tuple[Path, Path],
    compiled_s: Callable[[], Mapping[int, float]] = dict,
) -> dict[str, Measured]:
    """Measure the rounds of each cell. `compiled_s` returns the seconds that each of the broker's compilers has taken.
    Raises MeasurementError if a run fails.
    """
    found: dict[str, Measured] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(settings.cells) * settings.rounds)
        for cell in settings.cells:
            with Turns(broker, settings, cell) as turns:
                progress.update(task, description=f"{cell}: until all compilers rest, not counted")
                warm_up(turns, packages, settings.warm_up, compiled_s)
                progress.update(task, description=cell)
                found[cell] = Measured(turns.records, [])
                for done in rounds_of(settings.rounds, turns.turn, *packages):
                    found[cell].rounds.append(done)
                    progress.advance(task)
            progress.console.print(table_of({cell: found[cell]}))
    return found


def warm_up(
    turns: Turns, packages: Sequence[Path], at_least_s: float, compiled_s: Callable[[], Mapping[int, float]]
) -> None:
    """Write by turns for `at_least_s`, and until the broker's compilers rest, within limits."""
    began = time.perf_counter()
    for _ in range(MOST_WARM_UPS * len(packages)):
        before, started = compiled_s(), time.perf_counter()
        for package in packages:
            turns.turn(package)
        is_at_rest = seconds_since(before, compiled_s()) < AT_REST * (time.perf_counter() - started)
        if is_at_rest and time.perf_counter() - began >= at_least_s:
            break


# ---- output ----------------------------------------------------------------------------------------------------------


def with_interval(ratios: Sequence[float]) -> str:
    """Return the median of the ratios, and the interval in which it is with a chance of 90 % (the bootstrap)."""
    chance = random.Random(len(ratios))
    medians = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return f"{median(ratios):.3f} ({medians[DRAWS // 20]:.3f} - {medians[-DRAWS // 20]:.3f})"


def table_of(found: Mapping[str, Measured]) -> Table:
    table = Table(title="after / before: the median of the rounds (90 % of such medians)", title_justify="left")
    table.add_column("")
    for column in ("records/s before", "after", "rate", "CPU s/M before", "after", "CPU"):
        table.add_column(column, justify="right")
    for cell, (records, rounds) in found.items():
        pairs = list(zip(*rounds, strict=True))
        table.add_row(
            title(cell, "PLAINTEXT"),
            *(f"{records / median(timed.seconds for timed in turns):,.0f}" for turns in pairs),
            with_interval([each.rate_ratio for each in rounds]),
            *(f"{median(timed.cpu_s for timed in turns) / records * 1e6:.2f}" for turns in pairs),
            with_interval([each.cpu_ratio for each in rounds]),
        )
    return table


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE", help="a commit")
    parser.add_argument("--after", metavar="COMMIT", help="a commit to measure instead of this working tree")
    parser.add_argument("--contender", choices=OURS, default="write", help="[%(default)s]")
    add_measuring_arguments(
        parser, COMMON, COMBINATIONS, records=4_000_000, rounds=20, of_a_round="runs of each package"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    settings = argument_parser().parse_args(arguments)
    logging.getLogger("spark_kafka_sink").setLevel(logging.ERROR)  # a new topic refuses its first batches now and then
    try:
        console.print("Building the two packages (a minute the first time)")
        before = build(settings.before)
        names = {"before": settings.before, "after": settings.after or commit_of_working_tree()}
        packages = before, build(names["after"])
        console.print(f"Before: {settings.before}. After: {settings.after or 'this working tree'}.")
        console.print(f"Broker: Kafka {CURRENT.version}, {BROKER_NOTE}")
        with EmbeddedKafka(properties=QUICK_DELETION, tuned_for="throughput") as kafka:
            compiled_s = partial(compiler_seconds, kafka.node_pid(kafka.node_ids[0]))
            found = measure(kafka, settings, packages, compiled_s)
    except (KafkaError, MeasurementError, OSError) as error:
        console.print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    if len(found) > 1:
        console.print(table_of(found))
    if settings.json is not None:
        cells = {
            cell: {
                "records": measured.records,
                "rounds": [
                    {"before": each.before._asdict(), "after": each.after._asdict()} for each in measured.rounds
                ],
            }
            for cell, measured in found.items()
        }
        settings.json.write_text(json.dumps({"machine": machine(), **names, "cells": cells}, indent=1) + "\n")
        console.print(f"Figures: {settings.json}")
    return 0


if __name__ == "__main__":
    # Without a handler SIGTERM would leave the process of a contender running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
