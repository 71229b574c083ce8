"""The tracer and the meter of a process: those that its user has set, else own ones by OpenTelemetry's environment.

Own ones are never made the process's global ones. They are made when a batch or task first needs them: Spark forks its
workers, and threads do not survive a fork. All settings are OpenTelemetry's variables, such as
OTEL_EXPORTER_OTLP_ENDPOINT. If these cannot work, a warning says so once, and batches go on without telemetry.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, Final, ParamSpec, TypeVar

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Meter, MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace import TracerProvider as OwnTracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from spark_kafka_sink.common.version import VERSION
from spark_kafka_sink.sink.telemetry.exports import Exports, watched

log = logging.getLogger(__name__)

TRACEPARENT: Final = "traceparent"
"""W3C's name of a header, https://www.w3.org/TR/trace-context."""
EXIT_WAIT_S: Final = 2.0
"""How long the end of the user's program waits at most for what is not sent yet."""
_SCOPE: Final = "spark_kafka_sink"
_PROTOCOLS: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""OTEL_EXPORTER_OTLP_PROTOCOL → the name of its exporter among installed packages."""
_Made = TypeVar("_Made")
_Given = ParamSpec("_Given")


class GivenIds(IdGenerator):
    """Makes ids for spans, or takes those that the calling thread has been given."""

    def __init__(self, others: IdGenerator) -> None:
        self._others = others
        self._own = threading.local()

    @contextmanager
    def giving(self, trace_id: int, span_id: int | None = None) -> Iterator[None]:
        """Spans that this thread begins inside the `with` have these ids. `span_id` is for one span."""
        self._own.trace_id, self._own.span_id = trace_id, span_id
        try:
            yield
        finally:
            self._own.trace_id = self._own.span_id = None

    def generate_trace_id(self) -> int:
        given: int | None = getattr(self._own, "trace_id", None)
        return self._others.generate_trace_id() if given is None else given

    def generate_span_id(self) -> int:
        given: int | None = getattr(self._own, "span_id", None)
        return self._others.generate_span_id() if given is None else given

    def is_trace_id_random(self) -> bool:
        return getattr(self._own, "trace_id", None) is None and self._others.is_trace_id_random()


class Telemetry:
    """What a process records by. Any thread may call."""

    def __init__(
        self, traces: TracerProvider, meters: MeterProvider, slow_meters: Callable[[], MeterProvider] | None = None
    ) -> None:
        """`slow_meters` makes the provider of `slow_meter`; None: the same as for `meter`."""
        self._providers: list[TracerProvider | MeterProvider] = [traces, meters]
        self._slow_meters = slow_meters
        self.tracer: Tracer = traces.get_tracer(_SCOPE, VERSION)
        self.meter: Meter = meters.get_meter(_SCOPE, VERSION)
        self._ids: GivenIds | None = None
        if isinstance(self.tracer, SdkTracer):  # others cannot be given ids
            self._ids = self.tracer.id_generator = GivenIds(self.tracer.id_generator)
        self._exports = Exports(self._flush)
        self._lock = threading.Lock()
        self._made: dict[Any, Any] = {}
        self._unsent: MeterProvider | None = None

    def of_process(self, make: Callable[[Meter], _Made]) -> _Made:
        """Return what `make` makes of the meter, the same for each call: an instrument may be made once."""
        with self._lock:
            if make not in self._made:
                self._made[make] = make(self.meter)
            found: _Made = self._made[make]
            return found

    @functools.cached_property
    def slow_meter(self) -> Meter:
        """For many instruments, which `send` does not send: they go to the receiver each OTEL_METRIC_EXPORT_INTERVAL.
        A task would wait for them tens of ms.
        """
        if self._slow_meters is None:
            return self.meter
        self._unsent = self._slow_meters()
        return self._unsent.get_meter(_SCOPE, VERSION)

    @contextmanager
    def giving(self, trace_id: int, span_id: int | None = None) -> Iterator[None]:
        """Spans that this thread begins inside the `with` have these ids, if the tracer can do that."""
        if self._ids is None:
            yield
            return
        with self._ids.giving(trace_id, span_id):
            yield

    def send(self, wait_s: float = 0, *, may_linger: bool = False) -> bool:
        """As `Exports.send`."""
        return self._exports.send(wait_s, may_linger=may_linger)

    def _flush(self) -> None:
        for provider in self._providers:
            flush = getattr(provider, "force_flush", None)
            if flush is not None:
                flush()


def traceparent_of(span: Span) -> str | None:
    """Return the text that stands for the span in other processes; None if the tracer is switched off."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get(TRACEPARENT)


def context_of(traceparent: str | None) -> Context:
    """Return the context in which a span is a child of that one; without one it is a root."""
    if traceparent is None:
        return Context()
    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, Context())


def span_context_of(traceparent: str) -> SpanContext:
    """Return the ids and flags in the text."""
    return trace.get_current_span(context_of(traceparent)).get_span_context()


# ---- the providers ---------------------------------------------------------------------------------------------------

_processes: Final[dict[int, Telemetry]] = {}
"""By process id: a forked process does not use what its parent made."""
_making: Final = threading.Lock()


def process_telemetry() -> Telemetry:
    """Return that of this process. Raises nothing."""
    process = os.getpid()
    if (found := _processes.get(process)) is None:
        with _making:
            if (found := _processes.get(process)) is None:
                found = _processes[process] = Telemetry(_traces(), meters := _meters(), _slow(meters))
                atexit.register(_at_exit, found, process)
    return found


def unsent_tracer() -> Tracer:
    """Return a tracer for spans that this process only begins. It makes no exporter."""
    given = trace.get_tracer_provider()
    if isinstance(given, trace.ProxyTracerProvider):
        given = OwnTracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
    return given.get_tracer(_SCOPE, VERSION)


def _at_exit(telemetry: Telemetry, process: int) -> None:
    if process == os.getpid() and not telemetry.send(EXIT_WAIT_S):
        log.warning("OpenTelemetry spans or metrics were not sent before the end of the program.")


def _traces() -> TracerProvider:
    given = trace.get_tracer_provider()
    if not isinstance(given, trace.ProxyTracerProvider):
        return given
    try:
        own = OwnTracerProvider(resource=_resource(os.getpid()), shutdown_on_exit=False)
        for exporter in _exporters("traces"):
            with _headers_hidden():
                made = exporter()
            own.add_span_processor(BatchSpanProcessor(watched("spans", made)))
    except Exception as error:
        _log_misfit("spans", error)
        return trace.NoOpTracerProvider()
    return own


def _meters() -> MeterProvider:
    given = metrics.get_meter_provider()
    if "Proxy" not in type(given).__name__:  # the API hides the class that says nothing was set
        return given
    try:
        from opentelemetry.sdk.metrics import MeterProvider as OwnMeterProvider
        from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

        with _headers_hidden():
            made = [exporter() for exporter in _exporters("metrics")]
        readers = [
            each if isinstance(each, MetricReader) else PeriodicExportingMetricReader(watched("metrics", each))
            for each in made
        ]
        return OwnMeterProvider(metric_readers=readers, resource=_resource(os.getpid()), shutdown_on_exit=False)
    except Exception as error:
        _log_misfit("metrics", error)
        return metrics.NoOpMeterProvider()


def _slow(meters: MeterProvider) -> Callable[[], MeterProvider] | None:
    """Return what makes another provider like these; None if they are the user's."""
    return None if meters is metrics.get_meter_provider() else _meters


def _log_misfit(what: str, error: Exception) -> None:
    log.warning(
        "OpenTelemetry %s are not recorded in this process, because of its environment variables OTEL_…: %s: %s",
        what,
        type(error).__name__,
        error if isinstance(error, _MissingExporterError) else "one of them has a value that cannot be used",
    )


@functools.cache
def _resource(_process: int) -> Resource:
    """Return what the variables say of the process, with a name for it if they have none, and an id of its own: else
    the counts of several workers would be taken for those of one.
    """
    own = Resource.create({})
    more = {}
    if str(own.attributes.get("service.name", "")).startswith("unknown_service"):
        more["service.name"] = "spark-kafka-sink"
    if "service.instance.id" not in own.attributes:
        more["service.instance.id"] = str(uuid.uuid4())
    return own.merge(Resource(more))


class _MissingExporterError(Exception):
    """A variable names an exporter that is not installed."""


def _exporters(signal: str) -> Iterator[Callable[[], Any]]:
    """Yield the classes of exporters that OTEL_TRACES_EXPORTER or OTEL_METRICS_EXPORTER names; OTLP by default."""
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    for each in (os.environ.get(variable) or "otlp").split(","):
        name = each.strip()
        if name == "none":
            continue
        if name == "otlp":
            protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
            protocol = protocol or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
            name = _PROTOCOLS.get(protocol.strip(), protocol)
        found = [*entry_points(group=f"opentelemetry_{signal}_exporter", name=name)]
        if not found:
            raise _MissingExporterError(f"no installed package has the exporter {name!r} for {variable}")
        yield found[0].load()


def _without_arguments(record: logging.LogRecord) -> bool:
    record.args = tuple("***" for _ in record.args or ())
    return True


@contextmanager
def _headers_hidden() -> Iterator[None]:
    """OpenTelemetry logs what it cannot read in OTEL_EXPORTER_OTLP_HEADERS, which may be a token. Inside the `with` its
    warning has no part of them.
    """
    parser = logging.getLogger("opentelemetry.util.re")
    parser.addFilter(_without_arguments)
    try:
        yield
    finally:
        parser.removeFilter(_without_arguments)


def guarded(call: Callable[_Given, _Made]) -> Callable[_Given, _Made | None]:
    """Let the function return None, and log a warning, where it would raise: no batch fails because of telemetry."""

    @functools.wraps(call)
    def guarding(*given: _Given.args, **named: _Given.kwargs) -> _Made | None:
        try:
            return call(*given, **named)
        except Exception:
            log.warning("OpenTelemetry: a span or metric is missing; the batch itself does not change", exc_info=True)
            return None

    return guarding
