"""The table of embedded releases."""

from __future__ import annotations

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.local.lock import JarLock
from spark_kafka_sink.local.releases import RELEASES


@pytest.mark.parametrize(
    ("version", "log_binding", "jars"), [("4.3.1", "log4j-slf4j-impl", 46), ("3.9.1", "slf4j-reload4j", 57)]
)
def test_a_releases_lock_pins_that_release_alone_with_one_log_binding(
    version: str, log_binding: str, jars: int
) -> None:
    coordinates = [jar.coordinate.split(":") for jar in JarLock.read(RELEASES[version].lock_path).jars]
    assert {found for group, _, found in coordinates if group == "org.apache.kafka"} == {version}
    assert len({(group, artifact) for group, artifact, _ in coordinates}) == len(coordinates) == jars
    bindings = {"log4j-slf4j-impl", "log4j-slf4j2-impl", "slf4j-reload4j", "slf4j-simple", "logback-classic"}
    assert bindings & {artifact for _, artifact, _ in coordinates} == {log_binding}


def test_a_release_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(LocalBrokerError, match=r"No embedded Kafka '2\.8\.0': there are 4\.3\.1 and 3\.9\.1"):
        EmbeddedKafka(version="2.8.0")
