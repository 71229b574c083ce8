"""A cluster in a child that was forked while it ran; one whose node ends as it starts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import EmbeddedKafka, cluster
from spark_kafka_sink.local.admin import Admin
from spark_kafka_sink.local.java import Java
from spark_kafka_sink.local.node import Node


def test_a_forked_child_that_leaves_the_with_block_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    kafka: Any = EmbeddedKafka()
    kafka._watchdog = SimpleNamespace(close=lambda: ended.append("the watchdog"))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 2**22 + 1)
        kafka.__exit__(None, None, None)
    assert ended == []
    kafka.stop()
    assert ended == ["the watchdog"]


def test_a_node_that_ends_before_it_knows_the_others_is_told_with_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_a_forked_child_that_lives_on_keeps_nobody_from_the_folder(tmp_path: Path) -> None:
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
