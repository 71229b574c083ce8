"""The limits of topics, as a task knows them: asked for once, and again when they may have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.coordinator_bench import CoordinatorBench
from support.fake_clock import FakeClock

from spark_kafka_sink.admin.request_client import Timer
from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.protocol.versions import ApiKey
from spark_kafka_sink.record.sifting import TopicLimits
from spark_kafka_sink.sink.topic_limits import TopicLimitsCache, read_limits


class Brokers:
    """Answer by topic. Count the questions."""

    def __init__(self) -> None:
        self.limits = {"t": TopicLimits(4, 1_000), "bad": TopicLimits(is_invalid=True), "new": TopicLimits()}
        self.asked: list[str] = []

    def read(self, topic: str) -> TopicLimits:
        self.asked.append(topic)
        return self.limits[topic]


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def cache(brokers: Brokers, clock: FakeClock) -> TopicLimitsCache:
    return TopicLimitsCache(brokers.read, clock, 60_000)


def test_a_topic_is_asked_for_once(cache: TopicLimitsCache, brokers: Brokers) -> None:
    assert [cache.of(*asked) for asked in (("t", None), ("t", 3), ("t", None))] == [brokers.limits["t"]] * 3
    assert [cache.of("bad", None).is_invalid for _ in range(2)] == [True, True]
    assert brokers.asked == ["t", "bad"]


def test_worker_that_writes_to_ever_new_topics_forgets_the_oldest(cache: TopicLimitsCache, brokers: Brokers) -> None:
    """Bug: each topic that the rows of a worker ever named took memory until its end."""
    topics = [f"t-{number}" for number in range(1_001)]
    brokers.limits |= dict.fromkeys(topics, TopicLimits(1))
    for topic in topics:
        cache.of(topic, None)
    brokers.asked.clear()
    for topic in (topics[1], topics[-1], topics[0]):
        cache.of(topic, None)
    assert brokers.asked == [topics[0]]


def test_a_partition_that_is_not_known_is_asked_for_each_time(cache: TopicLimitsCache, brokers: Brokers) -> None:
    """Partitions may have been added. A row is unwritable only if the newest answer says so."""
    assert [cache.of("t", 4).partitions for _ in range(2)] == [4, 4]
    brokers.limits["t"] = TopicLimits(5, 1_000)
    assert cache.of("t", 4).partitions == 5
    assert cache.of("t", 4).partitions == 5
    assert brokers.asked == ["t"] * 3


def test_a_size_above_the_last_answer_is_asked_for_once_in_a_second(
    cache: TopicLimitsCache, brokers: Brokers, clock: FakeClock
) -> None:
    """Bug: max.message.bytes that was raised did not count for minutes: rows that the topic took were dead letters."""
    assert cache.of("t", None).max_message_bytes == 1_000
    brokers.limits["t"] = TopicLimits(4, 2_000)
    clock.advance(999)
    assert cache.of("t", None, 1_001).max_message_bytes == 1_000
    clock.advance(1)
    assert [cache.of("t", 3, size).max_message_bytes for size in (1_000, 1_001, 2_000)] == [1_000, 2_000, 2_000]
    assert brokers.asked == ["t"] * 2
    brokers.limits["t"] = TopicLimits(4)  # not for this principal any more
    clock.advance(1_000)
    assert [cache.of("t", None, size).max_message_bytes for size in (2_001, 9_999)] == [None, None]
    assert brokers.asked == ["t"] * 3


def test_limits_are_read_again_after_some_time(cache: TopicLimitsCache, brokers: Brokers, clock: FakeClock) -> None:
    cache.of("t", None)
    brokers.limits["t"] = TopicLimits(4, 500)
    clock.advance(59_999)
    assert cache.of("t", None).max_message_bytes == 1_000
    clock.advance(1)
    assert cache.of("t", None).max_message_bytes == 500


def test_a_topic_that_does_not_exist_yet_is_asked_for_again(cache: TopicLimitsCache, brokers: Brokers) -> None:
    assert cache.of("new", 2) == TopicLimits()
    brokers.limits["new"] = TopicLimits(3)
    assert cache.of("new", None) == TopicLimits(3)


class Creation:
    """Stands in for `TopicCreation`. Its first answer is that to an earlier request."""

    def __init__(self, earlier: int, count: int) -> None:
        self._answers = [earlier, count]

    def count(self, topic: str, timer: object) -> int:
        return self._answers.pop(0)

    def configs(self, topic: str, names: Sequence[str], timer: object) -> dict[str, str | None]:
        return {"max.message.bytes": "5000"}

    def forget(self, topic: str) -> None:
        pass


@pytest.mark.parametrize("earlier", [0, 3])
def test_an_answer_on_its_way_is_not_the_newest(earlier: int) -> None:
    """Bug: the limits of a topic that was new to the client were not known, and a record was sent that is too large."""
    creation: Any = Creation(earlier, 4)
    assert read_limits(creation, "t", Timer(FakeClock(), 1_000)) == TopicLimits(4, 5_000)


def test_topics_of_earlier_rows_are_not_asked_for_again() -> None:
    """Bug: each request named every topic that any row had named before. For a thousand topics brokers and worker
    described a million.
    """
    bench = CoordinatorBench(node_count=1)
    for number in range(6):
        bench.cluster.create_topic(f"orders-{number}", 2)
        found = read_limits(bench.coordinator.creation, f"orders-{number}", bench.timer())
        assert found.partitions == 2
    asked = [len(exchange.request.topics or ()) for exchange in bench.asked(ApiKey.METADATA)]
    assert max(asked) == 1


def test_brokers_that_cannot_be_asked_fail_the_task(clock: FakeClock) -> None:
    def fail(topic: str) -> TopicLimits:
        raise KafkaTimeoutError(topic)

    with pytest.raises(KafkaTimeoutError):
        TopicLimitsCache(fail, clock, 60_000).of("t", None)
