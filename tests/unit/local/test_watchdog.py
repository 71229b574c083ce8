"""What happens to guarded processes, with a sleeping shell in the JVM's place."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from support.peer import open_files

from spark_kafka_sink.local.watchdog import Watchdog


def guarded(folder: Path | None) -> tuple[Watchdog, psutil.Process]:
    """Return a watchdog and its guard, the one process that it starts."""
    before = set(psutil.Process().children())
    watchdog = Watchdog(folder)
    (guard,) = set(psutil.Process().children()) - before
    return watchdog, guard


def test_close_kills_processes_and_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "doomed"
    folder.mkdir()
    watchdog = Watchdog(folder)
    with (folder / "out").open("wb") as output:
        process = watchdog.spawn(["sleep", "60"], folder=folder, output=output)
    watchdog.close()
    assert process.wait(10) == -signal.SIGKILL
    assert not folder.exists()


def test_ctrl_c_reaches_neither_guard_nor_process(tmp_path: Path) -> None:
    before = open_files()
    watchdog, guard = guarded(None)
    with (tmp_path / "out").open("wb") as output:
        process = watchdog.spawn(["sleep", "60"], folder=tmp_path, output=output)
    assert os.getsid(guard.pid) == guard.pid
    assert os.getsid(process.pid) == process.pid
    watchdog.close()
    process.wait(10)
    assert open_files() == before


def test_process_that_was_reaped_is_not_killed_again(tmp_path: Path) -> None:
    watchdog = Watchdog(None)
    with (tmp_path / "out").open("wb") as output:
        reaped = watchdog.spawn(["true"], folder=tmp_path, output=output)
        assert reaped.wait(10) == 0
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as lines, os.fdopen(write_end, "wb") as output:
        stranger = watchdog.spawn(["sh", "-c", "echo up; exec sleep 60"], folder=tmp_path, output=output)
        assert lines.readline() == "up\n"  # the guard was told of it before
    watchdog.forget(reaped.pid)
    watchdog.forget(stranger.pid)  # as if its pid were another's by now
    watchdog.close()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait(10)
    assert (tmp_path / "out").exists(), "a folder that was not given is not removed"


def test_forked_child_that_lives_on_delays_no_close(tmp_path: Path) -> None:
    """Bug: it held the guard's pipe open, as a pool of processes does: `stop` waited 30 s and raised TimeoutExpired."""
    folder = tmp_path / "doomed"
    folder.mkdir()
    watchdog = Watchdog(folder)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        is_closed = watchdog._pipe.closed
        watchdog.forget(1)  # as where `running` is asked for there
        os.read(read_end, 1)
        os._exit(0 if is_closed else 1)
    os.close(read_end)
    try:
        watchdog.close()
        assert not folder.exists()
    finally:
        os.close(write_end)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the guard would not see that this process was killed"


def test_killed_guard_does_not_prevent_a_close(tmp_path: Path) -> None:
    """Bug: after `pkill kafka` a cluster's `running` and `stop` raised BrokenPipeError, and its folder stayed."""
    folder = tmp_path / "doomed"
    folder.mkdir()
    watchdog, guard = guarded(folder)
    with (folder / "out").open("wb") as output:
        process = watchdog.spawn(["true"], folder=folder, output=output)
    assert process.wait(10) == 0
    guard.kill()
    os.waitid(os.P_PID, guard.pid, os.WEXITED | os.WNOWAIT)  # it stays a child, for the watchdog to wait for
    watchdog.forget(process.pid)
    watchdog.close()
    assert not folder.exists()


def test_pid_is_that_of_the_command_and_output_is_kept(tmp_path: Path) -> None:
    watchdog = Watchdog(None)
    with (tmp_path / "out").open("wb") as output:
        process = watchdog.spawn(["sh", "-c", "echo $$; echo problem >&2; pwd"], folder=tmp_path, output=output)
    assert process.wait(10) == 0
    watchdog.forget(process.pid)
    watchdog.close()
    assert (tmp_path / "out").read_text().splitlines() == [str(process.pid), "problem", str(tmp_path)]


def test_c_locale_process_has_utf_8_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java took a folder's name for ASCII, and the broker could not be started in it."""
    monkeypatch.setenv("LC_ALL", "C")
    for encoding, expected in (("utf-8", "C.UTF-8"), ("iso8859-1", "C")):
        monkeypatch.setattr(sys, "getfilesystemencoding", lambda encoding=encoding: encoding)
        watchdog = Watchdog(None)
        with (tmp_path / "out").open("wb") as output:
            process = watchdog.spawn(["sh", "-c", "echo $LC_ALL"], folder=tmp_path, output=output)
        assert process.wait(10) == 0
        watchdog.forget(process.pid)
        watchdog.close()
        assert (tmp_path / "out").read_text() == f"{expected}\n"
