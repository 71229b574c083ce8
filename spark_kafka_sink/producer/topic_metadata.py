"""Waits until a topic, and a partition of it, is known. Application threads.

Reference: KafkaProducer.waitOnMetadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Cluster
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import InvalidTopicError, KafkaTimeoutError, UnknownTopicOrPartitionError
from spark_kafka_sink.producer.metrics import ProducerMetrics
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata
from spark_kafka_sink.producer.record_fields import is_sendable_text


class TopicMetadata:
    """`wake_sender` makes the Sender look at what was asked for of a topic. It may raise."""

    def __init__(
        self,
        config: ProducerConfig,
        metadata: ProducerMetadata,
        clock: Clock,
        metrics: ProducerMetrics,
        wake_sender: Callable[[str], None],
    ) -> None:
        self._config = config
        self._metadata = metadata
        self._clock = clock
        self._metrics = metrics
        self._wake_sender = wake_sender

    def wait_for(self, topic: str, partition: int | None = None) -> tuple[Cluster, int]:
        """The cluster with `topic`, and with `partition` of it, in it; and what is left of max.block.ms.

        Raises KafkaTimeoutError (a topic or partition that does not come up; its cause is what the brokers said of the
        topic, UnknownTopicOrPartitionError for one that does not exist), InvalidTopicError,
        TopicAuthorizationError, ProducerClosedError, and the metadata's fatal error.
        """
        # No request could ask for it, nor for others with it. What else is wrong with a name the brokers say.
        if not is_sendable_text(topic):
            raise InvalidTopicError(f"Topic {topic!r:.300}: {InvalidTopicError.sentence}", topic=topic)
        started_ms = self._clock.now_ms()
        left_ms = self._config.max_block_ms
        cluster = self._metadata.fetch()
        if topic in cluster.invalid_topics:  # before `add`: full requests would go on naming it
            raise InvalidTopicError(f"Topic {topic!r}: {InvalidTopicError.sentence}", topic=topic)
        self._metadata.add(topic, started_ms)
        while not _knows(cluster, topic, partition):
            self._metadata.add(topic, self._clock.now_ms())
            version = self._metadata.request_update_for_topic(topic)
            self._wake_sender(topic)
            try:
                self._metadata.await_update(version, left_ms)
            except KafkaTimeoutError:
                raise KafkaTimeoutError(self._missing(topic, partition), topic=topic) from self._metadata.topic_error(
                    topic
                )
            cluster = self._metadata.fetch()
            left_ms = self._config.max_block_ms - (self._clock.now_ms() - started_ms)
            self._metadata.maybe_raise_error_for_topic(topic)
            if left_ms <= 0 and not _knows(cluster, topic, partition):
                raise KafkaTimeoutError(self._missing(topic, partition), topic=topic) from self._metadata.topic_error(
                    topic
                )
        if left_ms < self._config.max_block_ms:
            self._metrics.call_returned("metadata-wait", self._config.max_block_ms - left_ms)
        return cluster, max(0, left_ms)

    def look_up(self, topics: Iterable[str]) -> None:
        """The next request names them too. One by one each would cost a request of its own, and a new view of all
        topics that are known.
        """
        now_ms = self._clock.now_ms()
        for topic in filter(is_sendable_text, topics):
            self._metadata.add(topic, now_ms)

    def _missing(self, topic: str, partition: int | None) -> str:
        """Why a topic or partition did not come up, told by what is known."""
        cluster = self._metadata.fetch()
        limit = f"within max.block.ms={self._config.max_block_ms}"
        count = cluster.partition_count_for_topic(topic)
        if cluster.is_bootstrap_configured:
            return self._metadata.no_broker_text(self._config.bootstrap_servers, limit)
        if count is None:
            said = self._metadata.topic_error(topic)
            if said is not None and not isinstance(said, UnknownTopicOrPartitionError):
                return f"Topic {topic} is not in the metadata {limit}. The brokers said: {said}"
            return (
                f"Topic {topic} is not in the metadata {limit}: create it, or let the brokers do so"
                " (auto.create.topics.enable)."
            )
        return (
            f"Partition {partition} of topic {topic} with {count} partitions is not in the metadata {limit}:"
            f" use 0 to {count - 1}, or add partitions."
        )


def _knows(cluster: Cluster, topic: str, partition: int | None) -> bool:
    count = cluster.partition_count_for_topic(topic)
    return count is not None and (partition is None or partition < count)
