"""The lengths of documents, and that files, options and commands in them exist. `python tests/unit/test_documents.py`
writes spark_kafka_sink/FILES.md again.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from spark_kafka_sink.common import config
from spark_kafka_sink.common.config import describe_options
from spark_kafka_sink.sink import options
from spark_kafka_sink.sink.options import PASSED_OVER

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = ROOT / "spark_kafka_sink" / "ARCHITECTURE.md"
NOTEBOOK = ROOT / "benchmarks" / "NOTEBOOK.md"
FILES = ROOT / "spark_kafka_sink" / "FILES.md"
LONGEST = {
    ARCHITECTURE: 180,
    ROOT / "README.md": 150,
    ROOT / "CHANGELOG.md": 60,
    ROOT / "CONTRIBUTING.md": 100,
    ROOT / "tests" / "README.md": 80,
    ROOT / "docs" / "performance.md": 140,
}
EXAMPLES = ROOT / "examples" / "README.md"
DOCUMENTS = sorted({*LONGEST, FILES, NOTEBOOK, EXAMPLES, ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")})
EACH = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
FILE = re.compile(r"[\w./-]*\w\.(?:py|md|c|cfg|toml|properties)(?![\w.(])")
MISSPELT = {"kafka.lingr.ms"}
ELSEWHERE = {"job.py", "conftest.py", "requirements.txt", "sink.properties"}
"""Files of the reader, not of the project."""


def spans(document: Path) -> list[str]:
    """Return the texts between backticks, and the lines of code blocks."""
    text = document.read_text()
    blocks = re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [*re.findall(r"`([^`\n]+)`", rest), *(line for block in blocks for line in block.splitlines())]


@pytest.fixture(scope="module")
def files() -> set[str]:
    """Return every file of the project, and each end of its path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    return {"/".join(path.parts[at:]) for path in paths for at in range(len(path.parts))}


@pytest.mark.parametrize(("document", "most"), LONGEST.items(), ids=lambda value: getattr(value, "name", ""))
def test_document_is_within_its_limit(document: Path, most: int) -> None:
    assert len(document.read_text().splitlines()) <= most


@EACH
def test_files_that_a_document_names_exist(document: Path, files: set[str]) -> None:
    named = {name.removeprefix("./") for span in spans(document) for name in FILE.findall(span)}
    missing = {name for name in named if name.lstrip("./") not in files and Path(name).name not in ELSEWHERE}
    assert missing == set()


@EACH
def test_links_of_a_document_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


@EACH
def test_anchors_of_a_document_are_headings(document: Path) -> None:
    for page, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", document.read_text()):
        text = (document.parent / page).read_text() if page else document.read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
        assert anchor in anchors, page


@EACH
def test_make_targets_that_a_document_names_exist(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for span in spans(document) for name in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)", span)}
    assert named - targets == set()


@EACH
def test_modules_that_a_document_runs_exist(document: Path) -> None:
    for name in {name for span in spans(document) for name in re.findall(r"-m (spark_kafka_sink[\w.]*)", span)}:
        path = ROOT / Path(*name.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


@EACH
def test_options_that_a_document_names_are_known(document: Path) -> None:
    known = {f"kafka.{row.name}" for row in describe_options()} | set(options._OPTIONS) | set(PASSED_OVER.values())
    known |= set(options._REFUSED) | {f"kafka.{name}" for name in config._JAVA_ONLY}
    named = {name for span in spans(document) for name in re.findall(r"^(kafka\.[a-z][a-z0-9.]*[a-z0-9])(?:=|$)", span)}
    assert named - known - MISSPELT == set()


def first_sentence(path: Path) -> str:
    """Return the first sentence of the module's docstring: up to a full stop before a blank or the end."""
    head = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.match(r".*?(?:\.(?= [A-Z`])|$)", head)[0]  # type: ignore[index]


def file_map() -> str:
    lines = ["# Files", "", "One line for each file of the package: the first sentence of its docstring. Written by"]
    lines += ["`tests/unit/test_documents.py`. How the rooms fit together: [ARCHITECTURE.md](ARCHITECTURE.md)."]
    package = ARCHITECTURE.parent
    for room in sorted({path.parent for path in package.rglob("*.py")}):
        modules = [path for path in sorted(room.glob("*.py")) if path.name != "__init__.py"]
        lines += ["", f"## {room.relative_to(ROOT)}/", "", first_sentence(room / "__init__.py"), ""]
        lines += ["| file | what it is |", "|---|---|"] if modules else []
        lines += [f"| `{path.name}` | {first_sentence(path).replace('|', chr(92) + '|')} |" for path in modules]
    return "\n".join(lines).rstrip() + "\n"


def test_file_map_has_the_first_sentence_of_each_module() -> None:
    assert FILES.read_text() == file_map(), "stale: python tests/unit/test_documents.py"


def test_each_invariant_names_a_file_and_a_name_in_it() -> None:
    body = ARCHITECTURE.read_text().split("\n## Invariants\n")[1]
    places = re.findall(r"^  (`.*)\.$", body, re.MULTILINE)
    assert len(places) == body.count("\n- **")
    for name, file in re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", " ".join(places)):
        assert all(part in (ARCHITECTURE.parent / file).read_text() for part in name.split(".")), (name, file)


if __name__ == "__main__":
    FILES.write_text(file_map())
