"""The bound on memory: bytes of records that wait to be acknowledged.

It counts bytes and hands out none. Encoded records are immutable buffers that live as long as someone holds them, so
the memory of a batch on the wire cannot be used again early (KAFKA-19012 cannot happen here); what the pool bounds is
how many such bytes there are: of a batch that was compressed the compressed ones, for its records are gone then. Any
thread may call; waiters are served in the order in which they came
(org.apache.kafka.clients.producer.internals.BufferPool).
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
    """Time in ms that callers waited for memory, theirs added up, and how many waited in vain."""

    wait_ms: int = 0
    exhausted: int = 0


class Grant:
    """Memory that a send or a batch has. It is changed in one statement with what it comes from or goes to, for Ctrl-C
    comes between others; `BufferPool.take_back` may be asked wherever that was, and again.
    """

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class BufferPool:
    """`total_memory` bytes, given out and taken back.

    `on_wait` hears of each caller that has to wait. It is called under the pool's lock, so that nobody is overtaken
    meanwhile, and takes none and waits for nothing itself; what it raises ends the wait.
    """

    def __init__(self, total_memory: int, clock: Clock, on_wait: Callable[[], None] = lambda: None) -> None:
        self.total_memory = total_memory
        self._clock = clock
        self._on_wait = on_wait
        self._lock = threading.RLock()  # of a Lock a Condition lets go in Python: Ctrl-C there leaves it to nobody
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
        """How many callers wait for memory. Read without the lock: the Sender asks in every loop and an old answer
        does no harm.
        """
        return len(self._waiters)

    def allocate(self, size: int, max_block_ms: int, grant: Grant) -> int:
        """Take `size` bytes into `grant`, waiting up to `max_block_ms` for them. Returns how long it waited, in ms.

        Raises RecordTooLargeError when they could never be had, BufferExhaustedError when they could not be had in
        time, and ProducerClosedError when the pool is closed meanwhile.
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
        """Gather `size` bytes as they come free. Caller holds the lock."""
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
            if turn in self._waiters:  # not where Ctrl-C came first
                self._waiters.remove(turn)
            self._notify_first()

    def exchange(self, grant: Grant, size: int) -> None:
        """Take back `grant` for one of `size` bytes, be they free or not; who waits goes on waiting for others."""
        with self._lock:
            self._available, grant.size = self._available + grant.size - size, size
            self._notify_first()

    def take_back(self, grant: Grant) -> None:
        """Take back `grant`, or what of it has not moved to another one: all, some or none of it."""
        with self._lock:
            self._available, grant.size = self._available + grant.size, 0
            self._notify_first()

    def close(self) -> None:
        """Wake every waiter; each raises ProducerClosedError."""
        with self._lock:
            self._closed = True
            for turn in self._waiters:
                turn.notify_all()

    def _notify_first(self) -> None:
        if self._waiters and (self._available > 0 or self._closed):
            self._waiters[0].notify_all()


class SharedAllocation:
    """Memory that several batches hold together, as slices of one encoded block do: given back when the last lets go
    of it.

    `give_back` may be called more than once, and gives back once. So every call here may be made again where Ctrl-C or
    a fault ended it. A holder is added while another one is there that the same thread lets go.
    """

    __slots__ = ("_give_back", "_holders")

    def __init__(self, give_back: Callable[[], None], holder: object) -> None:
        self._give_back = give_back
        self._holders = {holder}

    def hold(self, holder: object) -> None:
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """`holder` lets go, if it has not."""
        self._holders.discard(holder)
        if not self._holders:
            self._give_back()
