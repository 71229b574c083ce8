from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record import encoder
from spark_kafka_sink.record import headers as headers_module
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.encoder import encode_columns, encode_rows, lone_record_sizes, parts_up_to
from spark_kafka_sink.record.headers import encode_headers, headers_from_rows, with_missing_header
from spark_kafka_sink.record.varints import MINUS_ONE, to_binary, varint_fields, zigzag


def test_no_rows_encode_to_no_bytes() -> None:
    columns = RecordColumns(pa.array([], pa.binary()), headers=pa.array([], headers_type()))
    data, bounds = encode_columns(columns, np.zeros(0, np.int64), None)
    assert (bytes(data), bounds.tolist()) == (b"", [0])


def headers_type() -> pa.DataType:
    return pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def test_each_row_begins_where_the_one_before_ends() -> None:
    columns = RecordColumns.from_rows([b"a", None, b"ccc"], [None, b"k", b""])
    data, bounds = encode_columns(columns, np.arange(3), None)
    assert data.hex(" ", -50) == "".join(
        ["0e000000010261" + "00", "0e00000202" + "6b" + "0100", "12000004" + "00" + "06" + "636363" + "00"]
    )
    assert bounds.tolist() == [0, 8, 16, 26]


def test_rows_above_2_gib_are_refused_without_a_copy() -> None:
    offsets = pa.py_buffer(np.array([0, 2**30], np.int32))
    column = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(np.zeros(2**30, np.uint8))])
    with pytest.raises(SerializationError, match="1 records take more than 2147483647 bytes together; hand over fewer"):
        encode_columns(RecordColumns(column, column), np.zeros(1, np.int64), None)


def test_slice_of_rows_has_its_own_headers() -> None:
    headers: list[list[tuple[str, bytes | None]] | None] = [
        [("a", b"1")],
        [("b", None), ("c", b"22")],
        None,
        [("d", b"3")],
    ]
    columns = RecordColumns.from_rows([b"v"] * 4, None, headers)
    whole, bounds = encode_columns(columns, np.zeros(4, np.int64), None)
    for start, end in ((1, 4), (1, 2), (2, 3), (3, 4)):
        part, _ = encode_columns(columns.slice(start, end - start), np.zeros(end - start, np.int64), None)
        assert part == whole[bounds[start] : bounds[end]]


def test_latest_time_and_largest_record_are_found_anywhere() -> None:
    values = [b"a", b"b" * 100, b"c"]
    sizes = [len(encode_rows(None, [value], None, [0], 0, 0).chunk) for value in values]
    run = encode_rows(None, values, None, [5, 9, 7], 0, 5)
    assert (run.count, run.max_timestamp_ms, run.largest_record) == (3, 9, sizes[1])


@settings(derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.none() | st.binary(max_size=200),
            st.none() | st.binary(max_size=20_000),
            st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=99)), max_size=3),
            st.integers(0, 2**62),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**31 - 100),
    st.integers(0, 2**62),
)
def test_few_rows_become_the_same_bytes_without_arrays(
    rows: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]], first: int, base_ms: int
) -> None:
    keys, values, headers, times = zip(*rows, strict=True)
    columns = RecordColumns.from_rows(values, keys, headers)
    deltas = np.array(times, np.int64) - base_ms
    data, bounds = encode_columns(columns, np.arange(first, first + len(rows)), deltas)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "RecordColumns", None)
        run = encode_rows(keys, values, headers, times, first, base_ms)
    assert bytes(run.chunk) == bytes(data)
    assert (run.count, run.max_timestamp_ms) == (len(rows), max(times))
    assert run.largest_record == np.diff(bounds).max()


@pytest.mark.parametrize("name", [None, 7, b"\xff", "\ud800"])
@pytest.mark.parametrize("rows", [1, 100])
def test_header_without_a_key_is_refused_in_any_row_count(name: object, rows: int) -> None:
    headers = [[(name, b"x")]] * rows
    with pytest.raises(SerializationError, match=r"(?i)row 0"):
        encode_rows(None, [b"a"] * rows, headers, [5] * rows, 0, 5)  # type: ignore[arg-type]


def test_few_rows_of_text_without_keys_encode_like_columns() -> None:
    data, _ = encode_columns(RecordColumns.from_rows(["é", b"b"]), np.arange(2), None)
    assert bytes(encode_rows(None, ["é", b"b"], None, [5, 5], 0, 5).chunk) == bytes(data)
    with pytest.raises(SerializationError, match="The value of row 1 is a int"):
        encode_rows(None, [b"a", 7], None, [5, 5], 0, 5)  # type: ignore[list-item]


def test_short_lengths_are_written_as_bytes_and_not_packed() -> None:
    made = to_binary(varint_fields(zigzag(np.array([-1, 0, 5, 63]))), 4)
    assert made.to_pylist() == [b"\1", b"\0", b"\x0a", b"\x7e"]
    assert made.buffers()[2].size == 4, "packed words have space behind them"
    assert to_binary(varint_fields(zigzag(np.array([5, 64]))), 2).to_pylist() == [b"\x0a", b"\x80\1"]
    assert to_binary([MINUS_ONE], 2).to_pylist() == [b"\1", b"\1"]


def test_bound_of_a_block_reads_no_single_header(monkeypatch: pytest.MonkeyPatch) -> None:
    headers: list[list[tuple[str, bytes | None]] | None] = [
        [("a", b"1")],
        [("b", None), ("c", b"22")],
        None,
        [("d", b"3")],
    ]
    columns = RecordColumns.from_rows([b"v"] * 4, None, headers).slice(1, 3)
    bound = int(encoder.record_size_upper_bounds(columns).sum())
    monkeypatch.setattr(encoder, "headers_upper_bounds", None)
    assert encoder.columns_size_upper_bound(columns) == bound


@pytest.mark.parametrize(("rows", "size"), [(3, 2**62), (2**62, 1), (2**62, 60), (4, 100), (2**62, 2**62)])
def test_parts_up_to_a_size_have_every_row_once_in_order(rows: int, size: int) -> None:
    values = [b"v" * (7 * n % 50) for n in range(20)]
    columns = RecordColumns.from_rows(values, keys=[None, b"key"] * 10).slice(1, 18)
    sizes = lone_record_sizes(columns).tolist()
    first = 0
    for part, part_size, left in parts_up_to(columns, rows, size):
        own = sizes[first : first + part.num_rows]
        assert part.value.to_pylist() == values[1 + first : 1 + first + part.num_rows]
        assert (part_size, left) == (sum(own), sum(sizes[first:]))
        assert part.num_rows <= rows
        assert part_size <= size or part.num_rows == 1
        first += part.num_rows
        is_last = first == columns.num_rows
        assert is_last or part.num_rows == rows or part_size + sizes[first] > size  # no part is smaller than it must be
    assert first == columns.num_rows


@pytest.mark.parametrize("with_headers", [False, True])
def test_sizes_of_large_blocks_are_those_of_small_ones(monkeypatch: pytest.MonkeyPatch, with_headers: bool) -> None:
    """Lengths of more than 512 MiB do not fit int32 once they are added up."""
    headers = [[("name", b"content")], None] * 30 if with_headers else None
    values = [None if n % 7 == 3 else b"v" * (5 * n) for n in range(60)]
    columns = RecordColumns.from_rows(values, [None, b"key"] * 30, headers).slice(3, 50)
    counted = (encoder.record_size_upper_bounds, encoder.tight_record_size_upper_bounds, lone_record_sizes)
    small = [count(columns) for count in counted]
    monkeypatch.setattr(encoder, "_MOST_OF_INT32", 0)
    for count, sizes in zip(counted, small, strict=True):
        assert count(columns).dtype == np.int64
        assert count(columns).tolist() == sizes.tolist()


@pytest.mark.parametrize("key", [None, b"", b"k" * 63, b"k" * 64, b"k" * 9000])
@pytest.mark.parametrize("length", [0, 1, 50, 57, 58, 59, 63, 64, 8100, 8191, 8192, 1 << 20])
def test_whole_part_of_equal_records_has_their_size(key: bytes | None, length: int) -> None:
    columns = RecordColumns.from_rows([b"v" * length] * 3, None if key is None else [key] * 3).slice(1, 2)
    exact = int(lone_record_sizes(columns).sum())
    assert [(part.num_rows, *sizes) for part, *sizes in parts_up_to(columns, 2, exact)] == [(2, exact, exact)]


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=50), st.booleans())
def test_whole_part_of_any_records_has_about_their_size(lengths: list[int], is_keyed: bool) -> None:
    values = [b"v" * length for length in lengths]
    columns = RecordColumns.from_rows(values, [b"k" * (length // 2) for length in lengths] if is_keyed else None)
    exact = int(lone_record_sizes(columns).sum())
    [(part, size, left)] = parts_up_to(columns, 2**62, 2**62)
    assert part is columns
    assert size == left
    assert abs(size - exact) <= 3 * len(lengths)


def test_no_rows_have_no_parts() -> None:
    assert [*parts_up_to(RecordColumns.from_rows([]), 1, 1)] == []


# ---- one header for all records --------------------------------------------------------------------------------------

ONE = [("traceparent", b"00-4bf9-01")]


@pytest.mark.parametrize(
    "rows",
    [
        [ONE] * 5,
        [[("n", b"")]] * 5,
        [[("", b"v")]] * 5,
        [ONE, *[[("traceparent", b"00-4bf9-02")]] * 3, ONE],  # first and last are equal
        [ONE, ONE, [("Traceparent", b"00-4bf9-01")], ONE, ONE],
        [ONE, [("traceparent", b"00-4bf9-0")], [("traceparent", b"00-4bf9-010")], ONE, ONE],
        [[("n", None)]] * 5,
        [ONE, None, [*ONE, *ONE], ONE, ONE],
        [[*ONE, *ONE]] * 5,
        [None] * 5,
    ],
)
@pytest.mark.parametrize("part", [slice(0, 5), slice(1, 4), slice(2, 3), slice(3, 3)])
def test_header_that_all_records_have_is_encoded_like_any_other(
    monkeypatch: pytest.MonkeyPatch, rows: list[Any], part: slice
) -> None:
    column = headers_from_rows([[("before", b"1")], *rows, [("after", None)]]).slice(1, 5)[part]
    ways: list[str] = []
    fast = headers_module._encoded_for_all
    monkeypatch.setattr(headers_module, "_encoded_for_all", lambda given: ways.append("fast") or fast(given))
    found = encode_headers(column)
    own = rows[part]
    assert bool(ways) == (len(own) > 1 and own == [own[0]] * len(own) and _is_one_with_a_value(own[0]))
    monkeypatch.setattr(headers_module, "_is_one_for_all", lambda *given: False)
    expected = encode_headers(column)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.encoded.to_pylist() == expected.encoded.to_pylist()
    for name in ("counts", "lengths"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
        assert getattr(found, name).dtype == getattr(expected, name).dtype


def _is_one_with_a_value(headers: list[Any] | None) -> bool:
    return headers is not None and len(headers) == 1 and headers[0][1] is not None


def test_one_header_for_all_above_two_gib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    column = with_missing_header(None, "n", b"x" * 10, 10)
    monkeypatch.setattr(headers_module, "MAX_COLUMN_BYTES", 129)  # each takes 13 bytes
    with pytest.raises(SerializationError, match="hand over fewer rows at a time"):
        encode_headers(column)
