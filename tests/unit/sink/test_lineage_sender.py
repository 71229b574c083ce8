"""The thread that sends lineage: in order, never in the way of a batch, through OpenLineage's own client."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest
from pyspark.sql.types import StringType, StructField, StructType
from support.lineage_receiver import Receiver, check_event, receiving

from spark_kafka_sink.common.batch_report import BatchReport
from spark_kafka_sink.sink import lineage_sender
from spark_kafka_sink.sink.batch_run import NO_QUERY
from spark_kafka_sink.sink.lineage import LineageRun, run_of_format
from spark_kafka_sink.sink.lineage_facts import LineageEvent
from spark_kafka_sink.sink.lineage_sender import LineageSender, OpenLineageClient, process_sender
from spark_kafka_sink.sink.options import SinkConfig

SCHEMA = StructType([StructField("value", StringType())])
CONFIG = SinkConfig.from_options({"kafka.bootstrap.servers": "h:9092", "topic": "orders"})
LONG_S = 60.0
"""Of waits that end early."""


def lineage_run() -> LineageRun:
    run = run_of_format(CONFIG, SCHEMA, is_stream=False)
    assert run is not None
    return run


def event(time_ms: int = 0) -> LineageEvent:
    return LineageEvent(lineage_run(), time_ms, NO_QUERY, None)


def refuse_thread(_: threading.Thread) -> None:
    """As at the system's limit of threads."""
    raise RuntimeError("can't start new thread")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE")]:
        monkeypatch.delenv(name)
    environment = dict(os.environ)
    with receiving() as receiver:
        os.environ["OPENLINEAGE_URL"] = receiver.url
        yield receiver
    for name in os.environ.keys() - environment.keys():  # the client sets variables of its own
        del os.environ[name]


@pytest.fixture
def own_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage_sender, "_senders", {})


def test_events_are_sent_in_their_order() -> None:
    got: list[int] = []
    sender = LineageSender(lambda each: got.append(each.time_ms))
    for time_ms in range(100):
        sender.put(event(time_ms))
    assert sender.wait(LONG_S)
    assert got == list(range(100))


def test_thread_that_could_not_start_is_started_by_the_next_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it was taken for started. No event was ever sent, and the log blamed the receiver."""
    start, got = threading.Thread.start, list[int]()
    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    sender = LineageSender(lambda each: got.append(each.time_ms))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        sender.put(event(0))
    monkeypatch.setattr(threading.Thread, "start", start)
    sender.put(event(1))
    assert sender.wait(LONG_S)
    assert got == [0, 1]


def test_receiver_that_hangs_is_waited_for_only_once(caplog: pytest.LogCaptureFixture) -> None:
    may_go, got = threading.Event(), list[int]()

    def emit(each: LineageEvent) -> None:
        may_go.wait(LONG_S)
        got.append(each.time_ms)

    sender = LineageSender(emit, most_events=3)
    sender.put(event(0))
    assert not sender.wait(0.01)
    for time_ms in (1, 2, 3, 4):
        sender.put(event(time_ms))
        assert not sender.wait(LONG_S)  # else this test takes minutes
    assert [record.getMessage() for record in caplog.records] == [
        "3 OpenLineage events wait for their receiver. Later ones are dropped."
    ]
    sender.wait_at_exit(0.01)
    assert caplog.records[-1].getMessage() == "3 OpenLineage events were not sent before the end of the program."
    may_go.set()
    sender.wait_at_exit(LONG_S)
    assert got == [0, 1, 2]
    sender.put(event(5))
    assert sender.wait(LONG_S)
    assert got == [0, 1, 2, 5]


def test_failures_are_logged_once_and_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    failures = [ValueError("http://user:secret@h"), ValueError("secret"), None, None]

    def emit(each: LineageEvent) -> None:
        if (failure := failures[each.time_ms]) is not None:
            raise failure

    caplog.set_level(logging.INFO)
    sender = LineageSender(emit)
    for time_ms in range(4):
        sender.put(event(time_ms))
    assert sender.wait(LONG_S)
    assert [record.getMessage() for record in caplog.records] == [
        "OpenLineage events of kafka_sink.orders are not received: ValueError",
        "OpenLineage events are received again",
    ]


def test_events_reach_a_receiver_by_openlineages_own_settings(receiver: Receiver) -> None:
    sender = LineageSender(OpenLineageClient())
    run = lineage_run()
    sender.put(LineageEvent(run, 1_000, NO_QUERY, None))
    sender.put(LineageEvent(run, 2_000, NO_QUERY, BatchReport("complete", "at-least-once", 1_000, 2_000)))
    assert sender.wait(LONG_S)
    for each in receiver.events:
        check_event(each)
    assert [each["eventType"] for each in receiver.events] == ["START", "COMPLETE"]
    assert {each["run"]["runId"] for each in receiver.events} == {run.run_id}


def test_refusal_is_logged_with_its_status(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.status = 401
    sender = LineageSender(OpenLineageClient())
    sender.put(event())
    assert sender.wait(LONG_S)
    assert "OpenLineage events of kafka_sink.orders are not received: HTTPError, status 401" in caplog.text


@pytest.mark.usefixtures("own_sender")
def test_batch_goes_on_while_the_receiver_hangs(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.may_answer.clear()
    run = lineage_run()
    assert run.wait_s == 1.0
    run.begin(1_000)  # waits for a second
    assert receiver.requests.acquire(timeout=LONG_S)
    sender = process_sender()
    monkeypatch.setattr(sender._changed, "wait_for", lambda *_: pytest.fail("a batch waits again"))
    run.end(BatchReport("complete", "at-least-once", 1_000, 2_000))
    monkeypatch.undo()
    receiver.may_answer.set()
    sender.wait_at_exit(LONG_S)
    assert [each["eventType"] for each in receiver.events] == ["START", "COMPLETE"]


@pytest.mark.usefixtures("own_sender")
def test_forked_process_has_its_own_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    own = process_sender()
    assert process_sender() is own
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    monkeypatch.setattr(own, "wait_at_exit", lambda seconds: pytest.fail("a child waits for its parent's events"))
    lineage_sender._at_exit(own, process)
    assert process_sender() is not own
