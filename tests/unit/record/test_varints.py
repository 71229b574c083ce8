"""Varints of single numbers and of whole columns, for every number where their width changes."""

from __future__ import annotations

import numpy as np
import pytest

from spark_kafka_sink.record.varints import (
    MINUS_ONE,
    Field,
    length_widths,
    merge,
    to_binary,
    total_width,
    varint,
    varint_fields,
    varint_width,
    zigzag,
)

EDGES = sorted(
    {sign * (1 << bits) + more for bits in range(63) for sign in (1, -1) for more in (-1, 0, 1)}
    | {(1 << 63) - 1, -(1 << 63)}
)


def expected(number: int) -> bytes:
    """As the protocol describes varints, seven bits at a time."""
    left = 2 * number if number >= 0 else -2 * number - 1
    septets = [left >> shift & 0x7F for shift in range(0, max(1, left.bit_length()), 7)]
    return bytes(0x80 | septet for septet in septets[:-1]) + bytes(septets[-1:])


def test_number_of_every_width_is_encoded() -> None:
    assert [varint(number) for number in EDGES] == [expected(number) for number in EDGES]
    assert [varint_width(number) for number in EDGES] == [len(expected(number)) for number in EDGES]


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 1 << 64])
def test_number_beyond_int64_is_refused(number: int) -> None:
    with pytest.raises(OverflowError, match=f"{number} is no int64"):
        varint(number)


@pytest.mark.parametrize("width", range(1, 11))
def test_columns_at_every_width(width: int) -> None:
    numbers = [number for number in EDGES if len(expected(number)) <= width]
    column = np.array(numbers, np.int64)
    fields = varint_fields(zigzag(column))
    assert to_binary(fields, len(numbers)).to_pylist() == [expected(number) for number in numbers]
    assert sum(field.max_width for field in fields) == width, "space for more bytes than needed makes more words"
    assert np.broadcast_to(total_width(fields), len(numbers)).tolist() == [len(expected(each)) for each in numbers]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_of_every_width(dtype: type) -> None:
    numbers = [number for number in EDGES if -1 <= number <= np.iinfo(dtype).max >> 1]
    for most in range(1, len(numbers) + 1):
        widths = length_widths(np.array(numbers[:most], dtype))
        assert widths.tolist() == [len(expected(number)) for number in numbers[:most]]
        assert widths.dtype == dtype
    assert length_widths(np.zeros(0, dtype)).tolist() == []


def test_neighbours_share_words_of_up_to_eight_bytes() -> None:
    numbers = np.array([0, 1 << 20, -1, 1 << 26])
    four = varint_fields(zigzag(numbers))
    words = merge([*four, *four, MINUS_ONE, *four])
    assert [word.max_width for word in words] == [8, 5]
    made = [expected(each) * 2 + b"\1" + expected(each) for each in numbers.tolist()]
    assert to_binary(words, 4).to_pylist() == made


def test_constant_takes_its_width_in_every_row() -> None:
    words = merge([MINUS_ONE, Field(0x0302, 2, 2), *varint_fields(zigzag(np.array([5, 64])))])
    assert to_binary(words, 2).to_pylist() == [b"\1\2\3\x0a", b"\1\2\3\x80\1"]
