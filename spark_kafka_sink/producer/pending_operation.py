"""The one operation that a transactional producer has under way, and its outcome for the thread that waits for it."""

from __future__ import annotations

import threading

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError


class TransactionalResult:
    """How an operation ended. Set once; later outcomes are not heard. Any thread may wait."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.error: KafkaError | None = None
        self._condition = threading.Condition()
        self._is_done = False

    @property
    def is_done(self) -> bool:
        return self._is_done

    def finish(self, error: KafkaError | None = None) -> None:
        with self._condition:
            if not self._is_done:
                self.error = error
                self._is_done = True
                self._condition.notify_all()

    def wait(self, clock: Clock, timeout_ms: int) -> bool:
        """Wait for the outcome; False where it has not come in time."""
        deadline_ms = clock.now_ms() + timeout_ms
        with self._condition:
            while not self._is_done and (left_ms := deadline_ms - clock.now_ms()) > 0:
                clock.wait(self._condition, left_ms)
            return self._is_done


class PendingOperation:
    """Guarded by the manager's lock. An operation whose caller gave up waiting is still under way, and may be waited
    for again.
    """

    def __init__(self) -> None:
        self._result: TransactionalResult | None = None

    def begin(self, operation: str) -> TransactionalResult:
        self._result = TransactionalResult(operation)
        return self._result

    def joined(self, operation: str) -> TransactionalResult | None:
        """The result of the same operation when it is under way. Raises IllegalStateError when another is.

        An abort may begin while offsets or a producer id are waited for: it makes both pointless.
        """
        result = self._result
        if result is None or result.is_done or (operation, result.operation) in _OVERTAKES:
            return None
        if result.operation != operation:
            raise IllegalStateError(f"{operation} was called while {result.operation} is under way: call that again.")
        return result

    def ensure_none(self, operation: str) -> None:
        if self._result is not None and not self._result.is_done:
            raise IllegalStateError(f"{operation} was called while {self._result.operation} is under way.")

    def give_up(self, error: KafkaError) -> None:
        if self._result is not None:
            self._result.finish(error)


_OVERTAKES = frozenset({("abort_transaction", "send_offsets_to_transaction")})
