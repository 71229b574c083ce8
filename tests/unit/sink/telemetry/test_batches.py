"""The span and the metrics of a batch: in one process, and begun in another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from support.own_telemetry import KeptTelemetry, keep, new_process

from spark_kafka_sink.common.batch_report import BatchReport, WrittenPartition
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.telemetry.batches import WORKER_WAIT_S, BatchTrace, planned
from spark_kafka_sink.sink.telemetry.process import span_context_of

OPTIONS = {"kafka.bootstrap.servers": "h1:9092,h2:9093", "telemetry.opentelemetry": "true"}
CONFIG = SinkConfig.from_options(OPTIONS | {"topic": "orders"})
BEGAN_MS = 1_700_000_000_000
REPORT = BatchReport(
    "complete",
    "exactly-once",
    BEGAN_MS,
    BEGAN_MS + 1_500,
    query_id="q-id",
    run_id="r-id",
    batch_id=7,
    query_name="totals",
    tasks=2,
    partitions=(WrittenPartition("orders", 0, 3, 30, 0, 2), WrittenPartition("orders", 1, 4, 45, 9, 12)),
    dead_letter_partitions=(WrittenPartition("orders-dead", 0, 1, 11, 5, 5),),
    dead_letter_kinds={"x.RecordTooLargeError": 1},
    durations_ms={"plan": 100, "tasks": 1_000, "decide": 300, "commit": 100},
)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptTelemetry:
    return keep(monkeypatch)


def test_span_of_a_batch_has_its_phases_inside(kept: KeptTelemetry) -> None:
    trace = BatchTrace.begin(CONFIG, BEGAN_MS)
    assert trace is not None
    trace.end(REPORT)
    *phases, span = kept.spans
    assert (span.name, span.kind, span.parent) == ("write orders", SpanKind.INTERNAL, None)
    assert (span.start_time, span.end_time) == (BEGAN_MS * 1_000_000, (BEGAN_MS + 1_500) * 1_000_000)
    assert span.status.status_code == StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "write",
        "messaging.destination.name": "orders",
        "messaging.batch.message_count": 7,
        "server.address": "h1",
        "server.port": 9092,
        "kafka_sink.outcome": "complete",
        "kafka_sink.guarantee": "exactly-once",
        "kafka_sink.query.id": "q-id",
        "kafka_sink.query.name": "totals",
        "kafka_sink.run.id": "r-id",
        "kafka_sink.batch.id": 7,
        "kafka_sink.tasks": 2,
        "kafka_sink.bytes": 75,
        "kafka_sink.batches": 0,
        "kafka_sink.retries": 0,
        "kafka_sink.dead_letters": 1,
        "kafka_sink.skipped_records": 0,
    }
    ms, began = 1_000_000, BEGAN_MS * 1_000_000
    times = [(each.name, (each.start_time or 0) - began, (each.end_time or 0) - began) for each in phases]
    assert times == [
        ("plan", 0, 100 * ms),
        ("tasks", 100 * ms, 1_100 * ms),
        ("decide", 1_100 * ms, 1_400 * ms),
        ("commit", 1_400 * ms, 1_500 * ms),
    ]
    assert {each.parent and each.parent.span_id for each in phases} == {span.context.span_id}
    assert kept.waits_s == [0]  # the user's own process does not wait


def test_callers_own_span_is_the_parent(kept: KeptTelemetry) -> None:
    with kept.telemetry.tracer.start_as_current_span("nightly") as outer:
        trace = BatchTrace.begin(CONFIG, BEGAN_MS)
        assert trace is not None
        trace.end(replace(REPORT, durations_ms={}))
    inner, _ = kept.spans
    assert inner.parent == outer.get_span_context()
    assert trace.traceparent is not None
    assert span_context_of(trace.traceparent).trace_id == outer.get_span_context().trace_id


def test_span_that_another_process_has_planned_has_its_ids(kept: KeptTelemetry) -> None:
    traceparent = planned(CONFIG, BEGAN_MS)
    assert traceparent is not None
    assert kept.spans == []
    BatchTrace(CONFIG, traceparent, WORKER_WAIT_S).end(REPORT)
    span = kept.spans[-1]
    assert traceparent.startswith(f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-")
    assert (span.parent, span.start_time) == (None, BEGAN_MS * 1_000_000)
    assert kept.waits_s == [WORKER_WAIT_S]
    BatchTrace(CONFIG, None).end(REPORT)  # nothing tells of the first process
    assert kept.spans[-1].context.trace_id != span.context.trace_id


def test_batch_that_is_not_sampled_has_no_span_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_process(monkeypatch, OTEL_TRACES_SAMPLER="always_off"):
        traceparent = planned(CONFIG, BEGAN_MS)
    kept = keep(monkeypatch)
    BatchTrace(CONFIG, traceparent).end(REPORT)
    off = keep(monkeypatch, ALWAYS_OFF)
    trace = BatchTrace.begin(CONFIG, BEGAN_MS)
    assert trace is not None
    trace.end(REPORT)
    assert (kept.spans, off.spans) == ([], [])
    assert [value for _, value in (*kept.points("kafka_sink.batches"), *off.points("kafka_sink.batches"))] == [1, 1]


@pytest.mark.parametrize(
    ("error", "shown"), [("builtins.ZeroDivisionError", "builtins.ZeroDivisionError"), (None, "_OTHER")]
)
def test_failed_batch_has_the_class_of_its_error(kept: KeptTelemetry, error: str | None, shown: str) -> None:
    trace = BatchTrace.begin(CONFIG, BEGAN_MS)
    assert trace is not None
    trace.end(replace(REPORT, outcome="failed", error=error, durations_ms={}))
    (span,) = kept.spans
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, error)
    assert (span.attributes or {})["error.type"] == shown
    ((attributes, _),) = kept.points("kafka_sink.batches")
    assert (attributes["error.type"], attributes["kafka_sink.outcome"]) == (shown, "failed")


def test_batch_without_the_option_topic_names_ten_topics(kept: KeptTelemetry) -> None:
    many = tuple(WrittenPartition(f"t{number:03}", 0, 1, 1, 0, 0) for number in range(50))
    trace = BatchTrace.begin(SinkConfig.from_options(OPTIONS), BEGAN_MS)
    assert trace is not None
    trace.end(replace(REPORT, partitions=many, durations_ms={}))
    (span,) = kept.spans
    assert span.name == "write"
    assert (span.attributes or {})["kafka_sink.topics"] == tuple(f"t{number:03}" for number in range(10))
    assert "messaging.destination.name" not in (span.attributes or {})


def test_metrics_of_batches_add_up(kept: KeptTelemetry) -> None:
    for _ in range(2):
        BatchTrace(CONFIG, None).end(REPORT)
    of_batch = {
        "messaging.system": "kafka",
        "kafka_sink.outcome": "complete",
        "kafka_sink.guarantee": "exactly-once",
        "kafka_sink.query.name": "totals",
    }
    assert kept.points("kafka_sink.batches") == [(of_batch, 2)]
    assert kept.points("kafka_sink.batch.duration") == [(of_batch, 3.0)]
    orders = {"messaging.system": "kafka", "messaging.destination.name": "orders"}
    assert kept.points("kafka_sink.records") == [(orders, 14)]
    letters = {"messaging.system": "kafka", "error.type": "x.RecordTooLargeError"}
    assert kept.points("kafka_sink.dead_letters") == [(letters, 2)]
