"""The limit of buffer.memory: bytes of records that wait to be acknowledged.

The pool counts bytes and hands out no buffers. Encoded records are immutable buffers that exist as long as an object
refers to them, so the memory of a batch in flight cannot be reused too early (KAFKA-19012 cannot happen here). For a
compressed batch the compressed bytes count, because its records are freed. Any thread may call. Waiting threads are
served in order (org.apache.kafka.clients.producer.internals.BufferPool).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.errors import BufferExhaustedError, ProducerClosedError, RecordTooLargeError
from spark_kafka_sink.common.windows import Sample, Windows


@dataclass(slots=True)
class WaitSample(Sample):
    """The ms that callers waited for memory, in sum, and the number of callers that got none."""

    wait_ms: int = 0
    exhausted: int = 0


class Grant:
    """Memory that a send or a batch has.

    One statement changes it and its source or target, because Ctrl-C may come between two statements.
    `BufferPool.take_back` may be called from anywhere, and more than once.
    """

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class BufferPool:
    """A pool of `total_memory` bytes.

    `on_wait` is called for each caller that has to wait, under the lock of the pool, so that no other caller gets
    ahead. It must not wait and take no memory. If it raises, the wait ends.
    """

    def __init__(self, total_memory: int, clock: Clock, on_wait: Callable[[], None] = lambda: None) -> None:
        self.total_memory = total_memory
        self._clock = clock
        self._on_wait = on_wait
        self._lock = threading.RLock()  # a Condition releases a Lock in Python code, where Ctrl-C would leave it taken
        self._available = total_memory
        self._waiters: deque[threading.Condition] = deque()
        self._closed = False
        self.waits = Windows(WaitSample)
        """Written under the lock."""

    def __repr__(self) -> str:
        return f"BufferPool({max(0, self._available)} of {self.total_memory} bytes free, {len(self._waiters)} waiting)"

    @property
    def available_memory(self) -> int:
        with self._lock:
            return max(0, self._available)

    @property
    def queued(self) -> int:
        """The number of callers that wait for memory.

        Read without the lock: the Sender asks in every turn, and an old value does no harm.
        """
        return len(self._waiters)

    def allocate(self, size: int, max_block_ms: int, grant: Grant) -> int:
        """Take `size` bytes into `grant`. Wait up to `max_block_ms` for them. Return the ms waited.

        Raises RecordTooLargeError if the pool is smaller, BufferExhaustedError if time runs out, and
        ProducerClosedError if the pool is closed meanwhile.
        """
        if size > self.total_memory:
            raise RecordTooLargeError(
                f"{size} bytes of records are more than buffer.memory={self.total_memory}: raise buffer.memory."
            )
        with self._lock:
            if self._closed:
                raise ProducerClosedError("The producer was closed.")
            if not self._waiters and size <= self._available:
                self._available, grant.size = self._available - size, size
                return 0
            return self._wait_for(size, max_block_ms, grant)

    def _wait_for(self, size: int, max_block_ms: int, grant: Grant) -> int:
        """Collect `size` bytes as they become free. The caller holds the lock."""
        turn = threading.Condition(self._lock)
        started_ms = now_ms = self._clock.now_ms()
        try:
            self._waiters.append(turn)
            self._on_wait()
            while grant.size < size:
                if self._closed:
                    raise ProducerClosedError("The producer was closed while a send waited for buffer.memory.")
                if self._waiters[0] is turn and self._available > 0:
                    taken = min(size - grant.size, self._available)
                    self._available, grant.size = self._available - taken, grant.size + taken
                    continue
                if now_ms - started_ms >= max_block_ms:
                    self.waits.at(now_ms).exhausted += 1
                    raise BufferExhaustedError(
                        f"buffer.memory={self.total_memory} stayed full for max.block.ms={max_block_ms}: brokers take"
                        f" records more slowly than they are written ({len(self._waiters)} sends are waiting)."
                    )
                self._clock.wait(turn, max_block_ms - (now_ms - started_ms))
                woke_ms = self._clock.now_ms()
                self.waits.at(woke_ms).wait_ms += woke_ms - now_ms
                now_ms = woke_ms
            return now_ms - started_ms
        except BaseException:
            self.take_back(grant)
            raise
        finally:
            if turn in self._waiters:  # unless Ctrl-C came first
                self._waiters.remove(turn)
            self._notify_first()

    def exchange(self, grant: Grant, size: int) -> None:
        """Replace `grant` by one of `size` bytes, even if none are free. Waiting threads go on waiting."""
        with self._lock:
            self._available, grant.size = self._available + grant.size - size, size
            self._notify_first()

    def take_back(self, grant: Grant) -> None:
        """Take back `grant`: all of it, or the part that did not move to another grant."""
        with self._lock:
            self._available, grant.size = self._available + grant.size, 0
            self._notify_first()

    def close(self) -> None:
        """Close the pool. Every waiting thread raises ProducerClosedError."""
        with self._lock:
            self._closed = True
            for turn in self._waiters:
                turn.notify_all()

    def _notify_first(self) -> None:
        if self._waiters and (self._available > 0 or self._closed):
            self._waiters[0].notify_all()


class SharedAllocation:
    """Memory that several batches hold together, such as slices of one encoded block. The last holder gives it back.

    `give_back` may be called more than once, and gives back once. So each call here may be repeated after Ctrl-C or a
    fault. A holder is added only while there is another one, which the same thread releases.
    """

    __slots__ = ("_give_back", "_holders", "hold")

    def __init__(self, give_back: Callable[[], None], holder: object) -> None:
        self._give_back = give_back
        self._holders = {holder}
        self.hold: Callable[[object], None] = self._holders.add
        """Add a holder. Called for each run of a block, so it is the method of the set."""

    def release(self, holder: object) -> None:
        """Release the share of `holder`, if it has one."""
        self._holders.discard(holder)
        if not self._holders:
            self._give_back()
