"""The open descriptors, threads, children and files of a process, compared before and after a test."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable

import psutil


def file_descriptors() -> list[str]:
    """Return the sockets, pipes and other descriptors that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def _processes() -> list[str]:
    """Return child processes except Spark's Python workers, which it keeps for the next task."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and "pyspark.daemon" not in command:
                found.append(command[-200:])
        except psutil.NoSuchProcess:
            continue
    return found


def _temporary_files() -> list[str]:
    return [entry.path for entry in os.scandir(tempfile.gettempdir())]


_LOOKS: dict[str, Callable[[], list[str]]] = {
    "file descriptors": file_descriptors,
    "threads": lambda: [thread.name for thread in threading.enumerate()],
    "processes": _processes,
    "temporary files": _temporary_files,
}


class Leftovers:
    """Remembers the state at its creation. Descriptors are compared by number, because a kept socket may be replaced by
    a new one. A smaller number is never a leftover.
    """

    def __init__(self) -> None:
        self._before = {what: look() for what, look in _LOOKS.items()}

    def found(self, within_s: float = 5.0) -> list[str]:
        """Return all that is more than before, after some time to end."""
        deadline = time.monotonic() + within_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _left(self) -> list[str]:
        left = []
        for what, look in _LOOKS.items():
            now, before = look(), self._before[what]
            more = Counter(now) - Counter(before)
            if len(now) > len(before):
                left.append(f"{len(now) - len(before)} more {what}: {', '.join(more.elements())}")
        return left
