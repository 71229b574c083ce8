"""Finds the Java that runs the broker. Kafka 4's server needs Java 17."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_kafka_sink.common.errors import LocalBrokerError

MINIMUM_VERSION = 17
_INSTALL_HINT = (
    f"The embedded broker needs Java {MINIMUM_VERSION} or newer: install a JRE or JDK {MINIMUM_VERSION}+ "
    "(for example Debian's openjdk-17-jre-headless, or Homebrew's openjdk) and put it on PATH or point JAVA_HOME at it."
)
_VERSION = re.compile(r'version "(?P<version>[^"]+)"')


@dataclass(frozen=True, slots=True)
class Java:
    """A Java launcher that is new enough."""

    path: Path
    version: str
    """As `java -version` prints it, such as `17.0.15`."""


def major_version(version: str) -> int | None:
    """The feature number of a Java version: 17 of `17.0.15`, 21 of `21-ea`, 8 of `1.8.0_412`; None without digits."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    if not numbers:
        return None
    return numbers[1] if numbers[0] == 1 and len(numbers) == 2 else numbers[0]


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """`$JAVA_HOME/bin/java` if JAVA_HOME is set, else the first `java` on PATH.

    Raises LocalBrokerError if there is none, if it does not run, or if it is older than Java 17.
    """
    java_home = environment.get("JAVA_HOME")
    found = Path(java_home, "bin", "java") if java_home else shutil.which("java", path=environment.get("PATH"))
    if found is None:
        raise LocalBrokerError(f"No Java found: JAVA_HOME is not set and PATH has no `java`. {_INSTALL_HINT}")
    path = Path(found).absolute()  # brokers run in folders of their own
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
