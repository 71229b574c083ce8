"""Sessions of exactly-once batches on scripted nodes."""

from __future__ import annotations

import pytest
from support.coordinator_bench import CoordinatorBench
from support.driver_steps import marked_task

from spark_kafka_sink.admin.cluster_client import ClusterClient
from spark_kafka_sink.sink.exactly_once import session as session_module
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome
from spark_kafka_sink.sink.exactly_once.session import StreamBatch, session
from spark_kafka_sink.sink.options import SinkConfig

PREFIX = "orders"
OPTIONS = {"kafka.bootstrap.servers": "broker-0:9092", "topic": "t", "delivery.guarantee": "exactly-once"}
CONFIG = SinkConfig.from_options(OPTIONS)


class SessionBench(CoordinatorBench):
    """A session whose tasks write one row each."""

    def __init__(self, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(version=version)
        self.connections: list[str] = []
        monkeypatch.setattr(session_module, "connect", self._connect)
        monkeypatch.setattr(self.coordinator, "close", lambda: self.connections.append("closed"))
        monkeypatch.setattr(session_module, "_SESSIONS", {})

    def _connect(self, _: object) -> ClusterClient:
        self.connections.append("made")
        return self.coordinator

    def tasks(self, batch_start: BatchStart, batch_id: int, query_id: str = "q") -> list[TaskOutcome]:
        if batch_start.is_written_already(batch_id, query_id):
            return [TaskOutcome(batch_start, batch_id, query_id, 0, 1, None, True)]
        return [marked_task(self, batch_start, batch_id=batch_id, query_id=query_id, value=f"row {batch_id}")]

    def run(self, batch_id: int, run_id: str = "run 1", config: SinkConfig = CONFIG, prefix: str = PREFIX) -> None:
        session(prefix).run(config, StreamBatch("q", run_id, batch_id), self.tasks)
