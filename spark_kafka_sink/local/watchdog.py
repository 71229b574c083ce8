"""Ends the broker's processes and removes its folder when this process ends, however it ends.

A shell reads from a pipe, and this process holds the other end. When the pipe closes (by a close, an exit, or kill -9
of this process), the shell kills the processes that still run and removes the folder. The shell has its own session, so
that Ctrl-C in a terminal reaches only this process, which then stops the broker in order.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from weakref import WeakSet

# Lines: "+ PID" is a process to end, "- PID" one that has ended, and "." is the last line, because a forked child may
# hold the pipe open. Removing the folder may fail while a killed JVM still writes into it.
_GUARD = """
pids=
while read -r sign pid; do
  case $sign in
    +) pids="$pids $pid" ;;
    .) break ;;
    -) left=; for p in $pids; do [ "$p" = "$pid" ] || left="$left $p"; done; pids=$left ;;
  esac
done
[ -z "$pids" ] || kill -9 $pids
[ -n "$1" ] || exit 0
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  rm -rf -- "$1" && exit 0
  sleep 0.2
done
exit 1
"""
# The child writes its own pid before it becomes the JVM, so the guard always knows a JVM that runs. `exec` keeps the
# pid.
_ANNOUNCE = 'echo "+ $$" >&0; exec "$@" </dev/null'
_GUARD_TIMEOUT_S = 30


def _environment() -> dict[str, str]:
    """Return the environment of the JVM. In the C locale Python's paths are UTF-8, but Java's would be ASCII."""
    return {**os.environ, "LC_ALL": "C.UTF-8"} if sys.getfilesystemencoding() == "utf-8" else dict(os.environ)


_open: WeakSet[Watchdog] = WeakSet()


def _close_pipes() -> None:
    """Close the pipes in a forked child. Otherwise the guard would not see the parent end."""
    for watchdog in _open:
        watchdog._pipe.close()


os.register_at_fork(after_in_child=_close_pipes)


class Watchdog:
    """Guards the processes that it starts. Not thread-safe."""

    def __init__(self, removed_folder: Path | None) -> None:
        """Start the guard. At its end it removes `removed_folder`, if one is given."""
        self._folder = str(removed_folder or "")
        read_end, write_end = os.pipe()
        self._pipe = os.fdopen(write_end, "wb", buffering=0)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "kafka-watchdog", self._folder],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        os.close(read_end)
        _open.add(self)

    def spawn(self, command: Sequence[str | Path], *, folder: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a guarded process in `folder`, with its output in `output`. The process has the command's pid."""
        process = subprocess.Popen(
            ["/bin/sh", "-c", _ANNOUNCE, "sh", *command],
            stdin=self._pipe,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env=_environment(),
        )
        self._send_line(f"+ {process.pid}")  # in case `close` comes before the child has written its pid
        return process

    def forget(self, pid: int) -> None:
        """Call when a process was reaped: the system may use its pid again."""
        self._send_line(f"- {pid}")

    def close(self) -> None:
        """Kill what is left, remove the folder, and wait until both are done."""
        self._send_line(".")
        self._pipe.close()
        _open.discard(self)
        if self._guard.wait(_GUARD_TIMEOUT_S) and self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send_line(self, line: str) -> None:
        if self._pipe.closed:  # in a forked child, which does not own the processes
            return
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            self._pipe.write(f"{line}\n".encode())
