from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from support.coordinator_bench import PLACE, CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.transaction_coordinator import Commit
from support.scripted_broker.versions import KAFKA_2_1, KAFKA_3_0

from spark_kafka_sink.admin.group_offsets import CommittedOffset
from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    GroupAuthorizationError,
    KafkaTimeoutError,
    TopicAuthorizationError,
    UnsupportedVersionError,
)
from spark_kafka_sink.protocol.versions import ApiKey

OTHER = TopicPartition("u", 3)


@pytest.fixture
def bench() -> CoordinatorBench:
    made = CoordinatorBench()
    made.cluster.transactions.offsets = {
        "g": {("t", 0): Commit(5, "rows=5"), ("u", 3): Commit(0, None)},
        "h": {("t", 0): Commit(7, "")},
    }
    made.cluster.coordinators.update({"g": 0, "h": 1})
    return made


def test_offsets_and_texts_of_several_groups_come_from_their_coordinators(bench: CoordinatorBench) -> None:
    expected = {"g": [PLACE, OTHER, TopicPartition("t", 9)], "h": [PLACE]}
    assert bench.coordinator.groups.fetch_offsets(expected, bench.timer()) == {
        "g": {PLACE: CommittedOffset(5, "rows=5"), OTHER: CommittedOffset(0, ""), expected["g"][2]: None},
        "h": {PLACE: CommittedOffset(7, "")},
    }
    asked = bench.asked(ApiKey.OFFSET_FETCH)
    assert sorted((exchange.node_id, exchange.request.groups[0].group_id) for exchange in asked) == [
        (0, "g"),
        (1, "h"),
    ]
    assert all(exchange.request.require_stable for exchange in asked)


def test_offsets_of_all_topics_come_without_naming_them(bench: CoordinatorBench) -> None:
    found = bench.coordinator.groups.fetch_all_offsets(["g", "unknown"], bench.timer())
    assert found == {"g": {PLACE: CommittedOffset(5, "rows=5"), OTHER: CommittedOffset(0, "")}, "unknown": {}}
    assert [exchange.request.groups[0].topics for exchange in bench.asked(ApiKey.OFFSET_FETCH)] == [None, None]


def test_offsets_of_all_topics_do_not_wait_for_open_transactions(bench: CoordinatorBench) -> None:
    (open_,) = bench.open("id")
    bench.raw.mark(open_, "g", PLACE, 6, "rows=6")
    started_ms = bench.rig.now_ms
    assert bench.coordinator.groups.fetch_all_offsets(["g"], bench.timer())["g"][PLACE] == CommittedOffset(5, "rows=5")
    assert bench.rig.now_ms - started_ms < 100


def test_unstable_offset_is_waited_for(bench: CoordinatorBench) -> None:
    bench.cluster.transactions.marker_delay_ms = 200
    (open_,) = bench.open("id")
    bench.raw.mark(open_, "g", PLACE, 6, "rows=6")
    bench.commit(open_)
    started_ms = bench.rig.now_ms
    found = bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer())
    assert found == {"g": {PLACE: CommittedOffset(6, "rows=6")}}
    assert 150 <= bench.rig.now_ms - started_ms <= 500
    assert len(bench.asked(ApiKey.OFFSET_FETCH)) > 2


def test_unstable_offset_does_not_hide_another_error(bench: CoordinatorBench) -> None:
    def spoil(values: dict[str, Any]) -> dict[str, Any]:
        (group,) = values["groups"]
        codes = iter([ErrorCode.unstable_offset_commit, ErrorCode.topic_authorization_failed])
        topics = [
            topic | {"partitions": [each | {"error_code": next(codes)} for each in topic["partitions"]]}
            for topic in group["topics"]
        ]
        return {"groups": [group | {"topics": topics}]}

    bench.cluster.on(ApiKey.OFFSET_FETCH, faults.change(spoil), times=None)
    with pytest.raises(TopicAuthorizationError, match=r"group 'g'.*grant DESCRIBE"):
        bench.coordinator.groups.fetch_offsets({"g": [PLACE, OTHER]}, bench.timer())


def test_group_error_is_not_an_empty_result(bench: CoordinatorBench) -> None:
    def refuse(values: dict[str, Any]) -> dict[str, Any]:
        return {"groups": [values["groups"][0] | {"topics": [], "error_code": ErrorCode.coordinator_load_in_progress}]}

    bench.cluster.on(ApiKey.OFFSET_FETCH, faults.change(refuse), times=2)
    found = bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer())
    assert found == {"g": {PLACE: CommittedOffset(5, "rows=5")}}
    assert len(bench.asked(ApiKey.OFFSET_FETCH)) == 3


def test_group_error_is_raised_without_partitions(bench: CoordinatorBench) -> None:
    def refuse(values: dict[str, Any]) -> dict[str, Any]:
        return {"groups": [values["groups"][0] | {"topics": [], "error_code": ErrorCode.group_authorization_failed}]}

    bench.cluster.on(ApiKey.OFFSET_FETCH, faults.change(refuse), times=None)
    with pytest.raises(GroupAuthorizationError, match=r"group 'g'.*grant DESCRIBE on it"):
        bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer())
    assert len(bench.asked(ApiKey.OFFSET_FETCH)) == 1


def test_unauthorized_group_read_names_the_permission(bench: CoordinatorBench) -> None:
    bench.cluster.on(ApiKey.OFFSET_FETCH, faults.fail_with(GroupAuthorizationError))
    with pytest.raises(GroupAuthorizationError, match=r"group 'g'.*broker-0.*grant DESCRIBE on it, which READ"):
        bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer())


def test_moved_group_is_asked_for_at_its_new_coordinator(bench: CoordinatorBench) -> None:
    bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer())
    bench.cluster.coordinators["g"] = 2
    found = bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer())
    assert found["g"][PLACE] == CommittedOffset(5, "rows=5")
    assert [exchange.node_id for exchange in bench.asked(ApiKey.OFFSET_FETCH)] == [0, 0, 2]


def test_answer_about_another_group_does_not_count(bench: CoordinatorBench) -> None:
    def rename(values: dict[str, Any]) -> dict[str, Any]:
        return {"groups": [values["groups"][0] | {"group_id": "h"}]}

    bench.cluster.on(ApiKey.OFFSET_FETCH, faults.change(rename), times=None)
    with pytest.raises(KafkaTimeoutError, match=r"group 'g'.*does not mention"):
        bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer(500))


def test_partition_missing_in_a_response_is_requested_again(bench: CoordinatorBench) -> None:
    def shorten(values: dict[str, Any]) -> dict[str, Any]:
        return {"groups": [values["groups"][0] | {"topics": values["groups"][0]["topics"][:1]}]}

    bench.cluster.on(ApiKey.OFFSET_FETCH, faults.change(shorten), times=2)
    found = bench.coordinator.groups.fetch_offsets({"g": [PLACE, OTHER]}, bench.timer())
    assert found == {"g": {PLACE: CommittedOffset(5, "rows=5"), OTHER: CommittedOffset(0, "")}}
    assert len(bench.asked(ApiKey.OFFSET_FETCH)) == 3


@pytest.mark.parametrize("is_group_repeated", [False, True])
def test_contradictory_answer_is_requested_again(bench: CoordinatorBench, is_group_repeated: bool) -> None:
    """Bug: the last offset of a partition counted, and the first answer of a group."""

    def contradict(values: dict[str, Any]) -> dict[str, Any]:
        (group,) = values["groups"]
        (topic,) = group["topics"]
        other = topic | {"partitions": [each | {"committed_offset": 4} for each in topic["partitions"]]}
        if is_group_repeated:
            return {"groups": [group | {"topics": [other]}, group]}
        return {"groups": [group | {"topics": [topic, other]}]}

    bench.cluster.on(ApiKey.OFFSET_FETCH, faults.change(contradict), times=2)
    found = bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer())
    assert found == {"g": {PLACE: CommittedOffset(5, "rows=5")}}
    assert len(bench.asked(ApiKey.OFFSET_FETCH)) == 3


def test_broker_with_one_group_per_request_is_supported(bench: CoordinatorBench) -> None:
    bench.cluster.versions = {**KAFKA_3_0, ApiKey.OFFSET_FETCH: (0, 7)}
    found = bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer())
    assert found == {"g": {PLACE: CommittedOffset(5, "rows=5")}}


def test_broker_that_cannot_wait_for_stable_offsets_is_refused(bench: CoordinatorBench) -> None:
    bench.cluster.versions = KAFKA_2_1
    with pytest.raises(UnsupportedVersionError, match=r"group .g.*versions 0 to 5 of OFFSET_FETCH"):
        bench.coordinator.groups.fetch_offsets({"g": [PLACE]}, bench.timer())
