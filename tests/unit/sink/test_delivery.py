"""What a task tells of its rows, from what the producer told it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from support.fake_clock import FakeClock
from support.scripted_producer import ScriptedProducer

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError, NotEnoughReplicasError, RecordTooLargeError
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.sink import delivery as delivery_module
from spark_kafka_sink.sink.delivery import Delivered, Tally, TaskDelivery
from spark_kafka_sink.sink.options import SinkConfig
from spark_kafka_sink.sink.producer_pool import ProducerPool


def run(partition: int, base_offset: int, records: int, size: int = 0) -> RunMetadata:
    return RunMetadata("t", partition, base_offset, records, -1, size)


def delivery_by(producer: ScriptedProducer) -> TaskDelivery:
    config = SinkConfig.from_options({"kafka.bootstrap.servers": "h:1", "topic": "t"})
    return TaskDelivery(config, ProducerPool(lambda _: producer, FakeClock()))


def test_a_partition_has_the_records_and_bytes_of_its_runs_and_the_last_of_their_offsets() -> None:
    tally = Tally()
    for told in (run(0, 10, 5, 500), run(1, 0, 1, 70), run(0, 3, 2, 30)):  # a retry is told after what follows it
        tally(told, None)
    assert tally.delivered == {
        TopicPartition("t", 0): Delivered(7, 530, 14),
        TopicPartition("t", 1): Delivered(1, 70, 0),
    }
    assert tally.acknowledged == 8


def test_an_offset_that_the_broker_does_not_tell_is_not_made_up() -> None:
    tally = Tally()
    tally(run(0, -1, 5), None)
    assert tally.delivered[TopicPartition("t", 0)].last_offset == -1


def test_of_several_errors_the_first_is_told() -> None:
    tally = Tally()
    tally(run(3, -1, 1), RecordTooLargeError("one"))
    tally(run(4, -1, 1), NotEnoughReplicasError("two"))
    tally.fail(KafkaError("three"))
    with pytest.raises(RecordTooLargeError, match=r"^t-3: one$"):
        tally.check()
    assert (tally.acknowledged, tally.delivered) == (0, {})


def test_a_delivery_begins_by_acknowledging_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it Spark keeps a small task's rows for 40 ms."""
    told: list[Any] = []
    monkeypatch.setattr(delivery_module, "acknowledge_now", lambda: told.append("all"))
    delivery_by(ScriptedProducer())
    assert told == ["all"]


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
