"""Brokers of both transaction versions."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from spark_kafka_sink.local import EmbeddedKafka

PROPERTIES = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
    "transaction.state.log.num.partitions": 4,
    "offsets.topic.num.partitions": 4,
}


@pytest.fixture(scope="module", params=[2, 1], ids=["version 2", "version 1"])
def servers(request: pytest.FixtureRequest, module_kafka: Callable[..., EmbeddedKafka]) -> str:
    """The address of a broker of this transaction version."""
    kafka = module_kafka(properties=PROPERTIES, features={"transaction.version": request.param})
    return kafka.bootstrap_servers


@pytest.fixture
def three_partitions(servers: str) -> str:
    """A new topic of three partitions."""
    from spark_kafka_sink.local import Admin

    name = f"exactly-once-{uuid.uuid4().hex[:8]}"
    Admin(servers).create_topic(name, 3)
    return name
