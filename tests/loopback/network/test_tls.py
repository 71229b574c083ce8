"""TLS over real sockets: accepted and refused peers, failing handshakes, and bytes that arrive unchanged."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import select
import socket
import ssl
import subprocess
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority, Identity
from support.peer import Peer, frame, lost, open_files, poll_until, receive, send_of, socket_of
from support.tcp_proxy import TcpProxy, Way
from support.tls_server import TlsServer, server_context

from spark_kafka_sink.common.clock import SystemClock
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import DisconnectError, KafkaError, ProtocolError, SslAuthenticationError
from spark_kafka_sink.network.channel import ChannelKind, NetworkSend
from spark_kafka_sink.network.selector import Selector
from spark_kafka_sink.network.tls import transport_factory
from spark_kafka_sink.network.transport import READ, WRITE, Address, resolve

AUTHORITY = Authority()
BROKER = AUTHORITY.issue()
PASSWORD = "hunter2"


def config(**settings: Any) -> ProducerConfig:
    """TLS settings that trust AUTHORITY; the keywords have underscores for dots."""
    return ProducerConfig.from_mapping(AUTHORITY.settings(**settings))


def client_certificate(identity: Identity) -> dict[str, str]:
    return {
        "ssl_keystore_certificate_chain": identity.certificate_pem,
        "ssl_keystore_key": identity.key_pem(PASSWORD),
        "ssl_key_password": PASSWORD,
    }


@contextlib.contextmanager
def selector_of(settings: ProducerConfig | None = None, **options: Any) -> Iterator[Selector]:
    made = Selector(SystemClock(), 540_000, make_transport=transport_factory(settings or config()), **options)
    try:
        yield made
    finally:
        made.close_all()


def begin(selector: Selector, port: int, host: str = "127.0.0.1") -> None:
    selector.connect("1", resolve(host, port)[-1])


def connect(selector: Selector, port: int, host: str = "127.0.0.1") -> None:
    begin(selector, port, host)
    poll_until(selector, lambda: selector.connected or selector.disconnected)
    assert selector.disconnected == {}
    assert selector.is_channel_ready("1")


def echo(selector: Selector, payload: bytes) -> bytes:
    selector.send(send_of(payload))
    return bytes(receive(selector).payload)


def refusal(selector: Selector, port: int, host: str = "127.0.0.1") -> str:
    """The text of the final error that ends the connection before it is ready."""
    begin(selector, port, host)
    state = lost(selector)
    assert state.kind is ChannelKind.AUTHENTICATION_FAILED
    assert isinstance(state.error, SslAuthenticationError)
    assert "Node 1 at 127.0.0.1:" in str(state.error)
    assert PASSWORD not in str(state.error)
    return str(state.error)


def test_handshakes_are_counted_by_their_outcome() -> None:
    with TlsServer(server_context(BROKER)) as server, selector_of() as selector:
        connect(selector, server.port)
        counted = selector.counts.read(SystemClock().now_ms()).total
        assert (counted.connections, counted.authentications, counted.failed_authentications) == (1, 1, 0)
    with TlsServer(server_context(Authority("stranger").issue())) as server, selector_of() as selector:
        refusal(selector, server.port)
        counted = selector.counts.read(SystemClock().now_ms()).total
        assert (counted.connections, counted.authentications, counted.failed_authentications) == (1, 0, 1)


# ---- accepted and refused peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
@pytest.mark.parametrize(
    ("settings", "version"),
    [
        ({}, "TLSv1.3"),
        ({"ssl_enabled_protocols": "TLSv1.2"}, "TLSv1.2"),
        ({"ssl_protocol": "TLSv1.2"}, "TLSv1.2"),
        ({"ssl_cipher_suites": "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"}, "TLSv1.2"),
    ],
)
def test_newest_common_tls_version_is_used(host: str, settings: dict[str, str], version: str) -> None:
    with TlsServer(server_context(BROKER)) as server, selector_of(config(**settings)) as selector:
        connect(selector, server.port, host)
        assert echo(selector, b"payload") == b"payload"
        assert [each.version() for each in server.connections] == [version]


def test_trailing_dot_of_a_name_is_ignored_by_tls() -> None:
    with TlsServer(server_context(BROKER)) as server, selector_of(config()) as selector:
        selector.connect("1", Address(socket.AF_INET, ("127.0.0.1", server.port), "localhost."))
        poll_until(selector, lambda: selector.connected or selector.disconnected)
        assert selector.disconnected == {}


@pytest.mark.parametrize(
    ("identity", "host"),
    [
        pytest.param(AUTHORITY.issue("other.example"), "localhost", id="another name"),
        pytest.param(AUTHORITY.issue("other.example"), "127.0.0.1", id="another name, by address"),
        pytest.param(AUTHORITY.issue("localhost"), "127.0.0.1", id="a name, and we connect by address"),
        pytest.param(AUTHORITY.issue("127.0.0.1"), "localhost", id="an address, and we connect by name"),
        pytest.param(AUTHORITY.issue("", common_name="localhost"), "localhost", id="the common name alone"),
        pytest.param(AUTHORITY.issue("127.0.0.2"), "127.0.0.1", id="another address"),
    ],
)
def test_a_certificate_for_another_host_is_refused(identity: Identity, host: str) -> None:
    with TlsServer(server_context(identity)) as server, selector_of() as selector:
        assert f"its certificate is not for {host}." in refusal(selector, server.port, host)
        assert server.received == b""


def test_unchecked_host_names_are_configured_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        unchecked = config(ssl_endpoint_identification_algorithm="")
        with TlsServer(server_context(AUTHORITY.issue("other.example"))) as server, selector_of(unchecked) as selector:
            connect(selector, server.port)
            assert echo(selector, b"ping") == b"ping"
        with TlsServer(server_context(Authority().issue())) as server, selector_of(unchecked) as selector:
            assert "of an unknown authority" in refusal(selector, server.port)
    warned = [record for record in caplog.records if "ssl.endpoint.identification.algorithm" in record.getMessage()]
    assert len(warned) == 2, "once a client"


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        (AUTHORITY.issue_expired(), "has expired"),
        (AUTHORITY.issue_not_yet_valid(), "not valid yet"),
        (Authority("stranger").issue(), "of an unknown authority"),
        (Authority().issue(), "of an unknown authority"),
    ],
    ids=["expired", "not yet valid", "stranger", "stranger of the same name"],
)
@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_invalid_certificate_is_refused(identity: Identity, text: str, version: str) -> None:
    settings = config(ssl_enabled_protocols=version)
    with TlsServer(server_context(identity)) as server, selector_of(settings) as selector:
        assert text in refusal(selector, server.port)
        assert server.received == b""


def test_expired_authority_is_not_reported_as_the_brokers_certificate() -> None:
    """The Java client would not notice an expired authority."""
    authority = Authority.expired()
    settings = config(ssl_truststore_certificates=authority.certificate_pem)
    with TlsServer(server_context(authority.issue())) as server, selector_of(settings) as selector:
        assert "its certificate, or that of an authority above it, has expired" in refusal(selector, server.port)


def test_without_a_truststore_the_systems_authorities_count() -> None:
    settings = config(ssl_truststore_certificates=None)
    with TlsServer(server_context(BROKER)) as server, selector_of(settings) as selector:
        assert "ssl.truststore.location or ssl.truststore.certificates" in refusal(selector, server.port)


def test_peer_with_only_tls_1_1_is_refused() -> None:
    context = server_context(BROKER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with TlsServer(context) as server, selector_of() as selector:
        assert "no TLS version or cipher suite in common" in refusal(selector, server.port)


def test_no_common_cipher_suite_is_refused() -> None:
    context = server_context(BROKER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-ECDSA-AES256-GCM-SHA384")
    settings = config(ssl_cipher_suites="TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256")
    with TlsServer(context) as server, selector_of(settings) as selector:
        assert "no TLS version or cipher suite in common" in refusal(selector, server.port)


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ".example"])
def test_host_name_that_fits_no_certificate_is_refused(host: str) -> None:
    with TlsServer(server_context(BROKER)) as server, selector_of() as selector:
        selector.connect("1", resolve("127.0.0.1", server.port)[0]._replace(host=host))
        state = lost(selector)
        assert state.kind is ChannelKind.AUTHENTICATION_FAILED
        assert host in str(state.error)


# ---- client certificates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_client_certificate_with_an_encrypted_key_is_accepted(version: str) -> None:
    settings = config(ssl_enabled_protocols=version, **client_certificate(AUTHORITY.issue(common_name="me")))
    with TlsServer(server_context(BROKER, AUTHORITY)) as server, selector_of(settings) as selector:
        connect(selector, server.port)
        assert echo(selector, b"ping") == b"ping"
        certificate = server.connections[0].getpeercert()
        assert certificate is not None
        assert (("commonName", "me"),) in certificate["subject"]


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
@pytest.mark.parametrize(
    "ours",
    [{}, client_certificate(Authority("stranger").issue()), client_certificate(AUTHORITY.issue_expired())],
    ids=["none", "of a stranger", "expired"],
)
def test_refused_client_certificate_names_the_settings(ours: dict[str, str], version: str) -> None:
    settings = config(ssl_enabled_protocols=version, **ours)
    with TlsServer(server_context(BROKER, AUTHORITY)) as server, selector_of(settings) as selector:
        begin(selector, server.port)
        poll_until(selector, lambda: selector.connected or selector.disconnected)
        if not selector.disconnected:  # TLS 1.3: the peer checks it after our handshake has ended
            selector.send(send_of(b"x" * 100_000))
            state = lost(selector)
        else:
            state = selector.disconnected["1"]
        assert state.kind is ChannelKind.AUTHENTICATION_FAILED
        assert isinstance(state.error, SslAuthenticationError)
        if ours or version == "TLSv1.3":  # otherwise OpenSSL answers with a general alert
            assert "ssl.keystore.location" in str(state.error)
        assert PASSWORD not in str(state.error)
        assert server.received == b""


# ---- peers that speak something else ---------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [frame(b"\0\0\0\0\0\x23"), b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 100])
def test_a_peer_that_answers_without_tls_is_refused(peer: Peer, answer: bytes) -> None:
    with selector_of() as selector:
        begin(selector, peer.listener.getsockname()[1])
        poll_until(selector, lambda: True)
        connection = peer.accept()
        connection.sendall(answer)
        state = lost(selector)
        assert state.kind is ChannelKind.AUTHENTICATION_FAILED
        assert "does not speak TLS" in str(state.error)
        assert "security.protocol=PLAINTEXT" in str(state.error)


@pytest.mark.parametrize("reset", [False, True])
def test_peer_that_closes_at_once_hints_at_a_plaintext_listener(peer: Peer, reset: bool) -> None:
    with selector_of() as selector:
        begin(selector, peer.listener.getsockname()[1])
        poll_until(selector, lambda: True)
        connection = peer.accept()
        if not reset:
            connection.recv(100_000)
        connection.close()  # with the hello unread, the close is a reset
        state = lost(selector)
        assert state.kind is ChannelKind.AUTHENTICATE
        assert isinstance(state.error, DisconnectError)
        assert "security.protocol=PLAINTEXT" in str(state.error)


def test_refused_connection_is_not_reported_as_a_failed_handshake() -> None:
    with socket.socket() as unused, selector_of() as selector:
        unused.bind(("127.0.0.1", 0))
        begin(selector, unused.getsockname()[1])
        state = lost(selector)
        assert state.kind is ChannelKind.NOT_CONNECTED
        assert str(state.error).endswith("cannot be connected to: Connection refused.")


def test_tls_listener_reached_without_tls_names_the_setting(selector: Selector, peer: Peer) -> None:
    begin(selector, peer.listener.getsockname()[1])
    poll_until(selector, lambda: selector.connected)
    peer.accept().sendall(b"\x15\x03\x03\x00\x02\x02\x50")  # the alert "internal error"
    state = lost(selector)
    assert isinstance(state.error, ProtocolError)
    assert "It speaks TLS: set security.protocol=SSL" in str(state.error)


# ---- handshakes that go wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("reset", [False, True])
def test_interrupted_handshake_is_retriable(way: Way, reset: bool) -> None:
    with TlsServer(server_context(BROKER, AUTHORITY)) as server, TcpProxy(server.address) as proxy:
        port = int(proxy.address.rpartition(":")[2])
        settings = config(ssl_enabled_protocols="TLSv1.2", **client_certificate(AUTHORITY.issue()))
        for count in (1, 5, 60, 300, 700):
            proxy.cut_after(count, way, reset=reset)
            with selector_of(settings) as selector:
                begin(selector, port)
                state = lost(selector)
                assert state.kind is ChannelKind.AUTHENTICATE, count
                assert isinstance(state.error, DisconnectError), count
                assert selector.connected == []
        proxy.heal()
        with selector_of(settings) as selector:
            connect(selector, port)
            assert echo(selector, b"ping") == b"ping"


def test_handshake_succeeds_byte_by_byte() -> None:
    with TlsServer(server_context(BROKER)) as server, TcpProxy(server.address) as proxy, selector_of() as selector:
        proxy.shape(slice_bytes=1)
        connect(selector, int(proxy.address.rpartition(":")[2]))
        assert echo(selector, b"payload") == b"payload"


def test_handshake_waits_for_room_in_a_full_socket() -> None:
    ours = client_certificate(AUTHORITY.issue())
    ours["ssl_keystore_certificate_chain"] += AUTHORITY.certificate_pem * 150  # more than is in flight at once
    with (
        TlsServer(server_context(BROKER, AUTHORITY)) as server,
        TcpProxy(server.address, receive_buffer_bytes=2_048) as proxy,
    ):
        proxy.hold(Way.DOWN)
        proxy.shape(Way.UP, bytes_per_s=400_000)
        address = resolve("127.0.0.1", int(proxy.address.rpartition(":")[2]))[0]
        transport = transport_factory(config(**ours))(address, "Node 1", 2_048, -1)
        try:
            select.select([], [transport], [], 10)
            transport.finish_connect()
            # The peer answers only when the client waits: else a thread that wakes late finds the answer.
            assert transport.handshake() == READ
            proxy.shape(Way.DOWN, is_held=False)
            assert any(select.select([transport], [], [], 10)), "no answer"
            waits = []
            while awaited := transport.handshake():
                waits.append(awaited)
                reading, writing = ([transport] if awaited == each else [] for each in (READ, WRITE))
                assert any(select.select(reading, writing, [], 10)), "it waits for what does not come"
            assert WRITE in waits
        finally:
            transport.close()


def test_unanswered_handshake_does_not_affect_other_connections(peer: Peer) -> None:
    files = open_files()
    with TlsServer(server_context(BROKER)) as server:
        with selector_of() as selector:
            selector.connect("silent", peer.address)
            poll_until(selector, lambda: True)
            peer.accept().recv(1)
            connect(selector, server.port)
            assert echo(selector, b"ping") == b"ping"
            assert not selector.is_channel_ready("silent")
            started = time.process_time()
            selector.poll(300)
            assert time.process_time() - started < 0.1, "a handshake that waits costs nothing"
            selector.close("silent")
            selector.connect("silent", peer.address)
        poll_until_closed(peer)
    for connection in peer.accepted:
        connection.close()
    assert open_files() <= files


def poll_until_closed(peer: Peer) -> None:
    connection = peer.accept()
    while connection.recv(10_000):
        pass


def test_no_login_begins_before_the_peer_is_verified() -> None:
    begun: list[str] = []

    class Recorder:
        is_complete = False
        reauthenticate_at_ms = None

        def begin(self) -> None:
            begun.append("login")
            raise KafkaError("seen enough")

    def make(description: str, host: str, wakeup: Callable[[], None]) -> Any:
        return Recorder()

    with TlsServer(server_context(AUTHORITY.issue("other.example"))) as server:
        with selector_of(make_authenticator=make) as selector:
            refusal(selector, server.port)
        assert begun == []
    with TlsServer(server_context(BROKER)) as server:
        with selector_of(make_authenticator=make) as selector:
            begin(selector, server.port)
            assert "seen enough" in str(lost(selector).error)
        assert begun == ["login"]


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_large_frames_of_many_buffers_arrive_unchanged(version: str) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    settings = config(ssl_enabled_protocols=version)
    with TlsServer(server_context(BROKER)) as server, selector_of(settings) as selector:
        selector.connect("1", resolve("127.0.0.1", server.port)[0], 16_384, 16_384)
        poll_until(selector, lambda: selector.connected)
        for _ in range(3):
            sizes = [rng.choice((1, 61, 4_096, 16_383, 16_384, 16_385, 70_000)) for _ in range(rng.randrange(1, 400))]
            payload = rng.randbytes(sum(sizes))
            ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
            pieces = [payload[end - size : end] for end, size in zip(ends, sizes, strict=True)]
            head = len(payload).to_bytes(4, "big")
            selector.send(NetworkSend("1", [memoryview(piece) for piece in (head, *pieces)]))
            assert receive(selector).payload == payload, f"seed {seed}"


def test_frames_of_one_tls_record_come_in_separate_polls() -> None:
    with TlsServer(server_context(BROKER)) as server, selector_of() as selector:
        connect(selector, server.port)
        echo(selector, b"the server is there")
        server.connections[0].sendall(b"".join(frame(bytes([number]) * 5) for number in range(4)))
        payloads = [bytes(receive(selector).payload)]
        started = time.monotonic()
        for _ in range(2):
            selector.poll(5_000)
            payloads += [bytes(each.payload) for each in selector.completed_receives]
        assert time.monotonic() - started < 4
        selector.poll(5_000)
        payloads += [bytes(each.payload) for each in selector.completed_receives]
        assert payloads == [bytes([number]) * 5 for number in range(4)]
        started = time.monotonic()
        selector.poll(100)
        assert time.monotonic() - started > 0.05, "nothing is left, and the poll waits again"


def test_frames_before_the_end_are_returned_then_the_end() -> None:
    with TlsServer(server_context(BROKER)) as server, selector_of() as selector:
        connect(selector, server.port)
        echo(selector, b"the server is there")
        server.connections[0].sendall(frame(b"last words") + frame(b"and more"))
        server.connections[0].shutdown(socket.SHUT_RDWR)
        assert receive(selector).payload == b"last words"
        assert receive(selector).payload == b"and more"
        state = lost(selector)
        assert state.kind is ChannelKind.READY
        assert isinstance(state.error, DisconnectError)


def test_close_notify_within_a_frame_is_reported_at_once() -> None:
    with TlsServer(server_context(BROKER)) as server, selector_of() as selector:
        connect(selector, server.port)
        echo(selector, b"the server is there")
        peer = server.connections[0]
        peer.sendall(frame(bytes(1_000))[:500])
        peer.settimeout(0.05)
        with pytest.raises(TimeoutError):
            peer.unwrap()  # sends close_notify, and waits for ours
        state = lost(selector)
        assert "closed the connection after 496 of a response's 1000 bytes" in str(state.error)


def test_tampered_bytes_end_the_connection(peer: Peer) -> None:
    with TlsServer(server_context(BROKER)) as server, selector_of() as selector:
        connect(selector, server.port)
        echo(selector, b"the server is there")
        raw = socket.socket(fileno=os.dup(server.connections[0].fileno()))
        with raw:
            raw.sendall(b"\x17\x03\x03\x00\x20" + b"\0" * 32)
        state = lost(selector)
        assert state.kind is ChannelKind.READY
        assert isinstance(state.error, DisconnectError)
        assert "TLS failed" in str(state.error)
        assert selector.completed_receives == []


def test_close_in_a_forked_child_keeps_the_parents_connection() -> None:
    with TlsServer(server_context(BROKER)) as server, selector_of() as selector:
        connect(selector, server.port)
        echo(selector, b"before")
        child = os.fork()
        if child == 0:  # no assertion may leave this block: the child is not a test
            try:
                selector.close_all()
                os._exit(0)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert echo(selector, b"after") == b"after"


# ---- alerts to the peer, and TLS's own messages ----------------------------------------------------------------------


def test_peer_gets_the_reason_for_a_refused_certificate() -> None:
    with TlsServer(server_context(Authority("stranger").issue())) as server, selector_of() as selector:
        refusal(selector, server.port)
        deadline = time.monotonic() + 10
        while not server.failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (failure,) = server.failures
    assert isinstance(failure, ssl.SSLError)
    assert "UNKNOWN_CA" in str(failure)


@pytest.mark.parametrize("settings", [{}, {"ssl_enabled_protocols": "TLSv1.2"}])
def test_dsa_certificate_is_refused_with_what_to_change(settings: dict[str, str]) -> None:
    """At its default level OpenSSL 3 has no DSA cipher suites, and TLS 1.3 has none at all (RFC 8446)."""
    context = server_context(AUTHORITY.issue_dsa())
    context.set_ciphers("ALL:@SECLEVEL=0")
    with TlsServer(context) as server, selector_of(config(**settings)) as selector:
        text = refusal(selector, server.port)
    assert "no TLS version or cipher suite in common" in text
    assert "ssl.cipher.suites" in text


def test_frame_of_many_tls_records_is_read_in_one_poll() -> None:
    """One poll for each record would be one turn of the client for each 16 KiB."""
    payload = random.Random(1).randbytes(48 << 10)
    with TlsServer(server_context(BROKER)) as server, selector_of() as selector:
        connect(selector, server.port)
        echo(selector, b"the server is there")
        server.connections[0].sendall(frame(payload))
        with socket_of(selector) as raw:
            deadline = time.monotonic() + 10
            while int.from_bytes(fcntl.ioctl(raw, termios.FIONREAD, bytes(4)), sys.byteorder) < len(payload):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        selector.poll(0)
        assert [received.payload for received in selector.completed_receives] == [payload]


def test_key_update_of_the_peer_is_handled(tmp_path: Path) -> None:
    """A TLS 1.3 peer may change its keys at any time (RFC 8446, 4.6.3). `K` makes s_server do so and request the
    same.
    """
    certificate = BROKER.write(tmp_path / "server.pem")
    server = subprocess.Popen(
        ["stdbuf", "-o0", "openssl", "s_server", "-tls1_3", "-accept", "127.0.0.1:0", "-cert", str(certificate)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None

    def read_until(expected: bytes) -> bytes:
        seen = b""
        while expected not in seen:
            assert select.select([server.stdout], [], [], 10)[0], seen  # type: ignore[type-var]
            seen += os.read(server.stdout.fileno(), 1 << 16)
        return seen

    try:
        listening = read_until(b"ACCEPT 127.0.0.1:").split(b"ACCEPT 127.0.0.1:")[1]
        port = int(listening if listening.endswith(b"\n") else listening + server.stdout.readline())
        with selector_of() as selector:
            connect(selector, port)
            selector.send(send_of(b"before"))
            poll_until(selector, lambda: selector.completed_sends)
            read_until(b"before")
            server.stdin.write(b"K\n")
            read_until(b"SSL_do_handshake -> 1")
            server.stdin.write(frame(b"after the update\n"))
            assert receive(selector).payload == b"after the update\n"
            selector.send(send_of(b"with the new keys"))
            poll_until(selector, lambda: selector.completed_sends)
            read_until(b"with the new keys")
    finally:
        server.kill()
        server.communicate(timeout=10)
