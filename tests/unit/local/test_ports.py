"""Reserved ports."""

from __future__ import annotations

import socket
import sys

import pytest

from spark_kafka_sink.local.ports import HOST, ReservedPort


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a server listen beside a reservation")
def test_a_server_can_listen_on_a_reserved_port_again_and_again_and_nobody_is_given_it_meanwhile() -> None:
    port = ReservedPort()
    for _ in range(2):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does
            server.bind((HOST, port.number))
            server.listen()
            socket.create_connection((HOST, port.number), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port.number), timeout=5)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((HOST, port.number))
    port.release()
    with socket.socket() as stranger:
        stranger.bind((HOST, port.number))


def test_ports_reserved_at_once_differ() -> None:
    ports = [ReservedPort() for _ in range(50)]
    assert len({port.number for port in ports}) == 50
    for port in ports:
        port.release()
