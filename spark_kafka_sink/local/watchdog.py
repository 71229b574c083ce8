"""Ends the broker's processes and removes its folder when this process ends, in whatever way it does.

A shell reads from a pipe whose other end this process holds. The end of the pipe (a close, an exit, kill -9 of this
process) makes it kill -9 what still runs and remove the folder. It lives in a session of its own, so that Ctrl-C in a
terminal reaches this process alone, which then stops the broker in order.
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

# Lines are "+ PID" for a process to end, "- PID" for one that has ended, and "." where no more will come: a child that
# was forked meanwhile may hold the pipe open. The folder may resist for as long as a
# killed JVM is still writing into it.
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
# The child itself says its pid before it becomes the JVM: however this process ends, there is no moment in which the
# JVM runs and the guard does not know it. `exec` keeps the pid.
_ANNOUNCE = 'echo "+ $$" >&0; exec "$@" </dev/null'
_GUARD_TIMEOUT_S = 30


def _environment() -> dict[str, str]:
    """In the locale C Python's paths are UTF-8 all the same, but Java's are ASCII, and it would find no others."""
    return {**os.environ, "LC_ALL": "C.UTF-8"} if sys.getfilesystemencoding() == "utf-8" else dict(os.environ)


_open: WeakSet[Watchdog] = WeakSet()


def _let_go() -> None:
    """In a forked child: with the pipe open there the guard would not see this process end."""
    for watchdog in _open:
        watchdog._pipe.close()


os.register_at_fork(after_in_child=_let_go)


class Watchdog:
    """Guards the processes that it starts. Not thread-safe."""

    def __init__(self, doomed_folder: Path | None) -> None:
        """Start the guard. It removes `doomed_folder`, if one is given, when its work ends."""
        self._folder = str(doomed_folder or "")
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
        """Start a guarded process in `folder`; what it prints goes to `output`. Its pid is the command's own."""
        process = subprocess.Popen(
            ["/bin/sh", "-c", _ANNOUNCE, "sh", *command],
            stdin=self._pipe,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env=_environment(),
        )
        self._tell(f"+ {process.pid}")  # before a close that comes at once
        return process

    def forget(self, pid: int) -> None:
        """Call when a process has been reaped: its pid may belong to somebody else from now on."""
        self._tell(f"- {pid}")

    def close(self) -> None:
        """Kill what is left, remove the folder, and wait until both are done."""
        self._tell(".")
        self._pipe.close()
        _open.discard(self)
        if self._guard.wait(_GUARD_TIMEOUT_S) and self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, line: str) -> None:
        if self._pipe.closed:  # in a forked child, whose processes these are not
            return
        with contextlib.suppress(BrokenPipeError):  # the guard was killed: there is nobody to tell
            self._pipe.write(f"{line}\n".encode())
