from __future__ import annotations

import threading

import pytest

from spark_kafka_sink.admin.request_future import RequestFuture
from spark_kafka_sink.common.errors import (
    DisconnectError,
    IllegalStateError,
    KafkaError,
    NotCoordinatorError,
)


def test_a_completed_future_has_its_value() -> None:
    future: RequestFuture[int] = RequestFuture()
    assert future.should_block()
    assert not future.is_done()
    assert not future.succeeded()
    future.complete(3)
    assert future.is_done()
    assert future.succeeded()
    assert not future.failed()
    assert not future.should_block()
    assert future.value() == 3


def test_a_failed_future_has_its_error() -> None:
    future: RequestFuture[int] = RequestFuture()
    future.fail(DisconnectError())
    assert future.failed()
    assert not future.succeeded()
    with pytest.raises(DisconnectError):
        future.value()


@pytest.mark.parametrize("no_error", [None, ValueError("not ours"), KafkaError])
def test_failure_without_a_kafka_error_is_refused(no_error: object) -> None:
    future: RequestFuture[int] = RequestFuture()
    with pytest.raises(TypeError, match="KafkaError"):
        future.fail(no_error)  # type: ignore[arg-type]
    assert not future.is_done()


def test_none_is_a_value() -> None:
    future: RequestFuture[None] = RequestFuture()
    heard: list[None] = []
    future.add_listener(heard.append, lambda error: pytest.fail(str(error)))
    future.complete(None)
    assert heard == [None]
    assert future.succeeded()


def test_what_is_not_there_yet_is_refused() -> None:
    future: RequestFuture[int] = RequestFuture()
    with pytest.raises(IllegalStateError):
        future.value()
    with pytest.raises(IllegalStateError):
        _ = future.error
    future.complete(1)
    with pytest.raises(IllegalStateError):
        _ = future.error


@pytest.mark.parametrize("first", ["complete", "fail"])
@pytest.mark.parametrize("second", ["complete", "fail"])
def test_a_future_ends_once_only(first: str, second: str) -> None:
    future: RequestFuture[int] = RequestFuture()
    ends = {"complete": lambda: future.complete(1), "fail": lambda: future.fail(DisconnectError())}
    ends[first]()
    with pytest.raises(IllegalStateError, match="twice"):
        ends[second]()
    assert future.succeeded() == (first == "complete")


def test_listeners_hear_once_in_order_whether_added_before_or_after() -> None:
    future: RequestFuture[int] = RequestFuture()
    heard: list[str] = []
    for name in "ab":
        future.add_listener(lambda value, name=name: heard.append(f"{name}{value}"), lambda _: heard.append("no"))
    future.complete(5)
    future.add_listener(lambda value: heard.append(f"late{value}"), lambda _: heard.append("no"))
    assert heard == ["a5", "b5", "late5"]


def test_listeners_hear_of_a_failure() -> None:
    future: RequestFuture[int] = RequestFuture()
    heard: list[KafkaError] = []
    future.add_listener(lambda _: pytest.fail("no value"), heard.append)
    error = NotCoordinatorError()
    future.fail(error)
    future.add_listener(lambda _: pytest.fail("no value"), heard.append)
    assert heard == [error, error]


def test_a_chained_future_ends_the_same_way() -> None:
    for end in (lambda each: each.complete(1), lambda each: each.fail(DisconnectError("gone"))):
        source: RequestFuture[int] = RequestFuture()
        other: RequestFuture[int] = RequestFuture()
        source.chain(other)
        assert not other.is_done()
        end(source)
        assert other.succeeded() == source.succeeded()
        assert other.failed() == source.failed()


def test_another_thread_can_wait_for_it() -> None:
    future: RequestFuture[int] = RequestFuture()
    assert not future.await_done(0)
    waiter = threading.Thread(target=lambda: future.complete(1))
    waiter.start()
    assert future.await_done(10_000)
    waiter.join()
