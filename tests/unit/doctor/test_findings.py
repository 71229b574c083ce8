"""The table of problems: each one is planted by some test, and the page has the same texts."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest
from support.planted_faults import LOOPBACK, PLANTED, UNIT

from spark_kafka_sink.doctor.findings import PROBLEMS, Area, Status, has_fault, in_capitals, not_checked, ok, problem

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"
SIGNS = {Status.FAULT: "✗", Status.WARNING: "!"}


def test_each_problem_is_planted_once() -> None:
    assert set(PLANTED) == set(PROBLEMS)
    assert len(PLANTED) == len(LOOPBACK) + len(UNIT)
    assert len(PLANTED) >= 25


def rows() -> list[str]:
    return [
        f"| `{name}` | {SIGNS[each.status]} | {each.meaning} | {in_capitals(each.change)} |"
        for name, each in PROBLEMS.items()
    ]


def test_page_has_the_table_of_the_code() -> None:
    lines = PAGE.read_text().splitlines()
    assert [line for line in lines if re.match(r"\| `[a-z0-9-]+` \| [✗!] ", line)] == rows()


@pytest.mark.parametrize("name", PROBLEMS)
def test_text_of_a_problem_is_plain(name: str) -> None:
    found = PROBLEMS[name]
    assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", name)
    assert found.status in SIGNS
    assert found.meaning.endswith(".")
    values = {field for _, field, _, _ in string.Formatter().parse(found.change) if field}
    made = problem(name, Area.BROKERS, "what", "seen", **dict.fromkeys(values, "x"))
    assert "{" not in made.change
    assert (made.name, made.status) == (name, found.status)


def test_only_a_fault_is_a_fault() -> None:
    warning = problem("kernel-missing", Area.MACHINE, "kernel", "none")
    fault = problem("port-speaks-tls", Area.BROKERS, "h:1", "x")
    others = [ok(Area.CLOCK, "a", "b"), not_checked(Area.CLOCK, "a", "b"), warning]
    assert not has_fault(others)
    assert has_fault([*others, fault])


def test_values_are_words_in_capitals_on_the_page() -> None:
    assert in_capitals("Let {host} know {node}.") == "Let HOST know NODE."
    assert in_capitals("Correct this option{place}.") == "Correct this option PLACE."


if __name__ == "__main__":
    print("\n".join(rows()))
