"""The parts of a Spark application that a sink could leave behind: threads of the driver's Python, processes below it,
and the threads and connections to a broker of its Python processes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import psutil


class PythonProcess(NamedTuple):
    """A daemon or worker of PySpark."""

    pid: int
    threads: int
    connections: int
    """Connections to the broker, in any state but closed."""


class Look(NamedTuple):
    """The state at one time."""

    threads: Counter[str]
    """Threads of this process, by name."""
    others: Counter[str]
    """Processes that are not PySpark workers, by name."""
    pythons: tuple[PythonProcess, ...]

    @classmethod
    def at(cls, port: int) -> Look:
        """Return the state as seen from the driver's process, with connections to a broker that listens on `port`."""
        others: Counter[str] = Counter()
        pythons = []
        for child in psutil.Process().children(recursive=True):
            try:
                if child.status() == psutil.STATUS_ZOMBIE:
                    continue
                if "pyspark.daemon" in child.cmdline():
                    peers = [each.raddr for each in child.net_connections("tcp") if each.raddr]
                    ours = sum(peer.port == port for peer in peers)
                    pythons.append(PythonProcess(child.pid, child.num_threads(), ours))
                else:
                    others[child.name()] += 1
            except psutil.NoSuchProcess:
                continue
        return cls(Counter(thread.name for thread in threading.enumerate()), others, tuple(pythons))

    @property
    def fullest(self) -> tuple[int, int]:
        """Return the highest number of threads and of connections that a Python process has."""
        threads = max((each.threads for each in self.pythons), default=0)
        return threads, max((each.connections for each in self.pythons), default=0)

    def more_than(self, before: Look) -> list[str]:
        """Return what exists now and did not exist `before`. Workers come and go. None may have more connections than
        the maximum before, or two threads more: one may belong to Arrow or jemalloc, which start threads when they need
        them. There may not be more workers.
        """
        left = [f"thread {name}" for name in (self.threads - before.threads).elements()]
        left += [f"process {name}" for name in (self.others - before.others).elements()]
        if len(self.pythons) > len(before.pythons):
            left.append(f"{len(self.pythons)} PySpark processes instead of {len(before.pythons)}")
        threads, connections = before.fullest
        left += [str(each) for each in self.pythons if each.threads > threads + 1 or each.connections > connections]
        return left


def await_none(left: Callable[[], list[str]], within_s: float = 20.0) -> None:
    """Wait until nothing is left. Fails with the list of what is left."""
    deadline = time.monotonic() + within_s
    while found := left():
        assert time.monotonic() < deadline, f"left behind after {within_s} s: {', '.join(found)}"
        time.sleep(0.05)
