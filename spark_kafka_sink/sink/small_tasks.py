"""Fewer tasks for a write, if its tasks would have almost nothing to do.

Spark makes a task for each partition of a DataFrame, and a shuffle makes 200 partitions, however few the rows are. A
task that runs Python takes 10 to 20 ms of a slot even if it sends nothing, and one of exactly-once delivery needs its
own transaction. So if the tasks of the last write were that small, each task of the next one takes the rows of several
partitions, by `DataFrame.coalesce`, which moves no row: 200 tasks of 50 rows take a seventh of the time.

Each slot first gets two tasks. As long as the tasks are small, the next write has half as many, down to a single one:
what a task costs before its first row is then more than what it saves by running beside others. If they take twice as
long, the next write has twice as many. A write of a streaming query is expected to be like its last one. For another
write, Spark estimates the bytes, and no task gets more than a task that reads files. A guess may be wrong: if there are
more rows than expected, or if the write fails, the next one has all its tasks again. If a write took longer with fewer
tasks, such as one with all its rows in neighbouring partitions, then the next hundred keep their tasks.

With spark.dynamicAllocation.enabled=true, Spark asks for executors by the tasks that wait, so all tasks stay. They stay
on Spark Connect too, which does not tell how many tasks run at once, with RocksDB as state store, and with a user's
functions, whose values may follow the number of the task. Owned by the driver; any thread may call.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from spark_kafka_sink.sink.arrow_batches import leaves_of, may_run_python, plans_of
from spark_kafka_sink.sink.running_query import context_of_thread, query_id_of, running_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

SMALL_MS: Final = 50
"""Tasks that take less on average are small: exactly once they take 10 ms for a row."""
TASKS_OF_A_SLOT: Final = 2
"""So many that slots which are done early get another one, and few enough to cost little."""
LONG_MS: Final = 2 * SMALL_MS
"""Tasks that take more on average, after their number was halved, are too few."""
MOST_BYTES: Final = 128 << 20
"""Of a task: Spark's default for a task that reads files (spark.sql.files.maxPartitionBytes)."""
_MOST_TASKS: Final = (1 << 31) - 1
"""Of a Java int."""
_TIMES: Final = 2
_RECORDS: Final = 10_000
"""A write with more than twice the records and this number is not like the last one."""
_MOST_SOURCES: Final = 1_000
"""That are known: a driver that runs for weeks may write to a new topic every hour."""
_STATE_STORE: Final = "spark.sql.streaming.stateStore.providerClass"
_STORE_OF_SPARK: Final = ".HDFSBackedStateStoreProvider"
"""The default. With RocksDB a task must have the state of one partition: a query with two operators with state in a
stage, such as dropDuplicates before groupBy, would fail.
"""
_FUNCTIONS_OF_THE_JVM: Final = ("SCALA_UDF", "SERIALIZE_FROM_OBJECT")
"""Functions in Scala or Java, and steps of a typed Dataset."""
_CLASS: Final = re.compile(r'\{"class":"([^"]+)"')
_BY_NAME: Final = frozenset({"CallMethodViaReflection", "ApplyFunctionExpression", "TypedFilter"})
"""Of Spark's own steps, those that call functions of a user, and have no pattern of plans: `reflect` and `java_method`,
functions of a catalog, and a filter of a typed Dataset. Spark has a package for those of Hive.
"""
_SPARKS: Final = "org.apache.spark."
_HIVES: Final = "org.apache.spark.sql.hive."
_KEPT: Final = 100
"""Writes after one that took longer with fewer tasks. It may have waited for a broker that started again."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where writes come from that are probably alike, and where they go."""

    topic: str | None
    """None: the rows name their topics."""
    query_id: str | None
    """None: this is no streaming query."""
    slots: int | None = field(compare=False)
    """How many tasks Spark runs at one time (spark.default.parallelism, or all cores of its executors). None: all tasks
    stay.
    """


class RanTasks(NamedTuple):
    """The tasks of a write that has ended."""

    tasks: int
    records: int
    busy_ms: int
    """The times of all tasks, added up: without what Spark needs to start them."""
    duration_ms: int
    """From the start of the first task to the end of the last one."""
    are_fewer: bool
    """Whether a task had the rows of several partitions."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], duration_ms: int, *, are_fewer: bool) -> RanTasks:
        """`rows`: what the tasks have reported, of `delivery.REPORT_DDL`."""
        facts = [json.loads(row["task"]) for row in rows if row["task"] is not None]
        busy_ms = sum(sum(each["durations_ms"].values()) for each in facts)
        return cls(len(facts), sum(row["records"] for row in rows), busy_ms, duration_ms, are_fewer)


class SmallTasks:
    """The sources whose last write with all its tasks had small ones."""

    def __init__(self) -> None:
        self._small: dict[Source, RanTasks] = {}
        self._kept: dict[Source, int] = {}
        """Sources whose writes took longer with fewer tasks, and how many more writes keep theirs."""
        self._most: dict[Source, int] = {}
        """Sources whose tasks were small when they were fewer, and how many the next write has."""

    def most_tasks(self, source: Source) -> int:
        """Return how many tasks the next write has if it has fewer. `source.slots` is known."""
        assert source.slots is not None
        return self._most.get(source, TASKS_OF_A_SLOT * source.slots)

    def has(self, source: Source) -> bool:
        """Return whether the next write shall have fewer tasks."""
        return source.slots is not None and source in self._small and not self._kept.get(source)

    def learn(self, source: Source, ran: RanTasks) -> None:
        """Note a write that has ended. One without records says nothing about the next."""
        if source.slots is None or not ran.records:
            return
        first_most = TASKS_OF_A_SLOT * source.slots
        if ran.are_fewer:
            self._learn_fewer(source, ran, first_most)
        else:
            self._most.pop(source, None)
            self._learn_all(source, ran, first_most)

    def forget(self, source: Source) -> None:
        """Let the next write have all its tasks. A task that takes several partitions needs more memory for some plans,
        such as a join by hash tables, which Spark frees at the end of the task.
        """
        self._small.pop(source, None)

    def _learn_all(self, source: Source, ran: RanTasks, most: int) -> None:
        was_small = self._small.pop(source, None) is not None
        kept = self._kept.pop(source, 0) - 1
        if kept > 0:
            self._kept[source] = kept
        if ran.tasks <= most or ran.busy_ms >= SMALL_MS * ran.tasks:
            return
        self._small[source] = ran
        _forget_oldest(self._small)
        if not was_small:
            log.info(
                "The %d tasks of a write to %s took %d ms on average. The next writes have at most %d, unless they are"
                " larger, or call functions of yours.",
                ran.tasks,
                "topics of a column" if source.topic is None else source.topic,
                ran.busy_ms // ran.tasks,
                most,
            )

    def _learn_fewer(self, source: Source, ran: RanTasks, first_most: int) -> None:
        with_all = self._small.get(source)
        if with_all is None:  # another thread has learned meanwhile
            return
        if ran.records > _TIMES * with_all.records + _RECORDS:
            self._small.pop(source, None)
        elif ran.duration_ms > with_all.duration_ms:
            self._kept[source] = _KEPT
            _forget_oldest(self._kept)
        elif ran.busy_ms < SMALL_MS * ran.tasks:
            self._most[source] = max(self.most_tasks(source) // 2, 1)
            _forget_oldest(self._most)
        elif ran.busy_ms > LONG_MS * ran.tasks and source in self._most:
            self._most[source] = min(2 * self.most_tasks(source), first_most)


def _forget_oldest(known: dict[Source, Any]) -> None:
    for old in [*known][:-_MOST_SOURCES]:
        known.pop(old, None)  # another thread may have taken it out


def source_of(df: DataFrame, topic: str | None) -> Source:
    """Return the source of a write that this thread makes."""
    session = df.sparkSession
    context = context_of_thread(session)
    if context is None or str(session.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
        return Source(topic, None, None)
    query_id = query_id_of(context)
    has_own_store = query_id is not None and not str(session.conf.get(_STATE_STORE)).endswith(_STORE_OF_SPARK)
    # A function may make ids of its task's number. By that Spark also computes a Python function's arguments: `rand(7)`
    keeps_tasks = has_own_store or may_run_python(df, context, also=_FUNCTIONS_OF_THE_JVM)
    return Source(topic, query_id, None if keeps_tasks else context.defaultParallelism)


def may_follow_tasks(df: DataFrame) -> bool:
    """Return whether values of `df` may follow the numbers of tasks in a way that `source_of` does not see, because no
    pattern of plans tells: by functions of a user in Java, or a source in Python. True also if Spark's counts of a
    cached DataFrame would. It looks at every step of the plan, which takes from half a millisecond to some tens of
    them, so it is only asked before a write with fewer tasks.
    """
    context = context_of_thread(df.sparkSession)
    plans = None if context is None else plans_of(df, context)
    if plans is None or any(_calls_java(plan) or _reads_by_python(plan) for plan in plans):
        return True
    return re.match(r"4\.2\b", df.sparkSession.version) is not None and _fills_a_cache(df)


def _fills_a_cache(df: DataFrame) -> bool:
    """Return whether a write of `df` would cache rows of a DataFrame. Spark 4.2 counts them by the number of the task:
    of a task with several partitions it keeps one count, and later it may take a query on these rows for empty.
    """
    cached = leaves_of(df._jdf.queryExecution().withCachedData())
    return any(
        not leaf.cacheBuilder().isCachedColumnBuffersLoaded()
        for leaf in cached
        if leaf.getClass().getSimpleName() == "InMemoryRelation"
    )


def _calls_java(plan: Any) -> bool:
    found = {name.removesuffix("$") for name in _CLASS.findall(plan.toJSON())}
    return any(
        not name.startswith(_SPARKS) or name.startswith(_HIVES) or name.rpartition(".")[2] in _BY_NAME for name in found
    )


def _reads_by_python(plan: Any) -> bool:
    return any(".python." in _reader(leaf) for leaf in leaves_of(plan))


def _reader(leaf: Any) -> str:
    """Return the class that reads a source, such as PythonTable; an empty text for a step that is no such source."""
    kind = leaf.getClass().getSimpleName()
    if kind == "StreamingDataSourceV2ScanRelation":
        return str(leaf.stream().getClass().getName())
    return str(leaf.table().getClass().getName()) if kind == "DataSourceV2Relation" else ""


def with_fewer_tasks(df: DataFrame, like: DataFrame, source: Source, most: int) -> DataFrame:
    """Return `df` with at most `most` partitions, or more for many bytes, or for the state of a query.

    Spark estimates the bytes of `like`, a DataFrame of the same rows.
    """
    assert source.slots is not None
    if source.query_id is not None and most < source.slots and _may_have_state(like):
        most = source.slots  # one task would have the state of all partitions in the memory of one executor
    if source.query_id is None:
        most = max(most, math.ceil(_estimated_bytes(like) / MOST_BYTES))
    most = min(most, _MOST_TASKS)
    return df if _is_coalesced_below(like, most) else df.coalesce(most)


def _may_have_state(df: DataFrame) -> bool:
    """Return whether the streaming query of this thread has operators with state. True also before its first progress,
    which says that.
    """
    context = context_of_thread(df.sparkSession)
    query = None if context is None else running_query(df, context)
    progress = None if query is None else query.lastProgress()
    return progress is None or len(progress.stateOperators()) > 0


def _is_coalesced_below(df: DataFrame, most: int) -> bool:
    """Return whether the user has coalesced `df` to fewer partitions than `most`, maybe for the order of the rows. Of
    two such steps in a row Spark keeps only the last one, and then there would be more tasks than without it.
    """
    pattern = df.sparkSession.sparkContext._jvm.org.apache.spark.sql.catalyst.trees.TreePattern  # type: ignore[union-attr]
    plans: list[Any] = [df._jdf.queryExecution().analyzed()]
    while plans:
        plan = plans.pop()
        if not plan.containsPattern(pattern.REPARTITION_OPERATION()):
            continue
        if plan.getClass().getSimpleName() == "Repartition" and not plan.shuffle() and plan.numPartitions() < most:
            return True
        children = plan.children()
        plans += [children.apply(at) for at in range(children.size())]
    return False


def _estimated_bytes(df: DataFrame) -> int:
    """Return Spark's estimate. If it knows nothing, that is 8 exabytes, and all tasks stay."""
    plan: Any = df._jdf.queryExecution().optimizedPlan()
    return int(plan.stats().sizeInBytes())
