"""Whether the decision topic keeps what it is given, and what errors say where it did not."""

from __future__ import annotations

import logging
import shlex
from typing import Final

from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.admin.topics import TopicCreation
from spark_kafka_sink.common.errors import AuthenticationError, IllegalStateError, KafkaError, KafkaTimeoutError
from spark_kafka_sink.common.peer_text import one_line
from spark_kafka_sink.sink.exactly_once.messages import operator_command

log = logging.getLogger(__name__)

_POLICY: Final = "cleanup.policy"
_UNCLEAN: Final = "unclean.leader.election.enable"
_FEW_REPLICAS_MATTER_FROM: Final = 3
"""Brokers: a smaller cluster is a test's, or has no room for more replicas."""
_warned: Final[set[str]] = set()
"""What this process has warned of: each session and each worker's client checks the topic again."""


def check_decision_topic(creation: TopicCreation, topic: str, timer: Timer) -> None:
    """Check that the topic keeps the last record of each key, on however many brokers.

    Raises IllegalStateError where cleanup.policy is not compact only, and KafkaTimeoutError. Logs a warning for what
    this client may not ask, for a single replica in a larger cluster, and for unclean leader election.
    """
    _check_replicas(creation, topic)
    try:
        configs = creation.configs(topic, (_POLICY, _UNCLEAN), timer)
    except (AuthenticationError, KafkaTimeoutError):
        raise
    except KafkaError as error:
        _warn(
            f"decision.topic={topic}: its cleanup.policy and unclean.leader.election.enable were not checked:"
            f" {error} A topic that is not compacted only deletes decisions, and a batch may then be written twice."
            " To let this principal check it: kafka-acls.sh --bootstrap-server HOST:PORT --add"
            f" --allow-principal User:NAME --operation DescribeConfigs --topic {shlex.quote(topic)}"
        )
        return
    policy = configs.get(_POLICY)
    if policy is not None and policy.strip() != "compact":
        raise IllegalStateError(
            f"decision.topic={topic} has cleanup.policy={one_line(policy)}: Kafka deletes decisions from it after"
            f" some time, and a batch may then be written twice. Change it: {_alter(topic, f'{_POLICY}=compact')}"
        )
    if (configs.get(_UNCLEAN) or "").strip().lower() == "true":
        _warn(
            f"decision.topic={topic} has unclean.leader.election.enable=true: after the loss of brokers a replica"
            " without the last decisions may lead, and a batch may then be written twice. Change it:"
            f" {_alter(topic, f'{_UNCLEAN}=false')}"
        )


def lost_decisions(prefix: str, topic: str, partitions: int) -> IllegalStateError:
    """The error for a prefix that was used, and of which the topic knows nothing."""
    return IllegalStateError(
        f"decision.topic={topic} knows nothing of transactional.id.prefix={prefix!r}, which was used before: the topic"
        " was deleted, made again or emptied, partitions were added to it"
        f" (it has {partitions} now), the prefix was freed by an older release, or its decisions are in another topic."
        f" Without them a batch may be written twice. {_ways_out(prefix, topic)}"
    )


def missing_topic(prefix: str, topic: str) -> IllegalStateError:
    """The error for a prefix that was used, and whose topic is not there."""
    return IllegalStateError(
        f"decision.topic={topic} is not in the cluster, and transactional.id.prefix={prefix!r} was used before: the"
        " topic was deleted, or another one is named. Without its decisions a batch may be written twice."
        f" {_ways_out(prefix, topic)}"
    )


def _ways_out(prefix: str, topic: str) -> str:
    return (
        "Name the right decision.topic, or restore this one. If it is lost for good, look which batch is the last one"
        " in the topics that the query writes, then let the query begin at the next batch of its checkpoint:"
        f" {operator_command('adopt', prefix, topic)}"
    )


def _check_replicas(creation: TopicCreation, topic: str) -> None:
    cluster = creation.cluster
    replicas = min((len(each.replicas) for each in cluster.partitions_for_topic(topic)), default=0)
    if replicas == 1 and len(cluster.nodes) >= _FEW_REPLICAS_MATTER_FROM:
        _warn(
            f"decision.topic={topic} has one replica, and the cluster has {len(cluster.nodes)} brokers: if that"
            " broker's disk is lost, so are the decisions, and a batch may be written twice. Add replicas:"
            " kafka-reassign-partitions.sh --bootstrap-server HOST:PORT --reassignment-json-file FILE --execute"
        )


def _alter(topic: str, setting: str) -> str:
    return (
        "kafka-configs.sh --bootstrap-server HOST:PORT --alter --entity-type topics"
        f" --entity-name {shlex.quote(topic)} --add-config {setting}"
    )


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)
