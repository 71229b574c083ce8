"""The span of a batch, and the metrics of batches, on the driver.

In the user's own process the span begins with the batch and ends with it. With `format` the two are in different
processes of the driver, and a span cannot go from one to the other: the first process chooses its ids, the tasks make
their spans children of these ids, and the last process makes the span. Nothing here raises.

Names: https://opentelemetry.io/docs/specs/semconv/messaging, and `kafka_sink.` for what these do not have. Of an error
only the class is sent, because its text may have contents of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from spark_kafka_sink.common.batch_report import FAILED, BatchReport
from spark_kafka_sink.sink.telemetry.process import (
    Telemetry,
    guarded,
    process_telemetry,
    span_context_of,
    traceparent_of,
    unsent_tracer,
)

if TYPE_CHECKING:
    from spark_kafka_sink.sink.options import SinkConfig

NS_PER_MS: Final = 1_000_000
WORKER_WAIT_S: Final = 1.0
"""How long a batch of `format` waits at most for its receiver: Spark may kill that process right after the batch."""
UNKNOWN: Final = "_OTHER"
"""OpenTelemetry's `error.type` of an error that is not known."""
DURATION_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The bounds that the conventions give to messaging.client.operation.duration."""
_BATCH_BOUNDS_S: Final = (*DURATION_BOUNDS_S, 30, 60, 300, 900)
_MOST_TOPICS: Final = 10
_WRITE: Final = "write"

Attributes = Mapping[str, Any]


def destination(config: SinkConfig, operation: str) -> dict[str, Any]:
    """Return the attributes of spans and metrics that are known before rows are written."""
    host, port = config.producer.bootstrap_servers[0]
    known = {
        "messaging.system": "kafka",
        "messaging.operation.name": operation,
        "server.address": host,
        "server.port": int(port),
    }
    return known if config.topic is None else known | {"messaging.destination.name": config.topic}


def name_of(config: SinkConfig, operation: str) -> str:
    """Return the name of a span: the operation, and the topic if all rows go to one."""
    return operation if config.topic is None else f"{operation} {config.topic}"


def without_unknown(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


class BatchInstruments:
    """The metrics of batches."""

    def __init__(self, meter: Meter) -> None:
        self._batches = meter.create_counter("kafka_sink.batches", "{batch}", "Batches that have ended.")
        self._duration = meter.create_histogram(
            "kafka_sink.batch.duration",
            "s",
            "From the begin of a batch on the driver to its end.",
            explicit_bucket_boundaries_advisory=_BATCH_BOUNDS_S,
        )
        self._records = meter.create_counter(
            "kafka_sink.records", "{record}", "Records that batches have written, without dead letters."
        )
        self._letters = meter.create_counter(
            "kafka_sink.dead_letters", "{record}", "Rows that went to the dead letters, by the class of the reason."
        )

    def add(self, report: BatchReport) -> None:
        batch = without_unknown(
            {
                "messaging.system": "kafka",
                "kafka_sink.outcome": report.outcome,
                "kafka_sink.guarantee": report.guarantee,
                "kafka_sink.query.name": report.query_name,
                "error.type": _error_of(report),
            }
        )
        self._batches.add(1, batch)
        self._duration.record((report.ended_ms - report.began_ms) / 1000, batch)
        by_topic: dict[str, int] = {}
        for place in report.partitions:
            by_topic[place.topic] = by_topic.get(place.topic, 0) + place.records
        for topic, records in by_topic.items():
            self._records.add(records, {"messaging.system": "kafka", "messaging.destination.name": topic})
        for kind, rows in report.dead_letter_kinds.items():
            self._letters.add(rows, {"messaging.system": "kafka", "error.type": kind})


@guarded
def planned(config: SinkConfig, began_ms: int) -> str | None:
    """Return the traceparent of a span that another process will make, by `BatchTrace.end`."""
    span = unsent_tracer().start_span(**_beginning(config, began_ms), context=Context())
    return traceparent_of(span)


@dataclass(frozen=True, slots=True)
class BatchTrace:
    """The span of one batch, for the process that ends the batch."""

    config: SinkConfig
    traceparent: str | None
    """Of the span; None: it has neither parent nor children."""
    wait_s: float = 0
    span: Span | None = None
    """The span itself, if this process has begun it."""

    @classmethod
    @guarded
    def begin(cls, config: SinkConfig, began_ms: int) -> BatchTrace:
        """Begin the span: a child of the caller's own span, if there is one."""
        span = process_telemetry().tracer.start_span(**_beginning(config, began_ms))
        return cls(config, traceparent_of(span), span=span)

    @guarded
    def end(self, report: BatchReport) -> None:
        """End the span, and count the batch."""
        telemetry = process_telemetry()
        span = self.span or self._made(telemetry, report)
        if span is not None:
            self._end_span(telemetry, span, report)
        telemetry.of_process(BatchInstruments).add(report)
        telemetry.send(self.wait_s)

    def _made(self, telemetry: Telemetry, report: BatchReport) -> Span | None:
        """Return the span with the ids that were chosen for it; None if it was not sampled."""
        beginning = _beginning(self.config, report.began_ms)
        if self.traceparent is None:
            return telemetry.tracer.start_span(**beginning, context=Context())
        chosen = span_context_of(self.traceparent)
        if not chosen.trace_flags.sampled:
            return None
        with telemetry.giving(chosen.trace_id, chosen.span_id):
            return telemetry.tracer.start_span(**beginning, context=Context())

    def _end_span(self, telemetry: Telemetry, span: Span, report: BatchReport) -> None:
        if not span.is_recording():
            return
        span.set_attributes(_facts(self.config, report))
        if report.outcome == FAILED:
            span.set_status(Status(StatusCode.ERROR, report.error))
        inside = set_span_in_context(span, Context())
        at_ms = report.began_ms
        for phase, duration_ms in report.durations_ms.items():
            part = telemetry.tracer.start_span(phase, inside, start_time=at_ms * NS_PER_MS)
            at_ms += duration_ms
            part.end(at_ms * NS_PER_MS)
        span.end(report.ended_ms * NS_PER_MS)


def _beginning(config: SinkConfig, began_ms: int) -> dict[str, Any]:
    return {
        "name": name_of(config, _WRITE),
        "kind": SpanKind.INTERNAL,
        "attributes": destination(config, _WRITE),
        "start_time": began_ms * NS_PER_MS,
    }


def _facts(config: SinkConfig, report: BatchReport) -> Attributes:
    topics = sorted({place.topic for place in report.partitions})[:_MOST_TOPICS]
    return without_unknown(
        {
            "messaging.batch.message_count": report.records,
            "error.type": _error_of(report),
            "kafka_sink.outcome": report.outcome,
            "kafka_sink.guarantee": report.guarantee,
            "kafka_sink.query.id": report.query_id,
            "kafka_sink.query.name": report.query_name,
            "kafka_sink.run.id": report.run_id,
            "kafka_sink.batch.id": report.batch_id,
            "kafka_sink.topics": topics if config.topic is None else None,
            "kafka_sink.tasks": report.tasks,
            "kafka_sink.bytes": report.bytes,
            "kafka_sink.batches": report.batches,
            "kafka_sink.retries": report.retries,
            "kafka_sink.dead_letters": report.dead_letters,
            "kafka_sink.skipped_records": report.skipped_records,
        }
    )


def _error_of(report: BatchReport) -> str | None:
    return (report.error or UNKNOWN) if report.outcome == FAILED else None
