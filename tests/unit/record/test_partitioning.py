"""The partition of a row: given, of its key by murmur2 (by the kernel and by its twin), or any."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_kafka_sink.common.errors import SchemaError, SerializationError
from spark_kafka_sink.record.arrow import as_binary, combine
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.kernel import has_kernel
from spark_kafka_sink.record.partitioning import (
    _compiled,
    hash_by_kernel,
    hash_by_numpy,
    highest_partition,
    murmur2,
    partition_for_key,
    partitions_for_keys,
    place,
)

HashesOf = Callable[[pa.Array | pa.ChunkedArray], list[int]]

HASHERS = [hash_by_numpy, *([] if _compiled is None else [hash_by_kernel])]
needs_kernel = pytest.mark.skipif(_compiled is None, reason="no C compiler")


def expected(keys: list[bytes]) -> list[int]:
    return [murmur2(key) for key in keys]


@pytest.fixture(params=HASHERS)
def hashes_of(request: pytest.FixtureRequest) -> HashesOf:
    """Return the hashes of a column, by the kernel and by its twin."""

    def hashes(column: pa.Array | pa.ChunkedArray) -> list[int]:
        found: list[int] = request.param(as_binary(combine(column, "key"), "key")).view(np.int32).tolist()
        return found

    return hashes


def test_kernel_hashes_if_it_is_loaded() -> None:
    """The twin took 0.3 us of the 0.4 us until a row was encoded, for keys of 20 to 200 bytes."""
    expected_one = hash_by_kernel if has_kernel() else hash_by_numpy
    assert import_module("spark_kafka_sink.record.partitioning")._hash is expected_one


@settings(derandomize=True, max_examples=150, deadline=None, database=None)
@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 5), st.integers(1, 5000))
def test_column_hashes_like_its_keys_one_by_one(keys: list[bytes], skipped: int, partition_count: int) -> None:
    column = pa.array(keys, pa.binary()).slice(skipped)
    rest = keys[skipped:]
    for hasher in HASHERS:
        assert hasher(column).view(np.int32).tolist() == expected(rest)
    partitions = partitions_for_keys(column, partition_count)
    assert partitions.dtype == np.int32
    assert partitions.tolist() == [partition_for_key(key, partition_count) for key in rest]
    assert partitions.tolist() == [(each & 0x7FFFFFFF) % partition_count for each in expected(rest)]


@pytest.mark.parametrize("length", range(13))
def test_keys_of_one_length_are_hashed_alike_at_any_slice(length: int, hashes_of: HashesOf) -> None:
    rng = random.Random(length)
    keys = [rng.randbytes(length) for _ in range(50)]
    for start in (0, 1, 7):
        assert hashes_of(pa.array(keys, pa.binary()).slice(start)) == expected(keys[start:])


def test_few_long_keys_among_short_ones_need_little_memory(hashes_of: HashesOf) -> None:
    rng = random.Random(7)
    keys = [rng.randbytes(rng.randrange(12)) for _ in range(400)] + [rng.randbytes(900_000), rng.randbytes(5001)]
    keys += [rng.randbytes(200 + index) for index in range(40)]
    rng.shuffle(keys)
    for start in (0, 3):
        assert hashes_of(pa.array(keys, pa.binary()).slice(start)) == expected(keys[start:])


def test_keys_above_2_gib_when_padded_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = np.zeros(27_001, np.int32)
    np.cumsum(np.where(np.arange(27_000) % 4, 1, 65_535), out=offsets[1:])
    data = pa.py_buffer(np.zeros(int(offsets[-1]), np.uint8))  # 442 MB of address space, never touched
    keys = pa.BinaryArray.from_buffers(pa.binary(), 27_000, [None, pa.py_buffer(offsets), data])
    hashes = np.full(27_000, 7, np.uint32)
    monkeypatch.setattr("spark_kafka_sink.record.partitioning._hash_uneven", lambda *_: hashes)  # it would take seconds
    assert hash_by_numpy(keys).tolist() == hashes.tolist()


def test_every_layout_of_strings_hashes_to_the_same(hashes_of: HashesOf) -> None:
    keys = ["", "größe", "a-key", "🔑🔑"]
    hashes = expected([key.encode() for key in keys])
    plain = pa.array(keys)
    for column in (
        plain,
        plain.cast(pa.large_string()),
        plain.cast(pa.string_view()),
        plain.cast(pa.binary()),
        plain.dictionary_encode(),
        pa.chunked_array([plain.slice(0, 1), plain.slice(1)]),
    ):
        assert hashes_of(column) == hashes
        assert partitions_for_keys(column, 7).tolist() == [partition_for_key(key.encode(), 7) for key in keys]


def test_null_does_not_change_the_hashes_around_it(hashes_of: HashesOf) -> None:
    hashes = hashes_of(pa.array([b"first", None, b"third key"], pa.binary()))
    assert (hashes[0], hashes[2]) == (murmur2(b"first"), murmur2(b"third key"))
    # The slot of a null may even have bytes.
    offsets = pa.py_buffer(np.array([0, 5, 9, 14], np.int32))
    column = pa.BinaryArray.from_buffers(
        pa.binary(), 3, [pa.py_buffer(b"\x05"), offsets, pa.py_buffer(b"firstjunkthird")]
    )
    hashes = hashes_of(column)
    assert (hashes[0], hashes[2]) == (murmur2(b"first"), murmur2(b"third"))


def test_no_keys_give_no_hashes(hashes_of: HashesOf) -> None:
    assert hashes_of(pa.array([], pa.binary())) == []


def test_column_of_numbers_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match="'key' has the Arrow type int64"):
        partitions_for_keys(pa.array([1, 2]), 3)


@needs_kernel
@pytest.mark.parametrize("offsets", [(0, 5, 3), (0, -1, 4), (0, 2**31 - 1, 4)])
def test_keys_with_wrong_offsets_are_refused_before_the_kernel(offsets: tuple[int, ...]) -> None:
    buffers = [None, pa.py_buffer(np.array(offsets, np.int32)), pa.py_buffer(b"keys")]
    with pytest.raises(SerializationError, match="The keys could not be read: a key is out of bounds"):
        hash_by_kernel(pa.BinaryArray.from_buffers(pa.binary(), 2, buffers))


@needs_kernel
def test_kernel_checks_the_lengths_of_its_arguments() -> None:
    with pytest.raises(ValueError, match="key has 8 bytes, less than 12"):
        _compiled(np.zeros(2, np.int32), b"", np.zeros(2, np.uint32))
    for buffers in ((None, b"", bytearray(4)), (bytes(8), None, bytearray(4))):
        with pytest.raises(TypeError):
            _compiled(*buffers)
    with pytest.raises(BufferError):
        _compiled(bytes(8), b"", bytes(4))


VALUES = [b"0", b"1", b"2", b"3"]
KEYS = [b"k", None, b"l", None]


def placed(columns: RecordColumns, partition_count: int, **more: Any) -> tuple[list[int] | None, list[int] | None]:
    partitions, free = place(columns, partition_count, **more)
    return None if partitions is None else partitions.tolist(), None if free is None else free.tolist()


def test_partition_wins_over_key_and_rows_without_either_are_free() -> None:
    columns = RecordColumns.from_rows(VALUES, KEYS, partitions=[6, 5, None, None])
    assert placed(columns, 7) == ([6, 5, partition_for_key(b"l", 7), -1], [3])


def test_rows_with_keys_have_their_partitions() -> None:
    keys = [b"a", b"b", b"c", b""]
    assert placed(RecordColumns.from_rows(VALUES, keys), 3) == ([partition_for_key(key, 3) for key in keys], None)


@pytest.mark.parametrize("keys", [None, [None] * 4])
def test_rows_without_key_and_partition_are_all_free(keys: list[bytes | None] | None) -> None:
    assert placed(RecordColumns.from_rows(VALUES, keys, partitions=[None] * 4), 3) == (None, None)


def test_keys_can_be_ignored() -> None:
    columns = RecordColumns.from_rows(VALUES, KEYS, partitions=[None, 1, None, None])
    assert placed(columns, 3, ignore_keys=True) == ([-1, 1, -1, -1], [0, 2, 3])


@pytest.mark.parametrize("partition", [-1, 3])
def test_unknown_partition_is_refused_with_its_row(partition: int) -> None:
    columns = RecordColumns.from_rows(VALUES, partitions=[None, 2, partition, None])
    with pytest.raises(SerializationError, match=f"Row 2 asks for partition {partition}; topic flights has 0 to 2: "):
        place(columns, 3, whose="topic flights")
    with pytest.raises(SerializationError, match=f"Row 65538 asks for partition {partition};"):
        place(columns, 3, first_row=65_536)


def test_highest_partition_asked_for_is_known() -> None:
    assert highest_partition(RecordColumns.from_rows(VALUES, partitions=[None, 5, 70_000, 0])) == 70_000
    assert highest_partition(RecordColumns.from_rows(VALUES, partitions=[None] * 4)) is None
    assert highest_partition(RecordColumns.from_rows(VALUES)) is None


def test_rows_of_one_partition_keep_their_order() -> None:
    columns = RecordColumns(pa.array([b"0", b"1", b"2"]), pa.array([b"a", None, b"b"]))
    assert placed(columns, 1) == ([0, 0, 0], None)
