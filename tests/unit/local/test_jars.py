"""Lock files, and the cache of jars that they fill."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import pwd
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.jars import JarLock, LockedJar, Progress, cache_dir, exclusive, fetch_jars

CONTENT = {"org.example:a:1": b"first jar", "org.example:b:2": b"second jar"}


class Source:
    """Serves CONTENT by default, and keeps the requests."""

    def __init__(self) -> None:
        self.content = dict(CONTENT)
        self.failures: dict[str, int] = {}
        self.asked: list[str] = []

    def __call__(self, coordinate: str, folder: Path, progress: Progress) -> Path:
        assert not list(folder.iterdir()), "a download starts in an empty folder"
        self.asked.append(coordinate)
        path = folder / "some.jar"
        with progress(path.name, len(self.content[coordinate])) as advance:
            if self.failures.get(coordinate, 0) > 0:
                self.failures[coordinate] -= 1
                path.write_bytes(b"half")
                raise ConnectionError("the line broke")
            path.write_bytes(self.content[coordinate])
            advance(len(self.content[coordinate]))
        return path


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def fetch(tmp_path: Path, source: Source, pauses: list[float]) -> Callable[[], list[Path]]:
    jars = tuple(LockedJar(name, hashlib.sha256(data).hexdigest(), len(data)) for name, data in CONTENT.items())
    lock_path = tmp_path / "things.lock.json"
    JarLock("things", tuple(CONTENT), False, jars).write(lock_path)
    return lambda: fetch_jars(lock_path, cache=tmp_path / "cache", download=source, sleep=pauses.append)


def test_jars_are_fetched_once_and_then_only_verified(fetch: Callable[[], list[Path]], source: Source) -> None:
    paths = fetch()
    assert [path.read_bytes() for path in paths] == list(CONTENT.values())
    assert source.asked == list(CONTENT)
    assert fetch() == paths
    assert source.asked == list(CONTENT)


@pytest.mark.parametrize("damage", [b"first jaR", b"first"])
def test_jar_damaged_in_the_cache_is_noticed_and_fetched_again(
    fetch: Callable[[], list[Path]], source: Source, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    first, _ = fetch()
    first.write_bytes(damage)
    assert fetch()[0].read_bytes() == b"first jar"
    assert source.asked == [*CONTENT, "org.example:a:1"]
    assert f"{first} is damaged" in capsys.readouterr().err


def test_jar_with_another_checksum_is_refused_and_not_kept(
    fetch: Callable[[], list[Path]], source: Source, tmp_path: Path
) -> None:
    source.content["org.example:b:2"] = b"evil twin!"
    with pytest.raises(LocalBrokerError) as caught:
        fetch()
    message = str(caught.value)
    assert "org.example:b:2" in message
    assert hashlib.sha256(b"evil twin!").hexdigest() in message
    assert hashlib.sha256(b"second jar").hexdigest() in message
    assert [path.name for path in (tmp_path / "cache").rglob("*.jar")] == ["a-1.jar"]
    source.content = dict(CONTENT)
    assert len(fetch()) == 2
    assert source.asked.count("org.example:a:1") == 1


def test_download_that_breaks_off_is_tried_again(
    fetch: Callable[[], list[Path]], source: Source, pauses: list[float]
) -> None:
    source.failures["org.example:a:1"] = 2
    assert fetch()[0].read_bytes() == b"first jar"
    assert pauses == [1.0, 2.0]


def test_silent_source_is_an_error_with_jar_and_cause(
    fetch: Callable[[], list[Path]], source: Source, tmp_path: Path
) -> None:
    source.failures["org.example:a:1"] = 99
    with pytest.raises(LocalBrokerError, match=r"org\.example:a:1 cannot be fetched after 3 attempts: the line broke"):
        fetch()
    assert list((tmp_path / "cache").glob("fetch-*")) == []


def test_waiting_process_reports_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(file: IO[str], operation: int) -> None:
        if operation == fcntl.LOCK_EX:  # the first one is done when the other begins to wait
            fcntl_flock(first, fcntl.LOCK_UN)
        fcntl_flock(file, operation)

    fcntl_flock = fcntl.flock
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as third:
        fcntl_flock(first, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", flock)
        with exclusive(tmp_path, "the jars"):
            assert "Waiting for another process that prepares the jars in" in capsys.readouterr().err
            with pytest.raises(BlockingIOError):
                fcntl_flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl_flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with exclusive(tmp_path, "the jars"):
        assert capsys.readouterr().err == ""


def test_next_fetch_removes_leftovers_of_a_killed_one(fetch: Callable[[], list[Path]], tmp_path: Path) -> None:
    (tmp_path / "cache" / "fetch-left" / "deep").mkdir(parents=True)
    fetch()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["jars", "lock"]


def test_cache_path_with_separator_is_refused_by_its_variable(
    tmp_path: Path, fetch: Callable[[], list[Path]], source: Source
) -> None:
    fetch()
    with pytest.raises(LocalBrokerError, match=r"Java finds no jars in .*a:b: .*SPARK_KAFKA_SINK_CACHE"):
        fetch_jars(tmp_path / "things.lock.json", cache=tmp_path / "a:b", download=source)


def test_cache_that_cannot_be_made_is_refused_by_its_variable(tmp_path: Path, fetch: Callable[[], list[Path]]) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(LocalBrokerError, match=r"cache cannot be written.*SPARK_KAFKA_SINK_CACHE"):
        fetch()


def test_full_disk_while_fetching_is_a_cache_error(
    fetch: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a plain OSError gave a traceback of `python -m spark_kafka_sink.local`."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(LocalBrokerError, match=r"cannot be written: .*No space left on device.*SPARK_KAFKA_SINK_CACHE"):
        fetch()


def test_jar_that_cannot_be_read_is_fetched_again(
    fetch: Callable[[], list[Path]], source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: in a cache of another user, who lets nobody read it, the start ended with a bare PermissionError."""
    first, _ = fetch()
    source.asked.clear()
    open_file = Path.open

    def refuse(path: Path, *arguments: str, **named: str) -> object:
        if path == first and not source.asked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, *arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    assert fetch()[0] == first
    assert source.asked == ["org.example:a:1"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SPARK_KAFKA_SINK_CACHE": "/somewhere/else", "XDG_CACHE_HOME": "/xdg"}, Path("/somewhere/else")),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/spark_kafka_sink")),
        ({}, Path.home() / ".cache" / "spark_kafka_sink"),
    ],
)
def test_cache_folder_follows_the_environment(environment: dict[str, str], expected: Path) -> None:
    assert cache_dir(environment) == expected


@pytest.mark.parametrize(
    ("environment", "folder"),
    [({}, r"~/\.cache/spark_kafka_sink"), ({"SPARK_KAFKA_SINK_CACHE": "~/kafka"}, "~/kafka")],
)
def test_user_without_a_home_gets_the_name_of_the_variable(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a container's user id without an account raised RuntimeError: Could not determine home directory."""

    def unknown(_: int) -> NoReturn:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(LocalBrokerError, match=rf"The cache folder {folder} does not exist: .*SPARK_KAFKA_SINK_CACHE"):
        cache_dir(environment)


JAR = LockedJar("org.example:thing_2.13:1.0", hashlib.sha256(b"bytes").hexdigest(), 5)


def test_lock_that_is_written_is_read_back_equal(tmp_path: Path) -> None:
    lock = JarLock("things", ("org.example:thing_2.13:1.0",), False, (JAR,))
    lock.write(tmp_path / "things.lock.json")
    assert JarLock.read(tmp_path / "things.lock.json") == lock


def test_jar_has_the_path_that_maven_uses() -> None:
    assert JAR.path == Path("org/example/thing_2.13/1.0/thing_2.13-1.0.jar")
    archive = LockedJar("org.example:thing:1.0:tar.gz:all", "", 0)
    assert archive.path == Path("org/example/thing/1.0/thing-1.0-all.tar.gz")


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
def test_malformed_lock_is_refused_with_its_file_name(tmp_path: Path, content: object, complaint: str) -> None:
    path = tmp_path / "things.lock.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(LocalBrokerError, match=rf"things\.lock\.json.*{complaint}"):
        JarLock.read(path)


@pytest.mark.parametrize("content", [b"Bytes", b"bytes!", b"", None])
def test_jar_is_intact_only_with_the_locked_bytes(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "thing.jar"
    path.write_bytes(b"bytes")
    assert JAR.is_intact(path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert not JAR.is_intact(path)
