"""An exactly-once driver on scripted nodes, and one of its tasks."""

from __future__ import annotations

from support.coordinator_bench import CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome, TaskTransaction
from spark_kafka_sink.sink.exactly_once.protocol import ExactlyOnceDriver
from spark_kafka_sink.sink.options import SinkConfig

CONFIG = SinkConfig.from_options(
    {"kafka.bootstrap.servers": "broker-0:9092", "topic": "t", "delivery.guarantee": "exactly-once"}
)


def driver_of(bench: CoordinatorBench, prefix: str) -> ExactlyOnceDriver:
    return ExactlyOnceDriver(prefix, KafkaDriverCluster(bench.coordinator, CONFIG, prefix), lambda: 0)


def task_outcome(bench: CoordinatorBench, batch_start: BatchStart, timeout_ms: int = 60_000) -> TaskOutcome:
    """Return the outcome of a task that has left its transaction open."""
    open_ = bench.raw.begin(f"{batch_start.prefix}/0", timeout_ms=timeout_ms)
    bench.raw.write(open_, TopicPartition("t", 0), "row")
    return TaskOutcome(batch_start, 4, "q", 0, 1, TaskTransaction(open_, 0, 1))


def refused_to_task_0(error_code: int) -> faults.Hook:
    """Refuse only EndTxn of task 0's transaction; the driver's own transaction ends."""

    def refuse(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        if exchange.request.transactional_id != "P/0":
            return proceed()
        return faults.fail_with(error_code)(cluster, exchange, proceed)

    return refuse
