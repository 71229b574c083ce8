"""The one operation that a transactional producer has under way, and its outcome for the thread that waits for it."""

from __future__ import annotations

import threading

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError
from spark_kafka_sink.common.retold import copied


class TransactionalResult:
    """How an operation ended. The first outcome counts. Any thread may wait."""

    def __init__(self, operation: str, what: object = None) -> None:
        self.operation = operation
        self.what = what
        """The arguments that it was begun with."""
        self.error: KafkaError | None = None
        self.is_heard = False
        """Whoever asked knows the outcome."""
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._is_done = False

    @property
    def is_done(self) -> bool:
        return self._is_done

    def finish(self, error: KafkaError | None = None) -> None:
        with self._lock:
            if not self._is_done:
                self.error = error
                self._is_done = True
                self._condition.notify_all()

    def wait(self, clock: Clock, timeout_ms: int) -> bool:
        """Wait for the outcome; False where it has not come in time."""
        deadline_ms = clock.now_ms() + timeout_ms
        with self._lock:
            while not self._is_done and (left_ms := deadline_ms - clock.now_ms()) > 0:
                clock.wait(self._condition, left_ms)
            self.is_heard = self._is_done
            return self._is_done


class PendingOperation:
    """Guarded by the manager's lock. An operation whose caller gave up waiting is still under way, and its outcome is
    kept until the same is called again, with the same arguments: nothing else may begin before it is known what became
    of it.
    """

    def __init__(self) -> None:
        self._result: TransactionalResult | None = None
        self.last_refusal: KafkaError | None = None
        """Why the operation takes so long: what it is sent again after."""
        self.last_loss: str | None = None
        """The last request of the operation that brought no answer, in words."""
        self._closed_by: KafkaError | None = None

    def begin(self, operation: str, what: object = None) -> TransactionalResult:
        self._result = TransactionalResult(operation, what)
        self.last_refusal = self.last_loss = None
        return self._result

    def joined(self, operation: str, what: object = None) -> TransactionalResult | None:
        """The result of the same operation with the same arguments where nobody has heard its outcome. Raises
        IllegalStateError when that of another is open.

        An abort may begin while offsets are waited for, which it makes pointless; and anything that the state allows
        may after a failure.
        """
        result = self._result
        if result is not None and (result.operation, result.what) == (operation, what) and not result.is_heard:
            return result
        if self._closed_by is not None or (operation, "" if result is None else result.operation) not in _OVERTAKES:
            self.ensure_none(operation)
        return None

    def ensure_none(self, operation: str) -> None:
        if self._closed_by is not None:
            raise copied(self._closed_by)
        result = self._result
        if result is None or result.is_heard or (result.is_done and result.error is not None):
            return
        earlier, again = result.operation, "that again"
        if earlier == operation:
            earlier, again = f"an earlier {operation}", "it again with the arguments that it had then"
        raise IllegalStateError(f"{operation} was called while the outcome of {earlier} is open: call {again}.")

    def give_up(self, error: KafkaError | None) -> None:
        """End the operation, if one is under way."""
        if self._result is not None:
            self._result.finish(error)

    def close(self, error: KafkaError) -> None:
        """Nobody sees to operations any more: one under way ends with `error`, which is raised where another begins."""
        self._closed_by = error
        self.give_up(error)

    def is_under_way(self, operation: str) -> bool:
        return self._result is not None and self._result.operation == operation and not self._result.is_done


_OVERTAKES = frozenset({("abort_transaction", "send_offsets_to_transaction")})
