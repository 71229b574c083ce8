"""The tracer and the meter of a process: its user's, else its own by OpenTelemetry's variables."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.fresh_process import run_strictly
from support.otlp_receiver import OtlpReceiver, receiving_otlp
from support.own_telemetry import new_process

from spark_kafka_sink.common.version import VERSION
from spark_kafka_sink.sink.telemetry import process
from spark_kafka_sink.sink.telemetry.process import (
    Telemetry,
    context_of,
    guarded,
    process_telemetry,
    span_context_of,
    traceparent_of,
    unsent_tracer,
)

LONG_S = 60.0
CANARY = "canary-Zx9Qw7"
TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with receiving_otlp() as receiver:
        yield receiver


def record(telemetry: Telemetry) -> None:
    telemetry.tracer.start_span("work").end()
    telemetry.meter.create_counter("done").add(2)


def test_own_providers_send_where_the_variables_say(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = receiver.environment(
        OTEL_SERVICE_NAME="orders", OTEL_RESOURCE_ATTRIBUTES="team=a", OTEL_EXPORTER_OTLP_HEADERS=f"api-key={CANARY}"
    )
    with new_process(monkeypatch, **variables):
        telemetry = process_telemetry()
        assert process_telemetry() is telemetry
        record(telemetry)
        assert telemetry.send(LONG_S)
        (span,) = receiver.spans
        assert (span.name, span.resource["service.name"], span.resource["team"]) == ("work", "orders", "a")
        assert receiver.sums("done") == {(): 2}
        assert {headers["api-key"] for headers in receiver.headers} == {CANARY}
        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)  # the user's choice stays open
        assert "Proxy" in type(metrics.get_meter_provider()).__name__


def test_process_without_a_name_has_one_and_an_id_of_its_own(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_process(monkeypatch, **receiver.environment()):
        record(process_telemetry())
        assert process_telemetry().send(LONG_S)
    (span,) = receiver.spans
    assert span.resource["service.name"] == "spark-kafka-sink"
    assert span.resource["service.instance.id"]


def test_users_own_providers_are_used_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = InMemorySpanExporter()
    traces, meters = TracerProvider(shutdown_on_exit=False), MeterProvider(shutdown_on_exit=False)
    traces.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)
    with new_process(monkeypatch):
        record(process_telemetry())
        assert process_telemetry()._providers == [traces, meters]
        assert process_telemetry().slow_meter is process_telemetry().meter
    (span,) = spans.get_finished_spans()
    scope = span.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version) == ("spark_kafka_sink", VERSION)


def test_forked_process_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_process(monkeypatch, OTEL_TRACES_EXPORTER="none", OTEL_METRICS_EXPORTER="none"):
        parents = process_telemetry()
        process_id = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: process_id + 1)
        assert process_telemetry() is not parents


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "no installed package has the exporter 'zipkin' for OTEL_TRACES_EXPORTER"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "no installed package has the exporter 'otlp_proto_grpc'"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-7", "one of them has a value that cannot be used"),
    ],
)
def test_variables_that_cannot_work_are_logged_and_nothing_is_recorded(
    variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    more = {} if variable.endswith("PROTOCOL") else {"OTEL_METRICS_EXPORTER": "none"}
    with new_process(monkeypatch, **{variable: value}, **more):
        record(process_telemetry())
        assert process_telemetry().send(LONG_S)
    assert text in caplog.text
    assert "OpenTelemetry spans are not recorded in this process" in caplog.text


@pytest.mark.parametrize("variable", ["HEADERS", "TRACES_HEADERS", "METRICS_HEADERS"])
def test_malformed_headers_are_not_in_the_log(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    """Bug: OpenTelemetry's own warning had them, such as a token after a colon."""
    headers = {f"OTEL_EXPORTER_OTLP_{variable}": f"Authorization: Bearer {CANARY},{CANARY}"}
    with new_process(monkeypatch, **receiver.environment(**headers)):
        record(process_telemetry())
    assert "Header format invalid!" in caplog.text
    assert CANARY not in caplog.text
    logging.getLogger("opentelemetry.util.re").warning("of the user's own: %s", "text")
    assert "of the user's own: text" in caplog.text


def test_signals_can_be_switched_off_one_by_one(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_process(monkeypatch, **receiver.environment(OTEL_TRACES_EXPORTER="none")):
        record(process_telemetry())
        assert process_telemetry().send(LONG_S)
    assert (receiver.spans, receiver.sums("done")) == ([], {(): 2})


def test_slow_metrics_are_not_awaited_and_come_each_interval(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_process(monkeypatch, **receiver.environment(OTEL_METRIC_EXPORT_INTERVAL="3600000")):
        telemetry = process_telemetry()
        telemetry.slow_meter.create_counter("slow").add(3)
        record(telemetry)
        assert telemetry.send(LONG_S)
        assert receiver.metrics() == {"done"}
        telemetry._unsent.force_flush()  # as its own thread does after an hour
        assert receiver.metrics() == {"done", "slow"}
        (instance,) = {instance for instance, _, _ in receiver._points}
        assert instance == receiver.spans[0].resource["service.instance.id"]


# ---- ids -------------------------------------------------------------------------------------------------------------


def test_traceparent_leads_to_its_span_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_process(monkeypatch):
        begun = unsent_tracer().start_span("batch")
        text = traceparent_of(begun)
        assert text is not None
        found = span_context_of(text)
        assert (found.trace_id, found.span_id) == (begun.get_span_context().trace_id, begun.get_span_context().span_id)
        assert found.trace_flags.sampled
        child = unsent_tracer().start_span("task", context=context_of(text))
        assert child.get_span_context().trace_id == found.trace_id
        assert context_of(None) == {}


def test_sampler_of_the_variables_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_process(monkeypatch, OTEL_TRACES_SAMPLER="always_off"):
        text = traceparent_of(unsent_tracer().start_span("batch"))
        assert text is not None
        assert not span_context_of(text).trace_flags.sampled


def test_disabled_sdk_has_no_traceparent(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_process(monkeypatch, OTEL_SDK_DISABLED="true"):
        assert traceparent_of(unsent_tracer().start_span("batch")) is None


def test_given_ids_are_for_the_spans_inside() -> None:
    telemetry = Telemetry(TracerProvider(shutdown_on_exit=False), MeterProvider(shutdown_on_exit=False))
    with telemetry.giving(TRACE, SPAN):
        inside = telemetry.tracer.start_span("a").get_span_context()
    with telemetry.giving(TRACE):
        of_trace = telemetry.tracer.start_span("b").get_span_context()
    outside = telemetry.tracer.start_span("c").get_span_context()
    assert (inside.trace_id, inside.span_id) == (TRACE, SPAN)
    assert of_trace.trace_id == TRACE
    assert outside.trace_id != TRACE
    assert len({inside.span_id, of_trace.span_id, outside.span_id}) == 3


def test_error_inside_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    def fail(number: int) -> int:
        return number // 0

    assert guarded(fail)(1) is None
    assert "a span or metric is missing; the batch itself does not change" in caplog.text


def test_last_telemetry_is_sent_at_the_end_of_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    telemetry = Telemetry(trace.NoOpTracerProvider(), metrics.NoOpMeterProvider())
    monkeypatch.setattr(telemetry, "send", lambda wait_s: waits.append(wait_s) or False)
    process._at_exit(telemetry, os.getpid() + 1)  # a fork
    assert (waits, caplog.messages) == ([], [])
    process._at_exit(telemetry, os.getpid())
    assert waits == [process.EXIT_WAIT_S]
    assert caplog.messages == ["OpenTelemetry spans or metrics were not sent before the end of the program."]


def test_nothing_of_telemetry_is_imported_unless_it_is_switched_on() -> None:
    done = run_strictly(
        "import sys, types\n"
        "from pyspark.sql.types import StringType, StructField, StructType\n"
        "from spark_kafka_sink import KafkaSink, KafkaSinkDataSource\n"
        "options = {'kafka.bootstrap.servers': 'h:1', 'topic': 't'}\n"
        "class Sink(KafkaSink):\n"
        "    def _run_tasks(self, *given): return []\n"
        "schema = StructType([StructField('value', StringType())])\n"
        "frame = types.SimpleNamespace(schema=schema, sparkSession=None)\n"
        "found = lambda: sorted(name for name in sys.modules if 'opentelemetry' in name or 'sink.telemetry' in name)\n"
        "def use(**more):\n"
        "    Sink(options | more).write(frame)\n"
        "    Sink(options | more).write_partition(iter([]))\n"
        "    writer = KafkaSinkDataSource(options | more).streamWriter(schema, False)\n"
        "    writer.__getstate__()\n"
        "    writer.commit([writer.write(iter([]))], 1)\n"
        "use()\n"
        "print('off:', found())\n"
        "import os\n"
        "os.environ.update(OTEL_TRACES_EXPORTER='none', OTEL_METRICS_EXPORTER='none')\n"
        "use(**{'telemetry.opentelemetry': 'true'})\n"
        "print('on:', len(found()) > 5)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "off: []\n" in done.stdout
    assert "on: True\n" in done.stdout
