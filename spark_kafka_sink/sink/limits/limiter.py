"""A task's side of the limits: it asks the driver's machine for permission before it sends rows.

The task waits outside of the producer: no lock is held, batches that are open are sent meanwhile, and neither
max.block.ms nor delivery.timeout.ms runs. A task that cannot ask fails, and sends nothing without permission.
Exactly once, a task fails as soon as it is certain that its transaction could not be committed in time.

Used by the task's thread only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Protocol

from spark_kafka_sink.common.clock import Clock, SystemClock
from spark_kafka_sink.common.errors import IllegalStateError, LimitServerError, WriteLimitError
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import parts_up_to
from spark_kafka_sink.sink.limits.budget import BURST_MS, SLICE_MS
from spark_kafka_sink.sink.limits.conversation import Conversation, LimitServer
from spark_kafka_sink.sink.running_query import QUERY_ID

if TYPE_CHECKING:
    from spark_kafka_sink.sink.options import SinkConfig

LIMIT_OPTIONS: Final = ("write.max.records.per.second", "write.max.bytes.per.second")
TIMEOUT_OPTION: Final = "kafka.transaction.timeout.ms"
_ALL: Final = 2**62


class Asker(Protocol):
    """The part of a `Conversation` that a limiter uses."""

    def ask(self, request: str, on_wait: Callable[[], None]) -> int: ...

    def close(self) -> None: ...


class WriteLimiter:
    """Hands out the rows of one task when they may be sent.

    `acknowledged` returns the records and the bytes that brokers have acknowledged to this task, `check` raises the
    error of a row that failed. `transaction_ms`: how long its transaction may be open and still be committed; None
    without one.
    """

    def __init__(
        self,
        config: SinkConfig,
        query: str,
        acknowledged: Callable[[], tuple[int, int]],
        check: Callable[[], None],
        clock: Clock,
        transaction_ms: float | None = None,
        connect: Callable[[LimitServer], Asker] = Conversation,
    ) -> None:
        if config.limit_server is None:
            raise IllegalStateError(f"A task has {LIMIT_OPTIONS[0]} or {LIMIT_OPTIONS[1]}, and no server of limits.")
        self._server = config.limit_server
        self._rates = (config.records_per_second, config.bytes_per_second)
        self._timeout_ms = config.producer.transaction_timeout_ms
        self._query = query
        self._acknowledged = acknowledged
        self._check = check
        self._clock = clock
        self._transaction_ms = transaction_ms
        self._connect = connect
        self._conversation: Asker | None = None
        self._began_ms: int | None = None
        self._left = (0, 0)
        """Records and bytes of the rows that are known and not sent."""
        self._ahead = (0, 0)
        """Records and bytes that the task may send without a question."""
        self.waited_ms = 0
        """How long the task has waited for permission."""
        self._records = 0
        self._bytes = 0
        """What the task has paid."""
        self._owed = 0
        """Bytes that the sent records had more than was paid. Negative if they had less."""

    @classmethod
    def of_task(
        cls, config: SinkConfig, acknowledged: Callable[[], tuple[int, int]], check: Callable[[], None]
    ) -> WriteLimiter:
        """Return the limiter of the running task of Spark."""
        from pyspark import TaskContext

        context = TaskContext.get()
        query_id = "" if context is None else context.getLocalProperty(QUERY_ID) or ""
        brokers = sorted(f"{host}:{port}" for host, port in config.producer.bootstrap_servers)
        query = json.dumps([query_id, config.topic, brokers])
        usable_ms = None
        if config.is_exactly_once:
            from spark_kafka_sink.sink.exactly_once.protocol import USABLE_SHARE

            usable_ms = USABLE_SHARE * config.producer.transaction_timeout_ms
        return cls(config, query, acknowledged, check, SystemClock(), usable_ms)

    def parts(self, columns: RecordColumns) -> Iterator[RecordColumns]:
        """Yield parts of `columns`, each when it may be sent. The caller sends a part before it takes the next one.

        Raises LimitServerError, WriteLimitError, and the error of a row that failed meanwhile.
        """
        rows, size = (_ALL if rate is None else max(1, rate * SLICE_MS // 1000) for rate in self._rates)
        sent = 0
        for part, part_size, bytes_left in parts_up_to(columns, rows, size):
            self._left = (columns.num_rows - sent, bytes_left)
            self._refuse_late()
            started_ms = self._clock.now_ms()
            self._take(part.num_rows, part_size)
            self.waited_ms += self._clock.now_ms() - started_ms
            sent += part.num_rows
            yield part
            if self._began_ms is None:
                self._began_ms = self._clock.now_ms()

    def close(self) -> None:
        """Close the connection. The next `parts` makes another."""
        self._ahead = (0, 0)
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation.close()

    def _take(self, records: int, size: int) -> None:
        paid = self._paid(records, size)
        left = self._ahead[0] - records, self._ahead[1] - paid
        if min(left) >= 0:
            self._ahead = left
            return
        request = json.dumps({"query": self._query, "rates": self._rates, "ask": [records, paid]})
        try:
            ahead = self._ask(request)
        except OSError:  # a firewall may have dropped a connection that was not used
            self.close()
            try:
                ahead = self._ask(request)
            except OSError as error:
                self.close()
                raise LimitServerError(
                    f"{self._options()}: the server of the limits on the driver's machine, {self._server.host}, port"
                    f" {self._server.port}, cannot be reached from this task: {error}. Executors must be able to"
                    " connect to any port of the driver's machine. If that process has ended, start the query again."
                ) from error
        self._ahead = ahead * records, ahead * paid

    def _ask(self, request: str) -> int:
        if self._conversation is None:
            self._conversation = self._connect(self._server)
        try:
            return self._conversation.ask(request, self._on_wait)
        except BaseException:
            self.close()  # so that the server forgets what was asked
            raise

    def _on_wait(self) -> None:
        self._check()
        self._refuse_late()

    def _paid(self, records: int, size: int) -> int:
        """Return the bytes to pay for records that have `size` before their batch is known, with what is owed."""
        acknowledged, actual = self._acknowledged()
        if acknowledged == self._records:
            self._owed = actual - self._bytes
        paid = max(0, size + self._owed)
        self._owed -= paid - size
        self._records += records
        self._bytes += paid
        return paid

    def _refuse_late(self) -> None:
        """Raise WriteLimitError if the rest of its rows cannot be sent while the transaction can be committed."""
        if self._transaction_ms is None:
            return
        open_ms = 0 if self._began_ms is None else self._clock.now_ms() - self._began_ms
        least_ms = max(n * 1000 / rate for n, rate in zip(self._left, self._rates, strict=True) if rate is not None)
        if open_ms + least_ms - BURST_MS - SLICE_MS <= self._transaction_ms:
            return
        raise WriteLimitError(
            f"This task has {self._left[0]} more rows of {self._left[1]} bytes. At {self._options()} they take at least"
            f" {least_ms / 1000:.0f} s, its transaction is open for {open_ms / 1000:.0f} s, and it must be committed"
            f" within 80 % of {TIMEOUT_OPTION}={self._timeout_ms}. Raise the limit or {TIMEOUT_OPTION} (and, if need"
            " be, the brokers' transaction.max.timeout.ms), or make batches smaller (maxOffsetsPerTrigger,"
            " maxFilesPerTrigger).",
            setting=TIMEOUT_OPTION,
        )

    def _options(self) -> str:
        given = zip(LIMIT_OPTIONS, self._rates, strict=True)
        return " and ".join(f"{name}={rate}" for name, rate in given if rate is not None)
