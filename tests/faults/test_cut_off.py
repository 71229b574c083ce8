"""Rows 56 and 57: a broker that leads the decisions, or coordinates a transaction, is cut off from its controllers, and
goes on to answer clients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.cluster_admin import coordinator_partition
from support.cut_off_broker import cut_off
from support.exactly_once_batches import Query, own_pool
from support.fault_stage import Timeline
from support.librdkafka import read_values

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.local import Admin, EmbeddedKafka
from spark_kafka_sink.record.partitioning import partition_for_key
from spark_kafka_sink.sink.exactly_once import cluster
from spark_kafka_sink.sink.options import DECISION_TOPIC

TOPIC, BATCHES = "cut-off", 2


@pytest.fixture
def own_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the clients of the drivers and tasks of this process at the end."""
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(cluster, "_CLIENTS", kept)
    yield
    for each in kept.values():
        each.client.close()


def leader(servers: str, topic: str, partition: int) -> int:
    found = Admin(servers).describe_topic(topic).partitions
    return next(each.leader for each in found if each.partition == partition)


def until_another_leads(kafka: EmbeddedKafka, old: int, topic: str, partition: int, timeline: Timeline) -> str:
    """Wait until other nodes than `old`, which is cut off, name another leader. Return their addresses."""
    others = ",".join(kafka.node_address(node) for node in kafka.node_ids if node != old)
    deadline = time.monotonic() + 60
    while (now := leader(others, topic, partition)) == old:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert leader(kafka.node_address(old), topic, partition) == old, "it has heard of the other leader"
    timeline.note(f"node {old} is cut off, node {now} leads {topic}-{partition}")
    return others


@pytest.mark.usefixtures("own_clients")
def test_row_56_leader_of_the_decisions_is_cut_off(timeline: Timeline) -> None:
    """Each batch comes again to a driver that hears of the cluster from that broker, and Spark has not logged it. Bug:
    the broker did not know the last decision, and every such batch was written twice.
    """
    with EmbeddedKafka(3) as kafka, own_pool() as pool:
        kafka.create_topic(TOPIC, 1, 3)
        query = Query(kafka.bootstrap_servers, TOPIC, pool)
        query.begun(0, ["row 0"]).commit()
        partition = partition_for_key(query.prefix.encode(), 16)

        old = leader(kafka.bootstrap_servers, DECISION_TOPIC, partition)
        with cut_off(kafka.node_pid(old)):
            others = until_another_leads(kafka, old, DECISION_TOPIC, partition, timeline)
            for batch_id in range(1, BATCHES + 1):
                Query(others, TOPIC, pool).begun(batch_id, [f"row {batch_id}"]).commit()
                try:
                    again = Query(kafka.node_address(old), TOPIC, pool).begun(batch_id, [f"row {batch_id}"])
                    assert again.batch_start.last_batch_id == batch_id
                    assert again.commit().was_skipped
                except KafkaTimeoutError as error:
                    timeline.note(f"batch {batch_id} again: {error}")
        assert read_values(others, TOPIC) == [f"row {batch_id}" for batch_id in range(BATCHES + 1)]


def test_row_57_coordinator_of_a_resumed_transaction_is_cut_off(timeline: Timeline) -> None:
    """Bug: that broker took the commit for a repetition of the one before, which has the same epoch. It answered with
    success, and the rows were aborted when the transaction timed out.
    """
    name, log = "orders", "__transaction_state"
    with EmbeddedKafka(3, features={"transaction.version": 1}) as kafka:
        kafka.create_topic(TOPIC, 1, 3)
        task = KafkaProducer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": name})
        with task:
            task.init_transactions()
            task.begin_transaction()
            task.send(TOPIC, b"first")
            task.commit_transaction()
            partition = coordinator_partition(name, len(Admin(kafka.bootstrap_servers).describe_topic(log).partitions))
            old = leader(kafka.bootstrap_servers, log, partition)
            alone = {"bootstrap.servers": kafka.node_address(old), "transactional.id": name, "max.block.ms": 10_000}
            with cut_off(kafka.node_pid(old)):
                until_another_leads(kafka, old, log, partition, timeline)
                task.begin_transaction()
                task.send(TOPIC, b"second")
                prepared = task.prepare_transaction()
                driver = KafkaProducer(alone)
                driver.resume_transaction(prepared)
                try:
                    driver.commit_transaction()
                except KafkaTimeoutError as error:
                    timeline.note(f"commit: {error}")
                finally:
                    driver.close(timeout=0)  # without a limit it would wait for the end of the commit
            with KafkaProducer(
                alone | {"bootstrap.servers": kafka.bootstrap_servers, "max.block.ms": 60_000}
            ) as driver:
                driver.resume_transaction(prepared)
                driver.commit_transaction()
            assert read_values(kafka.bootstrap_servers, TOPIC) == ["first", "second"]
