"""The figures of benchmarks/benchmark.py, and their tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cells import SECURITY, cell_of
from contenders import CONTENDERS, STREAMS
from rich.table import Table


class Timed(NamedTuple):
    seconds: float
    cpu_s: float


@dataclass
class Rate:
    """The figures of a contender in a cell, over all its processes."""

    cell: str
    contender: str
    records: int
    """Records of one run."""
    security: str = "PLAINTEXT"
    """Kafka's security.protocol."""
    runs: list[Timed] = field(default_factory=list)
    worker_peak_bytes: int = 0
    records_expected: int = 0
    records_found: int = 0

    @property
    def records_per_s(self) -> float:
        return self.records / median(run.seconds for run in self.runs)

    @property
    def cpu_s_per_million(self) -> float:
        return median(run.cpu_s for run in self.runs) / self.records * 1e6

    def as_dict(self) -> dict[str, Any]:
        derived = {"records_per_s": self.records_per_s, "cpu_s_per_million": self.cpu_s_per_million}
        return {**asdict(self), "runs": [run._asdict() for run in self.runs], **derived}


@dataclass
class Latency:
    contender: str
    cell: str
    security: str = "PLAINTEXT"
    add_batch_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return median(self.add_batch_ms)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "median_ms": self.median_ms}


Figures = Mapping[str, Any]

COLOURS = {
    "jvm": "#8c8c8c",
    "write": "#1f77b4",
    "format": "#4f97c9",
    "foreach_partition": "#7fb2d9",
    "confluent": "#e08a3c",
    "confluent_errors_only": "#f0b27a",
    "confluent_batch": "#b5651d",
    "confluent_batch_errors_only": "#d2905f",
    "kafka_python": "#c9a227",
    "hand_over": "#dddddd",
    "noop_source": "#eeeeee",
    "table_write": "#1f9e89",
    "table_produce_batch": "#8c564b",
    "table_produce_batch_errors_only": "#b58a80",
}


def title(cell: str, security: str) -> str:
    tls = "" if security == "PLAINTEXT" else f", {SECURITY[security]}"
    return f"{cell_of(cell).title}{tls}"


def rate_table(cell: str, security: str, figures: Sequence[Figures]) -> Table:
    rates = [rate for rate in figures if rate["security"] == security]
    table = Table(title=title(cell, security))
    table.add_column("", no_wrap=True)
    for column in ("records/s", "spread", "x JVM", "CPU s/M", "x JVM", "peak MB"):
        table.add_column(column, justify="right")
    if is_compared := any("plaintext_ratio" in rate for rate in rates):
        table.add_column("x PLAINTEXT", justify="right")
    for rate in rates:
        seconds = [run["seconds"] for run in rate["runs"]]
        spread = (max(seconds) - min(seconds)) / min(seconds)
        table.add_row(
            CONTENDERS[rate["contender"]].title,
            f"{rate['records_per_s']:,.0f}",
            f"{spread:.0%}",
            f"{rate['rate_ratio']:.2f}" if "rate_ratio" in rate else "",
            f"{rate['cpu_s_per_million']:.2f}",
            f"{rate['cpu_ratio']:.2f}" if "cpu_ratio" in rate else "",
            f"{rate['worker_peak_bytes'] / 1e6:.0f}" if rate["worker_peak_bytes"] else "",
            *([f"{rate['plaintext_ratio']:.2f}" if "plaintext_ratio" in rate else ""] if is_compared else []),
        )
    return table


def latency_table(security: str, figures: Sequence[Figures], rows: int) -> Table:
    latencies = [latency for latency in figures if latency["security"] == security]
    table = Table(title=f"Micro-batches of {rows:,} rows, {SECURITY[security]}: addBatch")
    table.add_column("", no_wrap=True)
    for column in ("median ms", "fastest - slowest", "batches"):
        table.add_column(column, justify="right")
    for latency in latencies:
        times = latency["add_batch_ms"]
        spread = f"{min(times):.0f} - {max(times):.0f}"
        table.add_row(STREAMS[latency["contender"]].title, f"{latency['median_ms']:.0f}", spread, f"{len(times)}")
    return table


def draw(results: Figures, stem: Path) -> list[Path]:
    """Draw bars of rate and processor time for each cell. Return the paths of the files. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "benchmark"  # the same figures make the same file
    from matplotlib import pyplot as plt

    rates = results["rates"]
    cells = list(dict.fromkeys((rate["cell"], rate["security"]) for rate in rates))
    names = list(dict.fromkeys(rate["contender"] for rate in rates))
    height = 0.8 / len(names)
    panels = (
        ("records_per_s", 1e6, "million records per second", "rate_ratio"),
        ("cpu_s_per_million", 1.0, "client processor seconds per million records", "cpu_ratio"),
    )
    figure, axes = plt.subplots(1, 2, figsize=(13, 1.0 + 0.26 * len(cells) * (len(names) + 1)), sharey=True)
    for axis, (figure_name, scale, label, ratio) in zip(axes, panels, strict=True):
        for rate in rates:
            number = names.index(rate["contender"])
            place = cells.index((rate["cell"], rate["security"])) + (number - (len(names) - 1) / 2) * height
            value = rate[figure_name] / scale
            axis.barh(place, value, height * 0.92, color=COLOURS[rate["contender"]])
            text = f" {value:.2f}" + (f"  ({rate[ratio]:.2f} x)" if ratio in rate else "")
            axis.text(value, place, text, va="center", fontsize=7)
        axis.set_xlabel(label)
        axis.set_yticks(range(len(cells)), [title(cell, security) for cell, security in cells])
        axis.margins(x=0.2, y=0.02)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    bars = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
    labels = [CONTENDERS[name].title for name in names]
    figure.legend(bars, labels, loc="upper center", ncols=len(names), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    for path, metadata in zip(paths, ({}, {"Date": None}), strict=True):
        figure.savefig(path, dpi=150, metadata=metadata)
    plt.close(figure)
    return paths
