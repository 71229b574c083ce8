"""Offsets and the last records of partitions, for who decides by what was written last. One thread, that of the
caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from spark_kafka_sink.admin.request_client import RequestClient
from spark_kafka_sink.admin.timer import Timer
from spark_kafka_sink.admin.topic_reader import TopicReader
from spark_kafka_sink.admin.topics_metadata import TopicsMetadata
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    KafkaTimeoutError,
    OffsetOutOfRangeError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
)
from spark_kafka_sink.protocol.requests import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, READ_COMMITTED, READ_UNCOMMITTED
from spark_kafka_sink.record.decoder import BatchLimits, DecodedRecord

_FIRST_WINDOW: Final = 32
_UNSTABLE_BACKOFF_MS: Final = 20
_LIMITS: Final = BatchLimits(decompressed_size=24 * 8 * 1024 * 1024, objects=100_000)
"""The decision topic takes 8 MiB a batch, which is 500,000 tasks. Decompressed, they have 5 times as many bytes with a
transactional.id.prefix of 40 letters, and 16 times with the longest, of 200. A decision is one record.
"""


class TopicTail:
    """Reads on `client`, which must share `metadata`. A topic that is not there is waited for until the timer runs
    out: UnknownTopicOrPartitionError. Without permission: TopicAuthorizationError.
    """

    def __init__(self, client: RequestClient, metadata: TopicsMetadata, clock: Clock, retry_backoff_ms: int) -> None:
        self._client = client
        self._metadata = metadata
        self._clock = clock
        self._retry_backoff_ms = retry_backoff_ms

    def list_offsets(
        self,
        topic_partitions: Sequence[TopicPartition],
        timestamp: int,
        timer: Timer,
        isolation_level: int = READ_UNCOMMITTED,
    ) -> dict[TopicPartition, int]:
        """The partitions' offsets at `timestamp`: EARLIEST_TIMESTAMP, LATEST_TIMESTAMP (with READ_COMMITTED the last
        stable offset) or ms since the epoch, for which -1 means that no record is as late.
        """
        with _permission("DESCRIBE"):
            self._find(topic_partitions, timer)
            reader = self._reader(timer, ", ".join(map(str, topic_partitions)))
            return reader.offsets(topic_partitions, timestamp, isolation_level)

    def read_from(
        self, topic_partition: TopicPartition, offset: int, timer: Timer, isolation_level: int = READ_COMMITTED
    ) -> list[DecodedRecord]:
        """The records from `offset` to the end of now, in order. Raises OffsetOutOfRangeError where the partition
        begins later.
        """
        with _permission("READ"):
            self._find([topic_partition], timer)
        return self._read(topic_partition, offset, timer, isolation_level)

    def read_last(
        self, topic_partition: TopicPartition, count: int, timer: Timer, isolation_level: int = READ_COMMITTED
    ) -> list[DecodedRecord]:
        """The last `count` records, in order; fewer only where the partition has no more.

        With READ_COMMITTED the end is the last stable offset, before any transaction that is open.
        """
        window = 2 * count + 2  # a transaction of one record takes two offsets
        while True:
            first = self.list_offsets([topic_partition], EARLIEST_TIMESTAMP, timer)[topic_partition]
            end = self.list_offsets([topic_partition], LATEST_TIMESTAMP, timer, isolation_level)[topic_partition]
            start = max(first, end - window)
            try:
                found = self._read(topic_partition, start, timer, isolation_level)
            except OffsetOutOfRangeError:
                continue  # retention moved the beginning meanwhile
            if len(found) >= count or start == first:
                return found[-count:] if count else []
            window *= 4  # markers, aborted records and compaction leave gaps

    def last_of_key(self, topic_partition: TopicPartition, key: bytes, timer: Timer) -> DecodedRecord | None:
        """`last_of_keys` of one key."""
        return self.last_of_keys(topic_partition, [key], timer)[key]

    def last_of_keys(
        self, topic_partition: TopicPartition, keys: Sequence[bytes], timer: Timer
    ) -> dict[bytes, DecodedRecord | None]:
        """The newest committed record of each key, None where there is none. The search begins at the end, and is over
        once a record of the first key with a value is found: of the other keys only what came after that is told.

        Where somebody's transaction is open, what is committed behind it cannot be seen yet: that is waited for, up to
        the end of now. Raises KafkaTimeoutError.
        """
        wanted = [topic_partition]
        stable = self._stable_end(topic_partition, timer)
        first = self.list_offsets(wanted, EARLIEST_TIMESTAMP, timer)[topic_partition]
        window = _FIRST_WINDOW
        while True:
            start = max(first, stable - window)
            try:
                found = self._read(topic_partition, start, timer, READ_COMMITTED)
            except OffsetOutOfRangeError:
                first = self.list_offsets(wanted, EARLIEST_TIMESTAMP, timer)[topic_partition]
                continue
            newest = {key: next((each for each in reversed(found) if each.key == key), None) for key in keys}
            chief = newest[keys[0]]
            if start == first or (chief is not None and chief.value is not None) or None not in newest.values():
                return newest
            window *= 8

    def _stable_end(self, topic_partition: TopicPartition, timer: Timer) -> int:
        """The end of now, once nothing before it is open."""
        wanted = [topic_partition]
        end = self.list_offsets(wanted, LATEST_TIMESTAMP, timer)[topic_partition]
        while (stable := self.list_offsets(wanted, LATEST_TIMESTAMP, timer, READ_COMMITTED)[topic_partition]) < end:
            self._clock.sleep_ms(min(_UNSTABLE_BACKOFF_MS, timer.remaining_ms))
            timer.update()
            if timer.is_expired:
                raise KafkaTimeoutError(
                    f"{topic_partition}: a transaction stayed open at offset {stable} for {timer.timeout_ms} ms, and"
                    " what was committed behind it cannot be read. It ends with its own time-out."
                )
        return stable

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _reader(self, timer: Timer, wanted: str) -> TopicReader:
        """A reader for the time that is left. Raises KafkaTimeoutError where none is."""
        timer.update()
        if timer.is_expired:
            raise KafkaTimeoutError(f"{wanted} was not read within {timer.timeout_ms} ms.")
        return TopicReader(
            self._client, self._metadata, self._clock, self._retry_backoff_ms, timer.remaining_ms, limits=_LIMITS
        )

    def _find(self, topic_partitions: Iterable[TopicPartition], timer: Timer) -> None:
        """Let metadata follow the topics. Raises UnknownTopicOrPartitionError where one is not there."""
        for topic in sorted({each.topic for each in topic_partitions}):
            there = self._reader(timer, topic).partitions(topic)
            for missing in {each for each in topic_partitions if each.topic == topic}.difference(there):
                raise UnknownTopicOrPartitionError(f"{missing}: the topic has {len(there)} partitions.")

    def _read(
        self, topic_partition: TopicPartition, start: int, timer: Timer, isolation_level: int
    ) -> list[DecodedRecord]:
        found: list[DecodedRecord] = []
        with _permission("READ"):
            reader = self._reader(timer, str(topic_partition))
            for chunk in reader.read_partitions([topic_partition], isolation_level, {topic_partition: start}):
                found += chunk.records
                timer.update()
                if timer.is_expired:
                    raise KafkaTimeoutError(f"{topic_partition} was not read to its end within {timer.timeout_ms} ms.")
        return found


@contextmanager
def _permission(operation: str) -> Iterator[None]:
    """Names the permission that reading needs; the error's own sentence thinks of writing."""
    try:
        yield
    except TopicAuthorizationError as error:
        raise TopicAuthorizationError(f"{error} To read, {operation} is enough.") from error
