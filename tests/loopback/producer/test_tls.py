"""A producer whose brokers do not complete the TLS handshake, over real sockets."""

from __future__ import annotations

import threading
import time

import pytest
from support.certificates import Authority
from support.peer import Peer
from support.tcp_proxy import TcpProxy
from support.tls_server import TlsServer, server_context

from spark_kafka_sink import KafkaProducer
from spark_kafka_sink.common.errors import KafkaTimeoutError, SslAuthenticationError

AUTHORITY = Authority()


def producer_of(address: str, **more: object) -> KafkaProducer:
    return KafkaProducer(AUTHORITY.settings(address, **more))


def test_unanswered_handshake_times_out_and_is_retried() -> None:
    peer = Peer()
    accepting = threading.Thread(target=lambda: [peer.accept() for _ in range(2)])
    accepting.start()
    limits = {"socket_connection_setup_timeout_ms": 200, "socket_connection_setup_timeout_max_ms": 200}
    host, port = peer.listener.getsockname()
    with producer_of(f"{host}:{port}", max_block_ms=2_000, **limits) as producer:
        with pytest.raises(
            KafkaTimeoutError, match="is connected, but the TLS handshake did not end within"
        ) as failure:
            producer.send("t", b"value").result(10)
        assert "max.block.ms=2000" in str(failure.value)
    accepting.join(10)
    assert len(peer.accepted) == 2
    peer.close()


def test_bad_certificate_is_reported_at_once_without_reconnects() -> None:
    with TlsServer(server_context(Authority("stranger").issue())) as server, TcpProxy(server.address) as proxy:
        with producer_of(proxy.address, max_block_ms=20_000) as producer:
            began = time.monotonic()
            with pytest.raises(SslAuthenticationError, match="of an unknown authority"):
                producer.send("t", b"value").result(10)
            assert time.monotonic() - began < 5
            attempts = proxy.accepted
            time.sleep(0.5)
            assert proxy.accepted - attempts < 8
        assert server.received == b""
