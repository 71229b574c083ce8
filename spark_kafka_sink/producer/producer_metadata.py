"""Metadata of the topics that are written to, and of those only, and the wait of a send for its topic.

A topic is added by its first send, asked for by a partial update while it is new, and forgotten after
metadata.max.idle.ms without a send. Shared by application threads and the Sender under the lock of `Metadata`.
References: org.apache.kafka.clients.producer.internals.ProducerMetadata, KafkaProducer.waitOnMetadata.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.client.metadata_view import MetadataResponse
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Cluster
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    InvalidTopicError,
    KafkaError,
    KafkaTimeoutError,
    ProducerClosedError,
    UnknownTopicOrPartitionError,
    error_for_code,
)
from spark_kafka_sink.producer.record_fields import is_sendable_text
from spark_kafka_sink.protocol.metadata import MetadataRequest


class ProducerMetadata(Metadata):
    """The topics of one producer. `metadata_idle_ms`: how long a topic is kept after the last send."""

    def __init__(
        self,
        *,
        refresh_backoff_ms: int,
        refresh_backoff_max_ms: int,
        metadata_expire_ms: int,
        metadata_idle_ms: int,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        super().__init__(refresh_backoff_ms, refresh_backoff_max_ms, metadata_expire_ms, rng)
        self._metadata_idle_ms = metadata_idle_ms
        self._clock = clock
        self._expiry_ms: dict[str, int] = {}
        self._new_topics: set[str] = set()
        self._asked_for: frozenset[str] = frozenset()
        """The topics of the last request. A broker may leave some of them out of its answer."""
        self._error_codes: dict[str, int] = {}
        """The error of each topic in the last response that names it."""

    @classmethod
    def of(cls, config: ProducerConfig, clock: Clock, rng: random.Random) -> ProducerMetadata:
        return cls(
            refresh_backoff_ms=config.retry_backoff_ms,
            refresh_backoff_max_ms=config.retry_backoff_max_ms,
            metadata_expire_ms=config.metadata_max_age_ms,
            metadata_idle_ms=config.metadata_max_idle_ms,
            clock=clock,
            rng=rng,
        )

    def add(self, topic: str, now_ms: int) -> None:
        """Keep `topic` from now on for metadata.max.idle.ms after this send. Ask for it if it is new."""
        with self._lock:
            is_new = topic not in self._expiry_ms
            self._expiry_ms[topic] = now_ms + self._metadata_idle_ms
            if is_new:
                self._new_topics.add(topic)
                self.request_update_for_new_topics()

    def request_update_for_topic(self, topic: str) -> int:
        """Ask for `topic`: a partial update while it is new, else a full one. Return the update version before it.

        Earlier refusals of the topic are forgotten.
        """
        with self._lock:
            self._unauthorized_topics -= {topic}
            self._invalid_topics -= {topic}
            if topic in self._new_topics:
                return self.request_update_for_new_topics()
            return self.request_update(reset_equivalent_backoff=False)

    def await_update(self, last_version: int, timeout_ms: int) -> None:
        """Wait until the update version is above `last_version`.

        Raises the fatal error of the metadata, KafkaTimeoutError after `timeout_ms`, and ProducerClosedError if closed
        meanwhile.
        """
        deadline_ms = self._clock.now_ms() + timeout_ms
        with self._lock:
            while True:
                self.maybe_raise_fatal_error()
                if self.is_closed:
                    raise ProducerClosedError("The producer was closed while a send waited for metadata.")
                if self.update_version > last_version:
                    return
                left_ms = deadline_ms - self._clock.now_ms()
                if left_ms <= 0:
                    raise KafkaTimeoutError(f"No metadata came within {timeout_ms} ms.")
                self._clock.wait(self.condition, left_ms)

    def topic_error(self, topic: str) -> KafkaError | None:
        """Return the last error of the brokers for `topic`, or None."""
        with self._lock:
            error_code = self._error_codes.get(topic)
        if error_code is None:
            return None
        return error_for_code(error_code, api="Metadata").at(topic=topic)

    # ---- what the base class asks, with the lock held ----------------------------------------------------------------

    def new_metadata_request_builder(self) -> MetadataRequest:
        return self._request_for(self._expiry_ms)

    def new_metadata_request_builder_for_new_topics(self) -> MetadataRequest | None:
        return self._request_for(self._new_topics)

    def _request_for(self, topics: Iterable[str]) -> MetadataRequest:
        self._asked_for = frozenset(topics)
        return MetadataRequest(topics=tuple(sorted(self._asked_for)), allow_auto_topic_creation=True)

    def retain_topic(self, topic: str, now_ms: int) -> bool:
        expiry_ms = self._expiry_ms.get(topic)
        if expiry_ms is None:
            return False
        if topic in self._new_topics or now_ms < expiry_ms:
            return True
        del self._expiry_ms[topic]
        return False

    def update(self, request_version: int, response: MetadataResponse, is_partial: bool, now_ms: int) -> None:
        with self._lock:
            super().update(request_version, response, is_partial, now_ms)
            answered = {topic.name for topic in response.topics}
            self._new_topics -= answered | self._asked_for
            kept = [item for item in self._error_codes.items() if is_partial and item[0] not in answered]
            self._error_codes = {**dict(kept), **dict(response.error_codes())}
            self.condition.notify_all()


class TopicWaiter:
    """Waits until a topic, and a partition of it, is known. Application threads.

    `wake_sender` makes the Sender ask for a topic; it may raise. `waited` gets the ms that a wait took.
    """

    def __init__(
        self,
        config: ProducerConfig,
        metadata: ProducerMetadata,
        clock: Clock,
        wake_sender: Callable[[str], None],
        waited: Callable[[int], None],
    ) -> None:
        self._config = config
        self._metadata = metadata
        self._clock = clock
        self._wake_sender = wake_sender
        self._waited = waited

    def wait_for(self, topic: str, partition: int | None = None) -> tuple[Cluster, int]:
        """Wait for `topic`, and for `partition` of it. Return a cluster with both, and the rest of max.block.ms.

        Raises KafkaTimeoutError if the topic or partition does not appear; its cause is the answer of the brokers about
        the topic, UnknownTopicOrPartitionError if it does not exist. Raises InvalidTopicError, TopicAuthorizationError,
        ProducerClosedError, and the fatal error of the metadata.
        """
        # No request could contain this name. Other wrong names are refused by the brokers.
        if not is_sendable_text(topic):
            raise InvalidTopicError(f"Topic {topic!r:.300}: {InvalidTopicError.sentence}", topic=topic)
        started_ms = self._clock.now_ms()
        left_ms = self._config.max_block_ms
        cluster = self._metadata.fetch()
        if topic in cluster.invalid_topics:  # before `add`, because full requests would name it
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
            self._waited(self._config.max_block_ms - left_ms)
        return cluster, max(0, left_ms)

    def look_up(self, topics: Iterable[str]) -> None:
        """Ask for these topics in the next request.

        One by one, each would cost a request, and a new view of all known topics.
        """
        now_ms = self._clock.now_ms()
        for topic in filter(is_sendable_text, topics):
            self._metadata.add(topic, now_ms)

    def _missing(self, topic: str, partition: int | None) -> str:
        """Return why a topic or partition did not appear, as far as it is known."""
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
