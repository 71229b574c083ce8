"""Sends what a process has recorded to its receiver: in a thread of its own, and with a limit on the time of a wait.

OpenTelemetry's own `force_flush` returns when the receiver has answered or all retries have failed, whatever its
timeout. Spark's workers may end right after a task, so a task waits for its spans, but never long.

Errors of an exporter are logged here and not by the exporter, which logs each one, with the address of the receiver. A
token may be a part of that address.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from spark_kafka_sink.common.clock import Clock, SystemClock

log = logging.getLogger(__name__)

_SUCCESS: Final = "SUCCESS"
LINGER_MS: Final = 100
"""How long small tasks, one after another in a worker, collect what they record. Each sending costs a task some ms."""


class Exports:
    """The thread that sends, and those who wait for it. Any thread may call."""

    def __init__(self, flush: Callable[[], object], clock: Clock | None = None) -> None:
        """`flush` sends all that is recorded, and returns when that is sent or given up."""
        self._flush = flush
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._wanted = 0
        self._done = 0
        self._thread: threading.Thread | None = None
        self._is_late = False
        """Whether a wait ended before its sending. Until that has ended, nothing waits."""
        self._is_urgent = False
        self._sent_ms: int | None = None
        """When the last sending ended."""

    def send(self, wait_s: float, *, may_linger: bool = False) -> bool:
        """Have all sent that is recorded, and wait for it, at most `wait_s` seconds. Return whether it is done. Does
        not wait while what an earlier call waited for is still not sent. `may_linger`: right after another sending,
        have it sent within LINGER_MS, and do not wait.
        """
        with self._changed:
            now_ms = self._clock.now_ms()
            lingers = may_linger and self._sent_ms is not None and now_ms - self._sent_ms < LINGER_MS
            self._is_urgent = self._is_urgent or not lingers
            self._wanted += 1
            mine = self._wanted
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kafka-sink-telemetry", daemon=True)
                thread.start()  # raises if the system has no room for a thread: the next call tries again
                self._thread = thread
            if wait_s and not lingers and not self._is_late:
                self._is_late = not self._changed.wait_for(lambda: self._done >= mine, wait_s)
            return self._done >= mine

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted > self._done)
                self._changed.wait_for(lambda: self._is_urgent, LINGER_MS / 1000)
                self._is_urgent, wanted = False, self._wanted
            try:
                self._flush()
            except Exception as error:
                log.warning("OpenTelemetry: nothing could be sent: %s", type(error).__name__)
            with self._changed:
                self._done, self._sent_ms = wanted, self._clock.now_ms()
                self._is_late = self._is_late and self._wanted > wanted
                self._changed.notify_all()


# ---- what an exporter says -------------------------------------------------------------------------------------------


class _Kept(logging.Filter):
    """Keeps back what a logger is told in a thread that exports, for `watched`."""

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        kept: list[logging.LogRecord] | None = getattr(self._own, "records", None)
        if kept is not None:
            kept.append(record)
        return kept is None

    @contextmanager
    def keeping(self) -> Iterator[list[logging.LogRecord]]:
        records: list[logging.LogRecord] = []
        self._own.records = records
        try:
            yield records
        finally:
            self._own.records = None


_kept: Final = _Kept()


class Watch:
    """Calls an exporter's `export`, and logs the first failure in a row, and the first success after it."""

    def __init__(self, what: str, export: Callable[..., Any]) -> None:
        """`what`: "spans" or "metrics"."""
        self._what = what
        self._export = export
        self._is_failing = False

    def __call__(self, *batch: Any, **more: Any) -> Any:
        """Return the exporter's result; None if it raises."""
        result, why = None, ""
        with _kept.keeping() as records:
            try:
                result = self._export(*batch, **more)
            except Exception as error:
                why = type(error).__name__
        if getattr(result, "name", None) != _SUCCESS:
            self._failed(why or _reason(records))
        elif self._is_failing:
            self._is_failing = False
            log.warning("OpenTelemetry %s are received again", self._what)
        return result

    def _failed(self, why: str) -> None:
        level = logging.DEBUG if self._is_failing else logging.WARNING
        self._is_failing = True
        log.log(
            level,
            "OpenTelemetry %s are not received: %s. The batches go on without them. The receiver is that of"
            " OTEL_EXPORTER_OTLP_ENDPOINT in the environment of this process.",
            self._what,
            why,
        )


def watched(what: str, exporter: Any) -> Any:
    """Return the exporter, whose failures are now logged here and without an address."""
    logging.getLogger(type(exporter).__module__).addFilter(_kept)
    exporter.export = Watch(what, exporter.export)
    return exporter


def _reason(records: Sequence[logging.LogRecord]) -> str:
    """Return the HTTP status or the class of the error that the exporter has logged: their texts may have a secret."""
    given = [each for record in reversed(records) if isinstance(record.args, tuple) for each in record.args]
    for each in given:
        if type(each) is int:
            return f"status {each}"
        if isinstance(each, BaseException):
            return type(each).__name__
    return "no answer in time"
