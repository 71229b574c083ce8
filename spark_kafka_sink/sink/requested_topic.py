"""The options of the topic that the sink may create: topic.create, topic.partitions, topic.replication.factor and
topic.config.<name>. Parsed once on the driver; a plain value that pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from spark_kafka_sink.common import options as parsers
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.options import RefusalError
from spark_kafka_sink.common.texts import shown

CREATE_OPTION: Final = "topic.create"
NEVER: Final = "never"
IF_MISSING: Final = "if-missing"
PARTITIONS_OPTION: Final = "topic.partitions"
REPLICATION_OPTION: Final = "topic.replication.factor"
CONFIG_PREFIX: Final = "topic.config."
TOPIC_OPTIONS: Final = (CREATE_OPTION, PARTITIONS_OPTION, REPLICATION_OPTION)
_MOST_REPLICAS: Final = 2**15 - 1
"""Kafka's protocol has two bytes for it."""


@dataclass(frozen=True, slots=True)
class RequestedTopic:
    """How a missing topic is created. None stands for the brokers' default."""

    partitions: int | None = None
    replication_factor: int | None = None
    configs: tuple[tuple[str, str], ...] = ()
    """Names and values of its settings, such as retention.ms."""

    def __str__(self) -> str:
        return ", ".join(
            (
                f"partitions={'default' if self.partitions is None else self.partitions}",
                f"replication.factor={'default' if self.replication_factor is None else self.replication_factor}",
                *(f"{name}={value}" for name, value in self.configs),
            )
        )


def requested_topic(by_key: Mapping[str, object], topic: str | None) -> RequestedTopic | None:
    """Parse the options, whose names are in lower case. None with topic.create=never. Raises ConfigError."""
    given = {key: value for key, value in by_key.items() if value is not None}
    create = str(given.get(CREATE_OPTION, NEVER)).strip().lower()
    if create not in {NEVER, IF_MISSING}:
        raise ConfigError(
            f"{CREATE_OPTION} must be {NEVER} or {IF_MISSING}, not {shown(given[CREATE_OPTION])}.",
            setting=CREATE_OPTION,
        )
    configs = {key.removeprefix(CONFIG_PREFIX): value for key, value in given.items() if key.startswith(CONFIG_PREFIX)}
    if create == NEVER:
        for key in (PARTITIONS_OPTION, REPLICATION_OPTION, *(CONFIG_PREFIX + name for name in configs)):
            if key in given:
                raise ConfigError(
                    f"The option {key} has no effect without {CREATE_OPTION}={IF_MISSING}: set that too, or leave it"
                    " out.",
                    setting=key,
                )
        return None
    if topic is None:
        raise ConfigError(
            f"{CREATE_OPTION}={IF_MISSING} needs the option topic: the topics of a column are known only when its rows"
            f" are written, and the topic is created before. Set topic, or leave {CREATE_OPTION} out.",
            setting=CREATE_OPTION,
        )
    if "" in configs:
        raise ConfigError(f"{CONFIG_PREFIX} needs the name of a setting, as in {CONFIG_PREFIX}retention.ms.")
    return RequestedTopic(
        _number(given, PARTITIONS_OPTION, parsers.INT_MAX),
        _number(given, REPLICATION_OPTION, _MOST_REPLICAS),
        tuple((name, _setting(value)) for name, value in sorted(configs.items())),
    )


def _number(given: Mapping[str, object], key: str, most: int) -> int | None:
    if key not in given:
        return None
    try:
        return parsers.between(1, most)(given[key])
    except RefusalError as refusal:
        raise ConfigError(f"{key}={shown(given[key])} {refusal}.", setting=key) from None


def _setting(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).strip()
