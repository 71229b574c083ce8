"""What a task tells of its rows, from what the producer told it."""

from __future__ import annotations

import pytest

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import KafkaError, NotEnoughReplicasError, RecordTooLargeError
from spark_kafka_sink.producer.futures import RunMetadata
from spark_kafka_sink.sink.task_delivery import Delivered, Tally


def run(partition: int, base_offset: int, records: int, size: int = 0) -> RunMetadata:
    return RunMetadata("t", partition, base_offset, records, -1, size)


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
