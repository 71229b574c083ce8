"""The command line of a broker's JVM, by what it is tuned for."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.local.java import Java
from spark_kafka_sink.local.jvm import SERVER_CLASS, TUNINGS, Jvm
from spark_kafka_sink.local.releases import CURRENT


def command(**more: str) -> list[str]:
    jvm = Jvm(Java(Path("/java"), "21"), CURRENT, [Path("/a.jar")], **more)  # type: ignore[arg-type]
    return list(map(str, jvm.command(SERVER_CLASS, "x", folder=Path("/node"))))


def test_it_starts_quickly_unless_it_is_told_otherwise() -> None:
    assert "-XX:TieredStopAtLevel=1" in command()
    assert "-Xmx512m" in command()


def test_for_throughput_nothing_is_left_out_of_the_compiler() -> None:
    flags = command(tuned_for="throughput")
    assert not [flag for flag in flags if "Tiered" in flag or "SerialGC" in flag]
    assert {"-Xmx1g", "-XX:+UseG1GC"} < set(flags)


@pytest.mark.parametrize("tuned_for", TUNINGS)
def test_whatever_it_is_tuned_for_nothing_is_written_beside_its_folder_and_it_ends_without_memory(
    tuned_for: str,
) -> None:
    flags = command(tuned_for=tuned_for)
    assert {"-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"} < set(flags)
    assert flags[-2:] == [SERVER_CLASS, "x"]


def test_what_nobody_tunes_for_is_refused() -> None:
    with pytest.raises(LocalBrokerError, match="start or throughput, not for speed"):
        EmbeddedKafka(tuned_for="speed")
