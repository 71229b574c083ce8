"""TCP acknowledgements that this process's system puts off, sent at once: for connections that others own.

Spark sends a Python worker a task and, right behind it, the task's rows, with Nagle's algorithm (RFC 896): what does
not fill a segment, of 64 KB here, waits until all before it is acknowledged. The worker has nothing to answer yet, so
its system puts the acknowledgement off (RFC 1122, 4.2.3.2), Linux for 40 ms: a task of a few thousand rows begins with
that long of nothing, unless it acknowledges first.

Holds no state; any thread.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_DESCRIPTORS: Final = Path("/proc/self/fd")
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)
"""None but on Linux, whose wait this is."""


def acknowledge_now() -> int:
    """Acknowledge what came in over this process's TCP connections. All of them, for nothing tells Spark's from the
    others, to which it is a packet that goes earlier. Returns how many descriptors they have.
    """
    # where somebody has set a time limit for new sockets, to look at one would be to set it for its owner
    if _QUICKACK is None or socket.getdefaulttimeout() is not None:
        return 0
    told = 0
    for descriptor in _sockets():
        try:
            told += _acknowledge(descriptor, _QUICKACK)
        except OSError:  # closed meanwhile by its owner
            continue
    return told


def _sockets() -> Iterator[int]:
    """None where the system does not show them, as without /proc."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return
    for name in names:
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)
        except OSError:  # closed meanwhile
            continue


def _acknowledge(descriptor: int, option: int) -> bool:
    """By a duplicate: to close that closes nothing of the owner's. Raises OSError."""
    duplicate = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if is_tcp:
            connection.setsockopt(socket.IPPROTO_TCP, option, 1)
        return is_tcp
