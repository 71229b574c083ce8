"""What listens at an address: TLS, Kafka, HTTP or ZooKeeper, and the certificate that it shows. For a person who looks
for a fault; no record goes over such a connection, and no login.

Blocks the caller, at most for the given time at each step. The certificate is read without trust in it: its dates and
names are what an error text needs most when it is not trusted.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final, NamedTuple

from spark_kafka_sink.common.texts import one_line
from spark_kafka_sink.network.transport import Address
from spark_kafka_sink.protocol.handshake import ApiVersionsRequest

_ASKED: Final = b"".join(ApiVersionsRequest("", "").encode(0, 1, "doctor"))
_ANSWERED: Final = struct.pack(">i", 1)
"""The correlation id of `_ASKED`, which follows the four bytes of a size."""
_NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL: an expired certificate can be read, too."""


class Speech(Enum):
    """What a port speaks. The value is for texts."""

    TLS = "TLS"
    KAFKA = "Kafka without TLS"
    HTTP = "HTTP"
    ZOOKEEPER = "ZooKeeper"
    UNKNOWN = "something else, or nothing"


class Certificate(NamedTuple):
    """A server's certificate. Times are ms since the epoch. `names` are its alternative names, without their kind."""

    subject: str
    issuer: str
    not_before_ms: int
    not_after_ms: int
    names: tuple[str, ...]


def speech_of(address: Address, timeout_ms: int) -> Speech:
    """Try one protocol after the other, each on a new connection."""
    if _certificate_bytes(address, timeout_ms) is not None:
        return Speech.TLS
    if _said(address, _ASKED, timeout_ms)[4:8] == _ANSWERED:
        return Speech.KAFKA
    if _said(address, b"HEAD / HTTP/1.0\r\n\r\n", timeout_ms).startswith(b"HTTP/"):
        return Speech.HTTP
    if b"ookeeper" in _said(address, b"srvr", timeout_ms):
        return Speech.ZOOKEEPER
    return Speech.UNKNOWN


def certificate_of(address: Address, timeout_ms: int) -> Certificate | None:
    """Return the server's certificate, or None if it shows none, or if OpenSSL cannot read it."""
    shown = _certificate_bytes(address, timeout_ms)
    if shown is None:
        return None
    context = _trusting_all()
    # Python gives the fields only of a certificate that it verified. This one is trusted for that alone.
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags |= _NO_CHECK_TIME
    try:
        context.load_verify_locations(cadata=shown)
        with _connected(address, timeout_ms) as plain, _tls(context, plain, address) as tls:
            return _read(tls.getpeercert() or {})
    except (OSError, ValueError):
        return None


def _read(fields: Any) -> Certificate | None:
    if "notAfter" not in fields:
        return None
    return Certificate(
        _name(fields.get("subject", ())),
        _name(fields.get("issuer", ())),
        ssl.cert_time_to_seconds(fields["notBefore"]) * 1000,
        ssl.cert_time_to_seconds(fields["notAfter"]) * 1000,
        tuple(one_line(str(value)) for _, value in fields.get("subjectAltName", ())),
    )


def _name(parts: Any) -> str:
    """Return the common name, or all parts of a name without one."""
    pairs = [pair for part in parts for pair in part]
    common = [value for key, value in pairs if key == "commonName"]
    return one_line(str(common[-1]) if common else ", ".join(f"{key}={value}" for key, value in pairs))


def _certificate_bytes(address: Address, timeout_ms: int) -> bytes | None:
    """Return the certificate of a server that speaks TLS, in DER, whatever it is."""
    try:
        with _connected(address, timeout_ms) as plain, _tls(_trusting_all(), plain, address) as tls:
            return tls.getpeercert(binary_form=True)
    except (OSError, ValueError):
        return None


def _trusting_all() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _tls(context: ssl.SSLContext, plain: socket.socket, address: Address) -> ssl.SSLSocket:
    return context.wrap_socket(plain, server_hostname=address.host.rstrip(".") or None)


def _said(address: Address, question: bytes, timeout_ms: int) -> bytes:
    """Return the first bytes of the answer; b"" if none came in time."""
    try:
        with _connected(address, timeout_ms) as plain:
            plain.sendall(question)
            return plain.recv(256)
    except OSError:
        return b""


@contextmanager
def _connected(address: Address, timeout_ms: int) -> Iterator[socket.socket]:
    with socket.socket(address.family, socket.SOCK_STREAM) as plain:
        plain.settimeout(timeout_ms / 1000)
        plain.connect(address.sockaddr)
        yield plain
