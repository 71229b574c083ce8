"""A transaction's requests: the action for each error code, the contents of each request and answer, and the queue."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from kio.index import load_response_schema
from kio.schema.errors import ErrorCode
from support.scripted_broker.responses import build_entity

from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.common.errors import (
    GroupAuthorizationError,
    TopicAuthorizationError,
    TransactionalIdAuthorizationError,
    UnknownServerError,
)
from spark_kafka_sink.common.open_transaction import OpenTransaction, ProducerIdAndEpoch
from spark_kafka_sink.producer import transaction_requests as requests
from spark_kafka_sink.producer.operations import OperationResult, PendingOperation
from spark_kafka_sink.producer.transaction_requests import (
    Action,
    GroupMetadata,
    Priority,
    Refusal,
    TransactionQueue,
    TransactionRequest,
    action_for,
)
from spark_kafka_sink.protocol.metadata import GROUP, TRANSACTION
from spark_kafka_sink.protocol.versions import ApiKey

PRODUCER = ProducerIdAndEpoch(1000, 3)
OPEN = OpenTransaction("t", *PRODUCER, 2)
V1 = OpenTransaction("id", *PRODUCER, 1)
RESULT = OperationResult("any")
PLACE = TopicPartition("t", 0)
PLACES = [TopicPartition("b", 1), TopicPartition("a", 2), TopicPartition("b", 0)]


# ---- error codes, requests, answers ----------------------------------------------------------------------------------


def answer(api_key: int, version: int, values: dict[str, Any]) -> Any:
    return build_entity(load_response_schema(api_key, version), values)


def done(_: object) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("action", "error_codes"),
    [
        (
            Action.RETRY,
            [
                12345,
                ErrorCode.unknown_server_error,
                ErrorCode.unknown_topic_or_partition,
                ErrorCode.request_timed_out,
                ErrorCode.coordinator_load_in_progress,
                ErrorCode.concurrent_transactions,
                ErrorCode.operation_not_attempted,
            ],
        ),
        (Action.FIND_COORDINATOR, [ErrorCode.coordinator_not_available, ErrorCode.not_coordinator]),
        (
            Action.ABORT,
            [
                ErrorCode.offset_metadata_too_large,
                ErrorCode.illegal_generation,
                ErrorCode.unknown_member_id,
                ErrorCode.invalid_commit_offset_size,
                ErrorCode.topic_authorization_failed,
                ErrorCode.group_authorization_failed,
                ErrorCode.unknown_producer_id,
                ErrorCode.fenced_instance_id,
                ErrorCode.transaction_abortable,
            ],
        ),
        (
            Action.FAIL,
            [
                ErrorCode.message_too_large,
                ErrorCode.invalid_group_id,
                ErrorCode.cluster_authorization_failed,
                ErrorCode.unsupported_version,
                ErrorCode.invalid_request,
                ErrorCode.invalid_producer_epoch,
                ErrorCode.invalid_txn_state,
                ErrorCode.invalid_producer_id_mapping,
                ErrorCode.invalid_transaction_timeout,
                ErrorCode.transaction_coordinator_fenced,
                ErrorCode.transactional_id_authorization_failed,
                ErrorCode.producer_fenced,
            ],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Action) else "",
)
def test_every_code_has_its_action(action: Action, error_codes: list[int]) -> None:
    assert {code: action_for(code) for code in error_codes} == dict.fromkeys(error_codes, action)


def test_most_severe_action_counts() -> None:
    assert sorted(Action) == [Action.RETRY, Action.FIND_COORDINATOR, Action.ABORT, Action.FAIL]


@pytest.mark.parametrize(
    ("error_code", "error_class"),
    [
        (ErrorCode.topic_authorization_failed, TopicAuthorizationError),
        (ErrorCode.group_authorization_failed, GroupAuthorizationError),
        (ErrorCode.transactional_id_authorization_failed, TransactionalIdAuthorizationError),
    ],
)
def test_refusal_has_its_place_and_the_brokers_text(error_code: int, error_class: type[Exception]) -> None:
    plain, reported = (Refusal(error_code, "place", text).error("EndTxn", "1") for text in (None, "ask Ada"))
    assert type(plain) is type(reported) is error_class
    assert str(plain).startswith("place: ")
    assert len(str(plain)) > len("place: ")
    assert str(reported) == "place: ask Ada"
    assert plain.error_code == reported.error_code == error_code


def test_a_code_without_a_class_keeps_its_number() -> None:
    assert (
        Refusal(ErrorCode.throttling_quota_exceeded, "place").error("EndTxn", "1").error_code
        == ErrorCode.throttling_quota_exceeded
    )


def test_unknown_code_is_named_with_request_and_node() -> None:
    error = Refusal(999, "place", "odd").error("EndTxn", "1")
    assert isinstance(error, UnknownServerError)
    assert error.error_code == 999
    assert str(error) == (
        "place: Node 1 answered EndTxn with error code 999, which this client does not know. It said: odd"
    )


def all_requests() -> dict[Priority, TransactionRequest]:
    made = [
        requests.find_coordinator(GROUP, "g", done, RESULT),
        requests.init_producer_id("t", 60_000, PRODUCER, done, RESULT),
        requests.add_partitions(OPEN, PLACES, done, RESULT),
        requests.txn_offset_commit(OPEN, GroupMetadata("g"), {PLACES[0]: (7, "x")}, RESULT),
        requests.end_txn(OPEN, True, done, RESULT),
    ]
    return {request.priority: request for request in made}


def test_every_request_goes_to_its_coordinator_in_its_turn() -> None:
    found = all_requests()
    assert sorted(found) == list(Priority)
    assert found[Priority.FIND_COORDINATOR].coordinator is None
    assert found[Priority.TXN_OFFSET_COMMIT].coordinator == (GROUP, "g")
    for priority in (Priority.INIT_PRODUCER_ID, Priority.ADD_PARTITIONS_OR_OFFSETS, Priority.END_TXN):
        assert found[priority].coordinator == (TRANSACTION, "t")
    offsets = requests.add_offsets(OPEN, "g", done, RESULT)
    assert (offsets.coordinator, offsets.priority) == ((TRANSACTION, "t"), Priority.ADD_PARTITIONS_OR_OFFSETS)


def test_requests_that_add_or_may_arrive_late_are_marked() -> None:
    found = all_requests()
    assert [each for each in Priority if found[each].adds_to_transaction] == [Priority.ADD_PARTITIONS_OR_OFFSETS]
    assert [each for each in Priority if found[each].may_be_late] == [
        Priority.ADD_PARTITIONS_OR_OFFSETS,
        Priority.TXN_OFFSET_COMMIT,
        Priority.END_TXN,
    ]


@pytest.mark.parametrize("version", [3, 4])
def test_coordinator_is_found_or_the_reason_given(version: int) -> None:
    request = requests.find_coordinator(TRANSACTION, "t", done, RESULT)

    def said(error_code: int, key: str = "t", text: str | None = None) -> list[Refusal]:
        values = {"error_code": error_code, "error_message": text, "node_id": 2, "host": "h", "port": 9}
        body = {"coordinators": [{"key": key, **values}]} if version >= 4 else values
        return list(request.refusals(answer(ApiKey.FIND_COORDINATOR, version, body)))

    assert said(0) == []
    assert said(ErrorCode.transactional_id_authorization_failed, text="ask Ada") == [
        Refusal(ErrorCode.transactional_id_authorization_failed, "transactional.id t", "ask Ada")
    ]
    if version >= 4:
        assert said(0, key="other") == [Refusal(ErrorCode.coordinator_not_available, "transactional.id t")]
    group = requests.find_coordinator(GROUP, "g", done, RESULT)
    body = {
        "error_code": ErrorCode.group_authorization_failed,
        "error_message": None,
        "node_id": 2,
        "host": "h",
        "port": 9,
    }
    assert list(group.refusals(answer(ApiKey.FIND_COORDINATOR, 3, body))) == [
        Refusal(ErrorCode.group_authorization_failed, "group g")
    ]


def test_request_for_a_producer_id_has_the_present_one() -> None:
    request = requests.init_producer_id("t", 12_000, PRODUCER, done, RESULT)
    built = request.request.build(4)
    assert (built.transactional_id, built.producer_id, built.producer_epoch) == ("t", 1000, 3)
    assert built.transaction_timeout.total_seconds() == 12
    values = {"error_code": ErrorCode.producer_fenced, "producer_id": -1, "producer_epoch": -1}
    assert list(request.refusals(answer(ApiKey.INIT_PRODUCER_ID, 4, values))) == [
        Refusal(ErrorCode.producer_fenced, "transactional.id t")
    ]
    (without_id,) = request.refusals(answer(ApiKey.INIT_PRODUCER_ID, 4, values | {"error_code": 0}))
    assert without_id.action is requests.Action.FIND_COORDINATOR
    assert list(request.refusals(answer(ApiKey.INIT_PRODUCER_ID, 4, {"error_code": 0, "producer_id": 0}))) == []


def test_partitions_are_added_by_topic_and_refused_one_by_one() -> None:
    request = requests.add_partitions(OPEN, PLACES, done, RESULT)
    built = request.request.build(3)
    named = [(topic.name, topic.partitions) for topic in built.v3_and_below_topics]
    assert named == [("a", (2,)), ("b", (0, 1))]
    assert (built.v3_and_below_producer_id, built.v3_and_below_producer_epoch) == PRODUCER
    codes = [ErrorCode.topic_authorization_failed, ErrorCode.operation_not_attempted, 0]
    results = [{"partition_index": index, "partition_error_code": code} for index, code in enumerate(codes)]
    others = [{"partition_index": 2, "partition_error_code": 0}]
    topics = [{"name": "b", "results_by_partition": results}, {"name": "a", "results_by_partition": others}]
    body = answer(ApiKey.ADD_PARTITIONS_TO_TXN, 3, {"results_by_topic_v3_and_below": topics})
    assert list(request.refusals(body)) == [
        Refusal(ErrorCode.topic_authorization_failed, "b-0"),
        Refusal(ErrorCode.operation_not_attempted, "b-1"),
    ]
    body = answer(ApiKey.ADD_PARTITIONS_TO_TXN, 3, {"results_by_topic_v3_and_below": topics[:1]})
    assert list(request.refusals(body))[2:] == [
        Refusal(ErrorCode.coordinator_not_available, "a-2", "The answer does not mention it.")
    ]


def test_a_group_is_added_and_refused_by_its_name() -> None:
    request = requests.add_offsets(OPEN, "g", done, RESULT)
    built = request.request.build(3)
    assert (built.transactional_id, built.producer_id, built.producer_epoch, built.group_id) == ("t", 1000, 3, "g")
    assert list(
        request.refusals(answer(ApiKey.ADD_OFFSETS_TO_TXN, 3, {"error_code": ErrorCode.group_authorization_failed}))
    ) == [Refusal(ErrorCode.group_authorization_failed, "group g")]


def test_offsets_go_with_their_texts_and_their_member() -> None:
    group = GroupMetadata("g", 5, "member", "instance")
    offsets = {PLACES[0]: (7, "rows=10"), PLACES[2]: (8, None), PLACES[1]: (9, "")}
    request = requests.txn_offset_commit(OPEN._replace(transaction_version=1), group, offsets, RESULT)
    assert request.request.latest_version == 4
    built = request.request.build(4)
    found = {
        (topic.name, each.partition_index): (each.committed_offset, each.committed_metadata)
        for topic in built.topics
        for each in topic.partitions
    }
    assert found == {("b", 1): (7, "rows=10"), ("b", 0): (8, None), ("a", 2): (9, "")}
    assert group == GroupMetadata(built.group_id, built.generation_id, built.member_id, built.group_instance_id)
    partitions = [
        {"partition_index": 0, "error_code": 0},
        {"partition_index": 1, "error_code": ErrorCode.illegal_generation},
    ]
    others = [{"partition_index": 2, "error_code": 0}]
    topics = [{"name": "b", "partitions": partitions}, {"name": "a", "partitions": others}]
    assert list(request.refusals(answer(ApiKey.TXN_OFFSET_COMMIT, 4, {"topics": topics}))) == [
        Refusal(ErrorCode.illegal_generation, "group g, b-1")
    ]
    refusals = list(request.refusals(answer(ApiKey.TXN_OFFSET_COMMIT, 4, {"topics": topics[:1]})))
    assert refusals[1:] == [Refusal(ErrorCode.coordinator_not_available, "a-2", "The answer does not mention it.")]
    assert requests.txn_offset_commit(OPEN, group, offsets, RESULT).request.latest_version == 5


def test_refused_offset_names_the_required_right() -> None:
    """The error does not use the class's sentence, which is about records."""
    request = requests.txn_offset_commit(OPEN, GroupMetadata("g"), {PLACES[0]: (7, None)}, RESULT)
    topics = [{"name": "b", "partitions": [{"partition_index": 1, "error_code": ErrorCode.topic_authorization_failed}]}]
    (refusal,) = request.refusals(answer(ApiKey.TXN_OFFSET_COMMIT, 4, {"topics": topics}))
    assert isinstance(refusal.error("TxnOffsetCommit", "1"), TopicAuthorizationError)
    assert "group g, b-1: " in str(refusal.error("TxnOffsetCommit", "1"))
    assert "grant READ on it" in str(refusal.error("TxnOffsetCommit", "1"))


@pytest.mark.parametrize(("transaction_version", "latest"), [(1, 4), (2, 5)])
@pytest.mark.parametrize("committed", [True, False])
def test_end_has_its_outcome_and_the_version_of_its_transaction(
    transaction_version: int, latest: int, committed: bool
) -> None:
    request = requests.end_txn(OPEN._replace(transaction_version=transaction_version), committed, done, RESULT)
    assert request.request.latest_version == latest
    built = request.request.build(latest)
    assert (built.transactional_id, built.producer_id, built.producer_epoch) == ("t", 1000, 3)
    assert built.committed is committed
    assert list(request.refusals(answer(ApiKey.END_TXN, 4, {"error_code": ErrorCode.invalid_txn_state}))) == [
        Refusal(ErrorCode.invalid_txn_state, "transactional.id t")
    ]


# ---- the next request, its node, and its retry
# ------------------------------------------------------------------------


def end() -> TransactionRequest:
    return requests.end_txn(V1, True, done, RESULT)


def add() -> TransactionRequest:
    return requests.add_partitions(V1, [PLACE], done, RESULT)


def ignore(_: object) -> None:
    """Undo nothing."""


def commit_offsets() -> TransactionRequest:
    return requests.txn_offset_commit(V1, GroupMetadata("g"), {PLACE: (1, None)}, RESULT)


def lookup() -> TransactionRequest:
    return requests.find_coordinator(TRANSACTION, "id", done, RESULT)


@pytest.fixture
def queue() -> TransactionQueue:
    backoff, pending = ExponentialBackoff(100, 2, 1_000, 0, random.Random(1)), PendingOperation(ignore)
    return TransactionQueue("id", backoff, threading.RLock(), pending, tuple)


def found(node_id: int) -> Any:
    values = {"error_code": 0, "error_message": None, "node_id": node_id, "host": f"host-{node_id}", "port": 9092}
    return build_entity(load_response_schema(ApiKey.FIND_COORDINATOR, 3), values)


def test_requests_go_by_priority_and_in_their_order(queue: TransactionQueue) -> None:
    last, third, first, second, beginning = end(), commit_offsets(), add(), add(), lookup()
    for request in (last, third, first, second, beginning):
        queue.add(request)
    for request in (beginning, first, second, third, last):
        assert queue.first() is request
        queue.remove(request)
    assert queue.first() is None


def test_request_in_flight_is_not_waiting(queue: TransactionQueue) -> None:
    request = add()
    queue.add(request)
    assert request in queue
    assert queue.take(request)
    assert request not in queue
    assert queue.in_flight is request
    assert queue.delay_ms(0) == FOREVER_MS


def test_a_request_that_was_taken_back_does_not_go_out(queue: TransactionQueue) -> None:
    request = commit_offsets()
    queue.add(request)
    queue.clear_for_abort()
    assert not queue.take(request)
    assert queue.in_flight is None


def test_the_coordinator_is_looked_up_first_and_then_known(queue: TransactionQueue) -> None:
    request = add()
    request.attempts, request.not_before_ms = 2, 700
    queue.add(request)
    asked, node = queue.with_coordinator(request)
    assert (asked.priority, node) == (requests.Priority.FIND_COORDINATOR, None)
    assert (asked.attempts, asked.not_before_ms) == (2, 700)
    assert queue.first() is asked
    assert queue.with_coordinator(asked) == (asked, None)
    queue.remove(asked)
    asked.succeeded(found(4))
    assert queue.with_coordinator(request) == (request, Node(4, "host-4", 9092))
    group = commit_offsets()
    assert queue.with_coordinator(group)[0] is not group


def test_a_coordinator_is_forgotten_for_all_its_requests(queue: TransactionQueue) -> None:
    queue.with_coordinator(add())[0].succeeded(found(4))
    queue.forget_coordinator(end())
    assert queue.with_coordinator(add())[1] is None
    queue.forget_coordinator(lookup())  # for any node, so no coordinator is forgotten


def test_coordinators_of_another_client_need_no_lookup_and_replace_none(queue: TransactionQueue) -> None:
    request, other = add(), requests.add_partitions(V1._replace(transactional_id="other"), [PLACE], done, RESULT)
    assert request.coordinator is not None
    assert other.coordinator is not None
    queue.use_coordinators({request.coordinator: Node(1, "one", 1)})
    assert queue.with_coordinator(request) == (request, Node(1, "one", 1))
    queue.use_coordinators({request.coordinator: Node(2, "two", 2), other.coordinator: Node(2, "two", 2)})
    assert queue.with_coordinator(request) == (request, Node(1, "one", 1))
    assert queue.with_coordinator(other) == (other, Node(2, "two", 2))
    queue.forget_coordinator(request)
    assert queue.with_coordinator(request)[0] is not request


def test_number_of_remembered_coordinators_is_limited(queue: TransactionQueue) -> None:
    made = [
        requests.add_partitions(V1._replace(transactional_id=f"id-{number}"), [PLACE], done, RESULT)
        for number in range(20_000)
    ]
    for request in made:
        asked, _ = queue.with_coordinator(request)
        queue.remove(asked)
        asked.succeeded(found(4))
        assert queue.with_coordinator(request) == (request, Node(4, "host-4", 9092))
    known = [queue.with_coordinator(request)[1] for request in made]
    assert sum(node is not None for node in known) <= 10_000


def test_a_request_waits_longer_each_time(queue: TransactionQueue) -> None:
    request = add()
    waits = []
    for _ in range(6):
        queue.again(request, ErrorCode.coordinator_load_in_progress, 1_000)
        waits.append(request.not_before_ms - 1_000)
        assert queue.delay_ms(1_000) == waits[-1]
        assert queue.take(request)
        queue.in_flight = None
    assert waits == [100, 200, 400, 800, 1_000, 1_000]


def test_previous_transaction_is_waited_for_in_short_steps(queue: TransactionQueue) -> None:
    request = add()
    waits = []
    for _ in range(8):
        queue.again(request, ErrorCode.concurrent_transactions, 0)
        waits.append(request.not_before_ms)
    assert waits == [20, 40, 80, 160, 320, 640, 1_000, 1_000]


def test_a_request_that_still_waits_is_not_queued_twice(queue: TransactionQueue) -> None:
    request = add()
    queue.add(request)
    queue.again(request, 0, 0)
    queue.remove(request)
    assert queue.first() is None


def test_delay_is_that_of_the_earliest_request(queue: TransactionQueue) -> None:
    assert queue.delay_ms(0) == FOREVER_MS
    early, late = add(), end()
    early.not_before_ms, late.not_before_ms = 300, 500
    queue.add(late)
    queue.add(early)
    assert queue.delay_ms(0) == 300
    assert queue.delay_ms(400) == 0


def test_abort_keeps_only_requests_that_may_have_begun_the_transaction(queue: TransactionQueue) -> None:
    sent, unsent, offsets, ending, finding = add(), add(), commit_offsets(), end(), lookup()
    for request in (sent, offsets, ending, finding):
        queue.again(request, ErrorCode.not_coordinator, 0)
    queue.add(unsent)
    queue.clear_for_abort()
    assert [request in queue for request in (sent, unsent, offsets, ending, finding)] == [True] + [False] * 4
    queue.clear()
    assert queue.first() is None
