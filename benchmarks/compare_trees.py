"""Compare `KafkaSink.write` of two commits: `make compare BEFORE=<commit>`.

    python benchmarks/compare_trees.py HEAD~10                               the five cells, forty minutes
    python benchmarks/compare_trees.py HEAD~10 --after HEAD~5                two commits, without this tree's changes
    python benchmarks/compare_trees.py HEAD~10 --cells keyed-lz4-4-100 --records 100000 --rounds 2 --warm-up 0

The script builds the package of both commits, each in its own folder under build/compare/, and keeps it there for the
next time. AFTER is this working tree with its changes, without files that git does not track. Both packages run with
the libraries of this environment and with this tree's contenders: only the package differs.

The two take turns on one broker: before and after, after and before, `--rounds` times in every cell. A turn is a new
process that writes to a new topic, as in benchmarks/benchmark.py. It warms up, and then makes `--runs` timed runs. Each
topic must contain as many records as were written. The ratio of a round is after / before, of the medians of the timed
runs. The table shows medians over the rounds, and the lowest and highest ratio.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmark import BROKER_NOTE, Bench, MeasurementError, add_measuring_arguments, machine
from broker import QUICK_DELETION, Broker
from cells import COMBINATIONS, COMMON, cell_of
from contenders import CONTENDERS, compiler_seconds
from figures import Rate, title
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
    """Raise MeasurementError if a process of `run_process` would import the sink from elsewhere."""
    command = [sys.executable, "-c", "import spark_kafka_sink; print(spark_kafka_sink.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    found = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, check=False)
    if not found.stdout.startswith(f"{package}{os.sep}"):
        raise MeasurementError(f"Python does not import the sink from {package}: {found.stdout or found.stderr}")


# ---- measuring -------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """A turn of each package, in one cell."""

    before: Rate
    after: Rate

    @property
    def rate_ratio(self) -> float:
        return self.after.records_per_s / self.before.records_per_s

    @property
    def cpu_ratio(self) -> float:
        return self.after.cpu_s_per_million / self.before.cpu_s_per_million


def rounds_of(count: int, new_rate: Callable[[], Rate], before: Bench, after: Bench) -> Iterator[Round]:
    """Yield rounds. Every second one begins with `after`, so that a drift of the machine affects both."""
    for number in range(count):
        turn = Round(new_rate(), new_rate())
        turns = [(before, turn.before), (after, turn.after)]
        for bench, rate in turns if number % 2 == 0 else reversed(turns):
            bench.rate(rate)
        yield turn


def measure(
    broker: Broker,
    settings: argparse.Namespace,
    packages: tuple[Path, Path],
    compiled_s: Callable[[], Mapping[int, float]] = dict,
) -> dict[str, list[Round]]:
    """Measure the rounds of each cell. Raises MeasurementError if a process fails."""
    before, after = (Bench(broker, settings, (), None, compiled_s, package) for package in packages)
    found: dict[str, list[Round]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(settings.cells) * settings.rounds)
        for cell in settings.cells:
            records = OURS[settings.contender].records(cell_of(cell), settings.records)
            new_rate = partial(Rate, cell, settings.contender, records)
            progress.update(task, description=f"{cell}: until the broker's compilers rest, not counted")
            after.warm_up(new_rate())
            progress.update(task, description=cell)
            found[cell] = []
            for done in rounds_of(settings.rounds, new_rate, before, after):
                found[cell].append(done)
                progress.advance(task)
            progress.console.print(table_of({cell: found[cell]}))
    return found


# ---- output ----------------------------------------------------------------------------------------------------------


def with_spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"


def table_of(rounds: Mapping[str, Sequence[Round]]) -> Table:
    table = Table(title="after / before", title_justify="left")
    table.add_column("")
    for column in ("records/s before", "after", "ratio (spread)", "CPU s/M before", "after", "ratio (spread)"):
        table.add_column(column, justify="right")
    for cell, measured in rounds.items():
        table.add_row(
            title(cell, "PLAINTEXT"),
            *(f"{median(rate.records_per_s for rate in rates):,.0f}" for rates in zip(*measured, strict=True)),
            with_spread([each.rate_ratio for each in measured]),
            *(f"{median(rate.cpu_s_per_million for rate in rates):.2f}" for rates in zip(*measured, strict=True)),
            with_spread([each.cpu_ratio for each in measured]),
        )
    return table


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE", help="a commit")
    parser.add_argument("--after", metavar="COMMIT", help="a commit to measure instead of this working tree")
    parser.add_argument("--contender", choices=OURS, default="write", help="[%(default)s]")
    add_measuring_arguments(
        parser, COMMON, COMBINATIONS, records=4_000_000, rounds=5, of_a_round="turns of each package"
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
        rounds = {
            cell: [{"before": each.before.as_dict(), "after": each.after.as_dict()} for each in measured]
            for cell, measured in found.items()
        }
        settings.json.write_text(json.dumps({"machine": machine(), **names, "rounds": rounds}, indent=1) + "\n")
        console.print(f"Figures: {settings.json}")
    return 0


if __name__ == "__main__":
    # Without a handler SIGTERM would leave the process of a contender running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
