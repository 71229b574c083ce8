"""Whose thread runs, by what PySpark and its environment say."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_kafka_sink.sink.running_query import context_of_thread

CONTEXT: Any = object()


class Classic(SparkSession):
    """A session of no JVM."""

    def __init__(self) -> None:
        self._sc = CONTEXT


@pytest.mark.parametrize(("pins", "found"), [("true", CONTEXT), ("True", CONTEXT), ("false", None), ("0", None)])
def test_local_properties_are_a_threads_own_where_it_has_one_of_the_jvms(
    monkeypatch: pytest.MonkeyPatch, pins: str, found: object
) -> None:
    """Bug: with PYSPARK_PIN_THREAD=false the limits of a write were set for whatever ran in some thread of the JVM, and
    taken back in another.
    """
    monkeypatch.setenv("PYSPARK_PIN_THREAD", pins)
    assert context_of_thread(Classic()) is found


def test_by_default_threads_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PIN_THREAD", raising=False)
    assert context_of_thread(Classic()) is CONTEXT


def test_spark_connect_has_no_context() -> None:
    assert context_of_thread(object()) is None
