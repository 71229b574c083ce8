"""A task's delivery of its rows, and its report, computed from the producer's acknowledgements."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pytest
from support.fake_clock import FakeClock
from support.scripted_producer import ScriptedPool, ScriptedProducer, Sent

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import InvalidTopicError, KafkaError, RecordTooLargeError
from spark_kafka_sink.producer.writes import Delivered, WriteReport
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink import delivery as delivery_module
from spark_kafka_sink.sink.delivery import TaskDelivery, report_columns, task_report
from spark_kafka_sink.sink.options import DECISION_TOPIC, SinkConfig
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool


def delivery_by(producer: ScriptedProducer) -> TaskDelivery:
    config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "t"})
    return TaskDelivery(config, ScriptedPool(producer))


def test_delivery_begins_with_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it Spark delays the rows of a small task by 40 ms."""
    reported: list[Any] = []
    monkeypatch.setattr(delivery_module, "acknowledge_now", lambda: reported.append("all"))
    delivery_by(ScriptedProducer())
    assert reported == ["all"]


def test_nothing_is_sent_behind_a_row_that_failed() -> None:
    producer = ScriptedProducer(on_send=lambda sent: sent.report(RecordTooLargeError("large")))
    delivery = delivery_by(producer)
    columns = RecordColumns(pa.array([b"v"]))
    delivery.send("t", columns)
    with pytest.raises(RecordTooLargeError):
        delivery.send("t", columns)
    assert len(producer.sent) == 1


def test_a_task_without_rows_went_to_no_topic() -> None:
    delivery = delivery_by(ScriptedProducer())
    delivery.finish()
    assert (delivery.topics, delivery.partition_count("t")) == ((), 0)


class ScriptedTransaction:
    """Record the calls of a delivery in order, together with the producer's flush."""

    def __init__(self, producer: ScriptedProducer, *, takes_rows: bool = True) -> None:
        self.asked: list[str] = []
        self.is_prepared = False
        self.is_written_already = not takes_rows
        self._producer = producer
        self._takes_rows = takes_rows
        producer.on_flush = self._flush

    def _flush(self, unreported: Sequence[Sent]) -> None:
        self.asked.append("flush")
        for sent in unreported:
            sent.report()

    def takes(self, topic: str, columns: RecordColumns) -> bool:
        self.asked.append(f"takes {columns.num_rows} rows of {topic}")
        return self._takes_rows

    def begin(self, pool: ProducerPool, config: ProducerConfig) -> Producer:
        self.asked.append("begin")
        return pool.borrow(config)

    def add_marker(self, producer: Producer, rows: int) -> None:
        assert producer is self._producer
        self.asked.append(f"marker of {rows} rows")

    def prepare(self, producer: Producer, delivered: object) -> None:
        assert producer is self._producer
        self.asked.append("prepare")
        self.is_prepared = True


def delivery_into(transaction: ScriptedTransaction, producer: ScriptedProducer) -> TaskDelivery:
    config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "t"})
    return TaskDelivery(config, ScriptedPool(producer), transaction)


def test_transaction_is_begun_marked_and_prepared_around_its_rows() -> None:
    producer = ScriptedProducer()
    transaction = ScriptedTransaction(producer)
    delivery = delivery_into(transaction, producer)
    for value in (b"v", b"w"):
        delivery.send("t", RecordColumns(pa.array([value])))
    delivery.finish()
    assert transaction.asked == [
        "takes 1 rows of t",
        "begin",
        "takes 1 rows of t",
        "marker of 2 rows",
        "flush",
        "prepare",
    ]
    assert producer.closed_with == []


def test_producer_of_a_transaction_that_is_not_prepared_is_closed() -> None:
    producer = ScriptedProducer()
    transaction = ScriptedTransaction(producer)
    delivery = delivery_into(transaction, producer)
    delivery.send("t", RecordColumns(pa.array([b"v"])))
    producer.on_flush = lambda unreported: None
    with pytest.raises(KafkaError, match="1 of 1 rows were sent and neither acknowledged nor refused"):
        delivery.finish()
    assert transaction.asked[-1] == "marker of 1 rows"
    assert len(producer.closed_with) == 1


def test_rows_refused_by_the_transaction_are_not_sent() -> None:
    producer = ScriptedProducer()
    transaction = ScriptedTransaction(producer, takes_rows=False)
    delivery = delivery_into(transaction, producer)
    delivery.send("t", RecordColumns(pa.array([b"v"])))
    delivery.finish()
    assert transaction.asked == ["takes 1 rows of t"]
    assert producer.sent == []


@pytest.mark.parametrize("takes_rows", [True, False])
def test_row_for_the_decision_topic_is_refused_unless_it_is_written_already(takes_rows: bool) -> None:
    """Bug: a row whose topic column names the decision topic could decide for any query."""
    producer = ScriptedProducer()
    transaction = ScriptedTransaction(producer, takes_rows=takes_rows)
    config = SinkConfig.from_options(
        {"kafka.bootstrap.servers": "h:1", "delivery.guarantee": "exactly-once", "decision.topic": "d"}
    )
    delivery = TaskDelivery(config, ScriptedPool(producer), transaction)
    delivery.send("t", RecordColumns(pa.array([b"v"])))
    with pytest.raises(InvalidTopicError, match=r"A row names topic d: .*decisions") if takes_rows else nullcontext():
        delivery.send("d", RecordColumns(pa.array([b"v"])))
    assert [sent.topic for sent in producer.sent] == (["t"] if takes_rows else [])


def test_row_for_the_topic_of_others_decisions_is_sent_at_least_once() -> None:
    """As in a copy of a whole cluster."""
    producer = ScriptedProducer()
    delivery = TaskDelivery(SinkConfig.from_options({"kafka.bootstrap.servers": "h:1"}), ScriptedPool(producer))
    delivery.send(DECISION_TOPIC, RecordColumns(pa.array([b"v"])))
    delivery.finish()
    assert len(producer.sent) == 1


def test_task_reports_the_time_of_each_phase() -> None:
    clock = FakeClock()
    producer = ScriptedProducer(waited_ms=(1_000, 2_000))

    def wait_and_encode(sent: Sent) -> None:
        clock.advance(70)
        producer.waited_ms = (producer.waited_ms[0] + 10, producer.waited_ms[1] + 20)

    def acknowledge(unreported: Sequence[Sent]) -> None:
        clock.advance(5)
        for sent in unreported:
            sent.report()

    producer.on_send, producer.on_flush = wait_and_encode, acknowledge
    config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "t"})
    delivery = TaskDelivery(config, ScriptedPool(producer), clock=clock)
    for _ in range(2):
        clock.advance(100)  # Spark computes rows
        delivery.send("t", RecordColumns(pa.array([b"v"])))
    delivery.finish()
    facts = json.loads(delivery.report[-1][-1])
    assert facts == {
        "durations_ms": {"read": 200, "encode": 80, "metadata": 20, "memory": 40, "acknowledge": 5, "producer": 0},
        "kinds": {},
    }


def test_the_reports_of_several_tasks_add_up() -> None:
    first = task_report(
        report_columns(
            {TopicPartition("t", 0): Delivered(10, 100, 9), TopicPartition("t", 1): Delivered(5, 50, 4)}, 3, 1
        )
    )
    second = task_report(report_columns({TopicPartition("t", 0): Delivered(7, 70, 16)}, 2, 0))
    report = WriteReport.of([*first.to_pylist(), *second.to_pylist()], 2.0)
    assert (report.records, report.bytes, report.batches, report.retries) == (22, 220, 5, 1)
    assert report.last_offsets == {TopicPartition("t", 0): 16, TopicPartition("t", 1): 4}
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_report_reads_as_one_line() -> None:
    rows = task_report(
        report_columns({TopicPartition("flights", 0): Delivered(336_776, 45_200_000, 336_775)}, 180, 2)
    ).to_pylist()
    assert str(WriteReport.of(rows, 2.5)) == (
        "336,776 records, 45.2 MB in 180 batches to 1 partitions of flights, 2 retries, 2.50 s, 134,710 records/s"
    )


def test_report_names_ten_of_many_topics() -> None:
    def of(topics: int) -> str:
        delivered = {TopicPartition(f"t{number:03}", 0): Delivered(1, 10, 0) for number in range(topics)}
        return str(WriteReport.of(task_report(report_columns(delivered, topics, 0)).to_pylist(), 0.0))

    assert " 10 partitions of t000, t001, t002, t003, t004, t005, t006, t007, t008, t009, 0 retries" in of(10)
    assert " 1000 partitions of t000, t001, t002, t003, t004, t005, t006, t007, t008, t009 and 990 more," in of(1_000)


def test_write_without_rows_makes_a_report() -> None:
    report = WriteReport.of(task_report(report_columns({}, 0, 0)).to_pylist(), 0.0)
    assert str(report) == "0 records, 0.0 MB in 0 batches, 0 retries, 0.00 s"
