"""The contents of a transaction, under both versions, and the calls that its end waits for."""

from __future__ import annotations

import threading

import pytest

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.common.open_transaction import ProducerIdAndEpoch
from spark_kafka_sink.producer.transaction_content import CurrentTransaction
from spark_kafka_sink.producer.transactions import (
    JoinedSends,
    State,
    StateMachine,
)

A, B = TopicPartition("a", 0), TopicPartition("b", 3)
FIRST, SECOND = ProducerIdAndEpoch(7, 0), ProducerIdAndEpoch(7, 1)


def begun(version: int) -> CurrentTransaction:
    content = CurrentTransaction()
    content.begin(version, FIRST)
    return content


def test_under_version_1_a_partition_is_added_once() -> None:
    content = begun(1)
    content.add(A)
    content.add(A)
    assert A not in content
    assert content.ask_for_new() == {A}
    content.add(A)  # while it is asked for
    assert content.ask_for_new() == frozenset()
    content.confirm_added(frozenset({A}))
    assert A in content
    content.add(A)
    content.add(B)
    assert content.ask_for_new() == {B}


def test_under_version_1_only_an_added_partition_needs_an_end() -> None:
    content = begun(1)
    content.add(A)
    assert content.is_empty
    asked = content.ask_for_new()
    assert content.is_empty
    content.confirm_added(asked)
    assert not content.is_empty


def test_under_version_2_the_first_record_adds_its_partition() -> None:
    content = begun(2)
    content.add(A)
    assert A in content
    assert B not in content
    assert not content.is_empty
    assert content.ask_for_new() == frozenset()


def test_offsets_start_the_transaction_too() -> None:
    content = begun(1)
    assert content.is_empty
    content.start()
    assert not content.is_empty


def test_possibly_started_transaction_must_be_ended() -> None:
    content = begun(1)
    content.may_have_started()
    content.may_have_started()
    assert not content.is_empty
    assert content.is_in_doubt
    content.confirm_added(frozenset({A}))
    assert not content.is_in_doubt
    content.may_have_started()
    assert not content.is_in_doubt


@pytest.mark.parametrize("version", [1, 2])
def test_next_transaction_begins_empty(version: int) -> None:
    content = begun(version)
    content.add(A)
    content.confirm_added(content.ask_for_new())
    content.add(B)
    content.ask_for_new()
    content.forget()
    assert content.is_empty
    assert A not in content
    content.begin(1, FIRST)
    content.add(B)
    assert content.ask_for_new() == {B}


@pytest.mark.parametrize(
    ("version", "is_resumed", "needs_next_epoch"), [(1, False, True), (1, True, False), (2, False, False)]
)
def test_only_version_1_with_gap_needs_next_epoch(version: int, is_resumed: bool, needs_next_epoch: bool) -> None:
    content = begun(version)
    content.is_resumed = is_resumed
    assert not content.needs_next_epoch(version)
    content.has_gap = True
    assert content.needs_next_epoch(version) is needs_next_epoch
    content.forget()
    assert not content.needs_next_epoch(version)


def test_version_2_begins_only_in_an_epoch_without_version_1() -> None:
    content = begun(1)
    assert content.needs_next_epoch(2)
    content.begin(2, FIRST)
    assert content.version == 1
    assert content.needs_next_epoch(2)
    content.begin(2, SECOND)
    assert content.version == 2
    assert not content.needs_next_epoch(2)


@pytest.mark.parametrize("is_empty", [True, False])
def test_resumed_transaction_keeps_its_version_and_content(is_empty: bool) -> None:
    content = begun(1)
    content.resume(2, is_empty)
    assert (content.version, content.is_resumed, content.is_empty) == (2, True, is_empty)


# ---- sends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_closed_transaction_accepts_only_records_of_joined_sends(state: State) -> None:
    machine = StateMachine()
    sends = JoinedSends(machine, threading.RLock())
    machine.state = State.IN_TRANSACTION
    sends.join("before")
    machine.state = state
    is_open = state is State.IN_TRANSACTION
    assert sends.may_join("before") is (is_open or state in {State.PREPARED, State.COMMITTING})
    assert sends.may_join("after") is is_open
    if not is_open:
        with pytest.raises(IllegalStateError, match=state.value):
            sends.join("after")


def test_send_that_left_is_not_waited_for() -> None:
    machine = StateMachine()
    sends = JoinedSends(machine, threading.RLock())
    machine.state = State.IN_TRANSACTION
    assert not sends
    sends.join("a send")
    sends.join("a send")
    assert sends
    sends.leave("a send")
    sends.leave("another that never joined")
    assert not sends
