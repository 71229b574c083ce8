"""One producer for each process and configuration, shared by the tasks that run there one after another.

A PySpark worker is forked from a daemon and ends without `atexit`. So a producer is made after the fork, may never be
closed, and is never used by a child of the process that made it: each process id has its own pool. A producer that
failed permanently is not used again. After the files of its certificates were renewed, it is not lent again. One that
was not used for ten minutes is closed, when a task takes or returns one.

Any thread may call. Producers are made under the lock, and closed after it is released.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from spark_kafka_sink.common.clock import Clock, SystemClock
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.network.tls_context import FileStates, are_renewed, file_states
from spark_kafka_sink.producer.futures import RunCallback
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.producer.transactions import PreparedTransaction
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink.worker import freeze_modules

IDLE_MS: Final = 600_000
"""As Spark's spark.kafka.producer.cache.timeout."""
CLOSE_TIMEOUT_S: Final = 5.0


class Producer(Protocol):
    """The part of a producer that the sink uses."""

    def send_columns(self, topic: str, columns: RecordColumns, on_completion: RunCallback | None = None) -> None: ...

    def look_up(self, topics: Iterable[str]) -> None: ...

    def partitions_for(self, topic: str) -> Sequence[object]: ...

    def flush(self, timeout: float | None = None) -> None: ...

    def close(self, timeout: float | None = None) -> None: ...

    @property
    def client_id(self) -> str: ...

    def batches_and_retries(self) -> tuple[int, int]: ...

    def waits_ms(self) -> tuple[int, int]: ...

    def metrics(self) -> Mapping[str, float]: ...

    def topic_metrics(self) -> Mapping[str, Mapping[str, float]]: ...

    def node_metrics(self) -> Mapping[str, Mapping[str, float]]: ...

    def connection_metrics(self) -> Mapping[tuple[str, str], Mapping[str, float]]: ...

    @property
    def has_failed(self) -> bool: ...

    # a producer with a transactional.id

    def init_transactions(
        self, transactional_id: str | None = None, coordinators: Mapping[tuple[int, str], Node] | None = None
    ) -> None: ...

    def begin_transaction(self) -> None: ...

    def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, tuple[int, str | None]], group: str
    ) -> None: ...

    @property
    def current_transaction(self) -> OpenTransaction: ...

    def prepare_transaction(self) -> PreparedTransaction: ...


@dataclass(slots=True)
class _Entry:
    key: Hashable
    producer: Producer
    files: FileStates
    """Of the certificates, when the producer was made."""
    users: int = 0
    last_used_ms: int = 0
    is_borrowed: bool = False
    """Lent to one task only, until it comes back."""
    number: int = field(default_factory=itertools.count().__next__)
    """Unique in the process."""


class ProducerPool:
    """The producers of one process. `acquire` and `release` belong together."""

    def __init__(self, create: Callable[[ProducerConfig], Producer], clock: Clock) -> None:
        self._create = create
        self._clock = clock
        self._lock = threading.Lock()
        self._ready: dict[Hashable, _Entry] = {}
        self._lent: dict[int, _Entry] = {}
        """By the producer's id; also failed ones that tasks still use."""
        self._dead_letters: dict[str, int] = {}

    def acquire(self, config: ProducerConfig) -> Producer:
        """Return the producer of `config`. A new one is made if none exists. Raises the errors of its constructor."""
        key = config.canonical()
        retired: list[Producer] = []
        try:
            with self._lock:
                retired = self._retire(self._clock.now_ms())
                retired += self._outdate(key, config)
                entry = self._ready.get(key)
                if entry is None:
                    entry = self._ready[key] = self._made(key, config)
                entry.users += 1
                self._lent[id(entry.producer)] = entry
        finally:
            _close(retired)
        return entry.producer

    def borrow(self, config: ProducerConfig) -> Producer:
        """Return a producer of `config` for this task only, until it is released or discarded: a transaction belongs to
        one task. Raises the errors of its constructor.
        """
        key = ("borrowed", config.canonical())
        retired: list[Producer] = []
        try:
            with self._lock:
                retired = self._retire(self._clock.now_ms())
                retired += self._outdate(key, config)
                entry = self._ready.pop(key, None) or self._made(key, config, is_borrowed=True)
                entry.users = 1
                self._lent[id(entry.producer)] = entry
        finally:
            _close(retired)
        return entry.producer

    def discard(self, producer: Producer) -> None:
        """Close a borrowed producer, which aborts a transaction that is open and not prepared."""
        with self._lock:
            del self._lent[id(producer)]
        _close([producer])

    def release(self, producer: Producer) -> None:
        """Return a producer from `acquire` or `borrow`. It stays open for the next task, unless it failed."""
        with self._lock:
            now_ms = self._clock.now_ms()
            entry = self._lent[id(producer)]
            entry.users -= 1
            entry.last_used_ms = now_ms
            retired = []
            if entry.users == 0:
                del self._lent[id(producer)]
                if entry.is_borrowed:
                    self._ready.setdefault(entry.key, entry)
                if self._ready.get(entry.key) is not entry:
                    retired.append(producer)
            retired.extend(self._retire(now_ms))
        _close(retired)

    def producers(self) -> list[tuple[str, int, Producer]]:
        """client.id, unique number and producer of each open producer. From any thread, to read metrics."""
        with self._lock:
            entries = {entry.number: entry for entry in (*self._ready.values(), *self._lent.values())}
        return [(entry.producer.client_id, number, entry.producer) for number, entry in entries.items()]

    def count_dead_letters(self, topic: str, rows: int) -> None:
        """Add acknowledged dead letters in `topic`, for the metrics."""
        with self._lock:
            self._dead_letters[topic] = self._dead_letters.get(topic, 0) + rows

    def dead_letters(self) -> Mapping[str, int]:
        """Dead letters of this process by topic. From any thread."""
        with self._lock:
            return dict(self._dead_letters)

    def _made(self, key: Hashable, config: ProducerConfig, *, is_borrowed: bool = False) -> _Entry:
        files = file_states(config)  # before the producer reads them
        return _Entry(key, self._create(config), files, is_borrowed=is_borrowed)

    def _outdate(self, key: Hashable, config: ProducerConfig) -> list[Producer]:
        """Remove the producer if the files of its certificates were renewed. Its users keep it, and the last one closes
        it. Return it if it has none.
        """
        entry = self._ready.get(key)
        if entry is None or not are_renewed(config, entry.files):
            return []
        del self._ready[key]
        return [] if entry.users else [entry.producer]

    def _retire(self, now_ms: int) -> list[Producer]:
        """Remove every producer that failed or was idle for too long. Return those without users, which must be
        closed.
        """
        retired = []
        for entry in list(self._ready.values()):
            idle = entry.users == 0 and now_ms - entry.last_used_ms >= IDLE_MS
            if idle or entry.producer.has_failed:
                del self._ready[entry.key]
                if entry.users == 0:
                    retired.append(entry.producer)
        return retired


def _close(producers: Iterable[Producer]) -> None:
    for producer in producers:
        producer.close(CLOSE_TIMEOUT_S)


_POOLS: Final[dict[int, ProducerPool]] = {}
"""By process id. A child does not touch its parent's pool, because sockets and locks in it belong to the parent."""


def process_pool() -> ProducerPool:
    """Return the pool of this process."""
    pid = os.getpid()
    pool = _POOLS.get(pid)
    if pool is None:
        pool = _POOLS.setdefault(pid, ProducerPool(KafkaProducer, SystemClock()))
    freeze_modules()
    return pool
