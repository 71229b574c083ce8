"""Row 56: the broker that leads the decisions is cut off from its controllers, and goes on to answer clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.cut_off_broker import cut_off
from support.exactly_once_batches import Query, own_pool
from support.fault_stage import Timeline
from support.librdkafka import read_values

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

        def leader(servers: str) -> int:
            found = Admin(servers).describe_topic(DECISION_TOPIC).partitions
            return next(each.leader for each in found if each.partition == partition)

        old = leader(kafka.bootstrap_servers)
        others = ",".join(kafka.node_address(node) for node in kafka.node_ids if node != old)
        with cut_off(kafka.node_pid(old)):
            deadline = time.monotonic() + 60
            while leader(others) == old:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert leader(kafka.node_address(old)) == old, "it has heard of the other leader"
            timeline.note(f"node {old} is cut off, node {leader(others)} leads {DECISION_TOPIC}-{partition}")
            for batch_id in range(1, BATCHES + 1):
                Query(others, TOPIC, pool).begun(batch_id, [f"row {batch_id}"]).commit()
                try:
                    again = Query(kafka.node_address(old), TOPIC, pool).begun(batch_id, [f"row {batch_id}"])
                    assert again.batch_start.last_batch_id == batch_id
                    assert again.commit().was_skipped
                except KafkaTimeoutError as error:
                    timeline.note(f"batch {batch_id} again: {error}")
        assert read_values(others, TOPIC) == [f"row {batch_id}" for batch_id in range(BATCHES + 1)]
