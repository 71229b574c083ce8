"""The streaming query whose thread runs: what foreachBatch does not say of a micro-batch's DataFrame. The driver's
threads; not in Spark Connect.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

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
