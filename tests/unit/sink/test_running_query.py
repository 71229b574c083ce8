"""Whose thread runs, by what PySpark and its environment say."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import InheritableThread
from pyspark.sql import SparkSession

from spark_kafka_sink.sink.running_query import Place, context_of_thread, place_of_thread

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


class Application(SparkSession):
    """A classic session of an application with `queries` active streams, called in a thread of `query_id`."""

    def __init__(self, queries: int, query_id: str | None = None) -> None:
        self._sc: Any = SimpleNamespace(getLocalProperty=lambda name: query_id)
        active = SimpleNamespace(isEmpty=lambda: queries == 0)
        shared = SimpleNamespace(activeStreamingQueries=lambda: active)
        self._jsparkSession: Any = SimpleNamespace(sharedState=lambda: shared)


def in_thread(make: Callable[..., threading.Thread], session: object) -> Place:
    found: list[Place] = []
    thread = make(target=lambda: found.append(place_of_thread(session)))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PIN_THREAD", "false")


def test_thread_of_a_query_is_inside_foreach_batch() -> None:
    assert place_of_thread(Application(1, "q")) is Place.INSIDE
    assert in_thread(threading.Thread, Application(1, "q")) is Place.INSIDE


def test_main_thread_is_outside_foreach_batch() -> None:
    assert place_of_thread(Application(3)) is Place.OUTSIDE


@pytest.mark.usefixtures("unpinned")
def test_main_thread_is_outside_also_where_threads_are_shared() -> None:
    assert place_of_thread(Application(3, "q")) is Place.OUTSIDE


def test_plain_thread_is_unknown_while_a_stream_runs() -> None:
    assert in_thread(threading.Thread, Application(1)) is Place.UNKNOWN
    assert in_thread(threading.Thread, Application(0)) is Place.OUTSIDE


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("make", [threading.Thread, InheritableThread])
def test_shared_thread_is_unknown_while_a_stream_runs(make: Callable[..., threading.Thread]) -> None:
    assert in_thread(make, Application(1, "of another thread")) is Place.UNKNOWN
    assert in_thread(make, Application(0)) is Place.OUTSIDE


def test_connect_worker_of_foreach_batch_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of_thread(object()) is Place.OUTSIDE
    name = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=name), raising=False)
    assert place_of_thread(object()) is Place.INSIDE
    assert in_thread(threading.Thread, object()) is Place.INSIDE
