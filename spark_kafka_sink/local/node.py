"""One node of a cluster: its folder, its files and its JVM. Not thread-safe."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.admin import Admin
from spark_kafka_sink.local.jvm import SERVER_CLASS, STORAGE_TOOL_CLASS, Jvm, KafkaRelease
from spark_kafka_sink.local.properties import NodeAddress, render
from spark_kafka_sink.local.watchdog import Watchdog

_STARTED_LINE = "Kafka Server started"
_POLL_S = 0.02
_STOP_TIMEOUT_S = 30.0
_TAIL_LINES = 25
_CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
"""Exit codes of a JVM that crashed. SIGABRT: it could still write its hs_err.log."""


def new_cluster_id() -> str:
    """Return 22 characters, as Kafka's Uuid prints itself. A leading dash would look like an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


class Node:
    """A broker and controller in one JVM. It can be stopped and started again with the same ports and data."""

    def __init__(self, address: NodeAddress, folder: Path, jvm: Jvm, watchdog: Watchdog, log_dirs: int = 1) -> None:
        self.address = address
        self.log_dirs = tuple(folder / name for name in ("data", *(f"data-{n}" for n in range(2, log_dirs + 1))))
        self.folder = folder
        self.log_file = folder / "server.log"
        """All output of the node's JVMs, including Kafka's log."""
        self._jvm = jvm
        self._watchdog = watchdog
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: int | None = None
        self._log_start = 0
        self._suspended = False

    @property
    def data(self) -> Path:
        return self.log_dirs[0]

    @property
    def cluster_id(self) -> str | None:
        """The cluster id of the data folder; None before it is formatted."""
        with contextlib.suppress(FileNotFoundError):
            for line in (self.data / "meta.properties").read_text(encoding="utf-8").splitlines():
                if line.startswith("cluster.id="):
                    return line.partition("=")[2]
        return None

    @property
    def running(self) -> bool:
        """Whether the JVM exists, suspended or not."""
        self._reap()
        return self._process is not None

    @property
    def has_crashed(self) -> bool:
        """Whether the last JVM crashed."""
        return not self.running and self._exit_code in _CRASHES

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the last JVM, a crash included. One that shuts down in order exits by itself (143)."""
        return not self.running and self._exit_code is not None and self._exit_code < 0

    @property
    def suspended(self) -> bool:
        return self.running and self._suspended

    @property
    def pid(self) -> int:
        """The JVM's process id."""
        return self._require_process().pid

    def write_files(self, properties: Mapping[str, str]) -> None:
        """Make the folder and its configuration."""
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        configuration = self.folder / "server.properties"  # holds the passwords of PLAIN
        configuration.touch(0o600)
        configuration.chmod(0o600)
        configuration.write_text(render(properties), encoding="ascii")
        self._write_log_configuration()

    def upgrade(self, release: KafkaRelease, jars: Sequence[Path]) -> None:
        """Run the next JVMs with another release, without a class archive."""
        self._jvm = replace(self._jvm, release=release, jars=[*jars], archive=None)
        self._write_log_configuration()

    def _write_log_configuration(self) -> None:
        release = self._jvm.release
        (self.folder / release.log_file).write_text(release.log_configuration, encoding="ascii")

    def begin_format(self, cluster_id: str, features: Mapping[str, int], more: Sequence[str] = ()) -> None:
        """Start Kafka's tool that formats the data folder, with `more` arguments. `await_format` waits for it."""
        levels = [part for name, level in features.items() for part in ("--feature", f"{name}={level}")]
        properties = str(self.folder / "server.properties")
        self._launch(
            self._jvm.command(
                STORAGE_TOOL_CLASS,
                "format",
                "--cluster-id",
                cluster_id,
                "--config",
                properties,
                *levels,
                *more,
                folder=self.folder,
            )
        )

    def await_format(self, deadline: float) -> None:
        """Wait for the tool. Raises LocalBrokerError with its output if it fails."""
        process = self._require_process()
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise LocalBrokerError(
                f"Formatting the data folder of node {self.address.node_id} takes too long."
            ) from None
        self._await_end()
        if code != 0:
            raise LocalBrokerError(
                f"The data folder of node {self.address.node_id} cannot be formatted:\n{self.log_tail()}"
            )

    def forget_archive(self) -> None:
        """Start the next JVMs without a class archive."""
        self._jvm = replace(self._jvm, archive=None)

    def begin_start(self, *, write_archive: Path | None = None) -> None:
        """Start the broker's JVM; `await_start` waits for it."""
        if self.running:
            raise LocalBrokerError(f"Node {self.address.node_id} runs already.")
        properties = str(self.folder / "server.properties")
        self._launch(self._jvm.command(SERVER_CLASS, properties, folder=self.folder, write_archive=write_archive))

    def await_start(self, deadline: float) -> None:
        """Wait until the broker has logged its start and answers as a live member of its cluster.

        `deadline` is a value of time.monotonic. Raises LocalBrokerError with the end of the log if the JVM ends or the
        deadline passes.
        """
        self._await(self._is_up, "did not start", deadline)

    def await_members(self, members: set[int], deadline: float) -> None:
        """Wait, as `await_start` does, until the broker considers exactly these members alive."""
        self._await(lambda: self._living() == members, f"does not see the brokers {sorted(members)}", deadline)

    def terminate(self) -> None:
        """Ask the broker to shut down in order (SIGTERM); `await_end` waits for it."""
        self.resume()
        self._require_process().send_signal(signal.SIGTERM)

    def await_end(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Wait for a broker that shuts down. Kill it after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._require_process().wait(timeout_s)
        if self.running:
            self.kill()

    def kill(self) -> None:
        """Kill the JVM (SIGKILL), even if it is suspended, and wait for its end."""
        self._require_process().kill()
        self._await_end()

    def suspend(self) -> None:
        """Suspend the JVM (SIGSTOP): connections stay open and nothing answers. Returns when all threads stopped."""
        process = self._require_process()
        if self._suspended:  # the kernel reports a stop only once
            return
        process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):  # it ended before
            os.waitpid(process.pid, os.WUNTRACED)
        self._suspended = True

    def resume(self) -> None:
        """Resume the JVM (SIGCONT)."""
        self._require_process().send_signal(signal.SIGCONT)
        self._suspended = False

    def log_tail(self) -> str:
        """Return the last lines of the log since the last start of the JVM."""
        lines = self._log_since_start().splitlines()
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (it printed nothing)"

    def _launch(self, command: list[str | Path]) -> None:
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._process = self._watchdog.spawn(command, folder=self.folder, output=log)
        self._suspended, self._exit_code = False, None

    def _await_end(self) -> None:
        self._require_process().wait()
        self._reap()

    def _reap(self) -> None:
        if self._process is not None and (code := self._process.poll()) is not None:
            self._watchdog.forget(self._process.pid)
            self._exit_code = code
            self._process = None

    def _await(self, condition: Callable[[], bool], complaint: str, deadline: float) -> None:
        while not condition():
            if not self.running:
                raise LocalBrokerError(
                    f"Node {self.address.node_id} ended while it started. Its log ends:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise LocalBrokerError(
                    f"Node {self.address.node_id} {complaint} in time. Its log ends:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def _is_up(self) -> bool:
        return _STARTED_LINE in self._log_since_start() and self.address.node_id in self._living()

    def _living(self) -> set[int]:
        """Return the brokers that it considers alive; none while it does not answer."""
        server = self.address.bootstrap_server
        with contextlib.suppress(OSError):
            return Admin(server).broker_ids(server)
        return set()

    def _log_since_start(self) -> str:
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _require_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LocalBrokerError(f"Node {self.address.node_id} does not run.")
        return self._process
