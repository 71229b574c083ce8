"""The outcomes of sends: futures and callbacks of records, and the result of a batch.

A `BatchResult` is one event for all records of a batch; each future looks up its own part. Any thread may wait; the
Sender thread sets the result. If a batch is split, its futures are bound to the parts before its own result is set, so
that a waiting thread goes on with the part.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from spark_kafka_sink.common.clock import lock_timeout
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError, KafkaError, KafkaTimeoutError

log = logging.getLogger(__name__)

Headers = Sequence[tuple[str, bytes | None]]


class RecordMetadata(NamedTuple):
    """The place of a record. `offset` is -1 if the broker gave none (acks=0, or a duplicate).

    A callback of a record that failed gets the topic and the partition, and -1 for all other numbers. The partition is
    -1 too if the send failed before a partition was chosen.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    serialized_key_size: int
    """Bytes, -1 for a null key."""
    serialized_value_size: int
    """Bytes, -1 for a null value."""


class RunMetadata(NamedTuple):
    """The place of a run of rows in one batch: `record_count` consecutive offsets from `base_offset` on (-1: unknown).

    The rows are from one `send_columns` call, or from consecutive calls with the same callback.
    """

    topic: str
    partition: int
    base_offset: int
    record_count: int
    timestamp_ms: int
    """Log-append time, or -1 if the records keep their own."""
    serialized_size: int
    """Encoded bytes before compression.

    After a split, or errors of single records, a share by rows. For rows that failed before they were sent, perhaps an
    upper bound.
    """


RecordCallback = Callable[[RecordMetadata, KafkaError | None], None]
"""A callback. Only the error says whether the record failed: the metadata is never None (as in the Java client)."""
RunCallback = Callable[[RunMetadata, KafkaError | None], None]
Harmless = type[BaseException]
"""The exceptions of a callback that are only logged."""


class BatchResult:
    """The result of a batch."""

    __slots__ = (
        "_waiting", "base_offset", "error", "is_done", "log_append_time_ms", "record_errors", "topic_partition",
    )  # fmt: skip

    def __init__(self, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self.base_offset = -1
        self.log_append_time_ms: int | None = None
        self.error: KafkaError | None = None
        self.record_errors: dict[int, KafkaError] = {}
        self.is_done = False
        self._waiting: list[threading.Lock] = []
        """One lock for each waiting thread, held until the end.

        Not an event, which is Python code around a lock: Ctrl-C in that code raises RuntimeError, or leaves the lock
        taken.
        """

    def set(
        self,
        base_offset: int,
        log_append_time_ms: int | None,
        error: KafkaError | None,
        record_errors: dict[int, KafkaError],
    ) -> None:
        self.base_offset = base_offset
        self.log_append_time_ms = log_append_time_ms
        self.error = error
        self.record_errors = record_errors

    def mark_done(self) -> None:
        """Wake the waiting threads, after the callbacks, so that a flush returns after all of them.

        May be called again, and then wakes the threads that a fault left waiting.
        """
        self.is_done = True
        for gate in tuple(self._waiting):  # a copy, because a thread that gives up removes its lock
            if gate.locked():  # the thread waits, or has just taken the lock and will not use it again
                gate.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end of the batch. Return whether it came within that time."""
        if self.is_done:
            return True
        if sys.is_finalizing():  # the program ends, and all other threads are stopped for ever
            return False
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        try:
            # `mark_done` sets the flag and then reads the gates. Here the gate comes first, then the flag is read.
            return self.is_done or gate.acquire(timeout=lock_timeout(timeout_s))
        finally:
            self._waiting.remove(gate)

    def error_of(self, index: int) -> KafkaError | None:
        return self.record_errors.get(index, self.error)

    def offset_of(self, index: int) -> int:
        return -1 if self.base_offset < 0 else self.base_offset + index


class FutureRecordMetadata:
    """The future of one `send`."""

    __slots__ = ("_index", "_key_size", "_result", "_sends_on", "_timestamp_ms", "_value_size")

    def __init__(
        self, timestamp_ms: int, key_size: int, value_size: int, sends_on: threading.Thread | None = None
    ) -> None:
        """`sends_on`: the Sender's thread."""
        self._sends_on = sends_on
        self._timestamp_ms = timestamp_ms
        self._key_size = key_size
        self._value_size = value_size
        self._result: BatchResult | None = None
        self._index = 0

    @classmethod
    def failed(cls, topic_partition: TopicPartition, error: KafkaError) -> FutureRecordMetadata:
        """Return the future of a send that failed before it had a batch."""
        future = cls(-1, -1, -1)
        result = BatchResult(topic_partition)
        result.set(-1, None, error, {})
        result.mark_done()
        future.bind(result, 0)
        return future

    def bind(self, result: BatchResult, index: int) -> None:
        """Bind the future to record number `index` of the batch of `result`."""
        self._index = index
        self._result = result

    def done(self) -> bool:
        return self._result is not None and self._result.is_done

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Return the metadata of the record. Wait up to `timeout` seconds, and again if the batch is split.

        Raises a copy of the error of the send, or KafkaTimeoutError if it has not ended. Raises IllegalStateError in a
        callback of the same producer, if the record has no outcome yet: its thread is the one that sends the record.
        """
        result = self._result
        while result is not None:
            if not result.is_done and threading.current_thread() is self._sends_on:
                raise IllegalStateError(
                    f"A callback cannot wait for the record for {result.topic_partition}: it would wait for its own"
                    " thread. Give that record a callback, or wait for its future in another thread."
                )
            if not result.wait(timeout):
                raise KafkaTimeoutError(_without_outcome(result.topic_partition, timeout))
            if result is self._result:
                break
            result = self._result  # the batch was split: wait for the part
        error = self.exception()
        if error is not None:
            raise error.copied()
        return self.metadata()

    def exception(self) -> KafkaError | None:
        """Return the error of a send that has ended, or None."""
        return self._result.error_of(self._index) if self._result is not None else None

    def metadata(self) -> RecordMetadata:
        """Return the metadata for the callback of a send that has ended, failed or not."""
        result = self._result
        assert result is not None
        topic, partition = result.topic_partition
        if result.error_of(self._index) is not None:
            return RecordMetadata(topic, partition, -1, -1, -1, -1)
        stamped = self._timestamp_ms if result.log_append_time_ms is None else result.log_append_time_ms
        offset = result.offset_of(self._index)
        return RecordMetadata(topic, partition, offset, stamped, self._key_size, self._value_size)


def _without_outcome(topic_partition: TopicPartition, timeout: float | None) -> str:
    if sys.is_finalizing():
        return f"The record for {topic_partition} has no outcome: the program ends, and nothing is sent any more."
    return f"The record for {topic_partition} has no outcome after {timeout} s; it is still on its way."


class RecordThunk:
    """The future of a record, with its callback."""

    __slots__ = ("callback", "first", "future")
    record_count = 1

    def __init__(self, future: FutureRecordMetadata, callback: RecordCallback | None) -> None:
        self.future = future
        self.callback = callback
        self.first = 0

    def bind(self, result: BatchResult, first: int) -> None:
        self.first = first
        self.future.bind(result, first)

    def fire(self, harmless: Harmless = BaseException) -> None:
        """Call the callback, but only once. An exception of it is logged.

        On the thread of the caller only Exceptions are `harmless`: Ctrl-C is raised.
        """
        callback = self.callback
        if callback is None:
            return
        metadata, error = self.future.metadata(), self.future.exception()
        self.callback = None  # now it counts as called
        try:
            callback(metadata, error)
        except harmless:
            log.exception("A send callback raised; the outcome of the record does not change")

    def part(self, first: int, last: int) -> RecordThunk:  # noqa: ARG002 - a record has one part
        return self


class RunThunk:
    """The callback of a run of rows."""

    __slots__ = ("_calls", "_result", "callback", "first", "record_count", "serialized_size")

    def __init__(self, callback: RunCallback, record_count: int, serialized_size: int) -> None:
        self.callback = callback
        self.record_count = record_count
        self.serialized_size = serialized_size
        self.first = 0
        self._result: BatchResult | None = None
        self._calls: list[tuple[RunMetadata, KafkaError | None]] | None = None
        """The calls that are still to be made, the last first."""

    def bind(self, result: BatchResult, first: int) -> None:
        self.first = first
        self._result = result

    def extend(self, callback: RunCallback, first: int, record_count: int, serialized_size: int) -> bool:
        """Add rows from record number `first` of the batch on, if they are the next ones and have the same callback.
        Return whether they were added.
        """
        if self.callback is not callback or self.first + self.record_count != first:
            return False
        self.record_count += record_count
        self.serialized_size += serialized_size
        return True

    def fire(self, harmless: Harmless = BaseException) -> None:
        """Call the callback once, or once for each stretch of rows with the same outcome (KIP-467).

        Called again, it makes the calls that are left. See `RecordThunk.fire` for exceptions.
        """
        if self._calls is None:
            self._calls = self._due_calls()
        while self._calls:
            run, error = self._calls.pop()
            try:
                self.callback(run, error)
            except harmless:
                log.exception("A send callback raised; the outcome of the rows does not change")

    def _due_calls(self) -> list[tuple[RunMetadata, KafkaError | None]]:
        result = self._result
        assert result is not None
        topic, partition = result.topic_partition
        stamped_ms = -1 if result.log_append_time_ms is None else result.log_append_time_ms
        calls = []
        for first, count, error in reversed(self._stretches(result)):
            offset = -1 if error is not None else result.offset_of(first)
            size = self.serialized_size * count // self.record_count
            calls.append((RunMetadata(topic, partition, offset, count, stamped_ms, size), error))
        return calls

    def _stretches(self, result: BatchResult) -> list[tuple[int, int, KafkaError | None]]:
        end = self.first + self.record_count
        if not result.record_errors:
            return [(self.first, self.record_count, result.error)]
        stretches: list[tuple[int, int, KafkaError | None]] = []
        for index in range(self.first, end):
            error = result.error_of(index)
            if stretches and stretches[-1][2] is error:
                first, count, _ = stretches[-1]
                stretches[-1] = (first, count + 1, error)
            else:
                stretches.append((index, 1, error))
        return stretches

    def part(self, first: int, last: int) -> RunThunk:
        """Return the thunk of rows `first` to `last` (in the batch) of this run, for a part of a split batch."""
        count = last - first
        return RunThunk(self.callback, count, self.serialized_size * count // self.record_count)


Thunk = RecordThunk | RunThunk
