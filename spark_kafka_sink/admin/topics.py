"""Topics by name: their metadata, whether one is gone, and how one is created and asked for its settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from spark_kafka_sink.admin.request_client import RequestClient, Timer
from spark_kafka_sink.client.metadata import Metadata
from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.cluster import Cluster, Node, TopicPartition
from spark_kafka_sink.common.errors import (
    InvalidTopicError,
    KafkaError,
    KafkaTimeoutError,
    ProtocolError,
    TopicExistsError,
    UnknownTopicOrPartitionError,
    error_for_code,
)
from spark_kafka_sink.protocol.metadata import CreateTopicRequest, DescribeTopicConfigsRequest, MetadataRequest

ABSENCE_LIMIT_MS: Final = 10_000
"""A node that has just started may not know all topics yet."""
_NOT_CONTROLLER: Final = 41
_THROTTLING_QUOTA_EXCEEDED: Final = 89
"""Nothing was created. The client waits as long as the broker says, and retries (KIP-599)."""
_BACKOFF_MS: Final = 100
_MOST_MS: Final = 2**31 - 1
"""The longest time that a request can give a broker; max.block.ms may be longer."""


class TopicsMetadata(Metadata):
    """Metadata of the topics that were added; without topics, only of the brokers."""

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
        """Add these topics. New ones are requested at once. From now on only errors of these topics are raised. Errors
        of others belong to other calls on this client, and each update brings them again.
        """
        with self._lock:
            self._asked_for = frozenset(topics)
            new = self._asked_for - self._topics
            if new:
                self._topics |= new
                self._new_topics |= new
                self.request_update_for_new_topics()

    def remove_topic(self, topic: str) -> None:
        """Ask no more for this topic, and raise none of its errors."""
        with self._lock:
            self._topics -= {topic}
            self._asked_for -= {topic}
            self._new_topics -= {topic}

    def maybe_raise_any_error(self) -> None:
        with self._lock:
            unauthorized, invalid = self._unauthorized_topics, self._invalid_topics
            self._unauthorized_topics = self._invalid_topics = frozenset()  # a retry gets a new answer
            self._raise_once(unauthorized & self._asked_for, invalid & self._asked_for)

    def retain_topic(self, topic: str, now_ms: int) -> bool:  # noqa: ARG002
        return topic in self._topics

    def new_metadata_request_builder(self) -> MetadataRequest:
        return MetadataRequest(topics=tuple(sorted(self._topics)), allow_auto_topic_creation=False)

    def new_metadata_request_builder_for_new_topics(self) -> MetadataRequest | None:
        new = self._new_topics - self.fetch().topics
        return MetadataRequest(topics=tuple(sorted(new)), allow_auto_topic_creation=False) if new else None


class TopicAbsence:
    """Measures how long metadata has not included a topic or a partition. Used by one call that waits for it."""

    def __init__(self, metadata: Metadata, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._since_ms: dict[str | TopicPartition, int] = {}

    def check_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """As `check`, also for a topic that was created again with fewer partitions."""
        now_ms, cluster = self._clock.now_ms(), self._metadata.fetch()
        asked = [*partitions]
        counts = {topic: len(cluster.partitions_for_topic(topic)) for topic in {each.topic for each in asked}}
        self.check(counts)
        for each in asked:
            if not 0 < counts[each.topic] <= each.partition:
                self._since_ms.pop(each, None)
            elif now_ms - self._since_ms.setdefault(each, now_ms) >= ABSENCE_LIMIT_MS:
                raise lacks_partition(each, counts[each.topic])

    def check(self, topics: Iterable[str]) -> None:
        """Raise UnknownTopicOrPartitionError if no metadata response has included the topic for 10 s."""
        now_ms, cluster = self._clock.now_ms(), self._metadata.fetch()
        for topic in topics:
            if cluster.is_bootstrap_configured or cluster.partitions_for_topic(topic):  # otherwise no node has answered
                self._since_ms.pop(topic, None)
            elif now_ms - self._since_ms.setdefault(topic, now_ms) >= ABSENCE_LIMIT_MS:
                raise UnknownTopicOrPartitionError(
                    f"Topic {topic!r} is not in the cluster any more: no node has named it for {ABSENCE_LIMIT_MS} ms.",
                    topic=topic,
                )


def lacks_partition(place: TopicPartition, count: int) -> KafkaError:
    """Return the error for a partition that its topic does not have: `count` is the number of those that it has."""
    absent = UnknownTopicOrPartitionError(f"The topic has {count} partition{'' if count == 1 else 's'}.")
    return absent.at(topic_partition=place)


class TopicCreation:
    """Describes and creates topics on `client`, which must share `metadata`."""

    def __init__(self, client: RequestClient, metadata: TopicsMetadata, clock: Clock) -> None:
        self._client = client
        self._metadata = metadata
        self._clock = clock

    @property
    def cluster(self) -> Cluster:
        """Return the last known nodes and topics. Sends nothing."""
        return self._metadata.fetch()

    def wait_for(self, topic: str, timer: Timer, least: int = 1) -> int:
        """Return the topic's number of partitions, once there are at least so many; else what it is when the timer has
        expired, 0 without the topic. Creates nothing. Raises KafkaTimeoutError if no node answered.
        """
        found = self.count(topic, timer)
        while found < least and not timer.is_expired:
            self._clock.sleep_ms(min(_BACKOFF_MS, timer.remaining_ms))
            self._client.await_metadata_update(timer)
            found = len(self._metadata.fetch().partitions_for_topic(topic))
            timer.update()
        return found

    def configs(self, topic: str, names: Sequence[str], timer: Timer) -> dict[str, str | None]:
        """Return the settings of the topic by name, without settings that the node does not know.

        Raises TopicAuthorizationError without the DESCRIBE_CONFIGS permission, other errors of the node, and
        KafkaTimeoutError.
        """
        request = DescribeTopicConfigsRequest(topic, tuple(names))
        error: KafkaError = UnknownTopicOrPartitionError("No node could be asked.")
        while not timer.is_expired:
            answer = self._ask_for_configs(request, timer)
            if not isinstance(answer, KafkaError):
                return answer
            if not answer.retriable:
                raise answer
            error = answer
            self._clock.sleep_ms(min(_BACKOFF_MS, timer.remaining_ms))
            timer.update()
        raise KafkaTimeoutError(
            f"The settings of topic {topic} were not read within {timer.timeout_ms} ms. {error}", topic=topic
        )

    def count(self, topic: str, timer: Timer) -> int:
        """Return the topic's number of partitions, 0 if the cluster does not have it. Raises KafkaTimeoutError,
        InvalidTopicError, and ProtocolError for a name that no request can contain.
        """
        self._metadata.add_topics([topic])
        try:
            has_come = self._client.await_metadata_update(timer)
        except (InvalidTopicError, ProtocolError):
            self.forget(topic)  # else each later request would fail, or be answered with its error
            raise
        if not has_come:
            why = self._client.why_unanswered()
            raise KafkaTimeoutError(f"Topic {topic} was not looked up within {timer.timeout_ms} ms. {why}", topic=topic)
        return len(self._metadata.fetch().partitions_for_topic(topic))

    def look_up(self, topics: Iterable[str], timer: Timer) -> None:
        """Ask for the topics that `cluster` does not have, all at once. Raises TopicAuthorizationError and
        KafkaTimeoutError.
        """
        missing = [topic for topic in topics if not self.cluster.partitions_for_topic(topic)]
        if not missing:
            return
        self._metadata.add_topics(missing)
        if not self._client.await_metadata_update(timer):
            why = self._client.why_unanswered()
            raise KafkaTimeoutError(f"{len(missing)} topics were not looked up within {timer.timeout_ms} ms. {why}")

    def forget(self, topic: str) -> None:
        """Ask no more for this topic. The client asks for every other one that it was ever asked about."""
        self._metadata.remove_topic(topic)

    def ensure(self, topic: str, partitions: int, most_replicas: int, configs: Mapping[str, str], timer: Timer) -> int:
        """Return the topic's number of partitions. Create a missing topic first, with `most_replicas` replicas or as
        many as there are brokers. All but one of them must be in sync.

        Raises TopicAuthorizationError, InvalidTopicError, other errors of the creation, and KafkaTimeoutError.
        """

        def request(limit_ms: int) -> CreateTopicRequest:
            replicas = min(most_replicas, len(self._metadata.fetch().nodes))
            in_sync = {"min.insync.replicas": str(max(1, replicas - 1))}
            return CreateTopicRequest(topic, partitions, replicas, {**in_sync, **configs}, limit_ms)

        self._ensure(topic, request, timer)
        return len(self._metadata.fetch().partitions_for_topic(topic))

    def create_missing(
        self,
        topic: str,
        partitions: int | None,
        replication_factor: int | None,
        configs: Mapping[str, str],
        timer: Timer,
    ) -> bool:
        """Create the topic if the cluster does not have it, and return whether it was created. None stands for the
        brokers' default (KIP-464, Kafka 2.4). Raises as `ensure`.
        """

        def request(limit_ms: int) -> CreateTopicRequest:
            return CreateTopicRequest(topic, partitions or -1, replication_factor or -1, configs, limit_ms)

        if self.count(topic, timer):  # from the cluster: the last known topics may include one that was deleted
            return False
        return self._ensure(topic, request, timer)

    def _ensure(self, topic: str, request: Callable[[int], CreateTopicRequest], timer: Timer) -> bool:
        """Wait until the topic is there, and create it if it is missing. `request` takes the limit in ms. Return
        whether this call has created it.
        """
        self._metadata.add_topics([topic])
        why = "No answer came."
        is_new, is_created = True, False
        while not timer.is_expired:
            if self._metadata.fetch().partitions_for_topic(topic):
                return is_created
            if is_new:
                is_new = False  # it was not requested yet
            else:
                error = self._create(request(min(timer.remaining_ms, _MOST_MS)), timer)
                if error is not None and not _may_pass(error):
                    raise error
                is_created = is_created or error is None
                why = f"Last: {error}" if error is not None else "It was created and is not shown yet."
                self._clock.sleep_ms(min(_BACKOFF_MS, timer.remaining_ms))
            if not self._client.await_metadata_update(timer):
                has_failed = self._metadata.connection_failure is not None
                why = self._client.why_unanswered() if has_failed else why + self._client.throttles()
            timer.update()
        raise KafkaTimeoutError(
            f"Topic {topic} was neither found nor created within {timer.timeout_ms} ms. {why}", topic=topic
        )

    def _ask_for_configs(
        self, request: DescribeTopicConfigsRequest, timer: Timer
    ) -> dict[str, str | None] | KafkaError:
        node = self._client.least_loaded_node()
        body = self._ask(node, request, timer)
        if isinstance(body, KafkaError):
            return body
        assert node is not None
        answer = next((each for each in body.results if each.resource_name == request.topic), None)
        if answer is None:
            return UnknownTopicOrPartitionError(f"Node {node} sent a response without the topic.", node=node.id_string)
        if code := int(answer.error_code):
            return error_for_code(code, "", "DescribeConfigs", node.id_string).at(topic=request.topic)
        return {str(config.name): None if config.value is None else str(config.value) for config in answer.configs}

    def _create(self, request: CreateTopicRequest, timer: Timer) -> KafkaError | None:
        # With ZooKeeper only the controller creates topics. With KRaft brokers forward, and name any broker as
        # controller.
        node = self._metadata.fetch().controller or self._client.least_loaded_node()
        body = self._ask(node, request, timer)
        if isinstance(body, KafkaError):
            return body
        assert node is not None
        answer = next((each for each in body.topics if each.name == request.topic), None)
        if answer is None:
            return UnknownTopicOrPartitionError(
                f"Node {node} was asked to create the topic, and its response does not mention it.", node=node.id_string
            )
        if code := int(answer.error_code):
            return error_for_code(code, answer.error_message or "", "CreateTopics", node.id_string).at(
                topic=request.topic
            )
        return None

    def _ask(
        self, node: Node | None, request: DescribeTopicConfigsRequest | CreateTopicRequest, timer: Timer
    ) -> Any | KafkaError:
        """Return the body of the node's response, or the error if the node did not answer."""
        if node is None:
            return UnknownTopicOrPartitionError(f"No node could be asked.{self._client.throttles()}")
        future = self._client.send(node, request)
        if not self._client.poll_until(future, timer):
            self._client.disconnect_async(node)
            return KafkaTimeoutError(f"Node {node} did not answer.", node=node.id_string)
        return future.error if future.failed() else future.value().body


def _may_pass(error: KafkaError) -> bool:
    passes = error.retriable or isinstance(error, TopicExistsError)
    return passes or error.error_code in {_NOT_CONTROLLER, _THROTTLING_QUOTA_EXCEEDED}
