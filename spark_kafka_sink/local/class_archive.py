"""Class data archives (JDK's AppCDS): a broker starts in about half the time when its classes are mapped instead of
parsed.

Made once per Java and set of jars, by a broker of its own that starts and stops; kept in the cache.
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
"""Bytes. An archive takes 50 million."""


def with_class_archive(jvm: Jvm, cache: Path) -> Jvm:
    """The same Jvm with an archive, which is made first if the cache has none for this Java and these jars.

    A Java that cannot make one is noted by an empty file and goes without. What failed for another reason, as a full
    disk, is tried again at the next start.
    """
    archive = cache / "class-archives" / f"{_fingerprint(jvm.java, jvm.jars)}.jsa"
    if not _is_intact(archive):
        if not os.access(cache, os.W_OK):  # filled by somebody else; its jars are enough
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
    """Let no JVM start with this archive again, since one crashed with it; return what to tell the user.

    An empty file stays in its place, as for a Java that makes none. Running JVMs keep what they have mapped.
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
    """Whether the archive has the SHA-256 and size that were written beside it: a JVM that maps a damaged one crashes.
    An empty file, the note of a Java that makes none, needs no checksum.
    """
    try:
        size = archive.stat().st_size
        return not size or _checksum_file(archive).read_text(encoding="ascii") == f"{sha256_of(archive)} {size}\n"
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _checksum_file(archive: Path) -> Path:
    return archive.with_suffix(".jsa.sha256")


def _fingerprint(java: Java, jars: Sequence[Path]) -> str:
    """A new one for every change that makes a JVM refuse an archive: its own build, and the jars' paths and times."""
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
    """Whether it is not for want of disk that there is no archive: any Java fails then, with the same exit code."""
    try:
        fresh.write_bytes(bytes(_ROOM))
    except OSError as error:
        print(f"No class archive: {error}", file=sys.stderr)
        return False
    finally:
        fresh.unlink(missing_ok=True)
    return True


def _takes_the_option(java: Java, fresh: Path) -> bool:
    """Whether this Java starts when it is asked for an archive, which is then one of nothing, and is not kept."""
    command: list[str | Path] = [java.path, f"-XX:ArchiveClassesAtExit={fresh}", "-version"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return True  # it says nothing of the option, and may pass
    finally:
        fresh.unlink(missing_ok=True)
