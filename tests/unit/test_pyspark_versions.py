"""docs/pyspark-versions.md against the results of `make test-pyspark`. To write the tables of that page again:
python tests/unit/test_pyspark_versions.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from support.pyspark_results import read  # noqa: E402 - this file is also a command

PAGE = ROOT / "docs" / "pyspark-versions.md"
RESULTS = list(read(ROOT / "tests" / "pyspark_results"))
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->"

CALLS = {
    "writeStream.format": '`writeStream.format("kafka_sink")`',
    "writeStream.foreachBatch": "`writeStream.foreachBatch(sink.write_batch)`",
    "writeStream.foreach": "`writeStream.foreach(sink)`",
    "write.format": '`write.format("kafka_sink")`',
    "sink.write": "`sink.write(df)`",
    "foreachPartition": "`foreachPartition(sink.write_partition)`",
}
EVERY_CALL = "tests/integration/sink/test_every_call.py::test_"
KILLS = "tests/integration/exactly_once/test_spark_kills.py::test_"
STREAMS = "tests/integration/exactly_once/test_streams.py::test_"
DEPLOY = "tests/integration/deploy/test_where_it_runs.py::test_"


class Line(NamedTuple):
    """A line of a table: it is true if all tests pass whose names begin with `begin` and hold `part`."""

    what: str
    begin: str
    part: str = ""


KILLED = {
    "the whole Spark: driver, JVM and workers": "whole_spark_killed_loses_and_duplicates_nothing",
    "the whole Spark, between decision and last commit": "spark_killed_between_decision_and_last_commit",
    "executors": "executors_killed_during_a_batch",
}
KILL_LINES = [
    Line(f"{what}; {CALLS[call]}", f"{KILLS}{name}", form)
    for what, name in KILLED.items()
    for call, form in (("writeStream.format", "[format"), ("writeStream.foreachBatch", "[foreachBatch"))
] + [
    Line(f"executors; {CALLS['sink.write']}", f"{KILLS}executors_killed_in_a_batch_write"),
    *(
        Line(f"{what}; {CALLS[call]}", f"{STREAMS}{name}", form)
        for what, name in {
            "Python workers": "python_workers_killed_at_any_time",
            "the broker": "broker_killed_at_any_time",
        }.items()
        for call, form in (("writeStream.format", "format"), ("writeStream.foreachBatch", "foreachBatch"))
    ),
]
PLACE_LINES = [
    Line("one machine", f"{DEPLOY}every_interface_writes_on_one_machine"),
    Line("executors in separate processes", f"{DEPLOY}every_interface_writes_with_executors_in_separate_processes"),
    Line("a standalone cluster that gets a packed environment", f"{DEPLOY}packed_environment"),
    Line("a standalone cluster that gets a zip of the package", f"{DEPLOY}zipped_package"),
    Line("Spark Connect", f"{DEPLOY}every_interface_writes_on_spark_connect"),
]
AT_LEAST_ONCE = [Line(label, f"{EVERY_CALL}at_least_once_writes_every_row[{call}]") for call, label in CALLS.items()]
EXACTLY_ONCE = [Line(label, f"{EVERY_CALL}exactly_once", f"[{call}]") for call, label in CALLS.items()]


def cell(line: Line, tests: dict[str, str], reasons: list[str]) -> str:
    """yes, no with the number of its reason, refused, FAILED, or not run."""
    found = {name: how for name, how in tests.items() if name.startswith(line.begin) and line.part in name}
    if not found:
        return "not run"
    if "failed" in found.values():
        return "**fails**"
    skipped = {how.removeprefix("skipped: ") for how in found.values() if how != "passed"}
    if skipped:
        return "no " + " ".join(f"({reasons.index(reason) + 1})" for reason in sorted(skipped))
    return "refused" if all("is_refused" in name for name in found) else "yes"


def table(head: str, lines: list[Line], reasons: list[str]) -> str:
    rows = [f"| {line.what} | {' | '.join(cell(line, tests, reasons) for _, tests in RESULTS)} |\n" for line in lines]
    names = " | ".join(versions["pyspark"] for versions, _ in RESULTS)
    return f"| {head} | {names} |\n|---|{'---|' * len(RESULTS)}\n" + "".join(rows)


def all_reasons() -> list[str]:
    """The reasons of all skips, in the order of the versions."""
    found = [how for _, tests in RESULTS for how in tests.values() if how.startswith("skipped: ")]
    return list(dict.fromkeys(how.removeprefix("skipped: ") for how in found))


def counts(reasons: list[str]) -> str:
    """What ran: a column for each PySpark."""
    rows: dict[str, list[str]] = {}
    for versions, tests in RESULTS:
        ends = Counter(how.partition(":")[0] for how in tests.values())
        for name, value in {
            "Python": versions["python"],
            "Java": versions["java"],
            "pyarrow": versions["pyarrow"],
            "pandas": versions["pandas"],
            "numpy": versions["numpy"],
            "passed": ends["passed"],
            "failed": ends["failed"],
            **{
                f"skipped ({number})": sum(how == f"skipped: {reason}" for how in tests.values())
                for number, reason in enumerate(reasons, 1)
            },
        }.items():
            rows.setdefault(name, []).append(str(value))
    names = " | ".join(versions["pyspark"] for versions, _ in RESULTS)
    lines = [f"| {name} | {' | '.join(values)} |\n" for name, values in rows.items()]
    return f"| | {names} |\n|---|{'---|' * len(RESULTS)}\n" + "".join(lines)


def tables() -> str:
    if not RESULTS:
        return "There are no results yet.\n"
    reasons = all_reasons()
    parts = [
        table("at least once", AT_LEAST_ONCE, reasons),
        table("exactly once", EXACTLY_ONCE, reasons),
        table("exactly once, killed", KILL_LINES, reasons),
        table("runs on", PLACE_LINES, reasons),
        "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1)),
        counts(reasons),
    ]
    return "\n".join(part for part in parts if part)


def with_tables(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{tables()}{END}{rest.split(END)[1]}"


def test_tables_of_the_page_are_made_of_the_results() -> None:
    text = PAGE.read_text()
    assert text == with_tables(text), "stale: python tests/unit/test_pyspark_versions.py"


def test_every_line_has_run_with_every_pyspark() -> None:
    lines = [*AT_LEAST_ONCE, *EXACTLY_ONCE, *KILL_LINES, *PLACE_LINES]
    reasons = all_reasons()
    missing = [
        f"{versions['pyspark']}: {line.what}"
        for versions, tests in RESULTS
        for line in lines
        if cell(line, tests, reasons) == "not run"
    ]
    assert missing == [], "make test-pyspark runs them"


def test_no_test_fails() -> None:
    failed = [
        f"{versions['pyspark']} {name}" for versions, tests in RESULTS for name, how in tests.items() if how == "failed"
    ]
    assert failed == []


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
