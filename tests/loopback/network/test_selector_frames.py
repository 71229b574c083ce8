"""Frames through the selector on real sockets: whole, in pieces, malformed, and on many connections at once."""

from __future__ import annotations

import random
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.fake_clock import FakeClock
from support.peer import LIMIT_S, Peer, connect, frame, lost, poll_until, receive, send_of

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.network import selector as selector_module
from spark_kafka_sink.network import transport as transport_module
from spark_kafka_sink.network.channel import ChannelKind, NetworkReceive, NetworkSend
from spark_kafka_sink.network.selector import Selector


def test_frame_is_sent_and_one_is_received(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    assert selector.is_channel_ready("1")
    send = send_of(b"question")
    selector.send(send)
    selector.poll(1000)
    assert selector.completed_sends == [send]
    assert connection.recv(100) == frame(b"question")
    connection.sendall(frame(b"answer"))
    assert receive(selector) == NetworkReceive("1", b"answer")


def test_completed_send_is_reported_without_waiting(selector: Selector, peer: Peer) -> None:
    connect(selector, peer)
    selector.send(send_of(b"question"))
    started = time.monotonic()
    selector.poll(5000)
    assert len(selector.completed_sends) == 1
    assert time.monotonic() - started < 3


def test_a_slow_reader_gets_every_byte_in_order(selector: Selector, new_peer: Callable[..., Peer]) -> None:
    """Small buffers on both sides and sends in many pieces: each partial write continues where it stopped."""
    peer = new_peer(4096)
    connection = connect(selector, peer, send_buffer=4096)
    source = random.Random(5)
    frames = [source.randbytes(source.choice((10, 3_000, 200_000))) for _ in range(12)]
    expected = b"".join(frame(payload) for payload in frames)
    got = bytearray()

    def read_slowly() -> None:
        while len(got) < len(expected):
            got.extend(connection.recv(source.choice((1, 7, 1000, 30_000))))

    reader = threading.Thread(target=read_slowly)
    reader.start()
    for payload in frames:
        data = frame(payload)
        cuts = sorted(source.randrange(len(data)) for _ in range(20))
        pieces = [memoryview(data)[low:high] for low, high in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        send = NetworkSend("1", pieces)
        selector.send(send)
        poll_until(selector, lambda send=send: send in selector.completed_sends)  # type: ignore[misc]
    reader.join(LIMIT_S)
    assert bytes(got) == expected


class SocketOfWindows:
    """A socket without `sendmsg`."""

    def __init__(self, real: socket.socket) -> None:
        self._socket = real

    def __getattr__(self, name: str) -> object:
        if name == "sendmsg":
            raise AttributeError(name)
        return getattr(self._socket, name)


def test_system_without_sendmsg_and_poll_sends_every_byte(
    selector: Selector, monkeypatch: pytest.MonkeyPatch, new_peer: Callable[..., Peer]
) -> None:
    """Bug: Windows has neither. There each connection ended with its first frame."""
    peer = new_peer(4096)
    open_socket = transport_module.open_socket

    def open_as_windows(*arguments: object) -> SocketOfWindows:
        return SocketOfWindows(open_socket(*arguments))  # type: ignore[arg-type]

    monkeypatch.setattr(transport_module, "open_socket", open_as_windows)
    monkeypatch.delattr(select, "poll")
    monkeypatch.setattr(transport_module, "_HAS_SENDMSG", False)
    monkeypatch.setattr(selector_module, "_HAS_POLL", False)
    connection = connect(selector, peer, send_buffer=4096)
    data = frame(random.Random(6).randbytes(300_000))
    pieces = [memoryview(data)[at : at + 7_001] for at in range(0, len(data), 7_001)]
    got = bytearray()

    def read() -> None:
        while len(got) < len(data):
            got.extend(connection.recv(20_000))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    send = NetworkSend("1", pieces)
    selector.send(send)
    poll_until(selector, lambda: send in selector.completed_sends or selector.disconnected)
    reader.join(LIMIT_S)
    assert bytes(got) == data


def read_all(connection: socket.socket, size: int) -> threading.Thread:
    def read() -> None:
        left = size
        while left and (count := len(connection.recv(min(left, 20_000)))):
            left -= count

    reader = threading.Thread(target=read)
    reader.start()
    return reader


def test_a_frame_of_many_pieces_goes_out_in_one_poll(selector: Selector, new_peer: Callable[..., Peer]) -> None:
    peer = new_peer(4096)
    connection = connect(selector, peer, send_buffer=4096)
    send = send_of(bytes(1_000_000))
    reader = read_all(connection, 1_000_004)
    selector.send(send)
    selector.poll(int(LIMIT_S * 1000))
    assert selector.completed_sends == [send]
    reader.join(LIMIT_S)


def test_poll_leaves_a_frame_for_an_event_of_another_connection(
    selector: Selector, new_peer: Callable[..., Peer]
) -> None:
    """It also leaves the frame for a wake-up, and at its own timeout: a slow reader delays no other connection."""
    slow, other = new_peer(4096), new_peer()
    reading = connect(selector, slow, "1", send_buffer=4096)
    telling = connect(selector, other, "2")
    send = send_of(bytes(50_000_000))
    selector.send(send)
    reader = threading.Thread(target=read_until_it_ends, args=(reading,))
    reader.start()

    def poll_while(happens: Callable[[], object]) -> None:
        """Poll; call `happens` during the poll, after some bytes of the frame and long before the last."""
        seen = send.remaining

        def act() -> None:
            while send.remaining in (seen, send.size):
                time.sleep(0.001)
            happens()

        actor = threading.Thread(target=act)
        actor.start()
        selector.poll(60_000)
        actor.join(LIMIT_S)
        assert 0 < send.remaining < seen
        assert selector.completed_sends == []

    try:
        poll_while(lambda: telling.sendall(frame(b"news")))
        assert [received.payload for received in selector.completed_receives] == [b"news"]
        poll_while(lambda: reading.sendall(frame(b"answer")))
        assert [received.payload for received in selector.completed_receives] == [b"answer"]
        poll_while(selector.wakeup)
        assert selector.completed_receives == []
        started = time.monotonic()
        selector.poll(100)
        assert time.monotonic() - started >= 0.09
        assert send.remaining > 0
    finally:
        selector.close("1")
        reader.join(LIMIT_S)
        slow.close()
        other.close()


def test_wakeup_ends_a_poll_within_a_frame(
    selector: Selector, monkeypatch: pytest.MonkeyPatch, new_peer: Callable[..., Peer]
) -> None:
    slow = new_peer(4096)
    connect(selector, slow, send_buffer=4096)
    selector.send(send_of(bytes(50_000_000)))
    selector.poll(0)
    looks: list[int] = []

    def all_is_ready(poller: selectors.BaseSelector, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        looks.append(len(poller.get_map()))
        return [(key, key.events) for key in poller.get_map().values()]

    monkeypatch.setattr(selectors.DefaultSelector, "select", all_is_ready)
    selector.wakeup()
    selector.poll(60_000)
    monkeypatch.undo()
    assert looks == [2], "one look at the wake-up and the connection"


class TickingClock(FakeClock):
    """A clock that advances by a millisecond at each reading."""

    def now_ms(self) -> int:
        self.advance(1)
        return super().now_ms()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FakeClock], Selector]]:
    """Make a selector that waits for room in a socket as long as a test needs, and knows only its clock's time."""
    monkeypatch.setattr(selector_module, "_LONGEST_WAIT_FOR_ROOM_MS", int(LIMIT_S * 1000))
    made: list[Selector] = []

    def make(clock: FakeClock) -> Selector:
        made.append(Selector(clock, connections_max_idle_ms=-1))
        return made[-1]

    yield make
    for each in made:
        each.close_all()


def test_frame_is_sent_whole_while_the_peer_takes_it(
    patient: Callable[[FakeClock], Selector], new_peer: Callable[..., Peer]
) -> None:
    selector, peer = patient(FakeClock()), new_peer(4096)
    connection = connect(selector, peer, send_buffer=4096)
    send = send_of(bytes(1_000_000))
    reader = read_all(connection, 1_000_004)
    connection.sendall(frame(b"an answer in mid-frame"))
    selector.send(send)
    selector.wakeup()
    selector.poll(0)
    assert selector.completed_sends == [send]
    assert [received.payload for received in selector.completed_receives] == [b"an answer in mid-frame"]
    reader.join(LIMIT_S)


def test_poll_leaves_a_long_frame_after_five_milliseconds(
    patient: Callable[[FakeClock], Selector], new_peer: Callable[..., Peer]
) -> None:
    selector, peer = patient(TickingClock()), new_peer(4096)
    connection = connect(selector, peer, send_buffer=4096)
    send = send_of(bytes(50_000_000))
    selector.send(send)
    reader = threading.Thread(target=read_until_it_ends, args=(connection,))
    reader.start()
    selector.wakeup()
    selector.poll(0)
    assert 0 < send.remaining < send.size
    selector.close("1")
    reader.join(LIMIT_S)


def test_slow_peer_does_not_delay_a_writable_one(
    patient: Callable[[FakeClock], Selector], new_peer: Callable[..., Peer]
) -> None:
    selector, deaf, other = patient(FakeClock()), new_peer(4096), new_peer(4096)
    connect(selector, deaf, "1", send_buffer=4096)
    reader = read_all(connect(selector, other, "2", send_buffer=4096), 100_004)
    to_deaf, to_other = send_of(bytes(5_000_000), "1"), send_of(bytes(100_000), "2")
    selector.send(to_deaf)
    selector.send(to_other)
    started = time.monotonic()
    poll_until(selector, lambda: to_other in selector.completed_sends)
    assert time.monotonic() - started < LIMIT_S / 2
    assert to_deaf.remaining > 0
    reader.join(LIMIT_S)


def read_until_it_ends(connection: socket.socket) -> None:
    while connection.recv(4_096):
        time.sleep(0.001)


def test_wait_for_room_in_the_socket_uses_no_cpu(selector: Selector, new_peer: Callable[..., Peer]) -> None:
    peer = new_peer(4096)
    connect(selector, peer, send_buffer=4096)
    send = send_of(bytes(4_000_000))
    selector.send(send)
    polls, busy_s, end = 0, time.process_time(), time.monotonic() + 0.5
    while time.monotonic() < end:
        selector.poll(100)
        polls += 1
    busy_s = time.process_time() - busy_s
    assert not send.completed
    assert polls < 40
    assert busy_s < 0.15


def test_idle_connection_uses_no_cpu(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    selector.send(send_of(b"x"))
    selector.poll(100)
    connection.recv(10)
    started = time.monotonic()
    selector.poll(200)
    assert time.monotonic() - started >= 0.19


def test_a_frame_in_one_byte_pieces_arrives_whole(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    for byte in frame(b"slowly")[:-1]:
        connection.sendall(bytes([byte]))
        selector.poll(50)
        assert selector.completed_receives == []
    connection.sendall(b"y")
    assert receive(selector).payload == b"slowly"


def test_a_large_frame_arrives_in_one_buffer(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    payload = random.Random(1).randbytes(5_000_000)
    writer = threading.Thread(target=connection.sendall, args=(frame(payload),))
    writer.start()
    assert receive(selector).payload == payload
    writer.join(LIMIT_S)


def test_channel_returns_at_most_one_frame_per_poll(selector: Selector, peer: Peer) -> None:
    first, second = connect(selector, peer, "1"), connect(selector, peer, "2")
    first.sendall(b"".join(frame(b"many%d" % index) for index in range(5)))
    second.sendall(frame(b"only"))
    time.sleep(0.05)
    selector.poll(1000)
    assert sorted(received.source for received in selector.completed_receives) == ["1", "2"]
    rest = [receive(selector).payload for _ in range(4)]
    assert rest == [b"many1", b"many2", b"many3", b"many4"]


@pytest.mark.parametrize("size", [-1, 0, 2**31 - 1])
def test_impossible_frame_size_closes_without_memory(selector: Selector, peer: Peer, size: int) -> None:
    connection = connect(selector, peer)
    connection.sendall(struct.pack(">i", size))
    state = lost(selector)
    assert state.kind is ChannelKind.READY
    assert isinstance(state.error, ProtocolError)
    assert "Node 1 at 127.0.0.1" in str(state.error)
    assert str(size) in str(state.error)
    assert connection.recv(1) == b""
