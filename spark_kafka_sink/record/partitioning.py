"""The partition of each row of a block: its own, that of its key, or any.

Keyed records go to the partition that Kafka's clients choose, by murmur2 (org.apache.kafka.common.utils.Utils.murmur2).
The compiled kernel computes it, or without the kernel its twins in Python and numpy. The sticky partitioner chooses for
the other rows. Holds no state; any thread.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.arrow import (
    MAX_COLUMN_BYTES,
    BoolArray,
    as_binary,
    combine,
    int_values,
    null_mask,
    value_bytes,
    value_offsets,
)
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.kernel import KERNEL

Int32Array = npt.NDArray[np.int32]
RowNumbers = npt.NDArray[np.intp]

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_LONE_KEYS = 16
_OFFSETS_OF_ONE = struct.Struct("=ii")
_HASH_OF_ONE = struct.Struct("=I")
_compiled: Any = getattr(KERNEL, "hash", None)


def murmur2(key: bytes) -> int:
    """Return the hash of `key`, a signed 32-bit int as in Java."""
    length = len(key)
    hashed = _SEED ^ length
    whole = length & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(key[start : start + 4], "little") * _M & _MASK
        word ^= word >> 24
        hashed = (hashed * _M & _MASK) ^ (word * _M & _MASK)
    if whole != length:
        hashed = (hashed ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    hashed ^= hashed >> 13
    hashed = hashed * _M & _MASK
    hashed ^= hashed >> 15
    return hashed - (1 << 32) if hashed >> 31 else hashed


def partition_for_key(key: bytes, partition_count: int) -> int:
    """Return the partition of a keyed record: the hash without its sign bit, modulo the partition count."""
    if _compiled is None:
        return (murmur2(key) & 0x7FFFFFFF) % partition_count
    hashed = bytearray(_HASH_OF_ONE.size)
    _compiled(_OFFSETS_OF_ONE.pack(0, len(key)), key, hashed)
    return int((_HASH_OF_ONE.unpack(hashed)[0] & 0x7FFFFFFF) % partition_count)


def partitions_for_keys(array: pa.Array | pa.ChunkedArray, partition_count: int) -> Int32Array:
    """Return partition_for_key of each row: int32, in [0, partition_count).

    The entry of a null has no meaning.
    """
    hashed = _hash(as_binary(combine(array, "key"), "key"))
    hashed &= 0x7FFFFFFF
    hashed %= np.uint32(partition_count)
    return hashed.view(np.int32)


def hash_by_kernel(keys: pa.BinaryArray) -> npt.NDArray[np.uint32]:
    """Return the hash of each key. Raises SerializationError if the offsets of the column do not fit its bytes."""
    hashed = np.empty(len(keys), np.uint32)
    try:
        _compiled(value_offsets(keys), value_bytes(keys), hashed)
    except ValueError as error:
        raise SerializationError(f"The keys could not be read: {error}.") from error
    return hashed


def hash_by_numpy(keys: pa.BinaryArray) -> npt.NDArray[np.uint32]:
    """Return the same as `hash_by_kernel`. Slower, most of all for keys of different lengths."""
    if len(keys) == 0:
        return np.zeros(0, np.uint32)
    offsets = value_offsets(keys)
    lengths = offsets[1:] - offsets[:-1]
    longest = int(lengths.max())
    total = int(offsets[-1] - offsets[0])
    padded = longest * len(keys)
    # Arrow pads no column whose bytes before and after padding together may pass 2 GiB.
    if padded <= 4 * total + 4096 and padded + 3 * len(keys) + total <= MAX_COLUMN_BYTES:
        return _hash_padded(keys, lengths, longest)
    return _hash_uneven(value_bytes(keys), offsets, lengths)


def _hash_padded(keys: pa.BinaryArray, lengths: Int32Array, longest: int) -> npt.NDArray[np.uint32]:
    """Hash keys of about one length.

    They are padded with zero bytes to whole words, so that a word of all keys is a column of a matrix.
    """
    row_words = max(1, -(-longest // 4))
    if int(lengths.min()) == longest == 4 * row_words:
        start = int(value_offsets(keys)[0])
        dense = value_bytes(keys)[start : start + len(keys) * longest]
    else:
        # The ascii_ kernels take any bytes. Without the validity bitmap a null is an ordinary key.
        _, offset_buffer, data_buffer = keys.buffers()
        plain = pa.StringArray.from_buffers(len(keys), offset_buffer, data_buffer, None, 0, keys.offset)
        padded = pc.ascii_rpad(plain, width=4 * row_words, padding="\0")
        dense = value_bytes(padded)[: len(keys) * 4 * row_words]
    matrix = dense.view("<u4").reshape(len(keys), row_words)
    hashed = lengths.view(np.uint32) ^ np.uint32(_SEED)
    words_of = lengths >> 2
    all_have = int(words_of.min())
    for index in range(longest // 4):
        mixed = _mix(hashed, matrix[:, index])
        hashed = mixed if index < all_have else np.where(words_of > index, mixed, hashed)
    ragged = np.flatnonzero(lengths & 3)
    if len(ragged) == len(lengths) and all_have == row_words - 1:
        hashed = (hashed ^ matrix[:, -1]) * np.uint32(_M)
    elif len(ragged):
        hashed[ragged] = (hashed[ragged] ^ matrix[ragged, words_of[ragged]]) * np.uint32(_M)
    return _finish(hashed)


def _hash_uneven(data: npt.NDArray[np.uint8], offsets: Int32Array, lengths: Int32Array) -> npt.NDArray[np.uint32]:
    """Hash keys of very different lengths, longest first.

    Step i covers only the keys that have a word i, so the work grows with the bytes.
    """
    order = np.argsort(-lengths, kind="stable")
    first = int(offsets[0])
    padded = np.concatenate([data[first : int(offsets[-1])], np.zeros(4, np.uint8)])
    starts = (offsets[:-1].astype(np.int64) - first)[order]
    counts = lengths[order] >> 2
    hashed = (lengths.view(np.uint32) ^ np.uint32(_SEED))[order]
    windows: npt.NDArray[np.uint32] = np.ndarray(len(padded) - 3, np.dtype("<u4"), padded, strides=(1,))
    # For a few keys, a vector step costs more than the same words one by one.
    lone = min(_LONE_KEYS, len(counts))
    vector_steps = int(counts[lone]) if lone < len(counts) else 0
    # still[i]: the count of keys with more than i words.
    still = len(counts) - np.searchsorted(counts[::-1], np.arange(vector_steps), side="right")
    for index, alive in enumerate(still.tolist()):
        hashed[:alive] = _mix(hashed[:alive], windows[starts[:alive] + 4 * index])
    rest = (lengths & 3)[order]
    ragged = np.flatnonzero(rest)
    tail = windows[starts[ragged] + 4 * counts[ragged].astype(np.int64)]
    tail &= (np.uint32(1) << (8 * rest[ragged]).view(np.uint32)) - np.uint32(1)
    hashed[ragged] = (hashed[ragged] ^ tail) * np.uint32(_M)
    hashed = _finish(hashed)
    for index, start in enumerate(starts[:lone].tolist()):
        hashed[index] = murmur2(padded[start : start + int(lengths[order[index]])].tobytes()) & _MASK
    result = np.empty_like(hashed)
    result[order] = hashed
    return result


def _mix(hashed: npt.NDArray[np.uint32], word: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    mixed = word * np.uint32(_M)
    mixed ^= mixed >> np.uint32(24)
    mixed *= np.uint32(_M)
    mixed ^= hashed * np.uint32(_M)
    return mixed


def _finish(hashed: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    hashed ^= hashed >> np.uint32(13)
    hashed *= np.uint32(_M)
    hashed ^= hashed >> np.uint32(15)
    return hashed


_hash = hash_by_numpy if _compiled is None else hash_by_kernel


class Placement(NamedTuple):
    """The `partitions` of rows (int32, one per row), and the numbers of the `free` rows, which may go to any partition
    and have -1 there.

    If all rows are free, both are None. If no row is free, `free` is None.
    """

    partitions: Int32Array | None
    free: RowNumbers | None


def place(
    columns: RecordColumns,
    partition_count: int,
    ignore_keys: bool = False,
    whose: str = "the topic",
    first_row: int = 0,
) -> Placement:
    """Give each row its own partition if it has one, else that of its key. Rows without either are free.

    `ignore_keys` is partitioner.ignore.keys. An error names `whose` partitions they are, and counts rows from
    `first_row`. Raises SerializationError with the first row whose partition the topic does not have.
    """
    rows = columns.num_rows
    given = None if _all_null(columns.partition) else columns.partition
    key = None if ignore_keys or _all_null(columns.key) else columns.key
    if given is None and key is None:
        return Placement(None, None)
    partitions = np.full(rows, -1, np.int32)
    free = np.ones(rows, np.bool_)
    if key is not None:
        partitions = partitions_for_keys(key, partition_count)
        free = _or_false(null_mask(key), rows)
    if given is not None:
        unset = _or_false(null_mask(given), rows)
        explicit = int_values(given)
        _check(explicit, unset, partition_count, whose, first_row)
        partitions = np.where(unset, partitions, explicit)
        free &= unset
    if partition_count == 1:  # all rows go there, and keep their order
        partitions, free = np.zeros(rows, np.int32), np.zeros(rows, np.bool_)
    if not free.any():
        return Placement(partitions, None)
    if free.all():
        return Placement(None, None)
    return Placement(np.where(free, np.int32(-1), partitions), np.flatnonzero(free))


def highest_partition(columns: RecordColumns) -> int | None:
    """Return the highest partition that a row asks for, or None."""
    if columns.partition is None:
        return None
    highest: int | None = pc.max(columns.partition).as_py()
    return highest


def _all_null(column: pa.Array | None) -> bool:
    return column is None or column.null_count == len(column)


def _or_false(mask: BoolArray | None, rows: int) -> BoolArray:
    return np.zeros(rows, np.bool_) if mask is None else mask


def _check(explicit: npt.NDArray[np.int32], unset: BoolArray, partition_count: int, whose: str, first_row: int) -> None:
    wrong = np.flatnonzero(((explicit < 0) | (explicit >= partition_count)) & ~unset)
    if len(wrong):
        row = int(wrong[0])
        raise SerializationError(
            f"Row {first_row + row} asks for partition {int(explicit[row])}; {whose} has 0 to {partition_count - 1}:"
            " change the column partition, or leave it null."
        )
