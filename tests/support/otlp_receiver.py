"""An HTTP server that receives what OpenTelemetry's exporters send by OTLP, and shows spans and metrics as values."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

INTERNAL, PRODUCER = 1, 4
ERROR = 2


@dataclass(frozen=True)
class ReceivedSpan:
    """A span. Ids are hexadecimal; `parent` is "" for a root. Times are ns since 1970."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    status: tuple[int, str]
    resource: dict[str, Any]

    @property
    def traceparent(self) -> tuple[str, str]:
        """What a `traceparent` names: trace and span."""
        return self.trace_id, self.span_id


@dataclass
class OtlpReceiver:
    """What has been received, and how the server answers."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    status: int = 200
    may_answer: threading.Event = field(default_factory=threading.Event)
    _points: dict[tuple[str, str, frozenset[tuple[str, Any]]], tuple[Any, float]] = field(default_factory=dict)

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables with which a process sends here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, **more}

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def metrics(self) -> set[str]:
        """Return the names of all metrics."""
        return {name for _, name, _ in self._points}

    def units(self, name: str) -> set[str]:
        return {point[0] for (_, own, _), point in self._points.items() if own == name}

    def sums(self, name: str, *attributes: str) -> dict[tuple[Any, ...], float]:
        """Return the last values of a metric, by these attributes and added up over processes: the count of a
        histogram.
        """
        found: dict[tuple[Any, ...], float] = {}
        for (_, own, of_point), (_, value) in self._points.items():
            if own == name:
                key = tuple(dict(of_point).get(each) for each in attributes)
                found[key] = found.get(key, 0) + value
        return found

    def take(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.bodies.append(body)
        self.headers.append(headers)
        if path.endswith("/v1/traces"):
            self._take_spans(ExportTraceServiceRequest.FromString(body))
        else:
            self._take_metrics(ExportMetricsServiceRequest.FromString(body))

    def _take_spans(self, request: Any) -> None:
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for span in (each for scope in of_resource.scope_spans for each in scope.spans):
                self.spans.append(
                    ReceivedSpan(
                        span.name,
                        span.kind,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _attributes(span.attributes),
                        (span.status.code, span.status.message),
                        resource,
                    )
                )

    def _take_metrics(self, request: Any) -> None:
        for of_resource in request.resource_metrics:
            instance = _attributes(of_resource.resource.attributes)["service.instance.id"]
            for metric in (each for scope in of_resource.scope_metrics for each in scope.metrics):
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    which = "count" if hasattr(point, "bucket_counts") else point.WhichOneof("value")
                    key = instance, metric.name, frozenset(_attributes(point.attributes).items())
                    self._points[key] = metric.unit, getattr(point, which)


def _attributes(listed: Iterable[Any]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in listed}


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return tuple(_value(each) for each in value.array_value.values)
    return getattr(value, which)


@contextmanager
def receiving_otlp() -> Iterator[OtlpReceiver]:
    """A receiver on loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.may_answer.wait(60)
            if receiver.status == 200:
                receiver.take(self.path, body, dict(self.headers))
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_address[1]}")
    receiver.may_answer.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()
