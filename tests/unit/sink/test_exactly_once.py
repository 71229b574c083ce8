"""What a driver refuses to decide, and what it says of a batch with nothing in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.coordinator_bench import CoordinatorBench

from spark_kafka_sink.client.transaction_values import OpenTransaction
from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.sink.decision import TaskTransaction
from spark_kafka_sink.sink.driver_cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once import Committed, ExactlyOnceDriver
from spark_kafka_sink.sink.mandate import TaskOutcome
from spark_kafka_sink.sink.options import SinkConfig

CONFIG = SinkConfig.from_options(
    {"kafka.bootstrap.servers": "broker-0:9092", "topic": "t", "delivery.guarantee": "exactly-once"}
)


@pytest.fixture
def driver() -> ExactlyOnceDriver:
    cluster = KafkaDriverCluster(CoordinatorBench().coordinator, CONFIG, "P")
    return ExactlyOnceDriver("P", cluster, lambda: 0)


def outcome(driver: ExactlyOnceDriver, partition: int) -> TaskOutcome:
    written = TaskTransaction(OpenTransaction(f"P/{partition}", 9, 0, 2), partition, 1)
    return TaskOutcome(driver.begin(), 4, "q", partition, 1, written)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"batch_id": 5}, "do not agree on batch_id"),
        ({"query_id": "another"}, "do not agree on query_id"),
        ({"was_skipped": True, "written": None}, "do not agree on was_skipped"),
        ({"partition": 0}, r"Two tasks wrote one partition: \[0, 0\]"),
    ],
)
def test_tasks_that_are_not_those_of_one_batch_are_not_decided_on(
    driver: ExactlyOnceDriver, changed: dict[str, Any], text: str
) -> None:
    first = outcome(driver, 0)
    second = replace(first, partition=1)
    with pytest.raises(IllegalStateError, match=text):
        driver.commit([first, replace(second, **changed)])
    assert driver.begin().last_batch_id is None


def test_tasks_of_two_mandates_are_not_decided_on(driver: ExactlyOnceDriver) -> None:
    with pytest.raises(IllegalStateError, match="do not agree on mandate"):
        driver.commit([outcome(driver, 0), outcome(driver, 1)])
    assert driver.begin().last_batch_id is None


def test_a_batch_without_rows_is_neither_decided_nor_skipped(driver: ExactlyOnceDriver) -> None:
    empty = replace(outcome(driver, 0), rows=0, written=None)
    for outcomes in ([], [empty]):
        assert driver.commit(outcomes) == Committed(None, False, None)
    assert driver.begin().last_batch_id is None
