"""How bytes are cut for TLS, and how its failures become errors. tests/loopback/network has the sockets."""

from __future__ import annotations

import socket
import ssl
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_kafka_sink.common.errors import DisconnectError, KafkaError, SslAuthenticationError
from spark_kafka_sink.network.tls import TlsTransport, _pieces, handshake_failure, later_failure
from spark_kafka_sink.network.transport import WOULD_BLOCK, Address

RECORD = 16_384
NODE = "Node 1 at 10.0.0.1:9093"
SIZES = st.one_of(st.integers(1, 200), st.integers(RECORD - 2, RECORD + 2), st.integers(1, 5 * RECORD))


@given(st.lists(SIZES, min_size=1, max_size=40), st.data())
def test_pieces_have_the_same_bytes_and_are_few(sizes: list[int], data: st.DataObject) -> None:
    whole = bytes(number % 251 for number in range(sum(sizes)))
    view, at, buffers = memoryview(whole), 0, []
    for size in sizes:
        buffers.append(view[at : at + size])
        at += size
    pieces = list(_pieces(buffers))
    assert b"".join(pieces) == whole
    assert all(piece.nbytes >= RECORD for piece in pieces[:-1]), "only the last one is smaller than a record"
    # OpenSSL needs a begun write again: from any piece on, the rest is cut as before.
    first = data.draw(st.integers(0, len(pieces) - 1))
    skip = sum(piece.nbytes for piece in pieces[:first])
    rest = []
    for buffer in buffers:
        rest.append(buffer[skip:])
        skip = max(0, skip - buffer.nbytes)
    again = next(_pieces([buffer for buffer in rest if buffer.nbytes]))
    assert again == pieces[first]


def error_of(reason: str | None, kind: type[ssl.SSLError] = ssl.SSLError) -> ssl.SSLError:
    error = kind(1, "secret words of OpenSSL's")
    error.reason = reason  # type: ignore[assignment]
    return error


def distrust(code: int, message: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_code, error.verify_message = code, message
    return error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (distrust(62, "hostname mismatch"), SslAuthenticationError, "its certificate is not for h.example."),
        (distrust(64, "IP address mismatch"), SslAuthenticationError, "its certificate is not for h.example."),
        (distrust(10, "certificate has expired"), SslAuthenticationError, "has expired. Renew it"),
        (distrust(9, "not yet valid"), SslAuthenticationError, "not valid yet"),
        (distrust(18, "self-signed certificate"), SslAuthenticationError, "(self-signed certificate). Put that"),
        *(
            (distrust(code, "no issuer"), SslAuthenticationError, "an unknown authority (no issuer). Put")
            for code in (2, 7, 19, 20, 21)
        ),
        (distrust(66, "key too weak"), SslAuthenticationError, "is not valid (key too weak)"),
        (error_of("WRONG_VERSION_NUMBER"), SslAuthenticationError, "does not speak TLS"),
        *(
            (error_of(reason), SslAuthenticationError, "does not speak TLS")
            for reason in ("PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
        ),
        (error_of("NO_PROTOCOLS_AVAILABLE"), SslAuthenticationError, "in common with us (no protocols available)"),
        (error_of("UNSUPPORTED_PROTOCOL"), SslAuthenticationError, "in common with us (unsupported protocol)"),
        (error_of("TLSV1_ALERT_PROTOCOL_VERSION"), SslAuthenticationError, "ssl.enabled.protocols"),
        (error_of("TLSV1_ALERT_UNKNOWN_CA"), SslAuthenticationError, "ssl.keystore.location"),
        (error_of("TLSV1_UNRECOGNIZED_NAME"), SslAuthenticationError, "correct bootstrap.servers"),
        (error_of("BAD_SIGNATURE"), SslAuthenticationError, "the TLS handshake failed (bad signature)"),
        (error_of(None), SslAuthenticationError, "the TLS handshake failed (no reason given)"),
        (error_of("TLSV1_ALERT_INTERNAL_ERROR"), DisconnectError, "(tlsv1 alert internal error)"),
        (error_of("TLSV1_ALERT_USER_CANCELLED"), DisconnectError, "(tlsv1 alert user cancelled)"),
        (error_of(None, ssl.SSLEOFError), DisconnectError, "ended the connection during the TLS handshake"),
        (error_of(None, ssl.SSLZeroReturnError), DisconnectError, "ended the connection during the TLS handshake"),
        (ConnectionResetError(104, "reset"), DisconnectError, "ended the connection during the TLS handshake"),
    ],
)
@pytest.mark.parametrize("has_spoken", [False, True])
def test_failed_handshake_names_finality_and_remedy(
    error: OSError, kind: type[KafkaError], text: str, has_spoken: bool
) -> None:
    failure = handshake_failure(error, NODE, "h.example", has_spoken)
    assert type(failure) is kind
    assert str(failure).startswith(NODE)
    assert text in str(failure)
    if "ended the connection" in text:
        assert ("security.protocol=PLAINTEXT" in str(failure)) is not has_spoken
        assert ("ssl.keystore.location" in str(failure)) is has_spoken


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (error_of("TLSV13_ALERT_CERTIFICATE_REQUIRED"), SslAuthenticationError, "ssl.keystore.location"),
        (error_of("SSLV3_ALERT_BAD_CERTIFICATE"), SslAuthenticationError, "ssl.keystore.location"),
        (error_of("WRONG_VERSION_NUMBER"), DisconnectError, "TLS failed (wrong version number)"),
        (error_of("DECRYPTION_FAILED_OR_BAD_RECORD_MAC"), DisconnectError, "TLS failed"),
        (ConnectionResetError(104, "Connection reset by peer"), DisconnectError, "Connection reset by peer"),
    ],
)
def test_after_the_handshake_only_a_certificate_refused_is_final(
    error: OSError, kind: type[KafkaError], text: str
) -> None:
    failure = later_failure(error, NODE)
    assert type(failure) is kind
    assert str(failure).startswith(NODE)
    assert text in str(failure)


def alert(number: int) -> ssl.SSLError:
    """Return OpenSSL's error for a peer that answers our hello with a fatal alert (numbers of RFC 8446, 6.2)."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(incoming, outgoing, server_hostname="h.example")
    with pytest.raises(ssl.SSLWantReadError):
        ours.do_handshake()
    incoming.write(b"\x15\x03\x03\x00\x02\x02" + bytes([number]))
    with pytest.raises(ssl.SSLError) as caught:
        ours.do_handshake()
    return caught.value


@pytest.mark.parametrize("number", [41, 42, 43, 44, 45, 46, 48, 49, 116])
def test_each_alert_against_our_certificate_is_final_whenever_it_comes(number: int) -> None:
    for failure in (handshake_failure(alert(number), NODE, "h.example", True), later_failure(alert(number), NODE)):
        assert type(failure) is SslAuthenticationError
        assert "refuses this client's certificate (" in str(failure)


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (40, SslAuthenticationError, "in common with us (sslv3 alert handshake failure)"),
        (70, SslAuthenticationError, "in common with us (tlsv1 alert protocol version)"),
        (71, SslAuthenticationError, "in common with us (tlsv1 alert insufficient security)"),
        (80, DisconnectError, "ended the TLS handshake (tlsv1 alert internal error)"),
        (90, DisconnectError, "ended the TLS handshake (tlsv1 alert user cancelled)"),
        (112, SslAuthenticationError, "does not know the host name that this client uses"),
        (47, SslAuthenticationError, "the TLS handshake failed (sslv3 alert illegal parameter)"),
    ],
)
def test_later_alerts_name_a_setting_and_are_retriable(number: int, kind: type[KafkaError], text: str) -> None:
    failure = handshake_failure(alert(number), NODE, "h.example", True)
    assert type(failure) is kind
    assert text in str(failure)
    assert type(later_failure(alert(number), NODE)) is DisconnectError


class BrokenAfterThree:
    """Stands for an SSLContext and for its socket: three good bytes, then a bad record."""

    def __init__(self) -> None:
        self.calls = 0

    def wrap_socket(self, made: socket.socket, **_: object) -> BrokenAfterThree:
        made.close()
        return self

    def connect_ex(self, _: object) -> int:
        return 0

    def pending(self) -> int:
        return 0

    def recv_into(self, buffer: memoryview) -> int:
        self.calls += 1
        if self.calls > 1:
            raise error_of("DECRYPTION_FAILED_OR_BAD_RECORD_MAC") if self.calls == 2 else ssl.SSLWantReadError
        buffer[:3] = b"abc"
        return 3


def test_failure_behind_good_bytes_is_raised_by_the_next_read() -> None:
    address = Address(socket.AF_INET, ("127.0.0.1", 1), "localhost")
    transport = TlsTransport(address, "Node 1", -1, -1, cast("ssl.SSLContext", BrokenAfterThree()))
    buffer = bytearray(10)
    assert transport.recv_into(memoryview(buffer)) == 3
    assert transport.has_buffered(), "bytes are left that the socket does not report"
    with pytest.raises(DisconnectError, match="Node 1: TLS failed"):
        transport.recv_into(memoryview(buffer)[3:])


class WantsAfterThree(BrokenAfterThree):
    """Moves three bytes, then needs the socket first."""

    def __init__(self, expected: type[ssl.SSLError]) -> None:
        super().__init__()
        self.expected = expected

    def send(self, buffer: memoryview) -> int:
        return self._three()

    def recv_into(self, buffer: memoryview) -> int:
        return self._three()

    def _three(self) -> int:
        self.calls += 1
        if self.calls > 1:
            raise self.expected
        return 3


@pytest.mark.parametrize("expected", [ssl.SSLWantReadError, ssl.SSLWantWriteError])
@pytest.mark.parametrize("is_sending", [True, False])
def test_openssl_that_needs_the_socket_first_is_not_a_failure(expected: type[ssl.SSLError], is_sending: bool) -> None:
    """A read may require a write, and the reverse, when a peer changes keys."""
    address = Address(socket.AF_INET, ("127.0.0.1", 1), "localhost")
    transport = TlsTransport(address, "Node 1", -1, -1, cast("ssl.SSLContext", WantsAfterThree(expected)))
    buffer = memoryview(bytearray(10))
    counts = [transport.sendmsg([buffer]) if is_sending else transport.recv_into(buffer) for _ in range(2)]
    assert counts == [3, WOULD_BLOCK]
    assert not transport.has_buffered()
