"""The producer for applications: it gives records of application threads to the accumulator, and owns the Sender
thread.

`KafkaProducer` holds a `BlockAppender`, which appends columns, and `TransactionCalls`, which waits for the operations
of transactions.

Reference: org.apache.kafka.clients.producer.KafkaProducer.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final

from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.client.factory import bootstrap, network_client
from spark_kafka_sink.client.seams import KafkaClient
from spark_kafka_sink.common.clock import Clock, SystemClock
from spark_kafka_sink.common.cluster import Cluster, Node, PartitionInfo, TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerClosedError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction
from spark_kafka_sink.producer.buffer_pool import BufferPool
from spark_kafka_sink.producer.futures import FutureRecordMetadata, Headers, RecordCallback, RecordThunk, RunCallback
from spark_kafka_sink.producer.idempotence import ProducerIdentity
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.partitioner import Partitioners
from spark_kafka_sink.producer.producer_batch import BatchSizes, ProducerBatch
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata, TopicWaiter
from spark_kafka_sink.producer.record_accumulator import NoDrainRules, RecordAccumulator
from spark_kafka_sink.producer.record_fields import (
    SizeLimit,
    TimestampWatch,
    checked_headers,
    checked_place,
    to_bytes,
)
from spark_kafka_sink.producer.sender import Sender
from spark_kafka_sink.producer.telemetry import telemetry_of
from spark_kafka_sink.producer.transaction_calls import TransactionCalls
from spark_kafka_sink.producer.transaction_requests import GroupMetadata, Offsets
from spark_kafka_sink.producer.transactions import Idempotence, PreparedTransaction, TransactionManager
from spark_kafka_sink.producer.writes import WriteReport, table_and_formats, write_table
from spark_kafka_sink.record.arrow import MAX_COLUMN_BYTES
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.block import Block, RowSizes
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import columns_size_upper_bound, record_size_upper_bound, record_size_upper_bounds
from spark_kafka_sink.record.partitioning import highest_partition, place
from spark_kafka_sink.record.tables import BY_NAME, ColumnName, ColumnNames

log = logging.getLogger(__name__)

MAX_BLOCK_ROWS: Final = 65_536
BLOCKS_IN_MEMORY: Final = 6
"""A block takes at most this share of buffer.memory, so that one is encoded while others are in flight."""

_numbers = itertools.count(1)
"""The number in generated client.ids, for each process."""


class BlockAppender:
    """Appends columns block by block, for application threads.

    `join` is called with the partitions of rows that are about to be appended.
    """

    def __init__(
        self,
        *,
        config: ProducerConfig,
        clock: Clock,
        size_limit: SizeLimit,
        topics: TopicWaiter,
        partitioners: Partitioners,
        accumulator: RecordAccumulator,
        join: Callable[[str, Iterable[int], object], None],
        wakeup: Callable[[], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._size_limit = size_limit
        self._topics = topics
        self._partitioners = partitioners
        self._accumulator = accumulator
        self._join = join
        self._wakeup = wakeup
        self._most_block_bytes = min(config.buffer_memory // BLOCKS_IN_MEMORY, MAX_COLUMN_BYTES)

    def append(self, topic: str, columns: RecordColumns, on_completion: RunCallback | None, send: object) -> None:
        """Append every row of `columns` for the call `send`."""
        named = highest_partition(columns)
        # No deadline for the whole call: it would fail large calls while brokers keep taking rows.
        for offset in range(0, columns.num_rows, MAX_BLOCK_ROWS):
            part = columns.slice(offset, min(MAX_BLOCK_ROWS, columns.num_rows - offset))
            cluster, left_ms = self._topics.wait_for(topic, named)
            count = cluster.partition_count_for_topic(topic) or 1
            placed = place(part, count, self._config.partitioner_ignore_keys, f"topic {topic}", offset)
            if placed.partitions is not None and placed.free is not None:
                self._assign(topic, part, placed.partitions, placed.free, cluster)
            self._append_block(topic, part, placed.partitions, cluster, on_completion, left_ms, send)

    def _assign(self, topic: str, columns: RecordColumns, partitions: Any, free: Any, cluster: Cluster) -> None:
        """Give the `free` rows partitions, among rows that have one: all rows of a partition keep their order."""
        sizes = RowSizes(record_size_upper_bounds(columns)[free])
        count = cluster.partition_count_for_topic(topic) or 1
        for partition, first, end in self._partitioners[topic].assign(sizes, cluster, count):
            partitions[free[first:end]] = partition

    def _append_block(
        self,
        topic: str,
        columns: RecordColumns,
        partitions: Any,
        cluster: Cluster,
        on_completion: RunCallback | None,
        max_block_ms: int,
        send: object,
    ) -> None:
        """Append rows as one block, or as two halves if one block would take too much memory.

        `partitions`: an int32 array, one per row, or None for rows that may go to any partition.
        """
        rows = columns.num_rows
        if rows > 1 and columns_size_upper_bound(columns) > self._most_block_bytes:
            half = rows // 2
            for first, last in ((0, half), (half, rows)):
                own = None if partitions is None else partitions[first:last]
                part = columns.slice(first, last - first)
                self._append_block(topic, part, own, cluster, on_completion, max_block_ms, send)
            return
        room = self._size_limit.max_bytes - HEADER_SIZE
        block = Block(columns, 0 if partitions is None else partitions, self._clock.wall_ms(), room)
        self._size_limit.check(topic, block.largest_record)
        groups: Iterable[tuple[int, int, int]] = block.groups
        chosen = block.partitions
        if partitions is None:
            groups = self._partitioners[topic].assign(block, cluster, cluster.partition_count_for_topic(topic) or 1)
            chosen = [partition for partition, _, _ in groups]
        self._join(topic, chosen, send)
        self._accumulator.append_block(topic, block, groups, on_completion, max_block_ms, self._clock.now_ms())
        self._wakeup()


class KafkaProducer:
    """A producer. Any thread of the process that made it may send records.

    `config`: settings of Kafka's producer (docs/options.md, without `kafka.`), or a ProducerConfig. The other arguments
    are only for tests. With a given client no thread starts: the test runs the turns of `sender`. `metadata` and
    `api_versions` are the client's. Raises ConfigError for settings that are unknown, malformed or contradictory.
    """

    def __init__(
        self,
        config: ProducerConfig | Mapping[str, Any],
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        client: KafkaClient | None = None,
        metadata: ProducerMetadata | None = None,
        api_versions: ApiVersions | None = None,
    ) -> None:
        config = _named(config if isinstance(config, ProducerConfig) else ProducerConfig.from_mapping(config))
        self.config = config
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._process_id, self._is_closed = os.getpid(), False
        self._size_limit = SizeLimit(self.config)
        self._metadata = metadata or ProducerMetadata.of(self.config, self._clock, self._rng)
        if metadata is None:
            bootstrap(self._metadata, self.config)
        self._codec = codec_for(self.config.compression_type, self.config.compression_level)
        api_versions = api_versions or ApiVersions()
        backoff = partial(ExponentialBackoff.doubling, config.retry_backoff_ms, config.retry_backoff_max_ms, self._rng)
        self._transactions, self._identity = _idempotence(config, api_versions, backoff, self._metadata)
        idempotence = self._transactions or self._identity
        self._pool = BufferPool(self.config.buffer_memory, self._clock, lambda: self.sender.wakeup_for_memory())
        client_or_own = client or network_client(self.config, self._metadata, self._clock, self._rng, api_versions)
        self._metrics = ProducerMetrics(self._pool, self._metadata, client_or_own)
        self.batches_and_retries, self.waits_ms = self._metrics.batches_and_retries, self._metrics.waits_ms
        self._accumulator = RecordAccumulator(
            sizes=BatchSizes(self.config.batch_size),
            linger_ms=self.config.linger_ms,
            delivery_timeout_ms=self.config.delivery_timeout_ms,
            retry_backoff=backoff(),
            pool=self._pool,
            drain_rules=idempotence or NoDrainRules(),
        )
        is_adaptive, ignores_keys = config.partitioner_adaptive_partitioning_enable, config.partitioner_ignore_keys
        sizes, room_of = self._accumulator.sizes, self._accumulator.room
        self._partitioners = Partitioners(sizes, is_adaptive, self._rng, room_of, ignores_keys)
        self._timestamps = TimestampWatch(self._clock.wall_ms)
        self._telemetry = telemetry_of(config, self._metrics, self._transactions, api_versions, self._clock, self._rng)
        self.sender = _sender_of(self, client_or_own, idempotence)
        wake, waited = self.sender.wakeup_for_metadata, partial(self._metrics.call_returned, "metadata-wait")
        self._topics = TopicWaiter(self.config, self._metadata, self._clock, wake, waited)
        self._thread: threading.Thread | None = None
        self._transaction_calls = TransactionCalls(
            manager=self._transactions,
            config=self.config,
            clock=self._clock,
            metadata=self._metadata,
            metrics=self._metrics,
            sender=self.sender,
            is_sender_thread=self._is_sender_thread,
        )
        self._blocks = _block_appender_of(self)
        if client is None:
            name = f"kafka-producer-network-thread-{self.client_id}"
            self._thread = threading.Thread(target=self.sender.run, name=name, daemon=True)
            self._thread.start()
            log.info("Producer %s (client.id) has started", self.client_id)

    def __repr__(self) -> str:
        if os.getpid() != self._process_id:  # a fork: its locks may have been taken then
            return f"KafkaProducer(of process {self._process_id})"
        state = "closed" if self._is_closed else "failed" if self.has_failed else "open"
        return f"KafkaProducer({state}, {self.client_id}, {self._accumulator!r}, {self._pool!r})"

    def __enter__(self) -> KafkaProducer:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. After an error do not wait for records in flight."""
        is_error = _is_error(error)
        if is_error and self._accumulator.has_incomplete:
            log.warning("%s ended the with block: records without an acknowledgement are dropped", type(error).__name__)
        self.close(0 if is_error else None)

    @property
    def client_id(self) -> str:
        """The client.id in the requests of this producer: configured or generated."""
        return self.config.client_id

    @property
    def has_failed(self) -> bool:
        """Whether it had a fatal error, a refusal or a failed turn, or its thread is gone: make another producer."""
        idempotence = self._transactions or self._identity
        is_fatal = self.sender.has_failed_turn or (idempotence is not None and idempotence.has_fatal_error)
        is_fatal |= self._metadata.was_refused  # the credentials may have been renewed since they were read
        return is_fatal or (self._thread is not None and not self._thread.is_alive() and not self._is_closed)

    # ---- sending ---------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers | None = None,
        on_completion: RecordCallback | None = None,
    ) -> FutureRecordMetadata:
        """Send one record. Return at once, unless metadata or memory must be waited for (max.block.ms).

        Errors of Kafka or the network fail the future and go to `on_completion(metadata, error)`. Its metadata always
        has topic and partition; its error is None on success. It runs on the Sender thread, in order in a partition,
        and a send in it does not wait. For a record that got into no batch it runs on this thread, and for one beside
        rows of a `send_columns` that failed, on that call's. Raises SerializationError and IllegalStateError (closed).

        - `value`, `key`: text is encoded as UTF-8. None is null; a null value is a tombstone.
        - `partition`: None lets the key decide, or the partitioner. `timestamp_ms`: ms since 1970. None: now.
        - `headers`: pairs (name, value), also as named tuples or mappings with key and value. Values: bytes, text, None
        """
        self._ensure_usable()
        partition, timestamp_ms = checked_place(partition, timestamp_ms)
        self._timestamps.of_record(topic, timestamp_ms)
        key_bytes, value_bytes = to_bytes(key, "key"), to_bytes(value, "value")
        headers = checked_headers(headers)
        stamp = self._clock.wall_ms() if timestamp_ms is None else timestamp_ms
        sizes = -1 if key_bytes is None else len(key_bytes), -1 if value_bytes is None else len(value_bytes)
        future = FutureRecordMetadata(stamp, *sizes, self._thread)
        place = TopicPartition(topic, -1 if partition is None else partition)
        try:
            cluster, left_ms = self._topics.wait_for(topic, partition)
            size = record_size_upper_bound(key_bytes, value_bytes, headers)
            self._size_limit.check(topic, size)
            chosen = self._partitioners.choose(topic, cluster, key_bytes, size) if partition is None else partition
            place, thunk = TopicPartition(topic, chosen), RecordThunk(future, on_completion)
            self._transaction_calls.join(topic, [chosen], future)
            is_to_be_seen = self._accumulator.append_row(
                place, key_bytes, value_bytes, headers, stamp, size, thunk, left_ms, self._clock.now_ms()
            )
            if is_to_be_seen:
                self.sender.wakeup()
        except IllegalStateError as misuse:
            self._transaction_calls.lose(misuse, future)
            raise
        except KafkaError as error:
            self._transaction_calls.lose(error, future)
            self._metrics.records_failed(None, 1, self._clock.now_ms())
            failed = FutureRecordMetadata.failed(place, error)
            RecordThunk(failed, on_completion).fire(Exception)
            return failed
        except BaseException as cause:
            self._transaction_calls.lose(cause, future)
            self.sender.wakeup()  # Ctrl-C may have come after the append and before the wakeup
            raise
        finally:
            self._transaction_calls.leave(future)
        return future

    def send_columns(self, topic: str, columns: RecordColumns, on_completion: RunCallback | None = None) -> None:
        """Send every row of `columns`. Return when all are in the accumulator.

        max.block.ms is for each block (65,536 rows, or a sixth of buffer.memory), as for each record of `send`: a call
        goes on while its blocks do. `on_completion(run, error)` runs once for the rows in one batch, together with
        those of calls with the same callback right before, on the thread that `send` describes. Raises
        KafkaTimeoutError (metadata, memory), RecordTooLargeError, and refusals of the topic for rows that cannot be
        sent. Rows that were taken before have their call of `on_completion` too. Raises SerializationError, and sends
        nothing, for timestamps that no record can have.
        """
        self._send_columns(topic, columns, on_completion, object())

    def _send_columns(
        self, topic: str, columns: RecordColumns, on_completion: RunCallback | None, send: object, is_part: bool = False
    ) -> None:
        """Do the same for the call `send`, or for a part of the table that it stands for."""
        self._ensure_usable()
        if is_part:
            self._transaction_calls.join_part(send)
        try:
            self._timestamps.of_columns(topic, columns)
            self._blocks.append(topic, columns, on_completion, send)
        except BaseException as cause:
            self._transaction_calls.lose(cause, send)
            self.sender.wakeup()  # rows were appended, and others may have waited behind the failed ones
            raise
        finally:
            self._transaction_calls.leave(send)

    def write(
        self,
        data: object,
        topic: str | None = None,
        *,
        value: ColumnNames = BY_NAME,
        key: ColumnNames = BY_NAME,
        headers: ColumnName = BY_NAME,
        partition: ColumnName = BY_NAME,
        timestamp: ColumnName = BY_NAME,
        topic_column: ColumnName = BY_NAME,
        serialization: Mapping[str, object] | None = None,
    ) -> WriteReport:
        """Write every row of a table, and wait until all are acknowledged. All belong to the transaction that is open
        now: its commit waits for the call. After its abort the call raises TransactionAbortedError.

        `data`: a table of pyarrow, Polars, DuckDB, pandas or others (`record.tables.Table`), read as fast as brokers
        take it. `topic`: of every row; None takes it from a column. Others name columns, None for none. The default is
        the column of that name (`topic_column`: topic), if there is one. `serialization`: options such as
        {"value.format": "avro"} (docs/serialization.md). Then value=["id", "name"] makes one struct of columns.

        Raises SchemaError for a column that is missing or of a wrong type, before it sends anything. Otherwise raises
        as `send_columns`, or the first error of a row, once sent rows have their outcomes: `error.report` has them.
        """
        self._ensure_usable()
        if self._is_sender_thread():
            raise IllegalStateError("A callback cannot write a table: it would wait for its own thread.")
        names = {"value": value, "key": key, "headers": headers, "partition": partition, "timestamp": timestamp}
        table, formats = table_and_formats(data, topic, {**names, "topic": topic_column}, serialization)
        write = partial(write_table, self, table, self._clock, formats)
        return self._transaction_calls.with_whole_table(write, partial(self._send_columns, is_part=True))

    # ---- transactions ----------------------------------------------------------------------------------------------

    def init_transactions(
        self, transactional_id: str | None = None, coordinators: Mapping[tuple[int, str], Node] | None = None
    ) -> None:
        """Get a producer id and epoch for transactional.id. This fences older producers of the id, and aborts their
        open transactions.

        Call it again after `prepare_transaction`, if another producer ends the prepared transaction. Then, and before
        the first transaction, `transactional_id` may give the producer another id, over its connections. `coordinators`
        that another client has found, by kind (as in FindCoordinator) and name, need not be looked up.

        Raises KafkaTimeoutError after max.block.ms. Raises AuthorizationError without the right to the id: call it
        again after it was granted. Raises TransactionAbortableError if `abort_transaction` must come first, which asks
        for a producer id again.
        """
        self._usable_calls().manager.use_coordinators(coordinators or {})
        self._transaction_calls.run("txn-init", lambda manager: manager.begin_initialize(transactional_id))

    def begin_transaction(self) -> None:
        """Begin a transaction. Records that are sent from now on belong to it."""
        self._usable_calls().begin()

    def send_offsets_to_transaction(self, offsets: Offsets, group: GroupMetadata | str) -> None:
        """Commit consumed offsets of a group, topic-partition → (next offset, text), in the transaction (KIP-447).

        Raises SerializationError for offsets or a group that no request can contain; then nothing has begun. Raises
        CommitFailedError if the group has rebalanced: its generation or member is out of date.
        """
        self._usable_calls().send_offsets(offsets, group)

    @property
    def current_transaction(self) -> OpenTransaction:
        """Return the open transaction. Does not wait for its records."""
        return self._usable_calls().manager.current().transaction

    def prepare_transaction(self) -> PreparedTransaction:
        """Wait until every record is acknowledged. Leave the transaction open, for any process to end by the result.
        Raises KafkaTimeoutError if other threads still send in it after max.block.ms: then only an abort is left.
        """
        return self._usable_calls().prepare(self.flush)

    def resume_transaction(self, prepared: PreparedTransaction) -> None:
        """Take over a transaction that another producer prepared, to commit or abort it.

        This producer must not have its own transaction. Afterwards it can resume the next one, or begin its own after
        `init_transactions`.
        """
        self._usable_calls().manager.resume(prepared)

    def commit_transaction(self) -> None:
        """Commit the transaction with all its records.

        Waits for calls of other threads that send in it. Raises KafkaTimeoutError after max.block.ms: call it again.
        Raises ProducerFencedError. Raises the error of a record that failed, with the next call at the latest, or
        TransactionAbortableError if that error is retriable, as a timeout is: then only `abort_transaction` is left.
        """
        self._usable_calls().run("txn-commit", lambda manager: manager.begin_commit())

    def abort_transaction(self) -> None:
        """Abort the transaction. Records that were not sent fail: with the error of the transaction if it has one, else
        with TransactionAbortedError.
        """
        self._usable_calls().run("txn-abort", lambda manager: manager.begin_abort())

    def _usable_calls(self) -> TransactionCalls:
        self._ensure_usable()
        return self._transaction_calls

    # ---- metadata --------------------------------------------------------------------------------------------------

    def look_up(self, topics: Iterable[str]) -> None:
        """Ask for the unknown ones of `topics` with the next send. Does not wait."""
        self._ensure_usable()
        self._topics.look_up(topics)

    def partitions_for(self, topic: str) -> tuple[PartitionInfo, ...]:
        """Return the partitions of the topic. Wait for them up to max.block.ms. Raises as `send` for the topic."""
        self._ensure_usable()
        try:
            cluster, _ = self._topics.wait_for(topic)
        except KafkaError as error:
            self.sender.explained(error)
            raise
        return cluster.partitions_for_topic(topic)

    def metrics(self) -> Mapping[str, float]:
        """Return metrics by the names of Kafka's group producer-metrics.

        Totals since the start, rates per second, averages and maxima over the last 60 to 90 seconds, NaN without
        events. At any time, from any thread. `producer/metrics.py` lists differences from the Java client.
        """
        return self._ensure_same_process()._metrics.snapshot(self._clock.now_ms())

    def topic_metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return metrics by topic (Kafka: producer-topic-metrics), which is forgotten an hour after its last batch."""
        return self._ensure_same_process()._metrics.by_topic(self._clock.now_ms())

    def node_metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return metrics by the tag node-id, "node-1" (Kafka: producer-node-metrics); below 0: of bootstrap.servers."""
        return self._ensure_same_process()._metrics.by_node(self._clock.now_ms())

    def connection_metrics(self) -> Mapping[tuple[str, str], Mapping[str, float]]:
        """Return the state of each connection, by node-id and `host:port`. The Java client has no such group."""
        return self._ensure_same_process()._metrics.by_connection(self._clock.now_ms())

    def client_instance_id(self, timeout: float) -> uuid.UUID | None:
        """Return the id that brokers gave this producer for its telemetry (KIP-714). They show it as base64.

        Waits up to `timeout` seconds. None: no broker that collects metrics has answered so far. Raises
        IllegalStateError with enable.metrics.push=false, for a `timeout` below 0, and in a callback.
        """
        self._ensure_same_process()
        if timeout < 0:
            raise IllegalStateError(f"client_instance_id(timeout={timeout!r}): give seconds, or 0 to wait for nothing.")
        if self._telemetry is None:
            raise IllegalStateError("This producer has no client instance id: set enable.metrics.push=true.")
        if self._is_sender_thread():
            raise IllegalStateError("A callback cannot wait for the client instance id: its own thread asks for it.")
        return self._telemetry.client_instance_id(int(timeout * 1000))

    # ---- flush and close -------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every record sent before this call is acknowledged or failed, with its callback. Nothing lingers.

        Raises KafkaTimeoutError after `timeout` seconds (None: delivery.timeout.ms limits each record). Raises
        IllegalStateError in a callback, because the thread of callbacks is the one that sends.
        """
        self._ensure_same_process()
        if self._is_sender_thread():
            raise IllegalStateError("A callback cannot flush: it would wait for its own thread.")
        started_ms = self._clock.now_ms()
        deadline_ms = None if timeout is None else started_ms + timeout * 1000
        limit_s = (self.config.delivery_timeout_ms + self.config.request_timeout_ms) / 1000
        wait = partial(_wait_for, clock=self._clock, deadline_ms=deadline_ms, limit_s=limit_s, is_stuck=self._is_stuck)
        if not self._accumulator.flush(self.sender.wakeup, wait):
            waited_ms = self._clock.now_ms() - started_ms
            late = KafkaTimeoutError(f"Records were still on their way after a flush of {waited_ms} ms.")
            raise self.sender.explained(late)
        self._metrics.call_returned("flush", self._clock.now_ms() - started_ms)

    def close(self, timeout: float | None = None) -> None:
        """Send all records, wait up to `timeout` seconds (None: without limit), then fail the rest and end.

        Raises IllegalStateError for a `timeout` below 0, and then closes nothing. May be called again, and does nothing
        in a forked child. Do not call it, `send` or `flush` in a signal handler or `__del__`: the thread may hold a
        lock. In a handler set a flag or raise, and close elsewhere.
        """
        if os.getpid() != self._process_id:
            return
        if timeout is not None and timeout < 0:
            raise IllegalStateError(f"close(timeout={timeout!r}): give seconds, 0 to wait for nothing, or None.")
        self._is_closed = True
        self.sender.initiate_close()
        if self._is_sender_thread():
            self.sender.force_close()
        elif self._thread is not None:
            _end(self.sender, self._thread, timeout, self._accumulator)

    def _is_stuck(self) -> bool:
        """Return whether no thread enforces delivery.timeout.ms."""
        return self.sender.has_failed_turn or (self._thread is not None and not self._thread.is_alive())

    def _is_sender_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _ensure_usable(self) -> None:
        self._ensure_same_process()
        if self._is_closed:
            raise ProducerClosedError("The producer was closed: make another.")

    def _ensure_same_process(self) -> KafkaProducer:
        if os.getpid() != self._process_id:
            raise IllegalStateError(
                f"This producer belongs to process {self._process_id}; after a fork each process makes its own."
            )
        return self


def _is_error(end: BaseException | None) -> bool:
    """Return whether a `with` block failed. `sys.exit(0)` is no failure, nor is the end of a generator around it."""
    if isinstance(end, SystemExit):
        return bool(end.code)
    return end is not None and not isinstance(end, GeneratorExit)


def _sender_of(producer: KafkaProducer, client: KafkaClient, idempotence: Idempotence | None) -> Sender:
    return Sender(
        config=producer.config,
        codec=producer._codec,
        client=client,
        metadata=producer._metadata,
        accumulator=producer._accumulator,
        idempotence=idempotence,
        metrics=producer._metrics,
        partitioners=producer._partitioners,
        clock=producer._clock,
        telemetry=producer._telemetry,
    )


def _block_appender_of(producer: KafkaProducer) -> BlockAppender:
    return BlockAppender(
        config=producer.config,
        clock=producer._clock,
        size_limit=producer._size_limit,
        topics=producer._topics,
        partitioners=producer._partitioners,
        accumulator=producer._accumulator,
        join=producer._transaction_calls.join,
        wakeup=producer.sender.wakeup,
    )


def _wait_for(
    batch: ProducerBatch, *, clock: Clock, deadline_ms: float | None, limit_s: float, is_stuck: Callable[[], bool]
) -> bool:
    """Return whether the batch has its outcome by the deadline. Without one, ask after each `limit_s` whether the
    producer is stuck.
    """
    if deadline_ms is not None:
        return batch.result.wait(max(0, deadline_ms - clock.now_ms()) / 1000)
    while not batch.result.wait(limit_s):
        if is_stuck() or sys.is_finalizing():
            return False
    return True


def _end(sender: Sender, thread: threading.Thread, timeout: float | None, accumulator: RecordAccumulator) -> None:
    """Wait up to `timeout` seconds for the end of the thread, whose close has begun, then end it."""
    if timeout != 0:
        sender.wait_for_end(timeout)
    if not sender.has_ended:
        sender.force_close()
        if sys.is_finalizing():  # Python has stopped the thread for ever
            _warn_of_dropped(accumulator)
        elif not sender.wait_for_end(1.0):  # the DNS or a callback may delay it
            log.warning("%s is delayed, by the DNS or by a callback, and ends later by itself", thread.name)
    if sender.has_ended:
        thread.join()


def _warn_of_dropped(accumulator: RecordAccumulator) -> None:
    if accumulator.has_incomplete:
        log.warning("The program ends, and records without an acknowledgement are dropped: close the producer before")


def _idempotence(
    config: ProducerConfig,
    api_versions: ApiVersions,
    backoff: Callable[[], ExponentialBackoff],
    metadata: ProducerMetadata,
) -> tuple[TransactionManager | None, ProducerIdentity | None]:
    """Return the manager of transactions and the identity of a producer that has them."""
    name = config.transactional_id
    if name is None:
        return None, ProducerIdentity(backoff()) if config.enable_idempotence else None

    def brokers() -> Sequence[Node]:
        cluster = metadata.fetch()
        return () if cluster.is_bootstrap_configured else cluster.nodes

    feature = api_versions.finalized_feature
    manager = TransactionManager(name, config.transaction_timeout_ms, backoff(), feature, brokers)
    return manager, manager.identity


def _named(config: ProducerConfig) -> ProducerConfig:
    """Return `config` with a client.id, generated if it is not set (ProducerConfig.maybeOverrideClientId)."""
    if config.client_id:
        return config
    name = next(_numbers) if config.transactional_id is None else config.transactional_id
    return replace(config, client_id=f"producer-{name}")
