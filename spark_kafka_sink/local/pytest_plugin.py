"""Fixtures for tests against a real broker: `pytest_plugins = ["spark_kafka_sink.local.pytest_plugin"]` in the top
conftest.py.

`kafka_broker` is one broker for the whole session, shared by all tests; it comes from
    KAFKA_BOOTSTRAP_SERVERS, if that is set: a cluster that is there already (PLAINTEXT, Kafka 3.0 or newer);
    testcontainers, if SPARK_KAFKA_SINK_TEST_BROKER=testcontainers (needs that package and a Docker engine);
    else an EmbeddedKafka of one node.
`topic` and `new_topic` make their own topics on it. `old_kafka_broker` is a second shared broker, of the oldest
embedded release. `own_kafka` starts embedded clusters for tests that kill or freeze nodes, `module_kafka` those that
the tests of one module share. `schema_registry` is a schema registry for the whole session.

When a test fails, the logs of the embedded clusters it used are copied to pytest's temporary folder, and its report
names the place.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spark_kafka_sink.common.errors import LocalBrokerError, UnknownTopicOrPartitionError
from spark_kafka_sink.local.admin import Admin
from spark_kafka_sink.local.cluster import EmbeddedKafka
from spark_kafka_sink.local.jvm import OLD
from spark_kafka_sink.local.schema_registry import SchemaRegistry

_CLUSTERS = pytest.StashKey[list[tuple[EmbeddedKafka, Path]]]()
_LONGEST_TOPIC_STEM = 60


def _remember(node: pytest.Item | pytest.Collector, kafka: EmbeddedKafka, folders: pytest.TempPathFactory) -> None:
    """Keep the cluster's logs if a test that uses it fails."""
    node.stash.setdefault(_CLUSTERS, []).append((kafka, folders.mktemp("kafka-logs")))


@contextlib.contextmanager
def _containerized() -> Iterator[str]:
    try:
        from docker.errors import DockerException  # type: ignore[import-untyped]
        from testcontainers.community.kafka import KafkaContainer
    except ModuleNotFoundError as error:
        raise LocalBrokerError(f"SPARK_KAFKA_SINK_TEST_BROKER=testcontainers needs {error.name}.") from error
    try:
        container = KafkaContainer().with_kraft()
    except DockerException as error:
        raise LocalBrokerError(
            f"SPARK_KAFKA_SINK_TEST_BROKER=testcontainers needs a Docker engine, and none answers: {error}. "
            "Start one, or unset SPARK_KAFKA_SINK_TEST_BROKER for an embedded broker."
        ) from error
    with container:
        yield container.get_bootstrap_server()


@pytest.fixture(scope="session")
def kafka_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """The session's broker: `bootstrap_servers`, `create_topic(...)`, `delete_topic(...)`, `describe_topic(...)`."""
    wish = os.environ.get("SPARK_KAFKA_SINK_TEST_BROKER", "embedded")
    if servers := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        yield Admin(servers)
    elif wish == "testcontainers":
        with _containerized() as servers:
            yield Admin(servers)
    elif wish == "embedded":
        with EmbeddedKafka() as kafka:
            _remember(request.session, kafka, tmp_path_factory)
            yield Admin(kafka.bootstrap_servers)
    else:
        raise LocalBrokerError(
            f"SPARK_KAFKA_SINK_TEST_BROKER={wish}: it must be `embedded` (the default) or `testcontainers`."
        )


@pytest.fixture(scope="session")
def old_kafka_broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """An embedded broker of the oldest supported release, for the whole session."""
    with EmbeddedKafka(version=OLD.version) as kafka:
        _remember(request.session, kafka, tmp_path_factory)
        yield Admin(kafka.bootstrap_servers)


@pytest.fixture(scope="session")
def schema_registry() -> Iterator[SchemaRegistry]:
    """An embedded schema registry, for the whole session. Its first start fetches 109 MB."""
    with SchemaRegistry() as registry:
        yield registry


@pytest.fixture
def new_topic(request: pytest.FixtureRequest, kafka_broker: Admin) -> Iterator[Callable[..., str]]:
    """`new_topic(partitions=1, replication_factor=1, config=None)` creates a topic named after the test and returns its
    name. It keeps its records whatever their timestamps are (`retention.ms=-1`), if `config` does not say otherwise.

    The topics are deleted when the test is over.
    """
    stem = re.sub(r"[^a-zA-Z0-9._-]+", "-", request.node.name)[:_LONGEST_TOPIC_STEM]
    made: list[str] = []

    def create(partitions: int = 1, replication_factor: int = 1, config: Mapping[str, str | int] | None = None) -> str:
        name = f"{stem}-{uuid.uuid4().hex[:8]}"
        kafka_broker.create_topic(name, partitions, replication_factor, {"retention.ms": -1, **(config or {})})
        made.append(name)
        return name

    yield create
    for name in made:
        with contextlib.suppress(UnknownTopicOrPartitionError):
            kafka_broker.delete_topic(name)


@pytest.fixture
def topic(new_topic: Callable[..., str]) -> str:
    """The name of a new topic with one partition."""
    return new_topic()


@pytest.fixture
def own_kafka(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., EmbeddedKafka]]:
    """`own_kafka(...)` takes EmbeddedKafka's arguments. It starts a cluster for this test only, stopped afterwards."""
    yield from _cluster_starter(request, tmp_path_factory)


@pytest.fixture(scope="module")
def module_kafka(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., EmbeddedKafka]]:
    """`own_kafka` for one module: its tests share the cluster and leave every node as they found it."""
    yield from _cluster_starter(request, tmp_path_factory)


def _cluster_starter(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., EmbeddedKafka]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: Any, **options: Any) -> EmbeddedKafka:
            kafka = stack.enter_context(EmbeddedKafka(*arguments, **options))
            _remember(request.node, kafka, tmp_path_factory)
            return kafka

        yield start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.when != "teardown":
        uses_shared = any(isinstance(value, Admin) for value in getattr(item, "funcargs", {}).values())
        nodes = [node for node in item.listchain() if uses_shared or node is not item.session]
        for kafka, folder in (each for node in nodes for each in node.stash.get(_CLUSTERS, [])):
            if not kafka.node_ids:  # the test or its module has stopped it, and its logs are gone
                continue
            target = folder / re.sub(r"[^a-zA-Z0-9._-]+", "-", item.name)[:_LONGEST_TOPIC_STEM]
            try:
                saved = str(kafka.save_logs(target))
            except LocalBrokerError as error:  # an error here would end the whole run
                saved = str(error)
            report.sections.append(("Kafka logs", saved))
    return report
