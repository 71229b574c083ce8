from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from spark_kafka_sink.common.options import read_properties

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
    settings = read_properties(JOBS.parent / "conf" / "flights.properties")
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
