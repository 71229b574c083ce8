"""The streaming query whose thread runs: what foreachBatch does not say of a micro-batch's DataFrame. The driver's
threads; not in Spark Connect.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark_kafka_sink.common.errors import ConfigError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

QUERY_ID: Final = "sql.streaming.queryId"
"""Spark's local property of a streaming query's thread, which its tasks have too."""
_OF_QUERY_SESSIONS: Final = "spark.sql.streaming.internal.stateStore.partitions"
"""Spark 4.2 and later set it in a streaming query's own session, and a session's settings reach its tasks."""
_CONNECT_TAG: Final = "SparkConnect_"
"""The jobs of Spark Connect carry tags that begin with it."""
_CONNECT_WORKER: Final = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
"""The module of the Python process in which Spark Connect calls foreachBatch."""

_QUERY_THREAD: Final = "stream "
"""How Linux shows the name of a streaming query's thread, "stream execution thread for ...": shortened, by each Java in
its own way.
"""
_MOST_PARENTS: Final = 4
"""From a planning worker to the driver's JVM it is two: Spark's daemon of workers comes between."""

_WAYS_OUT: Final = (
    "Spark may run a micro-batch again, and its rows would then be written twice. For a streaming query use"
    " foreachBatch(sink.write_batch), which gives the report too (not on Spark Connect), or"
    ' writeStream.format("kafka_sink").'
)


def has_own_threads() -> bool:
    """Whether each thread of Python has one of the JVM's to itself, with its local properties: False with
    PYSPARK_PIN_THREAD=false, where foreachBatch calls in one and what it calls is run in any.
    """
    return os.environ.get("PYSPARK_PIN_THREAD", "true").lower() == "true"


def context_of_thread(session: object) -> SparkContext | None:
    """The context, where local properties that are set by it are those of the thread that calls: None in Spark Connect,
    and where threads of Python share those of the JVM.
    """
    from pyspark.sql import SparkSession as ClassicSession

    return session.sparkContext if isinstance(session, ClassicSession) and has_own_threads() else None


def query_id_of(context: SparkContext) -> str | None:
    """Of the streaming query whose thread this is, as in `foreachBatch`; None where there is none."""
    return context.getLocalProperty(QUERY_ID)


def running_query(df: DataFrame, context: SparkContext) -> Any | None:
    """Spark's own object of it, None where there is none."""
    query_id = query_id_of(context)
    if query_id is None:
        return None
    assert context._jvm is not None
    key = context._jvm.java.util.UUID.fromString(query_id)
    return _active_queries(df.sparkSession).get(key)


def refuse_in_query(session: object, *, is_outside_queries: bool) -> None:
    """Raise ConfigError for an exactly-once batch write that runs inside foreachBatch, or may do so.

    `is_outside_queries` is the user's word for a thread that does not say which query it belongs to.
    """
    from pyspark.sql import SparkSession as ClassicSession

    context = context_of_thread(session)
    if _is_connect_worker() or (context is not None and query_id_of(context)):
        raise ConfigError(f"delivery.guarantee=exactly-once: write was called inside foreachBatch. {_WAYS_OUT}")
    # Spark calls foreachBatch in threads of its own, never in the main one.
    if is_outside_queries or threading.current_thread() is threading.main_thread():
        return
    if isinstance(session, ClassicSession) and not _active_queries(session).isEmpty():
        raise ConfigError(
            "delivery.guarantee=exactly-once: write was called in a thread that does not say which streaming query it"
            f" belongs to, and a streaming query is active: the call may be inside foreachBatch. {_WAYS_OUT} If it is"
            " not inside foreachBatch, call it in the main thread, or call write(df, is_outside_queries=True)."
        )


def refuse_task_in_query(local_property: Callable[[str], str | None]) -> None:
    """Raise ConfigError for a task of `df.write.format("kafka_sink")`, exactly once, that a streaming query may run.

    `local_property` returns one of the task's local properties.
    """
    what = 'delivery.guarantee=exactly-once: df.write.format("kafka_sink") was called'
    if local_property(QUERY_ID) or local_property(_OF_QUERY_SESSIONS) is not None:
        raise ConfigError(f"{what} inside foreachBatch. {_WAYS_OUT}")
    if _CONNECT_TAG in (local_property("spark.job.tags") or ""):
        raise ConfigError(
            f"{what} on Spark Connect, where Spark does not say whether the call is inside foreachBatch. {_WAYS_OUT}"
            " For a batch DataFrame call sink.write(df), which commits from the client and must reach the brokers."
        )


def refuse_beside_queries(has_query: bool | None) -> None:
    """Raise ConfigError for an exactly-once `df.write.format("kafka_sink")` that may be inside foreachBatch.

    `has_query`: what `has_query_thread` returned. Spark tells a data source nothing of the thread that called it.
    """
    if has_query is False:
        return
    why = "a streaming query is active" if has_query else "it cannot be told here whether a streaming query is active"
    raise ConfigError(
        f'delivery.guarantee=exactly-once: df.write.format("kafka_sink") was called, and {why}: the call may be inside'
        f" foreachBatch. {_WAYS_OUT} If it is not inside foreachBatch, call sink.write(df) in the main thread, or set"
        " write.outside.queries=true."
    )


def has_query_thread(proc: Path = Path("/proc")) -> bool | None:
    """Whether the driver's JVM, a parent of this process, runs a streaming query. None: the system does not say."""
    pid = os.getppid()
    with suppress(OSError, ValueError, IndexError):
        for _ in range(_MOST_PARENTS):
            if (proc / str(pid) / "comm").read_text().strip() == "java":
                return any(name.startswith(_QUERY_THREAD) for name in _thread_names(proc / str(pid) / "task"))
            status = (proc / str(pid) / "status").read_text()
            pid = int(status.partition("\nPPid:")[2].split()[0])
    return None


def _thread_names(tasks: Path) -> list[str]:
    """Of the threads of a process; those that end meanwhile are left out."""
    names = []
    for task in tasks.iterdir():
        try:
            names.append((task / "comm").read_text())
        except FileNotFoundError:
            continue
    return names


def _is_connect_worker() -> bool:
    """Whether this is the process in which Spark Connect calls foreachBatch, started as a module or by a daemon."""
    own = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _CONNECT_WORKER in sys.modules or (own is not None and own.name == _CONNECT_WORKER)


def _active_queries(session: Any) -> Any:
    """Spark's own map of the streaming queries of all sessions, by id."""
    return session._jsparkSession.sharedState().activeStreamingQueries()
