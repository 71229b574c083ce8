"""The rooms of the package: imports point down, there is no circle, and some libraries have one room. The tests read
the imports with `ast` and run nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "spark_kafka_sink"

LAYERS = {
    "common": 0,
    "record": 1,
    "protocol": 1,
    "network": 2,
    "serialization": 2,
    "client": 3,
    "producer": 4,
    "admin": 4,
    "sink": 5,
    "doctor": 6,
}
"""`local` stands beside: it may use only `common`, and no room may use it."""
ABOVE_ALL = 7
"""The package itself, which imports its public names, and its commands."""

ONLY_ROOMS = {
    "numpy": {"record"},
    "lz4": {"record"},
    "crc32c": {"record"},
    "pyarrow": {"record", "serialization", "sink"},
    "fastavro": {"serialization"},
    "confluent_kafka": {"serialization"},
    "kio": {"protocol", "local"},
    "socket": {"network", "local"},
    "selectors": {"network"},
    "ssl": {"network"},
    "cryptography": {"network"},
    "pyspark": {"sink"},
    "javaproperties": {"sink"},
    "openlineage": {"sink"},
    "opentelemetry": {"producer", "sink"},
    "jgo": {"local"},
    "rich": {"local"},
}
ROOM_THAT_STARTS_THREADS = "producer"
BESIDE_THE_LOOP = "spark_kafka_sink.network.sasl.login"
"""Slow steps of an authentication: each is a thread that ends with its step."""
METRICS_SERVER = "spark_kafka_sink.sink.prometheus"
"""Serves Prometheus in its own thread, without a connection to Kafka."""
LIMITS = "spark_kafka_sink.sink.limits."
"""Its connections are between tasks and the driver's machine, none to Kafka. `server` is a process of its own."""
BESIDE_KAFKA = {
    ("socket", METRICS_SERVER),
    *(("socket", LIMITS + each) for each in ("conversation", "driver", "server")),
}
LINEAGE_SENDER = "spark_kafka_sink.sink.lineage_sender"
"""Sends events of OpenLineage in its own thread, so that no batch waits for their receiver."""
TELEMETRY_EXPORTS = "spark_kafka_sink.sink.telemetry.exports"
"""Sends what OpenTelemetry has recorded in its own thread, so that no batch waits long for the receiver."""
INTERRUPTS = "spark_kafka_sink.sink.running_query"
"""Cancels jobs from a thread of its own, because the interrupted one may still wait for the JVM."""
MOST_LINES_OF_A_CLASS = 400
MOST_LINES_OF_A_FUNCTION = 60
"""Ruff limits the complexity (pyproject.toml)."""
LINES_OF_A_LONG_FILE = 700
LINES_OF_A_CRUMB = 60
MOST_MODULES = 207
CRUMBS = {
    "transactions": "the door of a public command, by the name that users type",
    "network.acknowledgements": "only network/ may use sockets, and this one is Spark's, not the producer's",
    "network.sasl.plain": "each mechanism of SASL has a file",
}
"""Short files with one importer, and why each stands apart from its importer."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """(imported module, whether only for type checking)."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    tree = parsed(path)
    typing_only: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            typing_only.update(inner for inner in ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in typing_only
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            yield node.module, node in typing_only
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node in typing_only


def arrows() -> list[tuple[str, str]]:
    known = {dotted(path) for path in modules()}
    return [
        (dotted(path), target)
        for path in modules()
        for target, _ in imports(path)
        if target in known and target != dotted(path)
    ]


def test_every_room_has_a_layer() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(LAYERS) | {"local"}


def test_arrows_point_down_only() -> None:
    upward = [
        f"{source} -> {target}"
        for source, target in arrows()
        if room(source) in LAYERS and LAYERS.get(room(target), ABOVE_ALL) > LAYERS[room(source)]
    ]
    assert upward == []


def test_rooms_of_one_layer_do_not_use_each_other() -> None:
    sideways = [
        f"{source} -> {target}"
        for source, target in arrows()
        if room(source) != room(target)
        and room(source) in LAYERS
        and room(target) in LAYERS
        and LAYERS[room(source)] == LAYERS[room(target)]
    ]
    assert sideways == []


def test_embedded_broker_uses_only_the_common_room() -> None:
    assert [
        f"{source} -> {target}"
        for source, target in arrows()
        if room(source) == "local" and room(target) not in {"local", "common"}
    ] == []


def test_modules_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for source, target in arrows():
        graph.setdefault(source, set()).add(target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module in done:
            return
        for target in graph.get(module, ()):
            visit(target, (*path, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("library", sorted(ONLY_ROOMS))
def test_library_stays_in_its_rooms(library: str) -> None:
    strangers = [
        dotted(path)
        for path in modules()
        for target, _ in imports(path)
        if target.split(".")[0] == library
        and room(dotted(path)) not in ONLY_ROOMS[library]
        and (library, dotted(path)) not in BESIDE_KAFKA
    ]
    assert strangers == []


def test_only_the_process_of_limits_has_an_event_loop() -> None:
    """Its module is not imported by any other: a task would pay for asyncio."""
    loops = {dotted(path) for path in modules() for target, _ in imports(path) if target.split(".")[0] == "asyncio"}
    assert loops == {f"{LIMITS}server"}
    assert [source for source, target in arrows() if target == f"{LIMITS}server"] == []


def test_only_the_producer_starts_a_thread_but_for_slow_logins() -> None:
    starters = [
        dotted(path)
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"threading.Thread", "Thread", "ThreadPoolExecutor", "threading.Timer"}
        and room(dotted(path)) not in {ROOM_THAT_STARTS_THREADS, "local"}
        and dotted(path) not in {BESIDE_THE_LOOP, METRICS_SERVER, LINEAGE_SENDER, TELEMETRY_EXPORTS, INTERRUPTS}
    ]
    assert starters == []


def test_only_loop_owners_read_the_clock() -> None:
    """Only common/clock.py reads `time`. All other code gets a Clock or `now_ms`."""
    readers = [
        dotted(path)
        for path in modules()
        for target, _ in imports(path)
        if target == "time" and room(dotted(path)) not in {"common", "local"}
    ]
    assert readers == []


def definitions() -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Return (module and name, definition, lines) of each class and function."""
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                yield f"{dotted(path)}.{node.name}", node, node.end_lineno - node.lineno + 1


def test_classes_have_at_most_400_lines() -> None:
    too_long = {
        name: lines
        for name, node, lines in definitions()
        if isinstance(node, ast.ClassDef) and lines > MOST_LINES_OF_A_CLASS
    }
    assert too_long == {}


def test_functions_have_at_most_60_lines() -> None:
    too_long = {
        name: lines
        for name, node, lines in definitions()
        if not isinstance(node, ast.ClassDef) and lines > MOST_LINES_OF_A_FUNCTION
    }
    assert too_long == {}


def test_file_of_more_than_700_lines_says_why() -> None:
    """Its docstring must have a sentence with "700 lines"."""
    unexplained = []
    for path in modules():
        head = ast.get_docstring(parsed(path)) or ""
        if len(path.read_text().splitlines()) > LINES_OF_A_LONG_FILE and f"{LINES_OF_A_LONG_FILE} lines" not in head:
            unexplained.append(dotted(path))
    assert unexplained == []


def test_short_file_with_one_importer_says_why() -> None:
    importers: dict[str, set[str]] = {}
    for source, target in arrows():
        importers.setdefault(target, set()).add(source)
    crumbs = [
        dotted(path).partition(".")[2]
        for path in modules()
        if path.stem not in {"__init__", "__main__"}
        and len(path.read_text().splitlines()) < LINES_OF_A_CRUMB
        and len(importers.get(dotted(path), ())) <= 1
    ]
    assert sorted(crumbs) == sorted(CRUMBS)


def test_package_has_at_most_207_modules() -> None:
    assert len(modules()) <= MOST_MODULES
