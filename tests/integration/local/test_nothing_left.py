"""The processes, folders and logs that remain after a broker ends in different ways."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import Admin, EmbeddedKafka

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """TMPDIR of the tested processes."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def start(scratch: Path) -> Iterator[Start]:
    """Start Python with arguments in a new process, whose temporary folders are in `scratch`."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(scratch), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=TIMEOUT_S)


def read_bootstrap_servers(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def assert_emptied(folder: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while left := list(folder.iterdir()):
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.05)


def test_killed_parent_leaves_no_jvm_and_no_folder(start: Start, scratch: Path) -> None:
    process = start("-m", "spark_kafka_sink.local")
    servers = read_bootstrap_servers(process)
    assert Admin(servers).broker_ids(servers) == {1}
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert any("java" in child.name() for child in descendants)
    assert list(scratch.iterdir())
    process.kill()
    process.wait(TIMEOUT_S)
    # A deadline is needed: a broker whose folder is removed also ends by itself, some twenty seconds later.
    _, alive = psutil.wait_procs(descendants, timeout=10)
    # Without an init process that reaps orphans, an ended one stays as a zombie.
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    assert_emptied(scratch)


@pytest.mark.parametrize("interruption", [signal.SIGTERM, signal.SIGINT])
def test_command_prints_its_servers_and_ends_cleanly_on_interrupt(
    start: Start, scratch: Path, interruption: signal.Signals
) -> None:
    process = start("-m", "spark_kafka_sink.local", "--property", "auto.create.topics.enable=false")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", read_bootstrap_servers(process))
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(interruption)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (0, "")
    assert errors.endswith("Stopped.\n")
    assert "Traceback" not in errors
    assert not any(child.is_running() for child in descendants)
    assert list(scratch.iterdir()) == []


def test_command_ends_with_log_folder_when_its_broker_dies(start: Start) -> None:
    process = start("-m", "spark_kafka_sink.local")
    read_bootstrap_servers(process)
    (jvm,) = (child for child in psutil.Process(process.pid).children() if "java" in child.name())
    jvm.kill()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    logs = re.search(r"A node ended by itself\. Logs: (.*)", errors)
    assert logs is not None
    assert "Kafka Server started" in (Path(logs[1]) / "node-1" / "server.log").read_text()


def test_failed_start_is_reported_and_leaves_only_the_logs(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    kafka = EmbeddedKafka(properties={"log.retention.ms": "for ever"})
    with pytest.raises(LocalBrokerError) as caught:
        kafka.start()
    assert "for ever" in str(caught.value)
    logs = re.search(r"Logs: (.*)", str(caught.value))
    assert logs is not None
    assert list(scratch.iterdir()) == [Path(logs[1])]
    assert "for ever" in (Path(logs[1]) / "node-1" / "server.log").read_text()
    assert not kafka.running


def test_failed_start_is_reported_even_if_logs_cannot_be_saved(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setattr("shutil.copy", full)
    kafka = EmbeddedKafka(properties={"log.retention.ms": "for ever"})
    with pytest.raises(LocalBrokerError, match=r"(?s)for ever.*The logs cannot be saved: .*No space left"):
        kafka.start()
    assert kafka.node_ids == ()
    (logs,) = scratch.iterdir()
    assert logs.name.startswith("spark-kafka-sink-logs-")


FETCH = """
import sys, time
from pathlib import Path
from spark_kafka_sink.local.jars import fetch_jars

folder = Path(sys.argv[1])

def download(coordinate, place, progress):
    with (folder / "asked").open("a") as asked:
        asked.write(coordinate + "\\n")
    while not (folder / "go").exists():
        time.sleep(0.01)
    (place / "a.jar").write_bytes(b"content")
    return place / "a.jar"

print(fetch_jars(folder / "things.lock.json", cache=folder / "cache", download=download)[0].read_bytes())
"""
LOCK = """{"roots": [], "with_dependencies": false, "jars": [{"coordinate": "org.example:a:1", "size": 7,
"sha256": "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"}]}"""


def test_second_fetching_process_waits_for_the_first(start: Start, tmp_path: Path) -> None:
    (tmp_path / "things.lock.json").write_text(LOCK)
    first = start("-c", FETCH, str(tmp_path))
    deadline = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "asked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = start("-c", FETCH, str(tmp_path))
    assert second.stderr is not None
    assert "Waiting for another process that prepares the things jars" in second.stderr.readline()
    (tmp_path / "go").touch()
    for process in (first, second):
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, output) == (0, "b'content'\n"), errors
    assert (tmp_path / "asked").read_text() == "org.example:a:1\n"
