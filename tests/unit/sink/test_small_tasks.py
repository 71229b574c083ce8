"""When a write gets fewer tasks than its DataFrame has partitions."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from spark_kafka_sink.sink.small_tasks import LONG_MS, SMALL_MS, RanTasks, SmallTasks, Source

SOURCE = Source("orders", None, slots=2)
SMALL = RanTasks(tasks=200, records=10_000, busy_ms=1_600, duration_ms=1_100, are_fewer=False)
FEWER = RanTasks(tasks=4, records=10_000, busy_ms=60, duration_ms=80, are_fewer=True)


@pytest.fixture
def small_tasks() -> SmallTasks:
    return SmallTasks()


def test_first_write_has_all_its_tasks(small_tasks: SmallTasks) -> None:
    assert not small_tasks.has(SOURCE)


def test_write_after_one_with_small_tasks_has_fewer(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    for _ in range(3):
        assert small_tasks.has(SOURCE)
        small_tasks.learn(SOURCE, FEWER)


def test_small_tasks_are_halved_down_to_one(small_tasks: SmallTasks) -> None:
    source = replace(SOURCE, slots=5)
    small_tasks.learn(source, SMALL)
    numbers = []
    for _ in range(6):
        numbers.append(small_tasks.most_tasks(source))
        small_tasks.learn(source, FEWER._replace(tasks=numbers[-1], busy_ms=SMALL_MS * numbers[-1] - 1))
    assert numbers == [10, 5, 2, 1, 1, 1]
    small_tasks.learn(source, SMALL)
    assert small_tasks.most_tasks(source) == 10, "the write had all its tasks, so it was not like the one before"


def test_halved_tasks_that_are_long_are_doubled(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    for tasks in (4, 2):
        small_tasks.learn(SOURCE, FEWER._replace(tasks=tasks, busy_ms=10))
    small_tasks.learn(SOURCE, FEWER._replace(tasks=1, busy_ms=LONG_MS))
    assert small_tasks.most_tasks(SOURCE) == 1, "two of them would be small"
    for most in (2, 4):
        small_tasks.learn(SOURCE, FEWER._replace(tasks=1, busy_ms=LONG_MS + 1))
        assert small_tasks.most_tasks(SOURCE) == most


def test_tasks_are_not_more_than_two_for_each_slot(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    for busy_ms in (LONG_MS * 4 + 1, 10, LONG_MS * 4 + 1, LONG_MS * 4 + 1):
        small_tasks.learn(SOURCE, FEWER._replace(busy_ms=busy_ms))
    assert small_tasks.most_tasks(SOURCE) == 4


def test_longer_write_does_not_halve_the_tasks(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    small_tasks.learn(SOURCE, FEWER._replace(duration_ms=1_101))
    assert small_tasks.most_tasks(SOURCE) == 4


def test_each_topic_and_query_counts_for_itself(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    for other in (replace(SOURCE, topic=None), replace(SOURCE, query_id="q1")):
        assert not small_tasks.has(other)


@pytest.mark.parametrize(
    "ran",
    [
        SMALL._replace(busy_ms=SMALL_MS * 200),
        SMALL._replace(tasks=4),  # as many as a write with fewer has
        SMALL._replace(records=0),
    ],
    ids=["long", "few", "empty"],
)
def test_tasks_are_not_small(small_tasks: SmallTasks, ran: RanTasks) -> None:
    small_tasks.learn(SOURCE, ran)
    assert not small_tasks.has(SOURCE)


def test_tasks_that_are_no_longer_small_stay(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    small_tasks.learn(SOURCE, SMALL._replace(busy_ms=20_000))
    assert not small_tasks.has(SOURCE)


def test_write_after_one_with_many_more_records_has_all_its_tasks(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    small_tasks.learn(SOURCE, FEWER._replace(records=30_000))
    assert small_tasks.has(SOURCE)
    small_tasks.learn(SOURCE, FEWER._replace(records=30_001, duration_ms=60_000))
    assert not small_tasks.has(SOURCE)
    small_tasks.learn(SOURCE, SMALL._replace(records=30_001))
    assert small_tasks.has(SOURCE)


def test_write_that_took_longer_with_fewer_tasks_lets_the_next_hundred_keep_theirs(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    small_tasks.learn(SOURCE, FEWER._replace(duration_ms=1_100))
    assert small_tasks.has(SOURCE)
    small_tasks.learn(SOURCE, FEWER._replace(duration_ms=1_101))
    for _ in range(100):
        assert not small_tasks.has(SOURCE)
        small_tasks.learn(SOURCE, SMALL)
    assert small_tasks.has(SOURCE)


def test_driver_that_writes_to_ever_new_topics_forgets_the_oldest(small_tasks: SmallTasks) -> None:
    """Bug: each topic that a driver ever wrote to took memory until its end."""
    topics = [replace(SOURCE, topic=f"orders-{number}") for number in range(1_001)]
    for topic in topics:
        small_tasks.learn(topic, SMALL)
    assert [small_tasks.has(topic) for topic in (topics[0], topics[1], topics[-1])] == [False, True, True]
    large = SMALL._replace(busy_ms=20_000)
    for number in range(2_000):
        small_tasks.learn(replace(SOURCE, query_id=f"q-{number}"), large)
    assert not small_tasks._kept


def test_empty_write_says_nothing(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    small_tasks.learn(SOURCE, FEWER._replace(records=0, duration_ms=5_000))
    assert small_tasks.has(SOURCE)


def test_write_with_fewer_tasks_beside_one_with_all_decides_nothing(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, FEWER)
    assert not small_tasks.has(SOURCE)


def test_two_threads_may_learn_of_many_records_at_once(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    small_tasks._small = _OtherThreadTakes(small_tasks._small)
    small_tasks.learn(SOURCE, FEWER._replace(records=30_001))
    assert not small_tasks.has(SOURCE)


class _OtherThreadTakes(dict[Source, RanTasks]):
    """Another thread removes what this one has just looked up."""

    def get(self, source: Source, default: Any = None) -> Any:
        return self.pop(source, default)


def test_more_slots_need_all_tasks(small_tasks: SmallTasks) -> None:
    small_tasks.learn(replace(SOURCE, slots=100), SMALL)
    assert not small_tasks.has(SOURCE)


def test_tasks_stay_where_the_slots_are_not_known(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    unknown = replace(SOURCE, slots=None)
    assert not small_tasks.has(unknown)
    small_tasks.learn(unknown, SMALL._replace(busy_ms=20_000))
    assert small_tasks.has(SOURCE)


def test_times_of_tasks_are_added_up() -> None:
    rows: list[dict[str, Any]] = [
        {"records": 5, "task": None},
        {"records": 0, "task": '{"durations_ms":{"read":3,"encode":2},"kinds":{}}'},
        {"records": 0, "task": '{"durations_ms":{},"kinds":{}}'},
    ]
    assert RanTasks.of(rows, 30, are_fewer=True) == RanTasks(2, 5, 5, 30, are_fewer=True)


def test_log_says_once_why_later_writes_have_fewer_tasks(
    small_tasks: SmallTasks, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            small_tasks.learn(SOURCE, SMALL)
        small_tasks.learn(replace(SOURCE, topic=None), SMALL)
    first, second = caplog.messages
    assert first == (
        "The 200 tasks of a write to orders took 8 ms on average. The next writes have at most 4, unless they are"
        " larger, or call functions of yours."
    )
    assert " to topics of a column " in second


def test_failed_write_says_that_the_next_has_all_its_tasks(small_tasks: SmallTasks) -> None:
    small_tasks.learn(SOURCE, SMALL)
    small_tasks.forget(SOURCE)
    assert not small_tasks.has(SOURCE)
    small_tasks.learn(SOURCE, SMALL)
    assert small_tasks.has(SOURCE)
