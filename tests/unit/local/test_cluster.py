"""A cluster in a child that was forked while it ran."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from spark_kafka_sink.local import EmbeddedKafka


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
