"""The driver's client: transactions, committed offsets, topics and records over one set of connections.

Every call blocks the calling thread, at most until its `Timer` expires. Not thread-safe.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from spark_kafka_sink.admin.coordinator_calls import CoordinatorCalls
from spark_kafka_sink.admin.group_offsets import GroupOffsets
from spark_kafka_sink.admin.record_writer import RecordWriter
from spark_kafka_sink.admin.request_client import RequestClient, Timer
from spark_kafka_sink.admin.topic_reader import TopicTail
from spark_kafka_sink.admin.topics import TopicCreation, TopicsMetadata
from spark_kafka_sink.admin.transactions import Transactions
from spark_kafka_sink.client.api_versions import ApiVersions
from spark_kafka_sink.client.backoff import COORDINATOR_BACKOFF_MS, ExponentialBackoff
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.protocol.fetch import READ_COMMITTED
from spark_kafka_sink.protocol.metadata import GROUP, TRANSACTION
from spark_kafka_sink.record.decoder import DecodedRecord

TRANSACTION_VERSION: Final = "transaction.version"
_NOW_KEY: Final = b"\nnow"
"""Of records without a value, which compaction deletes."""


class ClusterClient:
    """`transactions`, `groups`, `topics`, `writer` and `creation` hold the calls. A context manager that closes the
    connections.
    """

    def __init__(
        self,
        client: RequestClient,
        metadata: TopicsMetadata,
        api_versions: ApiVersions,
        clock: Clock,
        rng: random.Random,
        retry_backoff_ms: int,
    ) -> None:
        self._client = client
        self._metadata = metadata
        self._api_versions = api_versions
        self._clock = clock
        self._calls = CoordinatorCalls(client, metadata, clock, rng)
        self.transactions = Transactions(self._calls)
        self.groups = GroupOffsets(self._calls)
        self.topics = TopicTail(client, metadata, clock, retry_backoff_ms)
        self.writer = RecordWriter(
            self._calls,
            clock,
            ExponentialBackoff.doubling(COORDINATOR_BACKOFF_MS, max(retry_backoff_ms, COORDINATOR_BACKOFF_MS), rng),
        )
        self.creation = TopicCreation(client, metadata, clock)

    @classmethod
    def connect(cls, config: ProducerConfig, clock: Clock, rng: random.Random) -> Self:
        """Return a client with its own connections. Raises BootstrapResolutionError if no address resolves."""
        metadata = TopicsMetadata(
            (), config.retry_backoff_ms, config.retry_backoff_max_ms, config.metadata_max_age_ms, rng
        )
        api_versions = ApiVersions()
        client = RequestClient.connect(config, metadata, clock, rng, api_versions)
        return cls(client, metadata, api_versions, clock, rng, config.retry_backoff_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def timer(self, timeout_ms: int) -> Timer:
        """Return a time limit for one or more calls, from now."""
        return Timer(self._clock, timeout_ms)

    def coordinators(self, name: str, others: Iterable[str], timer: Timer) -> Mapping[tuple[int, str], Node]:
        """Return the coordinators of `name`, as a transactional id and as a group, by kind and name (as in
        FindCoordinator). If one is not known, `others` are looked up as well, with the same two requests.

        One that cannot be found now is left out. Raises the error of a refused login.
        """
        places = [(key_type, name) for key_type in (TRANSACTION, GROUP)]
        lookup = self._calls.lookup
        if any(lookup.known(*place) is None for place in places):
            self._calls.locate([*dict.fromkeys([name, *others])], timer)
        return {place: node for place in places if (node := lookup.known(*place)) is not None}

    def last_of_keys(
        self,
        topic_partition: TopicPartition,
        keys: Sequence[bytes],
        timer: Timer,
        isolation_level: int = READ_COMMITTED,
    ) -> dict[bytes, DecodedRecord | None]:
        """As `TopicTail.last_of_keys`, but always finds what was committed before this call. A read alone does not: a
        leader that was frozen, or cut off from its controllers, answers as before when another one has newer records.
        But it can acknowledge no record for all replicas. So one is written first, and read up to.

        Raises the errors of `RecordWriter.write_alone`, too.
        """
        offset = self.writer.write_alone(topic_partition, _NOW_KEY, None, timer)
        if offset < 0:
            text = "The answer to a write has no offset, so that it is not known whether its node still leads."
            raise KafkaTimeoutError(text).at(topic_partition=topic_partition)
        return self.topics.last_of_keys(topic_partition, keys, timer, isolation_level, offset + 1)

    def transaction_version(self, timer: Timer) -> int:
        """Return the cluster's finalized transaction.version, as of the last connection: 2 and above is the protocol of
        KIP-890; 0 means that the brokers do not have the feature.
        """
        while self._metadata.fetch().is_bootstrap_configured:
            if not self._client.await_metadata_update(timer):
                raise KafkaTimeoutError(
                    f"No broker was reached within {timer.timeout_ms} ms. {self._client.why_unanswered()}"
                )
        return self._api_versions.finalized_feature(TRANSACTION_VERSION)
