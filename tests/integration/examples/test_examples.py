"""The programs of examples/ as users run them: in a process of their own, against the broker of the tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.librdkafka import read_topic, read_values

from spark_kafka_sink.local.admin import Admin

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
NewTopic = Callable[..., str]


@pytest.fixture
def run_example(kafka_broker: Admin, tmp_path: Path) -> Callable[..., str]:
    """`run_example(name, *arguments)` returns what the program prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # an activated environment

    def run(name: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / name), "--bootstrap-servers", kafka_broker.bootstrap_servers, *arguments],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PATH": path, "TMPDIR": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_batch_example_writes_keys_headers_and_times(
    run_example: Callable[..., str], kafka_broker: Admin, new_topic: NewTopic
) -> None:
    topic = new_topic(4)
    printed = run_example("batch.py", "--topic", topic, "--rows", "2000")
    records = read_topic(kafka_broker.bootstrap_servers, topic, 4)
    assert len(records) == 2000
    assert {record.key() for record in records} == {str(key).encode() for key in range(100)}
    assert sorted(json.loads(record.value() or b"")["order"] for record in records) == list(range(2000))
    assert {str(record.headers()) for record in records} == {"[('source', b'batch.py')]"}
    assert printed.startswith("2,000 records, ")
    assert len(re.findall(r"the last offset is \d+", printed)) == 4


def test_stream_example_goes_on_from_its_checkpoint(
    run_example: Callable[..., str], kafka_broker: Admin, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    arguments = ("--topic", topic, "--checkpoint", str(tmp_path / "checkpoint"), "--seconds", "6")
    run_example("stream.py", *arguments)
    before = read_values(kafka_broker.bootstrap_servers, topic)
    run_example("stream.py", *arguments)
    after = read_values(kafka_broker.bootstrap_servers, topic)
    assert 0 < len(before) < len(after)
    assert {int(value) for value in after} == set(range(max(map(int, after)) + 1))


def test_exactly_once_example_shows_each_row_once(
    run_example: Callable[..., str], kafka_broker: Admin, new_topic: NewTopic
) -> None:
    topic = new_topic(2)
    printed = run_example("exactly_once.py", "--topic", topic, "--rows", "50000")
    assert "The first run failed, as planned" in printed
    assert "After the failed run: read_committed sees 0 rows, 0 different ones" in printed
    assert "After the second run: read_committed sees 50000 rows, 50000 different ones" in printed
    assert "After the second run: read_uncommitted sees" in printed
    assert sorted(map(int, read_values(kafka_broker.bootstrap_servers, topic, 2))) == list(range(50_000))


def test_delta_example_publishes_changes_and_tombstones(
    run_example: Callable[..., str], kafka_broker: Admin, new_topic: NewTopic
) -> None:
    topic = new_topic()
    printed = run_example("delta_change_feed.py", "--topic", topic)
    records = [(record.key(), record.value()) for record in read_topic(kafka_broker.bootstrap_servers, topic)]
    assert sorted(records[:3], key=str) == [
        (b"1", b'{"id": 1, "name": "Ada", "city": "Ulm"}'),
        (b"2", b'{"id": 2, "name": "Ben", "city": "Bonn"}'),
        (b"3", b'{"id": 3, "name": "Cem", "city": "Kiel"}'),
    ]
    assert records[3:] == [(b"2", b'{"id": 2, "name": "Ben", "city": "Berlin"}'), (b"3", None)]
    assert "5 changes, 1 of them tombstones. Next time: --from-version 3" in printed


def test_delta_example_publishes_only_newer_versions(
    run_example: Callable[..., str], kafka_broker: Admin, new_topic: NewTopic, tmp_path: Path
) -> None:
    """A row whose key changes leaves a tombstone under its old key."""
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    path = str(tmp_path / "table")
    rows = pa.table({"id": ["a", "b"], "n": [1, 2]})
    write_deltalake(path, rows, configuration={"delta.enableChangeDataFeed": "true"})
    topic = new_topic()
    arguments = ("--topic", topic, "--table", path)
    run_example("delta_change_feed.py", *arguments)
    DeltaTable(path).update(predicate="id = 'b'", new_values={"id": "c"})
    printed = run_example("delta_change_feed.py", *arguments, "--from-version", "1")
    nothing = run_example("delta_change_feed.py", *arguments, "--from-version", "2")
    records = [(record.key(), record.value()) for record in read_topic(kafka_broker.bootstrap_servers, topic)]
    assert len(records) == 4
    assert records[2:] == [(b"b", None), (b"c", b'{"id": "c", "n": 2}')]
    assert "2 changes, 1 of them tombstones" in printed
    assert "Nothing is new" in nothing


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_every_example_has_a_test_and_a_line_in_the_readme(path: Path) -> None:
    tests = "".join(test.read_text() for test in Path(__file__).parent.glob("test_*.py"))
    assert f'"{path.name}"' in tests
    assert path.name in (EXAMPLES / "README.md").read_text()
