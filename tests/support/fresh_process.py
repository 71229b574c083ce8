"""Runs a script in a Python of its own: one that has no Spark yet, or one that may not complain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 400
ROOT = Path(__file__).resolve().parents[2]
_LOG_TO_STDOUT = "import logging, sys; logging.basicConfig(stream=sys.stdout)\n"


def run_script(source: str, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`source` as a file in `folder`, and there. Fails with the end of its stderr where the script does."""
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
    """`source` where Python's warnings are errors, and stderr holds its own complaints alone.

    The package's log goes to stdout: what brokers ask patience for may be told there.
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
