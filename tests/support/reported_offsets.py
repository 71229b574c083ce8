"""Compares the offsets of a report with those that librdkafka reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from confluent_kafka import Message
from support.librdkafka import place_of

from spark_kafka_sink import BatchReport
from spark_kafka_sink.common.batch_report import WrittenPartition


def offsets_by_partition(messages: Iterable[Message]) -> dict[int, list[int]]:
    """Return the offsets of these records, by partition."""
    found: dict[int, list[int]] = {}
    for message in messages:
        partition, offset = place_of(message)
        found.setdefault(partition, []).append(offset)
    return found


def check_partitions(
    reported: Sequence[WrittenPartition], topic: str, read: Mapping[int, Sequence[int]], where: str
) -> None:
    """Check that the report names the partitions of `read`, and the number, the first and the last of their offsets."""
    assert {each.partition for each in reported} == read.keys(), where
    for each in reported:
        offsets = read[each.partition]
        assert (each.topic, each.records) == (topic, len(offsets)), (where, each)
        if each.records_without_offset == 0:
            assert (each.first_offset, each.last_offset) == (min(offsets), max(offsets)), (where, each)
        elif each.records_without_offset < each.records:
            assert {each.first_offset, each.last_offset} <= {*offsets}, (where, each)
        else:
            assert (each.first_offset, each.last_offset) == (-1, -1), (where, each)


def check_report(report: BatchReport, topic: str, messages: Iterable[Message]) -> None:
    """Check that `messages` are the records of the report."""
    check_partitions(report.partitions, topic, offsets_by_partition(messages), f"batch {report.batch_id}")
