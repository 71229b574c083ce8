"""A channel with an authenticator: when it sends the authenticator's frames and the client's, and who gets a received
frame.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
from support.peer import frame, send_of

from spark_kafka_sink.common.errors import DisconnectError, ProtocolError, SaslAuthenticationError
from spark_kafka_sink.network.channel import Channel, ChannelKind, NetworkReceive, SetupStep
from spark_kafka_sink.network.sasl.authenticator import FIRST_CORRELATION_ID
from spark_kafka_sink.network.transport import READ, WOULD_BLOCK

LOGIN = struct.pack(">i", FIRST_CORRELATION_ID)
IN_FLIGHT = struct.pack(">i", 41)


class Authenticator:
    """Sends `login` when it begins, and is complete after one answer."""

    def __init__(self) -> None:
        self.is_complete = False
        self.due_ms: int | None = None
        self.outgoing: list[memoryview] | None = None
        self.frames: list[bytes] = []

    def begin(self) -> None:
        self.is_complete = False
        self.due_ms = None
        self.outgoing = [memoryview(frame(b"login"))]

    def is_due(self, now_ms: int) -> bool:
        return self.is_complete and self.due_ms is not None and now_ms >= self.due_ms

    def take_outgoing(self) -> list[memoryview] | None:
        taken, self.outgoing = self.outgoing, None
        return taken

    def receive(self, payload: bytes, now_ms: int) -> None:
        self.frames.append(bytes(payload))
        if payload == b"refused!":
            raise SaslAuthenticationError("refused")
        self.is_complete = True

    def advance(self, now_ms: int) -> None:
        pass


class Transport:
    """Takes `room` bytes a call, or all bytes if `room` is empty."""

    def __init__(self, incoming: bytes = b"") -> None:
        self.room: list[int] = []
        self.sent = bytearray()
        self.incoming = incoming

    def finish_connect(self) -> None: ...

    def handshake(self) -> int:
        return 0

    def recv_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self.incoming))
        buffer[:count] = self.incoming[:count]
        self.incoming = self.incoming[count:]
        return count if count else WOULD_BLOCK

    def sendmsg(self, buffers: Any) -> int:
        data = b"".join(buffers)
        taken = data[: self.room.pop(0) if self.room else len(data)]
        self.sent += taken
        return len(taken) if taken else WOULD_BLOCK


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator()


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def channel(authenticator: Any, transport: Any) -> Channel:
    channel = Channel("1", "Node 1 at there:1", transport, 1 << 30, authenticator)
    channel.shake_hands()
    channel.authenticate()
    return channel


def log_in(channel: Channel) -> None:
    channel.prepare(0)
    assert channel.write() is None
    assert channel.take(NetworkReceive("1", LOGIN), 0)


def test_only_the_login_is_sent_before_it_completes(channel: Channel, transport: Transport) -> None:
    assert (channel.is_ready, channel.is_authenticated, channel.is_held_up) == (False, False, True)
    channel.prepare(0)
    assert (channel.has_send, channel.is_sending) == (False, False), "the login's frame is not a send of the client"
    assert channel.write() is None
    assert transport.sent == frame(b"login")
    assert channel.take(NetworkReceive("1", LOGIN), 0)
    assert (channel.is_ready, channel.is_authenticated, channel.is_held_up) == (True, True, False)
    assert not channel.take(NetworkReceive("1", IN_FLIGHT), 0)
    assert not channel.take(NetworkReceive("1", LOGIN), 0), "no frame of a login is due"
    assert not channel.is_sending
    channel.send = send_of(b"produce")
    assert (channel.has_send, channel.is_sending) == (True, True)


def test_new_connection_names_the_step_it_waits_for(authenticator: Any, transport: Any) -> None:
    waits = [READ, 0]
    transport.handshake = lambda: waits.pop(0)
    channel = Channel("1", "Node 1 at there:1", transport, 1 << 30, authenticator)
    steps = [channel.setup_step]
    for _ in range(2):
        channel.shake_hands()
        steps.append(channel.setup_step)
    channel.authenticate()
    log_in(channel)
    assert [*steps, channel.setup_step] == [SetupStep.TCP, SetupStep.TLS, SetupStep.SASL, None]
    authenticator.begin()
    assert channel.setup_step is None, "the renewal of a session is not a new connection"


def test_channel_without_login_has_no_login_frames(transport: Any) -> None:
    channel = Channel("1", "Node 1 at there:1", transport, 1 << 30)
    channel.shake_hands()
    assert not channel.take(NetworkReceive("1", LOGIN), 0)


def test_slow_step_completes_a_login(channel: Channel, authenticator: Authenticator) -> None:
    channel.prepare(0)
    channel.write()
    authenticator.receive = lambda payload, now_ms: None
    assert channel.take(NetworkReceive("1", LOGIN), 0)
    assert (channel.is_ready, channel.is_authenticated, channel.is_held_up) == (False, False, True)
    authenticator.advance = lambda now_ms: setattr(authenticator, "is_complete", True)
    channel.prepare(0)
    assert (channel.is_ready, channel.is_authenticated, channel.is_held_up) == (True, True, False)


def test_channel_with_a_failed_send_is_not_ready(channel: Channel) -> None:
    log_in(channel)
    channel.failed_send = DisconnectError("gone")
    assert not channel.is_ready


@pytest.mark.parametrize("is_logged_in", [False, True])
def test_connection_closed_before_login_names_the_listener(
    channel: Channel, transport: Transport, is_logged_in: bool
) -> None:
    if is_logged_in:
        log_in(channel)
    transport.recv_into = lambda buffer: 0
    with pytest.raises(DisconnectError) as caught:
        channel.read()
    end = "." if is_logged_in else " before it had authenticated us. Is it a SASL listener?"
    assert str(caught.value) == f"Node 1 at there:1 closed the connection{end}"


def test_frames_before_the_login_go_to_the_authenticator(channel: Channel, authenticator: Authenticator) -> None:
    assert channel.take(NetworkReceive("1", IN_FLIGHT), 0)
    assert authenticator.frames == [IN_FLIGHT]


def test_renewal_holds_sends_and_reads_in_flight_responses(
    channel: Channel, transport: Transport, authenticator: Authenticator
) -> None:
    log_in(channel)
    authenticator.due_ms = 5_000
    transport.sent.clear()
    channel.send = send = send_of(b"produce")
    channel.prepare(5_000)
    assert channel.write() is None
    assert transport.sent == frame(b"login")
    assert (channel.is_ready, channel.has_send, channel.is_held_up) == (False, True, True)
    channel.prepare(5_001)
    assert channel.write() is None
    assert transport.sent == frame(b"login"), "no frame goes before the answer"
    assert not channel.take(NetworkReceive("1", IN_FLIGHT), 5_001), "the frame is the client's"
    assert channel.take(NetworkReceive("1", LOGIN), 5_002)
    assert channel.is_held_up
    channel.prepare(5_002)
    assert channel.write() is send
    assert transport.sent == frame(b"login") + frame(b"produce")
    assert (channel.is_ready, channel.has_send, channel.is_held_up) == (True, False, False)


def test_no_renewal_without_a_send(channel: Channel, authenticator: Authenticator) -> None:
    log_in(channel)
    authenticator.due_ms = 5_000
    channel.prepare(9_000)
    assert authenticator.outgoing is None
    assert channel.is_ready


@pytest.mark.parametrize("taken", [3, 0])
def test_offered_send_goes_whole_before_a_renewal(
    channel: Channel, transport: Transport, authenticator: Authenticator, taken: int
) -> None:
    """Bug: over TLS OpenSSL held the first record of the frame, perhaps partly written, when the renewal of the session
    took its place. OpenSSL needs the same bytes again, so the connection was lost.
    """
    log_in(channel)
    transport.sent.clear()
    channel.send = send = send_of(b"produce")
    channel.prepare(0)
    transport.room = [taken]
    assert channel.write() is None
    authenticator.due_ms = 5_000
    channel.prepare(5_000)
    assert channel.write() is send
    assert transport.sent == frame(b"produce"), "the bytes offered before must come again, first and unchanged"
    channel.send = send_of(b"another")
    channel.prepare(5_001)
    channel.write()
    assert transport.sent == frame(b"produce") + frame(b"login")


def test_partial_login_frame_is_not_cut_by_a_send(
    channel: Channel, transport: Transport, authenticator: Authenticator
) -> None:
    log_in(channel)
    transport.sent.clear()
    authenticator.due_ms = 5_000
    channel.send = send_of(b"produce")
    channel.prepare(5_000)
    transport.room = [2]
    assert channel.write() is None
    channel.prepare(5_001)
    assert channel.write() is None
    assert transport.sent == frame(b"login")


def test_only_a_refusal_is_final(channel: Channel) -> None:
    with pytest.raises(SaslAuthenticationError) as caught:
        channel.take(NetworkReceive("1", b"refused!"), 0)
    assert channel.state(caught.value).kind is ChannelKind.AUTHENTICATION_FAILED
    assert channel.state(DisconnectError("cut")).kind is ChannelKind.AUTHENTICATE


def test_frames_are_smaller_before_authentication(channel: Channel, transport: Transport) -> None:
    transport.incoming = struct.pack(">i", 524_289)
    with pytest.raises(ProtocolError, match="a frame of 524289 bytes; a response has 4 to 524288"):
        channel.read()
    log_in(channel)
    transport.incoming = struct.pack(">i", 524_289)
    assert channel.read() is None


def test_frame_within_the_limit_of_a_login_is_read(channel: Channel, transport: Transport) -> None:
    transport.incoming = struct.pack(">i", 524_288)
    assert channel.read() is None
