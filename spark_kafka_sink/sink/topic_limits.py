"""What the brokers say about a topic: how many partitions it has, and how large a record it takes.

Asked for by the tasks of a sink with dead letters, once for each topic and process, and again after
metadata.max.age.ms or for a row that the last answer refuses: partitions may have been added, and max.message.bytes
raised. Uses the client of the process. Any thread may call.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable
from typing import Final, NamedTuple

from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.admin.topics import TopicCreation
from spark_kafka_sink.common.clock import Clock, SystemClock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    InvalidTopicError,
    KafkaError,
    KafkaTimeoutError,
)
from spark_kafka_sink.record.sifting import TopicLimits
from spark_kafka_sink.sink.exactly_once.cluster import process_client

log = logging.getLogger(__name__)

_MAX_BYTES: Final = "max.message.bytes"
_NEW_MS: Final = 1_000
"""A newer answer is not asked for again because of a size: each batch of a task may have rows that are too large."""

_MOST_TOPICS: Final = 1_000
"""That are known: rows may name ever new topics, and a worker may live for weeks."""

Read = Callable[[str], TopicLimits]


class _Known(NamedTuple):
    limits: TopicLimits
    read_ms: int


class TopicLimitsCache:
    """Answers of the brokers, by topic. `read` asks them."""

    def __init__(self, read: Read, clock: Clock, max_age_ms: int) -> None:
        self._read = read
        self._clock = clock
        self._max_age_ms = max_age_ms
        self._known: dict[str, _Known] = {}

    def of(self, topic: str, highest: int | None, largest: int | None = None) -> TopicLimits:
        """Return the limits of `topic`; `highest` is the highest partition that a row names, `largest` the bytes of the
        largest batch with one row alone. A topic that does not exist yet has no limits: the producer waits for it.
        Raises KafkaError if the brokers could not be asked.
        """
        known = self._known.get(topic)
        if known is not None:
            age_ms = self._clock.now_ms() - known.read_ms
            is_in_doubt = _lacks(known.limits, highest) or (age_ms >= _NEW_MS and _is_below(known.limits, largest))
            if age_ms < self._max_age_ms and not is_in_doubt:
                return known.limits
        limits = self._read(topic)
        if limits.partitions is not None or limits.is_invalid:
            self._known.pop(topic, None)  # so that it is the newest one
            self._known[topic] = _Known(limits, self._clock.now_ms())
            for old in [*self._known][:-_MOST_TOPICS]:
                self._known.pop(old, None)  # another thread may have taken it out
        return limits


def _lacks(limits: TopicLimits, partition: int | None) -> bool:
    return partition is not None and (limits.partitions is None or partition >= limits.partitions)


def _is_below(limits: TopicLimits, size: int | None) -> bool:
    return size is not None and limits.max_message_bytes is not None and size > limits.max_message_bytes


_CACHES: Final[dict[tuple[int, object], TopicLimitsCache]] = {}


def process_limits(config: ProducerConfig) -> TopicLimitsCache:
    """Return the answers that this process has for the cluster of `config`."""
    key = (os.getpid(), config.canonical())
    found = _CACHES.get(key)
    if found is None:
        found = TopicLimitsCache(lambda topic: _ask(config, topic), SystemClock(), config.metadata_max_age_ms)
        found = _CACHES.setdefault(key, found)
    return found


def _ask(config: ProducerConfig, topic: str) -> TopicLimits:
    with process_client(config) as (client, timer):
        return read_limits(client.creation, topic, timer)


def read_limits(creation: TopicCreation, topic: str, timer: Timer) -> TopicLimits:
    """Ask the brokers. Raises KafkaError."""
    try:
        creation.count(topic, timer)  # its answer may be that to an earlier request, which did not name the topic
        count = creation.count(topic, timer)
        return TopicLimits(count, _max_message_bytes(creation, topic, timer)) if count else TopicLimits()
    except InvalidTopicError:
        return TopicLimits(is_invalid=True)
    finally:
        creation.forget(topic)  # rows may name thousands, and each request would ask for all of them


def _max_message_bytes(creation: TopicCreation, topic: str, timer: Timer) -> int | None:
    try:
        text = creation.configs(topic, (_MAX_BYTES,), timer).get(_MAX_BYTES)
    except (AuthenticationError, KafkaTimeoutError):
        raise
    except KafkaError as error:
        _warn_once(topic, error)
        return None
    return int(text) if text and text.isdecimal() else None


_warned: Final[set[str]] = set()


def _warn_once(topic: str, error: KafkaError) -> None:
    if topic in _warned:
        return
    _warned.add(topic)
    log.warning(
        "%s of topic %s is not known, so a record that is too large for it fails its task, and is no dead letter: %s To"
        " let this principal read it: kafka-acls.sh --bootstrap-server HOST:PORT --add --allow-principal User:NAME"
        " --operation DescribeConfigs --topic %s",
        _MAX_BYTES,
        topic,
        error,
        shlex.quote(topic),
    )
