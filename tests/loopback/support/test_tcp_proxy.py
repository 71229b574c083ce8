"""The proxy changes connections as the test asks, and never their bytes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.tcp_proxy import TcpProxy, Way


class Echo:
    """A server that sends back the received bytes, and keeps them."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=[connection])
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10)
            try:
                while data := connection.recv(65_536):
                    self.received += data
                    connection.sendall(data)
            except OSError:
                pass
            self.ended.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(15)
            assert not thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[TcpProxy]:
    with TcpProxy(echo.address) as running:
        yield running


def connect(proxy: TcpProxy, timeout_s: float = 5.0) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return bytes(data)


def until(condition: object, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    "conditions",
    [{}, {"slice_bytes": 1}, {"slice_bytes": 7, "delay_s": 0.01}, {"bytes_per_s": 200_000.0}],
    ids=["plain", "bytes", "slices", "narrow"],
)
def test_bytes_and_end_of_a_connection_pass_unchanged(proxy: TcpProxy, conditions: dict[str, float]) -> None:
    proxy.shape(**conditions)  # type: ignore[arg-type]
    sent = os.urandom(20_000)
    with connect(proxy) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert receive(client, len(sent)) == sent
        assert client.recv(1) == b""
    assert proxy.passed == {Way.UP: len(sent), Way.DOWN: len(sent)}


def test_delay_and_bandwidth_make_it_slow(proxy: TcpProxy) -> None:
    with connect(proxy) as client:
        proxy.shape(delay_s=0.1)
        began = time.monotonic()
        client.sendall(b"there and back")
        assert receive(client, 14) == b"there and back"
        assert time.monotonic() - began >= 0.2
        proxy.heal()
        proxy.shape(Way.UP, bytes_per_s=50_000.0)
        began = time.monotonic()
        client.sendall(bytes(20_000))
        assert receive(client, 20_000) == bytes(20_000)
        assert time.monotonic() - began >= 0.3


def test_low_bandwidth_fills_the_senders_buffers(echo: Echo) -> None:
    with TcpProxy(echo.address, receive_buffer_bytes=4096) as proxy, connect(proxy, 0.3) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        proxy.shape(Way.UP, bytes_per_s=1.0)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(1_000_000))
        assert proxy.passed[Way.UP] < 5


@pytest.mark.parametrize("reset", [False, True])
def test_cut_ends_both_sides_and_new_connections_pass(proxy: TcpProxy, echo: Echo, reset: bool) -> None:
    with connect(proxy) as client:
        client.sendall(b"x")
        assert receive(client, 1) == b"x"
        proxy.cut(reset=reset)
        if reset:
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        else:
            assert client.recv(1) == b""
    assert echo.ended.wait(5)
    with connect(proxy) as client:
        client.sendall(b"again")
        assert receive(client, 5) == b"again"


def test_connection_ends_after_the_given_bytes(proxy: TcpProxy) -> None:
    with connect(proxy) as client:
        proxy.cut_after(1_000, Way.DOWN, reset=False)
        client.sendall(bytes(5_000))
        assert receive(client, 5_000) == bytes(1_000)
    with connect(proxy) as client:
        client.sendall(bytes(5_000))
        assert receive(client, 5_000) == bytes(5_000)


def test_refused_connections_fail_until_the_proxy_heals(proxy: TcpProxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.heal()
    connect(proxy).close()


def test_only_existing_half_open_connections_are_silent(proxy: TcpProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"x")
        assert receive(client, 1) == b"x"
        proxy.half_open()
        client.settimeout(0.3)
        client.sendall(b"lost")
        with pytest.raises(TimeoutError):
            client.recv(1)
        with connect(proxy) as other:
            other.sendall(b"kept")
            assert receive(other, 4) == b"kept"
        proxy.heal()
        client.settimeout(5)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert bytes(echo.received) == b"xkept"


def test_black_hole_answers_no_connection_attempt(proxy: TcpProxy) -> None:
    proxy.black_hole()
    with pytest.raises(TimeoutError):
        connect(proxy, 0.4)
    proxy.heal()
    with connect(proxy) as client:
        client.sendall(b"x")
        assert receive(client, 1) == b"x"


def test_held_bytes_arrive_after_their_sender_has_closed(proxy: TcpProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"before ")
        until(lambda: bytes(echo.received) == b"before ")
        proxy.hold(Way.UP)
        client.sendall(b"and after")
    time.sleep(0.05)
    assert bytes(echo.received) == b"before "
    proxy.heal()
    until(lambda: bytes(echo.received) == b"before and after")
    assert echo.ended.wait(5)


def test_parked_connection_waits_and_new_ones_do_not(proxy: TcpProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"1")
        assert receive(client, 1) == b"1"
        proxy.park()
        client.sendall(b"3")
    with connect(proxy) as client:
        client.sendall(b"2")
        assert receive(client, 1) == b"2"
        proxy.heal()
        until(lambda: bytes(echo.received) == b"123")
        client.sendall(b"4")
        assert receive(client, 1) == b"4"


def test_no_socket_or_thread_remains(echo: Echo) -> None:
    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = state()
    with TcpProxy(echo.address) as proxy:
        clients = [connect(proxy) for _ in range(3)]
        until(lambda: proxy.open_connections == 3)
        proxy.half_open()
        clients.append(connect(proxy))
        proxy.black_hole()
    for client in clients:
        client.close()
    until(lambda: state() <= before)
