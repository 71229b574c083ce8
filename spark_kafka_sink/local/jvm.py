"""The command line of a broker's JVM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from spark_kafka_sink.local.java import Java
from spark_kafka_sink.local.releases import KafkaRelease

SERVER_CLASS = "kafka.Kafka"
STORAGE_TOOL_CLASS = "kafka.tools.StorageTool"

TUNINGS: Final[Mapping[str, Sequence[str]]] = {
    # In a second or two on small machines: one compiler tier and a simple collector.
    "start": ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
    # Those of Kafka's own bin/kafka-server-start.sh and kafka-run-class.sh, so what brokers run with that nobody tuned.
    "throughput": (
        "-Xms1g",
        "-Xmx1g",
        "-XX:+UseG1GC",
        "-XX:MaxGCPauseMillis=20",
        "-XX:InitiatingHeapOccupancyPercent=35",
        "-XX:+ExplicitGCInvokesConcurrent",
    ),
}
"""What a JVM is tuned for → its flags."""
_FLAGS = ("-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError")  # no files outside the node's folder
_QUIET_ARCHIVE = ("-Xlog:disable", "-Xlog:all=error:stderr")


@dataclass(frozen=True, slots=True)
class Jvm:
    """How to run one of a release's main classes."""

    java: Java
    release: KafkaRelease
    jars: Sequence[Path]
    archive: Path | None = None
    """A class data archive made from just these jars by just this Java: mapped at start, which spares the parsing."""
    system_properties: Mapping[str, str] = field(default_factory=dict)
    tuned_for: str = "start"
    """One of TUNINGS."""

    def command(
        self, main_class: str, *arguments: str, folder: Path, write_archive: Path | None = None
    ) -> list[str | Path]:
        """Run `main_class` with its temporary files, crash dumps and log configuration in `folder`."""
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
