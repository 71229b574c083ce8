"""Refusals of exactly-once delivery on Spark Connect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.exactly_once_streams import visible_values

JOB = Path(__file__).parents[2] / "support" / "connect_foreach_batch_job.py"


@pytest.mark.parametrize(
    ("form", "text"), [("write", "write was called inside foreachBatch"), ("format", "and a streaming query is active")]
)
def test_batch_write_inside_foreach_batch_is_refused(
    servers: str, three_partitions: str, tmp_path: Path, form: str, text: str
) -> None:
    """Bug: Spark ran the batch again, and its rows came twice."""
    variables = os.environ | {
        "SPARK_REMOTE": "local[2]",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [sys.executable, JOB, servers, three_partitions, form, tmp_path],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reported = json.loads(done.stdout.splitlines()[-1])
    assert text in reported["error"], reported["error"][:4000]
    assert visible_values(servers, three_partitions) == [2]
