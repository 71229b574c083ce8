"""A cluster in a child that was forked while it ran; one whose node ends as it starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import EmbeddedKafka, cluster
from spark_kafka_sink.local.admin import Admin
from spark_kafka_sink.local.class_archive import drop_class_archive
from spark_kafka_sink.local.jvm import CURRENT, Java, Jvm
from spark_kafka_sink.local.node import Node


def test_forked_child_that_leaves_the_block_ends_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    kafka: Any = EmbeddedKafka()
    kafka._watchdog = SimpleNamespace(close=lambda: ended.append("the watchdog"))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 2**22 + 1)
        kafka.__exit__(None, None, None)
    assert ended == []
    kafka.stop()
    assert ended == ["the watchdog"]


def test_node_that_ends_before_the_cluster_forms_shows_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug: "The cluster's files cannot be written: Connection refused", and no log."""

    def refuse(_admin: Admin, _server: str) -> set[int]:
        raise ConnectionRefusedError("Connection refused")

    monkeypatch.setattr(cluster, "fetch_jars", lambda *_, **__: [])
    monkeypatch.setattr(cluster, "find_java", lambda: Java(tmp_path / "java", "17"))
    monkeypatch.setattr(cluster, "with_class_archive", lambda jvm, _: jvm)
    for step in ("begin_format", "await_format", "await_start"):
        monkeypatch.setattr(Node, step, lambda *_: None)
    monkeypatch.setattr(Node, "begin_start", lambda node: node.log_file.write_text("started\nOutOfMemoryError\n"))
    monkeypatch.setattr(Admin, "broker_ids", refuse)
    with pytest.raises(LocalBrokerError, match=r"(?s)Node 1 ended while it started.*OutOfMemoryError.*Logs: "):
        EmbeddedKafka(data_dir=tmp_path).start()


@pytest.mark.parametrize(("fault", "is_crash"), [("SEGV", True), ("BUS", True), ("ABRT", True), ("KILL", False)])
def test_class_archive_of_a_crash_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, is_crash: bool
) -> None:
    java, archive = tmp_path / "java", tmp_path / "some.jsa"
    java.write_text(f'#!/bin/sh\ncase "$*" in *SharedArchiveFile*) kill -{fault} $$;; esac\nexit 1\n')
    java.chmod(0o755)
    archive.write_bytes(b"damaged")
    checksum = tmp_path / "some.jsa.sha256"
    checksum.write_text("as written")
    monkeypatch.setattr(cluster, "fetch_jars", lambda *_, **__: [])
    monkeypatch.setattr(cluster, "find_java", lambda: Java(java, "17"))
    monkeypatch.setattr(cluster, "with_class_archive", lambda jvm, _: replace(jvm, archive=archive))
    with pytest.raises(LocalBrokerError) as failure:
        EmbeddedKafka(data_dir=tmp_path / "data").start()
    assert (f"crashed with the class archive {archive}. The archive is dropped" in str(failure.value)) is is_crash
    assert archive.read_bytes() == (b"" if is_crash else b"damaged")
    assert checksum.exists() is not is_crash
    assert sorted(path.name for path in tmp_path.glob("some.*")) == ["some.jsa", "some.jsa.sha256"][: 2 - is_crash]


def test_node_that_crashed_starts_again_without_the_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java, archive = tmp_path / "java", tmp_path / "some.jsa"
    java.write_text('#!/bin/sh\ncase "$*" in *SharedArchiveFile*) kill -SEGV $$;; esac\nexec sleep 60\n')
    java.chmod(0o755)
    archive.write_bytes(b"damaged")
    kafka = EmbeddedKafka(data_dir=tmp_path / "data")
    kafka._archive = archive
    kafka._make_nodes(Jvm(Java(java, "17"), CURRENT, [], archive=archive))
    monkeypatch.setattr(Node, "_is_up", lambda node: node.running and not archive.stat().st_size)
    try:
        with pytest.raises(LocalBrokerError, match=r"(?s)ended while it started.*is dropped"):
            kafka.start_node(1)
        kafka.start_node(1)
        assert kafka.node_running(1)
    finally:
        kafka.stop()


def test_archive_that_cannot_be_dropped_is_named(tmp_path: Path) -> None:
    archive = tmp_path / "not there" / "some.jsa"
    assert f"{archive}, which could not be dropped" in drop_class_archive(archive)


def test_forked_child_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    """Bug: it holds the file open as well, and with it the lock."""
    kafka, next_ = EmbeddedKafka(data_dir=tmp_path), EmbeddedKafka(data_dir=tmp_path)
    kafka._claim_data()
    assert kafka._claim is not None
    childs = os.dup(kafka._claim.fileno())
    try:
        with pytest.raises(LocalBrokerError, match="Another embedded cluster runs in"):
            next_._claim_data()
        next_.stop()
        kafka.stop()
        next_._claim_data()
    finally:
        os.close(childs)
        next_.stop()
