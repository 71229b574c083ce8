"""Tells a topic that was deleted from one whose leader is away: metadata does not name it. One thread, that of the
caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.errors import UnknownTopicOrPartitionError

ABSENCE_LIMIT_MS: Final = 10_000
"""A node that has just started may not know every topic yet."""


class TopicAbsence:
    """Measures how long metadata has not named a topic. For one call that waits for the topic."""

    def __init__(self, metadata: Metadata, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._since_ms: dict[str, int] = {}

    def check(self, topics: Iterable[str]) -> None:
        """Raise UnknownTopicOrPartitionError for a topic that no metadata response has named for 10 s."""
        now_ms, cluster = self._clock.now_ms(), self._metadata.fetch()
        for topic in topics:
            if cluster.is_bootstrap_configured or cluster.partitions_for_topic(topic):  # else no node has answered
                self._since_ms.pop(topic, None)
            elif now_ms - self._since_ms.setdefault(topic, now_ms) >= ABSENCE_LIMIT_MS:
                raise UnknownTopicOrPartitionError(
                    f"Topic {topic!r} is not in the cluster any more: no node has named it for {ABSENCE_LIMIT_MS} ms."
                )
