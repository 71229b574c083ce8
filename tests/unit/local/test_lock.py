"""Lock files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.lock import JarLock, LockedJar

JAR = LockedJar("org.example:thing_2.13:1.0", hashlib.sha256(b"bytes").hexdigest(), 5)


def test_a_lock_that_is_written_is_read_back_equal(tmp_path: Path) -> None:
    lock = JarLock("things", ("org.example:thing_2.13:1.0",), False, (JAR,))
    lock.write(tmp_path / "things.lock.json")
    assert JarLock.read(tmp_path / "things.lock.json") == lock


def test_a_jar_lies_where_maven_would_put_it() -> None:
    assert JAR.path == Path("org/example/thing_2.13/1.0/thing_2.13-1.0.jar")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "not a readable lock file"),
        ("{", "not a readable lock file"),
        ("[]", "not a readable lock file"),
        ({"roots": [], "with_dependencies": True}, "not a readable lock file"),
        ({"roots": [], "with_dependencies": True, "jars": []}, "lists no jar"),
        (
            {"roots": [], "with_dependencies": True, "jars": [{"coordinate": "a:b", "sha256": "0" * 64, "size": 1}]},
            "group:artifact:version",
        ),
        (
            {"roots": [], "with_dependencies": True, "jars": [{"coordinate": "a:b:1", "sha256": "0", "size": 1}]},
            "SHA-256",
        ),
    ],
)
def test_what_is_no_lock_is_refused_by_the_files_name(tmp_path: Path, content: object, complaint: str) -> None:
    path = tmp_path / "things.lock.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(LocalBrokerError, match=rf"things\.lock\.json.*{complaint}"):
        JarLock.read(path)


@pytest.mark.parametrize("content", [b"Bytes", b"bytes!", b"", None])
def test_a_jar_is_intact_only_with_the_locked_bytes(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "thing.jar"
    path.write_bytes(b"bytes")
    assert JAR.is_intact(path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert not JAR.is_intact(path)
