"""Topics and permissions: decisions on what a broker says. The requests are tested at scripted brokers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_clock import FakeClock

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    CoordinatorLoadInProgressError,
    DisconnectError,
    KafkaError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
)
from spark_kafka_sink.doctor.topics import Partition, Topic, judge_decision_topic, judge_topic, producer_id_error

CONFIG = ProducerConfig.from_mapping({"bootstrap.servers": "h1:9092"})


def test_advice_for_a_hidden_topic_grants_what_a_write_needs() -> None:
    """Bug: with DESCRIBE alone, as the advice was, the next run of the doctor asked for WRITE."""
    (found,) = judge_topic(Topic("orders", TopicAuthorizationError("No.")), "topic", CONFIG, None, {})
    assert found.name == "describe-denied"
    assert "--operation Write --topic orders" in found.change


def test_advice_for_a_hidden_decision_topic_grants_what_decisions_need() -> None:
    topic = Topic("decisions", TopicAuthorizationError("No."))
    (found,) = judge_decision_topic(topic, 3, is_prefix_known=False)
    assert found.name == "describe-denied"
    assert "--operation Read --operation Write --topic decisions" in found.change


@pytest.mark.parametrize("option", ["topic", "errors.deadletterqueue.topic.name"])
def test_advice_for_a_missing_topic_is_true_for_dead_letters_too(option: str) -> None:
    """Bug: for missing dead letters the advice was to set topic.create=if-missing, which does not create them."""
    topic = Topic("orders", UnknownTopicOrPartitionError("No."))
    (found,) = judge_topic(topic, option, CONFIG, None, {"auto.create.topics.enable": "false"})
    assert found.name == "topic-missing"
    assert found.change.startswith(f"Correct {option}; or create the topic: ")
    assert "creates only the topic of the option topic: topic.create=if-missing" in found.change


@pytest.mark.parametrize(("counts", "text"), [([1, 1], "1 replica"), ([3, 1], "1 or 3 replicas"), ([3], "3 replicas")])
def test_replicas_of_a_topic_are_counted(counts: list[int], text: str) -> None:
    partitions = tuple(Partition(index, 0, count, count) for index, count in enumerate(counts))
    first, *_ = judge_topic(Topic("orders", None, partitions), "topic", CONFIG, None, {})
    assert first.seen == f"orders: {len(counts)} partitions, {text}"


class Answers:
    """A connection that gives one answer after the other: the code of an error, or the error of the connection. The
    last one is repeated.
    """

    def __init__(self, clock: FakeClock, *answers: int | KafkaError) -> None:
        self.clock = clock
        self.answers = list(answers)
        self.asked = 0

    def ask(self, contact: Any, request: Any, timeout_ms: int) -> Any:
        assert timeout_ms > 0
        self.asked += 1
        self.clock.advance(5)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, KafkaError):
            raise answer
        return SimpleNamespace(error_code=answer)


@pytest.mark.parametrize(
    ("answers", "expected", "asked"),
    [
        ((0,), type(None), 1),
        ((14, 14, 0), type(None), 3),
        ((14, 31), ClusterAuthorizationError, 2),
        ((31, 0), ClusterAuthorizationError, 1),
        ((14, DisconnectError("gone"), 0), DisconnectError, 2),
        ((14,), CoordinatorLoadInProgressError, 20),
    ],
)
def test_broker_that_has_just_started_is_asked_for_a_producer_id_again(
    answers: tuple[Any, ...], expected: type, asked: int
) -> None:
    """Bug: the doctor said "not checked" for a broker without ids, which gets them within some ms."""
    clock = FakeClock()
    connection: Any = Answers(clock, *answers)
    contact: Any = None
    began_ms = clock.now_ms()
    assert type(producer_id_error(connection, contact, clock, 2_000)) is expected
    assert connection.asked == asked
    assert clock.now_ms() - began_ms <= 2_000
