"""Telemetry of a test's own: spans and metrics stay in memory, or are sent by a process that the test makes."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from spark_kafka_sink.sink.telemetry import process
from spark_kafka_sink.sink.telemetry.process import Telemetry


class KeptTelemetry:
    """The telemetry of this process, which keeps what it gets."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._spans = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        traces = TracerProvider(sampler, Resource.get_empty(), shutdown_on_exit=False)
        traces.add_span_processor(SimpleSpanProcessor(self._spans))
        meters = MeterProvider([self._reader], Resource.get_empty(), shutdown_on_exit=False)
        self.telemetry = Telemetry(traces, meters)
        self.waits_s: list[float] = []
        self.lingers: list[bool] = []
        self.telemetry.send = self._send  # type: ignore[method-assign]

    def _send(self, wait_s: float = 0, *, may_linger: bool = False) -> bool:
        self.waits_s.append(wait_s)
        self.lingers.append(may_linger)
        return True

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended, in this order."""
        return list(self._spans.get_finished_spans())

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Return attributes and value of each point: the sum of a histogram."""
        data = self._reader.get_metrics_data()
        found: list[Any] = [
            metric
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        self.names = {metric.name for metric in found}
        return [
            (dict(point.attributes), point.sum if hasattr(point, "sum") else point.value)
            for metric in found
            if metric.name == name
            for point in metric.data.data_points
        ]


def keep(monkeypatch: pytest.MonkeyPatch, sampler: Sampler | None = None) -> KeptTelemetry:
    """Let this process keep its telemetry until the test's end."""
    kept = KeptTelemetry(sampler)
    monkeypatch.setattr(process, "_processes", {os.getpid(): kept.telemetry})
    return kept


@contextmanager
def new_process(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[None]:
    """Let this process be one without telemetry, with these variables of OpenTelemetry, and end what it makes."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made: dict[int, Telemetry] = {}
    monkeypatch.setattr(process, "_processes", made)
    monkeypatch.setattr(atexit, "register", lambda call, *given: call)
    process._resource.cache_clear()
    try:
        yield
    finally:
        process._resource.cache_clear()
        for telemetry in made.values():
            for provider in (*telemetry._providers, telemetry._unsent):
                if provider is not None and hasattr(provider, "shutdown"):
                    provider.shutdown()
