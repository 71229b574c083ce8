"""Measure Spark's ways into Kafka side by side: `make benchmark`.

    python benchmarks/benchmark.py                                                  the cells that matter, three hours
    python benchmarks/benchmark.py --cells keyed-lz4-4-100 --contenders jvm,write --records 1000000 --rounds 1
    python benchmarks/benchmark.py --cells keyed-lz4-4-100 --contenders jvm,write --security PLAINTEXT,SSL
    python benchmarks/benchmark.py --cells flights-text-lz4-50,flights-json-lz4-50,flights-avro-lz4-50
    python benchmarks/benchmark.py --cells keyed-none-16-100-200x50 --contenders jvm,write,format,write_once,format_once
    python benchmarks/benchmark.py --contenders table_write,table_produce_batch,table_produce_batch_errors_only
    python benchmarks/benchmark.py --cells all --latency --json benchmark.json --plot benchmark

A cell is a combination of keys, codec, partitions and bytes of a value. In every cell the contenders take turns,
`--rounds` times. A turn has a new process and a new topic. The process writes for `--warm-up` seconds, because a stream
that has run for hours is warm too. Then it makes `--runs` timed runs, of the same rows, which Spark generates on
demand. In a cell such as flights-json-lz4-50 they are two million flights of parquet files at most, which the
contenders or Spark's own functions make into text, JSON or Avro (benchmarks/flights.py). A cell with -200x50 has 200
tasks of 50 rows, also for contenders that write exactly once. One with -8slots has an executor that runs eight tasks at
once. Contenders without Spark (`table_…`) write the same rows of an Arrow table in memory. The tables show the medians
of all timed runs, and their ratios to Spark's JVM sink in the same cell. The rates depend on the machine, the ratios
less.

All contenders share one embedded broker, on the same processors. Its JVM has the flags of Kafka's own start script, as
users' brokers have. The flags for a quick start in tests would make TLS slow. Before every cell, processes that do not
count write to the broker until its compilers rest, as those of a broker in use do. With --security SSL the contenders
write over TLS. The tables compare that with PLAINTEXT if both are measured. Processor seconds are those of the client
(Spark's JVM and its Python workers), without the broker. Each topic must contain as many records as were written. The
script prints failures, leaves out the failed processes, and then exits with 1.

Every client has its own default settings, except for the codec. `--option` sets a setting for all. --latency also
measures micro-batches of 1,000 rows. --plot draws the figures (PNG and SVG). Contenders without their package are left
out: pip install 'spark-kafka-sink[benchmark]'
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import pyspark
from arguments import at_least_one, file_to_write, path_in_a_folder, seconds
from broker import QUICK_DELETION, Broker, count_committed, count_records, secured_listener, warm_topic
from cells import ALL_CELLS, CELLS, MOST_FLIGHTS, SECURITY, AnyCell, Assignment, FlightsCell, cell_of
from contenders import CONTENDERS, STREAMS, Contender, compiler_seconds, seconds_since
from figures import Latency, Rate, Timed, draw, latency_table, rate_table
from flights import AVRO_LOCK, rows_of_files, write_files
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.local import EmbeddedKafka, fetch_jars
from spark_kafka_sink.local.jars import KAFKA_LOCK
from spark_kafka_sink.local.jvm import CURRENT

JVM_SINK_LOCK = KAFKA_LOCK.with_name("spark-sql-kafka.lock.json")
WORKER = Path(__file__).with_name("contenders.py")
BASE = "jvm"
LATENCY_ROWS = 1000
AT_REST = 0.03
"""The share of a processor that the compilers of a broker take after a long time in use."""
MOST_WARM_UPS = 8
BROKER_NOTE = (
    "one node, on the same machine, with the JVM flags of Kafka's start script (every compiler, G1, 1 GB heap)"
)

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class MeasurementError(Exception):
    """A contender failed, or its topic does not contain the records that it wrote."""


# ---- measuring -----------------------------------------------------------------------------------------------------


def run_process(work: Assignment, timeout_s: float) -> list[dict[str, float]]:
    """Run a contender's process, and return the lines that it printed. Raises MeasurementError with its log's end."""
    command = [sys.executable, str(WORKER), work.as_json()]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    with TemporaryFile("w+") as log:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=timeout_s,
                env=environment,
                check=False,
            )
            failure = f"ended with code {done.returncode}" if done.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"was not done after {timeout_s:.0f} s (--timeout)"
        if failure is not None:
            log.seek(0)
            last = "".join(log.readlines()[-25:])
            raise MeasurementError(f"{work.contender} in {work.cell} {failure}. The end of its log:\n{last}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class Bench:
    """Runs contenders' processes. `jars`: those of Spark's sink. `authority_file`: the broker's authority, in PEM.
    `compiled_s` returns the seconds that each of the broker's compilers has taken. `data`: the folder with the files of
    write_files.
    """

    def __init__(
        self,
        broker: Broker,
        settings: argparse.Namespace,
        jars: Sequence[Path],
        authority_file: Path | None,
        compiled_s: Callable[[], Mapping[int, float]],
        data: str = "",
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._jars = tuple(map(str, jars))
        self._authority_file = authority_file
        self._compiled_s = compiled_s
        self._data = data

    def warm_up(self, rate: Rate) -> None:
        """Warm the broker until its compilers rest. The results of this contender do not count. If it fails, it fails
        again in a round that counts, which reports it.
        """
        for _ in range(MOST_WARM_UPS):
            before, started = self._compiled_s(), time.perf_counter()
            with suppress(MeasurementError):
                self.rate(replace(rate, runs=[]))
            if seconds_since(before, self._compiled_s()) < AT_REST * (time.perf_counter() - started):
                break

    def rate(self, rate: Rate) -> None:
        """Run one more process of this contender in this cell."""
        contender, cell = CONTENDERS[rate.contender], cell_of(rate.cell)
        topic = f"{rate.cell}-{rate.contender}-{uuid.uuid4().hex[:6]}"
        runs = self._settings.runs
        work = self._assignment(
            rate, topic, rate.records, runs, contender.needs_jars or rate.cell.startswith("flights-avro")
        )
        printed = self._on_topic(work, cell.partitions, rate if contender.sends else None)
        rate.runs += [Timed(line["seconds"], line["cpu_s"]) for line in printed if "seconds" in line]
        rate.worker_peak_bytes = max(rate.worker_peak_bytes, int(printed[-1]["worker_peak_bytes"]))

    def latency(self, latency: Latency) -> None:
        """Run one more process of this stream."""
        topic = f"latency-{latency.contender}-{uuid.uuid4().hex[:6]}"
        stream, batches = STREAMS[latency.contender], self._settings.batches
        work = self._assignment(latency, topic, LATENCY_ROWS, batches, stream.needs_jars)
        printed = self._on_topic(work, cell_of(latency.cell).partitions, None)
        latency.add_batch_ms += [line["add_batch_ms"] for line in printed if "add_batch_ms" in line]

    def _assignment(
        self, measured: Rate | Latency, topic: str, records: int, runs: int, needs_jars: bool
    ) -> Assignment:
        is_plain = measured.security == "PLAINTEXT"
        return Assignment(
            measured.contender,
            measured.cell,
            self._broker.bootstrap_servers if is_plain else self._broker.secured_servers(measured.security),
            topic,
            records,
            runs,
            self._settings.warm_up,
            cell_of(measured.cell).slots or self._settings.cores,
            self._jars if needs_jars else (),
            self._settings.option,
            isinstance(measured, Latency),
            "" if is_plain else str(self._authority_file),
            self._data,
            rows_of_files(min(self._settings.records, MOST_FLIGHTS), 1.0),
        )

    def _on_topic(self, work: Assignment, partitions: int, counted: Rate | None) -> list[dict[str, float]]:
        try:
            warm_topic(self._broker, work.topic, partitions)
            try:
                printed = run_process(work, self._settings.timeout)
                if counted is not None:
                    self._count(work, partitions, int(printed[-1]["warm_ups"]), counted)
            except MeasurementError:
                with suppress(KafkaError):  # the first error matters more
                    self._broker.delete_topic(work.topic)
                raise
            self._broker.delete_topic(work.topic)
        except KafkaError as error:
            raise MeasurementError(f"{work.contender} in {work.cell}, its topic: {error}") from error
        return printed

    def _count(self, work: Assignment, partitions: int, warm_ups: int, counted: Rate) -> None:
        count = count_committed if CONTENDERS[work.contender].is_once else count_records
        found = count(self._broker.bootstrap_servers, work.topic) - partitions
        expected = work.records * (work.runs + warm_ups)
        counted.records_found += found
        counted.records_expected += expected
        if found != expected:
            raise MeasurementError(
                f"{work.contender} in {work.cell}: its topic contains {found:,} records of {expected:,}"
            )


class Failures:
    """Failed processes, and processes whose topic does not contain the records that they wrote."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def attempt(self, step: Callable[[], None], progress: Progress) -> None:
        try:
            step()
        except MeasurementError as error:
            self.texts.append(str(error))
            progress.console.print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True)


def measure(
    broker: Broker,
    settings: argparse.Namespace,
    folder: Path,
    authority_file: Path | None = None,
    compiled_s: Callable[[], Mapping[int, float]] = dict,
) -> dict[str, Any]:
    """Measure every cell and contender, print tables on the way, and return the figures for the JSON file. `failures`
    in it lists failed processes; the measurement goes on after them. `folder` gets the files of a job.
    `authority_file`: that of the listener SSL. `compiled_s` returns the seconds that each of the broker's compilers has
    taken.
    """
    pairs = itertools.product(settings.cells, settings.contenders)
    asked = [(cell, name) for cell, name in pairs if CONTENDERS[name].fits(cell_of(cell))]
    absent = {(cell, name): missing_packages(CONTENDERS[name], cell_of(cell).codec) for cell, name in asked}
    for (cell, name), packages in absent.items():
        if packages:
            console.print(f"{cell}: {CONTENDERS[name].title} is left out: {' and '.join(packages)} is not installed")
    bench = Bench(
        broker, settings, jars_for(settings), authority_file, compiled_s, data=flights_files(settings, folder)
    )
    rates: list[dict[str, Any]] = []
    failures = Failures()
    streams = itertools.product(settings.streams, settings.security) if settings.latency else ()
    latencies = [Latency(name, settings.cells[0], security) for name, security in streams]
    contenders = sum(not packages for packages in absent.values()) * len(settings.security)
    steps = (contenders + len(latencies)) * settings.rounds
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)
        for cell in settings.cells:
            names = [name for name in settings.contenders if absent.get((cell, name)) == []]
            here = [
                Rate(cell, name, CONTENDERS[name].records(cell_of(cell), settings.records), security)
                for name, security in itertools.product(names, settings.security)
            ]
            progress.update(task, description=f"{cell}: until the broker's compilers rest, not counted")
            first = next((name for name in names if CONTENDERS[name].sends), None)
            for rate in [rate for rate in here if rate.contender == first]:
                bench.warm_up(rate)
            for _, rate in itertools.product(range(settings.rounds), here):
                progress.update(task, description=f"{cell}, {rate.security}: {CONTENDERS[rate.contender].title}")
                failures.attempt(partial(bench.rate, rate), progress)
                progress.advance(task)
            done = [rate for rate in here if rate.runs]
            figures = [rate.as_dict() | ratios(rate, done) for rate in done]
            for security in settings.security:
                progress.console.print(rate_table(cell, security, figures))
            rates += figures
        for _, latency in itertools.product(range(settings.rounds), latencies):
            progress.update(task, description=f"latency, {latency.security}: {STREAMS[latency.contender].title}")
            failures.attempt(partial(bench.latency, latency), progress)
            progress.advance(task)
    measured = [latency.as_dict() for latency in latencies if latency.add_batch_ms]
    for security in settings.security if measured else ():
        console.print(latency_table(security, measured, LATENCY_ROWS))
    return {
        "machine": machine(),
        "broker": f"Kafka {CURRENT.version}, {BROKER_NOTE}",
        "settings": {
            name: getattr(settings, name)
            for name in ("records", "rounds", "runs", "warm_up", "cores", "security", "option")
        },
        "rates": rates,
        "latencies": measured,
        "failures": failures.texts,
    }


def jars_for(settings: argparse.Namespace) -> list[Path]:
    """Fetch the jars of Spark's own sink, and of its `to_avro`, if they are needed."""
    is_needed = BASE in settings.contenders or (settings.latency and BASE in settings.streams)
    jars = fetch_jars(JVM_SINK_LOCK) if is_needed else []
    if any(is_avro(cell_of(cell)) for cell in settings.cells):
        jars += fetch_jars(AVRO_LOCK)
    return jars


def is_avro(cell: AnyCell) -> bool:
    return isinstance(cell, FlightsCell) and cell.format == "avro"


def flights_files(settings: argparse.Namespace, folder: Path) -> str:
    """Write the files of the cells with flights, and return their folder. Without such cells: nothing, and ""."""
    if not any(isinstance(cell_of(cell), FlightsCell) for cell in settings.cells):
        return ""
    files = folder / "flights"
    files.mkdir()
    write_files(files, min(settings.records, MOST_FLIGHTS))
    return str(files)


def missing_packages(contender: Contender, codec: str) -> list[str]:
    needed = [*contender.packages, *(package for name, package in contender.codec_packages.items() if name == codec)]
    return [package for package in needed if importlib.util.find_spec(package) is None]


def machine() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "spark": pyspark.__version__}
    return {"processors": os.cpu_count(), "architecture": platform.machine(), **versions}


def ratios(rate: Rate, rates: Sequence[Rate]) -> dict[str, float]:
    """Return the ratios to Spark's JVM sink in the same cell and with the same security; with TLS, also to the same
    contender without TLS. A ratio to something that was not measured is left out.
    """
    found = {}
    by_key = {(other.cell, other.contender, other.security): other for other in rates}
    if (base := by_key.get((rate.cell, BASE, rate.security))) is not None:
        cpu = rate.cpu_s_per_million / base.cpu_s_per_million if base.cpu_s_per_million else float("nan")
        found |= {"rate_ratio": rate.records_per_s / base.records_per_s, "cpu_ratio": cpu}
    if rate.security != "PLAINTEXT" and (plain := by_key.get((rate.cell, rate.contender, "PLAINTEXT"))) is not None:
        found["plaintext_ratio"] = rate.records_per_s / plain.records_per_s
    return found


# ---- the command line ------------------------------------------------------------------------------------------------


def cell_names(every: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        try:
            return [str(cell_of(name)) for name in (every if text == "all" else text.split(","))]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return names


def names_of(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - known.keys():
            raise argparse.ArgumentTypeError(f"{min(unknown)!r}: there are {', '.join(known)}")
        return found

    return names


class Option(argparse.Action):
    """Collect NAME=VALUE pairs in a mapping."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, equals, value = values.partition("=")
        if not equals:
            parser.error(f"{option_string} {values} must be NAME=VALUE")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name: value})


def add_measuring_arguments(
    parser: argparse.ArgumentParser,
    cells: Sequence[str],
    every: Sequence[str],
    *,
    records: int,
    rounds: int,
    of_a_round: str,
) -> None:
    """Add the arguments for what to measure, and for how long. `every`: the cells of "all"."""
    names, default = cell_names(every), ",".join(cells)
    parser.add_argument("--cells", type=names, default=default, help="separated by commas, or all [%(default)s]")
    parser.add_argument("--records", type=at_least_one, default=records, help="records of a run [%(default)s]")
    parser.add_argument("--rounds", type=at_least_one, default=rounds, help=f"{of_a_round} [%(default)s]")
    parser.add_argument(
        "--warm-up", type=seconds, default=20, help="seconds that a process writes before it is timed [%(default)s]"
    )
    parser.add_argument("--cores", type=at_least_one, default=2, help="cores of Spark [%(default)s]")
    parser.add_argument("--timeout", type=seconds, default=900, help="seconds for a process [%(default)s]")
    parser.add_argument("--option", action=Option, default={}, metavar="NAME=VALUE", help="setting of every producer")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write all figures there")


def argument_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ",".join(CONTENDERS)
    parser.add_argument(
        "--contenders", type=names_of(CONTENDERS), default=every, help="separated by commas [%(default)s]"
    )
    parser.add_argument(
        "--security",
        type=names_of(SECURITY),
        default="PLAINTEXT",
        help="PLAINTEXT, SSL or PLAINTEXT,SSL, which compares them by turns [%(default)s]",
    )
    add_measuring_arguments(
        parser, CELLS, ALL_CELLS, records=8_000_000, rounds=2, of_a_round="processes of each contender"
    )
    parser.add_argument("--runs", type=at_least_one, default=2, help="timed runs of each process [%(default)s]")
    parser.add_argument("--latency", action="store_true", help="also measure micro-batches, in the first cell")
    every = ",".join(STREAMS)
    parser.add_argument("--streams", type=names_of(STREAMS), default=every, help="streams for --latency [%(default)s]")
    parser.add_argument("--batches", type=at_least_one, default=60, help="timed micro-batches [%(default)s]")
    parser.add_argument("--plot", type=path_in_a_folder, metavar="STEM", help="draw STEM.png and STEM.svg")
    return parser


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    settings = parser.parse_args(arguments)
    needed = {
        "matplotlib": settings.plot is not None and "--plot",
        "cryptography": "SSL" in settings.security and "TLS",
    }
    for package, what in needed.items():
        if what and importlib.util.find_spec(package) is None:
            parser.error(f"{what} needs {package}: pip install 'spark-kafka-sink[benchmark]'")
    return settings


def save(results: Mapping[str, Any], settings: argparse.Namespace) -> None:
    if settings.json is not None:
        settings.json.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"Figures: {settings.json}")
    if settings.plot is not None:
        console.print(f"Plots: {', '.join(map(str, draw(results, settings.plot)))}")


def main(arguments: Sequence[str]) -> int:
    settings = parse_arguments(arguments)
    if not Path("/proc/self/stat").exists():
        console.print("[bold red]This job needs Linux: it reads processor time and memory from /proc.[/]")
        return 2
    # A new topic sometimes refuses the first batches. They are sent again, and the records are counted.
    logging.getLogger("spark_kafka_sink").setLevel(logging.ERROR)
    console.print(f"Broker: Kafka {CURRENT.version}, {BROKER_NOTE}")
    try:
        with TemporaryDirectory(prefix="benchmark-") as folder:
            security = secured_listener(Path(folder)) if "SSL" in settings.security else None
            with EmbeddedKafka(properties=QUICK_DELETION, security=security, tuned_for="throughput") as kafka:
                authority_file = security.truststore if security is not None else None
                compiled_s = partial(compiler_seconds, kafka.node_pid(kafka.node_ids[0]))
                results = measure(kafka, settings, Path(folder), authority_file, compiled_s)
        save(results, settings)
    except (KafkaError, OSError) as error:
        console.print(f"{type(error).__name__}: {error}", markup=False, soft_wrap=True)
        return 1
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    # Without a handler SIGTERM would leave the process of a contender running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
