"""Ctrl-C ends a write: Spark by itself goes on with its jobs, and a second run would write the rows twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.librdkafka import read_values

from spark_kafka_sink.local import Admin

ROOT = Path(__file__).parents[3]
ROWS = 20_000
MOST_S = 60


@pytest.mark.parametrize(
    ("guarantee", "handler"),
    [
        ("at-least-once", "notebook"),
        pytest.param("at-least-once", "pyspark", marks=pytest.mark.slow),
        pytest.param("exactly-once", "notebook", marks=pytest.mark.slow),
    ],
)
def test_interrupted_write_does_not_go_on(
    kafka_broker: Admin, topic: str, tmp_path: Path, guarantee: str, handler: str
) -> None:
    """Bug: all rows came in spite of Ctrl-C. In a notebook an error of PySpark took the place of KeyboardInterrupt."""
    servers = kafka_broker.bootstrap_servers
    options = {"kafka.bootstrap.servers": servers, "topic": topic, "delivery.guarantee": guarantee}
    output = tmp_path / "output"
    with (
        output.open("w") as stream,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("interrupted_job.py")), *map(json.dumps, (options, handler))],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
            },
            cwd=tmp_path,
            stdout=stream,
            stderr=subprocess.STDOUT,
        ) as job,
    ):
        try:
            end = time.monotonic() + MOST_S
            while not read_values(servers, topic, isolation_level="read_uncommitted") and time.monotonic() < end:
                time.sleep(0.2)
            job.send_signal(signal.SIGINT)
            job.wait(MOST_S)
        finally:
            job.kill()
    printed = output.read_text()
    assert re.findall("RUNNING .*", printed) == ["RUNNING 0 ROWS 7"], printed
    if handler == "notebook":  # PySpark's own handler may raise a Py4JError
        assert re.findall(r"ENDED BY \w+", printed) == ["ENDED BY KeyboardInterrupt"], printed
    assert 0 < len(read_values(servers, topic, isolation_level="read_uncommitted")) < ROWS
    if guarantee == "exactly-once":
        assert not read_values(servers, topic)
