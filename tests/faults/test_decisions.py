"""Row 54: state that is kept between two runs of a query is read as plain data, and refused if it is damaged."""

from __future__ import annotations

import ast
import pickle
import random
from pathlib import Path

import pytest
from support.fault_stage import Timeline

import spark_kafka_sink
from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.sink.exactly_once.messages import Decision, TaskTransaction

pytestmark = pytest.mark.quick

_UNSAFE = {"pickle", "cPickle", "cloudpickle", "marshal", "shelve", "dill", "pyspark.serializers"}


class Canary:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def a_decision() -> Decision:
    task = TaskTransaction(OpenTransaction("prefix/3", 1001, 7, 2), 3, 250)
    return Decision(42, "query", 1_700_000_000_000, 4, 1_000, (task,))


def test_row_54_pickle_for_a_decision(tmp_path: Path, timeline: Timeline) -> None:
    canary = tmp_path / "canary"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        forged = pickle.dumps(Canary(canary), protocol)
        with pytest.raises(ProtocolError, match="the topic") as caught:
            Decision.from_bytes(forged, "the topic", "prefix")
        timeline.note(str(caught.value)[:120])
    assert not canary.exists()


@pytest.mark.parametrize(
    "garbage", [b"", b"\0", b"null", b"[]", b"{}", b'{"version":1}', b"\xff" * 100, b"[" * 100_000]
)
def test_row_54_garbage_for_a_decision(garbage: bytes) -> None:
    with pytest.raises(ProtocolError, match="the topic"):
        Decision.from_bytes(garbage, "the topic", "prefix")


def test_row_54_changed_bytes_in_a_decision(seed: int, timeline: Timeline) -> None:
    """Every changed byte is detected, except for blanks."""
    rng, written = random.Random(seed), a_decision().to_bytes()
    assert Decision.from_bytes(written, "here", "prefix") == a_decision()
    for _ in range(2_000):
        spoiled = bytearray(written)
        spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        cut = bytes(spoiled[: rng.choice((len(spoiled), len(spoiled), rng.randrange(len(spoiled))))])
        try:
            read = Decision.from_bytes(cut, "here", "prefix")
        except ProtocolError:
            continue
        assert read == a_decision(), cut


def test_row_54_nothing_is_unpickled_by_the_package() -> None:
    """Spark carries the commit messages; the package reads its own state as data."""
    folder = Path(spark_kafka_sink.__file__).parent
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} != {"PickleError"}:
                names.append(node.module or "")
            found += [(path.name, name) for name in names if name in _UNSAFE]
    assert found == []
