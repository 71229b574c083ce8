"""A producer, and real brokers of two releases."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator

import pytest
from support.threaded_producer import producer_threads

from spark_kafka_sink.local import Admin
from spark_kafka_sink.producer.kafka_producer import KafkaProducer


@pytest.fixture(params=["kafka_broker", "old_kafka_broker"], ids=["current", "old"])
def broker(request: pytest.FixtureRequest) -> Admin:
    """The shared broker of the current release, then the one of the old release."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Admin)
    return found


@pytest.fixture
def make_topic(request: pytest.FixtureRequest, broker: Admin) -> Callable[..., str]:
    """`make_topic(partitions=1, config=None)` creates a topic on `broker` and returns its name."""

    def make(partitions: int = 1, config: dict[str, str | int] | None = None) -> str:
        name = new_name(request)
        broker.create_topic(name, partitions, 1, {"retention.ms": -1, **(config or {})})
        return name

    return make


def new_name(request: pytest.FixtureRequest) -> str:
    """The name of a topic that does not exist yet."""
    stem = re.sub(r"[^a-zA-Z0-9._-]+", "-", request.node.name)[:60]
    return f"{stem}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def fresh_name(request: pytest.FixtureRequest) -> str:
    return new_name(request)


@pytest.fixture
def start_producer() -> Iterator[Callable[..., KafkaProducer]]:
    """`start_producer(bootstrap_servers, **{"linger.ms": 0, ...})`: a producer, closed after the test; its thread must
    have ended.
    """
    made: list[KafkaProducer] = []

    def start(bootstrap_servers: str, **settings: object) -> KafkaProducer:
        made.append(KafkaProducer({"bootstrap.servers": bootstrap_servers, **settings}))
        return made[-1]

    yield start
    for producer in made:
        producer.close(timeout=0)
    assert producer_threads() == []
