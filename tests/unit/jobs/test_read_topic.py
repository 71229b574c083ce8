"""The output of jobs/read_topic.py."""

from __future__ import annotations

import io
import json
import random
import runpy
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jobs import read_topic
from jobs.read_topic import SCHEMA, as_text, show_records, write
from spark_kafka_sink.admin.request_client import RequestClient

ROW = {"topic": "t", "partition": 0, "offset": 0, "key": None, "value": b"v", "headers": []}


def test_narrow_screen_shows_every_column_and_cuts_the_widest() -> None:
    moment = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    headers = [{"key": "source", "value": b"orders"}]
    row = {"topic": "t", "partition": 3, "offset": 1_234_567, "timestamp": moment, "headers": headers}
    row |= {"key": b"key-42", "value": b'{"b": "[red]' + b"x" * 100 + b'"}'}
    screen = io.StringIO()
    show_records(pa.Table.from_pylist([row], SCHEMA), 20, Console(file=screen, width=80))
    (line,) = (line for line in screen.getvalue().splitlines() if "2024" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[:4] == ["3", "1234567", "2024-01-02 03:04:05.000", "key-42"]
    assert cells[4].startswith('{"b": "')
    assert cells[4].endswith("…")
    assert cells[5].startswith("source")


def test_time_after_year_9999_is_shown_as_its_number(tmp_path: Path) -> None:
    """Bug: one record with microseconds instead of milliseconds ended the job in an OverflowError."""
    times = pa.array([1_356_998_400_007, 1_356_998_400_007_000], pa.timestamp("ms", tz="UTC"))
    records = pa.Table.from_pylist([ROW] * 2, SCHEMA).set_column(3, SCHEMA.field(3), times)
    screen = io.StringIO()
    show_records(records, 20, Console(file=screen, width=120))
    assert "2013-01-01 00:00:00.007 " in screen.getvalue()
    assert "1356998400007000 ms" in screen.getvalue()
    write(records, tmp_path / "records.json")
    rows = [json.loads(line) for line in (tmp_path / "records.json").read_text(encoding="utf-8").splitlines()]
    assert [row["timestamp"] for row in rows] == ["2013-01-01 00:00:00.007000+00:00", 1_356_998_400_007_000]


def test_cut_text_ends_in_an_ellipsis() -> None:
    """Bug: 60 of 61 letters of four bytes were shown without an ellipsis."""
    assert as_text("\U0001f600".encode() * 60) == "\U0001f600" * 60
    assert as_text("\U0001f600".encode() * 61) == "\U0001f600" * 59 + "…"
    assert as_text(b"x" * 60) == "x" * 60
    assert as_text(b"x" * 61) == "x" * 59 + "…"
    assert as_text(b"\xff") == "\\xff"
    assert as_text(None) == "null"


def test_record_cannot_control_the_terminal() -> None:
    """Bug: a value could clear the screen, or overwrite the lines of earlier records."""
    headers = [{"key": "h\x1b[2J", "value": b"\x9b\r"}]
    row = ROW | {"timestamp": 0, "key": b"\x1b]0;title\x07", "value": "a\nb\u202ec é".encode(), "headers": headers}
    screen = io.StringIO()
    show_records(pa.Table.from_pylist([row], SCHEMA), 20, Console(file=screen, width=200))
    (line,) = (line for line in screen.getvalue().splitlines() if "1970" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[3:] == [r"\x1b]0;title\x07", r"a\nb\u202ec é", r"h\x1b[2J=\x9b\r"]


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_unwritable_output_is_reported_in_one_line(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(read_topic, "read_topic", lambda *_: read_topic.SCHEMA.empty_table())
    output = tmp_path / "not there" / f"records.{kind}"
    assert read_topic.main(["--bootstrap-servers", "h1:9092", "--topic", "t", "--output", str(output)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"read_topic: {output} cannot be written: ")
    assert "No such file or directory" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_output_that_does_not_fit_leaves_no_part_of_it(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a full disk left a file that was cut, in place of an earlier one that was whole."""
    resource = pytest.importorskip("resource")
    rows = [ROW | {"timestamp": 0, "value": random.Random(7).randbytes(1_000_000)}]
    monkeypatch.setattr(read_topic, "read_topic", lambda *_: pa.Table.from_pylist(rows, SCHEMA))
    output = tmp_path / f"records.{kind}"
    output.write_text("an earlier one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    try:
        code = read_topic.main(["--bootstrap-servers", "h1:9092", "--topic", "t", "--output", str(output)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert capsys.readouterr().err == f"read_topic: {output} cannot be written: File too large.\n"
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert output.read_text() == "an earlier one"


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_output_replaces_an_earlier_file_behind_a_link(kind: str, tmp_path: Path) -> None:
    output, link = tmp_path / "records", tmp_path / f"link.{kind}"
    output.write_text("an earlier one")
    link.symlink_to(output)
    write(pa.Table.from_pylist([ROW | {"timestamp": 0}], SCHEMA), link)
    assert link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {output.name, link.name}
    found = pq.read_table(output).to_pylist() if kind == "parquet" else [json.loads(output.read_text())]
    assert [row["offset"] for row in found] == [0]


def test_negative_limit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_topic.main(["--bootstrap-servers", "h1:9092", "--topic", "t", "--limit", "-1"])
    assert "--limit -1 must be 0 or more" in capsys.readouterr().err


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an installation without the extra `local` ended in a traceback that did not name it."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit, match=r"rich is missing: pip install 'spark-kafka-sink\[local\]'"):
        runpy.run_path(read_topic.__file__)


def test_ctrl_c_ends_the_job_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: it was a traceback of 50 lines."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestClient, "connect", interrupt)
    monkeypatch.setattr(sys, "argv", ["read_topic.py", "--bootstrap-servers", "h1:9092", "--topic", "t"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(read_topic.__file__, run_name="__main__")
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "")
