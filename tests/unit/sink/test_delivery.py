"""A task's report on its rows, computed from the producer's acknowledgements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from support.scripted_producer import ScriptedPool, ScriptedProducer, Sent

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import KafkaError, NotEnoughReplicasError, RecordTooLargeError
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink import delivery as delivery_module
from spark_kafka_sink.sink.delivery import Delivered, RowCounts, TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import Producer, ProducerPool


def run(partition: int, base_offset: int, records: int, size: int = 0) -> RunMetadata:
    return RunMetadata("t", partition, base_offset, records, -1, size)


def delivery_by(producer: ScriptedProducer) -> TaskDelivery:
    config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "t"})
    return TaskDelivery(config, ScriptedPool(producer))


def test_partition_sums_its_runs_and_keeps_last_offset() -> None:
    counts = RowCounts()
    for reported in (
        run(0, 10, 5, 500),
        run(1, 0, 1, 70),
        run(0, 3, 2, 30),
    ):  # the outcome of a retry comes after that of later runs
        counts(reported, None)
    assert counts.delivered == {
        TopicPartition("t", 0): Delivered(7, 530, 14),
        TopicPartition("t", 1): Delivered(1, 70, 0),
    }
    assert counts.acknowledged == 8


def test_unknown_offset_stays_unknown() -> None:
    counts = RowCounts()
    counts(run(0, -1, 5), None)
    assert counts.delivered[TopicPartition("t", 0)].last_offset == -1


def test_first_of_several_errors_is_raised() -> None:
    counts = RowCounts()
    counts(run(3, -1, 1), RecordTooLargeError("one"))
    counts(run(4, -1, 1), NotEnoughReplicasError("two"))
    counts.fail(KafkaError("three"))
    with pytest.raises(RecordTooLargeError, match=r"^t-3: one$"):
        counts.check()
    assert (counts.acknowledged, counts.delivered) == (0, {})


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

    def prepare(self, producer: Producer) -> None:
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
