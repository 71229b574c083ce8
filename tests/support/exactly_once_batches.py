"""Batches of an exactly-once query without Spark: the driver and the tasks in this process, on a real broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
import pytest
from support.exactly_once_streams import await_markers, check_nothing_open
from support.librdkafka import read_values

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import KafkaError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer
from spark_kafka_sink.sink.arrow_writer import write_all
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.exactly_once.cluster import process_driver
from spark_kafka_sink.sink.exactly_once.messages import BatchChangedError, BatchStart, TaskOutcome
from spark_kafka_sink.sink.exactly_once.protocol import Committed
from spark_kafka_sink.sink.exactly_once.task import ExactlyOnceTask, TaskIdentity
from spark_kafka_sink.sink.options import DECISION_TOPIC, SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool


@contextmanager
def own_pool() -> Iterator[ProducerPool]:
    """Use a new pool, and close its producers at the end, before their broker is stopped."""
    pool = ProducerPool(KafkaProducer, SystemClock())
    try:
        yield pool
    finally:
        for *_, producer in pool.producers():
            producer.close(10)


class BegunBatch(NamedTuple):
    """A batch whose tasks have ended, and whose transactions are open."""

    config: SinkConfig
    batch_start: BatchStart
    outcomes: Sequence[TaskOutcome]

    def commit(self) -> Committed:
        with process_driver(self.config, self.batch_start.prefix) as driver:
            return driver.commit(self.outcomes)

    def abort(self) -> bool:
        with process_driver(self.config, self.batch_start.prefix) as driver:
            return driver.abort(self.batch_start, self.outcomes)


class Query:
    """A query that writes to a topic of one partition, under a prefix of the topic's name."""

    def __init__(self, servers: str, topic: str, pool: ProducerPool, decisions: str = DECISION_TOPIC) -> None:
        self.servers = servers
        self.topic = topic
        self.prefix = f"prefix-of-{topic}"
        self._pool = pool
        options = {"kafka.bootstrap.servers": servers, "topic": topic, "delivery.guarantee": "exactly-once"}
        names = {"transactional.id.prefix": self.prefix, "decision.topic": decisions}
        self._config = SinkConfig.from_options(options | names)

    def run(self, batch_id: int, *tasks: Sequence[str], transaction_version: int) -> Committed:
        """Run a batch as Spark does, with a task for each sequence of values. A batch that fails is aborted."""
        begun = self.begun(batch_id, *tasks)
        assert begun.batch_start.driver.transaction_version == transaction_version
        try:
            return begun.commit()
        except KafkaError:
            begun.abort()
            raise

    def begun(self, batch_id: int, *tasks: Sequence[str]) -> BegunBatch:
        """Run a batch up to the end of its tasks."""
        with process_driver(self._config, self.prefix) as driver:
            batch_start = driver.begin()
        outcomes = []
        for partition, values in enumerate(tasks):
            identity = TaskIdentity(batch_id, "query", partition, 0)
            rows = [pa.record_batch({"value": pa.array(values, pa.string())})]
            task = ExactlyOnceTask.in_process(self._config, batch_start, identity)
            write_all(TaskDelivery(self._config, self._pool, task), rows)
            outcomes.append(task.outcome)
        return BegunBatch(self._config, batch_start, outcomes)

    def visible(self) -> list[str]:
        """Return the values that readers under read_committed see, sorted."""
        await_markers(self.servers)
        return sorted(read_values(self.servers, self.topic))


def check_batches(servers: str, topic: str, transaction_version: int) -> None:
    """Run batches and check them: a batch of two tasks is committed; again in another layout it is skipped; again with
    other rows it is refused; the next batch is committed.
    """
    with own_pool() as pool:
        query = Query(servers, topic, pool)
        first = query.run(0, ["a", "b"], ["c"], transaction_version=transaction_version)
        assert (first.was_skipped, query.visible()) == (False, ["a", "b", "c"])
        again = query.run(0, ["c"], ["b"], ["a"], transaction_version=transaction_version)
        assert (again.was_skipped, query.visible()) == (True, ["a", "b", "c"])
        with pytest.raises(BatchChangedError, match="with 3 rows, and now it comes with as many rows, but"):
            query.run(0, ["a", "b"], ["other"], transaction_version=transaction_version)
        second = query.run(1, ["d"], [], transaction_version=transaction_version)
        assert (second.was_skipped, query.visible()) == (False, ["a", "b", "c", "d"])
    written = read_values(servers, topic, isolation_level="read_uncommitted")
    assert sorted(written) == ["a", "b", "c", "d"]  # nothing was written and aborted
    check_nothing_open(servers, query.prefix)
