"""The span of a task that sends rows, the metrics of its worker, and the header `traceparent` of its records.

The span is a child of the batch's span, wherever the driver made that. `foreach` and `foreachPartition` have none: the
tasks of one micro-batch then share a trace whose id is made of the query's run and the batch, and each span is a root.

A worker may end right after its task, so the task waits for its receiver when all its rows are acknowledged. Nothing
here raises. Used by the task's thread only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from pyspark import TaskContext

from spark_kafka_sink.common.clock import Clock, SystemClock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.producer.writes import Delivered, RowCounts
from spark_kafka_sink.sink.batch_run import QueryIds, Stopwatch
from spark_kafka_sink.sink.telemetry.batches import (
    DURATION_BOUNDS_S,
    NS_PER_MS,
    destination,
    name_of,
    without_unknown,
)
from spark_kafka_sink.sink.telemetry.process import (
    TRACEPARENT,
    Telemetry,
    context_of,
    guarded,
    process_telemetry,
    traceparent_of,
)
from spark_kafka_sink.sink.telemetry.producers import ProducerInstruments
from spark_kafka_sink.sink.worker import stays

if TYPE_CHECKING:
    from spark_kafka_sink.record.headers import Header
    from spark_kafka_sink.sink.options import SinkConfig
    from spark_kafka_sink.sink.producer_pool import ProducerPool

TASK_WAIT_S: Final = 1.0
"""How long a task waits at most for its receiver."""
_SEND: Final = "send"


class TaskInstruments:
    """The metrics that the conventions name."""

    def __init__(self, meter: Meter) -> None:
        self.sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Records that producers have sent, or have given up."
        )
        self.duration = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "From a task's first row to the acknowledgement of its last one.",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDS_S,
        )


class _Counted(NamedTuple):
    """The rows of a task at its end. If it has failed, the Sender thread may still count others."""

    acknowledged: int
    failed: int
    delivered: Mapping[TopicPartition, Delivered]

    @classmethod
    def of(cls, counts: RowCounts) -> _Counted:
        return cls(counts.acknowledged, counts.failed, counts.delivered.copy())


class TaskTrace:
    """The telemetry of one task. Until `begin` it does nothing: a task without rows has no span."""

    def __init__(self, config: SinkConfig, pool: ProducerPool, clock: Clock | None = None) -> None:
        self._config = config
        self._pool = pool
        self._clock = clock or SystemClock()
        self._watch: Stopwatch | None = None
        self._span: Span | None = None
        self._has_ended = False
        self._header: Header | None = None

    def begin(self) -> Header | None:
        """Begin the span, unless it has begun. Return the header that each record gets; None if none is wanted, or if
        the tracer is switched off.
        """
        if self._watch is None:
            self._watch = Stopwatch(self._clock)
            self._begin_span(self._watch.began_ms)
        return self._header

    @guarded
    def _begin_span(self, began_ms: int) -> None:
        telemetry = process_telemetry()
        ids = QueryIds.of_task()
        beginning: dict[str, Any] = {
            "name": name_of(self._config, _SEND),
            "kind": SpanKind.PRODUCER,
            "attributes": destination(self._config, _SEND) | {"messaging.operation.type": _SEND} | _place(ids),
            "start_time": began_ms * NS_PER_MS,
        }
        parent = self._config.batch_trace
        if parent is None and (trace_id := trace_of_batch(ids)) is not None:
            with telemetry.giving(trace_id):
                self._span = telemetry.tracer.start_span(**beginning, context=Context())
        else:
            self._span = telemetry.tracer.start_span(**beginning, context=context_of(parent))
        traceparent = traceparent_of(self._span)
        if self._config.writes_traceparent and traceparent is not None:
            self._header = TRACEPARENT, traceparent.encode()

    def end(
        self, counts: Iterable[RowCounts], durations_ms: Mapping[str, int], client_id: str | None, error: str | None
    ) -> None:
        """End the span, count the records, and wait for the receiver. Only the first call counts. `counts`: of the
        rows and of the dead letters. `error`: the class of a failed task's error.
        """
        if self._watch is not None and not self._has_ended:
            self._has_ended = True
            self._end([_Counted.of(each) for each in counts], durations_ms, client_id, error)

    @guarded
    def _end(
        self, counts: list[_Counted], durations_ms: Mapping[str, int], client_id: str | None, error: str | None
    ) -> None:
        assert self._watch is not None
        telemetry = process_telemetry()
        ended_ms = self._watch.now_ms()
        common = destination(self._config, _SEND) | {"messaging.operation.type": _SEND}
        failure = {} if error is None else {"error.type": error}
        if self._span is not None:
            self._span.set_attributes(_facts(counts, durations_ms, client_id) | failure)
            if error is not None:
                self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.end(ended_ms * NS_PER_MS)
        instruments = telemetry.of_process(TaskInstruments)
        instruments.duration.record((ended_ms - self._watch.began_ms) / 1000, common | failure)
        for each in counts:
            for (topic, _), delivered in each.delivered.items():
                instruments.sent.add(delivered.records, common | {"messaging.destination.name": topic})
            if each.failed:
                instruments.sent.add(each.failed, common | failure)
        _of_producers(telemetry, self._pool).observe_new()
        telemetry.send(TASK_WAIT_S, may_linger=error is None and stays())


def trace_of_batch(ids: QueryIds) -> int | None:
    """Return the trace id that all tasks of a micro-batch share; None outside of a stream."""
    if ids.run_id is None or ids.batch_id is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{ids.run_id}/{ids.batch_id}".encode()).digest()[:16])


_instruments: Final[WeakKeyDictionary[ProducerPool, ProducerInstruments]] = WeakKeyDictionary()


def _of_producers(telemetry: Telemetry, pool: ProducerPool) -> ProducerInstruments:
    """Return the instruments of this pool's producers."""
    found = _instruments.get(pool)
    if found is None:
        found = _instruments[pool] = ProducerInstruments(telemetry.slow_meter, pool, SystemClock())
    return found


def _place(ids: QueryIds) -> dict[str, Any]:
    """Return what Spark says of the running task."""
    task = TaskContext.get()
    numbers = (
        {}
        if task is None
        else {
            "kafka_sink.stage.id": task.stageId(),
            "kafka_sink.partition": task.partitionId(),
            "kafka_sink.attempt": task.attemptNumber(),
        }
    )
    of_query = {
        "kafka_sink.query.id": ids.query_id,
        "kafka_sink.run.id": ids.run_id,
        "kafka_sink.batch.id": ids.batch_id,
    }
    return without_unknown(numbers | of_query)


def _facts(counts: list[_Counted], durations_ms: Mapping[str, int], client_id: str | None) -> dict[str, Any]:
    rows, *letters = counts
    places = {place for each in counts for place in each.delivered}
    return without_unknown(
        {
            "messaging.batch.message_count": rows.acknowledged + rows.failed,
            "messaging.client.id": client_id,
            "messaging.destination.partition.id": str(next(iter(places)).partition) if len(places) == 1 else None,
            "kafka_sink.bytes": sum(each.size for each in rows.delivered.values()),
            "kafka_sink.dead_letters": letters[0].acknowledged if letters else None,
            **{f"kafka_sink.{phase}.duration": spent_ms / 1000 for phase, spent_ms in durations_ms.items()},
        }
    )
