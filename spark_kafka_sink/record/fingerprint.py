"""The fingerprint of records: a sum of a hash of each record, so neither order nor layout changes it.

It is computed by the compiled kernel, or by its numpy twin where that was not compiled; both give the same number. The
hash of bytes is a sum over pairs of 64-bit words, each mixed with its position by a product of 128 bits (as in
wyhash). The fingerprint finds accidents. It is no signature: who wants to can make rows that have a given one.

Holds no state; any thread.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_kafka_sink.common.errors import SerializationError
from spark_kafka_sink.record.arrow_arrays import binary_from_numpy, byte_lengths, int_values, value_bytes, value_offsets
from spark_kafka_sink.record.columns import RecordColumns
from spark_kafka_sink.record.runs import _buffers, _kernel

UInt64Array = npt.NDArray[np.uint64]

MODULUS: Final = 1 << 64
"""Fingerprints of parts of a batch are added modulo this."""
_PAIR: Final = 16
_PAIRS_AT_ONCE: Final = 1 << 16
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_SALTS: Final = np.array(
    [
        *(0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        *(0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917),
        *(0x9216D5D98979FB1B, 0xD1310BA698DFB5AC, 0x2FFD72DBD01ADFB7, 0xB8E1AFED6A267E96),
    ],
    np.uint64,
)
"""Digits of pi."""
_compiled: Any = getattr(_kernel, "fingerprint", None)


def fingerprint_by_kernel(topic: str, columns: RecordColumns) -> int:
    """As `fingerprint`."""
    names = contents = None
    bounds, header_rows = None, 0
    if columns.headers is not None and columns.num_rows:
        names, contents = columns.headers.values.flatten()
        bounds, header_rows = _bounds(columns.headers), len(names)
    try:
        found: int = _compiled(
            columns.num_rows,
            topic.encode(),
            _integers(columns.timestamp_ms),
            _integers(columns.partition),
            _buffers(columns.key),
            _buffers(columns.value),
            bounds,
            header_rows,
            _buffers_of_headers(names),
            _buffers_of_headers(contents),
        )
    except ValueError as error:
        raise SerializationError(f"The records could not be read: {error}.") from error
    return found


def fingerprint_by_numpy(topic: str, columns: RecordColumns) -> int:
    """As `fingerprint`."""
    rows = columns.num_rows
    encoded = topic.encode()
    name = _digests(
        binary_from_numpy(np.array([0, len(encoded)], np.int32), np.frombuffer(encoded + b"\0", np.uint8)), 1
    )
    body = _mixed(_digests(columns.key, rows) ^ _SALTS[3], _digests(columns.value, rows) ^ _SALTS[4])
    times, partitions = _integers(columns.timestamp_ms), _integers(columns.partition)
    place = _mixed(_words(times, rows) ^ _SALTS[5], _words(partitions, rows) ^ _SALTS[6])
    if columns.headers is not None and rows:
        place += _of_headers(columns.headers)
    return int(_mixed(body ^ name, place ^ _SALTS[11]).sum(dtype=np.uint64))


def _of_headers(headers: pa.Array) -> UInt64Array:
    """The sum over the headers of each row."""
    bounds = _bounds(headers).astype(np.int64)
    first, last = int(bounds[0]), int(bounds[-1])
    names, contents = (column.slice(first, last - first) for column in headers.values.flatten())
    pairs = _mixed(_digests(names, len(names)) ^ _SALTS[7], _digests(contents, len(names)) ^ _SALTS[8])
    bounds -= first
    numbers = np.arange(1, len(pairs) + 1) - np.repeat(bounds[:-1], np.diff(bounds))
    steps: UInt64Array = numbers.astype(np.uint64) * _STEP
    return _sums(_mixed(pairs ^ _SALTS[9], steps ^ _SALTS[10]), bounds)


def _digests(column: pa.BinaryArray | None, rows: int) -> UInt64Array:
    """The hash of each value."""
    if column is None:
        nulls: UInt64Array = np.full(rows, -1, np.int64).view(np.uint64) * _SALTS[2]
        return nulls
    lengths = byte_lengths(column)
    digests: UInt64Array = lengths.view(np.uint64) * _SALTS[2]
    starts = value_offsets(column)[:-1].astype(np.int64)
    first_pairs = np.zeros(rows + 1, np.int64)
    np.cumsum((np.maximum(lengths, 0) + _PAIR - 1) // _PAIR, out=first_pairs[1:])
    data = np.concatenate([value_bytes(column), np.zeros(_PAIR, np.uint8)])
    words: UInt64Array = np.ndarray(len(data) - 7, np.dtype("<u8"), data, strides=(1,))
    total = int(first_pairs[-1])
    for begin in range(0, total, _PAIRS_AT_ONCE):
        end = min(begin + _PAIRS_AT_ONCE, total)
        head = int(np.searchsorted(first_pairs, begin, side="right")) - 1
        tail = int(np.searchsorted(first_pairs, end, side="left"))
        bounds = np.clip(first_pairs[head : tail + 1], begin, end)
        of_row = np.repeat(np.arange(head, tail), np.diff(bounds))
        numbers = np.arange(begin, end) - first_pairs[of_row]
        offsets = starts[of_row] + _PAIR * numbers
        left = lengths[of_row] - _PAIR * numbers
        steps = numbers.astype(np.uint64) * _STEP
        pairs = _mixed(
            _within(words[offsets], left) ^ (_SALTS[0] + steps),
            _within(words[offsets + 8], left - 8) ^ (_SALTS[1] + steps),
        )
        digests[head:tail] += _sums(pairs, bounds - begin)
    return digests


def _within(words: UInt64Array, left: npt.NDArray[np.int64]) -> UInt64Array:
    """The words without what lies behind the end of their value, `left` bytes from their beginning."""
    ragged = np.flatnonzero(left < 8)
    bits = (8 * np.clip(left[ragged], 0, 7)).astype(np.uint64)
    words[ragged] &= (np.uint64(1) << bits) - np.uint64(1)
    return words


def _mixed(a: UInt64Array, b: UInt64Array) -> UInt64Array:
    """Both halves of the product of 128 bits, one upon the other."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    up = a_low * b_high
    middle = ((a_low * b_low) >> _HALF) + (up & _LOW) + a_high * b_low
    product: UInt64Array = a * b
    product ^= a_high * b_high + (up >> _HALF) + (middle >> _HALF)
    return product


def _sums(values: UInt64Array, bounds: npt.NDArray[np.int64]) -> UInt64Array:
    """Of the values between each two bounds."""
    running = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=running[1:])
    ends: UInt64Array = running[bounds]
    return ends[1:] - ends[:-1]


def _words(values: npt.NDArray[Any] | None, rows: int) -> UInt64Array:
    return (np.full(rows, -1, np.int64) if values is None else values.astype(np.int64)).view(np.uint64)


def _integers(column: pa.Array | None) -> npt.NDArray[Any] | None:
    """-1 where null, which is no partition and no time of Kafka's; None where all are."""
    return None if column is None or column.null_count == len(column) else int_values(column, -1)


def _bounds(headers: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(headers.buffers()[1], np.int32, len(headers) + 1, headers.offset * 4)


def _buffers_of_headers(column: pa.BinaryArray | None) -> tuple[Any, Any, Any, int]:
    """As of any column, but with offsets also where all are null: each is read."""
    if column is None:
        return None, None, None, 0
    valid = column.buffers()[0] if column.null_count else None
    return value_offsets(column), value_bytes(column), valid, column.offset


fingerprint = fingerprint_by_numpy if _compiled is None else fingerprint_by_kernel
"""`fingerprint(topic, columns)`: the sum modulo 2^64 of a hash of each record: `topic`, partition (or none), key,
value, headers in their order, timestamp (or none). A null is another value than an empty one. Raises
SerializationError where the columns' own lengths do not fit their bytes.
"""
