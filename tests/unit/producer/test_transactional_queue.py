"""Which request goes next, where to, and when again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kio.index import load_response_schema
from support.scripted_broker.responses import _build

from spark_kafka_sink.client.backoff import FOREVER_MS, ExponentialBackoff
from spark_kafka_sink.common.cluster import Node, TopicPartition
from spark_kafka_sink.producer import transactional_requests as requests
from spark_kafka_sink.producer.pending_operation import TransactionalResult
from spark_kafka_sink.producer.transactional_queue import TransactionalQueue
from spark_kafka_sink.producer.transactional_requests import GroupMetadata, TransactionalRequest
from spark_kafka_sink.protocol.coordinator_requests import TRANSACTION

PRODUCER = (1000, 0)
RESULT = TransactionalResult("any")
PLACE = TopicPartition("t", 0)
LOADING, NOT_COORDINATOR, CONCURRENT = 14, 16, 51


def done(_: object) -> None:
    """Nobody listens."""


def end() -> TransactionalRequest:
    return requests.end_txn("id", PRODUCER, True, 1, done, RESULT)


def add() -> TransactionalRequest:
    return requests.add_partitions("id", PRODUCER, [PLACE], done, RESULT)


def commit_offsets() -> TransactionalRequest:
    return requests.txn_offset_commit("id", PRODUCER, GroupMetadata("g"), {PLACE: (1, None)}, 1, done, RESULT)


def lookup() -> TransactionalRequest:
    return requests.find_coordinator(TRANSACTION, "id", done, RESULT)


@pytest.fixture
def queue() -> TransactionalQueue:
    return TransactionalQueue(ExponentialBackoff(100, 2, 1_000, 0, random.Random(1)))


def found(node_id: int) -> Any:
    values = {"error_code": 0, "error_message": None, "node_id": node_id, "host": f"host-{node_id}", "port": 9092}
    return _build(load_response_schema(10, 3), values)


def test_requests_go_by_priority_and_in_their_order(queue: TransactionalQueue) -> None:
    last, third, first, second, beginning = end(), commit_offsets(), add(), add(), lookup()
    for request in (last, third, first, second, beginning):
        queue.add(request)
    for request in (beginning, first, second, third, last):
        assert queue.first() is request
        queue.remove(request)
    assert queue.first() is None


def test_a_request_in_flight_is_not_waiting_any_more(queue: TransactionalQueue) -> None:
    request = add()
    queue.add(request)
    assert request in queue
    assert queue.take(request)
    assert request not in queue
    assert queue.in_flight is request
    assert queue.delay_ms(0) == FOREVER_MS


def test_a_request_that_was_taken_back_does_not_go_out(queue: TransactionalQueue) -> None:
    request = commit_offsets()
    queue.add(request)
    queue.clear_for_abort()
    assert not queue.take(request)
    assert queue.in_flight is None


def test_the_coordinator_is_looked_up_first_and_then_known(queue: TransactionalQueue) -> None:
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


def test_a_coordinator_is_forgotten_for_all_its_requests(queue: TransactionalQueue) -> None:
    queue.with_coordinator(add())[0].succeeded(found(4))
    queue.forget_coordinator(end())
    assert queue.with_coordinator(add())[1] is None
    queue.forget_coordinator(lookup())  # goes to any node: nothing to forget


def test_coordinators_of_names_that_never_come_again_are_not_kept_for_ever(queue: TransactionalQueue) -> None:
    for number in range(20_000):
        request = requests.add_partitions(f"id-{number}", PRODUCER, [PLACE], done, RESULT)
        asked, _ = queue.with_coordinator(request)
        queue.remove(asked)
        asked.succeeded(found(4))
        assert queue.with_coordinator(request) == (request, Node(4, "host-4", 9092))
    assert len(queue._coordinators) <= 10_000


def test_a_request_waits_longer_each_time(queue: TransactionalQueue) -> None:
    request = add()
    waits = []
    for _ in range(6):
        queue.again(request, LOADING, 1_000)
        waits.append(request.not_before_ms - 1_000)
        assert queue.delay_ms(1_000) == waits[-1]
        assert queue.take(request)
        queue.in_flight = None
    assert waits == [100, 200, 400, 800, 1_000, 1_000]


def test_the_end_of_the_transaction_before_is_waited_for_in_short_steps(queue: TransactionalQueue) -> None:
    request = add()
    waits = []
    for _ in range(8):
        queue.again(request, CONCURRENT, 0)
        waits.append(request.not_before_ms)
    assert waits == [20, 40, 80, 160, 320, 640, 1_000, 1_000]


def test_a_request_that_still_waits_is_not_queued_twice(queue: TransactionalQueue) -> None:
    request = add()
    queue.add(request)
    queue.again(request, 0, 0)
    queue.remove(request)
    assert queue.first() is None


def test_the_delay_is_that_of_the_first_that_may_go(queue: TransactionalQueue) -> None:
    assert queue.delay_ms(0) == FOREVER_MS
    early, late = add(), end()
    early.not_before_ms, late.not_before_ms = 300, 500
    queue.add(late)
    queue.add(early)
    assert queue.delay_ms(0) == 300
    assert queue.delay_ms(400) == 0


def test_an_abort_forgets_all_but_what_may_have_begun_the_transaction(queue: TransactionalQueue) -> None:
    sent, unsent, offsets, ending, finding = add(), add(), commit_offsets(), end(), lookup()
    for request in (sent, offsets, ending, finding):
        queue.again(request, NOT_COORDINATOR, 0)
    queue.add(unsent)
    queue.clear_for_abort()
    assert [request in queue for request in (sent, unsent, offsets, ending, finding)] == [True] + [False] * 4
    queue.clear()
    assert queue.first() is None
