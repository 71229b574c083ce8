"""The report of a batch as a value, and its JSON, which other programs read."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from spark_kafka_sink.common.batch_report import BatchReport, WrittenPartition

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reports.md"
REPORT = BatchReport(
    outcome="complete",
    guarantee="exactly-once",
    began_ms=1_700_000_000_000,
    ended_ms=1_700_000_001_500,
    query_id="q",
    query_name="naïve\nname",
    run_id="r",
    batch_id=7,
    tasks=2,
    batches=3,
    retries=1,
    partitions=(WrittenPartition("a", 0, 5, 500, 10, 14), WrittenPartition("a", 1, 7, 700, 0, 8, 2)),
    dead_letter_partitions=(WrittenPartition("dead", 0, 3, 60, 2, 4),),
    dead_letter_kinds={"spark_kafka_sink.common.errors.SerializationError": 3},
    durations_ms={"plan": 10, "tasks": 1_000, "decide": 40, "commit": 450},
    task_durations_ms={
        "read": 1,
        "encode": 2,
        "metadata": 3,
        "memory": 4,
        "acknowledge": 5,
        "producer": 6,
        "limit": 7,
    },
)
FAILED = BatchReport("failed", "at-least-once", 1, 2, error="builtins.ZeroDivisionError")


def test_sums_are_those_of_the_partitions() -> None:
    assert (REPORT.records, REPORT.bytes, REPORT.dead_letters) == (12, 1_200, 3)


@pytest.mark.parametrize("report", [REPORT, FAILED, replace(REPORT, outcome="skipped", skipped_records=9)])
def test_json_and_pickle_give_the_same_report(report: BatchReport) -> None:
    assert BatchReport.from_json(report.to_json()) == report
    assert pickle.loads(pickle.dumps(report)) == report


def test_json_is_one_line_of_ascii() -> None:
    text = REPORT.to_json()
    assert text.isascii()
    assert len(text.splitlines()) == 1
    assert text.startswith('{"version":1,"outcome":"complete",')


def test_json_has_every_field_and_the_sums() -> None:
    content = json.loads(REPORT.to_json())
    names = {field.name for field in fields(BatchReport)}
    assert content.keys() == names | {"version", "records", "bytes", "dead_letters"}
    assert (content["records"], content["bytes"], content["dead_letters"]) == (12, 1_200, 3)
    assert content["partitions"][1].keys() == {field.name for field in fields(WrittenPartition)}


def test_fields_of_a_newer_release_are_passed_over() -> None:
    content = json.loads(REPORT.to_json()) | {"weather": "fine"}
    content["partitions"][0]["weather"] = "fine"
    assert BatchReport.from_json(json.dumps(content)) == REPORT


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "version 2, and this release reads version 1"),
        ({"outcome": "perhaps"}, "outcome 'perhaps'"),
        ({"began_ms": "1"}, "'1' is no whole number"),
        ({"tasks": True}, "True is no whole number"),
        ({"error": 5}, "5 is no text"),
        ({"durations_ms": []}, "has no attribute 'items'"),
        ({"partitions": [{"topic": "a"}]}, "KeyError"),
        ({"partitions": None}, "not iterable"),
    ],
)
def test_other_json_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"^This is no report of a batch: .*{text}"):
        BatchReport.from_json(json.dumps(json.loads(REPORT.to_json()) | change))


@pytest.mark.parametrize("text", ["", "[]", "5", '{"version":1}', "{" * 5_000])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^This is no report of a batch: "):
        BatchReport.from_json(text)


def test_page_explains_every_field_once() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \|", DOCS.read_text(), re.MULTILINE)
    content = json.loads(REPORT.to_json())
    places = [f"partitions.{field.name}" for field in fields(WrittenPartition)]
    phases = [f"{kind}.{name}" for kind in ("durations_ms", "task_durations_ms") for name in content[kind]]
    assert sorted(rows) == sorted([*content, *places, *phases])
