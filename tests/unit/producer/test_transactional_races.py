"""The application's thread comes in between: after the Sender has taken the next request, before that is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support.producer_harness import TOPIC
from support.transaction_harness import ADD_PARTITIONS, FIND_COORDINATOR, GROUP, TransactionHarness
from support.transaction_steps import OFFSETS

from spark_kafka_sink.common.cluster import Node
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.transaction_manager import State


def come_in_between(harness: TransactionHarness, act: Callable[[], object]) -> list[State]:
    """Have `act` run once on another thread, when the Sender has found the node of a request ready. Returns the state
    that it left, once it has run.
    """
    ready, left = harness.client.ready, []

    def ready_and_late(node: Node, now_ms: int) -> bool:
        is_ready = ready(node, now_ms)
        if is_ready and not left:
            left.append(harness.state)
            worker = threading.Thread(target=act)
            worker.start()
            worker.join()
            left[:] = [harness.state]
        return is_ready

    harness.client.ready = ready_and_late  # type: ignore[method-assign]
    return left


def ends_in_peace(harness: TransactionHarness) -> None:
    assert not harness.producer.has_failed
    assert harness.cluster.requests_of(ADD_PARTITIONS) == []
    harness.producer.begin_transaction()
    harness.send(b"next", partition=0)
    harness.producer.commit_transaction()
    assert harness.committed() == [b"next"]
    assert not harness.producer.has_failed


def test_an_abort_takes_back_the_request_that_is_about_to_be_sent() -> None:
    harness = TransactionHarness(1).started()
    left = come_in_between(harness, harness.manager.begin_abort)
    delivery = harness.send(b"a", partition=0)
    harness.settle()
    assert left == [State.ABORTING]
    assert "was aborted" in str(delivery.error)
    harness.producer.abort_transaction()  # waits for the one that has begun
    assert harness.state is State.READY
    ends_in_peace(harness)


def test_an_abort_takes_back_the_request_whose_node_is_found_unreachable() -> None:
    harness = TransactionHarness(1).started()
    left = come_in_between(harness, harness.manager.begin_abort)
    ready, has_failed = harness.client.ready, harness.client.connection_failed
    lost: list[Node | None] = []

    def ready_until_then(node: Node, now_ms: int) -> bool:
        is_ready = ready(node, now_ms)
        if left and not lost:
            lost.append(node)
            return False
        return is_ready

    def has_failed_once(node: Node) -> bool:
        if lost == [node]:
            lost.append(None)
            return True
        return has_failed(node)

    harness.client.ready = ready_until_then  # type: ignore[method-assign]
    harness.client.connection_failed = has_failed_once  # type: ignore[method-assign]
    harness.send(b"a", partition=0)
    harness.settle()
    assert left == [State.ABORTING]
    assert len(lost) == 2
    harness.producer.abort_transaction()
    ends_in_peace(harness)


def test_a_refused_record_takes_back_the_request_that_is_about_to_be_sent() -> None:
    harness = TransactionHarness(1, {"max.request.size": "1000"}).started()
    left = come_in_between(harness, lambda: harness.producer.send(TOPIC, b"x" * 2_000, partition=0))
    delivery = harness.send(b"a", partition=0)
    harness.settle()
    assert left == [State.ABORTABLE_ERROR]
    assert "max.request.size" in str(delivery.error)
    harness.producer.abort_transaction()
    ends_in_peace(harness)


def test_an_abort_takes_back_a_lookup_that_is_about_to_be_sent() -> None:
    harness = TransactionHarness(2, {"max.block.ms": "50"}).started()
    left = come_in_between(harness, harness.manager.begin_abort)
    with pytest.raises(KafkaError, match="aborted"):
        harness.producer.send_offsets_to_transaction(OFFSETS, GROUP)
    assert left == [State.ABORTING]
    assert harness.cluster.requests_of(FIND_COORDINATOR) == []
    harness.producer.abort_transaction()
    ends_in_peace(harness)
