"""The streaming query that the current thread belongs to, which foreachBatch does not say, and the jobs that the thread
runs. For the driver's threads; not in Spark Connect.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark_kafka_sink.common.errors import ConfigError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

UTC: Final = "UTC"
QUERY_ID: Final = "sql.streaming.queryId"
"""Spark's local property of a streaming query's thread. Its tasks have it too."""
_OF_QUERY_SESSIONS: Final = "spark.sql.streaming.internal.stateStore.partitions"
"""Spark 4.2 and later set it in a streaming query's own session, and a session's settings reach its tasks."""
_CONNECT_TAG: Final = "SparkConnect_"
"""Tags of Spark Connect's jobs begin with it."""
_CONNECT_WORKER: Final = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
"""The module of the Python process in which Spark Connect calls foreachBatch."""

_QUERY_THREAD: Final = "stream "
"""The begin of the name "stream execution thread for ..." of a streaming query's thread. Linux shows it shortened, and
each Java shortens it in its own way.
"""
_CANCEL_S: Final = 10
"""How long Spark may take to note that jobs are cancelled."""
_MOST_PARENTS: Final = 4
"""The driver's JVM is the second parent of a planning worker: Spark's daemon of workers is the first."""

_WAYS_OUT: Final = (
    "Spark may run a micro-batch again, and its rows would then be written twice. For a streaming query use"
    " foreachBatch(sink.write_batch), which gives the report too (not on Spark Connect), or"
    ' writeStream.format("kafka_sink").'
)


def has_own_threads() -> bool:
    """Return whether each Python thread has its own JVM thread, with its local properties. False with
    PYSPARK_PIN_THREAD=false: then calls from foreachBatch may run in any JVM thread.
    """
    return os.environ.get("PYSPARK_PIN_THREAD", "true").lower() == "true"


def context_of_thread(session: object) -> SparkContext | None:
    """Return the context, if its local properties are those of the calling thread: None in Spark Connect, and if Python
    threads share those of the JVM.
    """
    from pyspark.sql import SparkSession as ClassicSession

    return session.sparkContext if isinstance(session, ClassicSession) and has_own_threads() else None


@contextmanager
def cancelled_by_interrupt(session: object) -> Iterator[None]:
    """Cancel the jobs that this thread starts inside the `with` if Ctrl-C ends it: Spark would go on, and a second run
    would write the rows once more. Only the main thread gets Ctrl-C.

    After any other error too, which does no harm to a job that has ended: PySpark 3.5 makes a Py4JError of Ctrl-C.
    """
    context = context_of_thread(session) if threading.current_thread() is threading.main_thread() else None
    if context is None:
        yield
        return
    tag = f"spark-kafka-sink-{uuid.uuid4()}"
    context.addJobTag(tag)
    before = sys.exception()
    try:
        yield
    except BaseException as error:
        # This thread's connection to the JVM may still wait for the answer of the interrupted call.
        other = threading.Thread(target=context.cancelJobsWithTag, args=(tag,), daemon=True)
        other.start()
        other.join(_CANCEL_S)
        interrupt = _interrupt_in(error, before)
        if interrupt is None:
            context.removeJobTag(tag)
        elif interrupt is not error:
            raise interrupt from None
        raise
    context.removeJobTag(tag)


def _interrupt_in(error: BaseException, before: BaseException | None) -> BaseException | None:
    """Return the Ctrl-C that is or has led to `error`: PySpark's next call may fail on the connection that was
    interrupted. `before`: what the caller was handling already, such as an earlier Ctrl-C.
    """
    cause: BaseException | None = error
    while isinstance(cause, Exception):
        cause = cause.__context__
    return None if cause is before else cause


def query_id_of(context: SparkContext) -> str | None:
    """Return the id of the streaming query that this thread belongs to, as in `foreachBatch`; None if none exists."""
    return context.getLocalProperty(QUERY_ID)


def running_query(df: DataFrame, context: SparkContext) -> Any | None:
    """Spark's object of the streaming query that this thread belongs to; None if none exists."""
    query_id = query_id_of(context)
    if query_id is None:
        return None
    assert context._jvm is not None
    key = context._jvm.java.util.UUID.fromString(query_id)
    return _active_queries(df.sparkSession).get(key)


def session_time_zone() -> str:
    """Return the time zone of this thread's active session, or of the process's first one; UTC without a session."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        session = SparkSession.active()  # a thread of a user's own has no active session
    except PySparkException:
        return UTC
    return session.conf.get("spark.sql.session.timeZone") or UTC


def run_id(df: DataFrame) -> str | None:
    """Return the id of the run of the streaming query that this thread belongs to; None if Spark does not say, or if
    there is none.
    """
    context = context_of_thread(df.sparkSession)
    query = None if context is None else running_query(df, context)
    return None if query is None else query.runId().toString()


def refuse_in_query(session: object, *, is_outside_queries: bool) -> None:
    """Raise ConfigError for an exactly-once batch write that runs inside foreachBatch, or may do so.

    `is_outside_queries` is the user's statement for a thread that does not say which query it belongs to.
    """
    from pyspark.sql import SparkSession as ClassicSession

    context = context_of_thread(session)
    if _is_connect_worker() or (context is not None and query_id_of(context)):
        raise ConfigError(f"delivery.guarantee=exactly-once: write was called inside foreachBatch. {_WAYS_OUT}")
    # Spark calls foreachBatch in its own threads, never in the main one.
    if is_outside_queries or threading.current_thread() is threading.main_thread():
        return
    if isinstance(session, ClassicSession) and not _active_queries(session).isEmpty():
        raise ConfigError(
            "delivery.guarantee=exactly-once: write was called in a thread that does not say which streaming query it"
            f" belongs to, and a streaming query is active: the call may be inside foreachBatch. {_WAYS_OUT} If it is"
            " not inside foreachBatch, call it in the main thread, or call write(df, is_outside_queries=True)."
        )


def is_connect_task(local_property: Callable[[str], str | None]) -> bool:
    """Return whether Spark Connect runs a task. `local_property` returns one of the task's local properties."""
    return _CONNECT_TAG in (local_property("spark.job.tags") or "")


def refuse_task_in_query(local_property: Callable[[str], str | None]) -> None:
    """Raise ConfigError for a task of `df.write.format("kafka_sink")`, exactly once, that a streaming query may run.

    `local_property` returns one of the task's local properties.
    """
    what = 'delivery.guarantee=exactly-once: df.write.format("kafka_sink") was called'
    if local_property(QUERY_ID) or local_property(_OF_QUERY_SESSIONS) is not None:
        raise ConfigError(f"{what} inside foreachBatch. {_WAYS_OUT}")
    if is_connect_task(local_property):
        raise ConfigError(
            f"{what} on Spark Connect, where Spark does not say whether the call is inside foreachBatch. {_WAYS_OUT}"
            " For a batch DataFrame call sink.write(df), which commits from the client and must reach the brokers."
        )


def refuse_beside_queries(has_query: bool | None) -> None:
    """Raise ConfigError for an exactly-once `df.write.format("kafka_sink")` that may be inside foreachBatch.

    `has_query`: the result of `has_query_thread`. A data source does not know the thread that called it.
    """
    if has_query is False:
        return
    why = "a streaming query is active" if has_query else "it is not known here whether a streaming query is active"
    raise ConfigError(
        f'delivery.guarantee=exactly-once: df.write.format("kafka_sink") was called, and {why}: the call may be inside'
        f" foreachBatch. {_WAYS_OUT} If it is not inside foreachBatch, call sink.write(df) in the main thread, or set"
        " write.outside.queries=true."
    )


def has_query_thread(proc: Path = Path("/proc")) -> bool | None:
    """Return whether the driver's JVM, a parent of this process, runs a streaming query. None if the system does not
    say.
    """
    pid = os.getppid()
    with suppress(OSError, ValueError, IndexError):
        for _ in range(_MOST_PARENTS):
            if (proc / str(pid) / "comm").read_text().strip() == "java":
                return any(name.startswith(_QUERY_THREAD) for name in _thread_names(proc / str(pid) / "task"))
            status = (proc / str(pid) / "status").read_text()
            pid = int(status.partition("\nPPid:")[2].split()[0])
    return None


def _thread_names(tasks: Path) -> list[str]:
    """Return the names of a process's threads, without those that end meanwhile."""
    names = []
    for task in tasks.iterdir():
        try:
            names.append((task / "comm").read_text())
        except FileNotFoundError:
            continue
    return names


def _is_connect_worker() -> bool:
    """Return whether Spark Connect calls foreachBatch in this process, started as a module or by a daemon."""
    own = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _CONNECT_WORKER in sys.modules or (own is not None and own.name == _CONNECT_WORKER)


def _active_queries(session: Any) -> Any:
    """Spark's own map of the streaming queries of all sessions, by id."""
    return session._jsparkSession.sharedState().activeStreamingQueries()
