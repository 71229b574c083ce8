"""When a topic counts as gone, and when it may only be out of reach."""

from __future__ import annotations

import pytest
from support.coordinator_bench import PLACE, CoordinatorBench
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.faults import Proceed

from spark_kafka_sink.admin.topic_absence import ABSENCE_LIMIT_MS, TopicAbsence
from spark_kafka_sink.common.errors import UnknownTopicOrPartitionError
from spark_kafka_sink.protocol.messages import ApiKey
from spark_kafka_sink.protocol.requests import READ_UNCOMMITTED


@pytest.fixture
def bench() -> CoordinatorBench:
    made = CoordinatorBench()
    made.coordinator.creation.count("t", made.timer())
    return made


def update(bench: CoordinatorBench) -> None:
    bench.coordinator.creation.count("t", bench.timer())


def test_topic_counts_as_gone_after_ten_seconds(bench: CoordinatorBench) -> None:
    absence = TopicAbsence(bench.rig.metadata, bench.rig.clock)
    absence.check(["t"])
    bench.cluster.delete_topic("t")
    update(bench)
    absence.check(["t"])
    bench.rig.clock.sleep_ms(ABSENCE_LIMIT_MS - 1)
    absence.check(["t"])
    bench.rig.clock.sleep_ms(1)
    with pytest.raises(UnknownTopicOrPartitionError, match="Topic 't' is not in the cluster any more"):
        absence.check(["t"])


def test_topic_that_comes_back_is_not_gone(bench: CoordinatorBench) -> None:
    absence = TopicAbsence(bench.rig.metadata, bench.rig.clock)
    topic = bench.cluster.topics["t"]
    for is_visible in (False, True, False):
        topic.is_visible = is_visible
        update(bench)
        absence.check(["t"])
        bench.rig.clock.sleep_ms(ABSENCE_LIMIT_MS - 2_000)


def test_topic_is_not_gone_where_no_node_answers(bench: CoordinatorBench) -> None:
    """The client has begun again with its bootstrap addresses, and knows no topic."""
    absence = TopicAbsence(bench.rig.metadata, bench.rig.clock)
    bench.rig.metadata.bootstrap([("broker-0", 9092)])
    for _ in range(2):
        absence.check(["t"])
        bench.rig.clock.sleep_ms(10 * ABSENCE_LIMIT_MS)


@pytest.mark.parametrize("api_key", [ApiKey.LIST_OFFSETS, ApiKey.FETCH])
def test_topic_deleted_while_it_is_read_is_not_waited_for(bench: CoordinatorBench, api_key: ApiKey) -> None:
    def delete(cluster: ScriptedCluster, _: Exchange, proceed: Proceed) -> Answer:
        if "t" in cluster.topics:
            cluster.delete_topic("t")
        return proceed()

    bench.open("somebody/0")
    bench.cluster.on(api_key, delete)
    started_ms = bench.rig.now_ms
    with pytest.raises(UnknownTopicOrPartitionError, match="Topic 't' is not in the cluster any more"):
        bench.coordinator.topics.read_from(PLACE, 0, bench.timer(), READ_UNCOMMITTED)
    assert ABSENCE_LIMIT_MS <= bench.rig.now_ms - started_ms < 2 * ABSENCE_LIMIT_MS
