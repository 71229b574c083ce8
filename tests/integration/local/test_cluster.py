"""A real broker keeps its records when its nodes are killed, suspended or restarted."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.librdkafka import produce, read_values

from spark_kafka_sink.common.errors import LocalBrokerError, TopicExistsError, UnknownTopicOrPartitionError
from spark_kafka_sink.local import Admin, EmbeddedKafka, PartitionDescription

OwnKafka = Callable[..., EmbeddedKafka]
VALUES = [f"value {number}" for number in range(1000)]


@pytest.fixture(scope="module")
def lone_node(module_kafka: OwnKafka) -> EmbeddedKafka:
    """A single node, which runs again after each test."""
    return module_kafka(properties={"broker.session.timeout.ms": 1500})


def test_records_sent_to_the_shared_broker_come_back_in_order(kafka_broker: Admin, topic: str) -> None:
    produce(kafka_broker.bootstrap_servers, topic, VALUES)
    assert read_values(kafka_broker.bootstrap_servers, topic) == VALUES


def test_old_records_stay_unless_the_topic_sets_retention(
    own_kafka: OwnKafka,
) -> None:
    """Bug: one run in hundreds failed. A test with its own timestamps read its topic when the broker was half a minute
    old, which is when it first deletes records older than a week.
    """
    admin = Admin(
        own_kafka(
            properties={"log.initial.task.delay.ms": 100, "log.retention.check.interval.ms": 100}
        ).bootstrap_servers
    )
    admin.create_topic("kept")
    admin.create_topic("taken", config={"retention.ms": 7 * 86_400_000})
    for topic in ("kept", "taken"):
        produce(admin.bootstrap_servers, topic, VALUES, timestamp_ms=1_700_000_000_000)
    deadline = time.monotonic() + 30
    while read_values(admin.bootstrap_servers, "taken"):
        assert time.monotonic() < deadline, "retention took nothing"
    assert read_values(admin.bootstrap_servers, "kept") == VALUES


def test_old_release_takes_records_and_lacks_newer_features(old_kafka_broker: Admin) -> None:
    servers = old_kafka_broker.bootstrap_servers
    old_kafka_broker.create_topic("numbers")
    produce(servers, "numbers", VALUES)
    assert read_values(servers, "numbers") == VALUES
    old_kafka_broker.delete_topic("numbers")
    assert "transaction.version" not in old_kafka_broker.finalized_features()


def test_topics_are_created_described_and_deleted(kafka_broker: Admin, new_topic: Callable[..., str]) -> None:
    name = new_topic(partitions=3, config={"max.message.bytes": 2000})
    described = kafka_broker.describe_topic(name)
    assert [each.partition for each in described.partitions] == [0, 1, 2]
    with pytest.raises(TopicExistsError, match=name):
        kafka_broker.create_topic(name)
    kafka_broker.delete_topic(name)
    with pytest.raises(UnknownTopicOrPartitionError, match=name):
        kafka_broker.describe_topic(name)


def test_unreachable_address_is_named_in_the_error() -> None:
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{placeholder.getsockname()[1]}"
        with pytest.raises(LocalBrokerError, match=rf"No server answers .*{address}: .*refused"):
            Admin(address).create_topic("any")


def test_killed_and_restarted_node_keeps_address_and_records(lone_node: EmbeddedKafka) -> None:
    kafka = lone_node
    address, first_pid = kafka.node_address(1), kafka.node_pid(1)
    kafka.create_topic("before-and-after")
    produce(kafka.bootstrap_servers, "before-and-after", VALUES)
    kafka.kill_node(1)
    assert not kafka.node_running(1)
    with pytest.raises(LocalBrokerError, match="Node 1 does not run"):
        kafka.suspend_node(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5)
    with pytest.raises(LocalBrokerError, match="No node of the embedded cluster runs"):
        kafka.describe_topic("before-and-after")
    kafka.start_node(1)
    assert kafka.node_address(1) == address
    assert kafka.node_pid(1) != first_pid
    produce(kafka.bootstrap_servers, "before-and-after", ["one more"])
    assert read_values(kafka.bootstrap_servers, "before-and-after") == [*VALUES, "one more"]


def test_suspended_node_answers_only_after_resume(lone_node: EmbeddedKafka) -> None:
    lone_node.create_topic("while-suspended")
    lone_node.suspend_node(1)
    impatient = Admin(lone_node.bootstrap_servers, timeout_s=0.5)
    with pytest.raises(LocalBrokerError, match="timed out"):
        impatient.describe_topic("while-suspended")
    lone_node.resume_node(1)
    produce(lone_node.bootstrap_servers, "while-suspended", VALUES)
    assert read_values(lone_node.bootstrap_servers, "while-suspended") == VALUES


def test_three_nodes_work_without_one_and_accept_it_again(own_kafka: OwnKafka) -> None:
    kafka = own_kafka(3)
    kafka.create_topic("numbers", replication_factor=3, config={"min.insync.replicas": 2})
    (before,) = kafka.describe_topic("numbers").partitions
    assert set(before.replicas) == set(before.isr) == {1, 2, 3}
    produce(kafka.bootstrap_servers, "numbers", VALUES)
    kafka.kill_node(before.leader)
    produce(kafka.bootstrap_servers, "numbers", ["after the loss"])
    (after,) = kafka.describe_topic("numbers").partitions
    assert after.leader not in (before.leader, -1)
    assert before.leader not in after.isr
    assert read_values(kafka.bootstrap_servers, "numbers") == [*VALUES, "after the loss"]
    kafka.start_node(before.leader)
    assert kafka.running


def test_data_folder_outlives_the_cluster_and_fixes_its_features(own_kafka: OwnKafka, tmp_path: Path) -> None:
    options = {"data_dir": tmp_path / "data, one folder", "properties": {"auto.create.topics.enable": False}}
    first = own_kafka(**options, features={"transaction.version": 1})
    assert Admin(first.bootstrap_servers).finalized_features()["transaction.version"] == 1
    with pytest.raises(UnknownTopicOrPartitionError):
        first.describe_topic("numbers")
    first.create_topic("numbers")
    produce(first.bootstrap_servers, "numbers", VALUES)
    first.stop()
    with pytest.raises(LocalBrokerError, match="not started"):
        _ = first.bootstrap_servers
    with pytest.raises(LocalBrokerError, match="features can only be chosen for a new folder"):
        own_kafka(**options, features={"transaction.version": 2})
    second = own_kafka(**options)
    assert read_values(second.bootstrap_servers, "numbers") == VALUES
    assert second.describe_topic("numbers").partitions == (PartitionDescription(0, 1, (1,), (1,)),)


def test_second_cluster_in_a_used_folder_is_refused(own_kafka: OwnKafka, tmp_path: Path) -> None:
    first = own_kafka(data_dir=tmp_path)
    with pytest.raises(LocalBrokerError, match=f"Another embedded cluster runs in {tmp_path}"):
        own_kafka(data_dir=tmp_path)
    first.restart_node(1)
    first.stop()
    own_kafka(data_dir=tmp_path)


def test_orderly_restart_works_and_wrong_calls_are_refused(lone_node: EmbeddedKafka) -> None:
    with pytest.raises(LocalBrokerError, match="Node 1 runs already"):
        lone_node.start_node(1)
    with pytest.raises(LocalBrokerError, match="started already"):
        lone_node.start()
    with pytest.raises(LocalBrokerError, match="No node 2: the nodes are 1"):
        lone_node.kill_node(2)
    before = lone_node.node_pid(1)
    with pytest.raises(LocalBrokerError, match=r"2\.0\.0"):
        lone_node.restart_node(1, version="2.0.0")
    assert lone_node.node_pid(1) == before  # refused before it was stopped
    lone_node.restart_node(1)
    assert lone_node.node_pid(1) != before
