"""Options that mean something to Spark's Kafka source and to consumers, and nothing in a write.

Users share one set of options between reading and writing. Spark's sink passes over these options; so does this one,
with a warning. Spark: KafkaSourceProvider of spark-sql-kafka-0-10, 4.2. Kafka: ConsumerConfig of 4.x, without the
settings that producers have too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Final

log = logging.getLogger(__name__)

SOURCE_OPTIONS: Final = (
    "assign",
    "endingOffsets",
    "endingOffsetsByTimestamp",
    "endingTimestamp",
    "failOnDataLoss",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
    "includeHeaders",
    "kafkaConsumer.pollTimeoutMs",
    "maxOffsetsPerTrigger",
    "maxRecordsPerPartition",
    "maxTriggerDelay",
    "minOffsetsPerTrigger",
    "minPartitions",
    "startingOffsets",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "startingTimestamp",
    "subscribe",
    "subscribePattern",
)
CONSUMER_SETTINGS: Final = (
    "allow.auto.create.topics",
    "auto.commit.interval.ms",
    "auto.offset.reset",
    "check.crcs",
    "client.rack",
    "default.api.timeout.ms",
    "enable.auto.commit",
    "exclude.internal.topics",
    "fetch.max.bytes",
    "fetch.max.wait.ms",
    "fetch.min.bytes",
    "group.id",
    "group.instance.id",
    "group.protocol",
    "group.remote.assignor",
    "heartbeat.interval.ms",
    "internal.throw.on.fetch.stable.offset.unsupported",
    "isolation.level",
    "key.deserializer",
    "max.partition.fetch.bytes",
    "max.poll.interval.ms",
    "max.poll.records",
    "partition.assignment.strategy",
    "session.timeout.ms",
    "share.acknowledgement.mode",
    "share.acquire.mode",
    "value.deserializer",
)
PASSED_OVER: Final[Mapping[str, str]] = {
    name.lower(): name for name in (*SOURCE_OPTIONS, *(f"kafka.{setting}" for setting in CONSUMER_SETTINGS))
}
"""Lower-case name → the name as Spark and Kafka spell it."""


def warn_of(keys: Iterable[str]) -> None:
    """Log one warning that names the options `keys` (of PASSED_OVER), the first time that this process has them."""
    if names := tuple(sorted(PASSED_OVER[key] for key in keys)):
        _warn_once(names)


@functools.cache
def _warn_once(names: tuple[str, ...]) -> None:
    log.warning(
        "Options of Spark's Kafka source and of consumers have no effect in a write, and are passed over: %s",
        ", ".join(names),
    )
