"""TLS over a non-blocking socket, as a `Transport`, and the errors of its failures. The selector's thread owns it.

OpenSSL works on the socket itself. It writes records of at most 16 KiB, each by one system call. Small buffers are
joined up to that size, and larger ones are passed as they are. A pair of memory buffers, which leaves large writes to
one system call, was measured: it carries as much and costs a third more.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from spark_kafka_sink.common.errors import DisconnectError, KafkaError, SslAuthenticationError
from spark_kafka_sink.common.security import SecurityConfig
from spark_kafka_sink.network.tls_context import tls_context
from spark_kafka_sink.network.transport import (
    READ,
    WOULD_BLOCK,
    WRITE,
    Address,
    PlainTransport,
    TransportFactory,
    begin_connect,
    open_socket,
    raise_connect_error,
)

_RECORD: Final = 16_384
"""Bytes in the largest record (RFC 8446, 5.1)."""


class TlsTransport:
    """TLS over TCP, to a peer whose certificate must be for the address's host."""

    __slots__ = ("_description", "_failure", "_has_ended", "_host", "_socket")

    def __init__(
        self, address: Address, description: str, send_buffer: int, receive_buffer: int, context: ssl.SSLContext
    ) -> None:
        """Start to connect. Raises OSError if it fails at once, SslAuthenticationError if no certificate can be for the
        host, which a broken broker may announce.
        """
        self._host = (address.host or str(address.sockaddr[0])).rstrip(".")
        self._description = description
        self._failure: OSError | None = None
        """An error that came after good bytes. The caller gets the bytes first; the peer may never send more."""
        self._has_ended = False
        """The peer's close_notify came after good bytes. TCP may stay open after it."""
        try:
            self._host.encode("idna")  # the next call encodes it too, but leaks its socket if that fails
            self._socket = context.wrap_socket(
                open_socket(address, send_buffer, receive_buffer),
                server_hostname=self._host,
                do_handshake_on_connect=False,
            )
            begin_connect(self._socket, address)
        except ValueError as error:
            raise SslAuthenticationError(
                f"{description}: TLS cannot be spoken to a host named {self._host!r} ({error}). Correct"
                " bootstrap.servers, or the broker's advertised.listeners."
            ) from None

    def fileno(self) -> int:
        return self._socket.fileno()

    def finish_connect(self) -> None:
        raise_connect_error(self._socket)

    def handshake(self) -> int:
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return READ
        except ssl.SSLWantWriteError:
            return WRITE
        except OSError as error:
            # There is a cipher once the peer's first message has come.
            has_spoken = self._socket.cipher() is not None
            raise handshake_failure(error, self._description, self._host, has_spoken) from None
        return 0

    def recv_into(self, buffer: memoryview) -> int:
        """Read all that has come. OpenSSL returns one record a call."""
        tls, filled = self._socket, 0
        try:
            if self._failure is not None:
                raise self._failure
            while filled < buffer.nbytes:
                count = tls.recv_into(buffer[filled:])
                if count == 0:
                    self._has_ended = True
                    break
                filled += count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            # SSLWantWriteError: the answer to the peer's new key (RFC 8446, 4.6.3) does not fit the socket now. It goes
            # with the next bytes; some are waiting, because they have filled the socket.
            return filled or WOULD_BLOCK
        except OSError as error:
            if not filled:
                raise later_failure(error, self._description) from None
            self._failure = error
        return filled

    def has_buffered(self) -> bool:
        return self._socket.pending() > 0 or self._has_ended or self._failure is not None

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """If the socket does not take a record whole, OpenSSL keeps it and needs the same bytes again. It gets them:
        those bytes do not count as sent, so the next call begins with them.
        """
        tls, sent = self._socket, 0
        try:
            for piece in _pieces(buffers):
                left = piece
                while left.nbytes:
                    count = tls.send(left)
                    sent += count
                    left = left[count:]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return sent or WOULD_BLOCK
        return sent

    def close(self) -> None:
        # Without close_notify: in a forked child it would end the parent's connection.
        self._socket.close()


def transport_factory(config: SecurityConfig) -> TransportFactory:
    """Return transports with TLS if security.protocol asks for it. Raises ConfigError if a file cannot be used."""
    return partial(TlsTransport, context=tls_context(config)) if config.uses_tls else PlainTransport


def _pieces(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """Return the same bytes, with small buffers joined into records. A call that begins at a piece's first byte cuts
    the same pieces.
    """
    small: list[memoryview] = []
    room = _RECORD
    for buffer in buffers:
        rest = buffer
        if small or buffer.nbytes < _RECORD:
            small.append(buffer[:room])
            rest = buffer[room:]
            room -= small[-1].nbytes
            if room:
                continue
            yield memoryview(b"".join(small))
            small, room = [], _RECORD
        if rest.nbytes >= _RECORD:
            yield rest
        elif rest.nbytes:
            small, room = [rest], _RECORD - rest.nbytes
    if small:
        yield memoryview(b"".join(small))


# ---- what a failure means --------------------------------------------------------------------------------------------

EXPIRED: Final = "expired"
NOT_YET_VALID: Final = "not yet valid"
WRONG_HOST: Final = "wrong host"
UNKNOWN_AUTHORITY: Final = "unknown authority"
OURS_REFUSED: Final = "this client's certificate is refused"
NO_TLS: Final = "no TLS"
NO_COMMON_VERSION: Final = "no version or cipher suite in common"
"""Values of `SslAuthenticationError.fault`."""

_WRONG_NAME: Final = frozenset({62, 64})
_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_UNKNOWN_AUTHORITY: Final = frozenset({2, 7, 18, 19, 20, 21})
"""OpenSSL's numbers for the faults of a certificate (X509_V_ERR_*)."""

_NO_TLS: Final = (
    "does not speak TLS: its answer is not TLS. If this is a PLAINTEXT listener, set"
    " security.protocol=PLAINTEXT (or SASL_PLAINTEXT); else use the port of its SSL listener."
)
_OURS_REFUSED: Final = (
    "refuses this client's certificate ({reason}): set ssl.keystore.location (or ssl.keystore.key and"
    " ssl.keystore.certificate.chain) to a valid one of an authority in the broker's truststore."
)
_NO_COMMON_GROUND: Final = (
    "has no TLS version or cipher suite in common with us ({reason}): check ssl.enabled.protocols and"
    " ssl.cipher.suites, here and at the broker. TLS below 1.2 is not supported."
)
_OUR_NAME_REFUSED: Final = "does not know the host name that this client uses ({reason}): correct bootstrap.servers."

_SAID_NOTHING: Final = (
    "It had sent nothing. If this happens every time, it is a PLAINTEXT listener: set"
    " security.protocol=PLAINTEXT (or SASL_PLAINTEXT), or use the port of its SSL listener."
)
_WANTS_CERTIFICATE: Final = (
    "If this happens every time, it may require a client certificate, or another one: set ssl.keystore.location."
)

_FINAL: Final = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "PACKET_LENGTH_TOO_LONG": _NO_TLS,
    "RECORD_LAYER_FAILURE": _NO_TLS,
    "HTTP_REQUEST": _NO_TLS,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _OURS_REFUSED,
    "SSLV3_ALERT_NO_CERTIFICATE": _OURS_REFUSED,
    "SSLV3_ALERT_BAD_CERTIFICATE": _OURS_REFUSED,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": _OURS_REFUSED,
    "SSLV3_ALERT_CERTIFICATE_REVOKED": _OURS_REFUSED,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _OURS_REFUSED,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _OURS_REFUSED,
    "TLSV1_ALERT_UNKNOWN_CA": _OURS_REFUSED,
    "TLSV1_ALERT_ACCESS_DENIED": _OURS_REFUSED,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _NO_COMMON_GROUND,
    "TLSV1_ALERT_PROTOCOL_VERSION": _NO_COMMON_GROUND,
    "TLSV1_ALERT_INSUFFICIENT_SECURITY": _NO_COMMON_GROUND,
    "UNSUPPORTED_PROTOCOL": _NO_COMMON_GROUND,
    "NO_PROTOCOLS_AVAILABLE": _NO_COMMON_GROUND,
    "TLSV1_UNRECOGNIZED_NAME": _OUR_NAME_REFUSED,
    "TLSV1_ALERT_UNRECOGNIZED_NAME": _OUR_NAME_REFUSED,
}
"""OpenSSL's reason → the text after the node's name. These failures are final: a new connection would fail as well."""
_OURS: Final = frozenset(reason for reason, text in _FINAL.items() if text is _OURS_REFUSED)
_FAULTS: Final = {_NO_TLS: NO_TLS, _OURS_REFUSED: OURS_REFUSED, _NO_COMMON_GROUND: NO_COMMON_VERSION}
_PASSING: Final = frozenset({"TLSV1_ALERT_INTERNAL_ERROR", "TLSV1_ALERT_USER_CANCELLED"})
"""Alerts of a failure that may pass."""


def handshake_failure(error: OSError, description: str, host: str, has_spoken: bool) -> KafkaError:
    """Return the error of a failed handshake. `description` names the node, `host` is the name that its certificate
    must have, and `has_spoken` says whether the node sent anything.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        fault, text = _distrust(error, host)
        return _final(fault, f"{description} could not be verified: {text}")
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if reason in _FINAL:
        text = _FINAL[reason]
        return _final(_FAULTS.get(text, ""), f"{description} {text.format(reason=_words(reason))}")
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)) or not isinstance(error, ssl.SSLError):
        hint = _WANTS_CERTIFICATE if has_spoken else _SAID_NOTHING
        return DisconnectError(f"{description} ended the connection during the TLS handshake. {hint}")
    if reason in _PASSING:
        return DisconnectError(f"{description} ended the TLS handshake ({_words(reason)}).")
    return SslAuthenticationError(f"{description}: the TLS handshake failed ({_words(reason)}).")


def later_failure(error: OSError, description: str) -> KafkaError:
    """Return the error of a failure after the handshake. In TLS 1.3 the peer checks this client's certificate then."""
    if not isinstance(error, ssl.SSLError):
        return DisconnectError(f"{description}: {error.strerror or error}.")
    if error.reason in _OURS:
        return _final(OURS_REFUSED, f"{description} {_OURS_REFUSED.format(reason=_words(error.reason))}")
    return DisconnectError(f"{description}: TLS failed ({_words(error.reason)}).")


def _final(fault: str, text: str) -> SslAuthenticationError:
    error = SslAuthenticationError(text)
    error.fault = fault
    return error


def _distrust(error: ssl.SSLCertVerificationError, host: str) -> tuple[str, str]:
    """Return the kind of failure, and its text."""
    if error.verify_code in _WRONG_NAME:
        return WRONG_HOST, (
            f"its certificate is not for {host}. Connect by a name that is in it (bootstrap.servers, and the broker's"
            f" advertised.listeners), or have one issued with {host} among its alternative names; the common name does"
            " not count. An empty ssl.endpoint.identification.algorithm turns the check off."
        )
    if error.verify_code == _EXPIRED:
        return EXPIRED, (
            "its certificate, or that of an authority above it, has expired. Renew it, also in"
            " ssl.truststore.location or ssl.truststore.certificates if it is there. Is this machine's clock right?"
        )
    if error.verify_code == _NOT_YET_VALID:
        text = "its certificate, or that of an authority above it, is not valid yet. Is this machine's clock right?"
        return NOT_YET_VALID, text
    if error.verify_code in _UNKNOWN_AUTHORITY:
        return UNKNOWN_AUTHORITY, (
            f"its certificate is of an unknown authority ({error.verify_message}). Put that authority's"
            " certificate into ssl.truststore.location or ssl.truststore.certificates."
        )
    return "", f"its certificate is not valid ({error.verify_message})."


def _words(reason: str | None) -> str:
    return (reason or "no reason given").replace("_", " ").lower()
