"""The producer's public face: takes records from application threads, hands them to the accumulator, and owns the
Sender's thread.

Reference: org.apache.kafka.clients.producer.KafkaProducer.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.client.factory import bootstrap, network_client
from spark_kafka_sink.client.seams import KafkaClient
from spark_kafka_sink.common.clock import Clock, SystemClock
from spark_kafka_sink.common.cluster import Cluster, PartitionInfo, TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    ProducerClosedError,
    RecordTooLargeError,
)
from spark_kafka_sink.producer.batch_sizes import BatchSizes
from spark_kafka_sink.producer.buffer_pool import BufferPool
from spark_kafka_sink.producer.drain_rules import NoDrainRules
from spark_kafka_sink.producer.futures import FutureRecordMetadata, Headers, RecordCallback, RecordThunk, RunCallback
from spark_kafka_sink.producer.idempotence import ProducerIdentity
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.partitioner import Partitioners
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata
from spark_kafka_sink.producer.record_accumulator import RecordAccumulator
from spark_kafka_sink.producer.record_fields import TimestampWatch, checked_headers, checked_place, to_bytes
from spark_kafka_sink.producer.sender import Sender
from spark_kafka_sink.producer.topic_metadata import TopicMetadata
from spark_kafka_sink.producer.transaction_methods import TransactionMethods
from spark_kafka_sink.producer.transactions import TransactionManager
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import columns_size_upper_bound, record_size_upper_bound
from spark_kafka_sink.record.murmur2 import partition_for_key
from spark_kafka_sink.record.placement import highest_partition, place

log = logging.getLogger(__name__)

MAX_BLOCK_ROWS: Final = 65_536
BLOCKS_IN_MEMORY: Final = 6
"""A block takes at most this share of buffer.memory, so that one is encoded while others are on the wire."""

_numbers = itertools.count(1)
"""For generated client.ids; each process counts for itself."""


class KafkaProducer(TransactionMethods):
    """Sends records, from any thread of the process that made it.

    `config`: a ProducerConfig, or Kafka's producer settings. `clock`, `rng`, and `client` (with `metadata`) are the
    seams for tests; with a client given no thread is started: the test runs the `sender`'s turns. Raises ConfigError
    for settings that are unknown, malformed or contradictory.
    """

    def __init__(
        self,
        config: ProducerConfig | Mapping[str, Any],
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        client: KafkaClient | None = None,
        metadata: ProducerMetadata | None = None,
    ) -> None:
        self.config = _named(config if isinstance(config, ProducerConfig) else ProducerConfig.from_mapping(config))
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._process_id = os.getpid()
        self._largest_batch = min(
            (self.config.max_request_size, "max.request.size"), (self.config.buffer_memory, "buffer.memory")
        )
        """Bytes of the largest record with a batch's header, and the setting that says so."""
        self._metadata = metadata or self.make_metadata(self.config, self._clock, self._rng)
        self._codec = codec_for(self.config.compression_type, self.config.compression_level)
        api_versions = ApiVersions()
        self._transactions = self._make_transactions(api_versions)
        self._identity = self._make_identity()
        idempotence = self._transactions or self._identity
        self._leave_transaction = self._transactions.sends.leave if self._transactions else set[object]().discard
        self._pool = BufferPool(self.config.buffer_memory, self._clock, lambda: self.sender.wakeup_for_memory())
        client_or_own = client or network_client(self.config, self._metadata, self._clock, self._rng, api_versions)
        self._metrics = ProducerMetrics(self._pool, self._metadata, client_or_own)
        self._accumulator = RecordAccumulator(
            sizes=BatchSizes(self.config.batch_size),
            linger_ms=self.config.linger_ms,
            delivery_timeout_ms=self.config.delivery_timeout_ms,
            retry_backoff=self._retry_backoff(),
            pool=self._pool,
            drain_rules=idempotence or NoDrainRules(),
        )
        is_adaptive = self.config.partitioner_adaptive_partitioning_enable
        self._partitioners = Partitioners(self._accumulator.sizes, is_adaptive, self._rng, self._accumulator.room)
        self._timestamps = TimestampWatch()
        self._is_closed = False
        self.sender = Sender(
            config=self.config,
            codec=self._codec,
            client=client_or_own,
            metadata=self._metadata,
            accumulator=self._accumulator,
            transaction_manager=idempotence,
            metrics=self._metrics,
            on_loads=self._partitioners.update_loads,
            clock=self._clock,
        )
        on_wait = self.sender.wakeup_for_metadata
        self._topics = TopicMetadata(self.config, self._metadata, self._clock, self._metrics, on_wait)
        self._thread: threading.Thread | None = None
        if client is None:
            name = f"kafka-producer-network-thread-{self.client_id}"
            self._thread = threading.Thread(target=self.sender.run, name=name, daemon=True)
            self._thread.start()
            log.info("Producer %s (client.id) has started", self.client_id)

    @staticmethod
    def make_metadata(config: ProducerConfig, clock: Clock, rng: random.Random) -> ProducerMetadata:
        """The cluster view of a producer with this configuration, at its bootstrap addresses."""
        metadata = ProducerMetadata(
            refresh_backoff_ms=config.retry_backoff_ms,
            refresh_backoff_max_ms=config.retry_backoff_max_ms,
            metadata_expire_ms=config.metadata_max_age_ms,
            metadata_idle_ms=config.metadata_max_idle_ms,
            clock=clock,
            rng=rng,
        )
        bootstrap(metadata, config)
        return metadata

    def _make_transactions(self, api_versions: ApiVersions) -> TransactionManager | None:
        name, timeout_ms = self.config.transactional_id, self.config.transaction_timeout_ms
        if name is None:
            return None
        return TransactionManager(name, timeout_ms, self._retry_backoff(), api_versions.finalized_feature)

    def _make_identity(self) -> ProducerIdentity | None:
        if self._transactions is not None:
            return self._transactions.identity
        return ProducerIdentity(self._retry_backoff()) if self.config.enable_idempotence else None

    def _retry_backoff(self) -> ExponentialBackoff:
        return ExponentialBackoff.doubling(self.config.retry_backoff_ms, self.config.retry_backoff_max_ms, self._rng)

    def __repr__(self) -> str:
        if os.getpid() != self._process_id:  # whose locks may have been taken at the fork
            return f"KafkaProducer(of process {self._process_id})"
        state = "closed" if self._is_closed else "failed" if self.has_failed else "open"
        return f"KafkaProducer({state}, {self.client_id}, {self._accumulator!r}, {self._pool!r})"

    def __enter__(self) -> KafkaProducer:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error without waiting for what is on its way."""
        self.close(None if error is None else 0)

    @property
    def client_id(self) -> str:
        """The client.id in this producer's requests: the one that was set, or a generated one."""
        return self.config.client_id

    @property
    def has_failed(self) -> bool:
        """It met a fatal error or a refusal, a turn of its thread failed, or that is gone: close it, make another."""
        idempotence = self._transactions or self._identity
        is_fatal = self.sender.has_failed_turn or (idempotence is not None and idempotence.has_fatal_error)
        is_fatal |= self._metadata.was_refused  # what the node was shown may have been renewed since it was read
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
        """Send one record; returns at once unless metadata or memory has to be waited for (max.block.ms).

        What Kafka or the network refuses fails the future and reaches `on_completion(metadata, error)`, whose metadata
        tells topic and partition in any case, and whose error is None on success: on the Sender's thread, in order
        within a partition, where a send in it waits for nothing; for a record that came into no batch (too large, no
        metadata or memory in time) on this thread; for one that shared a batch with rows of a `send_columns` that
        failed in the midst on that one's. Raises ProducerClosedError, SerializationError, or IllegalStateError (after
        a fork, outside a transaction): misuse.

        `timestamp_ms` may be any time from 1970 to 9999; one that is likely in seconds is logged, once. `headers`: see
        `record.headers.header_pairs` for the forms.
        """
        self._ensure_usable()
        partition, timestamp_ms = checked_place(partition, timestamp_ms)
        self._timestamps.of_record(topic, timestamp_ms)
        key_bytes, value_bytes = to_bytes(key, "key"), to_bytes(value, "value")
        headers = checked_headers(headers)
        stamp = self._clock.wall_ms() if timestamp_ms is None else timestamp_ms
        future = FutureRecordMetadata(
            stamp, -1 if key_bytes is None else len(key_bytes), -1 if value_bytes is None else len(value_bytes)
        )
        place = TopicPartition(topic, -1 if partition is None else partition)
        try:
            cluster, left_ms = self._topics.wait_for(topic, partition)
            size = record_size_upper_bound(key_bytes, value_bytes, headers)
            self._ensure_valid_size(topic, size)
            chosen = self._choose_partition(topic, cluster, key_bytes, partition, size)
            place, thunk = TopicPartition(topic, chosen), RecordThunk(future, on_completion)
            self._join_transaction(topic, [chosen], future)
            is_to_be_seen = self._accumulator.append_row(
                place, key_bytes, value_bytes, headers, stamp, size, thunk, left_ms, self._clock.now_ms()
            )
            if is_to_be_seen:
                self.sender.wakeup()
        except IllegalStateError as misuse:
            self._lose_transaction(misuse, future)
            raise
        except KafkaError as error:
            self._lose_transaction(error, future)
            self._metrics.records_failed(None, 1, self._clock.now_ms())
            failed = FutureRecordMetadata.failed(place, error)
            RecordThunk(failed, on_completion).fire(Exception)
            return failed
        except BaseException as cause:
            self._lose_transaction(cause, future)
            self.sender.wakeup()  # Ctrl-C may have come when the record was in and the Sender not woken for it
            raise
        finally:
            self._leave_transaction(future)
        return future

    def send_columns(self, topic: str, columns: RecordColumns, on_completion: RunCallback | None = None) -> None:
        """Send every row of `columns`; returns when all are in the accumulator. max.block.ms is for each block (65,536
        rows, or a sixth of buffer.memory), as it is for each record of `send`: a call goes on while its blocks do.

        `on_completion(run, error)` runs once for the rows in one batch, with those of calls with the same one right
        before, on a thread as `send` tells. Raises, for rows that cannot be sent, KafkaTimeoutError (metadata, memory),
        RecordTooLargeError, what the topic was refused with; of rows taken before `on_completion` tells all the same.
        """
        self._ensure_usable()
        send = object()
        try:
            self._send_columns(topic, columns, on_completion, send)
        except BaseException as cause:
            self._lose_transaction(cause, send)
            self.sender.wakeup()  # rows may be in, and others may have waited behind those that failed
            raise
        finally:
            self._leave_transaction(send)

    def _send_columns(
        self, topic: str, columns: RecordColumns, on_completion: RunCallback | None, send: object
    ) -> None:
        self._timestamps.of_columns(topic, columns)
        named = highest_partition(columns)
        # No deadline for the call: it would fail many rows half-way while brokers take them as fast as they can.
        for offset in range(0, columns.num_rows, MAX_BLOCK_ROWS):
            part = columns.slice(offset, min(MAX_BLOCK_ROWS, columns.num_rows - offset))
            cluster, left_ms = self._topics.wait_for(topic, named)
            count = cluster.partition_count_for_topic(topic) or 1
            placement = place(part, count, self.config.partitioner_ignore_keys, f"topic {topic}", offset)
            if placement.placed is not None:
                self._send_block(topic, placement.placed, placement.partitions, cluster, on_completion, left_ms, send)
            if placement.free is not None:
                self._send_block(topic, placement.free, None, cluster, on_completion, left_ms, send)

    def _send_block(
        self,
        topic: str,
        columns: RecordColumns,
        partitions: Any,
        cluster: Cluster,
        on_completion: RunCallback | None,
        max_block_ms: int,
        send: object,
    ) -> None:
        """Send rows as one block, or as two halves where that would take too much memory at once. `partitions`: int32
        array, one per row, or None for rows that may go anywhere.
        """
        rows = columns.num_rows
        if rows > 1 and columns_size_upper_bound(columns) > self.config.buffer_memory // BLOCKS_IN_MEMORY:
            half = rows // 2
            for first, last in ((0, half), (half, rows)):
                own = None if partitions is None else partitions[first:last]
                part = columns.slice(first, last - first)
                self._send_block(topic, part, own, cluster, on_completion, max_block_ms, send)
            return
        limit, _ = self._largest_batch
        block = Block(columns, 0 if partitions is None else partitions, self._clock.wall_ms(), limit - HEADER_SIZE)
        self._ensure_valid_size(topic, block.largest_record)
        groups: Iterable[tuple[int, int, int]] = block.groups
        chosen = block.partitions
        if partitions is None:
            groups = self._partitioners[topic].assign(block, cluster, cluster.partition_count_for_topic(topic) or 1)
            chosen = [partition for partition, _, _ in groups]
        self._join_transaction(topic, chosen, send)
        self._accumulator.append_block(topic, block, groups, on_completion, max_block_ms, self._clock.now_ms())
        self.sender.wakeup()

    def _choose_partition(
        self, topic: str, cluster: Cluster, key: bytes | None, partition: int | None, size: int
    ) -> int:
        if partition is not None:
            return partition
        count = cluster.partition_count_for_topic(topic) or 1
        if key is not None and not self.config.partitioner_ignore_keys:
            return partition_for_key(key, count)
        return self._partitioners[topic].take(size, cluster, count)

    def _ensure_valid_size(self, topic: str, size: int) -> None:
        limit, name = self._largest_batch
        if size + HEADER_SIZE > limit:
            raise RecordTooLargeError(
                f"A record for topic {topic} takes {size + HEADER_SIZE} bytes, more than {name}={limit}: raise {name}"
                " (and max.message.bytes of the topic), or make the record smaller."
            )

    # ---- metadata --------------------------------------------------------------------------------------------------

    def look_up(self, topics: Iterable[str]) -> None:
        """Those of `topics` that are not known are asked for together with the next send's; waits for nothing."""
        self._ensure_usable()
        self._topics.look_up(topics)

    def partitions_for(self, topic: str) -> tuple[PartitionInfo, ...]:
        """The topic's partitions, waited for up to max.block.ms. Raises what keeps them from being known."""
        self._ensure_usable()
        try:
            cluster, _ = self._topics.wait_for(topic)
        except KafkaError as error:
            self.sender.explained(error)
            raise
        return cluster.partitions_for_topic(topic)

    def metrics(self) -> Mapping[str, float]:
        """Return metrics by the names of Kafka's group producer-metrics: totals since the start, rates per second,
        averages and maxima over the last 60 to 90 seconds, NaN where there was nothing. At any time, from any
        thread; what differs from the Java client's is in `producer/metrics.py`.
        """
        return self._metrics.snapshot(self._clock.now_ms())

    def topic_metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of each topic, Kafka's group producer-topic-metrics. An hour after its last batch a topic
        is forgotten. Otherwise as `metrics`.
        """
        return self._metrics.by_topic(self._clock.now_ms())

    def node_metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of each broker, Kafka's group producer-node-metrics, by its tag node-id: "node-1". An
        address of bootstrap.servers has an id below 0. Otherwise as `topic_metrics`.
        """
        return self._metrics.by_node(self._clock.now_ms())

    # ---- flush and close -------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every record sent before this call is acknowledged or has failed, its callback included; without
        lingering.

        Raises KafkaTimeoutError after `timeout` seconds (None: delivery.timeout.ms is the limit of every record), and
        IllegalStateError in a callback, whose thread is the one that would have to send.
        """
        self._ensure_same_process()
        if threading.current_thread() is self._thread:
            raise IllegalStateError("A callback cannot flush: it would wait for its own thread.")
        started_ms = self._clock.now_ms()
        deadline_ms = None if timeout is None else started_ms + timeout * 1000

        def wait(batch: ProducerBatch) -> bool:
            if deadline_ms is not None:
                return batch.result.wait(max(0, deadline_ms - self._clock.now_ms()) / 1000)
            limit_s = (self.config.delivery_timeout_ms + self.config.request_timeout_ms) / 1000
            while not batch.result.wait(limit_s):
                is_gone = self._thread is not None and not self._thread.is_alive()
                if is_gone or self.sender.has_failed_turn:  # nobody else would keep delivery.timeout.ms
                    return False
            return True

        if not self._accumulator.flush(self.sender.wakeup, wait):
            waited_ms = self._clock.now_ms() - started_ms
            late = KafkaTimeoutError(f"Records were still on their way after a flush of {waited_ms} ms.")
            raise self.sender.explained(late)
        self._metrics.call_returned("flush", self._clock.now_ms() - started_ms)

    def close(self, timeout: float | None = None) -> None:
        """Send what there is, waiting up to `timeout` seconds (None: as long as it takes), then fail the rest and end.
        Raises IllegalStateError for a `timeout` below 0, and closes nothing then.
        Harmless when repeated, and in a forked child, where it does nothing. Not for signal handlers, nor are `send`
        and `flush`: the thread they interrupt may hold a lock. Set a flag there, or raise, and close where it is seen.
        """
        if os.getpid() != self._process_id:
            return
        if timeout is not None and timeout < 0:
            raise IllegalStateError(f"close(timeout={timeout!r}): give seconds, 0 to wait for nothing, or None.")
        self._is_closed = True
        self.sender.initiate_close()
        if self._thread is None:
            return
        on_own_thread = threading.current_thread() is self._thread
        if not on_own_thread and timeout != 0:
            self.sender.wait_for_end(timeout)
        if not self.sender.has_ended:
            self.sender.force_close()
            if not on_own_thread and not self.sender.wait_for_end(1.0):  # a DNS, or a callback, may hold it up
                log.warning("%s is held up, perhaps by a DNS, and left to end by itself", self._thread.name)
        if not on_own_thread and self.sender.has_ended:
            self._thread.join()

    def _ensure_usable(self) -> None:
        self._ensure_same_process()
        if self._is_closed:
            raise ProducerClosedError("The producer was closed: make another.")

    def _ensure_same_process(self) -> None:
        if os.getpid() != self._process_id:
            raise IllegalStateError(
                f"This producer belongs to process {self._process_id}; after a fork each process makes its own."
            )


def _named(config: ProducerConfig) -> ProducerConfig:
    """`config` with a client.id, generated where none is set, as by ProducerConfig.maybeOverrideClientId of the Java
    client.
    """
    if config.client_id:
        return config
    name = next(_numbers) if config.transactional_id is None else config.transactional_id
    return replace(config, client_id=f"producer-{name}")
