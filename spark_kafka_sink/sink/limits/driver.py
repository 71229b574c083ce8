"""The driver's side of the limits: it starts the server of the budgets, and finds it again for the next batch.

The server is a process, and not a thread of the driver, because a data source has no process that lives as long as its
query: Spark ends planning workers that are idle for a minute. A driver that is busy in Python does not slow it down
either. Nothing is started without an option of limits.

The server of a user's process (`KafkaSink`) ends with that process. That of planning workers (`format`) ends with the
daemon that forks them, or when Spark deletes the application's local directory, in which a file names the server.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark_kafka_sink.common.errors import ConfigError, LimitServerError
from spark_kafka_sink.common.texts import Secret
from spark_kafka_sink.sink.limits.conversation import Conversation, LimitServer

if TYPE_CHECKING:
    from spark_kafka_sink.sink.options import SinkConfig

_SERVER: Final = "spark_kafka_sink.sink.limits.server"
_OPTIONS: Final = "write.max.records.per.second and write.max.bytes.per.second"
_FILE: Final = "spark-kafka-sink-limits"
_LOOPBACK: Final = "127.0.0.1"
_ELSEWHERE: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses of documentation (RFC 5737, RFC 3849). Nothing is sent to them."""

START_S: Final = 60.0
"""How long a server may take to start. The batch waits for it, and so do those of other threads."""

_lock = threading.Lock()
_own: Final[dict[tuple[int, str, str], LimitServer]] = {}
"""The servers of this process, by its id, so that a fork has its own, and by their addresses: a later SparkContext may
be one whose executors do not reach the first one's.
"""
_started: Final[list[subprocess.Popen[str]]] = []
"""Kept, because Python warns of a process that runs on when its object is gone."""


def with_server_of_process(config: SinkConfig) -> SinkConfig:
    """Return the configuration for tasks of a driver in Python. Raises LimitServerError, ConfigError on Windows."""
    pid = os.getpid()
    bind, host = _addresses_of_driver()
    with _lock:
        server = _own.get((pid, bind, host))
        if server is None or not _lives(server):
            server = _own[pid, bind, host] = _start(bind, host, pid, Path("/"))
            atexit.register(_end, pid, _started[-1])
    return replace(config, limit_server=server)


def with_server_of_planners(config: SinkConfig, environment: Mapping[str, str] = os.environ) -> SinkConfig:
    """Return the configuration for tasks of a data source. To be called in a planning worker. Raises as
    `with_server_of_process`.
    """
    folder = environment.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    if not folder:
        raise ConfigError(f"{_OPTIONS}: Spark names no local directory to this process.")
    path = Path(folder) / _FILE
    server = _named_in(path)
    if server is None or not _lives(server):
        path.unlink(missing_ok=True)
        host = environment.get("SPARK_LOCAL_IP") or own_address()
        server = _shared(path, _start(host, host, os.getppid(), path.parent))
    return replace(config, limit_server=server)


def own_address() -> str:
    """Return the address from which this machine reaches others; 127.0.0.1 if it has no network."""
    for family, elsewhere in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return _LOOPBACK


def _addresses_of_driver() -> tuple[str, str]:
    """Return the address to listen at, and its name for executors: those of Spark's own driver."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:  # Spark Connect
        host = os.environ.get("SPARK_LOCAL_IP") or own_address()
        return host, host
    if str(context.master).startswith("local"):
        return _LOOPBACK, _LOOPBACK
    conf = context.getConf()
    host = (conf.get("spark.driver.host") or own_address()).strip("[]")
    return (conf.get("spark.driver.bindAddress") or host).strip("[]"), host


def _lives(server: LimitServer) -> bool:
    try:
        Conversation(server).close()
    except (OSError, LimitServerError):
        return False
    return True


def _start(bind: str, host: str, owner: int, folder: Path) -> LimitServer:
    """Start a server that listens at `bind`, and that tasks reach as `host`. It ends with the process `owner`, and with
    `folder`.
    """
    if os.name == "nt":
        raise ConfigError(f"{_OPTIONS} need a driver on Linux or macOS.")
    secret = secrets.token_hex(32)
    orders: dict[str, Any] = {"secret": secret, "host": bind, "owner": owner, "folder": str(folder)}
    answer, stdout = socket.socketpair()  # a pipe has no limit of time
    answer.settimeout(START_S)
    with answer:
        process = _run(stdout)
        assert process.stdin is not None
        assert process.stderr is not None
        with process.stdin, process.stderr:
            with suppress(BrokenPipeError):  # it has ended: stderr says why
                process.stdin.write(f"{json.dumps(orders)}\n")
                process.stdin.flush()
            port = _answer(process, answer)
            if not port:
                why = (process.stderr.read().strip().splitlines() or ["it gave no reason"])[-1]
                process.wait()
                raise LimitServerError(f"The server of the write limits did not start at {bind}: {why}")
    _started.append(process)
    return LimitServer(host, int(port), Secret(secret))


def _run(stdout: socket.socket) -> subprocess.Popen[str]:
    """Run the server, which gets `stdout`."""
    with stdout:
        return subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", _SERVER],
            stdin=subprocess.PIPE,
            stdout=stdout.fileno(),
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            cwd="/",
            start_new_session=True,
        )


def _answer(process: subprocess.Popen[str], answer: socket.socket) -> str:
    """Return the first line of the new server; empty if it has ended. Raises LimitServerError after START_S."""
    try:
        with answer.makefile() as lines:
            return lines.readline().strip()
    except TimeoutError:
        _kill(process)
        raise LimitServerError(
            f"The server of the write limits said nothing within {START_S:.0f} s. Its Python, {sys.executable}, may"
            " wait for a folder of sys.path that does not answer, such as one of a network."
        ) from None


def _end(pid: int, process: subprocess.Popen[str]) -> None:
    """End the server at the exit of the process `pid`. A fork of that process leaves it alone."""
    if os.getpid() == pid:
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a server, also one that is suspended: it has nothing to keep."""
    process.kill()
    process.wait()


def _shared(path: Path, server: LimitServer) -> LimitServer:
    """Write the new server into the file. If another planning worker was first, end the new one, and return that
    worker's. Raises LimitServerError if the file cannot be written, as on a full disk, and ends the new one.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump([server.host, server.port, server.secret.reveal()], file)
        os.link(new, path)  # fails if the file exists
    except FileExistsError:
        other = _named_in(path)
        if other is not None:
            _kill(_started.pop())
            return other
    except OSError as error:
        _kill(_started.pop())
        raise LimitServerError(
            f"The server of the write limits cannot be shared: a file in {path.parent}, a local directory of Spark,"
            f" cannot be written: {error.strerror or error}."
        ) from error
    finally:
        new.unlink(missing_ok=True)
    return server


def _named_in(path: Path) -> LimitServer | None:
    try:
        host, port, secret = json.loads(path.read_text())
        return LimitServer(host, port, Secret(secret))
    except (OSError, ValueError, TypeError):
        return None
