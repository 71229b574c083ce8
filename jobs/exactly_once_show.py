"""Tables of what jobs/exactly_once_cost.py measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from benchmark_proxy import Counted
from exactly_once_counts import GAINED, PHASES, Batch
from exactly_once_times import Latency, Share
from rich.table import Table


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
