"""Ports for a cluster's life: free when taken, and nobody else's while a node is down."""

from __future__ import annotations

import socket
import sys

HOST = "127.0.0.1"


class ReservedPort:
    """A TCP port of the loopback interface that stays ours between a node's stop and its next start.

    On Linux a socket that is bound with SO_REUSEADDR and does not listen lets the broker (Java sets that option too)
    bind and listen beside it, while the kernel gives the port to nobody who asks for any port. Without this, a client
    that keeps connecting to a killed broker can be given the broker's own port as its source and end up connected to
    itself. Elsewhere the port is only known to have been free.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, 0))
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self._socket.close()

    def release(self) -> None:
        self._socket.close()
