"""Futures and callbacks: their values, when they wake, and how they follow a split."""

from __future__ import annotations

import asyncio
import threading
import traceback

import pytest

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import InvalidRecordError, KafkaError, KafkaTimeoutError
from spark_kafka_sink.producer.futures import (
    BatchResult,
    FutureRecordMetadata,
    RecordMetadata,
    RecordThunk,
    RunMetadata,
    RunThunk,
)

PLACE = TopicPartition("flights", 3)
JOIN_S = 5


def result(
    base_offset: int = 100, error: KafkaError | None = None, log_append_time_ms: int | None = None
) -> BatchResult:
    made = BatchResult(PLACE)
    made.set(base_offset, log_append_time_ms, error, {})
    made.mark_done()
    return made


def test_future_has_its_place_in_the_batch() -> None:
    future = FutureRecordMetadata(5, 2, -1)
    assert not future.done()
    assert future.exception() is None
    future.bind(result(), 4)
    assert future.done()
    assert future.result() == RecordMetadata("flights", 3, 104, 5, 2, -1)


def test_log_append_time_replaces_the_time_of_the_record() -> None:
    future = FutureRecordMetadata(5, 2, -1)
    future.bind(result(log_append_time_ms=77), 0)
    assert future.result(0).timestamp_ms == 77


def test_an_offset_that_is_not_known_stays_unknown() -> None:
    future = FutureRecordMetadata(5, 2, -1)
    future.bind(result(base_offset=-1), 4)
    assert future.result(0).offset == -1


def test_limit_of_a_wait_may_be_infinite() -> None:
    batch = BatchResult(PLACE)

    def end() -> None:
        while not batch._waiting:
            pass
        batch.mark_done()

    other = threading.Thread(target=end)
    other.start()
    try:
        assert batch.wait(float("inf"))
    finally:
        other.join(JOIN_S)


def test_future_without_an_outcome_raises_a_timeout() -> None:
    future = FutureRecordMetadata(5, 2, -1)
    future.bind(BatchResult(PLACE), 0)
    with pytest.raises(KafkaTimeoutError, match=r"flights-3 .* still on its way"):
        future.result(0)


def test_a_failed_future_raises_its_error_every_time() -> None:
    error = KafkaError("no")
    future = FutureRecordMetadata.failed(PLACE, error)
    assert future.done()
    for _ in range(2):
        with pytest.raises(KafkaError, match="no"):
            future.result(0)
    assert future.exception() is error


def test_raised_copies_of_an_error_are_independent() -> None:
    """Bug: the futures of a batch raised one error, whose traceback grew by each of them and kept its frames alive."""
    error = KafkaError("no")
    outcome = result(error=error)
    for index in range(100):
        future = FutureRecordMetadata(5, 1, 1)
        future.bind(outcome, index)
        with pytest.raises(KafkaError, match="no") as caught:
            future.result(0)
        assert len(list(traceback.walk_tb(caught.value.__traceback__))) <= 3
    assert error.__traceback__ is None


def test_waiting_thread_gets_outcome_of_split_part() -> None:
    future = FutureRecordMetadata(5, 1, 1)
    whole, part = BatchResult(PLACE), BatchResult(PLACE)
    future.bind(whole, 7)
    outcomes: list[RecordMetadata] = []
    thread = threading.Thread(target=lambda: outcomes.append(future.result(JOIN_S)), daemon=True)
    thread.start()
    future.bind(part, 2)
    whole.mark_done()
    assert not future.done()
    part.set(50, None, None, {})
    part.mark_done()
    thread.join(JOIN_S)
    assert [metadata.offset for metadata in outcomes] == [52]


def test_wait_on_split_batch_continues_with_part() -> None:
    """The same without a thread: the wait itself finds the batch split."""
    future = FutureRecordMetadata(5, 1, 1)
    part = result(base_offset=50)

    class Splits(BatchResult):
        def wait(self, timeout_s: float | None) -> bool:
            future.bind(part, 2)
            return True

    future.bind(Splits(PLACE), 7)
    assert future.result(0).offset == 52
    part = BatchResult(PLACE)  # not done
    future.bind(Splits(PLACE), 7)
    with pytest.raises(KafkaTimeoutError):
        future.result(0)


def test_all_waiting_threads_are_woken_and_forgotten() -> None:
    batch = BatchResult(PLACE)
    woken: list[bool] = []
    threads = [
        threading.Thread(target=lambda: woken.append(batch.wait(JOIN_S)), daemon=True, name=f"waits {number}")
        for number in range(5)
    ]
    for thread in threads:
        thread.start()
    assert not batch.wait(0)
    batch.mark_done()
    for thread in threads:
        thread.join(JOIN_S)
    assert woken == [True] * 5
    assert batch.wait(None)
    assert batch._waiting == []


@pytest.mark.parametrize("is_seen", [True, False], ids=["after its event can be seen", "before"])
def test_batch_that_ends_as_a_wait_begins_wakes_the_thread(is_seen: bool) -> None:
    class Ends(list[threading.Lock]):
        def append(self, event: threading.Lock) -> None:
            if is_seen:
                super().append(event)
            batch.mark_done()
            if not is_seen:
                super().append(event)

    batch = BatchResult(PLACE)
    batch._waiting = Ends()
    assert batch.wait(0)
    assert batch._waiting == []


def test_a_callback_gets_the_place_of_a_failed_record_too() -> None:
    calls: list[tuple[RecordMetadata, KafkaError | None]] = []
    for outcome in (result(), result(error=KafkaError("no"))):
        thunk = RecordThunk(FutureRecordMetadata(5, 1, 1), lambda *call: calls.append(call))
        thunk.bind(outcome, 1)
        thunk.fire()
    assert calls[0] == (RecordMetadata("flights", 3, 101, 5, 1, 1), None)
    assert calls[1][0] == RecordMetadata("flights", 3, -1, -1, -1, -1)
    assert str(calls[1][1]) == "no"


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_raising_callbacks_do_not_stop_others(caplog: pytest.LogCaptureFixture, error: type[BaseException]) -> None:
    def broken(*call: object) -> None:
        raise error("mine")

    record = RecordThunk(FutureRecordMetadata(5, 1, 1), broken)
    run = RunThunk(broken, 2, 20)
    for thunk in (record, run):
        thunk.bind(result(), 0)
        thunk.fire()
    assert caplog.text.count(f"{error.__name__}: mine") == 2


def runs_of(outcome: BatchResult, first: int = 2, count: int = 4) -> list[tuple[RunMetadata, KafkaError | None]]:
    calls: list[tuple[RunMetadata, KafkaError | None]] = []
    thunk = RunThunk(lambda *call: calls.append(call), count, 40)
    thunk.bind(outcome, first)
    thunk.fire()
    return calls


def test_callback_of_a_run_is_called_once() -> None:
    ((run, error),) = runs_of(result())
    assert run == RunMetadata("flights", 3, 102, 4, -1, 40)
    assert error is None
    ((run, _),) = runs_of(result(log_append_time_ms=9))
    assert run.timestamp_ms == 9


def test_callback_of_a_failed_run_is_called_once() -> None:
    error = KafkaError("no")
    assert runs_of(result(error=error)) == [(RunMetadata("flights", 3, -1, 4, -1, 40), error)]


def test_rows_with_own_errors_have_separate_calls() -> None:
    whole, own = KafkaError("others"), InvalidRecordError("row 3")
    outcome = BatchResult(PLACE)
    outcome.set(-1, None, whole, {3: own})
    calls = runs_of(outcome)
    assert [(run.record_count, run.serialized_size, error) for run, error in calls] == [
        (1, 10, whole),
        (1, 10, own),
        (2, 20, whole),
    ]


def test_a_part_of_a_run_counts_its_share() -> None:
    calls: list[tuple[RunMetadata, KafkaError | None]] = []
    part = RunThunk(lambda *call: calls.append(call), 4, 40).part(3, 6)
    part.bind(result(), 0)
    part.fire()
    assert calls == [(RunMetadata("flights", 3, 100, 3, -1, 30), None)]
