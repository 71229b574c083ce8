"""Arrow batches lose their padding, small batches are joined, and the records do not change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from spark_kafka_sink.sink import arrow_batches
from spark_kafka_sink.sink.arrow_batches import (
    IS_RECORD,
    LastWrite,
    LastWrites,
    joined,
    padded_rows,
    padded_under,
    without_padding,
)

TYPES = {"value": pa.binary(), "key": pa.string(), "topic": pa.large_string(), "partition": pa.int32()}


def random_cell(rng: random.Random, data_type: pa.DataType) -> object:
    if rng.random() < 0.3:
        return None
    if pa.types.is_integer(data_type):
        return rng.randrange(9)
    text = "x" * rng.choice([0, 1, 7, 600])
    return text.encode() if data_type == pa.binary() else text


@pytest.mark.parametrize("share_of_records", [0.0, 0.1, 0.9, 1.0])
def test_removal_of_padding_changes_no_record(share_of_records: float) -> None:
    rng = random.Random(str(share_of_records))
    for rows in (1, 8, 9, 200):
        marks = [rng.random() < share_of_records for _ in range(rows)]
        cells = {name: [random_cell(rng, each) if mark else None for mark in marks] for name, each in TYPES.items()}
        arrays = [pa.array(cells[name], data_type) for name, data_type in TYPES.items()]
        batch = pa.RecordBatch.from_arrays([*arrays, pa.array(marks)], [*TYPES, IS_RECORD])
        for start in (0, 1, rows // 2):
            part = batch.slice(start)
            kept = without_padding(part)
            kept.validate(full=True)
            expected = part.filter(part.column(IS_RECORD))
            assert kept.select(list(TYPES)).equals(expected.select(list(TYPES)))


def test_text_and_bytes_are_not_copied() -> None:
    marks = [True, False, False, True]
    value = pa.array([b"a" * 600, None, None, b"b"])
    kept = without_padding(pa.RecordBatch.from_arrays([value, pa.array(marks)], ["value", IS_RECORD]))
    assert kept.column(0).to_pylist() == [b"a" * 600, b"b"]
    assert kept.column(0).buffers()[2].address == value.buffers()[2].address
    assert kept.column(0).null_count == 0


def test_bytes_under_a_null_are_left_out() -> None:
    data, offsets = pa.py_buffer(b"firsthiddensecond"), pa.array([0, 5, 11, 17], pa.int32()).buffers()[1]
    valid = pa.array([True, False, True]).buffers()[1]
    value = pa.Array.from_buffers(pa.binary(), 3, [valid, offsets, data])
    batch = pa.RecordBatch.from_arrays([value, pa.array([True, False, True])], ["value", IS_RECORD])
    assert without_padding(batch).column(0).to_pylist() == [b"first", b"second"]


def test_a_batch_without_the_column_has_no_padding() -> None:
    batch = pa.RecordBatch.from_pydict({"value": [b"a", None]})
    assert without_padding(batch) is batch


def test_last_write_to_a_topic_is_remembered() -> None:
    writes = LastWrites()
    assert writes.of("t") is None
    writes.learn("t", 10, 1_000)
    writes.learn(None, 1, 7)
    writes.learn("t", 0, 0)  # a batch without rows
    assert (writes.of("t"), writes.of(None), writes.of("other")) == ((10, 1_000), (1, 7), None)
    writes.learn("t", 2, 1_000)
    assert writes.of("t") == (2, 1_000)


def test_driver_that_writes_to_ever_new_topics_forgets_the_oldest() -> None:
    """Bug: each topic that a driver ever wrote to took memory until its end."""
    writes = LastWrites()
    for number in range(1_000):
        writes.learn(f"t-{number}", 1, 1)
    writes.learn("t-0", 2, 2)
    writes.learn("t-1000", 1, 1)
    assert [writes.of(f"t-{number}") for number in (0, 1, 2, 1_000)] == [(2, 2), None, (1, 1), (1, 1)]


@pytest.mark.parametrize("mean_bytes", [None, 1, 94, 95, 96, 130.5, 1_000, 3_276, 3_277, 900_000])
def test_row_limit_corresponds_to_four_megabytes(mean_bytes: float | None) -> None:
    rows = padded_rows(None if mean_bytes is None else LastWrite(100_000, int(100_000 * mean_bytes)))
    assert rows is not None
    assert rows.row_bytes >= min(1.25 * (mean_bytes or 0), 4_096)
    assert 900 < rows.most <= 32_768
    assert 3_890_000 < rows.row_bytes * rows.most <= 3_900_000


def test_after_a_small_write_rows_are_not_padded() -> None:
    assert padded_rows(LastWrite(99_999, 9_999_900)) is None


@pytest.mark.parametrize(("most", "row_bytes"), [(10_000, 512), (1_000_000, 512), (1_000, 3_900), (1, 3_900_000)])
def test_padding_limits_bytes_under_a_given_limit_of_rows(most: int, row_bytes: int) -> None:
    assert padded_under(most) == (row_bytes, most)


@pytest.mark.parametrize("most", [0, -1])
def test_no_limit_of_rows_stays_without_one(most: int) -> None:
    assert padded_under(most) is None


def rows_of(size: int, *counts: int) -> list[pa.RecordBatch]:
    """Batches with the row numbers in `counts`, each with a distinct value of `size` characters."""
    batches, first = [], 0
    for count in counts:
        values = [str(number).zfill(size) for number in range(first, first + count)]
        batches.append(pa.RecordBatch.from_pydict({"value": pa.array(values, pa.string()), "key": [None] * count}))
        first += count
    return batches


@pytest.mark.parametrize(
    ("size", "counts", "becomes"),
    [
        (100, [10_000] * 7 + [5], [30_000, 30_000, 10_005]),
        (20, [10_000] * 7, [30_000, 30_000, 10_000]),
        (20, [8_192] * 4, [32_768]),
        (200, [10_000] * 3, [10_000] * 3),
        (1_000, [3_000, 800, 100, 3_000], [3_000, 900, 3_000]),
        (1_000, [800, 3_200, 800], [800, 3_200, 800]),
        (1_000, [10_000, 10_000, 3], [10_000, 10_000, 3]),
        (100, [0, 0, 7], [7]),
        (100, [], []),
    ],
)
def test_small_batches_are_joined_up_to_about_four_megabytes(size: int, counts: list[int], becomes: list[int]) -> None:
    batches = rows_of(size, *counts)
    together = list(joined(batches, lambda: True))
    assert [batch.num_rows for batch in together] == becomes
    assert [value for batch in together for value in batch.column(0).to_pylist()] == [
        value for batch in batches for value in batch.column(0).to_pylist()
    ]
    assert all(batch.column(1).null_count == batch.num_rows for batch in together)


def test_large_batch_is_not_copied() -> None:
    batches = rows_of(1_000, 4_000, 4_000)
    assert all(one is other for one, other in zip(joined(batches, lambda: True), batches, strict=True))


@pytest.mark.parametrize(
    ("size", "counts", "becomes"),
    [
        (100, [10_000] * 6, [30_000, 10_000, 10_000, 10_000]),
        (100, [10_000] * 3, [30_000]),
        (1_000, [1_000, 3_200, 5, 5], [1_000, 3_200, 5, 5]),
        (100, [5, 5], [10]),
    ],
)
def test_batches_are_not_joined_if_not_worth_it(size: int, counts: list[int], becomes: list[int]) -> None:
    batches = rows_of(size, *counts)
    seen: list[pa.RecordBatch] = []
    asked: list[int] = []

    def is_worth_it() -> bool:
        asked.append(len(seen))
        return False

    for batch in joined(batches, is_worth_it):
        seen.append(batch)
    assert [batch.num_rows for batch in seen] == becomes
    assert [value for batch in seen for value in batch.column(0).to_pylist()] == [
        value for batch in batches for value in batch.column(0).to_pylist()
    ]
    assert asked in ([1], [])


def test_batches_of_different_schemas_are_not_joined() -> None:
    first, other = rows_of(10, 5, 5), pa.RecordBatch.from_pydict({"value": [b"bytes"]})
    assert [batch.num_rows for batch in joined([*first, *first, other, *first], lambda: True)] == [20, 1, 10]


def test_batches_are_joined_with_pyarrow_18(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: concat_batches came with 19. With 18, which Spark accepts, tasks failed with a bare AttributeError."""
    monkeypatch.delattr(pa, "concat_batches", raising=False)
    assert [batch.to_pylist() for batch in joined(rows_of(1, 2, 0, 1), lambda: True)] == [
        [row for batch in rows_of(1, 2, 0, 1) for row in batch.to_pylist()]
    ]
    assert [batch.num_rows for batch in joined(rows_of(1, 0, 0), lambda: True)] == [0]


class CountingBatch:
    """A batch of one row that counts how often its size in bytes is read."""

    num_rows, schema, asked = 1, None, 0

    @property
    def nbytes(self) -> int:
        CountingBatch.asked += 1
        return 1


def test_tiny_batches_are_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: each new batch added up all waiting batches, which took minutes with one row in each."""
    monkeypatch.setattr(arrow_batches, "_one_of", lambda waiting: [len(waiting), waiting.clear()][0])
    assert list(joined([CountingBatch() for _ in range(2_000)], lambda: True)) == [2_000]
    assert CountingBatch.asked == 2_000


def test_joined_batches_are_not_kept() -> None:
    before = pa.total_allocated_bytes()
    batches = joined((batch for number in range(9) for batch in rows_of(100, 10_000)), lambda: True)
    for whole in batches:
        assert pa.total_allocated_bytes() - before < 1.6 * whole.nbytes
        del whole


def test_batch_is_not_read_before_there_is_room() -> None:
    read: list[int] = []

    def reading() -> Iterator[pa.RecordBatch]:
        for batch in rows_of(100, *[10_000] * 8):
            read.append(batch.num_rows)
            yield batch

    batches = joined(reading(), lambda: True)
    next(batches)
    assert len(read) == 3


class _Thread:
    """A SparkContext's local properties; Ctrl-C comes when the second one is set."""

    def __init__(self) -> None:
        self.properties: dict[str, str | None] = {"theirs": "1"}
        self._calls = 0

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 - Spark's
        return self.properties.get(name)

    def setLocalProperty(self, name: str, value: str | None) -> None:  # noqa: N802 - Spark's
        self._calls += 1
        if self._calls == 2:
            raise KeyboardInterrupt
        self.properties[name] = value


def test_interrupt_while_setting_limits_leaves_none_set() -> None:
    """Bug: the first property, no limit of bytes, stayed set for everything that the thread did in Spark afterwards."""
    context: Any = _Thread()
    with (
        pytest.raises(KeyboardInterrupt),
        arrow_batches._local_properties(context, {"theirs": "2", arrow_batches.BYTES: "3"}),
    ):
        raise AssertionError("not to be reached")
    assert context.properties == {"theirs": "1", arrow_batches.BYTES: None}


def struct_of(*names: str, data_type: DataType | None = None) -> StructType:
    return StructType([StructField(name, data_type or StringType()) for name in names])


@pytest.mark.parametrize(
    ("data_type", "is_counted"),
    [
        (struct_of("id", "di"), True),
        (struct_of("id", "ID"), False),
        (struct_of("id", "id"), False),
        (struct_of("id", "\u0130D"), False),  # in Java, a Turkish İ and an i differ only in case
        (struct_of("o", data_type=struct_of("Id", "iD", data_type=LongType())), False),
        (struct_of("a", "b", data_type=struct_of("a", "b")), True),
        (struct_of(*(f"c{at}" for at in range(100))), True),
        (struct_of(*(f"c{at}" for at in range(101))), False),
        (struct_of(*(f"c{at}" for at in range(500)), data_type=DoubleType()), True),
        (struct_of("a", data_type=ArrayType(StringType())), False),
    ],
    ids=lambda given: given.simpleString()[:30] if isinstance(given, StructType) else None,
)
def test_columns_whose_fields_sql_can_name_and_add(data_type: StructType, is_counted: bool) -> None:
    assert arrow_batches._is_counted(data_type) == is_counted


def test_sql_for_the_size_does_not_grow_without_end() -> None:
    """Bug: each text was one more level of a sum. With 600 the JVM had no stack left."""
    wide = struct_of(*(f"c{at}" for at in range(2_000)))
    assert (
        arrow_batches._size_of("value", wide)
        == "CASE WHEN value IS NULL THEN 0 ELSE octet_length(CAST(value AS STRING)) END + 8000"
    )


def test_size_of_fields_that_differ_only_in_case_names_none_of_them() -> None:
    """Bug: Spark refused value.`id`, because it could be either of them."""
    twins = struct_of("o", data_type=struct_of("id", "ID"))
    assert (
        arrow_batches._size_of("value", twins)
        == "CASE WHEN value IS NULL THEN 0 ELSE octet_length(CAST(value AS STRING)) END + 8"
    )


@pytest.mark.parametrize(
    ("data_type", "row_bytes"),
    [
        (struct_of("a"), 512),
        (struct_of(*map(str, range(100))), 3_000),
        (struct_of(*map(str, range(1_000))), 4_096),
        (struct_of(*map(str, range(2_000))), 8_000),
        (struct_of(*map(str, range(1_000)), data_type=DoubleType()), 8_000),
    ],
    ids=["1", "100", "1000", "2000", "1000 doubles"],
)
def test_a_row_of_padding_counts_no_more_than_it_takes(data_type: StructType, row_bytes: int) -> None:
    """Bug: it counted 4096 bytes at most. With 2,000 fields it takes 8,000, so that the batches were too large."""
    limit = padded_rows(None)
    assert limit is not None
    assert arrow_batches._with_room_for(limit, [data_type]) == (row_bytes, 3_900_000 // row_bytes)
