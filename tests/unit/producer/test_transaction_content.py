"""What is in a transaction, under both versions."""

from __future__ import annotations

import pytest

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.producer.transaction_content import TransactionContent

A, B = TopicPartition("a", 0), TopicPartition("b", 3)


def test_under_version_1_a_partition_is_asked_for_once_and_then_in() -> None:
    content = TransactionContent()
    content.add(A, 1)
    content.add(A, 1)
    assert A not in content
    assert content.ask_for_new() == {A}
    content.add(A, 1)  # while it is asked for
    assert content.ask_for_new() == frozenset()
    content.give_in(frozenset({A}))
    assert A in content
    content.add(A, 1)
    content.add(B, 1)
    assert content.ask_for_new() == {B}


def test_under_version_1_nothing_is_to_be_ended_before_the_coordinator_took_a_partition() -> None:
    content = TransactionContent()
    content.add(A, 1)
    assert content.is_empty
    asked = content.ask_for_new()
    assert content.is_empty
    content.give_in(asked)
    assert not content.is_empty


def test_under_version_2_the_first_record_puts_its_partition_in() -> None:
    content = TransactionContent()
    content.add(A, 2)
    assert A in content
    assert B not in content
    assert not content.is_empty
    assert content.ask_for_new() == frozenset()


def test_what_is_not_a_record_starts_it_too() -> None:
    content = TransactionContent()
    assert content.is_empty
    content.start()
    assert not content.is_empty


def test_one_that_may_have_started_is_to_be_ended_and_in_doubt_until_something_is_in_it() -> None:
    content = TransactionContent()
    content.may_have_started()
    content.may_have_started()
    assert not content.is_empty
    assert content.is_in_doubt
    content.give_in(frozenset({A}))
    assert not content.is_in_doubt
    content.may_have_started()
    assert not content.is_in_doubt


@pytest.mark.parametrize("version", [1, 2])
def test_the_next_transaction_begins_with_nothing(version: int) -> None:
    content = TransactionContent()
    content.add(A, version)
    content.give_in(content.ask_for_new())
    content.add(B, version)
    content.ask_for_new()
    content.forget()
    assert content.is_empty
    assert A not in content
    content.add(B, 1)
    assert content.ask_for_new() == {B}
