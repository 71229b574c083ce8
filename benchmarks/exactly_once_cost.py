"""Measure what exactly-once delivery costs a batch: `make exactly-once-cost`.

    python benchmarks/exactly_once_cost.py                               two minutes
    python benchmarks/exactly_once_cost.py --tasks 2 --nodes 3           with three brokers
    python benchmarks/exactly_once_cost.py --json f --rounds 100         more rounds, and the figures in a file

The driver and the tasks run in this process, one after the other and without Spark, by the functions that
`format("kafka_sink")` calls. The broker is the embedded one, with the JVM flags of Kafka's own start script.

A proxy in front of each broker counts requests and bytes. They are those of a steady-state batch: the query has written
`--warm-up` batches before. So all connections are made, all coordinators are known, and the part of the decision topic
that a start reads is full (8 batches). Before each batch the job waits until the brokers have written the end markers
of the batch before. The tables show medians of `--batches` batches. The first query makes the connections; the first
batches of the other queries do not count them. The number of control records is the growth of the topic's log, less the
rows that a reader under read_committed finds. Latencies are measured without the proxy.

The share of the fingerprint is measured by turns: a task of many rows with the fingerprint, and one with a function
that returns 0 instead. A task reads its rows from an Arrow stream in memory. Spark's own work on rows is not part of
it, so in Spark the share is smaller. The table shows medians of `--rounds` turns, for the elapsed time and for this
process's processor time, the median of the ratios turn by turn, and the fingerprint by itself, compiled and by numpy.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from arguments import at_least_one, file_to_write
from exactly_once import (
    GAINED,
    PHASES,
    VALUE_BYTES,
    Batch,
    Counting,
    Latency,
    MeasurementError,
    Share,
    Stage,
    latency,
    share,
    stage_of,
)
from proxy import Counted
from rich.console import Console
from rich.table import Table

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.local.jvm import CURRENT

FINGERPRINTED = {100: 1, 1000: 5}
"""Bytes of a value → the divisor of the number of rows to measure."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


# ---- tables ----------------------------------------------------------------------------------------------------------


def as_text(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def cost_table(counted: Mapping[int, Sequence[Batch]]) -> Table:
    table = Table(title="A batch", title_justify="left")
    for column in ("tasks", "begin", "tasks", "commit", "requests", "bytes up", "bytes down", "rows, up", GAINED[0]):
        table.add_column(column, justify="right")
    for tasks, batches in counted.items():
        phases = [median(batch.requests(phase) for batch in batches) for phase in PHASES]
        sizes: list[Callable[[Batch], int]] = [
            lambda batch: batch.total.requests,
            lambda batch: batch.total.bytes_up,
            lambda batch: batch.total.bytes_down,
            lambda batch: batch.rows_up,
            lambda batch: batch.gained[GAINED[0]],
        ]
        others = [median(map(size, batches)) for size in sizes]
        table.add_row(as_text(tasks), *map(as_text, (*phases, *others)))
    return table


def api_table(title: str, counted: Mapping[int, Sequence[Batch]]) -> Table:
    table = Table(title=f"{title}: requests by api, begin / tasks / commit", title_justify="left")
    table.add_column("")
    for tasks in counted:
        table.add_column(f"{tasks} tasks", justify="right")
    every = [batch for batches in counted.values() for batch in batches]
    apis = sorted({api for batch in every for phase in batch.phases.values() for api in phase})
    for api in apis:
        cells = []
        for batches in counted.values():
            medians = (
                median(batch.phases[phase].get(api, Counted()).requests for batch in batches) for phase in PHASES
            )
            cells.append(" / ".join(map(as_text, medians)))
        table.add_row(api, *cells)
    return table


def gained_table(counted: Mapping[int, Sequence[Batch]]) -> Table:
    table = Table(title="Records that the brokers' logs gain beside the rows", title_justify="left")
    table.add_column("tasks", justify="right")
    for name in GAINED:
        table.add_column(name, justify="right")
    for tasks, batches in counted.items():
        table.add_row(as_text(tasks), *(as_text(median(batch.gained[name] for batch in batches)) for name in GAINED))
    return table


def latency_table(latencies: Mapping[int, Latency]) -> Table:
    table = Table(title="Latency in ms: median (fastest - slowest); tasks one after the other", title_justify="left")
    for column in ("tasks", "begin", "a task", "commit"):
        table.add_column(column, justify="right")
    for tasks, found in latencies.items():
        cells = (
            f"{median(times):.0f} ({min(times):.0f} - {max(times):.0f})"
            for times in (found.begin, found.task, found.commit)
        )
        table.add_row(as_text(tasks), *cells)
    return table


def share_table(shares: Sequence[Share]) -> Table:
    title = "The fingerprint: ns per record, of a task with it and without, in turns"
    table = Table(title=title, title_justify="left")
    columns = ("value", "rows", "elapsed", "without", "x", "processor", "without", "x", "alone", "alone, numpy")
    for column in columns:
        table.add_column(column, justify="right")
    for each in shares:
        cells = []
        for pairs in (each.elapsed, each.processor):
            cells += [f"{median(times):.0f}" for times in zip(*pairs, strict=True)]
            cells.append(f"{median(mine / other for mine, other in pairs):.2f}")
        alone = (f"{median(times):.0f}" for times in (each.alone, each.alone_by_numpy))
        table.add_row(f"{each.value_bytes:,} B", f"{each.rows:,}", *cells, *alone)
    return table


# ---- measuring -------------------------------------------------------------------------------------------------------


def count(stage: Stage, settings: argparse.Namespace) -> dict[int, list[Batch]]:
    """Return by number of tasks: all batches of a query, including those of the warm-up."""
    found = {}
    for tasks in settings.tasks:
        counting = Counting(stage, tasks, settings.rows, settings.partitions)
        found[tasks] = [counting.batch() for _ in range(settings.warm_up + settings.batches)]
    return found


def numbers(text: str) -> list[int]:
    return [at_least_one(part) for part in text.split(",")]


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=numbers, default="2,50,200", help="separated by commas [%(default)s]")
    parser.add_argument("--rows", type=at_least_one, default=64, help="rows of a task [%(default)s]")
    parser.add_argument("--partitions", type=at_least_one, default=16, help="partitions of the topic [%(default)s]")
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1, help="brokers [%(default)s]")
    parser.add_argument("--transaction-version", type=int, choices=(1, 2), default=2, help="[%(default)s]")
    parser.add_argument("--warm-up", type=at_least_one, default=10, help="batches that do not count [%(default)s]")
    parser.add_argument("--batches", type=at_least_one, default=8, help="batches that count [%(default)s]")
    parser.add_argument(
        "--fingerprint-rows",
        type=at_least_one,
        default=500_000,
        help="rows of 100 bytes; a fifth of it for rows of 1 KB [%(default)s]",
    )
    parser.add_argument("--rounds", type=at_least_one, default=30, help="turns of the fingerprint [%(default)s]")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write all figures there")
    return parser


def measure(stage: Stage, settings: argparse.Namespace) -> dict[str, Any]:
    """Return all figures for the JSON file. Prints tables on the way."""
    counted = count(stage, settings)
    steady = {tasks: batches[settings.warm_up :] for tasks, batches in counted.items()}
    firsts = {tasks: batches[:1] for tasks, batches in counted.items()}
    tables = (
        cost_table(steady),
        api_table("A batch", steady),
        api_table("The first batch of a query", firsts),
        gained_table(steady),
    )
    for table in tables:
        console.print(table)
    latencies = {tasks: latency(stage, tasks, settings) for tasks in settings.tasks}
    console.print(latency_table(latencies))
    shares = [
        share(stage, size, max(1, settings.fingerprint_rows // fewer), settings)
        for size, fewer in FINGERPRINTED.items()
    ]
    console.print(share_table(shares))
    return {
        "batches": {tasks: [batch.as_dict() for batch in batches] for tasks, batches in counted.items()},
        "latency_ms": {tasks: vars(found) for tasks, found in latencies.items()},
        "fingerprint_ns": [vars(each) for each in shares],
    }


def main(arguments: Sequence[str]) -> int:
    settings = argument_parser().parse_args(arguments)
    logging.getLogger("spark_kafka_sink").setLevel(logging.ERROR)  # a new topic sometimes refuses its first batches
    console.print(
        f"Kafka {CURRENT.version}, {settings.nodes} node(s), transaction.version {settings.transaction_version};"
        f" {settings.partitions} partitions, {settings.rows} rows a task, values of {VALUE_BYTES} bytes;"
        f" {os.cpu_count()} processors, {platform.machine()}, Python {platform.python_version()}"
    )
    try:
        with stage_of(settings.nodes, settings.transaction_version) as stage:
            figures = measure(stage, settings)
    except (KafkaError, MeasurementError, OSError) as error:
        console.print(f"{type(error).__name__}: {error}", markup=False, soft_wrap=True)
        return 1
    if settings.json is not None:
        settings.json.write_text(json.dumps(figures, indent=1) + "\n")
        console.print(f"Figures: {settings.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
