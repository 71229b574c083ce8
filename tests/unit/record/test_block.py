from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from support.record_golden import PlainRecord, plain, read_by_kio

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record import block as block_module
from spark_kafka_sink.record.batch import seal
from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.decoder import decode_batches
from spark_kafka_sink.record.encoder import (
    EncodedRun,
    columns_size_upper_bound,
    encode_by_kernel,
    encode_by_numpy,
    record_size_upper_bound,
    record_size_upper_bounds,
)
from spark_kafka_sink.record.kernel import has_kernel

NONE = codec_for("none")
NOW = 1_700_000_000_000

ENCODERS = {"numpy": encode_by_numpy} | ({"kernel": encode_by_kernel} if has_kernel() else {})


@pytest.fixture(scope="module", params=ENCODERS, autouse=True)
def encoder(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test of this file with the compiled kernel and with its twin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_module, "encode_runs", ENCODERS[request.param])
        yield


def bytes_of(chunks: list[memoryview], count: int, base_timestamp_ms: int, max_timestamp_ms: int) -> bytes:
    return b"".join(seal(chunks, count, base_timestamp_ms, max_timestamp_ms, NONE).buffers)


def with_last_offset_delta(data: bytes, delta: int) -> bytes:
    """Return the batch with this last offset delta, as if other records stood before."""
    covered = data[21:23] + delta.to_bytes(4, "big") + data[27:]
    return data[:17] + crc32c(covered).to_bytes(4, "big") + covered


def array_of(partitions: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(partitions, np.int32)


def test_rows_are_grouped_by_partition_and_keep_their_order() -> None:
    columns = RecordColumns.from_rows([b"a", b"b", b"c", b"d", b"e"], timestamps_ms=[5, 4, 3, 2, 1])
    block = Block(columns, array_of([2, 70_000, 2, 0, 2]), NOW)
    assert list(block.groups) == [(0, 0, 1), (2, 1, 4), (70_000, 4, 5)]
    assert [block.timestamp_ms(row) for row in range(block.num_rows)] == [2, 5, 3, 1, 4]
    runs = encoded_runs(block, [(0, 1, 0, 2), (1, 4, 0, 5), (4, 5, 0, 4)])
    assert [[value for _, _, value, _ in rows(run, base)] for run, base in zip(runs, (2, 5, 4), strict=True)] == [
        [b"d"],
        [b"a", b"c", b"e"],
        [b"b"],
    ]
    assert [(run.count, run.max_timestamp_ms) for run in runs] == [(1, 2), (3, 5), (1, 4)]


def encoded_runs(block: Block, runs: list[tuple[int, int, int, int]]) -> list[EncodedRun]:
    chunks, latest = block.encode(array("q", chain.from_iterable(runs)))
    counts = [end - start for start, end, _, _ in runs]
    return [
        EncodedRun(memoryview(chunk), count, latest_ms, block.largest_record)
        for chunk, count, latest_ms in zip(chunks, counts, latest, strict=True)
    ]


def rows(run: EncodedRun, base_timestamp_ms: int) -> list[PlainRecord]:
    return read_by_kio(bytes_of([run.chunk], run.count, base_timestamp_ms, run.max_timestamp_ms))


def test_block_of_one_partition_needs_no_order() -> None:
    block = Block(RecordColumns.from_rows([b"a", b"b"]), 3, NOW)
    assert list(block.groups) == [(3, 0, 2)]
    assert block.timestamp_ms(1) == NOW
    (run,) = encoded_runs(block, [(0, 2, 0, NOW)])
    assert [record.value for record in rows(run, NOW)] == [b"a", b"b"]
    assert run.max_timestamp_ms == NOW


@pytest.mark.parametrize("partitions", [[1, 1, 2], [0, 5, 5]])
def test_rows_already_in_order_are_cut_where_the_partition_changes(partitions: list[int]) -> None:
    block = Block(RecordColumns.from_rows([b"a", b"b", b"c"]), array_of(partitions), NOW)
    cut = partitions.index(partitions[-1])
    assert list(block.groups) == [(partitions[0], 0, cut), (partitions[-1], cut, 3)]


@pytest.mark.parametrize("nulls", [False, True])
def test_bound_of_a_block_covers_the_bounds_of_rows(nulls: bool) -> None:
    def content(row: int) -> bytes | None:
        return None if nulls and row % 3 == 0 else b"x" * row

    contents = [content(row) for row in range(50)]
    headers = [[("name", content(row))] * (row % 4) for row in range(50)]
    for some_headers in (None, headers):
        columns = RecordColumns.from_rows(contents, contents, some_headers)
        for part in (columns, columns.slice(7, 11), columns.slice(0, 0)):
            assert columns_size_upper_bound(part) == int(record_size_upper_bounds(part).sum())
    # Bytes under a null are counted, because no row is read for the bound.
    offsets = pa.py_buffer(np.array([0, 5, 9], np.int32))
    column = pa.BinaryArray.from_buffers(pa.binary(), 2, [pa.py_buffer(b"\x01"), offsets, pa.py_buffer(b"firstjunk")])
    columns = RecordColumns(column)
    assert columns_size_upper_bound(columns) == int(record_size_upper_bounds(columns).sum()) + len(b"junk")


def test_only_records_near_the_limit_are_measured_exactly() -> None:
    lengths = [0, 63, 64, 8_191, 8_192, 2**20 - 1, 2**20, None, 5]
    parts = [None if length is None else b"x" * length for length in lengths]
    headers = [[("name", part), ("ß", b"1")] * (63 + row) if row % 2 else None for row, part in enumerate(parts[:5])]
    cases: list[tuple[RecordColumns, list[tuple[Any, Any, Any]]]] = [
        (RecordColumns.from_rows(parts), [(None, part, ()) for part in parts]),
        (RecordColumns.from_rows(parts, parts[::-1]), list(zip(parts[::-1], parts, [()] * len(parts), strict=True))),
        (
            RecordColumns.from_rows(parts[:5], None, headers),
            [(None, *each) for each in zip(parts, headers, strict=False)],
        ),
    ]
    for columns, records in cases:
        exact = [record_size_upper_bound(key, value, some or ()) for key, value, some in records]
        near = Block(columns, 0, NOW, max(exact))
        assert near.largest_record == max(exact)
        assert [near.size(row, row + 1) for row in range(len(exact))] == exact
        encoded_runs(near, [(0, near.num_rows, 0, 0)])  # raises unless there is room
        far = Block(columns, 0, NOW, 2**31)
        assert [far.size(row, row + 1) for row in range(len(exact))] == record_size_upper_bounds(columns).tolist()


def test_empty_block_has_no_groups_and_encodes_to_nothing() -> None:
    empty = RecordColumns(pa.array([], pa.binary()))
    for block in (Block(empty, 0, NOW), Block(empty, array_of([]), NOW)):
        assert (list(block.groups), block.num_rows, encoded_runs(block, [])) == ([], 0, [])


def test_last_fitting_row_is_found_by_the_sum_of_sizes() -> None:
    block = Block(RecordColumns.from_rows([b"x" * size for size in (10, 1000, 0, 20)]), 0, NOW)
    assert block.size(0, 4) == block.size(0, 1) + block.size(1, 2) + block.size(2, 4)
    assert block.size(2, 2) == 0
    for start in range(4):
        for end in range(start, 5):
            for room in (0, block.size(start, end) - 1, block.size(start, end), 10**9):
                fitting = [e for e in range(start, end + 1) if block.size(start, e) <= room]
                assert block.last_fitting(start, end, room) == max([*fitting, start])


def test_block_is_encoded_in_parts_without_rows_between_runs() -> None:
    values = [b"%d" % row for row in range(40)]
    partitions = array_of([row % 3 for row in range(40)])
    block = Block(RecordColumns.from_rows(values), partitions, NOW)
    ordered = [values[row] for row in np.argsort(partitions, kind="stable")]
    for runs in (
        [(2, 5, 0, NOW), (9, 10, 7, NOW), (20, 33, 2, NOW)],
        [(0, 3, 0, NOW), (38, 40, 0, NOW)],
        [(39, 40, 0, NOW)],
    ):
        for (first, last, held, _), encoded in zip(runs, encoded_runs(block, runs), strict=True):
            read = rows(encoded, NOW)
            assert [record.value for record in read] == ordered[first:last]
            assert [record.offset for record in read] == list(range(held, held + encoded.count))


def test_rows_of_one_partition_can_go_to_several_batches() -> None:
    block = Block(RecordColumns.from_rows([b"a", b"b", b"c"], timestamps_ms=[10, None, 30]), 0, NOW)
    first, second = encoded_runs(block, [(0, 1, 100, 9), (1, 3, 0, NOW)])
    assert [(r.offset, r.value) for r in rows(first, 9)] == [(100, b"a")]
    decoded = list(decode_batches(bytes_of([second.chunk], 2, NOW, second.max_timestamp_ms)))
    assert [record.timestamp_ms for record in decoded[0].records] == [NOW, 30]
    assert second.max_timestamp_ms == NOW


def test_now_counts_against_the_base_timestamp_of_the_batch() -> None:
    block = Block(RecordColumns.from_rows([b"a"]), 0, NOW)
    (run,) = encoded_runs(block, [(0, 1, 0, NOW - 12345)])
    (batch,) = decode_batches(bytes_of([run.chunk], 1, NOW - 12345, run.max_timestamp_ms))
    assert batch.records[0].timestamp_ms == NOW


def test_value_of_900_kb_is_encoded_whole() -> None:
    large = random.Random(1).randbytes(900_000)
    block = Block(RecordColumns.from_rows([b"a", large, None], [large, b"k", None]), array_of([1, 0, 1]), NOW)
    first, second = encoded_runs(block, [(0, 1, 0, NOW), (1, 3, 0, NOW)])
    assert [(r.key, r.value) for r in rows(first, NOW)] == [(b"k", large)]
    assert [(r.key, r.value) for r in rows(second, NOW)] == [(large, b"a"), (None, None)]


def test_block_of_more_than_2_gib_is_refused() -> None:
    offsets = pa.py_buffer(np.array([0, 2**30], np.int32))
    column = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(np.zeros(2**30, np.uint8))])
    with pytest.raises(SerializationError, match="1 records may take more than 2147483647 bytes"):
        Block(RecordColumns(column, column), 0, NOW)


def test_encoded_bytes_are_joined_once_and_runs_are_views() -> None:
    block = Block(RecordColumns.from_rows([b"a" * 100] * 20), array_of([row % 4 for row in range(20)]), NOW)
    runs = encoded_runs(block, [(start, end, 0, NOW) for _, start, end in block.groups])
    views = [np.frombuffer(run.chunk, np.uint8) for run in runs]
    ends = [view.ctypes.data + len(view) for view in views]
    assert [view.ctypes.data for view in views] == [views[0].ctypes.data, *ends[:-1]]
    assert not any(view.flags.writeable for view in views)


content = st.one_of(st.none(), st.binary(max_size=6), st.binary(min_size=60, max_size=70))
header = st.tuples(st.text(max_size=5), st.one_of(st.none(), st.binary(max_size=5)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[RecordColumns, list[PlainRecord], list[int | None], list[int]]:
    count = draw(st.integers(1, 90))
    keys = draw(st.one_of(st.none(), st.lists(content, min_size=count, max_size=count)))
    values = draw(st.lists(content, min_size=count, max_size=count))
    headers = draw(st.one_of(st.none(), st.lists(st.lists(header, max_size=3), min_size=count, max_size=count)))
    time = st.one_of(st.none(), st.integers(-(2**62), 2**62), st.integers(NOW - 100, NOW + 100))
    times = draw(st.one_of(st.none(), st.lists(time, min_size=count, max_size=count)))
    partitions = draw(
        st.lists(st.integers(0, draw(st.sampled_from([0, 1, 5, 90_000]))), min_size=count, max_size=count)
    )
    skipped = draw(st.integers(0, min(3, count - 1)))
    columns = RecordColumns.from_rows(values, keys, headers, times).slice(skipped, count - skipped)
    expected = [
        PlainRecord(row, keys[row] if keys else None, values[row], tuple(headers[row]) if headers else ())
        for row in range(skipped, count)
    ]
    return columns, expected, (times or [None] * count)[skipped:], partitions[skipped:]


@settings(derandomize=True, max_examples=120, deadline=None, database=None)
@given(cases(), st.integers(0, 2**62), st.randoms(use_true_random=False))
def test_any_columns_in_any_runs_decode_to_the_same_records(
    case: tuple[RecordColumns, list[PlainRecord], list[int | None], list[int]], base_time: int, rng: random.Random
) -> None:
    columns, expected, times, partitions = case
    block = Block(columns, array_of(partitions), NOW)
    order = sorted(range(len(partitions)), key=lambda row: partitions[row])
    runs = []
    for partition, start, end in block.groups:
        assert {partitions[order[row]] for row in range(start, end)} == {partition}
        while start < end:
            stop = rng.randint(start + 1, end)
            if rng.random() < 0.8:
                runs.append((start, stop, rng.choice([0, 60, 8190]), base_time))
            start = stop
    for (first, last, held, _), encoded in zip(runs, encoded_runs(block, runs), strict=True):
        chosen = order[first:last]
        resolved = [NOW if times[row] is None else times[row] for row in chosen]
        assert encoded.max_timestamp_ms == max(time for time in resolved if time is not None)
        assert len(encoded.chunk) <= block.size(first, last)
        assert encoded.count == len(chosen)
        expected_rows = [expected[row]._replace(offset=held + index) for index, row in enumerate(chosen)]
        data = bytes_of([encoded.chunk], encoded.count, base_time, encoded.max_timestamp_ms)
        (batch,) = decode_batches(with_last_offset_delta(data, held + encoded.count - 1))
        assert plain(batch) == expected_rows
        assert [record.timestamp_ms for record in batch.records] == resolved
    for row in range(block.num_rows):
        expected_row = expected[order[row]]
        bound = record_size_upper_bound(expected_row.key, expected_row.value, expected_row.headers)
        assert bound <= block.size(row, row + 1)


@settings(derandomize=True, max_examples=80, deadline=None, database=None)
@given(cases())
def test_kio_reads_our_records(case: tuple[RecordColumns, list[PlainRecord], list[int | None], list[int]]) -> None:
    columns, expected, _, _ = case
    block = Block(RecordColumns(columns.value, columns.key, columns.headers), 0, NOW)
    (run,) = encoded_runs(block, [(0, block.num_rows, 0, NOW)])
    assert rows(run, NOW) == [record._replace(offset=index) for index, record in enumerate(expected)]
