from __future__ import annotations

import random

import pytest

from spark_kafka_sink.admin.topics_metadata import TopicsMetadata
from spark_kafka_sink.client.metadata_response import MetadataResponse, TopicMetadata
from spark_kafka_sink.common.cluster import Node, PartitionMetadata, TopicPartition
from spark_kafka_sink.common.errors import TopicAuthorizationError
from spark_kafka_sink.protocol.requests import MetadataRequest

NODE = Node(0, "b", 9092)


def make(*topics: str) -> TopicsMetadata:
    return TopicsMetadata(topics, 100, 1_000, 300_000, random.Random(1))


def answer(*topics: str) -> MetadataResponse:
    return MetadataResponse(
        {0: NODE},
        tuple(TopicMetadata(name, partitions=(PartitionMetadata(TopicPartition(name, 0), 0, 0),)) for name in topics),
    )


def test_only_its_topics_are_asked_for_and_none_is_created() -> None:
    request = make("b", "a").new_metadata_request_and_version(0).request
    assert request == MetadataRequest(("a", "b"), allow_auto_topic_creation=False)


def test_without_topics_the_brokers_alone_are_asked_for() -> None:
    assert make().new_metadata_request_and_version(0).request.topics == ()


def test_a_topic_added_later_is_asked_for_alone_and_at_once() -> None:
    metadata = make("a")
    metadata.update(0, answer("a"), False, 1_000)
    metadata.add_topics(["a"])
    assert not metadata.update_requested()
    metadata.add_topics(["a", "b"])
    assert metadata.time_to_next_update(1_000) == 0
    asked = metadata.new_metadata_request_and_version(1_000)
    assert asked.is_partial
    assert asked.request.topics == ("b",)
    metadata.update(asked.request_version, answer("b", "x"), True, 1_000)
    assert metadata.fetch().topics == {"a", "b"}
    assert metadata.new_metadata_request_and_version(1_000).request.topics == ("a", "b")


def test_a_topic_that_was_refused_while_another_was_asked_for_is_not_so_before_it_is_asked_for_again() -> None:
    metadata = make("a", "b")
    metadata.add_topics(["a"])
    metadata.update(0, MetadataResponse({0: NODE}, (TopicMetadata("b", 29),)), False, 1_000)
    metadata.maybe_raise_any_error()
    metadata.add_topics(["b"])
    metadata.maybe_raise_any_error()
    metadata.update(0, MetadataResponse({0: NODE}, (TopicMetadata("b", 29),)), False, 1_000)
    with pytest.raises(TopicAuthorizationError, match="b"):
        metadata.maybe_raise_any_error()
