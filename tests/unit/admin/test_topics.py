"""The metadata of named topics, when a topic counts as gone, and how a topic is created, over scripted nodes."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import PLACE, CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.faults import Proceed

from spark_kafka_sink.admin.topics import ABSENCE_LIMIT_MS, TopicAbsence, TopicsMetadata
from spark_kafka_sink.client.metadata_view import MetadataResponse, TopicMetadata
from spark_kafka_sink.common.cluster import Node, PartitionMetadata, TopicPartition
from spark_kafka_sink.common.errors import (
    InvalidTopicError,
    KafkaTimeoutError,
    ProtocolError,
    TopicAuthorizationError,
    TopicExistsError,
    UnknownTopicOrPartitionError,
)
from spark_kafka_sink.protocol.fetch import READ_UNCOMMITTED
from spark_kafka_sink.protocol.metadata import MetadataRequest
from spark_kafka_sink.protocol.versions import ApiKey

NODE = Node(0, "b", 9092)


def follow(*topics: str) -> TopicsMetadata:
    return TopicsMetadata(topics, 100, 1_000, 300_000, random.Random(1))


def answer(*topics: str) -> MetadataResponse:
    return MetadataResponse(
        {0: NODE},
        tuple(TopicMetadata(name, partitions=(PartitionMetadata(TopicPartition(name, 0), 0, 0),)) for name in topics),
    )


def test_request_names_only_its_topics_and_creates_none() -> None:
    request = follow("b", "a").new_metadata_request_and_version(0).request
    assert request == MetadataRequest(("a", "b"), allow_auto_topic_creation=False)


def test_request_without_topics_asks_only_for_brokers() -> None:
    assert follow().new_metadata_request_and_version(0).request.topics == ()


def test_added_topic_is_requested_at_once_and_without_others() -> None:
    metadata = follow("a")
    metadata.update(0, answer("a"), False, 1_000)
    metadata.add_topics(["a"])
    assert not metadata.update_requested()
    metadata.add_topics(["a", "b"])
    assert metadata.time_to_next_update(1_000) == 0
    asked = metadata.new_metadata_request_and_version(1_000)
    assert asked.is_partial
    assert asked.request.topics == ("b",)
    metadata.update(asked.request_version, answer("b", "x"), True, 1_000)
    assert metadata.fetch().topics == {"a", "b"}
    assert metadata.new_metadata_request_and_version(1_000).request.topics == ("a", "b")


def test_old_refusal_of_a_topic_is_not_raised_again() -> None:
    metadata = follow("a", "b")
    metadata.add_topics(["a"])
    metadata.update(0, MetadataResponse({0: NODE}, (TopicMetadata("b", 29),)), False, 1_000)
    metadata.maybe_raise_any_error()
    metadata.add_topics(["b"])
    metadata.maybe_raise_any_error()
    metadata.update(0, MetadataResponse({0: NODE}, (TopicMetadata("b", 29),)), False, 1_000)
    with pytest.raises(TopicAuthorizationError, match="b"):
        metadata.maybe_raise_any_error()


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


def test_topic_is_not_gone_while_no_node_answers(bench: CoordinatorBench) -> None:
    """Start the client again with its bootstrap addresses, without topics."""
    absence = TopicAbsence(bench.rig.metadata, bench.rig.clock)
    bench.rig.metadata.bootstrap([("broker-0", 9092)])
    for _ in range(2):
        absence.check(["t"])
        bench.rig.clock.sleep_ms(10 * ABSENCE_LIMIT_MS)


@pytest.mark.parametrize("api_key", [ApiKey.LIST_OFFSETS, ApiKey.FETCH])
def test_topic_deleted_during_a_read_is_not_awaited(bench: CoordinatorBench, api_key: ApiKey) -> None:
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


@pytest.mark.parametrize("api_key", [ApiKey.LIST_OFFSETS, ApiKey.FETCH])
def test_partition_that_goes_during_a_read_is_not_awaited(bench: CoordinatorBench, api_key: ApiKey) -> None:
    """Bug: a read of a topic that was created again with fewer partitions waited for its whole limit."""

    def create_again(cluster: ScriptedCluster, _: Exchange, proceed: Proceed) -> Answer:
        if len(cluster.topics["t"].partitions) > 1:
            cluster.delete_topic("t")
            cluster.create_topic("t")
        return proceed()

    bench.cluster.add_partitions("t", 2)
    update(bench)
    place, open_ = TopicPartition("t", 2), bench.raw.begin("somebody/0")
    bench.raw.write(open_, place, "row")
    bench.cluster.on(api_key, create_again)
    started_ms = bench.rig.now_ms
    with pytest.raises(UnknownTopicOrPartitionError, match="t-2: The topic has 1 partition"):
        bench.coordinator.topics.read_from(place, 0, bench.timer(), READ_UNCOMMITTED)
    assert ABSENCE_LIMIT_MS <= bench.rig.now_ms - started_ms < 2 * ABSENCE_LIMIT_MS


def ensure(bench: CoordinatorBench, topic: str, limit_ms: int = 60_000) -> int:
    return bench.coordinator.creation.ensure(topic, 5, 3, {"cleanup.policy": "compact"}, bench.timer(limit_ms))


def test_missing_topic_has_one_replica_per_node() -> None:
    bench = CoordinatorBench(node_count=2)
    assert ensure(bench, "decisions") == 5
    assert ensure(bench, "decisions") == 5
    (asked,) = bench.asked(ApiKey.CREATE_TOPICS)
    (topic,) = asked.request.topics
    assert (topic.num_partitions, topic.replication_factor) == (5, 2)
    assert [(config.name, config.value) for config in topic.configs] == [
        ("min.insync.replicas", "1"),
        ("cleanup.policy", "compact"),
    ]


def test_existing_topic_is_not_changed() -> None:
    bench = CoordinatorBench()
    assert ensure(bench, "t") == 1
    assert bench.asked(ApiKey.CREATE_TOPICS) == []


def test_topic_created_by_another_client_meanwhile_is_used() -> None:
    bench = CoordinatorBench()

    exists = faults.fail_with(TopicExistsError)

    def quicker(*arguments: Any) -> Any:
        bench.cluster.create_topic("decisions", 7)
        return exists(*arguments)

    bench.cluster.on(ApiKey.CREATE_TOPICS, quicker)
    assert ensure(bench, "decisions") == 7


def test_refused_creation_is_raised_with_the_topic() -> None:
    bench = CoordinatorBench()
    bench.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(TopicAuthorizationError))
    with pytest.raises(TopicAuthorizationError, match="decisions"):
        ensure(bench, "decisions")


def test_refused_topic_does_not_affect_later_ones() -> None:
    """One client serves all queries of its process: a query with a wrong decision.topic, and the corrected query."""
    bench = CoordinatorBench()
    with pytest.raises(InvalidTopicError, match="my decisions"):
        ensure(bench, "my decisions")
    assert ensure(bench, "decisions") == 5
    assert bench.coordinator.transactions.list_transactions(bench.timer()) == []
    with pytest.raises(InvalidTopicError, match="my decisions"):
        ensure(bench, "my decisions")


@pytest.mark.parametrize("name", ["my topic", "x" * 40_000, "\ud800"], ids=["invalid", "too long", "not unicode"])
def test_impossible_topic_does_not_affect_later_ones(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: the client went on to ask for it. No request can contain the long name or the one that is not text, so each
    later call over the client failed, of other sinks with the same settings too.
    """
    bench = CoordinatorBench()
    with pytest.raises((InvalidTopicError, ProtocolError)):
        bench.coordinator.creation.count(name, bench.timer())
    caplog.clear()
    assert bench.coordinator.creation.count("t", bench.timer()) == 1
    assert caplog.text == "", "the broker does not refuse it again"


def test_missing_topic_is_created_by_the_controller_with_zookeeper() -> None:
    """Brokers with ZooKeeper forward no request."""
    bench = CoordinatorBench()
    for controller in range(3):
        bench.cluster.controller_id = controller
        bench.cluster.scripts.clear()
        for other in {0, 1, 2} - {controller}:
            bench.cluster.on(
                ApiKey.CREATE_TOPICS, faults.fail_with(ErrorCode.not_controller), times=None, node_id=other
            )
        assert ensure(bench, f"decisions-{controller}") == 5


def test_quota_on_topic_creation_is_waited_for() -> None:
    """KIP-599: a broker refuses requests above the quota, and returns the time to wait."""
    bench = CoordinatorBench(node_count=1)
    exceeded = faults.fail_with(ErrorCode.throttling_quota_exceeded)

    def refuse(*arguments: Any) -> Answer:
        answer = exceeded(*arguments)
        return dataclasses.replace(answer, values={**(answer.values or {}), "throttle_time": 3_000})

    bench.cluster.on(ApiKey.CREATE_TOPICS, refuse)
    assert ensure(bench, "decisions") == 5
    refused, created = bench.asked(ApiKey.CREATE_TOPICS)
    assert created.now_ms - refused.now_ms >= 3_000


def test_quota_that_outlasts_the_limit_is_named() -> None:
    """Bug: the error said only that no answer came."""
    bench = CoordinatorBench(node_count=1)
    bench.cluster.throttle_ms = 60_000
    with pytest.raises(KafkaTimeoutError, match=r"decisions was neither .*broker-0:9092 \(id -1\) throttles this"):
        ensure(bench, "decisions", 3_000)


def test_topic_on_one_node_has_one_in_sync_replica() -> None:
    bench = CoordinatorBench(node_count=1)
    assert ensure(bench, "decisions") == 5
    (topic,) = bench.asked(ApiKey.CREATE_TOPICS)[0].request.topics
    assert ("min.insync.replicas", "1") in [(config.name, config.value) for config in topic.configs]


@pytest.mark.parametrize(
    "code", [ErrorCode.not_controller, ErrorCode.request_timed_out], ids=["not the controller", "timed out"]
)
def test_creation_with_a_retriable_error_is_repeated_with_pauses(code: int) -> None:
    bench = CoordinatorBench()
    bench.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(code), times=3)
    assert ensure(bench, "decisions") == 5
    times = [exchange.now_ms for exchange in bench.asked(ApiKey.CREATE_TOPICS)]
    assert len(times) == 4
    assert all(later - earlier >= 100 for earlier, later in pairwise(times))


def test_creation_missing_from_the_answer_is_repeated() -> None:
    bench = CoordinatorBench()
    bench.cluster.on(ApiKey.CREATE_TOPICS, lambda *_: Answer({"throttle_time": 0, "topics": []}))
    assert ensure(bench, "decisions") == 5
    assert len(bench.asked(ApiKey.CREATE_TOPICS)) == 2


def test_failing_topic_creation_ends_at_the_limit_with_its_cause() -> None:
    bench = CoordinatorBench()
    bench.cluster.on(ApiKey.CREATE_TOPICS, faults.fail_with(ErrorCode.not_controller), times=None)
    started_ms = bench.rig.now_ms
    with pytest.raises(
        KafkaTimeoutError, match=r"Topic decisions was neither found nor created within 3000 ms\. .*not the controller"
    ):
        ensure(bench, "decisions", 3_000)
    assert 3_000 <= bench.rig.now_ms - started_ms <= 3_200


@pytest.mark.parametrize("limit_ms", [3 * 10**9, 2**63 - 1], ids=["beyond 32 bits", "Long.MAX_VALUE"])
def test_slow_topic_creation_is_awaited(limit_ms: int) -> None:
    bench = CoordinatorBench()
    assert ensure(bench, "decisions", limit_ms) == 5


def test_cluster_that_returns_in_time_is_asked() -> None:
    bench = CoordinatorBench(node_count=1)
    bench.rig.network.refusing.add(0)
    bench.rig.selector.at(bench.rig.now_ms + 3_000, lambda: bench.rig.network.refusing.discard(0))
    assert ensure(bench, "decisions") == 5


# ---- a topic of the user ---------------------------------------------------------------------------------------------


def create_missing(bench: CoordinatorBench, topic: str, partitions: int | None = 4) -> bool:
    return bench.coordinator.creation.create_missing(topic, partitions, 2, {"retention.ms": "1"}, bench.timer(60_000))


def test_topic_is_created_as_requested_and_only_once() -> None:
    bench = CoordinatorBench()
    assert create_missing(bench, "orders")
    assert not create_missing(bench, "orders")
    (asked,) = bench.asked(ApiKey.CREATE_TOPICS)
    (topic,) = asked.request.topics
    assert (topic.num_partitions, topic.replication_factor) == (4, 2)
    assert [(config.name, config.value) for config in topic.configs] == [("retention.ms", "1")]


def test_numbers_that_are_not_given_are_left_to_the_brokers() -> None:
    bench = CoordinatorBench()
    assert bench.coordinator.creation.create_missing("orders", None, None, {}, bench.timer(60_000))
    (topic,) = bench.asked(ApiKey.CREATE_TOPICS)[0].request.topics
    assert (topic.num_partitions, topic.replication_factor) == (-1, -1)


def test_topic_that_was_deleted_since_is_created_again() -> None:
    """The client of the driver is kept between the batches of a query, and it remembers topics."""
    bench = CoordinatorBench()
    assert create_missing(bench, "orders")
    bench.cluster.delete_topic("orders")
    assert create_missing(bench, "orders")


def test_topic_of_a_quicker_driver_is_not_this_drivers() -> None:
    bench = CoordinatorBench()
    exists = faults.fail_with(TopicExistsError)

    def quicker(*arguments: Any) -> Any:
        bench.cluster.create_topic("orders", 7)
        return exists(*arguments)

    bench.cluster.on(ApiKey.CREATE_TOPICS, quicker)
    assert not create_missing(bench, "orders")


# ---- counting --------------------------------------------------------------------------------------------------------


def test_partition_count_of_a_missing_topic_is_zero() -> None:
    bench = CoordinatorBench()
    bench.cluster.create_topic("decisions", 7)
    assert bench.coordinator.creation.count("decisions", bench.timer()) == 7
    assert bench.coordinator.creation.count("missing", bench.timer()) == 0
    assert bench.asked(ApiKey.CREATE_TOPICS) == []


def test_cluster_that_does_not_answer_is_not_a_missing_topic() -> None:
    bench = CoordinatorBench(node_count=1)
    bench.rig.network.refusing.add(0)
    with pytest.raises(
        KafkaTimeoutError,
        match=r"Topic decisions was not looked up within 2000 ms\. No broker of bootstrap\.servers=broker-0:.*refused",
    ):
        bench.coordinator.creation.count("decisions", bench.timer(2_000))


def test_creating_a_missing_topic_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    bench = CoordinatorBench()
    assert ensure(bench, "decisions") == 5
    assert caplog.text == ""


def test_unreachable_cluster_is_reported_with_the_connection_error() -> None:
    bench = CoordinatorBench(node_count=1)
    bench.rig.network.refusing.add(0)
    with pytest.raises(KafkaTimeoutError, match=r"Topic decisions was neither found nor created .* Connection refused"):
        bench.coordinator.creation.ensure("decisions", 5, 3, {}, bench.timer(4_000))
