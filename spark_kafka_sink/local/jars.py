"""The jars of a broker: lock files that name them, and a cache that holds them.

Each jar is fetched once and verified on every use. Several processes may fetch at the same time.

A lock file says which jars make up a set, by Maven coordinate, size and SHA-256. It is JSON beside this module
(`kafka.lock.json`), written by `python -m spark_kafka_sink.local.relock`. jgo resolves coordinates and downloads jars,
from its own repositories: its default and those of the user's jgo configuration file. It is imported only when a jar
has to be fetched.

The cache is a folder laid out like a Maven repository and shared by all locks. A jar enters it by an atomic rename
after its SHA-256 has been checked, so each jar there is whole. It is hashed again on every start (45 MB take about 30
ms).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_kafka_sink.common.errors import LocalBrokerError

if TYPE_CHECKING:
    from jgo.maven import MavenContext


KAFKA_LOCK = Path(__file__).with_name("kafka.lock.json")
"""Apache Kafka's server with its runtime dependencies and the binding that lets it write a log."""


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parts_of(coordinate: str) -> tuple[str, str, str, str, str]:
    """Return group, artifact, version, packaging and classifier of a locked coordinate."""
    group, artifact, version, *rest = coordinate.split(":")
    packaging, classifier = rest or ("jar", "")
    return group, artifact, version, packaging, classifier


@dataclass(frozen=True, slots=True)
class LockedJar:
    coordinate: str
    """`group:artifact:version`, and for a file that is no jar `group:artifact:version:tar.gz:classifier`."""
    sha256: str
    size: int
    """Bytes."""

    @property
    def path(self) -> Path:
        """The jar's path in a Maven repository."""
        group, artifact, version, packaging, classifier = parts_of(self.coordinate)
        name = "-".join(filter(None, (artifact, version, classifier)))
        return Path(*group.split("."), artifact, version, f"{name}.{packaging}")

    def is_intact(self, path: Path) -> bool:
        """Return whether `path` holds exactly the locked bytes. A file that cannot be read counts as missing."""
        try:
            return path.is_file() and path.stat().st_size == self.size and sha256_of(path) == self.sha256
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class JarLock:
    name: str
    """The lock file's name without its endings. Messages use it for the set."""
    roots: tuple[str, ...]
    """The requested coordinates."""
    with_dependencies: bool
    """Whether the set includes the roots' runtime dependencies."""
    jars: tuple[LockedJar, ...]
    """In class path order: the roots first."""

    @property
    def size(self) -> int:
        """Bytes of all jars."""
        return sum(jar.size for jar in self.jars)

    @classmethod
    def read(cls, path: Path) -> JarLock:
        """Read a lock file. Raises LocalBrokerError, naming the file, if it is missing or is not a lock."""
        remedy = "Restore it from the repository, or make it again with `python -m spark_kafka_sink.local.relock`."
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            jars = tuple(LockedJar(jar["coordinate"], jar["sha256"], int(jar["size"])) for jar in content["jars"])
            lock = cls(lock_name(path), tuple(content["roots"]), bool(content["with_dependencies"]), jars)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LocalBrokerError(f"{path} is not a readable lock file ({error!r}). {remedy}") from error
        for jar in jars:
            if jar.coordinate.count(":") not in {2, 4} or len(jar.sha256) != 64:
                raise LocalBrokerError(f"{path}: {jar} is not `group:artifact:version` with a SHA-256. {remedy}")
        if not jars:
            raise LocalBrokerError(f"{path} lists no jar. {remedy}")
        return lock

    def write(self, path: Path) -> None:
        content = {
            "roots": list(self.roots),
            "with_dependencies": self.with_dependencies,
            "jars": [asdict(jar) for jar in self.jars],
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def lock_name(path: Path) -> str:
    """`kafka` of `kafka.lock.json`."""
    return path.name.removesuffix(".lock.json")


# ---- what jgo does ---------------------------------------------------------------------------------------------------

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Takes a file's name and size in bytes. Returns a context, whose value takes the number of bytes as they arrive."""

_TIMEOUT_S = 60


def _context(folder: Path, progress: Progress | None = None) -> MavenContext:
    try:
        from jgo.config import GlobalSettings
        from jgo.maven import MavenContext, PythonResolver
    except ModuleNotFoundError as error:
        raise LocalBrokerError(
            f"Jars have to be fetched and {error.name} is not installed: pip install 'spark-kafka-sink[local]'."
        ) from error
    context = MavenContext(resolver=PythonResolver(progress_callback=progress), repo_cache=folder, timeout=_TIMEOUT_S)
    context.remote_repos.update(GlobalSettings.load().repositories)
    return context


def download_jar(coordinate: str, folder: Path, progress: Progress | None = None) -> Path:
    """Download one jar, without its dependencies, below `folder`. Raises OSError or RuntimeError, as jgo does."""
    group, artifact, version, packaging, classifier = parts_of(coordinate)
    component = _context(folder, progress).project(group, artifact).at_version(version)
    return component.artifact(classifier, packaging).resolve()


def resolve_jars(roots: Iterable[str], *, with_dependencies: bool, folder: Path) -> list[tuple[str, Path]]:
    """Download the roots, and their runtime dependencies if asked for, below `folder`. Return coordinates and files.

    The roots are resolved as the dependencies of a Maven project. By default jgo would import each root as a bill of
    materials, and one root's parent would decide versions of another: Log4j's parent manages an old kafka-clients.
    """
    if not with_dependencies:
        return [(root, download_jar(root, folder)) for root in roots]
    context = _context(folder)
    inputs, needed = context.resolver.resolve([context.create_dependency(f"{root}!") for root in roots])
    dependencies = [*inputs, *needed]
    return [(f"{each.groupId}:{each.artifactId}:{each.version}", each.artifact.resolve()) for each in dependencies]


@contextmanager
def fetch_progress(title: str, total_bytes: int) -> Iterator[Progress]:
    """Show one bar on stderr for a set of jars, or a line at the end if stderr is not a terminal."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars
    except ModuleNotFoundError as error:
        raise LocalBrokerError(
            f"Jars have to be fetched and {error.name} is not installed: pip install 'spark-kafka-sink[local]'."
        ) from error
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total_bytes)

        @contextmanager
        def file_progress(name: str, _size: int) -> Iterator[Callable[[int], None]]:
            bars.update(task, description=f"{title}: {name}")
            yield lambda count: bars.update(task, advance=count)

        yield file_progress
        bars.update(task, description=title)


# ---- the cache -------------------------------------------------------------------------------------------------------

Download = Callable[[str, Path, Progress], Path]
"""Takes a coordinate, an empty folder and a progress. Puts the jar below the folder, and returns its path."""

_ATTEMPTS = 3
_PAUSE_S = 1.0


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return `SPARK_KAFKA_SINK_CACHE`, else `spark_kafka_sink` in the user's cache folder (XDG_CACHE_HOME or ~/.cache).

    Raises LocalBrokerError if there is no home folder, as for a user id that the machine does not know.
    """
    chosen = environment.get("SPARK_KAFKA_SINK_CACHE")
    folder = Path(chosen or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "spark_kafka_sink"))
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:
        raise LocalBrokerError(
            f"The cache folder {folder} does not exist: {error} Set SPARK_KAFKA_SINK_CACHE to another folder."
        ) from error


def fetch_jars(
    lock_path: Path = KAFKA_LOCK,
    *,
    cache: Path | None = None,
    download: Download = download_jar,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Path]:
    """Return the paths of a lock's jars, in class path order. Each jar has the locked SHA-256.

    Jars that are missing or damaged are fetched first. If there are none, the network is not used. Raises
    LocalBrokerError if a jar cannot be fetched or has another SHA-256, or if Java could not find it in the cache.
    """
    lock = JarLock.read(lock_path)
    cache = cache or cache_dir()
    if os.pathsep in str(cache):  # a class path cannot escape it
        raise LocalBrokerError(
            f"Java finds no jars in {cache}: there is a {os.pathsep!r} in its path. Name another one by"
            " SPARK_KAFKA_SINK_CACHE."
        )
    folder = cache / "jars"
    if _not_intact(lock, folder):
        with exclusive(cache, f"the {lock.name} jars"):
            # Another process may have fetched them while this one waited.
            if missing := _not_intact(lock, folder):
                _fetch(lock, missing, cache, folder, download, sleep)
    return [folder / jar.path for jar in lock.jars]


@contextmanager
def exclusive(cache: Path, what: str) -> Iterator[None]:
    """Hold the cache's lock, which a process loses when it ends. Say so on stderr if another process holds it.

    Raises LocalBrokerError for each OSError, also of the work under the lock, such as a full disk.
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
            f"The cache folder {cache} cannot be written: {error}. Set SPARK_KAFKA_SINK_CACHE to another folder."
        ) from error


def _not_intact(lock: JarLock, folder: Path) -> list[LockedJar]:
    return [jar for jar in lock.jars if not jar.is_intact(folder / jar.path)]


def _fetch(
    lock: JarLock,
    missing: Sequence[LockedJar],
    cache: Path,
    folder: Path,
    download: Download,
    sleep: Callable[[float], None],
) -> None:
    for jar in missing:
        if (folder / jar.path).exists():
            print(f"{folder / jar.path} is damaged (its SHA-256 is not the lock's): fetching it again", file=sys.stderr)
    size = sum(jar.size for jar in missing)
    print(f"Fetching {len(missing)} jars ({size / 1e6:.0f} MB) of the {lock.name} set into {folder}", file=sys.stderr)
    # Only the holder of the cache's lock makes such folders. A killed process left those that exist now.
    for left in cache.glob("fetch-*"):
        shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as scratch,
        fetch_progress(lock.name, size) as progress,
    ):
        for jar in missing:
            arrived = _download(jar, Path(scratch), progress, download, sleep)
            if not jar.is_intact(arrived):
                raise LocalBrokerError(
                    f"{jar.coordinate}: the jar that was fetched has {arrived.stat().st_size} bytes and SHA-256 "
                    f"{sha256_of(arrived)}; but the {lock.name} lock says {jar.size} bytes and {jar.sha256}. It was "
                    "not kept. Check what answers for the Maven repository: a proxy, a mirror in jgo's configuration."
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
        # A new folder for each attempt: jgo would take half a jar of an interrupted download for a whole one.
        place = Path(tempfile.mkdtemp(dir=scratch))
        try:
            return download(jar.coordinate, place, progress)
        except (OSError, RuntimeError) as error:
            failures.append(error)
    raise LocalBrokerError(
        f"{jar.coordinate} cannot be fetched after {_ATTEMPTS} attempts: {failures[-1]}. The first start needs "
        "access to Maven Central or a repository of jgo's configuration (HTTPS_PROXY is used); later starts do not."
    ) from failures[-1]
