"""The tasks' reports and the driver's summary."""

from __future__ import annotations

import pickle

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.sink.delivery import Delivered
from spark_kafka_sink.sink.report import WriteReport, task_report


def test_the_reports_of_several_tasks_add_up() -> None:
    first = task_report(
        {TopicPartition("t", 0): Delivered(10, 100, 9), TopicPartition("t", 1): Delivered(5, 50, 4)}, 3, 1
    )
    second = task_report({TopicPartition("t", 0): Delivered(7, 70, 16)}, 2, 0)
    report = WriteReport.of([*first.to_pylist(), *second.to_pylist()], 2.0)
    assert (report.records, report.bytes, report.batches, report.retries) == (22, 220, 5, 1)
    assert report.last_offsets == {TopicPartition("t", 0): 16, TopicPartition("t", 1): 4}
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_report_reads_as_one_line() -> None:
    rows = task_report({TopicPartition("flights", 0): Delivered(336_776, 45_200_000, 336_775)}, 180, 2).to_pylist()
    assert str(WriteReport.of(rows, 2.5)) == (
        "336,776 records, 45.2 MB in 180 batches to 1 partitions of flights, 2 retries, 2.50 s, 134,710 records/s"
    )


def test_report_names_ten_of_many_topics() -> None:
    def of(topics: int) -> str:
        delivered = {TopicPartition(f"t{number:03}", 0): Delivered(1, 10, 0) for number in range(topics)}
        return str(WriteReport.of(task_report(delivered, topics, 0).to_pylist(), 0.0))

    assert " 10 partitions of t000, t001, t002, t003, t004, t005, t006, t007, t008, t009, 0 retries" in of(10)
    assert " 1000 partitions of t000, t001, t002, t003, t004, t005, t006, t007, t008, t009 and 990 more," in of(1_000)


def test_write_without_rows_makes_a_report() -> None:
    report = WriteReport.of(task_report({}, 0, 0).to_pylist(), 0.0)
    assert str(report) == "0 records, 0.0 MB in 0 batches, 0 retries, 0.00 s"
