"""What is asked of jgo: resolve coordinates, download one jar. The only module that imports it, and only when
something is to be fetched.

The repositories are jgo's own: its default and those of the user's jgo configuration file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spark_kafka_sink.common.errors import LocalBrokerError

if TYPE_CHECKING:
    from jgo.maven import MavenContext

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Called with a file's name and size in bytes; gives a context that takes the count of bytes as they arrive."""

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
    return _context(folder, progress).create_dependency(coordinate).artifact.resolve()


def resolve_jars(roots: Iterable[str], *, with_dependencies: bool, folder: Path) -> list[tuple[str, Path]]:
    """Coordinates and files of the roots, then (if asked for) of all they need at run time, downloaded below `folder`.

    The roots are resolved as Maven resolves a project's dependencies. jgo would otherwise import every root as a bill
    of materials, and one root's parent would then decide another's versions (Log4j's parent manages an old
    kafka-clients).
    """
    context = _context(folder)
    dependencies = [context.create_dependency(f"{root}!") for root in roots]
    if with_dependencies:
        inputs, needed = context.resolver.resolve(dependencies)
        dependencies = [*inputs, *needed]
    return [(f"{each.groupId}:{each.artifactId}:{each.version}", each.artifact.resolve()) for each in dependencies]


@contextmanager
def fetch_progress(title: str, total_bytes: int) -> Iterator[Progress]:
    """One bar on stderr for a whole set of jars; where stderr is no terminal, a line at the end."""
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
