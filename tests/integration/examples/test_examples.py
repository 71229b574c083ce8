"""The programs of examples/ as users run them: in a process of their own, against the broker of the tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.librdkafka import read_topic, read_values

from spark_kafka_sink.local.admin import Admin

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
TESTS = [Path(__file__).parent, Path(__file__).parents[1] / "pipelines"]
"""Where the tests of the examples are."""
NewTopic = Callable[..., str]


TIMEOUT_S = 500
AVRO_TRIP = b"\0" + bytes(8) + b"\x0ctrip 0"
"""Trip 0: a long, a double and a string, none of which may be null."""


@pytest.fixture
def start_example(kafka_broker: Admin, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start_example(name, *arguments)` starts a program in an activated environment. The test's end kills it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    running: list[subprocess.Popen[str]] = []

    def start(name: str, *arguments: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name), "--bootstrap-servers", kafka_broker.bootstrap_servers, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PATH": path, "TMPDIR": str(tmp_path)},
        )
        running.append(program)
        return program

    yield start
    for program in running:
        if program.poll() is None:
            program.kill()
        program.communicate()


def output_of(program: subprocess.Popen[str]) -> str:
    """Wait for the end of the program, which must be a success. Return what it printed."""
    printed, errors = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == 0, errors
    return printed


@pytest.fixture
def run_example(start_example: Callable[..., subprocess.Popen[str]]) -> Callable[..., str]:
    """`run_example(name, *arguments)` runs a program to its end, and returns what it prints."""
    return lambda name, *arguments: output_of(start_example(name, *arguments))


@pytest.mark.parametrize(("name", "value"), [("json", b'{"id":0,"km":0.0,"name":"trip 0"}'), ("avro", AVRO_TRIP)])
def test_serialized_example_writes_each_struct(
    run_example: Callable[..., str], kafka_broker: Admin, new_topic: NewTopic, name: str, value: bytes
) -> None:
    topic = new_topic(1)
    printed = run_example("serialized.py", "--topic", topic, "--format", name, "--rows", "200")
    values = [record.value() for record in read_topic(kafka_broker.bootstrap_servers, topic)]
    assert len(values) == 200
    assert value in values
    assert printed.startswith("200 records, ")
    assert "The first record: b" in printed


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


def test_stream_example_writes_rows_until_it_is_interrupted(
    start_example: Callable[..., subprocess.Popen[str]], kafka_broker: Admin, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    checkpoint = tmp_path / "checkpoint"
    program = start_example("stream.py", "--topic", topic, "--checkpoint", str(checkpoint))
    deadline = time.monotonic() + TIMEOUT_S
    while not (checkpoint / "commits" / "2").exists():  # batch 0 has no rows
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    program.send_signal(signal.SIGINT)
    printed = output_of(program)
    finished = sum(map(int, re.findall(r"^batch \d+: (\d+) rows", printed, re.MULTILINE)))
    values = [int(value) for value in read_values(kafka_broker.bootstrap_servers, topic)]
    assert printed.startswith("Stopping\n")
    assert finished > 0
    # Rows of the batch that was interrupted may be there too, but not all of them.
    assert set(values) >= set(range(finished))
    assert len(values) == len(set(values))


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
    tests = "".join(test.read_text() for folder in TESTS for test in folder.glob("test_*.py"))
    assert re.search(rf"[\"/]{re.escape(path.relative_to(EXAMPLES).parts[0])}\"", tests)
    assert path.relative_to(EXAMPLES).parts[0] in (EXAMPLES / "README.md").read_text()
