"""Runs a script in a new Python process: without Spark, or with warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 400
ROOT = Path(__file__).resolve().parents[2]
_LOG_TO_STDOUT = "import logging, sys; logging.basicConfig(stream=sys.stdout)\n"


def run_script(source: str, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Write `source` to a file in `folder` and run it there. If the script fails, fail with the end of its stderr."""
    (folder / "job.py").write_text(source)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYSPARK_GATEWAY")}
    done = subprocess.run(
        [sys.executable, "job.py", *arguments],
        cwd=folder,
        env={**inherited, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return done


def run_strictly(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `source` with Python's warnings as errors. Only the interpreter writes to stderr.

    The package's log goes to stdout, because a slow broker may cause log lines.
    """
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", _LOG_TO_STDOUT + source, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
