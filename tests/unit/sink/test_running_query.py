"""Which query a thread belongs to, according to PySpark and the thread's environment."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.sink.running_query import (
    cancelled_by_interrupt,
    context_of_thread,
    has_query_thread,
    refuse_beside_queries,
    refuse_in_query,
)

CONTEXT: Any = object()


class Classic(SparkSession):
    """A session without a JVM."""

    def __init__(self, context: Any = CONTEXT, *, has_queries: bool = False) -> None:
        self._sc = context
        shared = SimpleNamespace(activeStreamingQueries=lambda: SimpleNamespace(isEmpty=lambda: not has_queries))
        self._jsparkSession: Any = SimpleNamespace(sharedState=lambda: shared)


@pytest.mark.parametrize(("pins", "found"), [("true", CONTEXT), ("True", CONTEXT), ("false", None), ("0", None)])
def test_pinned_thread_has_its_own_local_properties(monkeypatch: pytest.MonkeyPatch, pins: str, found: object) -> None:
    """Bug: with PYSPARK_PIN_THREAD=false the limits of a write were set for an arbitrary thread of the JVM, and removed
    in another one.
    """
    monkeypatch.setenv("PYSPARK_PIN_THREAD", pins)
    assert context_of_thread(Classic()) is found


def test_by_default_threads_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PIN_THREAD", raising=False)
    assert context_of_thread(Classic()) is CONTEXT


def test_spark_connect_has_no_context() -> None:
    assert context_of_thread(object()) is None


def refusal_in_other_thread(session: object, *, is_outside_queries: bool = False) -> str:
    """The refusal in a thread that Python started; empty if the check accepts the write."""
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
def test_thread_without_query_is_refused_beside_active_query(monkeypatch: pytest.MonkeyPatch, pins: str) -> None:
    """Bug: a thread inside foreachBatch, and any thread with PYSPARK_PIN_THREAD=false, wrote a repeated batch twice."""
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


# ---- a data source's planning worker ---------------------------------------------------------------------------------


def processes(proc: Path, *names: str, threads: tuple[str, ...] = ()) -> Path:
    """Fake this process's parents, the nearest first; the last one has these threads."""
    pids = [os.getppid(), *range(900_001, 900_001 + len(names))]
    for at, name in enumerate(names):
        folder = proc / str(pids[at])
        folder.mkdir()
        (folder / "comm").write_text(f"{name}\n")
        (folder / "status").write_text(f"Name:\t{name}\nPPid:\t{pids[at + 1]}\n")
    for number, thread in enumerate(threads):
        task = folder / "task" / str(number)
        task.mkdir(parents=True)
        (task / "comm").write_text(f"{thread}\n")
    return proc


@pytest.mark.parametrize("parents", [("java",), ("python3", "java"), ("python3", "python3", "java")])
@pytest.mark.parametrize(
    ("threads", "is_active"),
    [(("java", "stream executio"), True), (("stream ..234def]", "GC"), True), (("java", "streaming-job"), False)],
)
def test_streaming_query_is_seen_by_its_thread_in_the_jvm(
    tmp_path: Path, parents: tuple[str, ...], threads: tuple[str, ...], is_active: bool
) -> None:
    assert has_query_thread(processes(tmp_path, *parents, threads=threads)) is is_active


def test_thread_that_ends_during_the_check_is_ignored(tmp_path: Path) -> None:
    proc = processes(tmp_path, "java", threads=("java",))
    (proc / str(os.getppid()) / "task" / "7").mkdir()
    assert has_query_thread(proc) is False


@pytest.mark.parametrize("parents", [(), ("python3",), ("a", "b", "c", "d", "java")])
def test_without_a_visible_jvm_the_answer_is_unknown(tmp_path: Path, parents: tuple[str, ...]) -> None:
    assert has_query_thread(processes(tmp_path, *parents)) is None


def test_write_by_format_is_refused_unless_no_query_is_active() -> None:
    refuse_beside_queries(False)
    with pytest.raises(ConfigError, match=r"and a streaming query is active: .*write\.outside\.queries=true"):
        refuse_beside_queries(True)
    with pytest.raises(ConfigError, match=r"it is not known here .*foreachBatch\(sink\.write_batch\)"):
        refuse_beside_queries(None)


class TaggedContext:
    """Spark's part in job tags, with the threads that ask."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bool]] = []

    def _note(self, call: str, tag: str) -> None:
        self.calls.append((call, tag, threading.current_thread() is threading.main_thread()))

    def addJobTag(self, tag: str) -> None:  # noqa: N802  PySpark's name
        self._note("add", tag)

    def removeJobTag(self, tag: str) -> None:  # noqa: N802
        self._note("remove", tag)

    def cancelJobsWithTag(self, tag: str) -> None:  # noqa: N802
        self._note("cancel", tag)


def calls_of(error: BaseException | None) -> list[tuple[str, bool]]:
    """What is asked of Spark if the jobs end with `error`: each call, and whether the main thread made it."""
    context = TaggedContext()
    expected: Any = (
        contextlib.nullcontext() if error is None else pytest.raises(type(error), match=re.escape(str(error)))
    )
    with expected, cancelled_by_interrupt(Classic(context)):
        if error is not None:
            raise error
    assert len({tag for _, tag, _ in context.calls}) == 1
    return [(call, is_main) for call, _, is_main in context.calls]


@pytest.mark.parametrize("error", [KeyboardInterrupt("Ctrl-C"), SystemExit(3)])
def test_interrupt_cancels_the_jobs_from_another_thread(error: BaseException) -> None:
    """Bug: Spark went on with the write, and a second run wrote the rows twice. The interrupted thread's connection to
    the JVM still waits for an answer.
    """
    assert calls_of(error) == [("add", True), ("cancel", False)]


def test_jobs_that_have_run_are_not_cancelled() -> None:
    assert calls_of(None) == [("add", True), ("remove", True)]


def test_any_error_cancels_the_jobs() -> None:
    """Bug: PySpark 3.5 makes a Py4JError of Ctrl-C, and the jobs went on."""
    assert calls_of(ValueError("Py4JError")) == [("add", True), ("cancel", False), ("remove", True)]


def test_error_that_follows_an_interrupt_does_not_hide_it() -> None:
    context = TaggedContext()

    def collect() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise ConnectionError("Answer from Java side is empty")

    with pytest.raises(KeyboardInterrupt), cancelled_by_interrupt(Classic(context)):
        collect()
    assert [call for call, _, _ in context.calls] == ["add", "cancel"]


def test_error_of_a_write_after_an_interrupt_is_its_own() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert calls_of(ValueError("a task failed")) == [("add", True), ("cancel", False), ("remove", True)]


def test_only_the_main_thread_gets_interrupts_so_only_its_jobs_have_a_tag() -> None:
    context = TaggedContext()

    def write() -> None:
        with cancelled_by_interrupt(Classic(context)):
            pass

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    with cancelled_by_interrupt(object()):  # Spark Connect
        pass
    assert context.calls == []
