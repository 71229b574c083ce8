"""The frames of one connection, over a scripted transport."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_kafka_sink.common.errors import DisconnectError, ProtocolError, SslAuthenticationError
from spark_kafka_sink.network.channel import Channel, ChannelKind, ChannelState, NetworkReceive, NetworkSend
from spark_kafka_sink.network.transport import READ, WOULD_BLOCK, WRITE

ENDED = b""


class ScriptedTransport:
    """`incoming` are the pieces for recv_into, None to block. `room` is the number of bytes that each sendmsg takes."""

    def __init__(self, incoming: Sequence[bytes | None] = (), room: Sequence[int] = ()) -> None:
        self.incoming = list(incoming)
        self.room = list(room)
        self.sent = bytearray()
        self.handshakes: list[int] = []
        self.largest_buffer = 0
        self.most_buffers = 0

    def fileno(self) -> int:
        return -1

    def finish_connect(self) -> None: ...

    def handshake(self) -> int:
        return self.handshakes.pop(0) if self.handshakes else 0

    def has_buffered(self) -> bool:
        return False

    def recv_into(self, buffer: memoryview) -> int:
        self.largest_buffer = max(self.largest_buffer, len(buffer))
        if not self.incoming or self.incoming[0] is None:
            del self.incoming[:1]
            return WOULD_BLOCK
        piece = self.incoming[0]
        count = min(len(piece), len(buffer))
        buffer[:count] = piece[:count]
        if count == len(piece):
            del self.incoming[0]
        else:
            self.incoming[0] = piece[count:]
        return count

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        self.most_buffers = max(self.most_buffers, len(buffers))
        room = self.room.pop(0) if self.room else WOULD_BLOCK
        taken = b"".join(buffers)[: max(room, 0)]
        self.sent += taken
        return len(taken) if room >= 0 else WOULD_BLOCK

    def close(self) -> None: ...


def channel_over(transport: ScriptedTransport, max_receive_size: int = 1000) -> Channel:
    channel = Channel("7", "Node 7 at h:1", transport, max_receive_size)
    assert channel.shake_hands() == 0
    return channel


def frame(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


def test_complete_frame_is_read() -> None:
    channel = channel_over(ScriptedTransport([frame(b"payload"), frame(b"next one")]))
    assert channel.read() == NetworkReceive("7", b"payload")
    assert channel.read() == NetworkReceive("7", b"next one")
    assert channel.read() is None


def test_frame_in_single_bytes_is_read_at_its_last_byte() -> None:
    data = frame(b"payload") * 2
    pieces: list[bytes | None] = []
    for byte in data:
        pieces += [bytes([byte]), None]
    channel = channel_over(ScriptedTransport(pieces))
    received = [receive for _ in range(len(pieces) + 1) if (receive := channel.read()) is not None]
    assert received == [NetworkReceive("7", b"payload")] * 2


@pytest.mark.parametrize("size", [-1, -(2**31), 0, 3, 1001, 2**31 - 1])
def test_frame_of_impossible_size_is_refused_without_allocation(size: int) -> None:
    transport = ScriptedTransport([struct.pack(">i", size) + b"more"])
    with pytest.raises(ProtocolError, match=f"Node 7 at h:1 sent a frame of {size} bytes") as caught:
        channel_over(transport).read()
    assert str(caught.value).endswith("Is this a Kafka listener, and one for this security.protocol?")
    assert transport.largest_buffer == 4


@pytest.mark.parametrize("size", [4, 1000])
def test_smallest_and_the_largest_frame_are_read(size: int) -> None:
    receive = channel_over(ScriptedTransport([frame(b"x" * size)])).read()
    assert receive is not None
    assert len(receive.payload) == size


@pytest.mark.parametrize(
    ("pieces", "progress"),
    [
        ([ENDED], r"closed the connection\.$"),
        ([b"\0\0", ENDED], "after 2 of a size's 4 bytes"),
        ([frame(b"payload")[:7], ENDED], "after 3 of a response's 7 bytes"),
    ],
)
def test_error_of_a_closed_connection_shows_the_progress(pieces: list[bytes | None], progress: str) -> None:
    channel = channel_over(ScriptedTransport(pieces))
    for _ in pieces[1:]:
        assert channel.read() is None
    with pytest.raises(DisconnectError, match=progress):
        channel.read()


def test_frame_sent_in_pieces_arrives_in_order() -> None:
    transport = ScriptedTransport(room=[3, WOULD_BLOCK, 1, 0, 100])
    channel = channel_over(transport)
    send = NetworkSend("7", [memoryview(b"abc"), memoryview(b"defg"), memoryview(b"h")])
    channel.send = send
    results = [channel.write() for _ in range(5)]
    assert results == [None, None, None, None, send]
    assert bytes(transport.sent) == b"abcdefgh"
    assert channel.send is None
    assert channel.write() is None


def test_buffers_beyond_one_call_are_sent_in_several() -> None:
    transport = ScriptedTransport(room=[10**6] * 3)
    channel = channel_over(transport)
    channel.send = NetworkSend("7", [memoryview(bytes([index % 256])) for index in range(2500)])
    assert channel.write() is not None
    assert bytes(transport.sent) == bytes(index % 256 for index in range(2500))
    assert transport.most_buffers == 1024


def test_state_names_the_step_reached() -> None:
    transport = ScriptedTransport()
    transport.handshakes = [READ, WRITE]
    channel = Channel("7", "Node 7 at h:1", transport, 1000)
    error = DisconnectError("x")
    assert channel.state(error) == ChannelState(ChannelKind.NOT_CONNECTED, error)
    for awaited in (READ, WRITE):
        assert channel.shake_hands() == awaited
        assert not channel.is_ready
        assert channel.state(error) == ChannelState(ChannelKind.AUTHENTICATE, error)
    assert channel.shake_hands() == 0
    assert channel.is_ready
    assert channel.state(error) == ChannelState(ChannelKind.READY, error)
    channel.failed_send = DisconnectError("sending")
    assert channel.state(error) == ChannelState(ChannelKind.FAILED_SEND, channel.failed_send)
    refusal = SslAuthenticationError("what the peer said last")
    assert channel.state(refusal) == ChannelState(ChannelKind.AUTHENTICATION_FAILED, refusal)


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(1, 25), max_size=60))
def test_partial_writes_leave_exactly_the_rest(pieces: list[bytes], steps: list[int]) -> None:
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


def test_head_offers_at_most_the_requested_buffers() -> None:
    send = NetworkSend("1", [memoryview(b"a"), memoryview(b""), memoryview(b"b"), memoryview(b"c")])
    assert [bytes(buffer) for buffer in send.head(2)] == [b"a", b"b"]


def test_wide_buffer_items_count_as_bytes() -> None:
    send = NetworkSend("1", [memoryview(bytearray(16)).cast("q")])
    send.advance(3)
    assert send.remaining == 13
    assert [buffer.nbytes for buffer in send.head(1)] == [13]


def test_buffers_are_released_when_sent() -> None:
    data = bytearray(10)
    send = NetworkSend("1", [memoryview(data)])
    send.advance(10)
    data.extend(b"x")  # a buffer that is still exported could not grow
    assert send.completed


def test_repr_shows_the_progress() -> None:
    send = NetworkSend("node", [memoryview(b"abcd")])
    send.advance(1)
    assert repr(send) == "NetworkSend(to 'node', 3 of 4 bytes left)"


def test_advance_beyond_the_send_raises() -> None:
    with pytest.raises(IndexError):
        NetworkSend("1", [memoryview(b"ab")]).advance(3)
