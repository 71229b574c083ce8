"""The command that makes a lock file again: `python -m spark_kafka_sink.local.relock kafka`.

Without coordinates it resolves the lock's roots again. Coordinates become the new roots:

    ... relock kafka org.apache.kafka:kafka_2.13:4.3.1 org.apache.logging.log4j:log4j-slf4j-impl:2.25.4

    ... relock kafka-3.9 org.apache.kafka:kafka_2.13:3.9.1 org.slf4j:slf4j-reload4j:1.7.36

    ... relock --no-dependencies some-jars GROUP:ARTIFACT:VERSION ...

    ... relock --no-dependencies apicurio io.apicurio:apicurio-registry-app:3.0.9:tar.gz:all
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.common.texts import exit_code_of
from spark_kafka_sink.local.jars import KAFKA_LOCK, JarLock, LockedJar, resolve_jars, sha256_of


def make_lock(name: str, roots: Sequence[str], *, with_dependencies: bool) -> JarLock:
    """Resolve the roots, download all jars into a temporary folder, and return a lock with their sizes and SHA-256."""
    with tempfile.TemporaryDirectory() as folder:
        resolved = resolve_jars(roots, with_dependencies=with_dependencies, folder=Path(folder))
        jars = tuple(LockedJar(coordinate, sha256_of(path), path.stat().st_size) for coordinate, path in resolved)
    return JarLock(name, tuple(roots), with_dependencies, jars)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m spark_kafka_sink.local.relock", description="Make a lock file again."
    )
    parser.add_argument("name", help="the lock's name: NAME.lock.json beside this module")
    parser.add_argument(
        "roots", nargs="*", metavar="GROUP:ARTIFACT:VERSION", help="the jars that the set is for; default: as locked"
    )
    parser.add_argument("--no-dependencies", action="store_true", help="lock only the named jars")
    chosen = parser.parse_args(arguments)
    path = KAFKA_LOCK.with_name(f"{chosen.name}.lock.json")
    try:
        if chosen.roots:
            roots, with_dependencies = tuple(chosen.roots), not chosen.no_dependencies
        else:
            locked = JarLock.read(path)
            roots, with_dependencies = locked.roots, locked.with_dependencies
        lock = make_lock(chosen.name, roots, with_dependencies=with_dependencies)
        lock.write(path)
    except (LocalBrokerError, OSError, RuntimeError) as error:
        print(f"{chosen.name}: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {len(lock.jars)} jars, {lock.size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
