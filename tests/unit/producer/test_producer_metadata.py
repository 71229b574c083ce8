"""The topics of a producer's metadata: added, requested, answered, forgotten; and the wait for an update."""

from __future__ import annotations

import random

import pytest
from kio.schema.errors import ErrorCode
from support.fake_clock import FakeClock

from spark_kafka_sink.client.metadata_view import MetadataResponse, TopicMetadata
from spark_kafka_sink.common.cluster import Node, PartitionMetadata, TopicPartition
from spark_kafka_sink.common.errors import (
    KafkaError,
    KafkaTimeoutError,
    ProducerClosedError,
    SaslAuthenticationError,
    UnknownTopicOrPartitionError,
)
from spark_kafka_sink.producer.producer_metadata import ProducerMetadata

IDLE_MS = 10_000
NODE = Node(0, "a", 1)


def metadata_at(clock: FakeClock) -> ProducerMetadata:
    made = ProducerMetadata(
        refresh_backoff_ms=100,
        refresh_backoff_max_ms=1_000,
        metadata_expire_ms=300_000,
        metadata_idle_ms=IDLE_MS,
        clock=clock,
        rng=random.Random(1),
    )
    made.bootstrap([("a", 1)])
    return made


def response(*topics: str) -> MetadataResponse:
    described = tuple(
        TopicMetadata(name, 0, None, (PartitionMetadata(TopicPartition(name, 0), 0, 1),)) for name in topics
    )
    return MetadataResponse({0: NODE}, described, "cluster", 0)


def new_topics(metadata: ProducerMetadata) -> set[str]:
    request = metadata.new_metadata_request_builder_for_new_topics()
    return set() if request is None else set(request.topics or ())


def answer(metadata: ProducerMetadata, clock: FakeClock, *topics: str) -> bool:
    """Answer the next request with these topics. Return whether it was partial."""
    _, version, is_partial = metadata.new_metadata_request_and_version(clock.now_ms())
    metadata.update(version, response(*topics), is_partial, clock.now_ms())
    return is_partial


def test_new_topic_is_requested_at_once_by_itself() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    metadata.add("a", clock.now_ms())
    assert not answer(metadata, clock, "a")  # the first request asks for everything
    clock.advance(5)
    metadata.add("b", clock.now_ms())
    assert new_topics(metadata) == {"b"}
    assert metadata.time_to_next_update(clock.now_ms()) == 0
    request, _, is_partial = metadata.new_metadata_request_and_version(clock.now_ms())
    assert is_partial
    assert request.topics == ("b",)
    assert request.allow_auto_topic_creation
    answer(metadata, clock, "b")
    assert new_topics(metadata) == set()
    assert metadata.fetch().topics == {"a", "b"}


def test_known_topic_added_again_requests_nothing() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    metadata.add("a", clock.now_ms())
    answer(metadata, clock, "a")
    metadata.add("a", clock.now_ms())
    assert not metadata.update_requested()
    assert new_topics(metadata) == set()


def test_a_full_request_names_every_topic_that_is_kept() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    for topic in ("b", "a"):
        metadata.add(topic, clock.now_ms())
    request, _, is_partial = metadata.new_metadata_request_and_version(clock.now_ms())
    assert not is_partial
    assert request.topics == ("a", "b")
    assert request.allow_auto_topic_creation


def test_update_for_topic_is_partial_only_while_new() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    metadata.add("a", clock.now_ms())
    answer(metadata, clock, "a")
    assert metadata.request_update_for_topic("a") == metadata.update_version
    assert not metadata.new_metadata_request_and_version(clock.now_ms()).is_partial
    answer(metadata, clock, "a")
    metadata.add("new", clock.now_ms())
    assert metadata.request_update_for_topic("new") == metadata.update_version
    assert metadata.new_metadata_request_and_version(clock.now_ms()).is_partial


def test_response_to_older_request_leaves_newer_one_open() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    metadata.add("a", clock.now_ms())
    answer(metadata, clock, "a")
    metadata.add("b", clock.now_ms())
    _, version, is_partial = metadata.new_metadata_request_and_version(clock.now_ms())
    metadata.add("c", clock.now_ms())
    metadata.update(version, response("b"), is_partial, clock.now_ms())
    assert new_topics(metadata) == {"c"}
    assert metadata.update_requested()


def test_topic_is_forgotten_after_the_idle_time() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    metadata.add("idle", clock.now_ms())
    metadata.add("busy", clock.now_ms())
    answer(metadata, clock, "idle", "busy")
    clock.advance(IDLE_MS - 1)
    metadata.add("busy", clock.now_ms())
    metadata.request_update()
    answer(metadata, clock, "idle", "busy")
    assert "idle" in (metadata.new_metadata_request_builder().topics or ())
    clock.advance(1)
    metadata.request_update()
    answer(metadata, clock, "idle", "busy")
    assert "idle" not in (metadata.new_metadata_request_builder().topics or ())
    assert metadata.fetch().topics == {"busy"}


def test_unanswered_topic_is_kept_at_any_age() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    metadata.add("a", clock.now_ms())
    clock.advance(IDLE_MS * 2)
    assert metadata.retain_topic("a", clock.now_ms())
    assert not metadata.retain_topic("stranger", clock.now_ms())


def test_unrequested_topic_in_an_answer_is_not_kept() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    metadata.add("a", clock.now_ms())
    answer(metadata, clock, "a", "stranger")
    assert metadata.fetch().topics == {"a"}


# ---- await_update ----------------------------------------------------------------------------------------------------


def test_a_wait_ends_with_a_newer_update() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    version = metadata.update_version

    def arrive(timeout_ms: int) -> None:
        clock.advance(30)
        metadata.add("a", clock.now_ms())
        answer(metadata, clock, "a")

    clock.on_wait = arrive
    start_ms = clock.now_ms()
    metadata.await_update(version, 1_000)
    assert clock.now_ms() == start_ms + 30
    metadata.await_update(version, 0)  # the update is there already, so there is no wait


def test_a_wait_ends_at_its_limit() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    start_ms = clock.now_ms()
    with pytest.raises(KafkaTimeoutError, match="within 250 ms"):
        metadata.await_update(metadata.update_version, 250)
    assert clock.now_ms() == start_ms + 250


def test_a_wait_that_wakes_early_waits_for_the_rest() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    waits: list[int] = []

    def wake(timeout_ms: int) -> None:
        waits.append(timeout_ms)
        clock.advance(min(100, timeout_ms))

    clock.on_wait = wake
    with pytest.raises(KafkaTimeoutError):
        metadata.await_update(metadata.update_version, 250)
    assert waits == [250, 150, 50]


def test_refusal_before_metadata_of_another_node_fails_no_later_wait() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    metadata.add("a", clock.now_ms())
    metadata.fatal_error(SaslAuthenticationError("for a moment"))
    answer(metadata, clock, "a")
    metadata.add("b", clock.now_ms())
    version = metadata.request_update_for_topic("b")
    clock.on_wait = lambda timeout_ms: answer(metadata, clock, "b")
    metadata.await_update(version, 1_000)


def test_a_wait_raises_the_fatal_error() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    clock.on_wait = lambda timeout_ms: metadata.fatal_error(SaslAuthenticationError("wrong password"))
    with pytest.raises(SaslAuthenticationError, match="wrong password"):
        metadata.await_update(metadata.update_version, 1_000)


def test_wait_ends_with_the_close() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    clock.on_wait = lambda timeout_ms: metadata.close()
    with pytest.raises(ProducerClosedError):
        metadata.await_update(metadata.update_version, 1_000)


@pytest.mark.parametrize("is_reported", [True, False], ids=["reported before", "not reported yet"])
@pytest.mark.parametrize("code", [ErrorCode.invalid_topic_exception, ErrorCode.topic_authorization_failed])
def test_old_refusal_does_not_answer_new_request(code: int, is_reported: bool) -> None:
    """Bug: the answer about another topic repeated the refusal for a later send, which was allowed by then."""
    clock = FakeClock()
    metadata = metadata_at(clock)
    metadata.add("refused", clock.now_ms())
    refusal = MetadataResponse({0: NODE}, (TopicMetadata("refused", code),), "cluster", 0)
    metadata.update(metadata.new_metadata_request_and_version(0).request_version, refusal, False, clock.now_ms())
    if is_reported:
        with pytest.raises(KafkaError, match="refused"):
            metadata.maybe_raise_error_for_topic("refused")
    metadata.add("another", clock.now_ms())
    _, version, _ = metadata.new_metadata_request_and_version(clock.now_ms())
    metadata.request_update_for_topic("refused")
    metadata.update(version, response("another"), True, clock.now_ms())
    metadata.maybe_raise_error_for_topic("refused")
    metadata.update(version, refusal, False, clock.now_ms())
    with pytest.raises(KafkaError, match="refused"):
        metadata.maybe_raise_error_for_topic("refused")


def test_error_of_a_topic_is_from_the_last_answer() -> None:
    clock = FakeClock()
    metadata = metadata_at(clock)
    refused = MetadataResponse({0: NODE}, (TopicMetadata("a", 3, None, ()),), "cluster", 0)
    assert metadata.topic_error("a") is None
    metadata.update(1, refused, True, clock.now_ms())
    metadata.update(2, response("b"), True, clock.now_ms())
    error = metadata.topic_error("a")
    assert isinstance(error, UnknownTopicOrPartitionError)
    assert str(error).startswith("Topic a: ")
    assert metadata.topic_error("b") is None
    metadata.update(3, response("a"), True, clock.now_ms())
    assert metadata.topic_error("a") is None
    metadata.update(4, refused, True, clock.now_ms())
    metadata.update(5, response("b"), False, clock.now_ms())  # a full answer without it: it was forgotten
    assert metadata.topic_error("a") is None
