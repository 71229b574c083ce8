"""The doctor's findings as a table for people, and as JSON for scripts."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from spark_kafka_sink.doctor.findings import Area, Finding, Status

_SIGNS: Final = {Status.OK: "✓", Status.WARNING: "!", Status.FAULT: "✗", Status.NOT_CHECKED: "·"}
_PLAIN: Final = {Status.OK: "ok", Status.WARNING: "! ", Status.FAULT: "X ", Status.NOT_CHECKED: "- "}
_COLOURS: Final = {Status.OK: 32, Status.WARNING: 33, Status.FAULT: 31, Status.NOT_CHECKED: 90}
_WIDEST_WHAT: Final = 32
_LEAST_TEXT: Final = 40
_AGAIN: Final = "as above"
_FORMAT: Final = 1
"""The version of the JSON."""


def table(findings: Sequence[Finding], width: int, *, has_signs: bool, has_colours: bool) -> str:
    """Return the table, in lines of at most `width` characters where words allow it. Without signs it is ASCII but for
    what was seen.
    """
    signs = _SIGNS if has_signs else _PLAIN
    lines: list[str] = []
    for area in Area:
        own = [each for each in findings if each.area is area]
        if own:
            column = min(max(len(each.what) for each in own), _WIDEST_WHAT)
            lines += [area.value]
            said: set[str] = set()
            for each in own:
                sign = signs[each.status]
                if has_colours:
                    sign = f"\x1b[{_COLOURS[each.status]}m{sign}\x1b[0m"
                change = _AGAIN if each.change and each.change in said else each.change
                said.add(each.change)
                lines += _lines(replace(each, change=change), sign, len(signs[each.status]), column, width)
            lines.append("")
    return "\n".join([*lines, summary(findings)]) + "\n"


def summary(findings: Iterable[Finding]) -> str:
    found = list(findings)
    count = {status: sum(each.status is status for each in found) for status in Status}
    faults, warnings, unchecked = count[Status.FAULT], count[Status.WARNING], count[Status.NOT_CHECKED]
    if not faults and not warnings:
        first = "No fault was found"
    else:
        first = f"{_number(faults, 'fault')}, {_number(warnings, 'warning')}"
    rest = f"; {unchecked} not checked" if unchecked else ""
    names = ", ".join(dict.fromkeys(each.name for each in found if each.status is Status.FAULT))
    return f"{first}{rest}.{f' Faults: {names}.' if names else ''}"


def as_json(findings: Sequence[Finding]) -> str:
    """Return JSON in ASCII, which each terminal and file can take."""
    rows = [
        {
            "area": each.area.value,
            "status": each.status.value,
            "what": each.what,
            "seen": each.seen,
            "name": each.name or None,
            "change": each.change or None,
        }
        for each in findings
    ]
    return json.dumps({"format": _FORMAT, "findings": rows}, indent=2) + "\n"


def _lines(finding: Finding, sign: str, sign_width: int, column: int, width: int) -> Iterator[str]:
    indent = sign_width + 3 + column + 2
    text_width = max(width - indent, _LEAST_TEXT)
    seen = f"{finding.seen} [{finding.name}]" if finding.name else finding.seen
    wrapped = _wrapped(seen, text_width)
    head = f"  {sign} {finding.what.ljust(column)}  "
    if len(finding.what) > column:  # on a line of its own
        yield f"  {sign} {finding.what}"
        head = " " * indent
    yield f"{head}{wrapped[0]}"
    yield from (" " * indent + line for line in wrapped[1:])
    if finding.change:
        for number, line in enumerate(_wrapped(finding.change, text_width - 3)):
            yield " " * indent + ("-> " if not number else "   ") + line


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
