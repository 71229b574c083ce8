"""A task's delivery: acquire a producer, send, flush, check, release, report. Every interface of the sink goes through
it.

A row counts only when the broker has acknowledged it: `finish` raises unless every row was acknowledged. The task's
thread owns the delivery; the Sender thread reports to its `RowCounts`.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa

from spark_kafka_sink.common.clock import Clock, SystemClock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import InvalidTopicError
from spark_kafka_sink.producer.writes import Delivered, RowCounts, Write, send_to_each
from spark_kafka_sink.record.arrow import binary_array, int_array
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.sifting import OF_DECISIONS, Columns, Unwritable
from spark_kafka_sink.sink.dead_letters import DeadLetters, LetterCounts, Letters
from spark_kafka_sink.sink.options import SinkConfig, check_prometheus, check_telemetry
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool
from spark_kafka_sink.sink.worker import acknowledge_now

if TYPE_CHECKING:
    from spark_kafka_sink.record.headers import Header
    from spark_kafka_sink.sink.limits.limiter import WriteLimiter
    from spark_kafka_sink.sink.telemetry.tasks import TaskTrace


class Transaction(Protocol):
    """The transaction that a task's rows go into, as `TaskDelivery` uses it."""

    @property
    def is_prepared(self) -> bool:
        """Whether the transaction is complete and stays open when the producer goes back to the pool."""
        ...

    @property
    def is_written_already(self) -> bool:
        """Whether the task's rows are counted and not sent."""
        ...

    def takes(self, topic: str, columns: RecordColumns) -> bool:
        """Count rows before they are sent. False: they are written already, and must not be sent."""
        ...

    def begin(self, pool: ProducerPool, config: ProducerConfig) -> Producer:
        """Borrow a producer of `config` and begin the transaction in it. Raises KafkaError."""
        ...

    def add_marker(self, producer: Producer, rows: int) -> None:
        """Add the marker of `rows` sent rows to the transaction, without waiting. Raises KafkaError."""
        ...

    def prepare(self, producer: Producer, delivered: Iterable[tuple[TopicPartition, Delivered]]) -> None:
        """Leave the transaction open for the driver, once all rows are acknowledged. Raises KafkaError. `delivered`:
        rows and dead letters; a partition may have both.
        """
        ...


class TaskPhases:
    """How long a task waits for its rows, and for each step of their delivery, in ms.

    The clock is read twice for each Arrow batch and topic, and never for a row.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_ms = clock.now_ms()
        self.sending_ms = 0
        self.acknowledge_ms = 0
        self.producer_ms = 0
        self.waited_before_ms = (0, 0)
        """The producer's `waits_ms` before the task."""
        self.limit_ms: int | None = None
        """Waiting for the limit of the query; None without one."""
        self._waits_ms = (0, 0)

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def since(self, started_ms: int) -> int:
        return self._clock.now_ms() - started_ms

    def waited(self, waits_ms: tuple[int, int]) -> None:
        """Note the producer's `waits_ms` after the task. These waits are parts of `sending_ms`."""
        (metadata, memory), (metadata_before, memory_before) = waits_ms, self.waited_before_ms
        self._waits_ms = metadata - metadata_before, memory - memory_before

    def durations(self) -> dict[str, int]:
        """Return the time of each phase until now. `read` is all that is no other phase: Spark computes the rows."""
        metadata, memory = self._waits_ms
        read = self.since(self._began_ms) - self.sending_ms - self.acknowledge_ms - self.producer_ms
        limit = {} if self.limit_ms is None else {"limit": self.limit_ms}
        return {
            "read": read - (self.limit_ms or 0),
            "encode": max(0, self.sending_ms - metadata - memory),  # another thread's waits count in the producer too
            "metadata": metadata,
            "memory": memory,
            "acknowledge": self.acknowledge_ms,
            "producer": self.producer_ms,
            **limit,
        }


class TaskDelivery:
    """Any number of `send`, then `finish`; or `abandon` if something failed.

    Must be made before the task reads a row. The producer is taken at the first send, so an empty partition makes no
    connection. Without a `transaction` delivery is at least once, and tasks share the producer.
    """

    def __init__(
        self,
        config: SinkConfig,
        pool: ProducerPool,
        transaction: Transaction | None = None,
        letters: DeadLetters | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`letters` and `clock`: those of a test; by default the task's own, if the sink has dead letters, and the
        system's.
        """
        acknowledge_now()  # so that Spark sends the task's rows
        if config.metrics_ports is not None:
            check_prometheus(", on the executors too")
        self.config = config
        self.counts = RowCounts()
        self.batches = 0
        self.retries = 0
        """Acknowledged batches and retried records while this task had the producer; known after `finish`."""
        self.topics: Sequence[str] = ()
        """The topics of the last `send_each`."""
        self.letters = letters or DeadLetters.of(config)
        self._pool = pool
        self._transaction = transaction
        self._producer: Producer | None = None
        self._write: Write | None = None
        self._dead: Write | None = None
        self._phases = TaskPhases(clock or SystemClock())
        self._durations_ms: Mapping[str, int] = {}
        self._limiter = self._new_limiter() if config.is_limited else None
        self._trace = self._new_trace() if config.sends_telemetry else None
        self._has_finished = False
        self._client_id: str | None = None

    def send(self, topic: str, columns: RecordColumns) -> None:
        """Send rows. Raises KafkaError as soon as one of these rows or of earlier ones is known to have failed, and
        InvalidTopicError for the decision topic.
        """
        if self._transaction is not None and not self._transaction.takes(topic, columns):
            return
        if topic == self.config.trusted_topic:
            raise InvalidTopicError(f"A row names topic {topic}: {OF_DECISIONS}. Give it another topic.", topic=topic)
        self._check()
        header = self._begun_header()
        for part in self._allowed(columns if header is None else columns.with_header(header)):
            self._send(self._begin(), topic, part)

    def _check(self) -> None:
        """Raise the first error of a row or of a dead letter, if there was one."""
        self.counts.check()
        if self.letters is not None:
            self.letters.counts.check()

    def _begun_header(self) -> Header | None:
        """Begin the task's span. Return the header that each record gets, after the fingerprint of its row is taken:
        another run of the batch has other spans, and the same rows.
        """
        return None if self._trace is None else self._trace.begin()

    def _send(self, write: Write, topic: str, columns: RecordColumns) -> None:
        started_ms = self._phases.now_ms()
        write.send(topic, columns)
        self._phases.sending_ms += self._phases.since(started_ms)

    def sifted(self, columns: Columns, known: Sequence[Unwritable] = ()) -> Columns:
        """Return the columns of a batch without the rows that can never be written, and send those to the dead letters.
        Without dead letters return `columns` as they are. `known`: such rows that the caller found. Must be called once
        for each batch.

        Raises TooManyDeadLettersError; the error of the first of `known` if there are no dead letters; and as `send`.
        """
        if self.letters is None:
            if known:
                raise known[0].error(f"Row {known[0].row}: {known[0].reason}")
            return columns
        is_written = self._transaction is not None and self._transaction.is_written_already
        is_sent = len(columns["value"]) > 0 and not is_written
        header = self._begun_header() if is_sent else None
        good, letters = self.letters.sift(columns, known, is_written_already=is_written, header=header)
        if letters is not None:
            self._send_letters(self.letters, letters)
        return good

    def _send_letters(self, dead: DeadLetters, letters: Letters) -> None:
        if self._transaction is not None:
            for topic, rows in letters.originals:
                self._transaction.takes(topic, rows)
        if letters.records is None:
            return
        self._check()
        for part in self._allowed(letters.records):
            self._begin()
            assert self._dead is not None
            self._send(self._dead, dead.topic, part)

    def _allowed(self, columns: RecordColumns) -> Iterable[RecordColumns]:
        """Return the parts of `columns`, each when it may be sent. A transaction begins after the first wait."""
        return (columns,) if self._limiter is None else self._limiter.parts(columns)

    def _new_limiter(self) -> WriteLimiter:
        from spark_kafka_sink.sink.limits.limiter import WriteLimiter  # only if there is a limit

        return WriteLimiter.of_task(self.config, self._acknowledged, self._check)

    def _new_trace(self) -> TaskTrace:
        check_telemetry(", on the executors too")
        from spark_kafka_sink.sink.telemetry.tasks import TaskTrace  # only with telemetry

        return TaskTrace(self.config, self._pool)

    def _acknowledged(self) -> tuple[int, int]:
        """Return the number of acknowledged records, dead letters too, and their bytes."""
        counts = (self.counts,) if self.letters is None else (self.counts, self.letters.counts)
        sizes = (part.size for each in counts for part in [*each.delivered.values()])
        return sum(each.acknowledged for each in counts), sum(sizes)

    def _begin(self) -> Write:
        if self._write is None:
            started_ms = self._phases.now_ms()
            self._producer = self._acquire()
            self._client_id = self._producer.client_id
            self._phases.waited_before_ms = self._producer.waits_ms()
            self._phases.producer_ms += self._phases.since(started_ms)
            self._write = Write(self._producer, self.counts)
            if self.letters is not None:
                self._dead = Write(self._producer, self.letters.counts)
            if self.config.metrics_ports is not None:
                from spark_kafka_sink.sink.prometheus import serve  # of an extra

                serve(self._pool, self.config.metrics_host, self.config.metrics_ports, self._phases.now_ms())
        return self._write

    def send_each(self, rows: Iterable[tuple[str, RecordColumns]]) -> None:
        """Send rows to each topic. Topics without metadata are looked up together. Raises as `send`."""
        self.topics = send_to_each(rows, self.send, self._look_up)

    def partition_count(self, topic: str) -> int:
        """Return the number of partitions of `topic`; 0 if no rows were sent to it. Raises KafkaError."""
        return 0 if self._producer is None else len(self._producer.partitions_for(topic))

    def finish(self) -> None:
        """Wait until every row is acknowledged, prepare the transaction, and give the producer back. Raises KafkaError
        if a row is not acknowledged.
        """
        try:
            producer, write = self._producer, self._write
            if producer is None or write is None:
                self.counts.check()
                return
            writes = [write] if self._dead is None else [write, self._dead]
            if self._transaction is not None:
                self._transaction.add_marker(producer, sum(each.sent for each in writes))
            started_ms = self._phases.now_ms()
            for each in writes:
                each.finish()
            self._phases.acknowledge_ms = self._phases.since(started_ms)
            if self.letters is not None and self.letters.counts.acknowledged:
                self._pool.count_dead_letters(self.letters.topic, self.letters.counts.acknowledged)
            self.batches, self.retries = write.batches_and_retries()
            self._phases.waited(producer.waits_ms())
            if self._transaction is not None:
                started_ms = self._phases.now_ms()
                delivered = (part for each in writes for part in each.counts.delivered.items())
                self._transaction.prepare(producer, delivered)
                self._phases.producer_ms += self._phases.since(started_ms)
            self._has_finished = True
        finally:
            if self._limiter is not None:
                self._phases.limit_ms = self._limiter.waited_ms
            self._durations_ms = self._phases.durations()
            self.abandon()

    def abandon(self) -> None:
        """Give the producer back without waiting. Rows that were sent may still be delivered. A transaction that is not
        prepared is aborted, because its producer is closed.
        """
        if self._limiter is not None:
            self._limiter.close()
        producer, self._producer, self._write, self._dead = self._producer, None, None, None
        if producer is not None:
            if self._transaction is None or self._transaction.is_prepared:
                self._pool.release(producer)
            else:
                self._pool.discard(producer)
        if self._trace is not None:
            counts = [self.counts] if self.letters is None else [self.counts, self.letters.counts]
            self._trace.end(counts, self._durations_ms, self._client_id, self._error_class())

    def _error_class(self) -> str | None:
        """Return the class of the error because of which the delivery has ended; None if it has finished."""
        if self._has_finished:
            return None
        error = sys.exception() or self.counts.first_error
        return "_OTHER" if error is None else f"{type(error).__module__}.{type(error).__qualname__}"

    @property
    def report(self) -> ReportColumns:
        """What the task reports to the driver, once the delivery has finished: the columns of `REPORT_DDL`."""
        letters = None if self.letters is None else self.letters.report
        return report_columns(self.counts.delivered, self.batches, self.retries, letters, self._durations_ms)

    def _acquire(self) -> Producer:
        if self._transaction is None:
            return self._pool.acquire(self.config.producer)
        return self._transaction.begin(self._pool, self.config.producer)

    def _look_up(self, topics: list[str]) -> None:
        if self._producer is not None:  # no row was sent to the first topic: the transaction has them all already
            self._producer.look_up(topics)


# ---- the report that a task returns to the driver --------------------------------------------------------------------

ReportColumns = tuple[Sequence[Any], ...]

_TEXT: Final = pa.string()
_COUNT: Final = pa.int64()
_REPORT_SCHEMA: Final = pa.schema(
    [
        ("topic", _TEXT),
        ("partition", pa.int32()),
        ("records", _COUNT),
        ("bytes", _COUNT),
        ("last_offset", _COUNT),
        ("batches", _COUNT),
        ("retries", _COUNT),
        ("dead_letters", _COUNT),
        ("first_dead_letter", _TEXT),
        ("first_offset", _COUNT),
        ("without_offset", _COUNT),
        ("dead_letter_bytes", _COUNT),
        ("task", _TEXT),
    ]
)
"""`task` is the JSON of `task_facts`, in the row of the task's own counts."""
REPORT_DDL: Final = (
    "topic STRING, partition INT, records BIGINT, bytes BIGINT, last_offset BIGINT, batches BIGINT, retries BIGINT,"
    " dead_letters BIGINT, first_dead_letter STRING, first_offset BIGINT, without_offset BIGINT,"
    " dead_letter_bytes BIGINT, task STRING"
)
EXACTLY_ONCE_DDL: Final = REPORT_DDL + ", outcome STRING"
"""The row of a task's own counts has the task's `TaskOutcome` as JSON."""


def task_report(columns: ReportColumns, outcome: str | None = None) -> pa.RecordBatch:
    """Return a task's report as Arrow, of `REPORT_DDL`; of `EXACTLY_ONCE_DDL` if there is an `outcome`."""
    arrays = [_array(column, field) for column, field in zip(columns, _REPORT_SCHEMA, strict=True)]
    if outcome is None:
        return pa.RecordBatch.from_arrays(arrays, schema=_REPORT_SCHEMA)
    texts = binary_array([*[None] * (len(columns[0]) - 1), outcome], "outcome").view(pa.string())
    return pa.RecordBatch.from_arrays([*arrays, texts], schema=_REPORT_SCHEMA.append(pa.field("outcome", pa.string())))


def report_columns(
    delivered: Mapping[TopicPartition, Delivered],
    batches: int,
    retries: int,
    letters: LetterCounts | None = None,
    durations_ms: Mapping[str, int] | None = None,
) -> ReportColumns:
    """Return a task's report, the columns of `REPORT_DDL`: a row for each topic-partition, one for each topic-partition
    of dead letters, and one without a topic for the task's own counts.

    Numbers of 64 bits are in arrays, which take a quarter of the memory of Python's numbers.
    """
    rows: list[tuple[Any, ...]] = [
        (*place, each.records, each.size, each.last_offset, 0, 0, 0, None, each.first_offset, each.without_offset, 0)
        for place, each in delivered.items()
    ]
    first: str | None = None
    kinds: Mapping[str, int] = {}
    if letters is not None:
        first, kinds = letters.first, letters.kinds
        rows += [
            (
                *place,
                0,
                0,
                each.last_offset,
                0,
                0,
                each.records,
                None,
                each.first_offset,
                each.without_offset,
                each.size,
            )
            for place, each in letters.counts.delivered.items()
        ]
    facts = json.dumps({"durations_ms": durations_ms or {}, "kinds": kinds}, separators=(",", ":"))
    own = (None, None, 0, 0, -1, batches, retries, 0, first, -1, 0, 0)
    columns = [*zip(*rows, own, strict=True), (*[None] * len(rows), facts)]
    return tuple(
        array("q", column) if field.type == _COUNT else column
        for column, field in zip(columns, _REPORT_SCHEMA, strict=True)
    )


def report_rows(columns: Iterable[Iterable[Any]]) -> Iterator[Mapping[str, Any]]:
    """Return the rows of `report_columns`, for `WriteReport.of`."""
    names = _REPORT_SCHEMA.names
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _array(column: Sequence[Any], field: pa.Field) -> pa.Array:
    if field.type == _TEXT:
        return binary_array(column, field.name).view(_TEXT)  # a cast costs a small task more than its other columns
    if field.type == _COUNT:
        return pa.Array.from_buffers(_COUNT, len(column), [None, pa.py_buffer(array("q", column))])
    return int_array(column, field.type, field.name)
