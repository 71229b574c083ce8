from __future__ import annotations

import errno
import io
import os
import runpy
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from rich.console import Console

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.protocol.fetch import READ_COMMITTED
from spark_kafka_sink.sink.properties_file import read_properties

JOBS = Path(__file__).resolve().parents[3] / "jobs"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(JOBS))
    return import_module("demo")


@pytest.fixture
def sent(demo: Any) -> pd.DataFrame:
    tails = ["N1", "N2", None, "N1", "N2", "N1"]
    return pd.DataFrame({name: tails if name == "tailnum" else range(6) for name in demo.COMPARED})


@pytest.fixture
def got(sent: pd.DataFrame) -> pd.DataFrame:
    """Return the records of a topic without errors: N1 on partition 0, N2 and the row without a key on 1."""
    place = sent["tailnum"].map({"N1": 0}).fillna(1).astype(int)
    keys = sent["tailnum"].map(lambda tail: tail.encode() if isinstance(tail, str) else None)
    rows = sent.assign(partition=place, key=keys, row_number=sent.index, timestamp=sent["time_hour"]).sort_values(
        "partition", kind="stable"
    )
    return rows.assign(offset=rows.groupby("partition").cumcount()).reset_index(drop=True)


def failed(demo: Any, sent: pd.DataFrame, got: pd.DataFrame) -> set[str]:
    return {check.what for check in demo.compare(sent, got) if not check.holds}


def test_topic_that_matches_passes_every_check(demo: Any, sent: pd.DataFrame, got: pd.DataFrame) -> None:
    assert failed(demo, sent, got) == set()


def test_missing_record_is_found(demo: Any, sent: pd.DataFrame, got: pd.DataFrame) -> None:
    assert failed(demo, sent, got.drop(2)) == {"records out = rows in", "no row is missing"}


def test_duplicated_record_is_found(demo: Any, sent: pd.DataFrame, got: pd.DataFrame) -> None:
    duplicated = pd.concat([got, got.tail(1)], ignore_index=True)
    assert {"records out = rows in", "no row is there twice"} <= failed(demo, sent, duplicated)


@pytest.mark.parametrize(
    ("row", "column", "check"),
    [
        (1, "dep_delay", "every value is its input row"),
        (1, "timestamp", "every timestamp is its flight's hour"),
        (0, "partition", "every key is on one partition"),
    ],
)
def test_changed_cell_is_found(
    demo: Any, sent: pd.DataFrame, got: pd.DataFrame, row: int, column: str, check: str
) -> None:
    got.loc[row, column] += 3
    assert failed(demo, sent, got) == {check}


def test_every_column_of_the_source_is_compared(demo: Any) -> None:
    """Bug: eight columns were not compared, although the demo reported all."""
    settings = read_properties(JOBS.parent / "conf" / "flights.properties").values
    names = [column.split()[0] for column in settings["source.schema"].split(",")]
    assert names == ["row_number", *demo.COMPARED]


@pytest.mark.parametrize("key", [b"N3", None])
def test_wrong_key_is_found(demo: Any, sent: pd.DataFrame, got: pd.DataFrame, key: bytes | None) -> None:
    got.at[got.index[got["key"] == b"N2"][0], "key"] = key
    assert "every key is its row's tail number" in failed(demo, sent, got)


def test_key_whose_rows_change_places_is_found(demo: Any, sent: pd.DataFrame, got: pd.DataFrame) -> None:
    swapped = got.iloc[[1, 0, *range(2, len(got))]].reset_index(drop=True)
    assert failed(demo, sent, swapped) == {"every key's rows are in order"}


def test_files_have_every_line_once_and_in_order(demo: Any, tmp_path: Path) -> None:
    lines = [b"a,b", *(b"%d,x" % n for n in range(100))]
    demo.write_files(lines, tmp_path)
    files = sorted(tmp_path.iterdir(), key=os.path.getmtime)
    assert [file.name for file in files] == sorted(file.name for file in files)
    assert {file.read_bytes().splitlines()[0] for file in files} == {b"row_number,a,b"}
    rows = [line for file in files for line in file.read_bytes().splitlines()[1:]]
    assert rows == [b"%d,%d,x" % (n, n) for n in range(100)]


# ---- the kill and the summary ----------------------------------------------------------------------------------------


class FakeReader:
    """Gives the next pair of (last stable offset, end of all records) with each look."""

    def __init__(self, *ends: tuple[int, int]) -> None:
        self.ends = list(ends)
        self.looks = 0

    def partitions(self, topic: str) -> list[TopicPartition]:
        return [TopicPartition(topic, 0)]

    def offsets(
        self, partitions: Sequence[TopicPartition], timestamp: int, isolation: int
    ) -> dict[TopicPartition, int]:
        assert timestamp == -1
        if isolation == READ_COMMITTED:
            self.looks += 1
            return dict.fromkeys(partitions, self.ends[self.looks - 1][0])
        return dict.fromkeys(partitions, self.ends[self.looks][1])


def test_job_is_killed_when_a_batch_is_finished_and_nothing_of_the_next_committed(
    demo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.time, "sleep", lambda _: None)
    first_batch, next_batch = [(0, 0), (0, 5), (4, 9), (9, 9)], [(13, 18), (18, 18), (18, 20)]
    reader = FakeReader(*first_batch, *next_batch)
    demo.await_open_transaction(SimpleNamespace(has_ended=False), reader)
    assert reader.looks == 7


def test_job_that_ends_before_the_kill_fails_the_demo(demo: Any) -> None:
    with pytest.raises(SystemExit, match="before it could be killed"):
        demo.await_open_transaction(SimpleNamespace(has_ended=True, wait=lambda: None), FakeReader())


def test_failed_job_ends_the_demo_with_its_log(demo: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = demo.Job("h:1", tmp_path)
    job._command = [sys.executable, "-c", "import sys; print('a line'); sys.exit('Spark says why')"]
    with job, pytest.raises(SystemExit, match="The job ended with code 1"):
        job.wait()
    printed = capsys.readouterr().out
    assert "  a line\n" in printed
    assert "Spark says why" in printed
    assert job.lines == ["a line"]


def cells(table: Any) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    lines = [line for line in console.file.getvalue().splitlines() if "│" in line]  # type: ignore[attr-defined]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def test_summary_counts_flights_that_were_read(demo: Any) -> None:
    sent = pd.DataFrame({"year": range(6)})
    got = pd.DataFrame({"row_number": [0, 1, 1, 1, 2, 4]})
    killed = demo.Seen(pa.table({"a": [1, 2]}), pa.table({"a": [1, 2, 3]}))
    end = demo.Seen(pa.table({"a": range(6)}), pa.table({"a": range(10)}))
    assert cells(demo.outcome_table(sent, got, killed, end, 2)) == [
        ["sent", "6"],
        ["seen when the job was killed", "2"],
        ["seen once at the end", "3"],
        ["lost", "2"],
        ["doubled", "1"],
        ["in 2 transactions that the driver aborted", "4"],
    ]


def test_signs_that_stdout_cannot_write_do_not_end_the_demo(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: with LC_ALL=C the demo ended with 1, the code of a wrong number, at the sign of its first check."""
    table = demo.checks_table([demo.Check("no row", True, "0")], SimpleNamespace(lines=["0 5 0.1 50", "a, b"]))

    def command() -> int:
        demo.console.print(table)
        return 0

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert demo.exit_code_of(command) == 0
    assert rb"\u2713" in written.getvalue()


def test_folder_with_a_blank_is_one_option_of_java(demo: Any) -> None:
    """Bug: with a blank in TMPDIR no JVM started. Spark splits these options as a shell does."""
    folder = Path("/tmp/my 'own' files")
    options = demo.Job("h:1", folder)._command[-1].removeprefix("driver.extraJavaOptions=")
    assert shlex.split(options) == [f"-Djava.io.tmpdir={folder}", "-XX:-UsePerfData"]


def test_full_disk_ends_the_demo_in_one_sentence(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: it was a traceback."""

    def fail(prefix: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", fail)
    monkeypatch.setattr(tempfile, "tempdir", "/small")
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(demo.__file__, run_name="__main__")
    assert end.value.code == 1
    text = "The disk of /small is full: No space left on device. Make room there, or set TMPDIR to another folder.\n"
    assert capsys.readouterr().out == text
