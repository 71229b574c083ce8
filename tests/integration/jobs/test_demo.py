"""`make demo`, as users run it: to its end, and ended in the middle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

DEMO = Path(__file__).resolve().parents[3] / "jobs" / "demo.py"
FLIGHTS = 336_776

pytestmark = pytest.mark.slow


@pytest.fixture
def start_demo(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start the demo with its temporary files in `tmp_path`."""
    (tmp_path / "tmp").mkdir()
    running: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "COLUMNS": "120", "SPARK_LOCAL_IP": "127.0.0.1"}
        # kio imports Hypothesis where it is installed, which makes a folder
        environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(tmp_path_factory.mktemp("hypothesis"))
        demo = subprocess.Popen(
            [sys.executable, str(DEMO)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        running.append(demo)
        return demo

    yield start
    for demo in running:
        if demo.poll() is None:
            demo.terminate()
        demo.communicate(timeout=60)


def cell(printed: str, name: str) -> int:
    """The number of a row of the summary."""
    (found,) = re.findall(rf"│ {name} +│ +([\d,]+) │", printed)
    return int(found.replace(",", ""))


def test_each_flight_arrives_once_though_the_job_is_killed(
    start_demo: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    demo = start_demo()
    printed, _ = demo.communicate(timeout=300)
    assert demo.returncode == 0, printed
    assert "Killing the job by SIGKILL, in the middle of a batch" in printed
    assert cell(printed, "sent") == cell(printed, "seen once at the end") == FLIGHTS
    assert (cell(printed, "lost"), cell(printed, "doubled")) == (0, 0)
    at_the_kill = cell(printed, "seen when the job was killed")
    assert 0 < at_the_kill < FLIGHTS
    assert f"read_committed sees  {at_the_kill:>9,} flights" in printed
    (ordinary,) = re.findall(r"with read_uncommitted, sees +([\d,]+) flights", printed)
    assert int(ordinary.replace(",", "")) > at_the_kill
    assert "✗" not in printed
    assert os.listdir(tmp_path / "tmp") == []
    assert os.listdir(tmp_path) == ["tmp"]


def end_by(number: signal.Signals) -> Callable[[psutil.Process], None]:
    return lambda demo: demo.send_signal(number)


def kill_the_job(demo: psutil.Process) -> None:
    (job,) = (each for each in demo.children() if any("stream_to_kafka" in part for part in each.cmdline()))
    job.kill()


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (end_by(signal.SIGINT), 130, "Stopped. The job and Kafka have ended."),
        (end_by(signal.SIGTERM), 143, ""),
        (kill_the_job, 1, "The job ended with code -9."),
    ],
    ids=["Ctrl-C", "SIGTERM", "job that dies"],
)
def test_demo_that_ends_early_leaves_nothing_behind(
    start_demo: Callable[[], subprocess.Popen[str]],
    tmp_path: Path,
    end: Callable[[psutil.Process], None],
    code: int,
    text: str,
) -> None:
    demo = start_demo()
    assert demo.stdout is not None
    lines = []
    for line in demo.stdout:
        lines.append(line)
        if "records/s" in line:  # the head of the job's table: Spark runs
            break
    found = psutil.Process(demo.pid).children(recursive=True)
    assert len([each for each in found if each.name() == "java"]) == 2, "".join(lines)
    end(psutil.Process(demo.pid))
    printed, _ = demo.communicate(timeout=60)
    assert demo.returncode == code, "".join(lines) + printed
    assert text in printed
    _, alive = psutil.wait_procs(found, timeout=10)
    assert alive == []
    assert os.listdir(tmp_path / "tmp") == []
