"""A topic that is made where it is missing, and counted where it is there, on scripted nodes."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from support.coordinator_bench import CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.exchange import Answer

from spark_kafka_sink.common.errors import InvalidTopicError, KafkaTimeoutError, TopicAuthorizationError
from spark_kafka_sink.protocol.messages import ApiKey

CREATE_TOPICS = int(ApiKey.CREATE_TOPICS)


def ensure(bench: CoordinatorBench, topic: str, limit_ms: int = 60_000) -> int:
    return bench.coordinator.creation.ensure(topic, 5, 3, {"cleanup.policy": "compact"}, bench.timer(limit_ms))


def test_a_missing_topic_is_created_once_with_as_many_replicas_as_there_are_nodes() -> None:
    bench = CoordinatorBench(node_count=2)
    assert ensure(bench, "decisions") == 5
    assert ensure(bench, "decisions") == 5
    (asked,) = bench.asked(CREATE_TOPICS)
    (topic,) = asked.request.topics
    assert (topic.num_partitions, topic.replication_factor) == (5, 2)
    assert [(config.name, config.value) for config in topic.configs] == [
        ("min.insync.replicas", "1"),
        ("cleanup.policy", "compact"),
    ]


def test_a_topic_that_is_there_is_left_as_it_is() -> None:
    bench = CoordinatorBench()
    assert ensure(bench, "t") == 1
    assert bench.asked(CREATE_TOPICS) == []


def test_a_topic_that_somebody_else_creates_meanwhile_is_taken() -> None:
    bench = CoordinatorBench()

    exists = faults.fail_with(36)

    def quicker(*arguments: Any) -> Any:
        bench.cluster.create_topic("decisions", 7)
        return exists(*arguments)

    bench.cluster.on(CREATE_TOPICS, quicker)
    assert ensure(bench, "decisions") == 7


def test_a_refused_creation_is_raised_with_the_topic() -> None:
    bench = CoordinatorBench()
    bench.cluster.on(CREATE_TOPICS, faults.fail_with(29))
    with pytest.raises(TopicAuthorizationError, match="decisions"):
        ensure(bench, "decisions")


def test_a_topic_that_was_refused_before_is_nothing_to_who_wants_another() -> None:
    """A client serves all queries of its process: one under the wrong decision.topic, and the same corrected."""
    bench = CoordinatorBench()
    with pytest.raises(InvalidTopicError, match="my decisions"):
        ensure(bench, "my decisions")
    assert ensure(bench, "decisions") == 5
    assert bench.coordinator.transactions.list_transactions(bench.timer()) == []
    with pytest.raises(InvalidTopicError, match="my decisions"):
        ensure(bench, "my decisions")


def test_a_missing_topic_is_created_by_the_controller_where_no_other_node_may() -> None:
    """Brokers with ZooKeeper pass nothing on."""
    bench = CoordinatorBench()
    for controller in range(3):
        bench.cluster.controller_id = controller
        bench.cluster.scripts.clear()
        for other in {0, 1, 2} - {controller}:
            bench.cluster.on(CREATE_TOPICS, faults.fail_with(41), times=None, node_id=other)
        assert ensure(bench, f"decisions-{controller}") == 5


def test_a_quota_on_the_creation_of_topics_is_waited_out() -> None:
    """KIP-599: a broker refuses what goes beyond it, and says for how long."""
    bench = CoordinatorBench(node_count=1)
    exceeded = faults.fail_with(89)

    def refuse(*arguments: Any) -> Answer:
        answer = exceeded(*arguments)
        return dataclasses.replace(answer, values={**(answer.values or {}), "throttle_time": 3_000})

    bench.cluster.on(CREATE_TOPICS, refuse)
    assert ensure(bench, "decisions") == 5
    refused, created = bench.asked(CREATE_TOPICS)
    assert created.now_ms - refused.now_ms >= 3_000


def test_of_one_node_one_replica_is_in_sync() -> None:
    bench = CoordinatorBench(node_count=1)
    assert ensure(bench, "decisions") == 5
    (topic,) = bench.asked(CREATE_TOPICS)[0].request.topics
    assert ("min.insync.replicas", "1") in [(config.name, config.value) for config in topic.configs]


@pytest.mark.parametrize("code", [41, 7], ids=["not the controller", "timed out"])
def test_a_creation_that_fails_for_now_is_repeated_with_pauses(code: int) -> None:
    bench = CoordinatorBench()
    bench.cluster.on(CREATE_TOPICS, faults.fail_with(code), times=3)
    assert ensure(bench, "decisions") == 5
    times = [exchange.now_ms for exchange in bench.asked(CREATE_TOPICS)]
    assert len(times) == 4
    assert all(later - earlier >= 100 for earlier, later in pairwise(times))


def test_a_creation_that_an_answer_does_not_mention_is_repeated() -> None:
    bench = CoordinatorBench()
    bench.cluster.on(CREATE_TOPICS, lambda *_: Answer({"throttle_time": 0, "topics": []}))
    assert ensure(bench, "decisions") == 5
    assert len(bench.asked(CREATE_TOPICS)) == 2


def test_a_creation_that_never_comes_through_ends_at_the_limit_and_says_why() -> None:
    bench = CoordinatorBench()
    bench.cluster.on(CREATE_TOPICS, faults.fail_with(41), times=None)
    started_ms = bench.rig.now_ms
    with pytest.raises(
        KafkaTimeoutError, match=r"Topic decisions was neither found nor made within 3000 ms\. .*not the controller"
    ):
        ensure(bench, "decisions", 3_000)
    assert 3_000 <= bench.rig.now_ms - started_ms <= 3_200


@pytest.mark.parametrize("limit_ms", [3 * 10**9, 2**63 - 1], ids=["beyond 32 bits", "Long.MAX_VALUE"])
def test_a_topic_is_created_however_long_that_may_take(limit_ms: int) -> None:
    bench = CoordinatorBench()
    assert ensure(bench, "decisions", limit_ms) == 5


def test_a_cluster_that_comes_back_in_time_is_asked() -> None:
    bench = CoordinatorBench(node_count=1)
    bench.rig.network.refusing.add(0)
    bench.rig.selector.at(bench.rig.now_ms + 3_000, lambda: bench.rig.network.refusing.discard(0))
    assert ensure(bench, "decisions") == 5


# ---- counting --------------------------------------------------------------------------------------------------------


def test_partitions_are_counted_and_a_missing_topic_has_none_and_is_not_made() -> None:
    bench = CoordinatorBench()
    bench.cluster.create_topic("decisions", 7)
    assert bench.coordinator.creation.count("decisions", bench.timer()) == 7
    assert bench.coordinator.creation.count("missing", bench.timer()) == 0
    assert bench.asked(CREATE_TOPICS) == []


def test_a_cluster_that_does_not_answer_is_no_missing_topic() -> None:
    bench = CoordinatorBench(node_count=1)
    bench.rig.network.refusing.add(0)
    with pytest.raises(KafkaTimeoutError, match=r"Topic decisions was not looked up within 2000 ms\. .*refused"):
        bench.coordinator.creation.count("decisions", bench.timer(2_000))


def test_a_topic_that_is_made_because_it_is_missing_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    bench = CoordinatorBench()
    assert ensure(bench, "decisions") == 5
    assert caplog.text == ""


def test_a_topic_that_nobody_could_be_asked_for_is_told_with_what_the_connection_failed_of() -> None:
    bench = CoordinatorBench(node_count=1)
    bench.rig.network.refusing.add(0)
    with pytest.raises(KafkaTimeoutError, match=r"Topic decisions was neither found nor made .* Connection refused"):
        bench.coordinator.creation.ensure("decisions", 5, 3, {}, bench.timer(4_000))
