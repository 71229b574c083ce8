"""The counting proxy, between a client and a server that answers each frame with its content twice."""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("proxy")


@pytest.fixture
def proxy(module: ModuleType) -> Iterator[Any]:
    """A proxy before a server of one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            while content := receive(connection):
                connection.sendall(frame(content * 2))

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    with module.CountingProxy() as made:
        made.upstream = f"127.0.0.1:{listener.getsockname()[1]}"
        yield made
    listener.close()
    server.join(10)
    assert not server.is_alive()


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def request(api_key: int, size: int) -> bytes:
    return api_key.to_bytes(2, "big") + bytes(range(size - 2))


def receive(connection: socket.socket) -> bytes:
    """The content of the next frame; nothing at the end."""
    with connection.makefile("rb", buffering=0) as stream:
        parts = [stream.read(1) for _ in range(4)]
        size = int.from_bytes(b"".join(part or b"" for part in parts), "big")
        content = b""
        while len(content) < size:
            content += stream.read(size - len(content)) or b""
        return content


def connect(proxy: Any) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_requests_and_bytes_are_counted_by_api(proxy: Any) -> None:
    with connect(proxy) as client:
        client.sendall(frame(request(0, 30)) + frame(request(26, 10)) + frame(request(0, 50)))
        assert [len(receive(client)) for _ in range(3)] == [60, 20, 100]
    assert proxy.counts() == {"Produce": (2, 88, 168), "EndTxn": (1, 14, 24)}


def test_frames_in_pieces_pass_unchanged(proxy: Any) -> None:
    asked = request(65, 100)
    with connect(proxy) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(len(frame(asked))):
            client.sendall(frame(asked)[number : number + 1])
        assert receive(client) == asked * 2
    assert proxy.counts() == {"DescribeTransactions": (1, 104, 204)}


def test_unknown_api_is_counted_by_its_number(proxy: Any) -> None:
    with connect(proxy) as client:
        client.sendall(frame(request(8, 12)))
        receive(client)
    assert proxy.counts() == {"api 8": (1, 16, 28)}


def test_end_of_a_connection_is_passed_on(proxy: Any) -> None:
    with connect(proxy) as client:
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


def test_client_is_disconnected_if_the_broker_is_down(module: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    with module.CountingProxy() as proxy:
        proxy.upstream = address
        for _ in range(2):  # the proxy continues
            with connect(proxy) as client:
                assert client.recv(1) == b""
        assert proxy.counts() == {}
