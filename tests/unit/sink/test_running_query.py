"""Whose thread runs, by what PySpark and its environment say."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.sink.running_query import context_of_thread, refuse_in_query

CONTEXT: Any = object()


class Classic(SparkSession):
    """A session of no JVM."""

    def __init__(self, context: Any = CONTEXT, *, has_queries: bool = False) -> None:
        self._sc = context
        shared = SimpleNamespace(activeStreamingQueries=lambda: SimpleNamespace(isEmpty=lambda: not has_queries))
        self._jsparkSession: Any = SimpleNamespace(sharedState=lambda: shared)


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


def refusal_in_other_thread(session: object, *, is_outside_queries: bool = False) -> str:
    """What the check says in a thread that Python started, empty where it lets the write pass."""
    found: list[str] = []

    def check() -> None:
        try:
            refuse_in_query(session, is_outside_queries=is_outside_queries)
        except ConfigError as error:
            found.append(str(error))

    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    return "".join(found)


@pytest.mark.parametrize("pins", ["true", "false"])
def test_thread_that_names_no_query_is_refused_while_one_is_active(monkeypatch: pytest.MonkeyPatch, pins: str) -> None:
    """Bug: a thread inside foreachBatch, and any with PYSPARK_PIN_THREAD=false, wrote a repeated batch twice."""
    monkeypatch.setenv("PYSPARK_PIN_THREAD", pins)
    context = SimpleNamespace(getLocalProperty=lambda _: None)
    session = Classic(context, has_queries=True)
    text = refusal_in_other_thread(session)
    assert "a streaming query is active" in text
    assert "foreachBatch(sink.write_batch)" in text
    assert 'writeStream.format("kafka_sink")' in text
    assert refusal_in_other_thread(session, is_outside_queries=True) == ""
    refuse_in_query(session, is_outside_queries=False)  # the main thread
    assert refusal_in_other_thread(Classic(context)) == ""


@pytest.mark.parametrize("start", ["module", "daemon"])
def test_foreach_batch_worker_of_spark_connect_is_refused(monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    """Bug: a batch write inside foreachBatch on Spark Connect wrote a repeated batch twice."""
    name = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
    refuse_in_query(object(), is_outside_queries=False)
    if start == "daemon":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    else:
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=name))
    with pytest.raises(ConfigError, match="inside foreachBatch"):
        refuse_in_query(object(), is_outside_queries=True)
