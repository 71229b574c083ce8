"""The order of the checks: what is gathered when, and what cannot be checked because something else failed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.errors import ConfigError, KafkaError
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.doctor import brokers, registry, topics, transactions
from spark_kafka_sink.doctor.connections import Connections
from spark_kafka_sink.doctor.findings import Area, Finding, not_checked, ok, problem
from spark_kafka_sink.doctor.topics import Creation, Topic
from spark_kafka_sink.network.tls import transport_factory
from spark_kafka_sink.sink.exactly_once.cluster import (
    DECISION_PARTITIONS,
    DECISION_TOPIC_CONFIGS,
    MOST_REPLICAS,
    connect,
)
from spark_kafka_sink.sink.exactly_once.messages import driver_id
from spark_kafka_sink.sink.exactly_once.session import stream_prefix
from spark_kafka_sink.sink.options import DEAD_LETTER_TOPIC_OPTION, PASSED_OVER, SinkConfig

CHECKPOINT: Final = "checkpointlocation"
_CHECKPOINT_OF_JOBS: Final = "checkpoint.location"
_SPARKS_OWN: Final = frozenset({CHECKPOINT, "path", "queryname"})
"""Options that Spark reads, in lower case."""
_OF_JOBS: Final = frozenset({"interface", "order.by", "trigger", _CHECKPOINT_OF_JOBS})
_PREFIXES_OF_JOBS: Final = ("source.", "record.", "spark.")
"""Settings of jobs/stream_to_kafka.py, whose files have the options of the sink beside them."""
Place = Callable[[str | None], str]


class Given(NamedTuple):
    """The options by their readers."""

    sink: dict[str, str]
    stream: dict[str, str]
    """For the prefix of a stream: the checkpoint location and the query's name, by Spark's names in lower case."""
    others: list[str]
    """Names that are not the sink's."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Given:
        sink: dict[str, str] = {}
        stream: dict[str, str] = {}
        others: list[str] = []
        for name, value in options.items():
            key = name.lower()
            if key in _SPARKS_OWN:
                stream[key] = value
            elif key in _OF_JOBS or key.startswith(_PREFIXES_OF_JOBS):
                others.append(name)
                if key == _CHECKPOINT_OF_JOBS:
                    stream.setdefault(CHECKPOINT, value)
            else:
                sink[name] = value
        return cls(sink, stream, others)


class Examination:
    """One run. `place` says where an option was set. Each step takes at most `limit_ms`."""

    def __init__(
        self, options: Mapping[str, str], place: Place, limit_ms: int, clock: Clock, rng: random.Random
    ) -> None:
        self._given = Given.of(options)
        self._place = place
        self._limit_ms = limit_ms
        self._clock = clock
        self._rng = rng

    def run(self) -> list[Finding]:
        try:
            config = SinkConfig.from_options(self._given.sink)
        except ConfigError as error:
            what = error.setting or "options"
            place = self._place(error.setting)
            found = [problem("option-wrong", Area.OPTIONS, what, one_line(str(error)), place=place)]
            return found + _unchecked("the options cannot be used", Area.BROKERS, Area.TOPICS, Area.PERMISSIONS)
        found = [ok(Area.OPTIONS, "understood", config.describe())]
        if ignored := sorted(PASSED_OVER[key.lower()] for key in self._given.sink if key.lower() in PASSED_OVER):
            found.append(ok(Area.OPTIONS, "ignored in a write", ", ".join(ignored)))
        if self._given.others:
            found.append(not_checked(Area.OPTIONS, "of a job or of Spark", ", ".join(self._given.others)))
        found += self._kafka(config)
        return found + self._registry(config)

    # ---- Kafka -----------------------------------------------------------------------------------------------------

    def _kafka(self, config: SinkConfig) -> list[Finding]:
        name = "tls-files-wrong"
        try:
            transport_factory(config.producer)
            name = "login-settings-wrong"
            connections = self._connections(config)
        except ConfigError as error:
            found = [problem(name, Area.BROKERS, "settings", one_line(str(error)))]
            return found + _unchecked("no connection can be made", Area.TOPICS, Area.PERMISSIONS)
        with connections:
            cluster = brokers.gather(
                config.producer, connections, lambda: self._connections(config, has_login=False), self._limit_ms
            )
            found = brokers.judge(cluster, config.producer, self._clock.wall_ms())
            if not cluster.ready:
                areas = (Area.TOPICS, Area.PERMISSIONS, *_further(config), Area.CLOCK)
                return found + _unchecked("no broker is reached", *areas)
            answer = brokers.time_of_brokers(connections, cluster.ready[0], self._limit_ms)
            now_ms = self._clock.wall_ms()
            ahead_ms = now_ms - answer if isinstance(answer, int) else 0
            old = brokers.judge_releases(cluster.ready, _options_with_needs(config))
            found += old + self._topics(config, connections, cluster, ahead_ms, is_too_old=bool(old))
            return [*found, brokers.judge_clock(answer, now_ms)]

    def _connections(self, config: SinkConfig, *, has_login: bool = True) -> Connections:
        return Connections(config.producer, self._clock, self._rng, has_login=has_login)

    def _topics(
        self,
        config: SinkConfig,
        connections: Connections,
        cluster: brokers.Cluster,
        ahead_ms: int,
        *,
        is_too_old: bool,
    ) -> list[Finding]:
        """`ahead_ms`: how far this machine's clock is ahead of the brokers', as far as they say."""
        contact = cluster.ready[0]
        creations = _creations(config, len(cluster.nodes))
        broker = topics.broker_configs(connections, contact, (topics.AUTO_CREATE,), self._limit_ms)
        try:
            seen = topics.gather(connections, contact, creations, self._limit_ms)
        except KafkaError as error:
            return _unchecked(one_line(str(error)), Area.TOPICS, Area.PERMISSIONS, *_further(config))
        found: list[Finding] = []
        for option, name in _data_topics(config):
            found += topics.judge_topic(seen[name], option, config.producer, creations[name], broker)
            found += topics.judge_permissions(seen[name], option, ("WRITE",))
        if config.topic is None:
            why = "each row names its own: give --option topic=NAME to check one of them"
            found.append(not_checked(Area.TOPICS, "topic", why))
        if not config.is_exactly_once:
            if config.producer.enable_idempotence:
                error_ = topics.producer_id_error(connections, contact, self._clock, self._limit_ms)
                found.append(topics.judge_producer_id(error_))
            return found
        if is_too_old:
            return found + _unchecked("the brokers are too old for it", Area.EXACTLY_ONCE)
        return found + self._exactly_once(config, seen, len(cluster.nodes), ahead_ms)

    def _exactly_once(self, config: SinkConfig, seen: Mapping[str, Topic], nodes: int, ahead_ms: int) -> list[Finding]:
        prefix = self._prefix(config)
        counts = {name: len(topic.partitions) for name, topic in seen.items() if topic.partitions}
        try:
            with connect(config.producer) as client:
                answers = transactions.gather(
                    client,
                    prefix,
                    None if prefix is None else driver_id(prefix),
                    config.producer.transaction_timeout_ms,
                    counts,
                    config.decision_topic,
                    nodes,
                    self._limit_ms,
                )
        except KafkaError as error:
            return _unchecked(one_line(str(error)), Area.EXACTLY_ONCE)
        decisions = seen[config.decision_topic]
        found = topics.judge_decision_topic(decisions, nodes, is_prefix_known=answers.is_prefix_known)
        found += topics.judge_permissions(decisions, "decision.topic", ("READ", "WRITE", "DESCRIBE_CONFIGS"))
        return found + transactions.judge(answers, self._clock.wall_ms() - ahead_ms)

    def _prefix(self, config: SinkConfig) -> str | None:
        try:
            return stream_prefix(config, self._given.stream)
        except ConfigError:
            return None

    # ---- the registry ----------------------------------------------------------------------------------------------

    def _registry(self, config: SinkConfig) -> list[Finding]:
        if config.formats is None or config.formats.registry is None:
            return []
        return registry.judge(registry.gather(config.formats, config.topic, self._limit_ms))


def _data_topics(config: SinkConfig) -> list[tuple[str, str]]:
    """Return the options that name topics of rows, with the topics."""
    pairs = (("topic", config.topic), (DEAD_LETTER_TOPIC_OPTION, config.dead_letter_topic))
    return [(option, name) for option, name in pairs if name is not None]


def _creations(config: SinkConfig, nodes: int) -> dict[str, Creation | None]:
    """Return each topic, with how the sink would create it if it is missing."""
    found: dict[str, Creation | None] = {name: None for _, name in _data_topics(config)}
    if config.topic is not None and (wanted := config.requested_topic) is not None:
        found[config.topic] = Creation(wanted.partitions or -1, wanted.replication_factor or -1, dict(wanted.configs))
    if config.is_exactly_once:
        replicas = min(MOST_REPLICAS, nodes)
        found[config.decision_topic] = Creation(DECISION_PARTITIONS, replicas, DECISION_TOPIC_CONFIGS)
    return found


def _options_with_needs(config: SinkConfig) -> list[str]:
    """Return the keys of brokers.NEEDS_OF_OPTIONS that the options have."""
    used = {
        "delivery.guarantee=exactly-once": config.is_exactly_once,
        "kafka.compression.type=zstd": config.producer.compression_type == "zstd",
        "topic.create=if-missing": config.requested_topic is not None,
    }
    return [option for option, is_used in used.items() if is_used]


def _further(config: SinkConfig) -> Sequence[Area]:
    return (Area.EXACTLY_ONCE,) if config.is_exactly_once else ()


def _unchecked(why: str, *areas: Area) -> list[Finding]:
    return [not_checked(area, "not checked", why) for area in areas]
