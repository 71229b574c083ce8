"""Topics: whether they are there, led and in sync, what they take, and what this user may do with them.

`gather` asks one broker; `judge_topic` and `judge_permissions` decide. Permissions are read from the broker's own list
of what this user may do (KIP-430): no record is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spark_kafka_sink.common.clock import Clock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    AuthorizationError,
    InvalidTopicError,
    KafkaError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
    error_for_code,
)
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.doctor.connections import Connections, Contact
from spark_kafka_sink.doctor.findings import Area, Finding, not_checked, ok, problem
from spark_kafka_sink.protocol.metadata import (
    CreateTopicRequest,
    DescribeBrokerConfigsRequest,
    DescribeTopicConfigsRequest,
    PermissionsRequest,
)
from spark_kafka_sink.protocol.transactions import InitProducerIdRequest
from spark_kafka_sink.protocol.versions import Message

LABELS: Final = {
    "topic": "topic",
    "decision.topic": "decision topic",
    "errors.deadletterqueue.topic.name": "dead letter topic",
}
"""Option → what the table calls its topic."""
AUTO_CREATE: Final = "auto.create.topics.enable"
_IN_SYNC: Final = "min.insync.replicas"
_MAX_BYTES: Final = "max.message.bytes"
_COMPRESSION: Final = "compression.type"
_POLICY: Final = "cleanup.policy"
_FORMAT: Final = "message.format.version"
_UNCLEAN: Final = "unclean.leader.election.enable"
_OF_TOPICS: Final = (_IN_SYNC, _MAX_BYTES, _COMPRESSION, _POLICY, _FORMAT, _UNCLEAN)
_OPERATIONS: Final = {"READ": 3, "WRITE": 4, "DESCRIBE": 8, "DESCRIBE_CONFIGS": 10}
"""Numbers of org.apache.kafka.common.acl.AclOperation. An answer has the bit of each operation that is allowed."""
_NOT_GIVEN: Final = frozenset({-(2**31), 0})
_MOST_NAMED: Final = 10
_BACKOFF_MS: Final = 100
_NOT_TO_CREATE: Final = "it does not exist, and this user may not create it (asked; nothing was created)"


@dataclass(frozen=True, slots=True)
class Partition:
    index: int
    leader: int | None
    replicas: int
    in_sync: int


@dataclass(frozen=True, slots=True)
class Topic:
    """What a broker says about a topic."""

    name: str
    error: KafkaError | None = None
    partitions: tuple[Partition, ...] = ()
    operations: frozenset[str] | None = None
    """What this user may do; None if the broker does not say."""
    configs: Mapping[str, str] = field(default_factory=dict)
    configs_error: KafkaError | None = None
    creation_error: KafkaError | None = None
    """Why a missing topic could not be created; None also if that was not asked for."""

    @property
    def is_missing(self) -> bool:
        return isinstance(self.error, UnknownTopicOrPartitionError)


@dataclass(frozen=True, slots=True)
class Creation:
    """How the sink would create a missing topic; -1 for the brokers' default."""

    partitions: int
    replicas: int
    configs: Mapping[str, str]


# ---- facts -----------------------------------------------------------------------------------------------------------


def gather(
    connections: Connections, contact: Contact, creations: Mapping[str, Creation | None], limit_ms: int
) -> dict[str, Topic]:
    """Describe topics: name → how the sink would create it, None if it would not. Raises KafkaError if the broker does
    not answer.
    """
    answer = connections.ask(contact, PermissionsRequest(tuple(creations)), limit_ms)
    by_name = {str(each.name): each for each in answer.topics}
    return {
        name: _topic(connections, contact, name, by_name.get(name), creation, limit_ms)
        for name, creation in creations.items()
    }


def _topic(
    connections: Connections,
    contact: Contact,
    name: str,
    answer: Message | None,
    creation: Creation | None,
    limit_ms: int,
) -> Topic:
    if answer is None:
        return Topic(name, UnknownTopicOrPartitionError("The broker's answer does not mention it."))
    if code := int(answer.error_code):
        error = error_for_code(code, api="Metadata")
        is_missing = isinstance(error, UnknownTopicOrPartitionError)
        refusal = _creation_error(connections, contact, name, creation, limit_ms) if creation and is_missing else None
        return Topic(name, error, creation_error=refusal)
    configs: dict[str, str] = {}
    configs_error = None
    try:
        configs = _configs(connections, contact, DescribeTopicConfigsRequest(name, _OF_TOPICS), limit_ms)
    except KafkaError as refused:
        configs_error = refused
    return Topic(
        name,
        partitions=tuple(
            Partition(
                int(each.partition_index),
                int(each.leader_id) if int(each.leader_id) >= 0 else None,
                len(each.replica_nodes),
                len(each.isr_nodes),
            )
            for each in sorted(answer.partitions, key=lambda each: each.partition_index)
        ),
        operations=_operations(getattr(answer, "topic_authorized_operations", -(2**31))),
        configs=configs,
        configs_error=configs_error,
    )


def _operations(bits: Any) -> frozenset[str] | None:
    found = int(bits)
    if found in _NOT_GIVEN:
        return None
    return frozenset(name for name, number in _OPERATIONS.items() if found >> number & 1)


def _configs(connections: Connections, contact: Contact, request: Any, limit_ms: int) -> dict[str, str]:
    answer = connections.ask(contact, request, limit_ms)
    for result in answer.results:
        if code := int(result.error_code):
            raise error_for_code(code, one_line(str(result.error_message or "")), "DescribeConfigs")
        return {str(each.name): str(each.value) for each in result.configs if each.value is not None}
    return {}


def _creation_error(
    connections: Connections, contact: Contact, name: str, creation: Creation, limit_ms: int
) -> KafkaError | None:
    """Ask whether the broker would create the topic, without creating it."""
    request = CreateTopicRequest(
        name, creation.partitions, creation.replicas, creation.configs, limit_ms, validate_only=True
    )
    try:
        answer = connections.ask(contact, request, limit_ms)
    except KafkaError as error:
        return error
    code = next((int(each.error_code) for each in answer.topics), 0)
    message = next((each.error_message or "" for each in answer.topics), "")
    return error_for_code(code, message, "CreateTopics") if code else None


def broker_configs(
    connections: Connections, contact: Contact, names: Sequence[str], limit_ms: int
) -> dict[str, str] | KafkaError:
    """Return settings of the broker by name, or why they are not known."""
    assert contact.node_id is not None
    try:
        return _configs(connections, contact, DescribeBrokerConfigsRequest(contact.node_id, tuple(names)), limit_ms)
    except KafkaError as error:
        return error


def producer_id_error(connections: Connections, contact: Contact, clock: Clock, limit_ms: int) -> KafkaError | None:
    """Ask for a producer id, as each idempotent producer does first. Return the refusal. A broker that has just started
    has no ids yet (COORDINATOR_LOAD_IN_PROGRESS), and is asked again.
    """
    deadline_ms = clock.now_ms() + limit_ms
    while True:
        try:
            answer = connections.ask(contact, InitProducerIdRequest(), max(1, deadline_ms - clock.now_ms()))
        except KafkaError as error:
            return error
        code = int(answer.error_code)
        refusal = error_for_code(code, api="InitProducerId") if code else None
        if refusal is None or not refusal.retriable or clock.now_ms() + _BACKOFF_MS >= deadline_ms:
            return refusal
        clock.sleep_ms(_BACKOFF_MS)


# ---- decisions -------------------------------------------------------------------------------------------------------


def judge_topic(
    topic: Topic,
    option: str,
    config: ProducerConfig,
    creation: Creation | None,
    broker: Mapping[str, str] | KafkaError,
) -> list[Finding]:
    """Return findings on a topic that rows go to. `option` names the option that has its name. `broker`: the settings
    of a broker.
    """
    area, what, quoted = Area.TOPICS, LABELS[option], shlex.quote(topic.name)
    if (refused := _refused(topic, area, what, "Write")) is not None:
        return [refused]
    if topic.is_missing:
        return [_missing(topic, what, option, creation, broker)]
    if topic.error is not None:
        return [not_checked(area, what, _of(topic, one_line(str(topic.error))))]
    replicas = sorted({each.replicas for each in topic.partitions})
    found = [ok(area, what, _of(topic, f"{len(topic.partitions)} partitions, {_replicas(replicas)}"))]
    found += judge_partitions(topic, what, needs_all=config.acks == -1)
    if topic.configs_error is not None:
        why = _of(topic, f"its settings were not read (DESCRIBE_CONFIGS on it): {one_line(str(topic.configs_error))}")
        return [*found, not_checked(area, what, why)]
    return found + _limits(topic, what, quoted, config)


def _refused(topic: Topic, area: Area, what: str, needed: str) -> Finding | None:
    """Return the problem of a topic that the broker does not describe, but for a missing one. `needed`: the operations
    that the sink needs, which include DESCRIBE, as arguments of kafka-acls.sh.
    """
    if isinstance(topic.error, InvalidTopicError):
        return problem("topic-name-invalid", area, what, _of(topic, "brokers refuse this name"))
    if isinstance(topic.error, TopicAuthorizationError):
        seen = _of(topic, "this user may not see it, or it does not exist")
        quoted = shlex.quote(topic.name)
        return problem("describe-denied", Area.PERMISSIONS, what, seen, topic=quoted, operations=needed)
    return None


def _of(topic: Topic, text: str) -> str:
    return f"{one_line(topic.name)}: {text}"


def _missing(
    topic: Topic, what: str, option: str, creation: Creation | None, broker: Mapping[str, str] | KafkaError
) -> Finding:
    quoted = shlex.quote(topic.name)
    if creation is not None:
        if topic.creation_error is None:
            seen = _of(topic, "it does not exist, and the sink may create it (asked; nothing was created)")
            return ok(Area.TOPICS, what, seen)
        if isinstance(topic.creation_error, AuthorizationError):
            seen = _of(topic, _NOT_TO_CREATE)
            return problem("create-denied", Area.PERMISSIONS, what, seen, topic=quoted)
        text = _of(topic, one_line(str(topic.creation_error)))
        return problem("create-refused", Area.TOPICS, what, text)
    if isinstance(broker, KafkaError) or AUTO_CREATE not in broker:
        text = _of(topic, f"it does not exist; whether the brokers create it ({AUTO_CREATE}) this user may not see")
        return problem("topic-missing", Area.TOPICS, what, text, topic=quoted, option=option)
    if broker[AUTO_CREATE].lower() == "true":
        text = _of(topic, f"it does not exist; the brokers have {AUTO_CREATE}=true")
        return problem("topic-would-be-created", Area.TOPICS, what, text, topic=quoted, option=option)
    text = _of(topic, f"it does not exist; the brokers have {AUTO_CREATE}=false")
    return problem("topic-missing", Area.TOPICS, what, text, topic=quoted, option=option)


def judge_partitions(topic: Topic, what: str, *, needs_all: bool) -> list[Finding]:
    """Return problems of leaders and replicas. `needs_all`: writes wait for all replicas in sync (acks=all)."""
    area, found = Area.TOPICS, []
    if leaderless := [each.index for each in topic.partitions if each.leader is None]:
        found.append(problem("partition-without-leader", area, what, _of(topic, _some(leaderless))))
    text = topic.configs.get(_IN_SYNC, "")
    needed = int(text) if text.isdecimal() and needs_all else 0
    if few := [each.index for each in topic.partitions if each.leader is not None and each.in_sync < needed]:
        seen = _of(topic, f"{_some(few)}: fewer replicas in sync than {_IN_SYNC}={needed}")
        found.append(problem("too-few-replicas-in-sync", area, what, seen, topic=shlex.quote(topic.name)))
    return found


def _limits(topic: Topic, what: str, quoted: str, config: ProducerConfig) -> list[Finding]:
    area, found = Area.TOPICS, []
    most = topic.configs.get(_MAX_BYTES, "")
    if most.isdecimal() and int(most) < config.max_request_size:
        seen = _of(topic, f"its {_MAX_BYTES}={most}, and kafka.max.request.size={config.max_request_size}")
        found.append(
            problem("topic-takes-smaller-records", area, what, seen, topic=quoted, bytes=config.max_request_size)
        )
    codec = topic.configs.get(_COMPRESSION, "producer")
    if codec not in {"producer", config.compression_type, _SAME.get(config.compression_type)}:
        seen = _of(topic, f"its {_COMPRESSION}={codec}, and kafka.{_COMPRESSION}={config.compression_type}")
        found.append(problem("topic-compresses-again", area, what, seen, codec=_OF_TOPIC.get(codec, codec)))
    if "compact" in topic.configs.get(_POLICY, ""):
        seen = _of(topic, f"its {_POLICY}={topic.configs[_POLICY]}")
        found.append(problem("topic-is-compacted", area, what, seen, topic=quoted))
    if topic.configs.get(_FORMAT, "").startswith(("0.8", "0.9", "0.10")):
        seen = _of(topic, f"its {_FORMAT}={topic.configs[_FORMAT]}")
        found.append(problem("message-format-too-old", area, what, seen, topic=quoted))
    return found


_SAME: Final = {"none": "uncompressed"}
_OF_TOPIC: Final = {"uncompressed": "none"}
"""A topic says `uncompressed` where a producer says `none`."""


def judge_permissions(topic: Topic, option: str, operations: Sequence[str]) -> list[Finding]:
    """Return one finding for each operation, such as WRITE, on a topic that exists."""
    area, what = Area.PERMISSIONS, LABELS[option]
    if topic.error is not None:
        return []
    if topic.operations is None:
        return [not_checked(area, what, _of(topic, f"{', '.join(operations)}: the brokers do not say"))]
    found = []
    for operation in operations:
        if operation in topic.operations:
            found.append(ok(area, what, _of(topic, operation)))
        elif operation in _DENIED:
            name = _DENIED[operation]
            seen = _of(topic, f"{operation} is missing")
            found.append(problem(name, area, what, seen, topic=shlex.quote(topic.name)))
        else:
            seen = _of(topic, f"{operation} is missing, which is only needed to check its settings")
            found.append(not_checked(area, what, seen))
    return found


_DENIED: Final = {"WRITE": "write-denied", "READ": "read-denied"}


def judge_producer_id(error: KafkaError | None) -> Finding:
    """`error`: of `producer_id_error`."""
    what = "a producer id"
    if error is None:
        return ok(Area.PERMISSIONS, what, "given (one was drawn, as by each idempotent producer)")
    if isinstance(error, AuthorizationError):
        return problem("idempotent-write-denied", Area.PERMISSIONS, what, one_line(str(error)))
    return not_checked(Area.PERMISSIONS, what, one_line(str(error)))


def judge_decision_topic(topic: Topic, nodes: int, *, is_prefix_known: bool | None) -> list[Finding]:
    """Return findings on the topic of decisions. `nodes`: the number of brokers. `is_prefix_known`: whether a
    coordinator knows the driver of the prefix; None if that was not asked.
    """
    area, what, quoted = Area.EXACTLY_ONCE, LABELS["decision.topic"], shlex.quote(topic.name)
    if (refused := _refused(topic, area, what, "Read --operation Write")) is not None:
        return [refused]
    if topic.is_missing:
        return _missing_decisions(topic, what, quoted, is_prefix_known)
    if topic.error is not None:
        return [not_checked(area, what, _of(topic, one_line(str(topic.error))))]
    replicas = min((each.replicas for each in topic.partitions), default=0)
    found = [ok(area, what, _of(topic, f"{len(topic.partitions)} partitions, {_replicas([replicas])}"))]
    found += judge_partitions(topic, what, needs_all=True)
    if replicas == 1 and nodes >= _FEW_REPLICAS_MATTER_FROM:
        seen = _of(topic, f"one replica on {nodes} brokers")
        found.append(problem("decision-topic-with-one-replica", area, what, seen, topic=quoted))
    if topic.configs_error is not None:
        why = _of(topic, f"its cleanup.policy was not read (DESCRIBE_CONFIGS on it): {topic.configs_error}")
        return [*found, not_checked(area, what, why)]
    policy = topic.configs.get(_POLICY, "compact").strip()
    if policy != "compact":
        seen = _of(topic, f"its {_POLICY}={one_line(policy)}")
        found.append(problem("decision-topic-not-compacted", area, what, seen, topic=quoted))
    if topic.configs.get(_UNCLEAN, "").lower() == "true":
        seen = _of(topic, f"its {_UNCLEAN}=true")
        found.append(problem("decision-topic-with-unclean-elections", area, what, seen, topic=quoted))
    return found


_FEW_REPLICAS_MATTER_FROM: Final = 3
"""Brokers, as in sink/exactly_once/cluster.py."""


def _missing_decisions(topic: Topic, what: str, quoted: str, is_prefix_known: bool | None) -> list[Finding]:
    if is_prefix_known:
        seen = _of(topic, "it does not exist, and a coordinator knows the driver of this prefix")
        return [problem("decision-topic-lost", Area.EXACTLY_ONCE, what, seen, topic=quoted)]
    found = [problem("decision-topic-missing", Area.EXACTLY_ONCE, what, _of(topic, "it does not exist"))]
    if isinstance(topic.creation_error, AuthorizationError):
        found.append(problem("create-denied", Area.PERMISSIONS, what, _of(topic, _NOT_TO_CREATE), topic=quoted))
    elif topic.creation_error is not None:
        text = _of(topic, one_line(str(topic.creation_error)))
        found.append(problem("create-refused", Area.EXACTLY_ONCE, what, text))
    return found


def _some(numbers: Sequence[int]) -> str:
    """Return partitions in words."""
    more = "" if len(numbers) <= _MOST_NAMED else f" and {len(numbers) - _MOST_NAMED} more"
    return f"partition{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_MOST_NAMED]))}{more}"


def _replicas(counts: Sequence[int]) -> str:
    """Return how many replicas the partitions of a topic have. `counts` has each number once."""
    return f"{' or '.join(map(str, counts)) or 'no'} {'replica' if list(counts) == [1] else 'replicas'}"
