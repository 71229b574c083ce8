"""Measure Spark's ways into Kafka side by side: `make benchmark`.

    python jobs/benchmark.py                                                    the cells that matter, half an hour
    python jobs/benchmark.py --cells keyed-lz4-4-100 --contenders jvm,write --records 1000000 --rounds 1
    python jobs/benchmark.py --cells all --latency --json benchmark.json --plot benchmark

A cell is keys, codec, partitions and bytes of a value. In every cell the contenders take turns, `--rounds` times; each
time one gets a new process and a new topic, writes a warm-up run and then `--runs` timed ones, of the same rows that
Spark makes as they are asked for. The medians of all timed runs are shown, and their ratios to Spark's JVM sink in the
same cell: the rates depend on the machine, the ratios hardly. All share one embedded broker, on the same processors.
Processor seconds are those of the client (Spark's JVM and its Python workers), without the broker. Each topic must
hold as many records as were written. What fails is told and left out, and the job then exits 1.

Every client has its own default settings but for the codec; `--option` sets one for all. --latency measures
micro-batches of 1,000 rows as well, --plot draws (PNG and SVG). Contenders whose package is not installed are left out:
pip install 'spark-kafka-sink[benchmark]'
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import platform
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

import pyspark
from benchmark_contenders import CONTENDERS, STREAMS, Assignment, Cell, Contender
from benchmark_figures import Latency, Rate, Timed
from benchmark_show import draw, latency_table, rate_table
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.client.connect import consumer_network_client
from spark_kafka_sink.client.topic_reader import TopicReader
from spark_kafka_sink.client.topics_metadata import TopicsMetadata
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.local import EmbeddedKafka, fetch_jars
from spark_kafka_sink.local.lock import KAFKA_LOCK
from spark_kafka_sink.local.releases import CURRENT
from spark_kafka_sink.protocol.requests import LATEST_TIMESTAMP

JVM_SINK_LOCK = KAFKA_LOCK.with_name("spark-sql-kafka.lock.json")
WORKER = Path(__file__).with_name("benchmark_contenders.py")
CELLS = ("keyed-none-4-100", "keyed-lz4-4-100", "unkeyed-none-4-100", "keyed-zstd-4-100", "keyed-lz4-200-100")
ALL_CELLS = tuple(
    "-".join(parts)
    for parts in itertools.product(
        ("keyed", "unkeyed"), ("none", "lz4", "zstd", "snappy"), ("4", "200"), ("100", "1000")
    )
)
BASE = "jvm"
LATENCY_ROWS = 1000
BROKER = {"log.segment.delete.delay.ms": 1000}  # so that what was measured leaves the disk at once
BROKER_NOTE = "one node, -Xmx512m, C1 compiler, serial collector (as EmbeddedKafka starts it), on the same machine"

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Broker(Protocol):
    """EmbeddedKafka, or an Admin."""

    @property
    def bootstrap_servers(self) -> str: ...

    def create_topic(self, name: str, partitions: int = 1) -> None: ...

    def delete_topic(self, name: str) -> None: ...


class MeasurementError(Exception):
    """A contender failed, or its topic does not hold what it wrote."""


# ---- measuring -----------------------------------------------------------------------------------------------------


def run_process(work: Assignment, timeout_s: float) -> list[dict[str, float]]:
    """What a contender's process told. Raises MeasurementError with the end of its log."""
    command = [sys.executable, str(WORKER), work.as_json()]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    with TemporaryFile("w+") as log:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=timeout_s, env=environment, check=False
            )
            failure = f"ended with code {done.returncode}" if done.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"was not done after {timeout_s:.0f} s (--timeout)"
        if failure is not None:
            log.seek(0)
            last = "".join(log.readlines()[-25:])
            raise MeasurementError(f"{work.contender} in {work.cell} {failure}. The end of its log:\n{last}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def warm_topic(broker: Broker, topic: str, partitions: int) -> None:
    """Create a topic and write every partition once: the first append to one opens its files."""
    broker.create_topic(topic, partitions=partitions)
    producer = KafkaProducer({"bootstrap.servers": broker.bootstrap_servers, "client.id": "benchmark"})
    try:
        sent = [producer.send(topic, b"first", partition=partition) for partition in range(partitions)]
        producer.flush()
        for future in sent:
            future.result()
    finally:
        producer.close()


def count_records(servers: str, topic: str) -> int:
    config = ProducerConfig.from_mapping({"bootstrap.servers": servers, "client.id": "benchmark"})
    clock, rng = SystemClock(), random.Random()
    backoff_ms, backoff_max_ms = config.retry_backoff_ms, config.retry_backoff_max_ms
    metadata = TopicsMetadata([topic], backoff_ms, backoff_max_ms, config.metadata_max_age_ms, rng)
    client = consumer_network_client(config, metadata, clock, rng)
    try:
        reader = TopicReader(client, metadata, clock, backoff_ms)
        return sum(reader.offsets(reader.partitions(topic), LATEST_TIMESTAMP).values())
    finally:
        client.close()


class Bench:
    """Hands out assignments. `jars` are those of Spark's sink."""

    def __init__(self, broker: Broker, settings: argparse.Namespace, jars: Sequence[Path]) -> None:
        self._broker = broker
        self._settings = settings
        self._jars = tuple(map(str, jars))

    def rate(self, rate: Rate) -> None:
        """One process more of this contender in this cell."""
        contender, cell = CONTENDERS[rate.contender], Cell.parse(rate.cell)
        topic = f"{rate.cell}-{rate.contender}-{uuid.uuid4().hex[:6]}"
        runs = self._settings.runs
        work = self._assignment(rate.contender, rate.cell, topic, rate.records, runs, contender.needs_jars)
        told = self._on_topic(work, cell.partitions, rate if contender.sends else None)
        rate.runs += [Timed(line["seconds"], line["cpu_s"]) for line in told if "seconds" in line]
        rate.worker_peak_bytes = max(rate.worker_peak_bytes, int(told[-1]["worker_peak_bytes"]))

    def latency(self, latency: Latency) -> None:
        """One process more of this stream."""
        topic = f"latency-{latency.contender}-{uuid.uuid4().hex[:6]}"
        stream, batches = STREAMS[latency.contender], self._settings.batches
        work = self._assignment(
            latency.contender, latency.cell, topic, LATENCY_ROWS, batches, stream.needs_jars, is_latency=True
        )
        told = self._on_topic(work, Cell.parse(latency.cell).partitions, None)
        latency.add_batch_ms += [line["add_batch_ms"] for line in told if "add_batch_ms" in line]

    def _assignment(
        self, name: str, cell: str, topic: str, records: int, runs: int, needs_jars: bool, *, is_latency: bool = False
    ) -> Assignment:
        return Assignment(
            name,
            cell,
            self._broker.bootstrap_servers,
            topic,
            records,
            runs,
            self._settings.cores,
            self._jars if needs_jars else (),
            self._settings.option,
            is_latency,
        )

    def _on_topic(self, work: Assignment, partitions: int, counted: Rate | None) -> list[dict[str, float]]:
        warm_topic(self._broker, work.topic, partitions)
        try:
            told = run_process(work, self._settings.timeout)
            if counted is not None:
                found = count_records(work.servers, work.topic) - partitions
                expected = work.records * (work.runs + 1)
                counted.records_found += found
                counted.records_expected += expected
                if found != expected:
                    raise MeasurementError(
                        f"{work.contender} in {work.cell}: its topic holds {found:,} records of {expected:,}"
                    )
        finally:
            self._broker.delete_topic(work.topic)
        return told


class Failures:
    """Processes that failed, or whose topic does not hold what they wrote."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def attempt(self, step: Callable[[], None], progress: Progress) -> None:
        try:
            step()
        except MeasurementError as error:
            self.texts.append(str(error))
            progress.console.print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True)


def measure(broker: Broker, settings: argparse.Namespace) -> dict[str, Any]:
    """All that is asked for, as it goes into the JSON file; tables are printed on the way. What fails is told in
    `failures`, and the others are measured all the same.
    """
    asked = list(itertools.product(settings.cells, settings.contenders))
    absent = {(cell, name): missing_packages(CONTENDERS[name], Cell.parse(cell).codec) for cell, name in asked}
    for (cell, name), packages in absent.items():
        if packages:
            console.print(f"{cell}: {CONTENDERS[name].title} is left out, without {' and '.join(packages)}")
    needs_jars = BASE in settings.contenders or (settings.latency and BASE in settings.streams)
    bench = Bench(broker, settings, fetch_jars(JVM_SINK_LOCK) if needs_jars else ())
    rates: list[dict[str, Any]] = []
    failures = Failures()
    latencies = [Latency(name, settings.cells[0]) for name in settings.streams] if settings.latency else []
    steps = (sum(not packages for packages in absent.values()) + len(latencies)) * settings.rounds
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)
        for cell in settings.cells:
            names = [name for name in settings.contenders if not absent[cell, name]]
            here = [Rate(cell, name, max(1, int(settings.records * CONTENDERS[name].share))) for name in names]
            for _, rate in itertools.product(range(settings.rounds), here):
                progress.update(task, description=f"{cell}: {CONTENDERS[rate.contender].title}")
                failures.attempt(partial(bench.rate, rate), progress)
                progress.advance(task)
            done = [rate for rate in here if rate.runs]
            figures = [rate.as_dict() | ratios(rate, done) for rate in done]
            progress.console.print(rate_table(cell, figures))
            rates += figures
        for _, latency in itertools.product(range(settings.rounds), latencies):
            progress.update(task, description=f"latency: {STREAMS[latency.contender].title}")
            failures.attempt(partial(bench.latency, latency), progress)
            progress.advance(task)
    measured = [latency.as_dict() for latency in latencies if latency.add_batch_ms]
    if measured:
        console.print(latency_table(measured, LATENCY_ROWS))
    return {
        "machine": machine(),
        "broker": f"Kafka {CURRENT.version}, {BROKER_NOTE}",
        "settings": {name: getattr(settings, name) for name in ("records", "rounds", "runs", "cores", "option")},
        "rates": rates,
        "latencies": measured,
        "failures": failures.texts,
    }


def missing_packages(contender: Contender, codec: str) -> list[str]:
    wanted = [*contender.packages, *(package for name, package in contender.codec_packages.items() if name == codec)]
    return [package for package in wanted if importlib.util.find_spec(package) is None]


def machine() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "spark": pyspark.__version__}
    return {"processors": os.cpu_count(), "architecture": platform.machine(), **versions}


def ratios(rate: Rate, rates: Sequence[Rate]) -> dict[str, float]:
    """To Spark's JVM sink in the same cell; empty where that was not measured."""
    base = next((other for other in rates if (other.cell, other.contender) == (rate.cell, BASE)), None)
    if base is None:
        return {}
    cpu = rate.cpu_s_per_million / base.cpu_s_per_million if base.cpu_s_per_million else float("nan")
    return {"rate_ratio": rate.records_per_s / base.records_per_s, "cpu_ratio": cpu}


# ---- running -------------------------------------------------------------------------------------------------------


def cell_names(text: str) -> list[str]:
    names = list(ALL_CELLS) if text == "all" else text.split(",")
    try:
        return [str(Cell.parse(name)) for name in names]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def names_of(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - known.keys():
            raise argparse.ArgumentTypeError(f"{min(unknown)!r}: there are {', '.join(known)}")
        return found

    return names


def at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


class Option(argparse.Action):
    """NAME=VALUE pairs into a mapping."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, equals, value = values.partition("=")
        if not equals:
            parser.error(f"{option_string} {values}: NAME=VALUE is wanted")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name: value})


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cells = ",".join(CELLS)
    parser.add_argument("--cells", type=cell_names, default=cells, help="separated by commas, or all [%(default)s]")
    every = ",".join(CONTENDERS)
    parser.add_argument("--contenders", type=names_of(CONTENDERS), default=every, help="[%(default)s]")
    parser.add_argument("--records", type=at_least_one, default=2_000_000, help="of a run [%(default)s]")
    parser.add_argument("--rounds", type=at_least_one, default=2, help="processes of each contender [%(default)s]")
    parser.add_argument("--runs", type=at_least_one, default=3, help="timed runs of each process [%(default)s]")
    parser.add_argument("--cores", type=at_least_one, default=2, help="of Spark [%(default)s]")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a process [%(default)s]")
    parser.add_argument("--option", action=Option, default={}, metavar="NAME=VALUE", help="setting of every producer")
    parser.add_argument("--latency", action="store_true", help="measure micro-batches too, of the first cell's kind")
    every = ",".join(STREAMS)
    parser.add_argument("--streams", type=names_of(STREAMS), default=every, help="for --latency [%(default)s]")
    parser.add_argument("--batches", type=at_least_one, default=60, help="timed micro-batches [%(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="STEM", help="draw STEM.png and STEM.svg")
    settings = parser.parse_args(arguments)
    if settings.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'spark-kafka-sink[benchmark]'")
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
        console.print("[bold red]Processor time and memory are read from /proc: this job needs Linux.[/]")
        return 2
    # A new topic refuses the first batches now and then; they are sent again, which the records counted show.
    logging.getLogger("spark_kafka_sink").setLevel(logging.ERROR)
    console.print(f"Broker: Kafka {CURRENT.version}, {BROKER_NOTE}")
    try:
        with EmbeddedKafka(properties=BROKER) as kafka:
            results = measure(kafka, settings)
        save(results, settings)
    except (KafkaError, OSError) as error:
        console.print(f"{type(error).__name__}: {error}", markup=False, soft_wrap=True)
        return 1
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
