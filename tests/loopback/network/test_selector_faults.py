"""An unexpected exception ends only its own connection."""

from __future__ import annotations

import contextlib
import logging
import selectors
from collections.abc import Iterator, Sequence
from unittest.mock import Mock

import pytest
from support.peer import Peer, connect, frame, lost, open_files, poll_until, send_of

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import DisconnectError
from spark_kafka_sink.network.channel import ChannelKind
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.network.transport import Address, PlainTransport


class FaultyTransport(PlainTransport):
    """A transport that raises at the call that `faults` names; the node's description selects the connection."""

    faults: frozenset[str] = frozenset()
    __slots__ = ("_is_chosen",)

    def __init__(self, address: Address, description: str, send_buffer: int, receive_buffer: int) -> None:
        super().__init__(address, description, send_buffer, receive_buffer)
        self._is_chosen = description.startswith("Node bad ")

    def _maybe_raise(self, call: str) -> None:
        if self._is_chosen and call in self.faults:
            raise ValueError(f"fault\nin {call}")

    def handshake(self) -> int:
        self._maybe_raise("handshake")
        return super().handshake()

    def recv_into(self, buffer: memoryview) -> int:
        self._maybe_raise("recv_into")
        return super().recv_into(buffer)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        self._maybe_raise("sendmsg")
        return super().sendmsg(buffers)

    def close(self) -> None:
        super().close()
        self._maybe_raise("close")


@pytest.fixture
def selector() -> Iterator[Selector]:
    made = Selector(SystemClock(), 540_000, make_transport=FaultyTransport)
    yield made
    made.close_all()


@pytest.mark.parametrize("call", ["recv_into", "sendmsg"])
def test_unexpected_exception_ends_only_its_own_connection(
    call: str, selector: Selector, peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bad, good = connect(selector, peer, "bad"), connect(selector, peer, "good")
    monkeypatch.setattr(FaultyTransport, "faults", frozenset({call}))
    good.sendall(frame(b"an answer"))
    if call == "recv_into":
        bad.sendall(frame(b"never read"))
    else:
        selector.send(send_of(b"never sent", "bad"))
    poll_until(selector, lambda: selector.completed_receives and selector.disconnected)  # in the same poll
    assert [received.payload for received in selector.completed_receives] == [b"an answer"]
    state = selector.disconnected["bad"]
    assert state.kind is ChannelKind.READY
    assert isinstance(state.error, DisconnectError)
    assert f"unexpected ValueError: fault?in {call}" in str(state.error)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [str(state.error)]
    assert "in _maybe_raise" in caplog.text, "the traceback at DEBUG"
    selector.poll(0)
    assert selector.disconnected == {}, "it is reported once"
    assert selector.is_channel_ready("good")
    with contextlib.suppress(ConnectionResetError):  # its bytes were not read
        assert bad.recv(100) == b"", "the socket is closed"


def test_unexpected_exception_within_a_frame_ends_only_its_connection(
    selector: Selector, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The selector sends the rest of a frame when the poller reports room in the socket."""
    bad, good = connect(selector, peer, "bad"), connect(selector, peer, "good")
    send = send_of(bytes(16 << 20), "bad")
    selector.send(send)
    selector.poll(0)
    assert send.remaining > 0
    monkeypatch.setattr(FaultyTransport, "faults", frozenset({"sendmsg"}))
    good.sendall(frame(b"an answer"))
    got: list[bytes] = []

    def bad_is_lost() -> bool:
        got.extend(bytes(received.payload) for received in selector.completed_receives)
        bad.recv(1 << 20)  # this makes room
        return "bad" in selector.disconnected

    poll_until(selector, bad_is_lost)
    assert "unexpected ValueError" in str(selector.disconnected["bad"].error)
    if not got:
        poll_until(selector, lambda: selector.completed_receives)
    assert selector.is_channel_ready("good")


def test_unexpected_exception_while_connecting_ends_the_attempt(
    selector: Selector, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyTransport, "faults", frozenset({"handshake"}))
    selector.connect("bad", peer.address)
    assert lost(selector, "bad").kind is ChannelKind.AUTHENTICATE
    connect(selector, peer, "good")


def test_exception_while_draining_a_failed_send_ends_the_connection(
    selector: Selector, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = connect(selector, peer, "bad")
    selector.send(send_of(b"unread by the peer", "bad"))
    selector.poll(100)
    bad.close()  # with unread data: a reset
    poll_until(selector, lambda: selector.disconnected)
    bad = connect(selector, peer, "bad")
    monkeypatch.setattr(FaultyTransport, "faults", frozenset({"recv_into"}))
    monkeypatch.setattr(FaultyTransport, "sendmsg", Mock(side_effect=ConnectionResetError))
    selector.send(send_of(b"not sent", "bad"))
    selector.poll(0)
    assert selector.disconnected["bad"].kind is ChannelKind.FAILED_SEND


def test_exception_while_a_socket_is_closed_leaves_no_channel(
    selector: Selector, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect(selector, peer, "bad")
    monkeypatch.setattr(FaultyTransport, "faults", frozenset({"close"}))
    connection.close()
    assert lost(selector, "bad").kind is ChannelKind.READY
    monkeypatch.setattr(FaultyTransport, "faults", frozenset())
    connect(selector, peer, "bad")


def test_exception_of_the_poller_keeps_the_report_of_an_end(
    selector: Selector, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the report the node would count as connected, and the client would never connect again."""
    before, unregister = open_files(), selectors.DefaultSelector.unregister
    connection = connect(selector, peer, "bad")

    def unregister_and_raise(poller: selectors.DefaultSelector, transport: PlainTransport) -> None:
        unregister(poller, transport)
        raise ValueError("fault in unregister")

    monkeypatch.setattr(selectors.DefaultSelector, "unregister", unregister_and_raise)
    connection.close()
    assert lost(selector, "bad").kind is ChannelKind.READY
    monkeypatch.undo()
    assert open_files() == before, "its socket is closed"
    assert selector.connection_count == 0
    connect(selector, peer, "bad")


class FaultyAuthenticator:
    """An authenticator that fails during a login, with a secret in the text."""

    is_complete = False
    secret = "password=hunter2"

    def begin(self) -> None: ...

    def is_due(self, _: int) -> bool:
        return False

    def advance(self, _: int) -> None:
        raise RuntimeError(self.secret)


def test_exception_in_a_login_ends_it_without_its_text(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    selector = Selector(SystemClock(), 540_000, make_authenticator=lambda *_: FaultyAuthenticator())  # type: ignore[arg-type]
    selector.connect("1", peer.address)
    state = lost(selector)
    assert state.kind is ChannelKind.AUTHENTICATE
    assert "unexpected RuntimeError" in str(state.error)
    assert "hunter2" not in caplog.text + str(state.error)
    selector.close_all()
