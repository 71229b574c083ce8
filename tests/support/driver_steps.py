"""An exactly-once driver on scripted nodes, and one of its tasks."""

from __future__ import annotations

from support.coordinator_bench import CoordinatorBench
from support.scripted_broker import faults
from support.scripted_broker.cluster import ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.sink.exactly_once.cluster import KafkaDriverCluster
from spark_kafka_sink.sink.exactly_once.messages import BatchStart, TaskOutcome, TaskTransaction, task_id
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


def marked_task(
    bench: CoordinatorBench,
    batch_start: BatchStart,
    *,
    batch_id: int = 0,
    query_id: str = "",
    partition: int = 0,
    value: str = "row",
) -> TaskOutcome:
    """The outcome of a task that wrote one row, and has left its transaction open with its marker."""
    open_ = bench.raw.begin(task_id(batch_start.prefix, partition, 0))
    bench.raw.write(open_, TopicPartition("t", 0), value)
    written = TaskTransaction(open_, partition, 1)
    bench.raw.mark(open_, open_.transactional_id, batch_start.place, batch_id + 1, written.marker_text)
    return TaskOutcome(batch_start, batch_id, query_id, partition, 1, written)


def refused_to_task_0(error_code: int) -> faults.Hook:
    """Refuse only EndTxn of task 0's transaction; the driver's own transaction ends."""

    def refuse(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        if exchange.request.transactional_id != "P/0":
            return proceed()
        return faults.fail_with(error_code)(cluster, exchange, proceed)

    return refuse
