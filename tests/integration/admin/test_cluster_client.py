"""The driver's client against real brokers of transaction versions 2 and 1."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from support.raw_transactions import LIMIT_MS, RawTransactions
from support.transaction_table import CASES, Case, Stage

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.admin.group_offsets import CommittedOffset
from spark_kafka_sink.admin.transaction_values import EndTxnStatus, TransactionState
from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.protocol.metadata import TRANSACTION

PROPERTIES = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 100,
    "transaction.state.log.num.partitions": 5,
    "offsets.topic.num.partitions": 5,
}


THREE_NODES = {
    **PROPERTIES,
    "broker.session.timeout.ms": 1500,
    "transaction.state.log.replication.factor": 3,
    "offsets.topic.replication.factor": 3,
}


def connect(servers: str) -> ClusterClient:
    settings = {"bootstrap.servers": servers, "retry.backoff.ms": 20, "reconnect.backoff.max.ms": 100}
    config = ProducerConfig.from_mapping(settings)
    return ClusterClient.connect(config, SystemClock(), random.Random())


@pytest.fixture(scope="module", params=[2, 1], ids=["version 2", "version 1"])
def cluster(request: pytest.FixtureRequest, module_kafka: Callable[..., EmbeddedKafka]) -> tuple[EmbeddedKafka, int]:
    features = {} if request.param == 2 else {"transaction.version": request.param}
    return module_kafka(properties=PROPERTIES, features=features), request.param


@pytest.fixture(scope="module")
def clients(cluster: tuple[EmbeddedKafka, int]) -> Iterator[tuple[ClusterClient, RawTransactions]]:
    """The driver's client, and a task's client with its own connections."""
    kafka, version = cluster
    with connect(kafka.bootstrap_servers) as driver, connect(kafka.bootstrap_servers) as task:
        yield driver, RawTransactions(task, version)


@pytest.fixture
def stage(cluster: tuple[EmbeddedKafka, int], clients: tuple[ClusterClient, RawTransactions]) -> Stage:
    topic = f"coordinator-{uuid.uuid4().hex[:8]}"
    cluster[0].create_topic(topic, 2)
    return Stage(*clients, TopicPartition(topic, 0), lambda ms: time.sleep(ms / 1000))


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_case_holds_on_a_real_broker(run: Case, stage: Stage) -> None:
    run(stage)


def test_driver_knows_the_clusters_transaction_version(stage: Stage) -> None:
    assert stage.driver.transaction_version(stage.timer()) == stage.version


def test_open_transactions_end_when_one_coordinator_dies(
    own_kafka: Callable[..., EmbeddedKafka],
) -> None:
    kafka = own_kafka(3, properties=THREE_NODES)
    kafka.create_topic("many", 3, 3)
    with connect(kafka.bootstrap_servers) as task, connect(kafka.bootstrap_servers) as driver:
        raw = RawTransactions(task, 2)
        opened = [raw.begin(f"task-{number}") for number in range(12)]
        for number, open_ in enumerate(opened):
            raw.write(open_, TopicPartition("many", number % 3), f"row {number}")
            raw.mark(open_, f"group-{number}", TopicPartition("many", 0), 1, "rows=1")
        ids = [open_.transactional_id for open_ in opened]
        nodes = {raw.coordinator_of(TRANSACTION, transactional_id).id for transactional_id in ids}
        assert len(nodes) > 1
        listed = driver.transactions.list_transactions(driver.timer(LIMIT_MS), states=[TransactionState.ONGOING])
        assert [each.transactional_id for each in listed] == sorted(ids)
        assert {each.coordinator.id for each in listed} == nodes

        kafka.kill_node(min(nodes))
        outcomes = driver.transactions.end_txns(opened, driver.timer(30_000), committed=True)
        assert {outcome.status for outcome in outcomes} == {EndTxnStatus.DONE}
        assert driver.transactions.end_txns(opened, driver.timer(30_000), committed=True) == outcomes
        groups = {f"group-{number}": [TopicPartition("many", 0)] for number in range(12)}
        committed = driver.groups.fetch_offsets(groups, driver.timer(30_000))
        assert committed == {group: {TopicPartition("many", 0): CommittedOffset(1, "rows=1")} for group in groups}
        timer = driver.timer(30_000)
        while states(driver, ids) != {
            TransactionState.COMPLETE_COMMIT
        }:  # brokers write the markers after their responses
            timer.update()
            assert not timer.is_expired
        values = [
            record.value
            for index in range(3)
            for record in driver.topics.read_from(TopicPartition("many", index), 0, driver.timer(30_000))
        ]
        assert sorted(values) == sorted(f"row {number}".encode() for number in range(12))


def states(driver: ClusterClient, ids: list[str]) -> set[TransactionState]:
    described = driver.transactions.describe_transactions(ids, driver.timer(LIMIT_MS))
    return {each.state for each in described.values() if each is not None}
