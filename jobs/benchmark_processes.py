"""What a contender's process and its children take: processor time and memory, as /proc tells. Linux alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A line of /proc: see proc_pid_stat(5)."""

    pid: int
    parent: int
    cpu_s: float
    """Of its own and of the children that it has waited for."""


def processes() -> dict[int, Process]:
    found = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # the name before it may hold blanks
        except OSError:  # it ended meanwhile
            continue
        pid = int(path.parent.name)
        found[pid] = Process(pid, int(fields[1]), sum(map(int, fields[11:15])) / ticks)
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


def worker_peak_bytes() -> int:
    """The highest resident memory that one of Spark's Python workers had; 0 where there is none."""
    tree = own_tree()
    daemons = {process.pid for process in tree if b"pyspark.daemon" in read(process.pid, "cmdline")}
    peaks = [0]
    for process in tree:
        if process.parent in daemons:
            lines = read(process.pid, "status").splitlines()
            peaks += [int(line.split()[1]) * 1024 for line in lines if line.startswith(b"VmHWM:")]
    return max(peaks)


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended meanwhile
        return b""
