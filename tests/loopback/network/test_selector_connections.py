"""Connections of the selector: how they end, expire, and survive a fork."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from support.fake_clock import FakeClock
from support.peer import Peer, connect, frame, lost, open_files, poll_until, receive, send_of

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import DisconnectError, IllegalStateError, SaslAuthenticationError
from spark_kafka_sink.network.channel import ChannelKind, NetworkSend
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.network.transport import Address, PlainTransport

# ---- the end of a connection -----------------------------------------------------------------------------------------


def test_each_poll_reports_only_new_results(selector: Selector, peer: Peer) -> None:
    selector.connect("1", peer.address, -1, -1)
    poll_until(selector, lambda: selector.connected)
    selector.send(send_of(b"question"))
    selector.poll(100)
    assert (len(selector.completed_sends), selector.connected) == (1, [])
    peer.accept().sendall(frame(b"answer"))
    assert receive(selector).payload == b"answer"
    selector.poll(0)
    assert (selector.completed_sends, selector.completed_receives) == ([], [])


def test_frames_before_the_end_are_returned_and_end_reported_once(selector: Selector, peer: Peer) -> None:
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


def test_frames_before_a_reset_are_read(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    selector.send(send_of(b"unread by the peer"))
    selector.poll(100)
    connection.sendall(frame(b"first") + frame(b"second"))
    connection.close()  # unread data makes it a reset; its earlier bytes are in our socket already
    time.sleep(0.05)
    selector.send(send_of(b"too late"))
    payloads = []
    started = time.monotonic()
    for _ in range(6):
        selector.poll(10_000)
        payloads += [received.payload for received in selector.completed_receives]
        assert len(selector.completed_receives) <= 1
        if selector.disconnected:
            break
    assert time.monotonic() - started < 9, "a poll waited with something to hand over"
    assert payloads == [b"first", b"second"]
    assert selector.disconnected["1"].kind is ChannelKind.FAILED_SEND
    assert "sending failed" in str(selector.disconnected["1"].error)
    assert selector.completed_sends == []


def test_connection_closed_while_draining_is_not_read_again(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    selector.send(send_of(b"unread by the peer"))
    selector.poll(100)
    connection.sendall(frame(b"first") + frame(b"second"))
    connection.close()
    time.sleep(0.05)
    selector.send(send_of(b"too late"))
    assert receive(selector).payload == b"first"
    selector.close("1")
    selector.poll(20)
    assert (selector.completed_receives, selector.disconnected) == ([], {})


class Unsendable(PlainTransport):
    """A transport whose sends fail for a reason that its socket does not know, as with TLS."""

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        raise OSError("nothing goes here")


def test_failed_send_ends_a_connection_with_a_silent_peer(peer: Peer) -> None:
    """If it stayed open, it would be neither ready nor lost forever."""
    selector = Selector(SystemClock(), -1, make_transport=Unsendable)
    try:
        connection = connect(selector, peer)
        selector.send(send_of(b"x"))
        started = time.monotonic()
        selector.poll(5_000)
        assert time.monotonic() - started < 3, "the poll waited with an end to report"
        state = selector.disconnected["1"]
        assert state.kind is ChannelKind.FAILED_SEND
        assert "nothing goes here" in str(state.error)
        assert connection.recv(1) == b""
    finally:
        selector.close_all()


def selector_with_login(failing_step: str) -> Selector:
    """A selector whose login fails at that step, or never ends."""

    class Login:
        is_complete = False

        def __getattr__(self, called: str) -> Callable[..., None]:
            def call(*_: object) -> None:
                if called == failing_step:
                    raise SaslAuthenticationError("not with this one")

            return call

    def make(*_: object) -> Any:
        return Login()

    return Selector(SystemClock(), -1, make_authenticator=make)


@pytest.mark.parametrize("step", ["begin", "advance", "receive"])
def test_a_login_that_fails_at_any_step_ends_its_connection(peer: Peer, step: str) -> None:
    selector = selector_with_login(step)
    try:
        selector.connect("1", peer.address)
        connection = peer.accept()
        connection.sendall(frame(b"challenge"))
        state = lost(selector)
        assert state.kind is ChannelKind.AUTHENTICATION_FAILED
        assert "not with this one" in str(state.error)
        assert selector.completed_receives == []
        selector.poll(0)
        assert selector.disconnected == {}
    finally:
        selector.close_all()


def test_no_send_is_accepted_before_the_login(peer: Peer) -> None:
    selector = selector_with_login("none")
    try:
        connect(selector, peer)
        with pytest.raises(IllegalStateError, match="no connection '1' to send on"):
            selector.send(send_of(b"x"))
    finally:
        selector.close_all()


def test_reset_is_reported_with_its_reason(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    state = lost(selector)
    assert state.kind is ChannelKind.READY
    assert "reset" in str(state.error)


def test_end_within_a_frame_reports_the_received_bytes(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    connection.sendall(frame(b"12345678")[:9])
    connection.close()
    assert "after 5 of a response's 8 bytes" in str(lost(selector).error)


def test_refused_connection_is_reported_with_its_address(selector: Selector) -> None:
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
def test_immediate_connect_failure_is_reported_by_the_next_poll(selector: Selector, address: Address) -> None:
    files = open_files()
    selector.connect("1", address, -1, -1)
    with pytest.raises(IllegalStateError, match="already"):
        selector.connect("1", address, -1, -1)
    started = time.monotonic()
    selector.poll(5000)
    assert time.monotonic() - started < 4
    assert selector.disconnected["1"].kind is ChannelKind.NOT_CONNECTED
    assert str(address) in str(selector.disconnected["1"].error)
    assert open_files() == files
    selector.poll(0)
    assert selector.disconnected == {}


def test_close_is_not_reported_and_a_new_connection_may_follow(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    selector.close("1")
    selector.close("1")
    assert connection.recv(1) == b""
    selector.poll(20)
    assert selector.disconnected == {}
    connect(selector, peer)


def test_connection_closed_with_a_pending_send_is_ignored(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    send = send_of(b"never")
    selector.send(send)
    selector.close("1")
    selector.poll(20)
    assert (selector.completed_sends, selector.disconnected) == ([], {})
    assert connection.recv(10) == b""


def test_poll_serves_others_while_one_connection_ends(selector: Selector, peer: Peer) -> None:
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
        started = time.monotonic()  # before the connection, which may take a busy machine longer than the limit
        connect(selector, peer)
        selector.poll(5000)
        assert 0.05 < time.monotonic() - started < 4
        assert selector.disconnected["1"].kind is ChannelKind.EXPIRED
    finally:
        selector.close_all()


# ---- descriptors and forks -------------------------------------------------------------------------------------------


def test_close_closes_every_descriptor(peer: Peer) -> None:
    before = open_files()
    selector = Selector(SystemClock(), 1000)
    for connection_id in ("1", "2"):
        connect(selector, peer, connection_id)
    selector.connect("3", peer.address, -1, -1)
    assert open_files() == before + 3 + 3 + 2
    selector.close_all()
    assert open_files() == before + 2


def test_close_in_a_forked_child_keeps_the_parents_connections(selector: Selector, peer: Peer) -> None:
    connection = connect(selector, peer)
    child = os.fork()
    if child == 0:  # no exception may leave this block: the child is not a test
        try:
            refused = 0
            for call in (lambda: selector.poll(0), lambda: selector.send(send_of(b"x"))):
                try:
                    call()  # type: ignore[no-untyped-call]
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


def test_close_of_one_connection_in_a_child_keeps_the_parents(selector: Selector, peer: Peer) -> None:
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


def test_closed_failed_attempt_is_not_reported(selector: Selector) -> None:
    nowhere = Address(socket.AF_INET, ("127.0.0.1", 65_536))
    selector.connect("1", nowhere)
    selector.close("1")
    selector.connect("2", nowhere)
    selector.poll(0)
    assert list(selector.disconnected) == ["2"]


# ---- ends that meet something else in the same poll ------------------------------------------------------------------


def test_connection_that_cannot_be_registered_leaves_no_socket(selector: Selector, peer: Peer) -> None:
    before = open_files()
    full = Mock(side_effect=OSError(28, "No space left on device"))  # no epoll watches are left
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selectors.DefaultSelector, "register", full)
        with pytest.raises(OSError, match="No space left"):
            selector.connect("1", peer.address)
    assert (selector.connection_count, open_files()) == (0, before)
    connect(selector, peer)


def test_connection_made_and_lost_in_one_poll_is_reported_lost(peer: Peer) -> None:
    class Refused:
        is_complete = False

        def begin(self) -> None:
            raise SaslAuthenticationError("no")

    selector = Selector(SystemClock(), -1, make_authenticator=lambda *_: Refused())  # type: ignore[arg-type]
    selector.connect("1", peer.address)
    poll_until(selector, lambda: selector.connected or selector.disconnected)
    assert selector.connected == []
    assert list(selector.disconnected) == ["1"]
    selector.close_all()


def test_idle_connection_expires_in_a_poll_with_nothing_ready(peer: Peer) -> None:
    clock = FakeClock()
    selector = Selector(clock, connections_max_idle_ms=1_000)
    selector.connect("1", peer.address)
    poll_until(selector, lambda: selector.connected)
    clock.advance(1_001)
    selector.poll(0)
    assert selector.disconnected["1"].kind is ChannelKind.EXPIRED
    assert not selector.is_channel_ready("1")
    selector.close_all()


@pytest.mark.parametrize("is_closed_by_peer", [False, True])
def test_frames_before_the_expiry_are_returned_first(peer: Peer, is_closed_by_peer: bool) -> None:
    clock = FakeClock()
    selector = Selector(clock, connections_max_idle_ms=1_000)
    selector.connect("1", peer.address)
    poll_until(selector, lambda: selector.connected)
    connection = peer.accept()
    connection.sendall(b"".join(frame(b"%04d" % number) for number in range(5)))
    if is_closed_by_peer:
        connection.close()
    payloads = []
    for _ in range(5):
        clock.advance(1_001)  # longer than its idle limit, before each poll
        selector.poll(0)
        payloads += [bytes(received.payload) for received in selector.completed_receives]
        assert selector.disconnected == {}
    assert payloads == [b"%04d" % number for number in range(5)]
    clock.advance(1_001)
    selector.poll(0)
    assert selector.disconnected["1"].kind is (ChannelKind.READY if is_closed_by_peer else ChannelKind.EXPIRED)
    selector.close_all()


def test_send_without_bytes_completes(selector: Selector, peer: Peer) -> None:
    connect(selector, peer)
    empty = NetworkSend("1", [])
    selector.send(empty)
    selector.poll(0)
    assert selector.completed_sends == [empty]
