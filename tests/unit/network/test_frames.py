"""A frame on its way out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_kafka_sink.network.frames import NetworkSend


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(1, 25), max_size=60))
def test_what_is_left_after_any_partial_writes_is_exactly_the_rest(pieces: list[bytes], steps: list[int]) -> None:
    whole = b"".join(pieces)
    send = NetworkSend("1", [memoryview(piece) for piece in pieces])
    taken = 0
    assert send.size == len(whole)
    for step in steps:
        if send.completed:
            break
        step = min(step, send.remaining)
        assert b"".join(send.head(1000)) == whole[taken:]
        send.advance(step)
        taken += step
        assert send.remaining == len(whole) - taken
    assert b"".join(send.head(1000)) == whole[taken:]
    assert send.completed is (taken == len(whole))


def test_no_more_buffers_are_offered_than_asked_for() -> None:
    send = NetworkSend("1", [memoryview(b"a"), memoryview(b""), memoryview(b"b"), memoryview(b"c")])
    assert [bytes(buffer) for buffer in send.head(2)] == [b"a", b"b"]


def test_bytes_of_a_buffer_of_wider_items_are_counted_as_bytes() -> None:
    send = NetworkSend("1", [memoryview(bytearray(16)).cast("q")])
    send.advance(3)
    assert send.remaining == 13
    assert [buffer.nbytes for buffer in send.head(1)] == [13]


def test_buffers_are_let_go_when_all_is_sent() -> None:
    data = bytearray(10)
    send = NetworkSend("1", [memoryview(data)])
    send.advance(10)
    data.extend(b"x")  # a buffer still exported could not grow
    assert send.completed


def test_the_repr_tells_how_far_it_is() -> None:
    send = NetworkSend("node", [memoryview(b"abcd")])
    send.advance(1)
    assert repr(send) == "NetworkSend(to 'node', 3 of 4 bytes left)"


def test_more_than_was_offered_cannot_have_been_taken() -> None:
    with pytest.raises(IndexError):
        NetworkSend("1", [memoryview(b"ab")]).advance(3)
