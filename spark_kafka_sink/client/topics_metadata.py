"""Metadata of named topics, for readers and the driver. Topics are added, never created and never forgotten."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from spark_kafka_sink.client.metadata import ClusterListener, Metadata
from spark_kafka_sink.protocol.requests import MetadataRequest


class TopicsMetadata(Metadata):
    """Follows the topics it was told of; with none, the brokers alone."""

    def __init__(
        self,
        topics: Iterable[str],
        refresh_backoff_ms: int,
        refresh_backoff_max_ms: int,
        metadata_expire_ms: int,
        rng: random.Random,
        cluster_listeners: Sequence[ClusterListener] = (),
    ) -> None:
        super().__init__(refresh_backoff_ms, refresh_backoff_max_ms, metadata_expire_ms, cluster_listeners, rng)
        self._topics = frozenset(topics)
        self._new_topics: frozenset[str] = frozenset()

    def add_topics(self, topics: Iterable[str]) -> None:
        """Follow these as well; those not followed yet are asked for at once."""
        with self._lock:
            new = frozenset(topics) - self._topics
            if new:
                self._topics |= new
                self._new_topics |= new
                self.request_update_for_new_topics()

    def retain_topic(self, topic: str, is_internal: bool, now_ms: int) -> bool:  # noqa: ARG002
        return topic in self._topics

    def new_metadata_request_builder(self) -> MetadataRequest:
        return MetadataRequest(topics=tuple(sorted(self._topics)), allow_auto_topic_creation=False)

    def new_metadata_request_builder_for_new_topics(self) -> MetadataRequest | None:
        new = self._new_topics - self.fetch().topics
        return MetadataRequest(topics=tuple(sorted(new)), allow_auto_topic_creation=False) if new else None
