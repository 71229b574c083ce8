from __future__ import annotations

import logging
from collections import namedtuple
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.fake_clock import FakeClock

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.producer.record_fields import (
    TimestampWatch,
    checked_group,
    checked_headers,
    checked_offsets,
    checked_place,
)
from spark_kafka_sink.producer.transaction_requests import GroupMetadata
from spark_kafka_sink.record.columns import RecordColumns

PLACE = TopicPartition("flights", 0)


@pytest.mark.parametrize(
    "number", [1.0, np.float64(1_700_000_000_000.5), "1", b"1", True, np.True_, np.array(True), np.array(1.5)]
)
def test_send_refuses_partition_or_timestamp_without_int(number: Any) -> None:
    with pytest.raises(SerializationError, match=r"partition=.*give an int"):
        checked_place(number, None)
    with pytest.raises(SerializationError, match=r"timestamp_ms=.*as an int"):
        checked_place(None, number)


def test_any_int_is_accepted() -> None:
    for place in (checked_place(np.int32(1), np.int64(2)), checked_place(np.array(1), np.array(2))):  # type: ignore[arg-type]
        assert place == (1, 2)
        assert {type(number) for number in place} == {int}
    assert checked_place(0, 0) == (0, 0)


def test_int_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(SerializationError, match="partition=an int of 16610 bits: give an int"):
        checked_place(10**5000, None)
    for stamp in (10**5000, -(10**5000)):
        with pytest.raises(SerializationError, match="timestamp_ms is an int of 16610 bits"):
            checked_place(None, stamp)
    with pytest.raises(SerializationError, match="offset of flights-0 is an int of 16610 bits"):
        checked_offsets({PLACE: (10**5000, None)})


@pytest.mark.parametrize("headers", [{"id": b"7"}, {"origin": b"7"}, ["id"], [("id",)], [7]])
def test_headers_that_are_not_pairs_are_refused_by_send(headers: Any) -> None:
    with pytest.raises(SerializationError, match=r"headers? of a record (is|are) a"):
        checked_headers(headers)


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ({PLACE: 5}, r"offset of flights-0 is 5: give \(next offset, text\)"),
        ({PLACE: (5.0, None)}, "offset of flights-0 is 5.0: give an int"),
        ({PLACE: (-1, None)}, "offset of flights-0 is -1: give an int of 0 or more"),
        ({PLACE: (2**63, None)}, "offset of flights-0 is 9223372036854775808"),
        ({PLACE: (5, b"text")}, "offset of flights-0 has the text b'text'"),
        ({PLACE: (5, "\ud800")}, "offset of flights-0 has the text .* UTF-8"),
        ({"flights": (5, None)}, "'flights' is not a key of offsets"),
        ({PLACE: (5, "x" * 32_768)}, "offset of flights-0 has the text 'xxx.* 32767 bytes"),
        ({("flights", "0"): (5, None)}, "is not a key of offsets"),
        ({("flights", -1): (5, None)}, "is not a key of offsets"),
        ({("flights", 2**31): (5, None)}, "is not a key of offsets"),
        ({("\ud800", 0): (5, None)}, "is not a key of offsets"),
        ({("x" * 32_768, 0): (5, None)}, "is not a key of offsets"),
        ({PLACE: (5, "é" * 16_384)}, "in 32767 bytes"),
    ],
)
def test_offsets_that_cannot_be_sent_are_refused(offsets: Any, text: str) -> None:
    with pytest.raises(SerializationError, match=text):
        checked_offsets(offsets)


def test_offsets_that_can_be_sent_are_copied() -> None:
    offsets: Any = {("flights", 0): [np.int64(5), "text"], TopicPartition("flights", 1): (0, None)}
    checked = checked_offsets(offsets)
    offsets.clear()
    assert checked == {PLACE: (5, "text"), TopicPartition("flights", 1): (0, None)}


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("", "empty group_id"),
        ("g\ud800", "group_id=.*UTF-8"),
        ("g" * 32_768, r"group_id='g+: give a str .* in 32767 bytes"),
        (GroupMetadata(5), "group_id=5"),  # type: ignore[arg-type]
        (GroupMetadata("g", "1"), "generation_id='1'"),  # type: ignore[arg-type]
        (GroupMetadata("g", 2**31), "generation_id=2147483648"),
        (GroupMetadata("g", 1, None), "member_id=None"),  # type: ignore[arg-type]
        (GroupMetadata("g", 1), "generation_id=1 and an empty member_id"),
        (GroupMetadata("g", 1, "m", 7), "group_instance_id=7"),  # type: ignore[arg-type]
    ],
)
def test_a_group_that_no_request_can_name_is_refused(group: GroupMetadata | str, text: str) -> None:
    with pytest.raises(SerializationError, match=text):
        checked_group(group)


def test_a_group_that_can_be_named_is_taken() -> None:
    assert checked_group("g") == GroupMetadata("g", -1, "", None)
    full = GroupMetadata("g", np.int32(3), "m", "i")  # type: ignore[arg-type]
    assert checked_group(full) is full
    assert checked_group(GroupMetadata("g", 0)) == GroupMetadata("g", 0, "", None)
    assert checked_offsets({PLACE: (5, "é" * 16_383)})


def test_headers_with_named_fields_count_by_their_names() -> None:
    header = namedtuple("header", "value key")
    given: Any = [{"key": "a", "value": b"1"}, header(value=b"2", key="b"), ("c", bytearray(b"3")), ["d", None]]
    assert checked_headers(given) == [("a", b"1"), ("b", b"2"), ("c", b"3"), ("d", None)]


@pytest.mark.parametrize("header", [{"trace": b"1", "id": b"2"}, {"key": "a"}, {"b", "c"}, "ab", b"ab"])
def test_a_header_of_unclear_meaning_is_refused_by_send(header: Any) -> None:
    with pytest.raises(SerializationError, match='fields "key" and "value"'):
        checked_headers([header])


def test_a_partition_beyond_32_bits_is_refused_with_the_range() -> None:
    with pytest.raises(SerializationError, match="from 0 to 2147483647"):
        checked_place(2**40, None)


def timestamps(*numbers: int | None) -> RecordColumns:
    return RecordColumns(value=pa.array(["v"] * len(numbers)), timestamp_ms=pa.array(numbers, pa.int64()))


@pytest.mark.parametrize("by_columns", [True, False])
def test_timestamps_probably_in_seconds_are_warned_of_once_per_producer(
    by_columns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch = TimestampWatch(FakeClock().wall_ms)
    with caplog.at_level(logging.WARNING):
        for stamp in (None, 0, 86_400_000, 1_764_000_000_000, 1_764_000_000, 1_764_000_001):
            if by_columns:
                watch.of_columns("flights", timestamps(None, stamp))
            else:
                watch.of_record("flights", stamp)
    (line,) = (each for each in caplog.messages if each.startswith("A timestamp_ms"))
    assert "for topic flights is 1764000000. As milliseconds since 1970" in line
    assert line.endswith("It looks like seconds: multiply it by 1000.")


@pytest.mark.parametrize("by_columns", [True, False])
def test_records_that_brokers_may_delete_at_once_are_warned_of_once(
    by_columns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: rows older than retention.ms were acknowledged and reported, and gone minutes later. Nothing said so."""
    clock = FakeClock(wall_ms=1_764_000_000_000)
    watch, week_ms = TimestampWatch(clock.wall_ms), 7 * 24 * 3_600_000
    for stamp in (None, clock.wall_ms(), clock.wall_ms() - week_ms, clock.wall_ms() - week_ms - 1, 1_700_000_000_000):
        if by_columns:
            watch.of_columns("flights", timestamps(clock.wall_ms(), stamp))
        else:
            watch.of_record("flights", stamp)
    (line,) = caplog.messages
    assert line.startswith("Records for topic flights have timestamps as old as 2025-11-17T15:59:59Z. Brokers delete")


@pytest.mark.parametrize(
    ("stamp", "text"),
    [
        (-1, "lies before 1970.*-1 is what consumers show"),
        (-2, "lies before 1970"),
        (1_764_000_000_000_000, "looks like microseconds: divide it by 1000"),
    ],
)
def test_impossible_timestamp_is_refused_in_columns_and_records(stamp: int, text: str) -> None:
    with pytest.raises(SerializationError, match=rf"A timestamp_ms for topic flights is {stamp}.*{text}"):
        TimestampWatch(FakeClock().wall_ms).of_columns("flights", timestamps(1_764_000_000_000, stamp))
    with pytest.raises(SerializationError, match=rf"^timestamp_ms is {stamp}.*{text}"):
        checked_place(None, stamp)
