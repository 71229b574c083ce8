"""The README's tables against the code. To remake them: python tests/unit/test_readme.py"""

from __future__ import annotations

import re
from pathlib import Path

from spark_kafka_sink.common.config import describe_options

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- producer settings: begin -->\n", "<!-- producer settings: end -->"


def settings_table() -> str:
    rows = [
        f"| `{row.name}` | {row.type} | {'' if row.default == '' else f'`{row.default}`'} | {row.doc} |"
        for row in describe_options()
    ]
    return "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def split_readme() -> tuple[str, str, str]:
    before, rest = README.read_text().split(BEGIN)
    table, after = rest.split(END)
    return before, table, after


def test_the_settings_table_is_the_one_in_the_code() -> None:
    _, table, _ = split_readme()
    assert table == settings_table()


def test_examples_that_stay_on_the_disk_have_places_of_their_own() -> None:
    """Bug: two examples had one checkpoint, and who ran both had two queries in it."""
    paths = re.findall(r"(?:--checkpoint |checkpointLocation\", \")(/[^\s\"]+)", README.read_text())
    assert len(paths) > 1
    assert len(set(paths)) == len(paths)


if __name__ == "__main__":
    before, _, after = split_readme()
    README.write_text(before + BEGIN + settings_table() + END + after)
