"""What jobs/read_topic.py shows of a topic."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

JOBS = Path(__file__).resolve().parents[3] / "jobs"


def test_on_a_narrow_screen_every_column_is_seen_and_the_widest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOBS))
    from read_topic import SCHEMA, show_records

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
