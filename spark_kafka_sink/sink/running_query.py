"""Which streaming query the running thread belongs to, if any: foreachBatch does not say it with its DataFrame.

The driver's threads. In Spark Connect only the process tells whether it runs a foreachBatch function.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

_CONNECT_WORKER: Final = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
"""The main module of the process in which a server of Spark Connect runs a foreachBatch function."""

QUERY_ID: Final = "sql.streaming.queryId"
"""Spark's local property of a streaming query's thread, which its tasks have too."""


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


class Place(enum.Enum):
    """Where a call comes from."""

    OUTSIDE = "no foreachBatch"
    INSIDE = "foreachBatch"
    UNKNOWN = "a thread that may belong to foreachBatch"


def place_of_thread(session: object) -> Place:
    """Whether the running thread belongs to a foreachBatch call, for a session of either kind.

    A thread that the user started tells nothing: its place is UNKNOWN while any streaming query runs in the
    application. The main thread and a pyspark.InheritableThread are known, because Spark calls foreachBatch in other
    threads, and an InheritableThread has the query id of the thread that started it.
    """
    from pyspark.sql import SparkSession as ClassicSession

    if not isinstance(session, ClassicSession):
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        return Place.INSIDE if spec is not None and spec.name == _CONNECT_WORKER else Place.OUTSIDE
    context = context_of_thread(session)
    if context is not None and query_id_of(context):
        return Place.INSIDE
    if _is_known_thread() or session._jsparkSession.sharedState().activeStreamingQueries().isEmpty():
        return Place.OUTSIDE
    return Place.UNKNOWN


def _is_known_thread() -> bool:
    from pyspark import InheritableThread

    thread = threading.current_thread()
    return thread is threading.main_thread() or (has_own_threads() and isinstance(thread, InheritableThread))


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
    return df.sparkSession._jsparkSession.sharedState().activeStreamingQueries().get(key)
