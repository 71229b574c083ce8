"""What `make docs` adds to docs/: the pages that are elsewhere in the repository, links to them, the navigation, and
diagrams as pictures. MkDocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
STYLE: Final = "assets/extra.css"
ELSEWHERE: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "benchmarks/NOTEBOOK.md": "measurements.md",
    "examples/README.md": "examples/index.md",
    "spark_kafka_sink/ARCHITECTURE.md": "architecture.md",
    "spark_kafka_sink/FILES.md": "files.md",
    "tests/README.md": "tests.md",
}
"""Pages outside docs/, and where they stand in the site."""
NAVIGATION: Final[dict[str, tuple[str, ...]]] = {
    "Use": (
        "exactly-once.md", "serialization.md", "schema-registry.md", "dead-letters.md", "options.md", "security.md",
        "operating.md", "monitoring.md", "reports.md", "lineage.md", "opentelemetry.md", "doctor.md",
        "troubleshooting.md", "producer.md", "embedded-broker.md", "jobs.md", "migrating-from-spark-kafka.md",
        "migrating-from-confluent-kafka.md",
    ),
    "Platforms": (
        "deploying.md", "platforms.md", "managed-kafka.md", "declarative-pipelines.md", "pyspark-versions.md",
        "brokers.md",
    ),
    "Examples": (
        "examples/index.md", "examples/batch.md", "examples/stream.md", "examples/exactly_once.md", "examples/*",
    ),
    "API": ("api/index.md", "api/sink.md", "api/producer.md", "api/errors.md", "api/testing.md", "api/*"),
    "Evidence": ("reliability.md", "performance.md", "kips.md", "measurements.md"),
    "Develop": ("architecture.md", "contributing.md", "tests.md", "files.md", "changelog.md", "reporting.md"),
}  # fmt: skip
"""The tabs. `folder/*`: all pages of a folder. A page of docs/ that is not here is in the tab Use."""

_WITHOUT_SIDEBAR: Final = "---\nhide: [navigation]\n---\n"
_LINK: Final = re.compile(r"\[([^\[\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_FENCE: Final = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
_MERMAID: Final = re.compile(r"^```mermaid\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_FOREIGN: Final = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?https?:|<link\b[^>]*\bstylesheet\b[^>]*https?:"
)


# ---- pages and links -------------------------------------------------------------------------------------------------


def examples() -> list[str]:
    """Return the programs and notebooks of examples/, by their paths in the repository."""
    found = (path for kind in ("py", "ipynb") for path in (ROOT / "examples").rglob(f"*.{kind}"))
    return sorted(str(path.relative_to(ROOT)) for path in found if ".ipynb_checkpoints" not in path.parts)


def page_of(path: str) -> str | None:
    """Return the place in the site of a file of the repository, or None if it has no page."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith((".py", ".ipynb")) and (ROOT / path).is_file():
        return str(Path(path).with_suffix(".md"))
    return None


def source_of(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    by_page = {place: path for path, place in ELSEWHERE.items()}
    by_page |= {str(Path(path).with_suffix(".md")): path for path in examples()}
    return by_page.get(page, f"docs/{page}")


def relinked(text: str, source: str) -> str:
    """Return Markdown of the file `source` with links as the site needs them.

    Of a link to a file without a page only the text stays. MkDocs refuses a link that leads nowhere.
    """
    here = page_of(source)
    assert here is not None

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if not target or ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = page_of(path)
        if page is not None:
            return f"[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
        return text if (ROOT / path).exists() else match[0]

    return outside_code(text, lambda part: _LINK.sub(link, part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the parts of `text` that are not in code blocks."""
    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def with_lists(text: str) -> str:
    """Return Markdown in which the site's parser finds every list that GitHub's finds.

    It needs a blank line before a list, and four blanks before a list in a numbered list.
    """
    nested = re.sub(r"^   (?=[-*] )", "    ", text, flags=re.MULTILINE)
    return re.sub(r"^(?![-*|>#\s]|\d+\. )(.+)\n(?=[-*] |1\. )", r"\1\n\n", nested, flags=re.MULTILINE)


# ---- examples --------------------------------------------------------------------------------------------------------


def program_page(path: str) -> str:
    """Return the page of a program: its docstring and its code."""
    code = (ROOT / path).read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(code)) or ""
    return f'# {Path(path).name}\n\n{text}\n\n```python title="{path}"\n{code}```\n'


def notebook_page(path: str) -> str:
    """Return the page of a notebook: its texts, its code, and what the code printed."""
    cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    text = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield text
        return
    yield f"```python\n{text}\n```"
    shown = "".join("".join(output.get("text") or output["data"]["text/plain"]) for output in cell["outputs"])
    if shown:
        yield f"```text\n{shown.rstrip()}\n```"


# ---- diagrams --------------------------------------------------------------------------------------------------------


def with_pictures(text: str) -> str:
    """Return Markdown whose Mermaid diagrams are SVG. Material would load a renderer from another server."""
    return _MERMAID.sub(lambda match: f'<div class="diagram">{svg(match[1])}</div>', text)


def svg(diagram: str) -> str:
    """Return a Mermaid diagram as SVG, with an id of its own, because the id is in its style sheet."""
    import mermaidx

    return str(mermaidx.render(diagram).svg()).replace("my-svg", f"diagram-{zlib.crc32(diagram.encode()):08x}")


# ---- called by MkDocs ------------------------------------------------------------------------------------------------


def navigation(pages: set[str]) -> list[dict[str, Any]]:
    """Return the tabs with those of `pages` that exist. Each page is in one of them."""
    left = pages - {"index.md"}
    tabs: dict[str, list[str]] = {}
    for title, names in NAVIGATION.items():
        tabs[title] = []
        for name in names:
            folder = name.removesuffix("*")
            found = [page for page in left if page == name or (name.endswith("/*") and page.startswith(folder))]
            tabs[title] += sorted(found)
            left -= set(found)
    tabs["Use"] += sorted(left)
    return [{"Home": "index.md"}, *({title: found} for title, found in tabs.items() if found)]


def on_config(config: MkDocsConfig) -> None:
    pages = {str(path.relative_to(config.docs_dir)) for path in Path(config.docs_dir).rglob("*.md")}
    pages |= {*ELSEWHERE.values(), *(page for page in map(page_of, examples()) if page is not None)}
    config.nav = navigation(pages)


def on_files(files: Files, config: MkDocsConfig) -> None:
    from mkdocs.structure.files import File

    for path, page in ELSEWHERE.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_WITHOUT_SIDEBAR + text if page == "index.md" else text))
    for path in examples():
        content = program_page(path) if path.endswith(".py") else notebook_page(path)
        files.append(File.generated(config, str(Path(path).with_suffix(".md")), content=content))
    files.append(File.generated(config, STYLE, content=(ROOT / "website" / "extra.css").read_text(encoding="utf-8")))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs' names
    text = relinked(markdown, source_of(page.file.src_uri))
    return with_pictures(outside_code(text, with_lists))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001 - MkDocs' names
    """Refuse a page that loads something from another server."""
    from mkdocs.exceptions import PluginError

    if found := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another server: {found[0]}")
    return output
