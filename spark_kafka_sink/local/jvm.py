"""How a broker's JVM is run: which Java, which release of Kafka with which log configuration, and the command line.

Kafka 4's server needs Java 17.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local.jars import KAFKA_LOCK

# At level info, both releases print hundreds of lines of properties at start.
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
    """Name of the log configuration's file."""
    log_configuration: str
    """Its content."""
    log_option: str
    """The system property that takes the file's URI."""


CURRENT = KafkaRelease("4.3.1", KAFKA_LOCK, "log4j2.properties", _LOG4J2, "log4j2.configurationFile")
OLD = KafkaRelease(
    "3.9.1", KAFKA_LOCK.with_name("kafka-3.9.lock.json"), "log4j.properties", _LOG4J1, "log4j.configuration"
)
"""The last line before Kafka 4. It still supports the versions of older clients, and logs by log4j 1."""

RELEASES: Mapping[str, KafkaRelease] = {release.version: release for release in (CURRENT, OLD)}


def find_release(version: str) -> KafkaRelease:
    """Return the release. Raises LocalBrokerError, naming the known ones, if the version is unknown."""
    if version not in RELEASES:
        raise LocalBrokerError(f"No embedded Kafka {version!r}: there are {' and '.join(RELEASES)}.")
    return RELEASES[version]


# ---- the Java --------------------------------------------------------------------------------------------------------

MINIMUM_VERSION = 17
_INSTALL_HINT = (
    f"The embedded broker needs Java {MINIMUM_VERSION} or newer: install a JRE or JDK {MINIMUM_VERSION}+ "
    "(for example Debian's openjdk-17-jre-headless, or Homebrew's openjdk) and put it on PATH or point JAVA_HOME at it."
)
_VERSION = re.compile(r'version "(?P<version>[^"]+)"')


@dataclass(frozen=True, slots=True)
class Java:
    """A Java launcher of a supported version."""

    path: Path
    version: str
    """As `java -version` prints it, such as `17.0.15`."""


def major_version(version: str) -> int | None:
    """Return the feature number of a Java version: 17 of `17.0.15`, 21 of `21-ea`, 8 of `1.8.0_412`; None without
    digits.
    """
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    if not numbers:
        return None
    return numbers[1] if numbers[0] == 1 and len(numbers) == 2 else numbers[0]


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Return `$JAVA_HOME/bin/java` if JAVA_HOME is set, else the first `java` on PATH.

    Raises LocalBrokerError if none exists, if it does not run, or if it is older than Java 17.
    """
    java_home = environment.get("JAVA_HOME")
    found = Path(java_home, "bin", "java") if java_home else shutil.which("java", path=environment.get("PATH"))
    if found is None:
        raise LocalBrokerError(f"No Java found: JAVA_HOME is not set and PATH has no `java`. {_INSTALL_HINT}")
    path = Path(found).absolute()  # absolute, because each broker runs in its own folder
    if not path.is_file():
        raise LocalBrokerError(f"No Java found: JAVA_HOME is {java_home}, but {path} is not there. {_INSTALL_HINT}")
    try:
        answer = subprocess.run(
            [path, "-version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalBrokerError(f"{path} does not run: {error}. {_INSTALL_HINT}") from error
    said = (answer.stderr + answer.stdout).strip()
    match = _VERSION.search(said)
    major = major_version(match["version"]) if match else None
    if match is None or major is None:
        raise LocalBrokerError(
            f"{path} -version (exit code {answer.returncode}) names no version: {said!r}. {_INSTALL_HINT}"
        )
    if major < MINIMUM_VERSION:
        raise LocalBrokerError(f"{path} is Java {match['version']}. {_INSTALL_HINT}")
    return Java(path, match["version"])


# ---- the command line ------------------------------------------------------------------------------------------------

SERVER_CLASS = "kafka.Kafka"
STORAGE_TOOL_CLASS = "kafka.tools.StorageTool"

TUNINGS: Final[Mapping[str, Sequence[str]]] = {
    # Starts in a second or two on small machines: one compiler tier and a simple collector.
    "start": ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
    # The flags of Kafka's bin/kafka-server-start.sh and kafka-run-class.sh: an untuned broker runs with them.
    "throughput": (
        "-Xms1g",
        "-Xmx1g",
        "-XX:+UseG1GC",
        "-XX:MaxGCPauseMillis=20",
        "-XX:InitiatingHeapOccupancyPercent=35",
        "-XX:+ExplicitGCInvokesConcurrent",
    ),
}
"""Goal of the tuning → JVM flags."""
_FLAGS = ("-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError")  # no files outside the node's folder
_QUIET_ARCHIVE = ("-Xlog:disable", "-Xlog:all=error:stderr")


@dataclass(frozen=True, slots=True)
class Jvm:
    """How to run one of a release's main classes."""

    java: Java
    release: KafkaRelease
    jars: Sequence[Path]
    archive: Path | None = None
    """A class data archive of these jars, made by this Java. The JVM maps it instead of parsing the classes."""
    system_properties: Mapping[str, str] = field(default_factory=dict)
    tuned_for: str = "start"
    """One of TUNINGS."""

    def command(
        self, main_class: str, *arguments: str, folder: Path, write_archive: Path | None = None
    ) -> list[str | Path]:
        """Return the command that runs `main_class`. Temporary files, crash dumps and log configuration are in
        `folder`.
        """
        archive: tuple[str, ...] = ()
        if write_archive is not None:
            archive = (*_QUIET_ARCHIVE, f"-XX:ArchiveClassesAtExit={write_archive}")
        elif self.archive is not None:
            archive = (*_QUIET_ARCHIVE, f"-XX:SharedArchiveFile={self.archive}")
        return [
            self.java.path,
            *TUNINGS[self.tuned_for],
            *_FLAGS,
            *archive,
            f"-Djava.io.tmpdir={folder / 'tmp'}",
            f"-XX:ErrorFile={folder / 'hs_err.log'}",
            f"-D{self.release.log_option}={(folder / self.release.log_file).as_uri()}",
            *(f"-D{name}={value}" for name, value in self.system_properties.items()),
            "-cp",
            os.pathsep.join(str(jar) for jar in self.jars),
            main_class,
            *arguments,
        ]
