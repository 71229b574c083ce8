"""The embedded schema registry without its archive: a start that fails says why, and leaves nothing."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import schema_registry
from spark_kafka_sink.local.jars import JarLock, LockedJar
from spark_kafka_sink.local.schema_registry import SchemaRegistry

COORDINATE = "org.example:apicurio-registry-app:1.0:tar.gz:all"


@pytest.fixture
def java_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a locked archive, and a Java that ends at once. Return the cache."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("apicurio-registry-app-1.0-runner.jar"))
    archive = LockedJar(COORDINATE, hashlib.sha256(content.getvalue()).hexdigest(), len(content.getvalue()))
    cache = tmp_path / "cache"
    (cache / "jars" / archive.path).parent.mkdir(parents=True)
    (cache / "jars" / archive.path).write_bytes(content.getvalue())
    JarLock("apicurio", (COORDINATE,), False, (archive,)).write(tmp_path / "apicurio.lock.json")
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(
        "#!/bin/sh\n"
        'case $1 in -version) echo "openjdk version \\"17.0.1\\"" >&2; exit 0 ;; esac\n'
        'for last; do :; done; echo "cannot run $last"; exit 1\n'
    )
    java.chmod(0o755)
    monkeypatch.setattr(schema_registry, "APICURIO_LOCK", tmp_path / "apicurio.lock.json")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("SPARK_KAFKA_SINK_CACHE", str(cache))
    return cache


def test_start_that_fails_shows_the_log_and_leaves_nothing(
    java_that_fails: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    left_by_a_kill = java_that_fails / "unpacked" / "new-12345"
    left_by_a_kill.mkdir(parents=True)
    registry = SchemaRegistry()
    for _ in range(2):
        with pytest.raises(
            LocalBrokerError, match=r"ended while it started\. Its log ends:\n  cannot run .*-runner\.jar$"
        ):
            registry.start()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert [each.name for each in (java_that_fails / "unpacked").iterdir()] != []
    assert not list((java_that_fails / "unpacked").glob("new-*"))


def test_a_start_that_fails_to_fetch_leaves_nothing(
    java_that_fails: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: a process, a folder and a port were left, and the next start said that the registry was started already."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))

    def refuse(*_: object, **__: object) -> list[Path]:
        raise LocalBrokerError("no network")

    monkeypatch.setattr(schema_registry, "fetch_jars", refuse)
    registry = SchemaRegistry()
    for _ in range(2):
        with pytest.raises(LocalBrokerError, match="no network"):
            registry.start()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_full_disk_at_the_start_leaves_nothing(
    java_that_fails: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: it was an OSError, which the pytest plugin and users of LocalBrokerError do not expect."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    open_file = Path.open

    def full(path: Path, *arguments: str, **named: str) -> object:
        if path.name == "registry.log":
            raise OSError(28, "No space left on device")
        return open_file(path, *arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    registry = SchemaRegistry()
    for _ in range(2):
        with pytest.raises(LocalBrokerError, match=r"files cannot be written: .*No space left on device"):
            registry.start()
    assert list((tmp_path / "temporary").iterdir()) == []


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Listen, and give this answer to the first connection. Yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4_096)
                connection.sendall(answer)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/subjects"
        server.join(10)


@pytest.mark.parametrize(
    ("answer", "is_good"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", True),
        (b"HTTP/1.1 503 Not yet\r\nContent-Length: 0\r\n\r\n", False),
        (b"nonsense\r\n\r\n", False),
        (b"", False),
    ],
)
def test_registry_is_there_when_it_answers(answer: bytes, is_good: bool) -> None:
    with answering(answer) as url:
        assert schema_registry._answers(url) is is_good


def test_registry_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: with http_proxy set, as behind a company's proxy, the registry never seemed to start."""
    monkeypatch.setattr(urllib.request, "_opener", None)  # an earlier one knows the proxies of an earlier time
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]") as url:
        assert schema_registry._answers(url)


def test_registry_that_is_not_started_has_no_address() -> None:
    with pytest.raises(LocalBrokerError, match="is not started: call start"):
        _ = SchemaRegistry().url
    SchemaRegistry().stop()
