"""Class data archives (JDK's AppCDS). A broker that maps its classes instead of parsing them starts in half the time.

An archive is made once for each Java and set of jars, by a broker that starts and stops for it. It stays in the cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.jars import exclusive, sha256_of
from spark_kafka_sink.local.jvm import Java, Jvm
from spark_kafka_sink.local.node import Node, new_cluster_id
from spark_kafka_sink.local.properties import NodeAddress, ReservedPort, server_properties
from spark_kafka_sink.local.watchdog import Watchdog

_TIMEOUT_S = 120.0
_ROOM = 128 << 20
"""Bytes that must be free. An archive has 50 million."""


def with_class_archive(jvm: Jvm, cache: Path) -> Jvm:
    """Return the same Jvm with an archive. If the cache has none for this Java and these jars, make it first.

    A Java that cannot make an archive gets an empty file as a note, and runs without. After another failure, such as a
    full disk, the next start tries again.
    """
    archive = cache / "class-archives" / f"{_fingerprint(jvm.java, jvm.jars)}.jsa"
    if not _is_intact(archive):
        if not os.access(cache, os.W_OK):  # another user filled it; the jars are enough
            return jvm
        with exclusive(cache, "the broker's classes"):
            if not _is_intact(archive):
                if archive.exists():
                    print(f"{archive} is damaged or has no checksum: making it again", file=sys.stderr)
                    archive.unlink()
                archive.parent.mkdir(exist_ok=True)
                _make(jvm, archive)
    return replace(jvm, archive=archive) if _is_intact(archive) and archive.stat().st_size else jvm


def drop_class_archive(archive: Path) -> str:
    """Drop an archive with which a JVM crashed, so that no JVM starts with it again. Return a text for the user.

    An empty file replaces it, as for a Java that cannot make one. Running JVMs keep their mapping.
    """
    note = archive.with_suffix(".dropped")
    try:
        note.touch()
        note.replace(archive)
        _checksum_file(archive).unlink(missing_ok=True)
    except OSError as error:
        return f"The JVM crashed with the class archive {archive}, which could not be dropped ({error}): delete it."
    return (
        f"The JVM crashed with the class archive {archive}. The archive is dropped, and the next start goes without it."
        " Delete the file to have it made again."
    )


def _is_intact(archive: Path) -> bool:
    """Return whether the archive has the SHA-256 and size in its checksum file: a JVM that maps a damaged one crashes.
    An empty file, the note of a Java that cannot make one, needs no checksum.
    """
    try:
        size = archive.stat().st_size
        return not size or _checksum_file(archive).read_text(encoding="ascii") == f"{sha256_of(archive)} {size}\n"
    except (OSError, UnicodeDecodeError):  # not there, or of another user who lets nobody read it
        return False


def _checksum_file(archive: Path) -> Path:
    return archive.with_suffix(".jsa.sha256")


def _fingerprint(java: Java, jars: Sequence[Path]) -> str:
    """Return a value that differs whenever a JVM would refuse the archive: by its build, or a jar's path or time."""
    launcher = java.path.resolve()
    parts = [java.version, str(launcher), str(launcher.stat().st_mtime_ns)]
    parts += [f"{jar} {jar.stat().st_mtime_ns}" for jar in jars]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _make(jvm: Jvm, archive: Path) -> None:
    print("Preparing the broker's classes for fast starts (once, some seconds)", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="spark-kafka-sink-"))
    watchdog = Watchdog(folder)
    port, controller_port = ReservedPort(), ReservedPort()
    fresh = archive.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    try:
        address = NodeAddress(1, port.number, controller_port.number)
        node = Node(address, folder, jvm, watchdog)
        deadline = time.monotonic() + _TIMEOUT_S
        node.write_files(server_properties(address, [address], node.log_dirs, {}))
        node.begin_format(new_cluster_id(), {})
        node.await_format(deadline)
        node.begin_start(write_archive=fresh)
        node.await_start(deadline)
        node.terminate()
        node.await_end(_TIMEOUT_S)
        if node.was_killed:  # it writes the archive at its end
            raise LocalBrokerError("Its JVM was killed while it wrote the archive.")
    except LocalBrokerError as error:
        print(f"No class archive with {jvm.java.path} {jvm.java.version}: {error}", file=sys.stderr)
        if _takes_the_option(jvm.java, fresh):
            return
    finally:
        watchdog.close()
        port.release()
        controller_port.release()
    is_made = fresh.exists() and fresh.stat().st_size
    if is_made or _has_room(fresh):
        fresh.touch()
        _checksum_file(archive).write_text(f"{sha256_of(fresh)} {fresh.stat().st_size}\n", encoding="ascii")
        fresh.replace(archive)


def _has_room(fresh: Path) -> bool:
    """Return whether the disk has room for an archive. On a full disk every Java fails, with the same exit code."""
    try:
        fresh.write_bytes(bytes(_ROOM))
    except OSError as error:
        print(f"No class archive: {error}", file=sys.stderr)
        return False
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _takes_the_option(java: Java, fresh: Path) -> bool:
    """Return whether this Java starts with the option for an archive. The archive it makes is deleted."""
    command: list[str | Path] = [java.path, f"-XX:ArchiveClassesAtExit={fresh}", "-version"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return True  # says nothing about the option, and may pass
    finally:
        fresh.unlink(missing_ok=True)
