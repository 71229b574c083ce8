"""The fingerprint of records: what leaves it as it is, and what changes it. By the kernel and by its numpy twin."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record import fingerprint as module
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.fingerprint import (
    MODULUS,
    _compiled,
    fingerprint,
    fingerprint_by_kernel,
    fingerprint_by_numpy,
)
from spark_kafka_sink.record.runs import has_kernel

Fingerprint = Callable[[str, RecordColumns], int]
needs_kernel = pytest.mark.skipif(_compiled is None, reason="no C compiler")
HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Record(NamedTuple):
    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None
    partition: int | None = None


contents = st.none() | st.binary(max_size=70)
records = st.builds(
    Record,
    st.sampled_from(["t", "u"]),
    contents,
    contents,
    st.lists(st.tuples(st.text("abé", max_size=3), contents), max_size=3).map(tuple),
    st.none() | st.integers(0, 2**62),
    st.none() | st.integers(0, 2**31 - 1),
)


def columns_of(rows: Sequence[Record]) -> RecordColumns:
    return RecordColumns(
        value=pa.array([row.value for row in rows], pa.binary()),
        key=pa.array([row.key for row in rows], pa.binary()),
        headers=pa.array([[{"key": key, "value": value} for key, value in row.headers] for row in rows], HEADERS_TYPE),
        timestamp_ms=pa.array([row.timestamp_ms for row in rows], pa.int64()),
        partition=pa.array([row.partition for row in rows], pa.int32()),
    )


def print_of(rows: Sequence[Record], take: Fingerprint = fingerprint) -> int:
    """Of records of several topics."""
    topics = sorted({row.topic for row in rows})
    return sum(take(topic, columns_of([row for row in rows if row.topic == topic])) for topic in topics) % MODULUS


@pytest.fixture(params=["kernel", "numpy"])
def take(request: pytest.FixtureRequest) -> Fingerprint:
    if request.param == "numpy":
        return fingerprint_by_numpy
    if _compiled is None:
        pytest.skip("no C compiler")
    return fingerprint_by_kernel


def test_where_there_is_a_kernel_it_takes_fingerprints() -> None:
    assert (_compiled is not None) is has_kernel()
    assert fingerprint is (fingerprint_by_kernel if has_kernel() else fingerprint_by_numpy)


@needs_kernel
@settings(derandomize=True, max_examples=300, deadline=None, database=None)
@given(st.lists(records, max_size=12))
def test_kernel_and_twin_give_the_same_number(rows: list[Record]) -> None:
    assert print_of(rows, fingerprint_by_kernel) == print_of(rows, fingerprint_by_numpy)


def test_a_golden_number_never_changes(take: Fingerprint) -> None:
    """A decision of an older release is compared with what this one computes."""
    rows = [
        Record(
            "orders", b"key", b"a value of more than sixteen bytes", (("h", None), ("i", b"")), 1_700_000_000_000, 3
        ),
        Record("orders", None, b"", (), None, None),
        Record("orders", b"", None, (), 0, 0),
    ]
    assert print_of(rows, take) == GOLDEN


GOLDEN = 11_302_311_379_902_472_830


@settings(derandomize=True, max_examples=150, deadline=None, database=None)
@given(st.lists(records, max_size=12), st.randoms(use_true_random=False), st.integers(1, 4))
def test_order_and_partitions_do_not_change_it(rows: list[Record], rng: random.Random, partitions: int) -> None:
    shuffled = rng.sample(rows, len(rows))
    for take in (fingerprint, fingerprint_by_numpy):
        parts: list[list[Record]] = [[] for _ in range(partitions)]
        for row in shuffled:
            rng.choice(parts).append(row)
        assert sum(print_of(part, take) for part in parts) % MODULUS == print_of(rows, take)


@settings(derandomize=True, max_examples=100, deadline=None, database=None)
@given(st.lists(records.map(lambda row: row._replace(topic="t")), max_size=12), st.data())
def test_chunks_slices_and_types_do_not_change_it(rows: list[Record], data: st.DataObject) -> None:
    whole = columns_of(rows)
    cut = data.draw(st.integers(0, len(rows)))
    around = columns_of([Record("t", b"before", None, (("x", b"y"),)), *rows, Record("t", None, b"after")])

    def chunked(column: pa.Array, data_type: pa.DataType | None = None) -> pa.ChunkedArray:
        parts = [column.slice(0, cut), column.slice(cut)]
        return pa.chunked_array([part.cast(data_type) if data_type else part for part in parts])

    large = pa.large_list(pa.struct([("key", pa.large_binary()), ("value", pa.large_binary())]))
    others = [
        around.slice(1, len(rows)),
        RecordColumns(
            chunked(whole.value, pa.large_binary()),
            chunked(whole.key),
            chunked(whole.headers, large),
            chunked(whole.timestamp_ms),
            chunked(whole.partition),
        ),
        RecordColumns(
            whole.value.dictionary_encode(), whole.key.dictionary_encode(), whole.headers, *whole_numbers(whole)
        ),
    ]
    for take in (fingerprint, fingerprint_by_numpy):
        wanted = take("t", whole)
        assert [take("t", other) for other in others] == [wanted] * len(others)
        assert (take("t", whole.slice(0, cut)) + take("t", whole.slice(cut, len(rows)))) % MODULUS == wanted


def whole_numbers(columns: RecordColumns) -> tuple[Any, Any]:
    return columns.timestamp_ms, columns.partition


def test_a_column_of_nulls_is_as_none(take: Fingerprint) -> None:
    value = pa.array([b"a", b"b"], pa.binary())
    nulls = RecordColumns(
        value,
        pa.nulls(2, pa.binary()),
        pa.array([None, []], HEADERS_TYPE),
        pa.nulls(2, pa.int64()),
        pa.nulls(2, pa.int32()),
    )
    assert take("t", nulls) == take("t", RecordColumns(value))
    assert take("t", nulls.slice(0, 0)) == 0


def test_bytes_under_a_null_do_not_change_it(take: Fingerprint) -> None:
    offsets = pa.array([0, 5, 9, 14], pa.int32()).buffers()[1]
    with_bytes = pa.BinaryArray.from_buffers(
        pa.binary(), 3, [pa.py_buffer(b"\x05"), offsets, pa.py_buffer(b"firstjunkthird")]
    )
    plain = pa.array([b"first", None, b"third"], pa.binary())
    assert take("t", RecordColumns(with_bytes, with_bytes)) == take("t", RecordColumns(plain, plain))


LONG = bytes(range(100))
ROW = Record("t", b"key", LONG, (("a", b"1"), ("b", None), ("a", b"")), 1_700_000_000_000, 2)
CHANGES: dict[str, Record] = {
    "another topic": ROW._replace(topic="u"),
    "another key": ROW._replace(key=b"kez"),
    "a null key": ROW._replace(key=None),
    "an empty key": ROW._replace(key=b""),
    "a longer key": ROW._replace(key=b"key\0"),
    "another value": ROW._replace(value=LONG[:-1] + b"\0"),
    "a null value": ROW._replace(value=None),
    "an empty value": ROW._replace(value=b""),
    "a shorter value": ROW._replace(value=LONG[:-1]),
    "a value of other words": ROW._replace(value=LONG[8:16] + LONG[:8] + LONG[16:]),
    "a value of other pairs of words": ROW._replace(value=LONG[16:32] + LONG[:16] + LONG[32:]),
    "key and value swapped": ROW._replace(key=LONG, value=b"key"),
    "headers in another order": ROW._replace(headers=(("b", None), ("a", b"1"), ("a", b""))),
    "a header less": ROW._replace(headers=ROW.headers[:2]),
    "no header": ROW._replace(headers=()),
    "a header's name": ROW._replace(headers=(("c", b"1"), *ROW.headers[1:])),
    "a header's value": ROW._replace(headers=(("a", b"2"), *ROW.headers[1:])),
    "an empty header for a null one": ROW._replace(headers=(("a", b"1"), ("b", b""), ("a", b""))),
    "another timestamp": ROW._replace(timestamp_ms=1_700_000_000_001),
    "no timestamp": ROW._replace(timestamp_ms=None),
    "another partition": ROW._replace(partition=3),
    "no partition": ROW._replace(partition=None),
    "partition and timestamp swapped": ROW._replace(partition=3, timestamp_ms=1_699_999_999_999),
}


@pytest.mark.parametrize("other", CHANGES.values(), ids=CHANGES)
def test_a_single_changed_field_changes_it(take: Fingerprint, other: Record) -> None:
    beside = Record("t", b"1", b"2")
    assert print_of([beside, ROW], take) != print_of([beside, other], take)


@settings(derandomize=True, max_examples=200, deadline=None, database=None)
@given(st.lists(records, min_size=1, max_size=6), st.data())
def test_other_rows_change_it(rows: list[Record], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(rows) - 1))
    row = rows[at]
    fields = data.draw(records)._asdict()
    name = data.draw(st.sampled_from(Record._fields))
    other = row._replace(**{name: fields[name]})
    before = print_of(rows)
    if other != row:
        assert print_of([*rows[:at], other, *rows[at + 1 :]]) != before
    assert print_of([*rows, row]) != before  # doubled
    if row.key != row.value:
        assert print_of([*rows[:at], row._replace(key=row.value, value=row.key), *rows[at + 1 :]]) != before


def test_values_exchanged_between_rows_change_it(take: Fingerprint) -> None:
    rows = [Record("t", b"a", b"1"), Record("t", b"b", b"2"), Record("u", b"c", b"3")]
    changed = [
        [Record("t", b"a", b"2"), Record("t", b"b", b"1"), rows[2]],
        [Record("u", b"a", b"1"), Record("t", b"b", b"2"), Record("t", b"c", b"3")],
        [rows[0], rows[0], rows[2]],
    ]
    found = {print_of(each, take) for each in [rows, *changed]}
    assert len(found) == 4


def test_ten_thousand_rows_have_ten_thousand_hashes(take: Fingerprint) -> None:
    numbers = pa.array([str(number) for number in range(10_000)])
    columns = RecordColumns(numbers, numbers)
    assert len({take("t", columns.slice(row, 1)) for row in range(2_000)}) == 2_000


def test_values_longer_than_the_twins_step_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    rows = [Record("t", rng.randbytes(rng.randrange(90)), rng.randbytes(rng.randrange(200))) for _ in range(40)]
    wanted = print_of(rows)
    monkeypatch.setattr(module, "_PAIRS_AT_ONCE", 3)
    assert print_of(rows, fingerprint_by_numpy) == wanted


@needs_kernel
def test_lengths_that_do_not_fit_the_bytes_are_refused() -> None:
    offsets = pa.array([0, 99, 5], pa.int32()).buffers()[1]
    broken = pa.BinaryArray.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"short")])
    fine = pa.array([b"", b""], pa.binary())
    for columns in (RecordColumns(broken), RecordColumns(fine, broken)):
        with pytest.raises(SerializationError, match="out of bounds"):
            fingerprint_by_kernel("t", columns)
