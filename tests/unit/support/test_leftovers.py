"""Open descriptors, running threads and remaining files are found, and their end is noticed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.leftovers import Leftovers


def a_descriptor() -> tuple[str, Callable[[], object]]:
    file = Path("/dev/null").open()  # noqa: SIM115
    return "1 more file descriptors", file.close


def a_thread() -> tuple[str, Callable[[], object]]:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="left behind")
    thread.start()
    return "1 more threads: left behind", lambda: (ended.set(), thread.join())


def a_process() -> tuple[str, Callable[[], object]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def end() -> None:
        process.communicate(b"\n")

    return "1 more processes", end


def a_temporary_file() -> tuple[str, Callable[[], object]]:
    folder = tempfile.TemporaryDirectory()
    return "1 more temporary files", folder.cleanup


@pytest.mark.parametrize("leave", [a_descriptor, a_thread, a_process, a_temporary_file])
def test_each_leftover_is_found_until_its_end(
    leave: Callable[[], tuple[str, Callable[[], object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = Leftovers()
    what, clean_up = leave()
    assert any(text.startswith(what) for text in before.found(within_s=0)), before.found(within_s=0)
    clean_up()
    assert before.found() == []
