"""What the planning worker keeps of a batch for the worker that aborts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.sink.exactly_once.begun_batch import begun_batch, remember_begun
from spark_kafka_sink.sink.exactly_once.messages import Mandate

MANDATE = Mandate("p/q", OpenTransaction("p/q/driver", 1, 2, 2), TopicPartition("decisions", 3), 6, "q1", 9)


def test_the_last_batch_of_a_prefix_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")
    assert begun_batch("p/q") is None
    remember_begun(MANDATE)
    assert begun_batch("p/q") == MANDATE
    assert begun_batch("p") is None
    assert len(list(tmp_path.iterdir())) == 1


def test_what_another_release_kept_counts_as_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    remember_begun(MANDATE)
    (kept,) = tmp_path.iterdir()
    for text in ("", "{}", "[]", '{"prefix":"p/q"}'):
        kept.write_text(text)
        assert begun_batch("p/q") is None


def test_without_a_local_directory_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    remember_begun(MANDATE)
    assert begun_batch("p/q") is None
    assert caplog.text == ""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "gone"))
    remember_begun(MANDATE)
    assert begun_batch("p/q") is None
    assert "stays open until its timeout" in caplog.text
