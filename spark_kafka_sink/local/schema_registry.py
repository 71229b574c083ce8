"""SchemaRegistry: a real schema registry on this machine, for tests. Not thread-safe.

It is Apicurio Registry, which speaks the API of Confluent's registry besides its own, from its published archive (109
MB, fetched by the first start into the cache of the broker's jars). It keeps schemas in memory. Needs Java 17.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.jars import KAFKA_LOCK, JarLock, cache_dir, exclusive, fetch_jars
from spark_kafka_sink.local.jvm import TUNINGS, Java, find_java
from spark_kafka_sink.local.properties import HOST, ReservedPort
from spark_kafka_sink.local.watchdog import Watchdog

APICURIO_LOCK = KAFKA_LOCK.with_name("apicurio.lock.json")
"""The one archive with the registry and all its dependencies."""
_API = "/apis/ccompat/v7"
_POLL_S = 0.1
_TAIL_LINES = 25
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxy of http_proxy, which does not lead to the loopback interface."""


class SchemaRegistry:
    """Apicurio Registry 3.0.9 on a free port of the loopback interface. As a context manager it starts and stops.

    The JVM ends with this process, however it ends. `start_timeout_s`: the limit for the start, without download.
    Raises LocalBrokerError.
    """

    def __init__(self, *, start_timeout_s: float = 300.0) -> None:
        self._start_timeout_s = start_timeout_s
        self._port: ReservedPort | None = None
        self._watchdog: Watchdog | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._process_id = os.getpid()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The address for schema.registry.url."""
        if self._port is None:
            raise LocalBrokerError("The schema registry is not started: call start() or use it as a context manager.")
        return f"http://{HOST}:{self._port.number}{_API}"

    def start(self) -> None:
        """Fetch the archive if it is missing, start the JVM, and wait until it answers."""
        if self._port is not None:
            raise LocalBrokerError("This schema registry is started already.")
        self._process_id = os.getpid()
        java, jar = find_java(), _unpacked_jar()  # first: a failed download leaves nothing
        try:
            folder = Path(tempfile.mkdtemp(prefix="spark-kafka-sink-registry-"))
            self._watchdog = Watchdog(removed_folder=folder)
            self._port = ReservedPort()
            log_file = folder / "registry.log"
            with log_file.open("ab") as log:
                command = _command(java, jar, folder, self._port.number)
                self._process = self._watchdog.spawn(command, folder=folder, output=log)
            self._await_answer(log_file, time.monotonic() + self._start_timeout_s)
        except OSError as error:  # such as a full disk
            self.stop()
            raise LocalBrokerError(f"The schema registry's files cannot be written: {error}") from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the JVM and remove its files. A forked child does nothing, because the JVM belongs to its parent."""
        if os.getpid() != self._process_id:
            return
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._port is not None:
            self._port.release()
            self._port = None

    def _await_answer(self, log_file: Path, deadline: float) -> None:
        assert self._process is not None
        while not _answers(f"{self.url}/subjects"):
            what = "ended while it started" if self._process.poll() is not None else "did not start in time"
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise LocalBrokerError(f"The schema registry {what}. Its log ends:\n{_tail(log_file)}")
            time.sleep(_POLL_S)


def _command(java: Java, jar: Path, folder: Path, port: int) -> list[str | Path]:
    """Return the command of the JVM. Temporary files and crash dumps are in `folder`."""
    return [
        java.path,
        *TUNINGS["start"],
        "-XX:-UsePerfData",
        f"-Djava.io.tmpdir={folder}",
        f"-XX:ErrorFile={folder / 'hs_err.log'}",
        f"-Dquarkus.http.host={HOST}",
        f"-Dquarkus.http.port={port}",
        "-jar",
        jar,
    ]


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):  # an error status is an OSError
        return False


def _tail(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (it printed nothing)"


def _unpacked_jar() -> Path:
    """Return the jar to run. The archive is unpacked once, into a folder that appears by a rename."""
    cache = cache_dir()
    (locked,) = JarLock.read(APICURIO_LOCK).jars
    folder = cache / "unpacked" / f"apicurio-{locked.sha256[:16]}"
    jar = folder / f"apicurio-registry-app-{locked.coordinate.split(':')[2]}-runner.jar"
    if jar.exists():
        return jar
    (archive,) = fetch_jars(APICURIO_LOCK, cache=cache)
    with exclusive(cache, "the schema registry"):
        if not jar.exists():  # another process may have unpacked it while this one waited
            folder.parent.mkdir(exist_ok=True)
            for left in folder.parent.glob("new-*"):  # of a process that was killed; another one would have the lock
                shutil.rmtree(left, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="new-"))
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(scratch, filter="data")
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return jar
