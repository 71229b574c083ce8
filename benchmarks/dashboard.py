"""Draws the panels of docs/grafana-dashboard.json from a real run, by the dashboard's own queries.

    python benchmarks/dashboard.py --prometheus /usr/bin/prometheus --seconds 120

An embedded cluster of three nodes, a Spark stream into two topics and the dead letters, and a Prometheus server that
reads the workers' metrics. One node is suspended for some seconds in the middle. The panels are drawn by matplotlib
into docs/grafana-dashboard.png: this is no picture of Grafana itself.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from arguments import seconds

from spark_kafka_sink.local import EmbeddedKafka

DASHBOARD: Final = Path(__file__).resolve().parents[1] / "docs" / "grafana-dashboard.json"
WORKER_PORTS: Final = range(9250, 9256)
PROMETHEUS: Final = "127.0.0.1:9390"
WINDOW: Final = "15s"
"""In place of Grafana's $__rate_interval."""
UNITS: Final = {"percentunit": "share", "ms": "ms", "Bps": "bytes/s", "recps": "rows/s", "short": ""}


def write_stream(kafka: EmbeddedKafka, folder: Path, seconds: float) -> None:
    """Run a stream for so long. Suspend a node in the middle for a tenth of the time."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    rows = spark.readStream.format("rate").option("rowsPerSecond", 10_000).option("numPartitions", 2).load()
    frame = rows.selectExpr(
        "CASE WHEN value % 4 = 0 THEN 'payments' ELSE 'orders' END AS topic",
        "concat('customer ', value % 5000) AS key",
        "repeat(concat('row ', value, ' '), 10) AS value",
        "CASE WHEN value % 50000 = 7 THEN 999 END AS partition",
    )
    options = {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "kafka.client.id": "shop",
        "kafka.compression.type": "zstd",
        "kafka.request.timeout.ms": "5000",
        "errors.tolerance": "all",
        "errors.deadletterqueue.topic.name": "dead",
        "metrics.port": f"{WORKER_PORTS[0]}-{WORKER_PORTS[-1]}",
        "checkpointLocation": str(folder / "checkpoint"),
    }
    query = frame.writeStream.format("kafka_sink").options(**options).trigger(processingTime="2 seconds").start()
    query.awaitTermination(seconds * 0.5)
    kafka.suspend_node(kafka.node_ids[-1])
    time.sleep(seconds * 0.1)
    kafka.resume_node(kafka.node_ids[-1])
    query.awaitTermination(seconds * 0.4)
    query.stop()
    spark.stop()


@contextmanager
def prometheus(binary: str, folder: Path) -> Iterator[None]:
    """A Prometheus server that reads every worker's port each second."""
    targets = [f"127.0.0.1:{port}" for port in WORKER_PORTS]
    settings = {"job_name": "workers", "scrape_interval": "1s", "static_configs": [{"targets": targets}]}
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": [settings]}))
    command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with subprocess.Popen([*command, f"--web.listen-address={PROMETHEUS}", "--log.level=warn"]) as server:
        try:
            yield
        finally:
            server.terminate()


def asked(expression: str, began_s: float, ended_s: float) -> list[dict[str, Any]]:
    """Return the series of a panel's query, each with its labels and its pairs of time and value."""
    query = expression.replace("$__rate_interval", WINDOW)
    query = re.sub(r'=~"\$\w+"', '=~".*"', query)
    fields = {"query": query, "start": began_s, "end": ended_s, "step": 1}
    with urllib.request.urlopen(f"http://{PROMETHEUS}/api/v1/query_range?{urllib.parse.urlencode(fields)}") as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def series(panels: list[dict[str, Any]], began_s: float, ended_s: float) -> dict[int, list[tuple[str, Any, Any]]]:
    """Return (name, seconds, values) of each series of each panel, by the panel's id."""
    by_panel = {}
    for panel in panels:
        lines = []
        for target in panel["targets"]:
            for each in asked(target["expr"], began_s, ended_s):
                name = re.sub(
                    r"\{\{(\w+)\}\}", lambda label, each=each: each["metric"][label[1]], target["legendFormat"]
                )
                points = [(at - began_s, float(value)) for at, value in each["values"]]
                lines.append((name, *zip(*points, strict=True)))
        by_panel[panel["id"]] = sorted(lines)
    return by_panel


def draw(dashboard: dict[str, Any], by_panel: dict[int, list[tuple[str, Any, Any]]], target: Path) -> None:
    """Draw every panel at its place."""
    from matplotlib import pyplot

    panels = [panel for panel in dashboard["panels"] if panel["type"] == "timeseries"]
    figure, axes = pyplot.subplots((len(panels) + 1) // 2, 2, figsize=(14, 16), layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=False):
        for name, times, values in by_panel[panel["id"]]:
            axis.plot(times, values, linewidth=1.2, label=name)
        axis.set_title(panel["title"], fontsize=11, loc="left")
        axis.set_ylabel(UNITS[panel["fieldConfig"]["defaults"]["unit"]], fontsize=8)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if by_panel[panel["id"]]:
            axis.legend(fontsize=7, loc="upper left", ncols=2)
    figure.supxlabel("seconds", fontsize=9)
    figure.savefig(target, dpi=75)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", required=True, help="the program of a Prometheus server")
    parser.add_argument("--seconds", type=seconds, default=120)
    parser.add_argument("--output", type=Path, default=DASHBOARD.with_suffix(".png"))
    given = parser.parse_args(arguments)
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] == "timeseries"]
    with tempfile.TemporaryDirectory() as folder, EmbeddedKafka(3) as kafka, prometheus(given.prometheus, Path(folder)):
        for topic in ("orders", "payments", "dead"):
            kafka.create_topic(topic, 4, 1)
        began_s = time.time()
        write_stream(kafka, Path(folder), given.seconds)
        found = series(panels, began_s, time.time())
    draw(dashboard, found, given.output)
    for panel in panels:
        print(f"{panel['title']}: {', '.join(name for name, *_ in found[panel['id']]) or 'no data'}")


if __name__ == "__main__":
    main(sys.argv[1:])
