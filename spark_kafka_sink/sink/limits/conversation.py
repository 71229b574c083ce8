"""The conversation between a task, or the driver, and the server of the budgets: its words, and its blocking side.

It goes in lines of text:

    server  a random number
    task    its own random number, and the proof of the secret over both
    server  its proof
    task    {"query": ..., "rates": [records, bytes], "ask": [records, bytes]}
    server  "wait" each second, and "go 3" when the task may send, and three times as much later without a question

The proofs are HMAC-SHA256. No line after them is signed, and nothing is encrypted: the lines have numbers and names of
topics, no rows. One thread uses a `Conversation`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from typing import Final

from spark_kafka_sink.common.errors import LimitServerError
from spark_kafka_sink.common.texts import Secret

SILENCE_S: Final = 30.0
"""The server says something each second. It is gone if it is silent for this long."""
LONGEST_LINE: Final = 65_536
WAIT: Final = "wait"
GO: Final = "go"


def proof(secret: str, side: str, *numbers: str) -> str:
    """Return the proof that `side` (task or server) knows the secret."""
    return hmac.new(secret.encode(), " ".join((side, *numbers)).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class LimitServer:
    """Where the budgets of an application are, and the secret that its tasks prove to know."""

    host: str
    port: int
    secret: Secret


class Conversation:
    """A connection to the server, by blocking calls. Raises OSError if it is lost, LimitServerError if another program
    listens there.
    """

    def __init__(self, server: LimitServer) -> None:
        self._socket = socket.create_connection((server.host, server.port), SILENCE_S)
        self._lines: BufferedReader | None = None
        try:
            self._lines = self._socket.makefile("rb")
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._prove(server)
        except BaseException:
            self.close()
            raise

    def ask(self, request: str, on_wait: Callable[[], None]) -> int:
        """Return when the task may send: how many times as much it may send later. Calls `on_wait` about each
        second.
        """
        self._say(request)
        while (line := self._line()) == WAIT:
            on_wait()
        word, _, ahead = line.partition(" ")
        if word != GO or not ahead.isdecimal():
            raise LimitServerError("The server of the write limits gave an answer that is not known here.")
        return int(ahead)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._socket.close()

    def _prove(self, server: LimitServer) -> None:
        secret, number = server.secret.reveal(), secrets.token_hex(16)
        theirs = self._line()
        self._say(f"{number} {proof(secret, 'task', theirs, number)}")
        answer = self._line().encode()  # `compare_digest` refuses text with other letters than ASCII's
        if not secrets.compare_digest(answer, proof(secret, "server", theirs, number).encode()):
            raise LimitServerError(
                f"The program at {server.host}, port {server.port}, is not the server of this write's limits."
            )

    def _say(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())

    def _line(self) -> str:
        assert self._lines is not None
        line = self._lines.readline(LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        return line.decode("ascii", "replace").rstrip("\n")
