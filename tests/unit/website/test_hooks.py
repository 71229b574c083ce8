"""The pages and links of the website. MkDocs itself runs in `make docs`."""

from __future__ import annotations

import re

import pytest

from website import hooks


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[a](docs/options.md#columns)", "[a](options.md#columns)"),
        ("README.md", "![a](docs/benchmark.png)", "![a](benchmark.png)"),
        ("README.md", "[a](spark_kafka_sink/ARCHITECTURE.md)", "[a](architecture.md)"),
        ("docs/producer.md", "[a](../spark_kafka_sink/ARCHITECTURE.md#rooms)", "[a](architecture.md#rooms)"),
        ("docs/producer.md", "[a](options.md)", "[a](options.md)"),
        ("docs/producer.md", "[a](#transactions)", "[a](#transactions)"),
        ("docs/api/index.md", "[a](../options.md)", "[a](../options.md)"),
        ("docs/producer.md", "[a](https://example.org/b.md)", "[a](https://example.org/b.md)"),
        ("spark_kafka_sink/ARCHITECTURE.md", "[a](FILES.md) [b](../docs/jobs.md)", "[a](files.md) [b](jobs.md)"),
        ("examples/README.md", "[a](stream.py)", "[a](stream.md)"),
        ("docs/producer.md", "[a](missing.md)", "[a](missing.md)"),
        ("docs/jobs.md", "```\n[a](../LICENSE)\n```\n[b](../README.md)", "```\n[a](../LICENSE)\n```\n[b](index.md)"),
    ],
)  # fmt: skip
def test_link_leads_to_the_page_of_its_file(source: str, text: str, expected: str) -> None:
    assert hooks.relinked(text, source) == expected


def test_link_to_a_file_without_a_page_becomes_text() -> None:
    assert hooks.relinked("See [the `Makefile`](../Makefile).", "docs/jobs.md") == "See the `Makefile`."


def test_list_after_a_line_of_text_gets_a_blank_line() -> None:
    assert hooks.with_lists("Rules:\n- one\n- two\n  more\n") == "Rules:\n\n- one\n- two\n  more\n"
    assert hooks.with_lists("- one\n- two\n\n| a |\n|---|\n") == "- one\n- two\n\n| a |\n|---|\n"


def test_list_in_a_numbered_list_is_indented_by_four() -> None:
    assert hooks.with_lists("1. one\n   - part\n   text\n") == "1. one\n    - part\n   text\n"


def test_navigation_has_every_page_once() -> None:
    pages = {"index.md", "options.md", "new-page.md", "api/index.md", "api/errors.md", "kips.md"}
    tabs = hooks.navigation(pages)
    found = [page for tab in tabs for value in tab.values() for page in ([value] if isinstance(value, str) else value)]
    assert sorted(found) == sorted(pages)
    assert {"API": ["api/index.md", "api/errors.md"]} in tabs


def test_page_of_a_program_has_its_docstring_and_code() -> None:
    page = hooks.program_page("examples/batch.py")
    assert page.startswith("# batch.py\n\nWrite a batch")
    assert '```python title="examples/batch.py"\n"""Write a batch' in page


def test_page_of_a_notebook_has_texts_code_and_outputs() -> None:
    page = hooks.notebook_page("examples/notebook.ipynb")
    assert page.startswith("# A tour\n")
    assert len(re.findall(r"^```python$", page, re.MULTILINE)) == 8


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://unpkg.com/mermaid"></script>',
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<img alt="a" src="http://example.org/a.png">',
    ],
)
def test_page_that_loads_from_another_server_is_found(html: str) -> None:
    assert hooks._FOREIGN.search(html)


def test_page_that_links_to_another_server_is_allowed() -> None:
    assert not hooks._FOREIGN.search('<a href="https://kafka.apache.org">Kafka</a><script src="assets/a.js"></script>')
