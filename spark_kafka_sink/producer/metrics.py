"""The producer's metrics, with the names of Kafka: groups producer-metrics (with byte-* over all topics),
producer-topic-metrics and, from the client, producer-node-metrics. Always on: a few additions for each batch, request
and response, none for a record.

The Sender thread counts its work; application threads count their own under a lock. Any thread may read without
waiting, so one count of an event may be seen before another. Reference:
org.apache.kafka.clients.producer.internals.SenderMetricsRegistry, KafkaProducerMetrics, BufferPool.

Differences from the Java client:

- Samples are shared by all metrics and begin together; in the Java client each metric has its own.
- record-size-avg is bytes by records, before compression; in the Java client it is the mean of the largest records of
  batches.
- record-size-max is exact for records that were sent one by one. For columns it is the upper bound for the largest row
  of the block: up to about 30 bytes more, and 8 for each of its headers.
- record-error counts no rows that send_columns raises for, and buffer-exhausted counts a block of them once.
- produce-throttle-time is that of answers to Produce only; in the Java client those of other requests count too.
- bytes, requests and responses of connections are counted by whole frames, at the last byte. Logins and frames that
  were cut off are left out. network-io counts these frames; in the Java client each read and each write.
- request-latency of a node is that of all requests; in the Java client only of Produce.
- A topic or node that was idle for an hour is forgotten. Its totals begin at 0 again if it returns.
- Missing: reauthentication, connections by cipher, batch-split and metadata by topic, and deprecated metrics.
- requests-in-flight is as of the beginning of the Sender's poll.
- Times in ns are measured in whole milliseconds.
- batch-send-total is only here: batches acknowledged, or sent with acks=0.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from spark_kafka_sink.client.network_metrics import NS_PER_MS
from spark_kafka_sink.client.seams import KafkaClient
from spark_kafka_sink.common.clock import NEVER_MS
from spark_kafka_sink.common.windows import Sample, Windows, WindowsByKey, average, peak
from spark_kafka_sink.producer.buffer_pool import BufferPool
from spark_kafka_sink.producer.producer_batch import ProducerBatch
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata
from spark_kafka_sink.record.batch import HEADER_SIZE

TIMED_CALLS: Final = ("flush", "metadata-wait", "txn-init", "txn-begin", "txn-send-offsets", "txn-commit", "txn-abort")
"""The calls of application threads that are timed. Each has a `…-time-ns-total`."""


@dataclass(slots=True)
class SenderSample(Sample):
    """The work of the Sender. Sizes in bytes, times in ms."""

    produce_requests: int = 0
    batches: int = 0
    records: int = 0
    batch_bytes: int = 0
    """Bytes sent, with the headers of batches."""
    record_bytes: int = 0
    """Bytes before compression, without the headers of batches."""
    compression_rates: float = 0.0
    queue_ms: int = 0
    responses: int = 0
    latency_ms: int = 0
    throttle_ms: int = 0
    retried_records: int = 0
    splits: int = 0
    acknowledged_batches: int = 0
    max_batch_bytes: int = 0
    max_record_bytes: int = 0
    max_queue_ms: int = 0
    max_latency_ms: int = 0
    max_throttle_ms: int = 0


@dataclass(slots=True)
class TopicSample(Sample):
    """The work of the Sender for one topic. Sizes in bytes sent."""

    batches: int = 0
    records: int = 0
    batch_bytes: int = 0
    compression_rates: float = 0.0
    retried_records: int = 0


@dataclass(slots=True)
class ErrorSample(Sample):
    """Records that failed permanently."""

    records: int = 0


class ProducerMetrics:
    """The counts of one producer, and its metrics."""

    def __init__(self, pool: BufferPool, metadata: ProducerMetadata, client: KafkaClient) -> None:
        self._pool = pool
        self._metadata = metadata
        self._client = client
        self._sender = Windows(SenderSample)
        self._by_topic = WindowsByKey(TopicSample)
        self.requests_in_flight = 0
        """Set by the Sender before each poll, and at its end."""
        self._lock = threading.Lock()
        self._errors = Windows(ErrorSample)
        self._errors_by_topic = WindowsByKey(ErrorSample)
        self._call_ms = dict.fromkeys(TIMED_CALLS, 0)

    # ---- the Sender thread -----------------------------------------------------------------------------------------

    def batches_sent(self, batches: Iterable[ProducerBatch], now_ms: int) -> None:
        """Count a Produce request with these sealed batches. A retry counts again."""
        sample = self._sender.at(now_ms)
        for batch in batches:
            size, body, queue_ms = batch.wire_size, batch.size - HEADER_SIZE, batch.drained_ms - batch.created_ms
            sample.batches += 1
            sample.records += batch.record_count
            sample.batch_bytes += size
            sample.record_bytes += body
            compression_rate = (size - HEADER_SIZE) / body
            sample.compression_rates += compression_rate
            sample.queue_ms += queue_ms
            if size > sample.max_batch_bytes:
                sample.max_batch_bytes = size
            if queue_ms > sample.max_queue_ms:
                sample.max_queue_ms = queue_ms
            if batch.largest_record > sample.max_record_bytes:
                sample.max_record_bytes = batch.largest_record
            of_topic = self._by_topic.at(batch.topic_partition.topic, now_ms)
            of_topic.batches += 1
            of_topic.records += batch.record_count
            of_topic.batch_bytes += size
            of_topic.compression_rates += compression_rate
        sample.produce_requests += 1

    def response_received(self, latency_ms: int, throttle_ms: int, now_ms: int) -> None:
        """Count the answer to a Produce request, with its latency and throttle time."""
        sample = self._sender.at(now_ms)
        sample.responses += 1
        sample.latency_ms += latency_ms
        sample.throttle_ms += throttle_ms
        if latency_ms > sample.max_latency_ms:
            sample.max_latency_ms = latency_ms
        if throttle_ms > sample.max_throttle_ms:
            sample.max_throttle_ms = throttle_ms

    def batch_acknowledged(self, now_ms: int) -> None:
        self._sender.at(now_ms).acknowledged_batches += 1

    def records_retried(self, topic: str, count: int, now_ms: int) -> None:
        """Count `count` records of a batch that is queued again."""
        self._sender.at(now_ms).retried_records += count
        self._by_topic.at(topic, now_ms).retried_records += count

    def batch_split(self, now_ms: int) -> None:
        self._sender.at(now_ms).splits += 1

    # ---- any thread ------------------------------------------------------------------------------------------------

    def records_failed(self, topic: str | None, count: int, now_ms: int) -> None:
        """Count `count` records that fail.

        `topic`: None for a record without a batch, whose topic may not exist. It counts for no topic, as in Kafka. Two
        kinds of records are not counted. As in Kafka, those are records that a close, an aborted transaction or a fatal
        error gives up. Rows that `send_columns` raised for and never took are not counted either.
        """
        with self._lock:
            self._errors.at(now_ms).records += count
            if topic is not None:
                self._errors_by_topic.at(topic, now_ms).records += count

    def call_returned(self, call: str, duration_ms: int) -> None:
        """Count the time of one of TIMED_CALLS. As in Kafka, a call that raises does not count."""
        with self._lock:
            self._call_ms[call] += duration_ms

    def batches_and_retries(self) -> tuple[int, int]:
        """Return the totals of batch-send-total and record-retry-total. A task asks twice, and a snapshot takes longer
        than a small task has for all of its rows.
        """
        return self._sender.total("acknowledged_batches"), self._sender.total("retried_records")

    def waits_ms(self) -> tuple[int, int]:
        """Return the ms that sends have waited for metadata, and for buffer.memory, since the start."""
        return self._call_ms["metadata-wait"], self._pool.waits.total("wait_ms")

    def snapshot(self, now_ms: int) -> dict[str, float]:
        """Return every metric by its name.

        Rates per second, times in ms unless the name says ns, metadata-age in seconds. An average or maximum without
        events is NaN, and so is the age of missing metadata.
        """
        sender, errors, pool = self._sender.read(now_ms), self._errors.read(now_ms), self._pool.waits.read(now_ms)
        recent, total, per_s = sender.recent, sender.total, 1 / sender.window_s
        refreshed_ms = self._metadata.last_successful_refresh_ms
        return {
            "record-send-rate": recent.records * per_s,
            "record-send-total": float(total.records),
            "record-error-rate": errors.recent.records / errors.window_s,
            "record-error-total": float(errors.total.records),
            "record-retry-rate": recent.retried_records * per_s,
            "record-retry-total": float(total.retried_records),
            "byte-rate": recent.batch_bytes * per_s,
            "byte-total": float(total.batch_bytes),
            "batch-send-total": float(total.acknowledged_batches),
            "batch-split-rate": recent.splits * per_s,
            "batch-split-total": float(total.splits),
            "batch-size-avg": average(recent.batch_bytes, recent.batches),
            "batch-size-max": peak(recent.max_batch_bytes, recent.batches),
            "compression-rate-avg": average(recent.compression_rates, recent.batches),
            "record-size-avg": average(recent.record_bytes, recent.records),
            "record-size-max": peak(recent.max_record_bytes, recent.records),
            "record-queue-time-avg": average(recent.queue_ms, recent.batches),
            "record-queue-time-max": peak(recent.max_queue_ms, recent.batches),
            "records-per-request-avg": average(recent.records, recent.produce_requests),
            "request-latency-avg": average(recent.latency_ms, recent.responses),
            "request-latency-max": peak(recent.max_latency_ms, recent.responses),
            "requests-in-flight": float(self.requests_in_flight),
            "produce-throttle-time-avg": average(recent.throttle_ms, recent.responses),
            "produce-throttle-time-max": peak(recent.max_throttle_ms, recent.responses),
            "bufferpool-wait-ratio": pool.recent.wait_ms / 1000 / pool.window_s,
            "bufferpool-wait-time-ns-total": float(pool.total.wait_ms * NS_PER_MS),
            "buffer-exhausted-rate": pool.recent.exhausted / pool.window_s,
            "buffer-exhausted-total": float(pool.total.exhausted),
            "buffer-total-bytes": float(self._pool.total_memory),
            "buffer-available-bytes": float(self._pool.available_memory),
            "waiting-threads": float(self._pool.queued),
            "metadata-age": math.nan if refreshed_ms == NEVER_MS else (now_ms - refreshed_ms) / 1000,
            **self._client.metrics(now_ms),
            **{f"{call}-time-ns-total": float(spent_ms * NS_PER_MS) for call, spent_ms in self._call_ms.items()},
        }

    def by_topic(self, now_ms: int) -> dict[str, dict[str, float]]:
        """Return the metrics of group producer-topic-metrics, by topic. A topic idle for an hour is forgotten."""
        sent, failed = self._by_topic.read(now_ms), self._errors_by_topic.read(now_ms)
        nothing, no_error = Windows(TopicSample).read(now_ms), Windows(ErrorSample).read(now_ms)
        found = {}
        for topic in sorted(sent.keys() | failed.keys()):
            counts, errors = sent.get(topic, nothing), failed.get(topic, no_error)
            recent, total, per_s = counts.recent, counts.total, 1 / counts.window_s
            found[topic] = {
                "record-send-rate": recent.records * per_s,
                "record-send-total": float(total.records),
                "record-error-rate": errors.recent.records / errors.window_s,
                "record-error-total": float(errors.total.records),
                "record-retry-rate": recent.retried_records * per_s,
                "record-retry-total": float(total.retried_records),
                "byte-rate": recent.batch_bytes * per_s,
                "byte-total": float(total.batch_bytes),
                "compression-rate": average(recent.compression_rates, recent.batches),
            }
        return found

    def by_node(self, now_ms: int) -> dict[str, dict[str, float]]:
        """Return the metrics of group producer-node-metrics, by "node-" and the id of the broker."""
        return self._client.node_metrics(now_ms)

    def by_connection(self, now_ms: int) -> dict[tuple[str, str], dict[str, float]]:
        """Return the state of each connection, by "node-" with the id of the broker, and its address."""
        return self._client.connection_metrics(now_ms)
