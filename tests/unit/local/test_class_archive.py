"""Which class archive a broker's JVM gets, when one is made, and what is left after a failure."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import class_archive
from spark_kafka_sink.local.class_archive import with_class_archive
from spark_kafka_sink.local.jars import exclusive
from spark_kafka_sink.local.jvm import CURRENT, Java, Jvm
from spark_kafka_sink.local.node import Node
from spark_kafka_sink.local.properties import ReservedPort
from spark_kafka_sink.local.watchdog import Watchdog


class Maker:
    """Stands for a Node that makes an archive. Its JVM is a file that is written, or not. It keeps each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.error: LocalBrokerError | None = None
        self.wrote = "classes"
        self.ended: list[str] = []
        for step in ("write_files", "begin_format", "await_format", "await_start", "terminate", "await_end"):
            monkeypatch.setattr(Node, step, self._stepped(step))
        self._note_end(monkeypatch, Watchdog, "close", "watchdog")
        self._note_end(monkeypatch, ReservedPort, "release", "port")

    def _note_end(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, what: str) -> None:
        end = getattr(kind, name)

        def noted(made: object) -> None:
            end(made)
            self.ended.append(what)

        monkeypatch.setattr(kind, name, noted)

    def _stepped(self, step: str) -> Callable[..., None]:
        return lambda *_: self.steps.append(step)

    def begin_start(self, *, write_archive: Path) -> None:
        self.steps.append("begin_start")
        if self.wrote:
            write_archive.write_text(self.wrote)
        if self.error is not None:
            raise self.error


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    made = Maker(monkeypatch)
    monkeypatch.setattr(Node, "begin_start", lambda _, **given: made.begin_start(**given))
    return made


@pytest.fixture
def jvm(tmp_path: Path) -> Jvm:
    files = [tmp_path / name for name in ("java", "a.jar", "b.jar")]
    for file in files:
        file.write_text("#!/bin/sh\nexit 1\n")
    files[0].chmod(0o755)
    return Jvm(Java(files[0], "21.0.1"), CURRENT, files[1:])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    made = tmp_path / "cache"
    made.mkdir()
    return made


def archives(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "class-archives").iterdir() if path.suffix != ".sha256")


def test_archive_is_made_once_by_a_broker_that_stops_cleanly(
    maker: Maker, jvm: Jvm, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = with_class_archive(jvm, cache)
    assert made.archive is not None
    assert made.archive.read_text() == "classes"
    assert made == replace(jvm, archive=made.archive)
    assert maker.steps == [
        *("write_files", "begin_format", "await_format"),
        *("begin_start", "await_start", "terminate", "await_end"),
    ]
    assert maker.ended == ["watchdog", "port", "port"]
    assert archives(cache) == [made.archive.name]
    assert "once, some seconds" in capsys.readouterr().err
    assert with_class_archive(jvm, cache) == made
    assert maker.steps.count("begin_start") == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("what", ["java", "a.jar", "b.jar", "version", "jars"])
def test_other_java_or_jars_have_their_own_archive(
    maker: Maker, jvm: Jvm, cache: Path, tmp_path: Path, what: str
) -> None:
    first = with_class_archive(jvm, cache)
    if what == "version":
        jvm = replace(jvm, java=replace(jvm.java, version="21.0.2"))
    elif what == "jars":
        jvm = replace(jvm, jars=jvm.jars[::-1])  # the class path is in the archive
    else:
        os.utime(tmp_path / what, ns=(1, 1))
    assert with_class_archive(jvm, cache).archive != first.archive
    assert maker.steps.count("begin_start") == 2


def test_java_link_counts_by_its_target(maker: Maker, jvm: Jvm, cache: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(jvm.java.path)
    linked = replace(jvm, java=replace(jvm.java, path=link))
    assert with_class_archive(linked, cache).archive == with_class_archive(jvm, cache).archive


@pytest.mark.parametrize("way", ["fails", "writes nothing"])
def test_java_that_makes_no_archive_starts_without_one(
    maker: Maker, jvm: Jvm, cache: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    maker.wrote = ""
    if way == "fails":
        maker.error = LocalBrokerError("no such flag")
    for _ in range(2):
        assert with_class_archive(jvm, cache) == jvm
    assert maker.steps.count("begin_start") == 1
    assert maker.ended == ["watchdog", "port", "port"]
    assert len(archives(cache)) == 1
    reported = f"No class archive with {jvm.java.path} 21.0.1: no such flag"
    assert (reported in capsys.readouterr().err) == (way == "fails")


@pytest.mark.parametrize("can_say", [True, False])
def test_failed_archive_is_retried_with_a_capable_java(
    maker: Maker, jvm: Jvm, cache: Path, capsys: pytest.CaptureFixture[str], can_say: bool
) -> None:
    """Bug: after one full disk the brokers of this Java never had an archive again."""
    jvm.java.path.write_text("#!/bin/sh\nexit 0\n")
    jvm.java.path.chmod(0o755 if can_say else 0o644)
    maker.error = LocalBrokerError("No space left on device")
    for _ in range(2):
        assert with_class_archive(jvm, cache) is jvm
    assert capsys.readouterr().err.count("No space left on device") == 2
    maker.error = None
    assert with_class_archive(jvm, cache).archive is not None


@pytest.mark.parametrize("can_make", [True, False])
def test_archive_of_a_killed_jvm_is_not_used(
    maker: Maker,
    jvm: Jvm,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    can_make: bool,
) -> None:
    """Bug: half an archive got a checksum, as of a JVM that ran out of memory at its end, and was used for good."""
    if can_make:
        jvm.java.path.write_text("#!/bin/sh\nexit 0\n")
    with monkeypatch.context() as patch:
        patch.setattr(Node, "was_killed", True)
        assert with_class_archive(jvm, cache) is jvm
    assert "was killed while it wrote" in capsys.readouterr().err
    assert [(cache / "class-archives" / name).read_bytes() for name in archives(cache)] == ([] if can_make else [b""])
    assert (with_class_archive(jvm, cache).archive is not None) is can_make


@pytest.mark.parametrize("way", ["fails", "writes nothing"])
def test_full_disk_for_the_archive_is_not_recorded(
    maker: Maker, jvm: Jvm, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    """Bug: a Java that cannot write the archive ends with 1, like a Java that cannot make one."""

    def full(path: Path, _: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    maker.wrote = ""
    maker.error = LocalBrokerError("did not start") if way == "fails" else None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for _ in range(2):
            assert with_class_archive(jvm, cache) is jvm
    assert maker.steps.count("begin_start") == 2
    assert archives(cache) == []
    assert capsys.readouterr().err.count("No space left on device") == 2
    maker.wrote, maker.error = "classes", None
    assert with_class_archive(jvm, cache).archive is not None


def test_leftover_of_an_interrupted_attempt_is_not_an_archive(maker: Maker, jvm: Jvm, cache: Path) -> None:
    made = with_class_archive(jvm, cache)
    assert made.archive is not None
    made.archive.replace(made.archive.with_suffix(".new"))
    maker.wrote = ""
    assert with_class_archive(jvm, cache) == jvm


def test_ctrl_c_while_an_archive_is_made_leaves_no_process(
    maker: Maker, jvm: Jvm, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Node, "await_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            with_class_archive(jvm, cache)
    assert maker.ended == ["watchdog", "port", "port"]
    assert with_class_archive(jvm, cache).archive is not None


def test_archive_made_by_another_process_meanwhile_is_used(
    maker: Maker, jvm: Jvm, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_class_archive(jvm, cache)
    assert made.archive is not None
    kept = made.archive.rename(cache / "kept")

    def late(path: Path, what: str) -> AbstractContextManager[None]:
        kept.rename(made.archive or "")
        return exclusive(path, what)

    monkeypatch.setattr(class_archive, "exclusive", late)
    assert with_class_archive(jvm, cache) == made
    assert maker.steps.count("begin_start") == 1


def test_read_only_cache_starts_without_an_archive(
    maker: Maker, jvm: Jvm, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: (path, mode) != (cache, os.W_OK))
        assert with_class_archive(jvm, cache) is jvm
    assert maker.steps == []
    made = with_class_archive(jvm, cache)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert with_class_archive(jvm, cache) == made, "an existing archive is used"


@pytest.mark.parametrize("damage", ["classeZ", "cla", None])
def test_damaged_archive_is_made_again(
    maker: Maker, jvm: Jvm, cache: Path, capsys: pytest.CaptureFixture[str], damage: str | None
) -> None:
    """Bug: the JVM of the broker crashed at every start."""
    archive = with_class_archive(jvm, cache).archive
    assert archive is not None
    if damage is None:
        archive.with_suffix(".jsa.sha256").unlink()
    else:
        archive.write_text(damage)
    assert with_class_archive(jvm, cache).archive == archive
    assert archive.read_text() == "classes"
    assert maker.steps.count("begin_start") == 2
    assert "making it again" in capsys.readouterr().err
    with_class_archive(jvm, cache)
    assert maker.steps.count("begin_start") == 2
