"""The thread that sends telemetry: nobody waits long for it, and its log has no address of a receiver."""

from __future__ import annotations

import logging
import threading
from enum import Enum
from typing import Any

import pytest
from support.fake_clock import FakeClock

from spark_kafka_sink.sink.telemetry.exports import LINGER_MS, Exports, watched

LONG_S = 60.0
"""Of waits that end early."""
CANARY = "canary-Zx9Qw7"


class Result(Enum):
    SUCCESS = 0
    FAILURE = 1


def test_sending_is_awaited_until_it_is_done() -> None:
    sent: list[str] = []
    exports = Exports(lambda: sent.append(threading.current_thread().name))
    assert exports.send(LONG_S)
    assert exports.send(LONG_S)
    assert sent == ["kafka-sink-telemetry"] * 2


def test_thread_that_could_not_start_is_started_by_the_next_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it was taken for started, and the process sent nothing more."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sent: list[str] = []
    exports = Exports(lambda: sent.append("all"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            exports.send(LONG_S)
    assert exports.send(LONG_S)
    assert sent == ["all"]


def test_receiver_that_does_not_answer_is_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, begun = threading.Event(), threading.Semaphore(0)

    def flush() -> None:
        begun.release()
        assert may_end.wait(LONG_S)

    exports = Exports(flush)
    assert not exports.send(0.01)
    assert begun.acquire(timeout=LONG_S)
    with monkeypatch.context() as patched:
        patched.setattr(exports._changed, "wait_for", lambda *given: pytest.fail("it waits again"))
        assert not exports.send(LONG_S)
    may_end.set()
    assert begun.acquire(timeout=LONG_S)  # of the second call
    with exports._changed:
        assert exports._changed.wait_for(lambda: not exports._is_late, LONG_S)
    assert exports.send(LONG_S)


def test_small_tasks_are_sent_together() -> None:
    clock, sent, collected = FakeClock(), threading.Semaphore(0), []
    exports = Exports(lambda: collected.append(exports._wanted) or sent.release(), clock)
    assert exports.send(LONG_S, may_linger=True)  # the first one of a worker is awaited
    assert sent.acquire(timeout=LONG_S)
    with exports._changed:  # the thread cannot begin in between
        assert not any(exports.send(LONG_S, may_linger=True) for _ in range(3))
    assert sent.acquire(timeout=LONG_S)
    assert collected == [1, 4]
    with exports._changed:
        assert exports._changed.wait_for(lambda: exports._done == 4, LONG_S)
    clock.advance(LINGER_MS)
    assert exports.send(LONG_S, may_linger=True)
    assert collected[2:] == [5]


def test_task_that_cannot_linger_has_all_sent_at_once() -> None:
    collected: list[int] = []
    exports = Exports(lambda: collected.append(exports._wanted), FakeClock())
    assert exports.send(LONG_S)
    with exports._changed:
        assert not exports.send(LONG_S, may_linger=True)
        exports.send(0)
    assert exports.send(LONG_S)
    assert collected[-1] == 4


def test_thread_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    errors = [ZeroDivisionError(CANARY)]

    def flush() -> None:
        if errors:
            raise errors.pop()

    exports = Exports(flush)
    assert exports.send(LONG_S)
    assert exports.send(LONG_S)
    assert caplog.messages == ["OpenTelemetry: nothing could be sent: ZeroDivisionError"]


# ---- what an exporter says -------------------------------------------------------------------------------------------


class Exporter:
    """An exporter that logs as OpenTelemetry's do."""

    def __init__(self) -> None:
        self.answer: Any = 200

    def export(self, batch: object, timeout_millis: float = 0) -> Result:
        log = logging.getLogger(type(self).__module__)
        if self.answer == 200:
            return Result.SUCCESS
        if isinstance(self.answer, ZeroDivisionError):
            raise self.answer
        log.warning("Transient error %s at %s, retrying in %.2fs.", self.answer, f"http://h/?token={CANARY}", 0.5)
        log.error("Failed to export %s batch code: %s, reason: %s", "spans", self.answer, CANARY)
        return Result.FAILURE


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (401, "status 401"),
        (ConnectionError(f"http://h/?token={CANARY}"), "ConnectionError"),
        (ZeroDivisionError(CANARY), "ZeroDivisionError"),
        ("slow", "no answer in time"),
    ],
)
def test_failures_in_a_row_are_logged_once_and_without_an_address(
    answer: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = watched("spans", Exporter())
    for each in (answer, answer, 200, 200, answer):
        exporter.answer = each
        exporter.export(["span"], timeout_millis=1)
    failure = (
        f"OpenTelemetry spans are not received: {reason}. The batches go on without them. The receiver is that of"
        " OTEL_EXPORTER_OTLP_ENDPOINT in the environment of this process."
    )
    assert caplog.messages == [failure, "OpenTelemetry spans are received again", failure]
    assert CANARY not in caplog.text


def test_other_uses_of_the_same_exporter_keep_their_log(caplog: pytest.LogCaptureFixture) -> None:
    watched("spans", Exporter())
    of_the_user = Exporter()
    of_the_user.answer = 500
    of_the_user.export([])
    assert len(caplog.messages) == 2
