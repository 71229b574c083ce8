"""The selector on real sockets, against a peer that does what the test says."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fake_clock import FakeClock

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import DisconnectError, IllegalStateError, ProtocolError
from spark_kafka_sink.network.frames import ChannelKind, ChannelState, NetworkReceive, NetworkSend
from spark_kafka_sink.network.resolver import resolve
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.network.transport import Address

LIMIT_S = 10.0


class Peer:
    """A listener whose accepted connections the test drives by hand."""

    def __init__(self, receive_buffer: int | None = None) -> None:
        self.listener = socket.socket()
        if receive_buffer is not None:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.address = resolve(*self.listener.getsockname())[0]
        self.accepted: list[socket.socket] = []

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(LIMIT_S)
        self.accepted.append(connection)
        return connection

    def close(self) -> None:
        for connection in self.accepted:
            connection.close()
        self.listener.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def selector() -> Iterator[Selector]:
    made = Selector(SystemClock(), connections_max_idle_ms=540_000)
    yield made
    made.close_all()


def frame(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


def send_of(payload: bytes, connection_id: str = "1") -> NetworkSend:
    return NetworkSend(connection_id, [memoryview(frame(payload))])


def poll_until(selector: Selector, condition: Callable[[], object]) -> None:
    """Poll until the last poll's results satisfy the condition."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        selector.poll(100)
        if condition():
            return
        assert time.monotonic() < deadline, "it did not happen"


def connect(selector: Selector, peer: Peer, connection_id: str = "1", send_buffer: int = -1) -> socket.socket:
    selector.connect(connection_id, peer.address, send_buffer, -1)
    poll_until(selector, lambda: connection_id in selector.connected)
    return peer.accept()


def receive(selector: Selector) -> NetworkReceive:
    poll_until(selector, lambda: selector.completed_receives)
    (received,) = selector.completed_receives
    return received


def lost(selector: Selector, connection_id: str = "1") -> ChannelState:
    poll_until(selector, lambda: connection_id in selector.disconnected)
    return selector.disconnected[connection_id]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def socket_of(selector: Selector, connection_id: str = "1") -> socket.socket:
    """A second handle on the connection's own socket, to read its options."""
    return socket.socket(fileno=os.dup(selector._channels[connection_id].transport.fileno()))


# ---- frames ----------------------------------------------------------------------------------------------------------


def test_a_frame_goes_out_and_one_comes_back(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    assert selector.is_channel_ready("1")
    send = send_of(b"question")
    selector.send(send)
    selector.poll(1000)
    assert selector.completed_sends == [send]
    assert connection.recv(100) == frame(b"question")
    connection.sendall(frame(b"answer"))
    assert receive(selector) == NetworkReceive("1", b"answer")


def test_a_send_that_went_out_is_told_without_waiting_for_more(selector: Selector, peer: Peer) -> None:
    connect(selector, peer)
    selector.send(send_of(b"question"))
    started = time.monotonic()
    selector.poll(5000)
    assert len(selector.completed_sends) == 1
    assert time.monotonic() - started < 3


def test_a_slow_reader_gets_every_byte_in_order(selector: Selector) -> None:
    """Small buffers on both sides, sends in many pieces: each partial write is taken up where it stopped."""
    peer = Peer(receive_buffer=4096)
    connection = connect(selector, peer, send_buffer=4096)
    source = random.Random(5)
    frames = [source.randbytes(source.choice((10, 3_000, 200_000))) for _ in range(12)]
    wanted = b"".join(frame(payload) for payload in frames)
    got = bytearray()

    def read_slowly() -> None:
        while len(got) < len(wanted):
            got.extend(connection.recv(source.choice((1, 7, 1000, 30_000))))

    reader = threading.Thread(target=read_slowly)
    reader.start()
    for payload in frames:
        data = frame(payload)
        cuts = sorted(source.randrange(len(data)) for _ in range(20))
        pieces = [memoryview(data)[low:high] for low, high in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        send = NetworkSend("1", pieces)
        selector.send(send)
        poll_until(selector, lambda send=send: send in selector.completed_sends)
    reader.join(LIMIT_S)
    peer.close()
    assert bytes(got) == wanted


def test_waiting_for_room_in_the_socket_is_no_busy_loop(selector: Selector) -> None:
    peer = Peer(receive_buffer=4096)
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
    peer.close()


def test_an_idle_connection_is_no_busy_loop(selector: Selector, peer: Peer) -> None:
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


def test_no_channel_hands_over_more_than_one_frame_a_poll(selector: Selector, peer: Peer) -> None:
    first, second = connect(selector, peer, "1"), connect(selector, peer, "2")
    first.sendall(b"".join(frame(b"many%d" % index) for index in range(5)))
    second.sendall(frame(b"only"))
    time.sleep(0.05)
    selector.poll(1000)
    assert sorted(received.source for received in selector.completed_receives) == ["1", "2"]
    rest = [receive(selector).payload for _ in range(4)]
    assert rest == [b"many1", b"many2", b"many3", b"many4"]


@pytest.mark.parametrize("size", [-1, 0, 2**31 - 1])
def test_a_wild_frame_size_ends_the_connection_and_takes_no_memory(selector: Selector, peer: Peer, size: int) -> None:
    connection = connect(selector, peer)
    connection.sendall(struct.pack(">i", size))
    state = lost(selector)
    assert state.kind is ChannelKind.READY
    assert isinstance(state.error, ProtocolError)
    assert "Node 1 at 127.0.0.1" in str(state.error)
    assert str(size) in str(state.error)
    assert connection.recv(1) == b""


# ---- the end of a connection -----------------------------------------------------------------------------------------


def test_what_came_before_the_end_is_handed_over_and_the_end_told_once(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    connection.sendall(frame(b"last words") + frame(b"and more"))
    connection.close()
    assert receive(selector).payload == b"last words"
    assert selector.disconnected == {}
    assert receive(selector).payload == b"and more"
    state = lost(selector)
    assert state.kind is ChannelKind.READY
    assert isinstance(state.error, DisconnectError)
    assert not selector.is_channel_ready("1")
    selector.poll(20)
    assert selector.disconnected == {}


def test_what_came_before_a_reset_that_a_send_meets_is_handed_over(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    selector.send(send_of(b"unread by the peer"))
    selector.poll(100)
    connection.sendall(frame(b"first") + frame(b"second"))
    connection.close()  # unread data makes it a reset; what it sent before is in our socket already
    time.sleep(0.05)
    selector.send(send_of(b"too late"))
    payloads = []
    for _ in range(6):
        selector.poll(100)
        payloads += [received.payload for received in selector.completed_receives]
        assert len(selector.completed_receives) <= 1
        if selector.disconnected:
            break
    assert payloads == [b"first", b"second"]
    assert selector.disconnected["1"].kind is ChannelKind.FAILED_SEND
    assert "sending failed" in str(selector.disconnected["1"].error)
    assert selector.completed_sends == []


def test_a_reset_is_told_with_its_reason(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    state = lost(selector)
    assert state.kind is ChannelKind.READY
    assert "reset" in str(state.error)


def test_an_end_within_a_frame_says_how_much_was_there(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    connection.sendall(frame(b"12345678")[:9])
    connection.close()
    assert "after 5 of a response's 8 bytes" in str(lost(selector).error)


def test_a_refused_connection_is_told_with_its_address(selector: Selector) -> None:
    peer = Peer()
    peer.close()
    selector.connect("1", peer.address, -1, -1)
    state = lost(selector)
    assert state.kind is ChannelKind.NOT_CONNECTED
    assert str(peer.address) in str(state.error)
    assert "refused" in str(state.error)
    selector.poll(10)
    assert selector.disconnected == {}


@pytest.mark.parametrize(
    "address",
    [
        pytest.param(Address(socket.AF_INET, ("255.255.255.255", 9)), id="broadcast"),
        pytest.param(Address(socket.AF_INET, ("127.0.0.1", 70_000)), id="no such port"),
        pytest.param(Address(9999, ("127.0.0.1", 9)), id="no such family"),
    ],
)
def test_a_connect_that_fails_at_once_is_told_by_the_next_poll(selector: Selector, address: Address) -> None:
    files = open_files()
    selector.connect("1", address, -1, -1)
    with pytest.raises(IllegalStateError, match="already"):
        selector.connect("1", address, -1, -1)
    started = time.monotonic()
    selector.poll(5000)
    assert time.monotonic() - started < 1
    assert selector.disconnected["1"].kind is ChannelKind.NOT_CONNECTED
    assert str(address) in str(selector.disconnected["1"].error)
    assert open_files() == files
    selector.poll(0)
    assert selector.disconnected == {}


def test_closing_is_not_told_and_a_new_connection_may_follow(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    selector.close("1")
    selector.close("1")
    assert connection.recv(1) == b""
    selector.poll(20)
    assert selector.disconnected == {}
    connect(selector, peer)


def test_a_connection_closed_with_a_send_waiting_is_left_alone(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    send = send_of(b"never")
    selector.send(send)
    selector.close("1")
    selector.poll(20)
    assert (selector.completed_sends, selector.disconnected) == ([], {})
    assert connection.recv(10) == b""


def test_others_are_served_while_one_ends_in_the_same_poll(selector: Selector, peer: Peer) -> None:
    connections = {name: connect(selector, peer, name) for name in ("1", "2", "3")}
    connections["1"].close()
    connections["2"].sendall(struct.pack(">i", -5))
    connections["3"].sendall(frame(b"fine"))
    time.sleep(0.05)
    selector.poll(1000)
    assert set(selector.disconnected) == {"1", "2"}
    assert [received.payload for received in selector.completed_receives] == [b"fine"]


# ---- idle connections ------------------------------------------------------------------------------------------------


def test_the_least_recently_used_connection_expires_first(peer: Peer) -> None:
    clock = FakeClock()
    selector = Selector(clock, connections_max_idle_ms=1000)
    try:
        first, second = connect(selector, peer, "1"), connect(selector, peer, "2")
        clock.advance(600)
        selector.send(send_of(b"x", "1"))
        selector.poll(0)
        clock.advance(400)
        selector.poll(0)
        assert list(selector.disconnected) == ["2"]
        assert selector.disconnected["2"].kind is ChannelKind.EXPIRED
        assert "connections.max.idle.ms" in str(selector.disconnected["2"].error)
        assert second.recv(1) == b""
        first.sendall(frame(b"more"))
        receive(selector)
        clock.advance(999)
        selector.poll(0)
        assert selector.disconnected == {}
        clock.advance(1)
        selector.poll(0)
        assert list(selector.disconnected) == ["1"]
    finally:
        selector.close_all()


def test_a_poll_wakes_for_the_next_expiry(peer: Peer) -> None:
    selector = Selector(SystemClock(), connections_max_idle_ms=60)
    try:
        connect(selector, peer)
        started = time.monotonic()
        selector.poll(5000)
        assert 0.02 < time.monotonic() - started < 2
        assert selector.disconnected["1"].kind is ChannelKind.EXPIRED
    finally:
        selector.close_all()


# ---- wake-up ---------------------------------------------------------------------------------------------------------


def test_a_wakeup_ends_the_poll_under_way(selector: Selector) -> None:
    timer = threading.Timer(0.1, selector.wakeup)
    timer.start()
    started = time.monotonic()
    selector.poll(10_000)
    assert time.monotonic() - started < 5
    timer.join()


def test_a_wakeup_before_the_poll_counts_for_one_poll(selector: Selector) -> None:
    for _ in range(100_000):
        selector.wakeup()
    started = time.monotonic()
    selector.poll(10_000)
    assert time.monotonic() - started < 5
    started = time.monotonic()
    selector.poll(100)
    assert time.monotonic() - started >= 0.09
    selector.wakeup()
    started = time.monotonic()
    selector.poll(10_000)
    assert time.monotonic() - started < 5


def test_a_wakeup_while_the_last_one_is_taken_leaves_the_next_one_working(selector: Selector) -> None:
    taken = selector._wakeup_reader

    class InterruptedReader:
        """Lets a wake-up in just before and just after the bytes of the last are taken."""

        def recv(self, size: int) -> bytes:
            selector.wakeup()
            data = taken.recv(size)
            selector.wakeup()
            return data

    selector.wakeup()
    selector._wakeup_reader = InterruptedReader()  # type: ignore[assignment]
    selector.poll(1000)
    selector._wakeup_reader = taken
    selector.wakeup()
    started = time.monotonic()
    selector.poll(5000)
    assert time.monotonic() - started < 3


def test_no_wakeup_is_lost_while_another_thread_rains_them(selector: Selector) -> None:
    """Each wake-up follows a change that the poll's thread has to see; a lost one shows as a poll of full length."""
    todo, seen = 3000, [0]
    published = [0]

    def publish() -> None:
        for index in range(1, todo + 1):
            published[0] = index
            selector.wakeup()
            while seen[0] < index:
                time.sleep(0)

    thread = threading.Thread(target=publish)
    thread.start()
    deadline = time.monotonic() + 30
    while seen[0] < todo:
        started = time.monotonic()
        selector.poll(20_000)
        assert time.monotonic() - started < 15, "a wake-up was lost"
        seen[0] = published[0]
        assert time.monotonic() < deadline
    thread.join(LIMIT_S)


def test_a_wakeup_after_the_end_is_harmless() -> None:
    selector = Selector(SystemClock(), -1)
    selector.close_all()
    selector.wakeup()
    selector.close_all()


# ---- misuse, options, muting -----------------------------------------------------------------------------------------


def test_misuse_is_refused(selector: Selector, peer: Peer) -> None:
    with pytest.raises(IllegalStateError, match="no connection '1'"):
        selector.send(send_of(b"x"))
    selector.connect("1", peer.address, -1, -1)
    with pytest.raises(IllegalStateError, match="already"):
        selector.connect("1", peer.address, -1, -1)
    assert not selector.is_channel_ready("1")
    poll_until(selector, lambda: selector.connected)
    selector.send(send_of(b"x"))
    with pytest.raises(IllegalStateError, match="still under way"):
        selector.send(send_of(b"y"))
    selector.close_all()
    for call in (lambda: selector.poll(0), lambda: selector.connect("2", peer.address, -1, -1)):
        with pytest.raises(IllegalStateError, match="closed"):
            call()


def test_socket_options_are_set_and_minus_one_leaves_the_systems(selector: Selector, peer: Peer) -> None:
    sizes = (socket.SO_SNDBUF, socket.SO_RCVBUF)
    with socket.create_connection(peer.address.sockaddr) as plain:
        own = [plain.getsockopt(socket.SOL_SOCKET, size) for size in sizes]
    selector.connect("1", peer.address, 20_000, 30_000)
    selector.connect("2", peer.address, -1, -1)
    with socket_of(selector, "1") as chosen, socket_of(selector, "2") as left:
        assert chosen.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert chosen.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert chosen.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 40_000  # Linux doubles what it is told
        assert chosen.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 60_000
        assert [left.getsockopt(socket.SOL_SOCKET, size) for size in sizes] == own
        assert not os.get_blocking(chosen.fileno())


def test_a_muted_connection_is_not_read_until_it_is_unmuted(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    selector.mute("1")
    selector.mute("1")
    connection.sendall(frame(b"later"))
    selector.send(send_of(b"still sent"))
    started = time.monotonic()
    selector.poll(100)
    assert len(selector.completed_sends) == 1
    selector.poll(100)
    assert time.monotonic() - started >= 0.09
    assert selector.completed_receives == []
    assert connection.recv(100) == frame(b"still sent")
    selector.unmute("1")
    selector.unmute("nobody")
    assert receive(selector).payload == b"later"


# ---- descriptors and forks -------------------------------------------------------------------------------------------


def test_every_descriptor_is_closed_at_the_end(peer: Peer) -> None:
    before = open_files()
    selector = Selector(SystemClock(), 1000)
    for connection_id in ("1", "2"):
        connect(selector, peer, connection_id)
    selector.connect("3", peer.address, -1, -1)
    assert open_files() == before + 3 + 3 + 2
    selector.close_all()
    assert open_files() == before + 2


def test_a_forked_child_that_closes_leaves_the_parents_connections_alone(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    child = os.fork()
    if child == 0:  # no assertion may leave this block: the child is not a test
        try:
            refused = 0
            for call in (lambda: selector.poll(0), lambda: selector.send(send_of(b"x"))):
                try:
                    call()
                except IllegalStateError:
                    refused += 1
            selector.wakeup()
            selector.close_all()
            os._exit(0 if refused == 2 else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    started = time.monotonic()
    selector.poll(60)
    assert time.monotonic() - started >= 0.05, "the child's wakeup reached the parent"
    connection.sendall(frame(b"still here"))
    assert receive(selector).payload == b"still here"
    selector.send(send_of(b"me too"))
    selector.poll(100)
    assert connection.recv(100) == frame(b"me too")


def test_a_forked_child_that_closes_one_connection_does_not_end_it_for_the_parent(
    selector: Selector, peer: Peer
) -> None:
    connection = connect(selector, peer)
    child = os.fork()
    if child == 0:
        try:
            selector.close("1")
            os._exit(0)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    connection.sendall(frame(b"still here"))
    assert receive(selector).payload == b"still here"
