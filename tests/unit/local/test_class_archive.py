"""What is kept of an archive that could not be made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import class_archive
from spark_kafka_sink.local.class_archive import with_class_archive
from spark_kafka_sink.local.java import Java
from spark_kafka_sink.local.jvm import Jvm
from spark_kafka_sink.local.releases import CURRENT


class FullDisk:
    """A node that does not start."""

    log_dirs = ()

    def __init__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._fail if name == "await_start" else lambda *_, **__: None

    def _fail(self, *_: object) -> None:
        raise LocalBrokerError("No space left on device")


@pytest.mark.parametrize(("exit_code", "attempts"), [(0, 2), (1, 1)])
def test_an_archive_that_could_not_be_made_is_tried_again_unless_java_knows_of_none(
    exit_code: int,
    attempts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug: one full disk, and this Java's brokers started without their classes for ever."""
    monkeypatch.setattr(class_archive, "Node", FullDisk)
    monkeypatch.setattr(class_archive, "server_properties", lambda *_: {})
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    java.chmod(0o755)
    jvm = Jvm(Java(java, "17.0.1"), CURRENT, [])
    for _ in range(2):
        assert with_class_archive(jvm, tmp_path) is jvm
    assert capsys.readouterr().err.count("No space left on device") == attempts
