"""A driver of exactly-once delivery and the operator's commands, on scripted nodes."""

from __future__ import annotations

import io
from typing import Any

import pytest
from support.coordinator_bench import CoordinatorBench
from support.driver_steps import marked_task

from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome
from spark_kafka_sink.sink.exactly_once.operator import Operator
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver
from spark_kafka_sink.sink.options import SinkConfig

PREFIX = "orders"
OPTIONS = {"kafka.bootstrap.servers": "broker-0:9092", "topic": "t", "delivery.guarantee": "exactly-once"}
CONFIG = SinkConfig.from_options(OPTIONS)
WALL_MS = 1_700_000_000_000


class OperatorBench(CoordinatorBench):
    """A driver and its operator; tasks are raw requests, and each writes one row."""

    def __init__(self, version: int = 2, prefix: str = PREFIX) -> None:
        super().__init__(version=version)
        self.version = version
        self.prefix = prefix
        self.out = io.StringIO()
        self.operator = Operator(self.coordinator, CONFIG, self.out, lambda: WALL_MS)
        self.cluster_of_driver = KafkaDriverCluster(self.coordinator, CONFIG, prefix)
        self.driver = ExactlyOnceDriver(prefix, self.cluster_of_driver, lambda: WALL_MS)

    def task(self, batch_start: BatchStart, batch_id: int, partition: int) -> TaskOutcome:
        value = f"row {batch_id}.{partition}"
        return marked_task(self, batch_start, batch_id=batch_id, query_id="q", partition=partition, value=value)

    def batch(self, batch_id: int, partitions: int = 2) -> list[TaskOutcome]:
        batch_start = self.driver.begin()
        return [self.task(batch_start, batch_id, partition) for partition in range(partitions)]

    def decide(self, batch_id: int) -> list[TaskOutcome]:
        """Run the batch up to its decision, before any task's transaction is committed."""
        outcomes = self.batch(batch_id)
        self.decide_these(outcomes)
        return outcomes

    def decide_these(self, outcomes: list[TaskOutcome]) -> None:
        class GoneError(Exception):
            pass

        def gone(*_: Any) -> None:
            raise GoneError

        self.driver.finish = gone  # type: ignore[assignment]
        with pytest.raises(GoneError):
            self.driver.commit(outcomes)
        del self.driver.finish

    def operator_of(self, decision_topic: str) -> Operator:
        return Operator(self.coordinator, other_topic(decision_topic), self.out, lambda: WALL_MS)

    def move_to(self, decision_topic: str) -> None:
        """Let the driver decide in this topic from here on."""
        config = other_topic(decision_topic)
        self.cluster_of_driver = KafkaDriverCluster(self.coordinator, config, self.prefix)
        self.driver = ExactlyOnceDriver(self.prefix, self.cluster_of_driver, lambda: WALL_MS)

    def said(self) -> str:
        text = self.out.getvalue()
        self.out.truncate(0)
        self.out.seek(0)
        return text


def other_topic(name: str) -> SinkConfig:
    return SinkConfig.from_options({**OPTIONS, "decision.topic": name})
