"""Zigzag varints (protobuf's, as Kafka's ByteUtils writes them), for whole columns at once.

Holds no state; any thread. A field is at most eight bytes packed into a uint64, first byte lowest, with its width.
Adjacent fields are merged into words of up to eight bytes. One pass of overlapping eight-byte writes stores all words
in ascending order, so that each write covers the bytes that the write before it wrote beyond its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_kafka_sink.record.arrow import Int64Array, binary_from_numpy

UInt64Array = npt.NDArray[np.uint64]
Lengths = npt.NDArray[np.int32] | Int64Array

_WORD = 8
"""Bytes of one packed word. A 5-byte varint fits; a 10-byte varlong takes two words."""


class Field(NamedTuple):
    """Bytes to write for each row.

    `bits` is uint64 per row and `width` int64 per row, or one int for all rows; `width` <= `max_width` <= 8.
    """

    bits: UInt64Array | int
    width: Int64Array | int
    max_width: int


ZERO = Field(0, 1, 1)
"""The varint 0, one byte."""
MINUS_ONE = Field(1, 1, 1)
"""The varint -1, one byte: a null's length."""


def zigzag(values: Int64Array) -> UInt64Array:
    """Return (v << 1) ^ (v >> 63) as uint64."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def varint_fields(zigzagged: UInt64Array) -> tuple[Field, ...]:
    """Return the varints of zigzagged values (at least one row).

    One field if the largest takes up to eight bytes, else two.
    """
    largest = int(zigzagged.max())
    max_width = _width(largest)
    if max_width == 1:
        return (Field(zigzagged, 1, 1),)
    if max_width == 2:
        wide = zigzagged > 0x7F
        # Doubling moves the bits above bit 7 up by one, to make room for the continuation bit.
        bits = zigzagged + (zigzagged & 0x3F80)
        bits |= wide.view(np.uint8).astype(np.uint64) << 7
        return (Field(bits, wide + np.int64(1), 2),)
    low = _pack(zigzagged, 0, min(max_width, _WORD), max_width > _WORD)
    return (low,) if max_width <= _WORD else (low, _pack(zigzagged, _WORD, max_width, False))


def varint(number: int) -> bytes:
    """Return the zigzag varint of one number. Raises OverflowError if it is no int64."""
    zigzagged = (number << 1) ^ (number >> 63)
    if zigzagged < 0x80:
        return zigzagged.to_bytes(1, "little")
    if zigzagged >> 64:
        raise OverflowError(f"{number} is no int64")
    octets = bytearray()
    while zigzagged >= 0x80:
        octets.append(zigzagged & 0x7F | 0x80)
        zigzagged >>= 7
    octets.append(zigzagged)
    return bytes(octets)


def varint_width(number: int) -> int:
    """Return the bytes of one zigzag varint."""
    return _width((number << 1) ^ (number >> 63))


def length_widths(lengths: Lengths) -> Lengths:
    """Return the bytes of the varint of each length or count, which is at least -1. The dtype is that of `lengths`."""
    widths = np.ones_like(lengths)
    most, step = int(lengths.max(initial=0)), 1 << 6
    while step <= most:
        widths += lengths >= step
        step <<= 7
    return widths


def _width(zigzagged: int) -> int:
    return max(1, (zigzagged.bit_length() + 6) // 7)


def _pack(zigzagged: UInt64Array, first: int, last: int, more_follow: bool) -> Field:
    """Return bytes first..last-1 of each varint. A row whose varint ends before `first` has width 0."""
    bits = np.zeros(len(zigzagged), np.uint64)
    width = np.zeros(len(zigzagged), np.int64)
    for index in range(first, last):
        shift = 8 * (index - first)
        bits |= ((zigzagged >> 7 * index) & 0x7F) << shift
        present = zigzagged >= 1 << 7 * index if index else np.ones(len(zigzagged), np.bool_)
        width += present
        if index + 1 < last or more_follow:
            bits |= (zigzagged >> 7 * (index + 1) > 0).astype(np.uint64) << (shift + 7)
    return Field(bits, width, last - first)


def merge(fields: Sequence[Field]) -> list[Field]:
    """Return the same bytes in as few words of at most eight bytes as their largest widths allow."""
    words: list[Field] = []
    for field in fields:
        if words and words[-1].max_width + field.max_width <= _WORD:
            words[-1] = _append(words[-1], field)
        else:
            words.append(field)
    return words


def _append(left: Field, right: Field) -> Field:
    shift: UInt64Array | int = left.width * 8 if isinstance(left.width, int) else (left.width * 8).view(np.uint64)
    bits: Any = right.bits << shift
    return Field(left.bits | bits, left.width + right.width, left.max_width + right.max_width)


def total_width(fields: Sequence[Field]) -> Int64Array | int:
    """Return the bytes per row of all fields together."""
    total: Int64Array | int = 0
    for field in fields:
        total = field.width + total
    return total


def to_binary(words: Sequence[Field], num_rows: int) -> pa.BinaryArray:
    """Return a `binary` array whose row i is the words of row i, one after the other."""
    count = len(words)
    if count == 1 and words[0].max_width == 1 and isinstance(words[0].bits, np.ndarray):  # as for lengths below 64
        return binary_from_numpy(np.arange(num_rows + 1, dtype=np.int32), words[0].bits.astype(np.uint8))
    positions = np.empty(num_rows * count + 1, np.int64)
    positions[0] = 0
    ends = positions[1:]
    bits = np.empty(num_rows * count, np.uint64)
    for index, word in enumerate(words):
        ends[index::count] = word.width
        bits[index::count] = word.bits
    np.cumsum(ends, out=ends)
    data = np.empty(int(positions[-1]) + _WORD, np.uint8)
    # Every byte is the start of an eight-byte window. numpy assigns in index order, so the last write of a byte wins.
    windows: npt.NDArray[np.uint64] = np.ndarray(len(data) - _WORD + 1, np.dtype("<u8"), data, strides=(1,))
    windows[positions[:-1]] = bits
    return binary_from_numpy(positions[::count].astype(np.int32), data)
