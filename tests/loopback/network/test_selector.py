"""The selector itself: wake-ups, misuse, socket options, muting."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.peer import LIMIT_S, Peer, poll_until, send_of, socket_of

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.errors import IllegalStateError
from spark_kafka_sink.network.selector import Selector

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


@contextmanager
def selector_on(
    monkeypatch: pytest.MonkeyPatch, reader: type[socket.socket], writer: type[socket.socket]
) -> Iterator[Selector]:
    """A selector whose wake-ups go through sockets of these classes."""
    first, second = socket.socketpair()
    pair = reader(fileno=first.detach()), writer(fileno=second.detach())
    monkeypatch.setattr(socket, "socketpair", lambda: pair)
    made = Selector(SystemClock(), -1)
    monkeypatch.undo()
    yield made
    made.close_all()


def test_wakeup_during_another_keeps_later_ones_working(monkeypatch: pytest.MonkeyPatch) -> None:
    class InterruptedReader(socket.socket):
        """Sends a wake-up just before and just after the bytes of the first one are read."""

        is_first = True

        def recv(self, size: int, flags: int = 0) -> bytes:
            interrupt = selector.wakeup if self.is_first else lambda: None
            self.is_first = False
            interrupt()
            data = super().recv(size, flags)
            interrupt()
            return data

    with selector_on(monkeypatch, InterruptedReader, socket.socket) as selector:
        selector.wakeup()
        selector.poll(1000)
        selector.wakeup()
        started = time.monotonic()
        selector.poll(5000)
        assert time.monotonic() - started < 3


def test_no_wakeup_is_lost_under_many_from_another_thread(selector: Selector) -> None:
    """Each wake-up follows a change that the polling thread must see; a lost one shows as a poll of full length."""
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


def test_ctrl_c_in_a_wakeup_leaves_the_next_one_working(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the flag of a pending wake-up was set without its byte, so no later wake-up sent one."""

    class InterruptedWriter(socket.socket):
        is_interrupted = True

        def send(self, data: Any, flags: int = 0) -> int:
            if self.is_interrupted:
                self.is_interrupted = False
                raise KeyboardInterrupt
            return super().send(data, flags)

    with selector_on(monkeypatch, socket.socket, InterruptedWriter) as selector:
        with pytest.raises(KeyboardInterrupt):
            selector.wakeup()
        selector.wakeup()
        started = time.monotonic()
        selector.poll(5000)
        assert time.monotonic() - started < 3


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
            call()  # type: ignore[no-untyped-call]


def test_socket_options_are_set_and_minus_one_leaves_the_systems(selector: Selector, peer: Peer) -> None:
    sizes = (socket.SO_SNDBUF, socket.SO_RCVBUF)
    with socket.create_connection(peer.address.sockaddr) as plain:
        own = [plain.getsockopt(socket.SOL_SOCKET, size) for size in sizes]
    selector.connect("1", peer.address, 20_000, 30_000)
    selector.connect("2", peer.address, -1, -1)
    with socket_of(selector, "1") as chosen, socket_of(selector, "2") as left:
        assert chosen.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert chosen.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert chosen.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 40_000  # Linux doubles the requested size
        assert chosen.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 60_000
        assert [left.getsockopt(socket.SOL_SOCKET, size) for size in sizes] == own
        assert not os.get_blocking(chosen.fileno())
