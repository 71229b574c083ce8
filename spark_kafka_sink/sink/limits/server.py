"""The process on the driver's machine that keeps the budgets of an application's queries: `python -m` this module.

It reads its orders, one line of JSON, from stdin: secret, address, the process that it belongs to, and a folder.
It writes its port to stdout, and ends within a second after that process has ended or the folder is gone. It has one
thread.

A connection without a proof is closed after `PROOF_S`. The decisions are those of `budget.py`, the lines those of
`conversation.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import resource
import secrets
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from spark_kafka_sink.common.clock import Clock, SystemClock
from spark_kafka_sink.sink.limits.budget import Budget
from spark_kafka_sink.sink.limits.conversation import GO, LONGEST_LINE, WAIT, proof

TICK_S: Final = 1.0
PROOF_S: Final = 5.0
KEEP_ALIVE: Final = (
    ("TCP_KEEPIDLE", 60),
    ("TCP_KEEPALIVE", 60),
    ("TCP_KEEPINTVL", 15),
    ("TCP_KEEPCNT", 4),
)
"""After a minute of silence the system asks the other machine, and gives it up after another minute. The second name is
that of macOS for the first one.
"""


class BudgetServer:
    """The budgets of all queries, and the conversations with their tasks."""

    def __init__(self, secret: str, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.secret = secret
        self.loop = loop
        self._clock = clock
        self._budgets: dict[str, Budget[Conversation]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def ask(self, task: Conversation, query: str, request: Mapping[str, Any]) -> None:
        now_ms = self._clock.now_ms()
        records, size = request["ask"]
        budget = self._budgets.get(query)
        if budget is None:
            budget = self._budgets[query] = Budget(tuple(request["rates"]), now_ms)
        budget.ask(task, records, size)
        self._grant(query)

    def leave(self, task: Conversation, query: str) -> None:
        if query in self._budgets:
            self._budgets[query].leave(task)

    def tick(self) -> None:
        """Show waiting tasks that the server lives, and forget budgets that are not used."""
        now_ms = self._clock.now_ms()
        for query, budget in [*self._budgets.items()]:
            for task in budget.waiting:
                task.say(WAIT)
            if budget.is_forgettable(now_ms):
                del self._budgets[query]

    def _grant(self, query: str) -> None:
        budget = self._budgets[query]
        now_ms = self._clock.now_ms()
        for task, ahead in budget.granted(now_ms):
            task.say(f"{GO} {ahead}")
        if budget.waiting and query not in self._timers:
            self._timers[query] = self.loop.call_later(budget.wait_ms(now_ms) / 1000, self._timer_ends, query)

    def _timer_ends(self, query: str) -> None:
        del self._timers[query]
        if query in self._budgets:
            self._grant(query)


class Conversation(asyncio.Protocol):
    """The conversation with one task. Any line that is not expected ends it."""

    def __init__(self, server: BudgetServer) -> None:
        self._server = server
        self._number = secrets.token_hex(16)
        self._is_trusted = False
        self._query: str | None = None
        self._rest = b""
        self._transport: Any = None

    def say(self, line: str) -> None:
        self._transport.write(f"{line}\n".encode())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        _keep_alive(transport.get_extra_info("socket"))
        self.say(self._number)
        self._server.loop.call_later(PROOF_S, self._end_without_proof)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            if len(self._rest) > LONGEST_LINE:
                raise ValueError
            for line in lines:
                self._take(line.decode())
        except (ValueError, KeyError, TypeError):  # not by a task of this release
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        if self._query is not None:
            self._server.leave(self, self._query)

    def _take(self, line: str) -> None:
        if self._is_trusted:
            request = json.loads(line)
            self._query = json.dumps([request["query"], request["rates"]])
            self._server.ask(self, self._query, request)
            return
        number, given = line.split(" ")
        if not hmac.compare_digest(given, proof(self._server.secret, "task", self._number, number)):
            raise ValueError
        self._is_trusted = True
        self.say(proof(self._server.secret, "server", self._number, number))

    def _end_without_proof(self) -> None:
        if not self._is_trusted:
            self._transport.abort()


def _keep_alive(connection: Any) -> None:
    """Let the system close the connection when the machine of the task is gone: a task that computes its rows says
    nothing for hours, and a machine without power does not say that it is gone.
    """
    with suppress(OSError):  # some systems refuse it for a connection that was lost meanwhile
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def process_start(pid: int) -> str | None:
    """Return a text that no other process with this id has. None if the process has ended. Empty if the system does not
    show it.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if state in {"Z", "X"} else fields[18]


def _allow_many_connections() -> None:
    """Allow as many open files as this user may have: by default some systems allow 1,024 tasks."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(orders: Mapping[str, Any]) -> None:
    """Serve until the owner has ended or the folder is gone."""
    loop = asyncio.get_running_loop()
    _allow_many_connections()
    server = BudgetServer(orders["secret"], SystemClock(), loop)
    owner, folder = orders["owner"], Path(orders["folder"])
    owner_start = process_start(owner)
    listener = await loop.create_server(lambda: Conversation(server), orders["host"], 0, backlog=1024)
    print(listener.sockets[0].getsockname()[1], flush=True)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # whoever reads the starter's output must not wait for this process
        os.dup2(nowhere, descriptor)
    while owner_start is not None and process_start(owner) == owner_start and folder.exists():
        server.tick()
        await asyncio.sleep(TICK_S)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.stdin.readline())))
