"""The table for people, and the JSON for scripts."""

from __future__ import annotations

import json

import pytest

from spark_kafka_sink.doctor.findings import Area, Finding, not_checked, ok, problem
from spark_kafka_sink.doctor.report import as_json, summary, table

FINDINGS: list[Finding] = [
    ok(Area.BROKERS, "h1:9092 (node 1)", "reached by PLAINTEXT"),
    problem("connection-refused", Area.BROKERS, "h2:9092", "Connection refused.", source="kafka.bootstrap.servers"),
    problem("kernel-missing", Area.MACHINE, "kernel", "it was not compiled"),
    not_checked(Area.CLOCK, "time", "no broker said it"),
]
EXPECTED = """\
This machine
  ! kernel  it was not compiled [kernel-missing]
            -> Install a wheel for this platform, or install
               from source with a C compiler (gcc) present.
               A zip of the package has no kernel: ship it
               as a packed environment instead. In a
               checkout run pip install -e . there, because
               Python takes the package from the folder that
               it runs in.

Brokers
  ✓ h1:9092 (node 1)  reached by PLAINTEXT
  ✗ h2:9092           Connection refused. [connection-refused]
                      -> Correct host and port in
                         kafka.bootstrap.servers. Is the
                         broker running, and does it listen on
                         this interface (listeners)?

Clock
  · time  no broker said it

1 fault, 1 warning; 1 not checked. Faults: connection-refused.
"""


def test_table_has_areas_in_order_and_advice_below_each_problem() -> None:
    assert table(FINDINGS, 60, has_signs=True, has_colours=False) == EXPECTED


def test_same_change_is_written_once_in_an_area() -> None:
    fault = FINDINGS[1]
    text = table([fault, fault, FINDINGS[2]], 100, has_signs=True, has_colours=False)
    assert text.count("-> Correct host") == 1
    assert text.count("-> as above") == 1


def test_table_without_signs_is_ascii() -> None:
    text = table(FINDINGS, 60, has_signs=False, has_colours=False)
    assert text.isascii()
    assert "  X  h2:9092" in text
    assert "  ok h1:9092" in text


def test_colours_are_only_around_signs() -> None:
    text = table(FINDINGS, 60, has_signs=True, has_colours=True)
    assert "\x1b[31m✗\x1b[0m h2:9092" in text
    for code in (31, 32, 33, 90, 0):
        text = text.replace(f"\x1b[{code}m", "")
    assert text == EXPECTED


def test_long_name_stands_on_a_line_of_its_own() -> None:
    what = "broker-with-a-long-name.internal.example:9092"
    lines = table([ok(Area.BROKERS, what, "reached")], 80, has_signs=True, has_colours=False).splitlines()
    assert lines[1] == f"  ✓ {what}"
    assert lines[2].strip() == "reached"


def test_json_has_every_finding() -> None:
    found = json.loads(as_json(FINDINGS))
    assert found["format"] == 1
    assert [each["status"] for each in found["findings"]] == ["ok", "fault", "warning", "not checked"]
    fault = found["findings"][1]
    assert (fault["area"], fault["name"], fault["what"]) == ("Brokers", "connection-refused", "h2:9092")
    assert fault["change"].startswith("Correct host and port")
    assert found["findings"][0]["name"] is None


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        (FINDINGS[:1], "No fault was found."),
        (FINDINGS[3:], "No fault was found; 1 not checked."),
        (FINDINGS[1:3], "1 fault, 1 warning. Faults: connection-refused."),
        ([FINDINGS[1]] * 2, "2 faults, 0 warnings. Faults: connection-refused."),
    ],
)
def test_last_line_counts(findings: list[Finding], expected: str) -> None:
    assert summary(findings) == expected
