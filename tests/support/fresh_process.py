"""Runs a script in a Python of its own that has no Spark yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 400


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
