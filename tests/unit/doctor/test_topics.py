"""Topics and permissions: decisions on what a broker says. The requests are tested at scripted brokers."""

from __future__ import annotations

import pytest

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import TopicAuthorizationError
from spark_kafka_sink.doctor.topics import Partition, Topic, judge_decision_topic, judge_topic

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


@pytest.mark.parametrize(("counts", "text"), [([1, 1], "1 replica"), ([3, 1], "1 or 3 replicas"), ([3], "3 replicas")])
def test_replicas_of_a_topic_are_counted(counts: list[int], text: str) -> None:
    partitions = tuple(Partition(index, 0, count, count) for index, count in enumerate(counts))
    first, *_ = judge_topic(Topic("orders", None, partitions), "topic", CONFIG, None, {})
    assert first.seen == f"orders: {len(counts)} partitions, {text}"
