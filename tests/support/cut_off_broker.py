"""A broker that is cut off from its controllers, and goes on to answer clients."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_SEIZE: Final = 0x4206
_INTERRUPT: Final = 0x4207
_DETACH: Final = 17
"""Requests of ptrace(2)."""
_ANY_THREAD: Final = 0x40000000
"""__WALL of waitpid(2)."""
_TO_CONTROLLERS: Final = ("raft", "to-con", "heartbeat", "lifecycle")
"""Parts of the names of a broker's threads that talk to the controllers; Linux cuts names to 15 letters."""


@contextmanager
def cut_off(pid: int) -> Iterator[None]:
    """Stop the threads of a Kafka broker, a child of this process, that talk to its controllers. The controllers then
    elect other leaders, of which the broker learns nothing. A firewall could do the same, but not only for one test.
    """
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    stopped: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            if any(part in (task / "comm").read_text() for part in _TO_CONTROLLERS):
                thread = int(task.name)
                for request in (_SEIZE, _INTERRUPT):
                    if ptrace(request, thread, None, None):
                        raise OSError(ctypes.get_errno(), f"thread {thread} of process {pid} cannot be stopped")
                os.waitpid(thread, _ANY_THREAD)
                stopped.append(thread)
        assert stopped, "no thread of the broker has such a name"
        yield
    finally:
        for thread in stopped:
            with suppress(ProcessLookupError):
                ptrace(_DETACH, thread, None, None)
