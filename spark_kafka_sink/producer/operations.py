"""The one operation that a producer has under way, such as `commit_transaction`, and its outcome.

The lock of the manager guards `PendingOperation`. Any thread may wait for an `OperationResult`. Reference:
org.apache.kafka.clients.producer.internals.TransactionalRequestResult, and TransactionManager's pending transition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError

_OVERTAKES: Final = frozenset({("abort_transaction", "send_offsets_to_transaction")})


class OperationResult:
    """How an operation ended, such as `commit_transaction`. The first outcome counts. Any thread may wait.

    `what` holds the arguments of the call that began the operation.
    """

    def __init__(self, operation: str, what: object = None) -> None:
        self.operation = operation
        self.what = what
        self.error: KafkaError | None = None
        self.is_reported = False
        """The caller knows the outcome."""
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
        """Wait for the outcome. Return False if it has not come in time."""
        deadline_ms = clock.now_ms() + timeout_ms
        with self._lock:
            while not self._is_done and (left_ms := deadline_ms - clock.now_ms()) > 0:
                clock.wait(self._condition, left_ms)
            self.is_reported = self._is_done
            return self._is_done


class PendingOperation:
    """The one operation that may be under way.

    An operation goes on when its caller stops waiting. Its outcome is kept until the same operation is called again
    with the same arguments. No other operation may begin before that. `undo` gets the error of an operation that was
    interrupted as it began: the state may be that of the operation, without a request that ends it.
    """

    def __init__(self, undo: Callable[[KafkaError], None]) -> None:
        self._undo = undo
        self._result: OperationResult | None = None
        self.last_refusal: KafkaError | None = None
        """Why the operation takes so long: the last error after which a request of it was sent again."""
        self.last_loss: str | None = None
        """The last request of the operation without an answer, in words."""
        self.unreachable_node = ""
        """The id of the last node that could not be reached."""
        self._closed_by: KafkaError | None = None

    def begin(self, operation: str, enqueue: Callable[[OperationResult], None], what: object = None) -> OperationResult:
        """Begin an operation, whose request `enqueue` puts into the queue. If that raises, perhaps because of Ctrl-C,
        the operation is not under way.
        """
        result = OperationResult(operation, what)
        try:
            enqueue(result)
        except IllegalStateError:  # misuse, refused before anything changed
            raise
        except BaseException as cause:
            self._undo(interrupted(cause, operation))
            raise
        self._result = result
        self.last_refusal = self.last_loss = None
        self.unreachable_node = ""
        return result

    def joined(self, operation: str, what: object = None) -> OperationResult | None:
        """Return the result of the same operation with the same arguments, if its caller has not got the outcome.

        An abort may begin while offsets are on their way, because it makes them pointless. After a failure any
        operation may begin that the state allows. Raises IllegalStateError if the outcome of another operation is open.
        """
        result = self._result
        if result is not None and (result.operation, result.what) == (operation, what) and not result.is_reported:
            return result
        if self._closed_by is not None or (operation, "" if result is None else result.operation) not in _OVERTAKES:
            self.ensure_none(operation)
        return None

    def ensure_none(self, operation: str) -> None:
        if self._closed_by is not None:
            raise self._closed_by.copied()
        result = self._result
        if result is None or result.is_reported or (result.is_done and result.error is not None):
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
        """The Sender has ended: fail the operation that is under way, and each later one as it begins."""
        self._closed_by = error
        self.give_up(error)

    @property
    def reason_for_delay(self) -> str:
        """Return a clause for error texts: the answers that explain the delay of the operation."""
        refusal = "" if self.last_refusal is None else f" The last answer was: {self.last_refusal}"
        return refusal + ("" if self.last_loss is None else f" {self.last_loss}")

    def is_under_way(self, operation: str) -> bool:
        return self._result is not None and self._result.operation == operation and not self._result.is_done


def interrupted(cause: BaseException, call: str) -> KafkaError:
    """Return the error of a transaction in which a call was interrupted, by Ctrl-C for example."""
    return KafkaError(f"{call} was interrupted by {type(cause).__name__}: {cause}")
