"""Sends at once the TCP acknowledgements that the system delays, on connections of other owners.

It is here because only network/ uses sockets. sink/worker.py says when to acknowledge, and why. Holds no state; any
thread.
"""

from __future__ import annotations

import os
import socket
from typing import Final

_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)
"""None except on Linux: only Linux delays acknowledgements so long."""


def can_acknowledge() -> bool:
    """Return whether `acknowledge` works here and leaves the owner's connection as it is.

    With a default timeout for new sockets it would set that timeout for the owner.
    """
    return _QUICKACK is not None and socket.getdefaulttimeout() is None


def acknowledge(descriptor: int) -> bool:
    """Acknowledge at once all data that came over a socket. Return whether it is a TCP socket. Raises OSError.

    Uses a duplicate of the descriptor, so that closing it leaves the owner's socket open.
    """
    assert _QUICKACK is not None
    duplicate = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if is_tcp:
            connection.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        return is_tcp
