"""The Kafka releases that can be embedded, and in what they differ: their jars and how their log is configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.lock import KAFKA_LOCK

# Both print every property at start at the level info: hundreds of lines.
_LOG4J2 = """\
status=error
appender.stdout.type=Console
appender.stdout.name=stdout
appender.stdout.layout.type=PatternLayout
appender.stdout.layout.pattern=%d{ISO8601} %-5p [%t] %m (%c)%n
rootLogger.level=info
rootLogger.appenderRef.stdout.ref=stdout
logger.config.name=org.apache.kafka.common.config
logger.config.level=warn
logger.kafkaconfig.name=kafka.server.KafkaConfig
logger.kafkaconfig.level=warn
"""
_LOG4J1 = """\
log4j.rootLogger=INFO, stdout
log4j.appender.stdout=org.apache.log4j.ConsoleAppender
log4j.appender.stdout.layout=org.apache.log4j.PatternLayout
log4j.appender.stdout.layout.ConversionPattern=%d{ISO8601} %-5p [%t] %m (%c)%n
log4j.logger.org.apache.kafka.common.config=WARN
log4j.logger.kafka.server.KafkaConfig=WARN
"""


@dataclass(frozen=True, slots=True)
class KafkaRelease:
    """One release."""

    version: str
    lock_path: Path
    log_file: str
    """Name of the file that configures the log."""
    log_configuration: str
    """What is in it."""
    log_option: str
    """The system property that takes the file's URI."""


CURRENT = KafkaRelease("4.3.1", KAFKA_LOCK, "log4j2.properties", _LOG4J2, "log4j2.configurationFile")
OLD = KafkaRelease(
    "3.9.1", KAFKA_LOCK.with_name("kafka-3.9.lock.json"), "log4j.properties", _LOG4J1, "log4j.configuration"
)
"""The last line before Kafka 4; it still takes what older clients speak, and logs by log4j 1."""

RELEASES: Mapping[str, KafkaRelease] = {release.version: release for release in (CURRENT, OLD)}


def find_release(version: str) -> KafkaRelease:
    """Raises LocalBrokerError, naming those there are, for a version that is not in the table."""
    if version not in RELEASES:
        raise LocalBrokerError(f"No embedded Kafka {version!r}: there are {' and '.join(RELEASES)}.")
    return RELEASES[version]
