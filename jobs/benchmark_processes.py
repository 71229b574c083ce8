"""What a contender's process and its children take: processor time and memory, as /proc tells. Linux alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A line of /proc: see proc_pid_stat(5)."""

    pid: int
    parent: int
    cpu_s: float
    """Of its own and of the children that it has waited for."""


def processes() -> dict[int, Process]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if line := read(path):
            fields = line.rpartition(b")")[2].split()  # the name before it may hold blanks
            pid = int(path.parent.name)
            found[pid] = Process(pid, int(fields[1]), sum(map(int, fields[11:15])) / TICKS)
    return found


def own_tree() -> list[Process]:
    """This process, the JVM that it started, the daemon and the workers of that."""
    everybody = processes()

    def is_ours(pid: int) -> bool:
        while pid in everybody and pid != os.getpid():
            pid = everybody[pid].parent
        return pid == os.getpid()

    return [process for pid, process in everybody.items() if is_ours(pid)]


def cpu_seconds() -> float:
    return sum(process.cpu_s for process in own_tree())


def compiler_seconds(pid: int) -> dict[int, float]:
    """What a JVM's threads that compile have taken, by thread: they come and go with the work."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("[0-9]*/stat"):
        line = read(path)
        if b" CompilerThre" in line:
            found[int(path.parent.name)] = sum(map(int, line.rpartition(b")")[2].split()[11:13])) / TICKS
    return found


def seconds_since(before: Mapping[int, float], now: Mapping[int, float]) -> float:
    """What the threads that are there now have taken since `before`."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in now.items())


def worker_peak_bytes() -> int:
    """The highest resident memory that one of Spark's Python workers had; 0 where there is none."""
    tree = own_tree()
    daemons = {process.pid for process in tree if b"pyspark.daemon" in read(Path(f"/proc/{process.pid}/cmdline"))}
    peaks = [0]
    for process in tree:
        if process.parent in daemons:
            lines = read(Path(f"/proc/{process.pid}/status")).splitlines()
            peaks += [int(line.split()[1]) * 1024 for line in lines if line.startswith(b"VmHWM:")]
    return max(peaks)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""
