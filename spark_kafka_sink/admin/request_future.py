"""The outcome of a request, known later. Completed by the thread that polls; any thread may listen or wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from spark_kafka_sink.common.errors import IllegalStateError, KafkaError

T = TypeVar("T")

OnSuccess = Callable[[T], None]
OnFailure = Callable[[KafkaError], None]


class RequestFuture(Generic[T]):
    """A value or a KafkaError, set once (org.apache.kafka.clients.consumer.internals.RequestFuture).

    Listeners run once each, in the order added, on the thread that completes, or at once where it is done already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: T | None = None
        self._error: KafkaError | None = None
        self._listeners: list[tuple[OnSuccess[T], OnFailure]] = []

    def is_done(self) -> bool:
        return self._done.is_set()

    def succeeded(self) -> bool:
        return self.is_done() and self._error is None

    def failed(self) -> bool:
        return self.is_done() and self._error is not None

    def should_block(self) -> bool:
        """Whether it is worth waiting; makes a future a `PollCondition`."""
        return not self.is_done()

    @property
    def error(self) -> KafkaError:
        """Why it failed. Raises IllegalStateError where it did not, or not yet."""
        if self._error is None:
            raise IllegalStateError("The request has not failed.")
        return self._error

    def value(self) -> T:
        """The value; raises the error where it failed, IllegalStateError where it is not done."""
        if not self.is_done():
            raise IllegalStateError("The request is not done.")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set by `complete`, and None may be a value

    def await_done(self, timeout_ms: int) -> bool:
        """Wait, while another thread polls. False where it is not done in time."""
        return self._done.wait(timeout_ms / 1000)

    def complete(self, value: T) -> None:
        """Set the value. Raises IllegalStateError where it is done already."""
        self._finish(value, None)

    def fail(self, error: KafkaError) -> None:
        """Set the error. Raises IllegalStateError where it is done already, and TypeError for what is not a KafkaError:
        None would make it a success.
        """
        if not isinstance(error, KafkaError):
            raise TypeError(f"A request fails with a KafkaError, not with {error!r}.")
        self._finish(None, error)

    def add_listener(self, on_success: OnSuccess[T], on_failure: OnFailure) -> None:
        with self._lock:
            if not self._done.is_set():
                self._listeners.append((on_success, on_failure))
                return
        self._notify(on_success, on_failure)

    def chain(self, other: RequestFuture[T]) -> None:
        """Let `other` end as this one does."""
        self.add_listener(other.complete, other.fail)

    def _finish(self, value: T | None, error: KafkaError | None) -> None:
        with self._lock:
            if self._done.is_set():
                raise IllegalStateError("The request is done already; it cannot end twice.")
            self._value, self._error = value, error
            listeners, self._listeners = self._listeners, []
            self._done.set()
        for on_success, on_failure in listeners:
            self._notify(on_success, on_failure)

    def _notify(self, on_success: OnSuccess[T], on_failure: OnFailure) -> None:
        if self._error is not None:
            on_failure(self._error)
        else:
            on_success(self._value)  # type: ignore[arg-type]  # set by `complete`, and None may be a value
