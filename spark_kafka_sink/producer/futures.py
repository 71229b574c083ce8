"""What a caller of `send` holds, and what a batch tells.

A `BatchResult` is one event for all records of a batch; futures look their share up in it. Any thread may wait; the
Sender thread sets. When a batch is split, its futures are bound to the parts before its own result is set, so whoever
wakes finds where to wait next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError, KafkaTimeoutError

log = logging.getLogger(__name__)

Headers = Sequence[tuple[str, bytes | None]]


class RecordMetadata(NamedTuple):
    """Where a record is. `offset` is -1 when the broker did not tell (acks=0, or a duplicate that it had already).

    A callback of a record that failed gets the topic and the partition, and -1 for all other numbers. The partition is
    -1 too where the send failed before a partition was chosen.
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
    """Where a run of rows that went into one batch is: `record_count` consecutive offsets from `base_offset` on
    (-1: not known). Rows of one `send_columns` call, or of consecutive ones with the very same callback.
    """

    topic: str
    partition: int
    base_offset: int
    record_count: int
    timestamp_ms: int
    """Log-append time, or -1 where the records keep their own."""
    serialized_size: int
    """Encoded bytes before compression. Where a split, or errors of single records, cut what went into one batch: the
    share by rows; of rows that failed unsent it may be a bound.
    """


RecordCallback = Callable[[RecordMetadata, KafkaError | None], None]
"""The error alone tells whether the record failed: the metadata is never None (as in the Java client's Callback)."""
RunCallback = Callable[[RunMetadata, KafkaError | None], None]
Harmless = type[BaseException]
"""What a callback may raise without harm."""


class BatchResult:
    """How a batch ended."""

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
        """Of those who wait, each its own, held until the end. Not an event, which is Python around a lock: Ctrl-C in
        there raises RuntimeError, or leaves the lock taken.
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
        """Wake the threads that wait, after the callbacks: a flush that returns has seen them all run. May be called
        again: it wakes those that a fault kept from being woken.
        """
        self.is_done = True
        for gate in tuple(self._waiting):  # a copy: a thread that gives up takes its own away
            if gate.locked():  # by us still, or by the thread that has woken
                gate.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the batch has ended within that time."""
        if self.is_done:
            return True
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        try:
            # `mark_done` looks for gates after it has said so, we ask after ours can be seen: one sees the other.
            return self.is_done or gate.acquire(timeout=-1 if timeout_s is None else max(0, timeout_s))
        finally:
            self._waiting.remove(gate)

    def error_of(self, index: int) -> KafkaError | None:
        return self.record_errors.get(index, self.error)

    def offset_of(self, index: int) -> int:
        return -1 if self.base_offset < 0 else self.base_offset + index


class FutureRecordMetadata:
    """The outcome of one `send`."""

    __slots__ = ("_index", "_key_size", "_result", "_timestamp_ms", "_value_size")

    def __init__(self, timestamp_ms: int, key_size: int, value_size: int) -> None:
        self._timestamp_ms = timestamp_ms
        self._key_size = key_size
        self._value_size = value_size
        self._result: BatchResult | None = None
        self._index = 0

    @classmethod
    def failed(cls, topic_partition: TopicPartition, error: KafkaError) -> FutureRecordMetadata:
        """The future of a send that did not get as far as a batch."""
        future = cls(-1, -1, -1)
        result = BatchResult(topic_partition)
        result.set(-1, None, error, {})
        result.mark_done()
        future.bind(result, 0)
        return future

    def bind(self, result: BatchResult, index: int) -> None:
        """The record is number `index` of the batch behind `result`."""
        self._index = index
        self._result = result

    def done(self) -> bool:
        return self._result is not None and self._result.is_done

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait up to `timeout` seconds, anew when the record's batch is split. Raises a copy of the send's KafkaError,
        or KafkaTimeoutError when there is no outcome yet.
        """
        result = self._result
        while result is not None:
            if not result.wait(timeout):
                raise KafkaTimeoutError(
                    f"The record for {result.topic_partition} has no outcome after {timeout} s; it is still on its way."
                )
            if result is self._result:
                break
            result = self._result  # the batch was split: go on with the part
        error = self.exception()
        if error is not None:
            raise error.copied()
        return self.metadata()

    def exception(self) -> KafkaError | None:
        """The error of a send that has ended, or None."""
        return self._result.error_of(self._index) if self._result is not None else None

    def metadata(self) -> RecordMetadata:
        """Return what the callback of a send that has ended is told, whether it failed or not."""
        result = self._result
        assert result is not None
        topic, partition = result.topic_partition
        if result.error_of(self._index) is not None:
            return RecordMetadata(topic, partition, -1, -1, -1, -1)
        stamped = self._timestamp_ms if result.log_append_time_ms is None else result.log_append_time_ms
        offset = result.offset_of(self._index)
        return RecordMetadata(topic, partition, offset, stamped, self._key_size, self._value_size)


class RecordThunk:
    """A record's future with its callback."""

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
        """Call the callback, once however often this is called. One that raises harms nobody; on the caller's own
        thread only Exceptions are `harmless`, for Ctrl-C is the caller's to hear.
        """
        callback = self.callback
        if callback is None:
            return
        metadata, error = self.future.metadata(), self.future.exception()
        self.callback = None  # from here on it counts as called
        try:
            callback(metadata, error)
        except harmless:
            log.exception("A send callback raised; the record's own outcome stands")

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
        """What the callback has yet to be told, the last first."""

    def bind(self, result: BatchResult, first: int) -> None:
        self.first = first
        self._result = result

    def ends_at(self, index: int) -> bool:
        """Whether record number `index` of the batch is the next."""
        return self.first + self.record_count == index

    def extend(self, record_count: int, serialized_size: int) -> None:
        """The rows that come next in the batch are the callback's too."""
        self.record_count += record_count
        self.serialized_size += serialized_size

    def fire(self, harmless: Harmless = BaseException) -> None:
        """Call the callback: once, or where single records failed (KIP-467) once for each stretch of one outcome;
        called again, only what is left. As for what it raises see `RecordThunk.fire`.
        """
        if self._calls is None:
            self._calls = self._due_calls()
        while self._calls:
            run, error = self._calls.pop()
            try:
                self.callback(run, error)
            except harmless:
                log.exception("A send callback raised; the rows' own outcome stands")

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
        """The thunk of rows `first` to `last` (in the batch) of this run, for a part of a split batch."""
        count = last - first
        return RunThunk(self.callback, count, self.serialized_size * count // self.record_count)


Thunk = RecordThunk | RunThunk
