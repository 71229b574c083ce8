"""Lock files: which jars make up a set, by Maven coordinate, size and SHA-256.

A lock is JSON beside this module (`kafka.lock.json`) and is written by `python -m spark_kafka_sink.local.relock`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spark_kafka_sink.common.errors import LocalBrokerError

KAFKA_LOCK = Path(__file__).with_name("kafka.lock.json")
"""Apache Kafka's server with its runtime dependencies and the binding that lets it write a log."""


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class LockedJar:
    coordinate: str
    """`group:artifact:version`."""
    sha256: str
    size: int
    """Bytes."""

    @property
    def path(self) -> Path:
        """Where the jar lies, relative to a folder laid out as Maven lays out a repository."""
        group, artifact, version = self.coordinate.split(":")
        return Path(*group.split("."), artifact, version, f"{artifact}-{version}.jar")

    def is_intact(self, path: Path) -> bool:
        """Whether `path` holds exactly the locked bytes."""
        return path.is_file() and path.stat().st_size == self.size and sha256_of(path) == self.sha256


@dataclass(frozen=True, slots=True)
class JarLock:
    name: str
    """The lock file's name without its endings; messages speak of the set by it."""
    roots: tuple[str, ...]
    """The coordinates that were asked for."""
    with_dependencies: bool
    """Whether the roots' runtime dependencies belong to the set."""
    jars: tuple[LockedJar, ...]
    """In class path order: the roots first."""

    @property
    def size(self) -> int:
        """Bytes of all jars."""
        return sum(jar.size for jar in self.jars)

    @classmethod
    def read(cls, path: Path) -> JarLock:
        """Raises LocalBrokerError, naming the file, if it is missing or is not a lock."""
        remedy = "Restore it from the repository or make it anew with `python -m spark_kafka_sink.local.relock`."
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            jars = tuple(LockedJar(jar["coordinate"], jar["sha256"], int(jar["size"])) for jar in content["jars"])
            lock = cls(lock_name(path), tuple(content["roots"]), bool(content["with_dependencies"]), jars)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LocalBrokerError(f"{path} is not a readable lock file ({error!r}). {remedy}") from error
        for jar in jars:
            if jar.coordinate.count(":") != 2 or len(jar.sha256) != 64:
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
