"""The fingerprint of rows: a number that depends neither on their order nor on their layout.

Exactly-once delivery compares it to check that a batch that Spark runs again has the rows that were committed. Each
record has a hash of 64 bits over its topic, partition, key, value, headers and timestamp. The fingerprint is the sum of
the hashes modulo 2^64. It protects against accidents and not against forgery: the hash has no secret.

The compiled kernel hashes the bytes, or without the kernel its numpy twin. Both give the same number, because the
driver and the tasks of one query may have different builds. Holds no state; any thread.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.arrow import (
    binary_from_numpy,
    byte_lengths,
    int_values,
    null_mask,
    value_bytes,
    value_offsets,
)
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.headers import encode_headers
from spark_kafka_sink.record.kernel import KERNEL, column_buffers

UInt64Array = npt.NDArray[np.uint64]

MODULUS: Final = 1 << 64
"""Fingerprints are added modulo this."""

_STEP: Final = 0x9E3779B97F4A7C15
_TOPIC, _KEY, _VALUE, _HEADERS, _TIMESTAMP, _PARTITION = (_STEP * (17 + 2 * number) % MODULUS for number in range(6))
"""A salt for each field: the same bytes in another field give another hash."""
_TWIN_BYTES: Final = 1 << 20
"""Bytes that the numpy twin hashes at a time, because it needs ten times as much memory."""


def fingerprint(topic: str, columns: RecordColumns) -> int:
    """Return the fingerprint of records for `topic`: 0 <= number < 2^64, and 0 for no record.

    A null and an empty value differ, also for keys and for the values of headers. A null timestamp or partition counts
    as not given. Raises SerializationError if the offsets of a column do not fit its bytes.
    """
    sums = np.full(columns.num_rows, _hash_of_one(topic.encode("utf-8", "surrogatepass"), _TOPIC), np.uint64)
    _add_bytes(columns.value, _VALUE, sums)
    _add_bytes(columns.key, _KEY, sums)
    headers = None if columns.headers is None else encode_headers(columns.headers)
    if headers is not None:
        _add_bytes(headers.encoded, _HEADERS, sums)
    else:
        sums += np.uint64(_hash_of_one(b"", _HEADERS))
    _add_numbers(columns.timestamp_ms, _TIMESTAMP, sums)
    _add_numbers(columns.partition, _PARTITION, sums)
    return int(_mixed(sums).sum(dtype=np.uint64))


def add_hashes_by_kernel(column: pa.BinaryArray, salt: int, sums: UInt64Array) -> None:
    """Add the hash of each row's bytes to its entry of `sums`. Raises SerializationError."""
    try:
        KERNEL.fingerprint(*column_buffers(column), salt, sums)
    except ValueError as error:
        raise SerializationError(f"The rows could not be read: {error}.") from error


def add_hashes_by_numpy(column: pa.BinaryArray, salt: int, sums: UInt64Array) -> None:
    """Add the same hashes as `add_hashes_by_kernel`."""
    nulls = null_mask(column)
    offsets = value_offsets(column).astype(np.int64)
    lengths = byte_lengths(column)
    lengths = np.where(lengths < 0, 0, lengths)
    data = np.append(value_bytes(column)[int(offsets[0]) : int(offsets[-1])], np.zeros(8, np.uint8))
    offsets -= offsets[0]
    ends = np.cumsum(lengths)
    first = 0
    while first < len(sums):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _TWIN_BYTES, side="right")))
        sums[first:last] += _hashes(data, offsets[first:last], lengths[first:last], salt)
        first = last
    if nulls is not None:
        empty, null = _hash_of_one(b"", salt), _mixed_one(salt ^ _STEP)
        sums[nulls] += np.uint64((null - empty) % MODULUS)


def _hashes(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], salt: int
) -> UInt64Array:
    """Return the hash of each `data[start : start + length]`. `data` has 8 bytes more."""
    counts = (lengths + 7) // 8
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    words = np.lib.stride_tricks.sliding_window_view(data, 8)[starts[rows] + 8 * numbers]
    words = np.ascontiguousarray(words).view("<u8").ravel().astype(np.uint64)
    beyond = np.maximum(8 * (numbers + 1) - lengths[rows], 0).astype(np.uint64) * np.uint64(8)
    words &= np.uint64(MODULUS - 1) >> beyond
    words += (numbers + 1).astype(np.uint64) * np.uint64(_STEP) + np.uint64(salt)
    totals = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(_mixed(words), out=totals[1:])
    return _mixed(totals[ends] - totals[ends - counts] + lengths.astype(np.uint64) + np.uint64(salt))


def _add_bytes(column: pa.BinaryArray | None, salt: int, sums: UInt64Array) -> None:
    if column is None or column.null_count == len(column):
        sums += np.uint64(_mixed_one(salt ^ _STEP))
    else:
        add_hashes(column, salt, sums)


def _add_numbers(column: pa.Array | None, salt: int, sums: UInt64Array) -> None:
    """Add the hash of int32 or int64 values. A value that is not given has a hash too."""
    missing = np.uint64(_mixed_one(salt ^ _STEP))
    if column is None or column.null_count == len(column):
        sums += missing
        return
    hashes = _mixed(int_values(column).astype(np.int64).view(np.uint64) + np.uint64(salt))
    nulls = null_mask(column)
    sums += hashes if nulls is None else np.where(nulls, missing, hashes)


def _mixed(words: UInt64Array) -> UInt64Array:
    """Apply the finalizer of splitmix64, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


@functools.lru_cache(64)
def _mixed_one(word: int) -> int:
    return int(_mixed(np.array([word % MODULUS], np.uint64))[0])


@functools.lru_cache(256)
def _hash_of_one(data: bytes, salt: int) -> int:
    found = np.zeros(1, np.uint64)
    column = binary_from_numpy(np.array([0, len(data)], np.int32), np.frombuffer(data + b"\0", np.uint8))
    add_hashes(column, salt, found)
    return int(found[0])


add_hashes: Any = add_hashes_by_kernel if hasattr(KERNEL, "fingerprint") else add_hashes_by_numpy
