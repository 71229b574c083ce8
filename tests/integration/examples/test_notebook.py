"""The notebook of examples/, executed by Jupyter. `python tests/integration/examples/test_notebook.py` stores the new
outputs in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[3] / "examples" / "notebook.ipynb"


def executed(folder: Path) -> dict[str, Any]:
    """Run the notebook in a process of its own. Return it with the outputs of its cells, without those of logs."""
    target = folder / "executed.ipynb"
    target.write_text(NOTEBOOK.read_text())
    done = subprocess.run(
        [Path(sys.executable).with_name("jupyter-execute"), "--inplace", "--timeout", "500", target],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "JUPYTER_PLATFORM_DIRS": "1", "TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    notebook: dict[str, Any] = json.loads(target.read_text())
    for number, cell in enumerate(code_cells(notebook), 1):
        assert cell["execution_count"] == number, f"cell {number} did not run"
        cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
        cell["metadata"] = {}
    return notebook


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow  # and it needs the extra notebook: make notebook
def test_notebook_runs_and_gives_the_outputs_that_it_stores(tmp_path: Path) -> None:
    stored = json.loads(NOTEBOOK.read_text())
    cells = code_cells(executed(tmp_path))
    assert [cell["outputs"] for cell in cells] == [cell["outputs"] for cell in code_cells(stored)]
    assert any(cell["outputs"] for cell in cells)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        NOTEBOOK.write_text(json.dumps(executed(Path(name)), indent=1, ensure_ascii=False) + "\n")
