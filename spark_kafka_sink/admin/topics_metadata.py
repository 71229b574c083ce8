"""Metadata of named topics, for readers and the driver. Topics are added, never created and never forgotten; that one
is refused is told to who has asked for it last.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from spark_kafka_sink.client.metadata import Metadata
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
    ) -> None:
        super().__init__(refresh_backoff_ms, refresh_backoff_max_ms, metadata_expire_ms, rng)
        self._topics = self._asked_for = frozenset(topics)
        self._new_topics: frozenset[str] = frozenset()

    def add_topics(self, topics: Iterable[str]) -> None:
        """Follow these as well; those not followed yet are asked for at once. From now on it is their refusals that are
        raised: others came with somebody else's use of this client, and each update brings them again.
        """
        with self._lock:
            self._asked_for = frozenset(topics)
            new = self._asked_for - self._topics
            if new:
                self._topics |= new
                self._new_topics |= new
                self.request_update_for_new_topics()

    def maybe_raise_any_error(self) -> None:
        with self._lock:
            unauthorized, invalid = self._unauthorized_topics, self._invalid_topics
            self._unauthorized_topics = self._invalid_topics = frozenset()  # who asks again gets another answer
            self._raise_once(unauthorized & self._asked_for, invalid & self._asked_for)

    def retain_topic(self, topic: str, is_internal: bool, now_ms: int) -> bool:  # noqa: ARG002
        return topic in self._topics

    def new_metadata_request_builder(self) -> MetadataRequest:
        return MetadataRequest(topics=tuple(sorted(self._topics)), allow_auto_topic_creation=False)

    def new_metadata_request_builder_for_new_topics(self) -> MetadataRequest | None:
        new = self._new_topics - self.fetch().topics
        return MetadataRequest(topics=tuple(sorted(new)), allow_auto_topic_creation=False) if new else None
