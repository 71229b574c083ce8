"""An exactly-once writer of the data source without Spark: how a batch that failed ends, on scripted nodes."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
from support.coordinator_bench import CoordinatorBench
from support.scripted_broker import faults

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.protocol.messages import ApiKey
from spark_kafka_sink.sink import driver_cluster
from spark_kafka_sink.sink.data_source import KafkaBatchWriter, KafkaStreamWriter
from spark_kafka_sink.sink.mandate import task_id
from spark_kafka_sink.sink.options import SinkConfig

PREFIX = "orders"
CONFIG = SinkConfig.from_options(
    {"kafka.bootstrap.servers": "broker-0:9092", "topic": "t", "delivery.guarantee": "exactly-once"}
)


@pytest.fixture(params=[2, 1], ids=["version 2", "version 1"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CoordinatorBench:
    made = CoordinatorBench(version=request.param)
    monkeypatch.setattr(driver_cluster, "process_coordinator", lambda _: made.coordinator)
    return made


@pytest.fixture(autouse=True)
def _own_level(caplog: pytest.LogCaptureFixture) -> None:
    """The writers set a level where there is none; this one is taken back."""
    caplog.set_level(logging.INFO, "spark_kafka_sink")


def travelled(writer: Any) -> Any:
    """As Spark makes a writer ready for the tasks; on what comes of that it calls `commit` or `abort`."""
    return pickle.loads(pickle.dumps(writer))


def leave_open(bench: CoordinatorBench) -> None:
    """What a task leaves whose worker was killed: it tells nothing."""
    open_ = bench.raw.begin(task_id(PREFIX, 0, 0))
    bench.raw.write(open_, TopicPartition("t", 0), "row")


@pytest.mark.parametrize("is_one_off", [True, False])
def test_a_batch_write_that_fails_before_any_task_ends_leaves_nothing_open(
    bench: CoordinatorBench, is_one_off: bool, caplog: pytest.LogCaptureFixture
) -> None:
    writer = travelled(KafkaBatchWriter(CONFIG, PREFIX, is_one_off=is_one_off))
    leave_open(bench)
    writer.abort([None])
    assert bench.state("orders/0") == "CompleteAbort"
    assert "0 of 1 tasks had finished; their transactions were aborted." in caplog.text


def test_what_cannot_be_aborted_is_said_to_end_by_whom_it_can(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    writers = [travelled(KafkaBatchWriter(CONFIG, PREFIX, is_one_off=is_one_off)) for is_one_off in (True, False)]
    leave_open(bench)
    bench.cluster.on(ApiKey.END_TXN, faults.fail_with(53), times=None)
    for writer in writers:
        writer.abort([None])
    KafkaStreamWriter(CONFIG, PREFIX).abort([None], 7)
    one_off, prefixed, stream = (record.getMessage() for record in caplog.records if "failed" in record.getMessage())
    assert "their transactions end with their time-out, or before by python -m" in one_off
    assert "finish --bootstrap-servers ... --prefix orders. If" in one_off
    for text in (prefixed, stream):
        assert "are finished or aborted when this is started again. If" in text


def test_a_cluster_that_cannot_be_asked_leaves_the_report_of_the_failure(
    bench: CoordinatorBench, caplog: pytest.LogCaptureFixture
) -> None:
    writer = travelled(KafkaBatchWriter(CONFIG, PREFIX, is_one_off=True))
    leave_open(bench)
    bench.cluster.on(ApiKey.LIST_TRANSACTIONS, faults.fail_with(31), times=None)
    writer.abort([None])
    assert "--prefix orders (" in caplog.text
