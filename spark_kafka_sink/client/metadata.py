"""The client's view of the cluster, and when to fetch it again.

Application threads read the view and ask for updates; the I/O thread fetches them. The view, and the reason of the last
lost connection, are immutable values that are read without a lock. A re-entrant lock guards all other state. A thread
that waits for an update waits on `condition`, which uses that lock.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple
from uuid import UUID

from spark_kafka_sink.client.backoff import ExponentialBackoff
from spark_kafka_sink.client.metadata_view import MetadataCache, MetadataResponse, TopicMetadata
from spark_kafka_sink.common.clock import NEVER_MS
from spark_kafka_sink.common.cluster import Cluster, Node, PartitionMetadata, TopicPartition
from spark_kafka_sink.common.errors import (
    AuthenticationError,
    IllegalStateError,
    InvalidTopicError,
    KafkaError,
    TopicAuthorizationError,
    error_for_code,
)
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.protocol.metadata import MetadataRequest

log = logging.getLogger(__name__)

_MOST_LOWER_EPOCHS: Final = 5
"""As in franz-go. A broker that is behind catches up within a few answers."""


class LeaderAndEpoch(NamedTuple):
    """A partition's leader and its epoch. The leader is None if none exists or its address is not known."""

    leader: Node | None
    epoch: int | None


class LeaderIdAndEpoch(NamedTuple):
    """A partition's new leader in a produce or fetch response (KIP-951); None if it names none."""

    leader_id: int | None
    epoch: int | None


class MetadataRequestAndVersion(NamedTuple):
    """A request to send, the request version to pass to `update`, and whether it asks only for some of the topics."""

    request: MetadataRequest
    request_version: int
    is_partial: bool


class Metadata:
    """Cluster metadata with its refresh rules (org.apache.kafka.clients.Metadata). This class fetches all topics;
    subclasses choose topics.

    `refresh_backoff_ms` to `refresh_backoff_max_ms`: the pause between two fetches, which grows while they fail or
    return nothing new. `metadata_expire_ms`: the age at which metadata is fetched without a request for an update.
    """

    def __init__(
        self,
        refresh_backoff_ms: int,
        refresh_backoff_max_ms: int,
        metadata_expire_ms: int,
        rng: random.Random,
    ) -> None:
        self._lock = threading.RLock()
        """Enter this lock itself, not `condition`: Ctrl-C in the Python code of a Condition leaves the lock taken."""
        self.condition = threading.Condition(self._lock)
        self._schedule = RefreshSchedule(refresh_backoff_ms, refresh_backoff_max_ms, metadata_expire_ms, rng)
        self._cache = MetadataCache()
        self._bootstrap_addresses: tuple[tuple[str, int], ...] = ()
        self._update_version = 0
        self._request_version = 0
        self._need_full_update = False
        self._need_partial_update = False
        self._is_closed = False
        self._fatal_error: KafkaError | None = None
        self._was_refused = False
        self._invalid_topics: frozenset[str] = frozenset()
        self._unauthorized_topics: frozenset[str] = frozenset()
        self._leader_epochs: dict[TopicPartition, int] = {}
        self._lower_epochs: dict[TopicPartition, int] = {}
        """How many answers in a row had a lower epoch."""
        self._connection_failure: str | None = None
        self._node_failures: dict[str, str] = {}
        self._is_nonsense = False

    # ---- what subclasses choose ------------------------------------------------------------------------------------

    def retain_topic(self, topic: str, now_ms: int) -> bool:  # noqa: ARG002
        """Return whether to keep the topic of a response. Called with the lock held."""
        return True

    def new_metadata_request_builder(self) -> MetadataRequest:
        """Return the request of a full update. Called with the lock held."""
        return MetadataRequest(topics=None, allow_auto_topic_creation=True)

    def new_metadata_request_builder_for_new_topics(self) -> MetadataRequest | None:
        """Return the request of a partial update, or None if there are only full ones. Called with the lock held."""
        return None

    # ---- reading ---------------------------------------------------------------------------------------------------

    def fetch(self) -> Cluster:
        """Return the cluster as known now. Does not block."""
        return self._cache.cluster

    @property
    def cache(self) -> MetadataCache:
        """Return the cluster with epochs and topic ids. Does not block."""
        return self._cache

    @property
    def update_version(self) -> int:
        """The number of changes of the view: bootstraps and updates."""
        with self._lock:
            return self._update_version

    @property
    def last_successful_refresh_ms(self) -> int:
        """The time of the last full update, NEVER_MS before the first."""
        with self._lock:
            return self._schedule.last_successful_refresh_ms

    @property
    def is_closed(self) -> bool:
        with self._lock:
            return self._is_closed

    @property
    def connection_failure(self) -> str | None:
        """The reason why the last connection was lost, for the text of a timeout. None after the next metadata."""
        return self._connection_failure

    @property
    def was_refused(self) -> bool:
        """Whether a node ever refused this client. The next connection would show the same certificate or password."""
        return self._was_refused

    def node_failure(self, node_id: str) -> str | None:
        """Return why the last attempt to connect to this node failed; None if it did not. Metadata of other nodes does
        not end it.
        """
        return self._node_failures.get(node_id)

    @property
    def node_failures(self) -> Mapping[str, str]:
        """By the id of each node that cannot be connected to: why."""
        return self._node_failures.copy()

    def note_connection_failure(self, node_id: str, reason: str, *, is_nonsense: bool = False) -> None:
        """`is_nonsense`: what the node sent is not the Kafka protocol."""
        self._connection_failure = self._node_failures[node_id] = reason
        self._is_nonsense = is_nonsense

    def note_reachable(self, node_id: str) -> None:
        """The last attempt to connect to the node did not fail."""
        self._node_failures.pop(node_id, None)

    def no_broker_text(self, servers: Iterable[tuple[str, int]], limit: str) -> str:
        """Return a text that no broker of bootstrap.servers answered within `limit`, and why. If a server sent data
        that is not the Kafka protocol, the text names it first, because the address is then right.
        """
        failure = self._connection_failure
        named = ",".join(f"{host}:{port}" for host, port in servers)
        if failure is not None and self._is_nonsense:
            return f"{failure} No broker of bootstrap.servers={named} answered {limit}."
        return (
            f"No broker of bootstrap.servers={named} answered {limit}: check the addresses, and that security.protocol"
            " fits the port." + ("" if failure is None else f" Last: {failure}")
        )

    def why_unanswered(self) -> str:
        """Return why a request to the cluster got no answer in its time, as far as it is known."""
        if self.fetch().is_bootstrap_configured:
            return self.no_broker_text(self._bootstrap_addresses, "in this time")
        failure = self._connection_failure
        return "No answer came." if failure is None else f"Last: {failure}"

    def current_leader(self, topic_partition: TopicPartition) -> LeaderAndEpoch:
        """Return the leader and its epoch. If the partition is not cached, the epoch is the last known one."""
        with self._lock:
            metadata = self._cache.partitions.get(topic_partition)
            if metadata is None:
                return LeaderAndEpoch(None, self._leader_epochs.get(topic_partition))
            leader = self._cache.nodes.get(metadata.leader_id) if metadata.leader_id is not None else None
            return LeaderAndEpoch(leader, metadata.leader_epoch)

    # ---- when to fetch ---------------------------------------------------------------------------------------------

    def update_requested(self) -> bool:
        with self._lock:
            return self._need_full_update or self._need_partial_update

    def request_update(self, reset_equivalent_backoff: bool = True) -> int:
        """Ask for a full update. Return the update version before it.

        `reset_equivalent_backoff` is False if the caller retries something. Updates that bring nothing new then come
        more and more slowly.
        """
        with self._lock:
            self._need_full_update = True
            if reset_equivalent_backoff:
                self._schedule.brought_news()
            return self._update_version

    def request_update_for_new_topics(self) -> int:
        """Ask for a partial update at once, without backoff. Return the update version before it."""
        with self._lock:
            self._schedule.at_once()
            self._need_partial_update = True
            self._request_version += 1
            return self._update_version

    def time_to_next_update(self, now_ms: int) -> int:
        """Return the ms until metadata must be fetched; 0 is now."""
        with self._lock:
            is_requested = self._need_full_update or self._need_partial_update
            return self._schedule.time_to_next_update(now_ms, is_requested)

    def new_metadata_request_and_version(self, now_ms: int) -> MetadataRequestAndVersion:
        """Return the request that is due now: only the new topics if nothing else is due, otherwise all."""
        with self._lock:
            partial = None
            if not self._need_full_update and self._schedule.time_to_expire(now_ms) > 0:
                partial = self.new_metadata_request_builder_for_new_topics()
            request = partial if partial is not None else self.new_metadata_request_builder()
            return MetadataRequestAndVersion(request, self._request_version, partial is not None)

    # ---- changes ---------------------------------------------------------------------------------------------------

    def bootstrap(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Start from `addresses` (host, port), and forget everything else."""
        with self._lock:
            self._bootstrap_addresses = tuple(addresses)
            self._need_full_update = True
            self._update_version += 1
            self._cache = MetadataCache.bootstrap(self._bootstrap_addresses)

    def rebootstrap(self) -> None:
        """Start again from the first addresses: no known node is available (KIP-899), or a broker asked (KIP-1102)."""
        # Without the lock: a log handler may send through the producer, while its own lock is held.
        log.info("Starting again from bootstrap.servers %s", self._bootstrap_addresses)
        self.bootstrap(self._bootstrap_addresses)

    def update(self, request_version: int, response: MetadataResponse, is_partial: bool, now_ms: int) -> None:
        """Handle a response. `request_version` and `is_partial` are those of `new_metadata_request_and_version`."""
        with self._lock:
            if self._is_closed:
                raise IllegalStateError("Metadata came after its close.")
            self._need_partial_update = request_version < self._request_version
            self._need_full_update = self._need_full_update and is_partial
            self._update_version += 1
            self._schedule.succeeded(is_partial, now_ms)
            self._connection_failure = self._fatal_error = None  # of before; waiting threads have their update now
            previous_id = self._cache.cluster_id
            self._cache = self.handle_metadata_response(response, is_partial, now_ms)
            cluster_id = self._cache.cluster_id
            for node_id in [each for each in self._node_failures if int(each) not in self._cache.nodes]:
                del self._node_failures[node_id]
            answered = {topic.name for topic in response.topics}  # errors of other topics were raised, or are kept
            self._invalid_topics = self._cache.invalid_topics & (answered | self._invalid_topics)
            self._unauthorized_topics = self._cache.unauthorized_topics & (answered | self._unauthorized_topics)
            followed = {known.topic for known in self._leader_epochs}
            gone = {topic for topic in followed if not self.retain_topic(topic, now_ms)}
            for known in [known for known in self._leader_epochs if known.topic in gone] if gone else ():
                del self._leader_epochs[known]
                self._lower_epochs.pop(known, None)
            self.condition.notify_all()
        if previous_id is not None and cluster_id != previous_id:
            log.info("Cluster id: %s", None if cluster_id is None else one_line(cluster_id))

    def handle_metadata_response(self, response: MetadataResponse, is_partial: bool, now_ms: int) -> MetadataCache:
        """Return the present cache changed by `response`. Called with the lock held."""
        partitions: dict[TopicPartition, PartitionMetadata] = {}
        kept: list[TopicMetadata] = []
        topic_ids: dict[str, UUID] = {}
        for topic in response.topics:
            if not self.retain_topic(topic.name, now_ms):
                continue
            kept.append(topic)
            if topic.topic_id is not None:
                topic_ids[topic.name] = topic.topic_id
            for partition in topic.partitions if topic.error_code == 0 else ():
                partitions[partition.topic_partition] = self._latest_metadata(
                    partition, response.has_reliable_leader_epochs, topic.topic_id
                )
            self._request_update_if_stale(topic)
        newer = MetadataCache(
            cluster_id=response.cluster_id,
            nodes=response.brokers,
            partitions=partitions,
            unauthorized_topics=_with_error(kept, TopicAuthorizationError),
            invalid_topics=_with_error(kept, InvalidTopicError),
            controller=response.controller,
            topic_ids=topic_ids,
        )
        if not is_partial:
            return newer
        answered = {topic.name for topic in response.topics}
        return self._cache.merge_with(newer, lambda topic: topic not in answered and self.retain_topic(topic, now_ms))

    def update_partition_leadership(
        self, leaders: Mapping[TopicPartition, LeaderIdAndEpoch], leader_nodes: Iterable[Node]
    ) -> set[TopicPartition]:
        """Apply leaders from a response other than metadata (KIP-951). Return the partitions that changed.

        A missing leader or epoch, an epoch that is not newer, a node with an unknown address and a partition that is
        not cached are ignored.
        """
        with self._lock:
            nodes = {**self._cache.nodes, **{node.id: node for node in leader_nodes}}
            changed: dict[TopicPartition, PartitionMetadata] = {}
            for topic_partition, (leader_id, epoch) in leaders.items():
                known = self._cache.partitions.get(topic_partition)
                known_epoch = self.current_leader(topic_partition).epoch
                if known is None or leader_id is None or epoch is None or leader_id not in nodes:
                    continue
                if known_epoch is None or epoch > known_epoch:
                    changed[topic_partition] = replace(known, leader_id=leader_id, leader_epoch=epoch)
                    self._leader_epochs[topic_partition] = epoch
            if changed:
                self._cache = replace(self._cache, nodes=nodes, partitions={**self._cache.partitions, **changed})
            return set(changed)

    def failed_update(self, now_ms: int) -> None:
        """A fetch failed. The next one waits longer."""
        with self._lock:
            self._schedule.failed(now_ms)

    def fatal_error(self, error: KafkaError) -> None:
        """Keep an error for the threads that wait now, or before metadata comes. It is raised once."""
        with self._lock:
            self._fatal_error = error
            self._was_refused |= isinstance(error, AuthenticationError)
            self.condition.notify_all()

    def close(self) -> None:
        """Wake the waiting threads: no update comes any more."""
        with self._lock:
            self._is_closed = True
            self.condition.notify_all()

    # ---- errors ----------------------------------------------------------------------------------------------------

    def maybe_raise_any_error(self) -> None:
        """Raise the fatal error or the error of any topic, once."""
        with self._lock:
            self._raise_once(self._unauthorized_topics, self._invalid_topics)

    def maybe_raise_error_for_topic(self, topic: str) -> None:
        """Raise the fatal error or the error of `topic`, once. Errors of other topics are for the threads that wait for
        them.
        """
        with self._lock:
            self._raise_once(self._unauthorized_topics & {topic}, self._invalid_topics & {topic})

    def maybe_raise_fatal_error(self) -> None:
        """Raise the fatal error, once. Errors of topics are kept."""
        with self._lock:
            error, self._fatal_error = self._fatal_error, None
            if error is not None:
                raise error

    def _raise_once(self, unauthorized: frozenset[str], invalid: frozenset[str]) -> None:
        self._unauthorized_topics -= unauthorized
        self._invalid_topics -= invalid
        self.maybe_raise_fatal_error()
        if unauthorized:
            names = ", ".join(sorted(unauthorized))
            raise TopicAuthorizationError(
                f"Not authorized for {names}: grant WRITE and DESCRIBE on it.", topic=min(unauthorized)
            )
        if invalid:
            raise InvalidTopicError(
                f"Topic {', '.join(map(repr, sorted(invalid)))}: {InvalidTopicError.sentence}", topic=min(invalid)
            )

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _request_update_if_stale(self, topic: TopicMetadata) -> None:
        codes = [topic.error_code] if topic.error_code else [partition.error_code for partition in topic.partitions]
        if any(code and error_for_code(code).invalid_metadata for code in codes):
            self.request_update(reset_equivalent_backoff=False)

    def _latest_metadata(
        self, metadata: PartitionMetadata, has_reliable_epochs: bool, topic_id: UUID | None
    ) -> PartitionMetadata:
        """Return `metadata`, or the cached value if its leader epoch is newer. Without a cached value a lower epoch is
        accepted: the topic may have been created again, which brokers before 2.8 do not show by an id. And keys would
        go to other partitions if this one were left out. So is the fifth lower epoch in a row: a broker that is behind
        catches up, and the cached leader may be one of before the topic was created again.
        """
        topic_partition, epoch = metadata.topic_partition, metadata.leader_epoch
        if not has_reliable_epochs or epoch is None:
            self._leader_epochs.pop(topic_partition, None)
            self._lower_epochs.pop(topic_partition, None)
            self._schedule.brought_news()
            return replace(metadata, leader_epoch=None)
        known = self._leader_epochs.get(topic_partition)
        is_another_topic = topic_id is not None and topic_id != self._cache.topic_ids.get(topic_partition.topic)
        cached = self._cache.partitions.get(topic_partition)
        if known is not None and cached is not None and epoch < known and not is_another_topic:
            self._lower_epochs[topic_partition] = lower = self._lower_epochs.get(topic_partition, 0) + 1
            if lower < _MOST_LOWER_EPOCHS:
                return cached
        self._lower_epochs.pop(topic_partition, None)
        self._leader_epochs[topic_partition] = epoch
        if epoch != known or is_another_topic:
            self._schedule.brought_news()
        return metadata


def _with_error(topics: Iterable[TopicMetadata], error_class: type[KafkaError]) -> frozenset[str]:
    return frozenset(topic.name for topic in topics if topic.error_code == error_class.error_code)


class RefreshSchedule:
    """The pause after a fetch grows while fetches fail, and while they succeed but bring nothing new
    (KIP-580, KAFKA-15868).

    Times in ms. The random pause is chosen once, when a fetch ends, so that two calls return the same.
    """

    def __init__(self, backoff_ms: int, backoff_max_ms: int, expire_ms: int, rng: random.Random) -> None:
        self.expire_ms = expire_ms
        self.last_refresh_ms = NEVER_MS
        self.last_successful_refresh_ms = NEVER_MS
        self._backoff = ExponentialBackoff.doubling(backoff_ms, backoff_max_ms, rng)
        self._failures = 0
        self._failure_pause_ms = self._backoff.backoff_ms(0)
        self._equivalent_responses = 0
        self._equivalent_pause_ms = 0

    def time_to_expire(self, now_ms: int) -> int:
        """Return the ms until the metadata is too old; 0 if it is."""
        return max(self.last_successful_refresh_ms + self.expire_ms - now_ms, 0)

    def time_to_allow_update(self, now_ms: int) -> int:
        """Return the rest of the pause since the last fetch."""
        if self.last_successful_refresh_ms + self.expire_ms <= now_ms:
            self.brought_news()  # a refresh only for age is not a retry, so its pause does not grow
        pause_ms = max(self._failure_pause_ms, self._equivalent_pause_ms)
        left_ms = self.last_refresh_ms + pause_ms - now_ms
        return left_ms if left_ms > 0 else 0

    def time_to_next_update(self, now_ms: int, is_requested: bool) -> int:
        """Return the ms until the next fetch: one is requested or metadata is too old, and the pause is over."""
        pause_ms = self.time_to_allow_update(now_ms)
        if is_requested:
            return pause_ms
        age_ms = self.last_successful_refresh_ms + self.expire_ms - now_ms
        return age_ms if age_ms > pause_ms else pause_ms

    def at_once(self) -> None:
        """Skip the pause before the next fetch."""
        self.last_refresh_ms = NEVER_MS
        self.brought_news()

    def succeeded(self, is_partial: bool, now_ms: int) -> None:
        """A fetch succeeded. It brought nothing new, unless `brought_news` follows."""
        self.last_refresh_ms = now_ms
        if not is_partial:
            self.last_successful_refresh_ms = now_ms
        self._failures = 0
        self._failure_pause_ms = self._backoff.backoff_ms(0)
        self._equivalent_pause_ms = self._backoff.backoff_ms(self._equivalent_responses)
        self._equivalent_responses += 1

    def failed(self, now_ms: int) -> None:
        """A fetch failed."""
        self.last_refresh_ms = now_ms
        self._failure_pause_ms = self._backoff.backoff_ms(self._failures)
        self._failures += 1
        self.brought_news()

    def brought_news(self) -> None:
        """Something is new, or a new topic is needed: the growing pause starts again."""
        self._equivalent_responses = 0
        self._equivalent_pause_ms = 0
