"""What jobs/exactly_once_cost.py measures: a cluster behind proxies, and the batches of an exactly-once query as
`format("kafka_sink")` runs them, but without Spark: the driver and the tasks are in this process, one after the other,
by the same functions that the data source calls.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pyarrow as pa
from benchmark_proxy import Counted, CountingProxy
from benchmark_topics import KEPT
from microbenchmark import texts

from spark_kafka_sink.local import EmbeddedKafka
from spark_kafka_sink.sink.arrow_writer import write_all
from spark_kafka_sink.sink.delivery import TaskDelivery
from spark_kafka_sink.sink.exactly_once.cluster import process_driver
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome
from spark_kafka_sink.sink.exactly_once.task import ExactlyOnceTask, TaskIdentity
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import process_pool

BROKER = {"log.segment.delete.delay.ms": 1000, "log.retention.check.interval.ms": 1000}
VALUE_BYTES = 100
"""Of the rows whose requests and latencies are measured."""
BLOCK_ROWS = 10_000
"""Of the Arrow batches that Spark hands to a data source."""


class MeasurementError(Exception):
    """The brokers do not hold what was written."""


@dataclass(frozen=True)
class Stage:
    """A cluster, and the proxies before its brokers."""

    kafka: EmbeddedKafka
    proxies: Sequence[CountingProxy]

    @property
    def proxied(self) -> str:
        return ",".join(proxy.address for proxy in self.proxies)

    def counts(self) -> Mapping[str, Counted]:
        """What has passed all proxies so far."""
        found: dict[str, Counted] = defaultdict(Counted)
        for proxy in self.proxies:
            for api, counted in proxy.counts().items():
                found[api] = found[api].plus(counted)
        return found

    def new_topic(self, partitions: int) -> str:
        name = f"cost-{uuid.uuid4().hex[:8]}"
        self.kafka.create_topic(name, partitions, len(self.proxies), KEPT)
        return name


@contextmanager
def stage_of(nodes: int, transaction_version: int) -> Iterator[Stage]:
    with ExitStack() as stack:
        proxies = {node: stack.enter_context(CountingProxy()) for node in range(1, nodes + 1)}
        kafka = stack.enter_context(
            EmbeddedKafka(
                nodes,
                properties=BROKER,
                features={"transaction.version": transaction_version},
                advertised={node: proxy.address for node, proxy in proxies.items()},
                tuned_for="throughput",
            )
        )
        for node, proxy in proxies.items():
            proxy.upstream = kafka.proxied_address(node)
        yield Stage(kafka, tuple(proxies.values()))


class Query:
    """One query, from its first batch on. A batch is `begin`, `run_task` of each of its tasks, and `commit`."""

    def __init__(self, servers: str, topic: str) -> None:
        self.prefix = f"cost-{uuid.uuid4().hex[:8]}"
        self.topic = topic
        self.batch_id = 0
        self._config = SinkConfig.from_options(
            {
                "kafka.bootstrap.servers": servers,
                "topic": topic,
                "delivery.guarantee": "exactly-once",
                "transactional.id.prefix": self.prefix,
            }
        )

    @property
    def decision_topic(self) -> str:
        return self._config.decision_topic

    def begin(self) -> BatchStart:
        with process_driver(self._config, self.prefix) as driver:
            return driver.begin()

    def run_task(self, batch_start: BatchStart, partition: int, blocks: Iterable[pa.RecordBatch]) -> TaskOutcome:
        identity = TaskIdentity(self.batch_id, self.prefix, partition, 0)
        task = ExactlyOnceTask.in_process(self._config, batch_start, identity)
        write_all(TaskDelivery(self._config, process_pool(), task), blocks)
        return task.outcome

    def commit(self, outcomes: Sequence[TaskOutcome]) -> None:
        with process_driver(self._config, self.prefix) as driver:
            driver.commit(outcomes)
        self.batch_id += 1


def blocks_of(rows: int, value_bytes: int, first: int = 0) -> list[pa.RecordBatch]:
    """Return rows that count up from `first`, with 100,003 different keys of 20 bytes, and values of text."""
    blocks = []
    for start in range(first, first + rows, BLOCK_ROWS):
        numbers = range(start, min(start + BLOCK_ROWS, first + rows))
        keys = texts([f"customer-{10_000_000_000 + number * 31 % 100_003}" for number in numbers])
        values = texts([f'{{"id":{number:010d},"note":"'.ljust(value_bytes, "x") for number in numbers])
        blocks.append(pa.record_batch({"key": keys, "value": values}))
    return blocks
