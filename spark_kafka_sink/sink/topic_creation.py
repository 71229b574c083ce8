"""The topic that `topic.create=if-missing` makes: its options, and its creation on the driver before any task.

What exists is never changed. Where it differs from the options, one warning says how. Several drivers may create the
same topic at once: brokers create it once, and the others find it. Over the client that the driver keeps
(exactly_once/cluster.py). Any thread may call; those with the same kafka.* options ask one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.common.errors import AuthenticationError, AuthorizationError, KafkaError, KafkaTimeoutError
from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.sink.exactly_once.cluster import process_client
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.requested_topic import CONFIG_PREFIX, CREATE_OPTION, IF_MISSING, RequestedTopic

log = logging.getLogger(__name__)

_BY_HAND: Final = f"or create the topic by hand and leave {CREATE_OPTION} out."
_ADVICE: Final[Mapping[int, str]] = {
    17: " Correct the option topic.",
    37: " Set topic.partitions.",
    38: " Set topic.replication.factor to at most the number of brokers.",
    40: f" Correct {CONFIG_PREFIX}*.",
    44: f" Choose topic.partitions, topic.replication.factor and {CONFIG_PREFIX}* as that policy allows, {_BY_HAND}",
}
"""Error code of a creation → what to change."""
_warned: Final[set[str]] = set()
"""Topics of which this process has said how they differ from their options, with the options."""


def create_missing_topic(config: SinkConfig) -> None:
    """Create the topic of topic.create=if-missing, if the cluster does not have it. Without that option do nothing.

    Raises AuthorizationError, InvalidTopicError and other errors of the brokers, with what to change, and
    KafkaTimeoutError after max.block.ms.
    """
    wanted, topic = config.requested_topic, config.topic
    if wanted is None or topic is None:
        return
    with process_client(config.producer) as (client, timer):
        try:
            _create(client, topic, wanted, timer)
        finally:
            client.creation.forget(topic)  # a driver may write to ever new topics


def _create(client: ClusterClient, topic: str, wanted: RequestedTopic, timer: Timer) -> None:
    try:
        is_new = client.creation.create_missing(
            topic, wanted.partitions, wanted.replication_factor, dict(wanted.configs), timer
        )
    except KafkaError as error:
        raise _advised(error, topic) from error
    if is_new:
        log.info("Topic %s did not exist, and was created: %s", topic, wanted)
    else:
        _compare(client, topic, wanted, timer)


def _advised(error: KafkaError, topic: str) -> KafkaError:
    if isinstance(error, AuthorizationError):
        return type(error)(
            f"Topic {one_line(topic)}: not authorized to find or create it. {CREATE_OPTION}={IF_MISSING} needs CREATE"
            f" and DESCRIBE on the topic: grant them, {_BY_HAND}",
            topic=topic,
        )
    advised = error.copied()
    advised.hint += _ADVICE.get(error.error_code or 0, "")
    return advised


def _compare(client: ClusterClient, topic: str, wanted: RequestedTopic, timer: Timer) -> None:
    """Warn once in a process where the topic differs from the options."""
    key = f"{topic}: {wanted}"
    if key in _warned:
        return
    differences = [*_different_layout(client, topic, wanted)]
    try:
        found = client.creation.configs(topic, [name for name, _ in wanted.configs], timer) if wanted.configs else {}
        differences += _different_configs(wanted.configs, found)
    except (AuthenticationError, KafkaTimeoutError):
        raise
    except KafkaError as error:
        differences.append(f"its settings could not be compared with {CONFIG_PREFIX}* ({one_line(str(error))})")
    _warned.add(key)
    if differences:
        log.warning(
            "Topic %s exists, and %s=%s changes nothing of it. It differs from the options: %s",
            topic,
            CREATE_OPTION,
            IF_MISSING,
            "; ".join(differences),
        )


def _different_layout(client: ClusterClient, topic: str, wanted: RequestedTopic) -> Iterator[str]:
    partitions = client.creation.cluster.partitions_for_topic(topic)
    replicas = {len(each.replicas) for each in partitions}
    if wanted.partitions not in {None, len(partitions)}:
        yield f"it has {len(partitions)} partitions, not topic.partitions={wanted.partitions}"
    if wanted.replication_factor is not None and replicas != {wanted.replication_factor}:
        has = " and ".join(map(str, sorted(replicas)))
        yield f"its replication factor is {has}, not topic.replication.factor={wanted.replication_factor}"


def _different_configs(wanted: Sequence[tuple[str, str]], found: Mapping[str, str | None]) -> Iterator[str]:
    for name, value in wanted:
        if name not in found:
            yield f"the cluster has no setting {name}"
        elif _plain(found[name]) != _plain(value):
            yield f"its {name} is {one_line(str(found[name]))}, not {value}"


def _plain(value: str | None) -> str:
    return "".join((value or "").lower().split())
