from __future__ import annotations

import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.murmur2 import partition_for_key
from spark_kafka_sink.record.placement import highest_partition, place

VALUES = [b"0", b"1", b"2", b"3"]
KEYS = [b"k", None, b"l", None]


def test_a_partition_given_goes_before_the_key_and_rows_without_either_are_free() -> None:
    columns = RecordColumns.from_rows(VALUES, KEYS, partitions=[6, 5, None, None])
    placed, partitions, free = place(columns, 7)
    assert placed is not None
    assert partitions is not None
    assert free is not None
    assert placed.value.to_pylist() == [b"0", b"1", b"2"]
    assert partitions.tolist() == [6, 5, partition_for_key(b"l", 7)]
    assert free.value.to_pylist() == [b"3"]


def test_rows_that_all_have_a_key_are_all_placed_without_a_copy() -> None:
    columns = RecordColumns.from_rows(VALUES, [b"a", b"b", b"c", b""])
    placed, partitions, free = place(columns, 3)
    assert placed is columns
    assert partitions is not None
    assert partitions.tolist() == [partition_for_key(key, 3) for key in (b"a", b"b", b"c", b"")]
    assert free is None


@pytest.mark.parametrize("keys", [None, [None] * 4])
def test_rows_without_key_and_partition_are_all_free_without_a_copy(keys: list[bytes | None] | None) -> None:
    columns = RecordColumns.from_rows(VALUES, keys, partitions=[None] * 4)
    assert place(columns, 3) == (None, None, columns)


def test_keys_can_be_ignored() -> None:
    columns = RecordColumns.from_rows(VALUES, KEYS, partitions=[None, 1, None, None])
    placed, partitions, free = place(columns, 3, ignore_keys=True)
    assert placed is not None
    assert partitions is not None
    assert free is not None
    assert (placed.value.to_pylist(), partitions.tolist()) == ([b"1"], [1])
    assert free.value.to_pylist() == [b"0", b"2", b"3"]


def test_no_rows_are_neither_placed_nor_free() -> None:
    assert place(RecordColumns(pa.array([], pa.binary()), pa.array([], pa.binary())), 3) == (None, None, None)


@pytest.mark.parametrize("partition", [-1, 3])
def test_a_partition_that_the_topic_does_not_have_is_refused_with_its_row(partition: int) -> None:
    columns = RecordColumns.from_rows(VALUES, partitions=[None, 2, partition, None])
    with pytest.raises(SerializationError, match=f"Row 2 asks for partition {partition}; topic flights has 0 to 2: "):
        place(columns, 3, whose="topic flights")
    with pytest.raises(SerializationError, match=f"Row 65538 asks for partition {partition};"):
        place(columns, 3, first_row=65_536)


def test_the_highest_partition_asked_for_is_known() -> None:
    assert highest_partition(RecordColumns.from_rows(VALUES, partitions=[None, 5, 70_000, 0])) == 70_000
    assert highest_partition(RecordColumns.from_rows(VALUES, partitions=[None] * 4)) is None
    assert highest_partition(RecordColumns.from_rows(VALUES)) is None


def test_on_a_topic_of_one_partition_rows_keep_their_order_whether_they_have_a_key_or_not() -> None:
    columns = RecordColumns(pa.array([b"0", b"1", b"2"]), pa.array([b"a", None, b"b"]))
    placement = place(columns, 1)
    assert placement.free is None
    assert placement.placed is columns
    assert placement.partitions is not None
    assert placement.partitions.tolist() == [0, 0, 0]
