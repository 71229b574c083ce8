"""Puts the jars of a lock file on this machine: fetched once, verified on every use, safe for processes that fetch at
once.

The cache is a folder laid out like a Maven repository and shared by all locks. A jar enters it by an atomic rename
after its SHA-256 has been checked, so what lies there is whole; it is hashed again on every start (45 MB take about 30
ms).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.lock import KAFKA_LOCK, JarLock, LockedJar, sha256_of
from spark_kafka_sink.local.maven import Progress, download_jar, fetch_progress

Download = Callable[[str, Path, Progress], Path]
"""Takes a coordinate, an empty folder and where to report; gives the path of the jar that it put below the folder."""

_ATTEMPTS = 3
_PAUSE_S = 1.0


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """`SPARK_KAFKA_SINK_CACHE`, else `spark_kafka_sink` in the user's cache folder (XDG_CACHE_HOME or ~/.cache).

    Raises LocalBrokerError where `~` stands for nothing, as for a user id that the machine does not know.
    """
    chosen = environment.get("SPARK_KAFKA_SINK_CACHE")
    folder = Path(chosen or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "spark_kafka_sink"))
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:
        raise LocalBrokerError(
            f"The cache folder {folder} is nowhere: {error} Name another one by SPARK_KAFKA_SINK_CACHE."
        ) from error


def fetch_jars(
    lock_path: Path = KAFKA_LOCK,
    *,
    cache: Path | None = None,
    download: Download = download_jar,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Path]:
    """The paths of a lock's jars, in class path order, each with the locked SHA-256.

    Jars that are missing from the cache or damaged there are fetched first; with none missing no network is used.
    Raises LocalBrokerError if a jar cannot be fetched or comes with another SHA-256 than the lock's, or if Java could
    not find it there.
    """
    lock = JarLock.read(lock_path)
    cache = cache or cache_dir()
    if os.pathsep in str(cache):  # which nothing escapes in a class path
        raise LocalBrokerError(
            f"Java finds no jars in {cache}: there is a {os.pathsep!r} in its path. Name another one by"
            " SPARK_KAFKA_SINK_CACHE."
        )
    folder = cache / "jars"
    if _not_intact(lock, folder):
        with exclusive(cache, f"the {lock.name} jars"):
            # Another process may have fetched them while this one waited.
            if wanted := _not_intact(lock, folder):
                _fetch(lock, wanted, cache, folder, download, sleep)
    return [folder / jar.path for jar in lock.jars]


@contextmanager
def exclusive(cache: Path, what: str) -> Iterator[None]:
    """Hold the cache's lock, which goes with the process that holds it; say so on stderr if another process has it.

    Raises LocalBrokerError for an OSError, also for one of what is done meanwhile: a disk may be full by then.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"Waiting for another process that prepares {what} in {cache}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise LocalBrokerError(
            f"The cache folder {cache} cannot be written: {error}. Name another one by SPARK_KAFKA_SINK_CACHE."
        ) from error


def _not_intact(lock: JarLock, folder: Path) -> list[LockedJar]:
    return [jar for jar in lock.jars if not jar.is_intact(folder / jar.path)]


def _fetch(
    lock: JarLock,
    wanted: Sequence[LockedJar],
    cache: Path,
    folder: Path,
    download: Download,
    sleep: Callable[[float], None],
) -> None:
    for jar in wanted:
        if (folder / jar.path).exists():
            print(f"{folder / jar.path} is damaged (its SHA-256 is not the lock's): fetching it again", file=sys.stderr)
    size = sum(jar.size for jar in wanted)
    print(f"Fetching {len(wanted)} jars ({size / 1e6:.0f} MB) of the {lock.name} set into {folder}", file=sys.stderr)
    # Only the holder of the cache's lock makes such folders: one that is here was left by a process that was killed.
    for left in cache.glob("fetch-*"):
        shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as scratch,
        fetch_progress(lock.name, size) as progress,
    ):
        for jar in wanted:
            arrived = _download(jar, Path(scratch), progress, download, sleep)
            if not jar.is_intact(arrived):
                raise LocalBrokerError(
                    f"{jar.coordinate}: the jar that was fetched has {arrived.stat().st_size} bytes and SHA-256 "
                    f"{sha256_of(arrived)}; but the {lock.name} lock says {jar.size} bytes and {jar.sha256}. It was "
                    "not kept. Look at what answers for the Maven repository: a proxy, a mirror in jgo's configuration."
                )
            target = folder / jar.path
            target.parent.mkdir(parents=True, exist_ok=True)
            arrived.replace(target)


def _download(
    jar: LockedJar, scratch: Path, progress: Progress, download: Download, sleep: Callable[[float], None]
) -> Path:
    failures: list[Exception] = []
    while len(failures) < _ATTEMPTS:
        if failures:
            sleep(_PAUSE_S * len(failures))
        # A folder of its own: a download that broke off leaves half a jar, which jgo would take for a whole one.
        place = Path(tempfile.mkdtemp(dir=scratch))
        try:
            return download(jar.coordinate, place, progress)
        except (OSError, RuntimeError) as error:
            failures.append(error)
    raise LocalBrokerError(
        f"{jar.coordinate} cannot be fetched after {_ATTEMPTS} attempts: {failures[-1]}. The first start needs a way "
        "to Maven Central or a repository of jgo's configuration (HTTPS_PROXY is honoured); later ones do not."
    ) from failures[-1]
