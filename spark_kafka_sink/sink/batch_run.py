"""What is known of a batch while it runs, on the driver: where it comes from, what its tasks reported, and its times.

Always kept, because it costs nothing. Only a sink whose reports somebody wants makes a `BatchReport` of it, by
reports.py, which no other process imports. Owned by the thread that runs the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark import TaskContext

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.sink.running_query import QUERY_ID

if TYPE_CHECKING:
    from spark_kafka_sink.common.batch_report import BatchReport

BATCH_ID: Final = "streaming.sql.batchId"
_JOB_GROUP: Final = "spark.jobGroup.id"
"""Spark's local property of a query's thread: the id of the run."""


class QueryIds(NamedTuple):
    """The streaming query of a batch. None: there is no query, or Spark does not say."""

    query_id: str | None = None
    run_id: str | None = None
    batch_id: int | None = None
    query_name: str | None = None

    @classmethod
    def of_task(cls) -> QueryIds:
        """Return those of the running task."""
        context = TaskContext.get()
        if context is None or not (query_id := context.getLocalProperty(QUERY_ID)):
            return cls()
        batch_id = context.getLocalProperty(BATCH_ID)
        return cls(query_id, context.getLocalProperty(_JOB_GROUP), None if batch_id is None else int(batch_id))


NO_QUERY: Final = QueryIds()


@dataclass(slots=True)
class BatchRun:
    """One batch. Times are ms since 1970."""

    is_exactly_once: bool
    began_ms: int
    ids: QueryIds = NO_QUERY
    rows: Iterable[Any] = ()
    """The tasks' rows of `REPORT_DDL`: mappings, or Rows of Spark."""
    skipped_records: int | None = None
    """Rows of a batch that is skipped, because it was committed before; None if it is not skipped."""
    durations_ms: dict[str, int] = field(default_factory=dict)
    on_end: list[Callable[[BatchReport], object]] = field(default_factory=list)
    """Get the report besides those who asked for reports: with lineage.openlineage and telemetry.opentelemetry."""
    traceparent: str | None = None
    """Of the batch's span, for its tasks; None without one."""
    ended_ms: int = field(init=False)

    def __post_init__(self) -> None:
        self.ended_ms = self.began_ms

    def end(self, phase: str, now_ms: int) -> None:
        """Note the end of a phase. The next one begins. A clock may be set back: then the phase took no time."""
        self.durations_ms[phase] = max(0, now_ms - self.ended_ms)
        self.ended_ms = max(self.ended_ms, now_ms)

    def end_tasks(self, started_ms: int, ended_ms: int, now_ms: int) -> None:
        """Note the begin of the first task and the end of the last one, by the clocks of their machines. These may be
        wrong: then the times are moved, so that they lie between the begin of the batch and `now_ms`.
        """
        ahead_ms, behind_ms = max(0, ended_ms - now_ms), max(0, self.began_ms - started_ms)
        moved_ms = -ahead_ms if ahead_ms else behind_ms
        self.end("plan", started_ms + moved_ms)
        self.end("tasks", min(ended_ms + moved_ms, now_ms))

    def fail(self, now_ms: int) -> None:
        """Note the end of a batch that failed. A clock may be set back."""
        self.ended_ms = max(self.ended_ms, now_ms)

    def end_commit(self, decided_ms: int | None, now_ms: int) -> None:
        """Note the end of an exactly-once batch. `decided_ms`: when its decision counted, None if it had none."""
        if decided_ms is not None:
            self.end("decide", min(decided_ms, now_ms))
        self.end("commit", now_ms)

    @property
    def duration(self) -> float:
        """Seconds."""
        return (self.ended_ms - self.began_ms) / 1000


class Stopwatch:
    """The time of day that a clock showed at the begin, and the time that has passed since. Nobody can set it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.began_ms = clock.wall_ms()
        self._origin_ms = self.began_ms - clock.now_ms()

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self._origin_ms + self._clock.now_ms()
