"""What each error code leads to, what each request says, and how its answer is read."""

from __future__ import annotations

from typing import Any

import pytest
from kio.index import load_response_schema
from support.scripted_broker.responses import _build

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import (
    GroupAuthorizationError,
    TopicAuthorizationError,
    TransactionalIdAuthorizationError,
    UnknownServerError,
)
from spark_kafka_sink.producer import transactional_requests as requests
from spark_kafka_sink.producer.pending_operation import TransactionalResult
from spark_kafka_sink.producer.transactional_requests import (
    Action,
    GroupMetadata,
    Priority,
    Refusal,
    TransactionalRequest,
    action_for,
)
from spark_kafka_sink.protocol.coordinator_requests import GROUP, TRANSACTION

PRODUCER = (1000, 3)
RESULT = TransactionalResult("any")
PLACES = [TopicPartition("b", 1), TopicPartition("a", 2), TopicPartition("b", 0)]


def answer(api_key: int, version: int, values: dict[str, Any]) -> Any:
    return _build(load_response_schema(api_key, version), values)


def done(_: object) -> None:
    """Nobody listens."""


@pytest.mark.parametrize(
    ("action", "error_codes"),
    [
        (Action.RETRY, [12345, -1, 3, 7, 14, 51, 55]),
        (Action.FIND_COORDINATOR, [15, 16]),
        (Action.ABORT, [12, 22, 25, 28, 29, 30, 49, 59, 82, 120]),
        (Action.FAIL, [10, 24, 31, 35, 42, 47, 48, 50, 52, 53, 90]),
    ],
    ids=lambda value: value.name if isinstance(value, Action) else "",
)
def test_every_code_has_its_action(action: Action, error_codes: list[int]) -> None:
    assert {code: action_for(code) for code in error_codes} == dict.fromkeys(error_codes, action)


def test_the_gravest_action_counts_most() -> None:
    assert sorted(Action) == [Action.RETRY, Action.FIND_COORDINATOR, Action.ABORT, Action.FAIL]


@pytest.mark.parametrize(
    ("error_code", "error_class"),
    [(29, TopicAuthorizationError), (30, GroupAuthorizationError), (53, TransactionalIdAuthorizationError)],
)
def test_a_refusal_names_its_place_and_what_the_broker_said(error_code: int, error_class: type[Exception]) -> None:
    plain, told = (Refusal(error_code, "place", text).error("EndTxn", "1") for text in (None, "ask Ada"))
    assert type(plain) is type(told) is error_class
    assert str(plain).startswith("place: ")
    assert len(str(plain)) > len("place: ")
    assert str(told) == "place: ask Ada"
    assert plain.error_code == told.error_code == error_code


def test_a_code_without_a_class_keeps_its_number() -> None:
    assert Refusal(89, "place").error("EndTxn", "1").error_code == 89


def test_a_code_that_is_not_known_is_told_with_its_request_and_node() -> None:
    error = Refusal(999, "place", "odd").error("EndTxn", "1")
    assert isinstance(error, UnknownServerError)
    assert error.error_code == 999
    assert str(error) == (
        "place: Node 1 answered EndTxn with error code 999, which this client does not know. It said: odd"
    )


def all_requests() -> dict[Priority, TransactionalRequest]:
    made = [
        requests.find_coordinator(GROUP, "g", done, RESULT),
        requests.init_producer_id("t", 60_000, PRODUCER, done, RESULT),
        requests.add_partitions("t", PRODUCER, PLACES, done, RESULT),
        requests.txn_offset_commit("t", PRODUCER, GroupMetadata("g"), {PLACES[0]: (7, "x")}, 2, done, RESULT),
        requests.end_txn("t", PRODUCER, True, 2, done, RESULT),
    ]
    return {request.priority: request for request in made}


def test_every_request_goes_to_its_coordinator_in_its_turn() -> None:
    found = all_requests()
    assert sorted(found) == list(Priority)
    assert found[Priority.FIND_COORDINATOR].coordinator is None
    assert found[Priority.TXN_OFFSET_COMMIT].coordinator == (GROUP, "g")
    for priority in (Priority.INIT_PRODUCER_ID, Priority.ADD_PARTITIONS_OR_OFFSETS, Priority.END_TXN):
        assert found[priority].coordinator == (TRANSACTION, "t")
    offsets = requests.add_offsets("t", PRODUCER, "g", done, RESULT)
    assert (offsets.coordinator, offsets.priority) == ((TRANSACTION, "t"), Priority.ADD_PARTITIONS_OR_OFFSETS)


def test_what_adds_and_what_may_be_late() -> None:
    found = all_requests()
    assert [each for each in Priority if found[each].adds_to_transaction] == [Priority.ADD_PARTITIONS_OR_OFFSETS]
    assert [each for each in Priority if found[each].may_be_late] == [
        Priority.ADD_PARTITIONS_OR_OFFSETS,
        Priority.TXN_OFFSET_COMMIT,
        Priority.END_TXN,
    ]


@pytest.mark.parametrize("version", [3, 4])
def test_a_coordinator_is_found_or_why_not(version: int) -> None:
    request = requests.find_coordinator(TRANSACTION, "t", done, RESULT)

    def said(error_code: int, key: str = "t", text: str | None = None) -> list[Refusal]:
        values = {"error_code": error_code, "error_message": text, "node_id": 2, "host": "h", "port": 9}
        body = {"coordinators": [{"key": key, **values}]} if version >= 4 else values
        return list(request.refusals(answer(10, version, body)))

    assert said(0) == []
    assert said(53, text="ask Ada") == [Refusal(53, "transactional.id t", "ask Ada")]
    if version >= 4:
        assert said(0, key="other") == [Refusal(15, "transactional.id t")]
    group = requests.find_coordinator(GROUP, "g", done, RESULT)
    body = {"error_code": 30, "error_message": None, "node_id": 2, "host": "h", "port": 9}
    assert list(group.refusals(answer(10, 3, body))) == [Refusal(30, "group g")]


def test_a_producer_id_carries_the_one_held() -> None:
    request = requests.init_producer_id("t", 12_000, PRODUCER, done, RESULT)
    built = request.request.build(4)
    assert (built.transactional_id, built.producer_id, built.producer_epoch) == ("t", 1000, 3)
    assert built.transaction_timeout.total_seconds() == 12
    values = {"error_code": 90, "producer_id": -1, "producer_epoch": -1}
    assert list(request.refusals(answer(22, 4, values))) == [Refusal(90, "transactional.id t")]
    assert list(request.refusals(answer(22, 4, values | {"error_code": 0}))) == []


def test_partitions_are_added_by_topic_and_refused_one_by_one() -> None:
    request = requests.add_partitions("t", PRODUCER, PLACES, done, RESULT)
    built = request.request.build(3)
    named = [(topic.name, topic.partitions) for topic in built.v3_and_below_topics]
    assert named == [("a", (2,)), ("b", (0, 1))]
    assert (built.v3_and_below_producer_id, built.v3_and_below_producer_epoch) == PRODUCER
    results = [{"partition_index": index, "partition_error_code": code} for index, code in [(0, 29), (1, 55), (2, 0)]]
    others = [{"partition_index": 2, "partition_error_code": 0}]
    topics = [{"name": "b", "results_by_partition": results}, {"name": "a", "results_by_partition": others}]
    body = answer(24, 3, {"results_by_topic_v3_and_below": topics})
    assert list(request.refusals(body)) == [Refusal(29, "b-0"), Refusal(55, "b-1")]
    body = answer(24, 3, {"results_by_topic_v3_and_below": topics[:1]})
    assert list(request.refusals(body))[2:] == [Refusal(15, "a-2", "The answer does not mention it.")]


def test_a_group_is_added_and_refused_by_its_name() -> None:
    request = requests.add_offsets("t", PRODUCER, "g", done, RESULT)
    built = request.request.build(3)
    assert (built.transactional_id, built.producer_id, built.producer_epoch, built.group_id) == ("t", 1000, 3, "g")
    assert list(request.refusals(answer(25, 3, {"error_code": 30}))) == [Refusal(30, "group g")]


def test_offsets_go_with_their_texts_and_their_member() -> None:
    group = GroupMetadata("g", 5, "member", "instance")
    offsets = {PLACES[0]: (7, "rows=10"), PLACES[2]: (8, None), PLACES[1]: (9, "")}
    request = requests.txn_offset_commit("t", PRODUCER, group, offsets, 1, done, RESULT)
    assert request.request.latest_version == 4
    built = request.request.build(4)
    found = {
        (topic.name, each.partition_index): (each.committed_offset, each.committed_metadata)
        for topic in built.topics
        for each in topic.partitions
    }
    assert found == {("b", 1): (7, "rows=10"), ("b", 0): (8, None), ("a", 2): (9, "")}
    assert (built.group_id, built.generation_id, built.member_id, built.group_instance_id) == group
    partitions = [{"partition_index": 0, "error_code": 0}, {"partition_index": 1, "error_code": 22}]
    others = [{"partition_index": 2, "error_code": 0}]
    topics = [{"name": "b", "partitions": partitions}, {"name": "a", "partitions": others}]
    assert list(request.refusals(answer(28, 4, {"topics": topics}))) == [Refusal(22, "group g, b-1")]
    refusals = list(request.refusals(answer(28, 4, {"topics": topics[:1]})))
    assert refusals[1:] == [Refusal(15, "a-2", "The answer does not mention it.")]
    assert requests.txn_offset_commit("t", PRODUCER, group, offsets, 2, done, RESULT).request.latest_version == 5


def test_an_offset_that_is_refused_names_the_right_that_it_takes() -> None:
    """Not those of records, which the error's own sentence tells of."""
    request = requests.txn_offset_commit("t", PRODUCER, GroupMetadata("g"), {PLACES[0]: (7, None)}, 2, done, RESULT)
    topics = [{"name": "b", "partitions": [{"partition_index": 1, "error_code": 29}]}]
    (refusal,) = request.refusals(answer(28, 4, {"topics": topics}))
    assert isinstance(refusal.error("TxnOffsetCommit", "1"), TopicAuthorizationError)
    assert "group g, b-1: " in str(refusal.error("TxnOffsetCommit", "1"))
    assert "grant READ on it" in str(refusal.error("TxnOffsetCommit", "1"))


@pytest.mark.parametrize(("transaction_version", "latest"), [(1, 4), (2, 5)])
@pytest.mark.parametrize("committed", [True, False])
def test_an_end_says_which_and_in_the_version_of_its_transaction(
    transaction_version: int, latest: int, committed: bool
) -> None:
    request = requests.end_txn("t", PRODUCER, committed, transaction_version, done, RESULT)
    assert request.request.latest_version == latest
    built = request.request.build(latest)
    assert (built.transactional_id, built.producer_id, built.producer_epoch) == ("t", 1000, 3)
    assert built.committed is committed
    assert list(request.refusals(answer(26, 4, {"error_code": 48}))) == [Refusal(48, "transactional.id t")]
