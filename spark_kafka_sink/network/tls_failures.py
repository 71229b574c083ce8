"""What a failure of TLS means: whether to try again, and what to change. No I/O.

Final are a peer that is not to be trusted, one that does not trust us, and one with which there is no common ground;
all else is a connection that went wrong, and is made again.
"""

from __future__ import annotations

import ssl
from typing import Final

from spark_kafka_sink.common.errors import DisconnectError, KafkaError, SslAuthenticationError

_WRONG_NAME: Final = frozenset({62, 64})
_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_UNKNOWN_AUTHORITY: Final = frozenset({2, 7, 18, 19, 20, 21})
"""OpenSSL's numbers of what is wrong with a certificate (X509_V_ERR_*)."""

_NO_TLS: Final = (
    "does not speak TLS: what came back is something else. If this is a PLAINTEXT listener, set"
    " security.protocol=PLAINTEXT (or SASL_PLAINTEXT); else use the port of its SSL listener."
)
_OURS_REFUSED: Final = (
    "refuses our certificate ({reason}): set ssl.keystore.location (or ssl.keystore.key and"
    " ssl.keystore.certificate.chain) to a valid one of an authority in the broker's truststore."
)
_NO_COMMON_GROUND: Final = (
    "has no TLS version or cipher suite in common with us ({reason}): look at ssl.enabled.protocols and"
    " ssl.cipher.suites, here and there. TLS below 1.2 is never spoken."
)
_OUR_NAME_REFUSED: Final = "knows nothing of the name by which we connect ({reason}): correct bootstrap.servers."

_SAID_NOTHING: Final = (
    "It had said nothing: where that is so every time, this is a PLAINTEXT listener; then set"
    " security.protocol=PLAINTEXT (or SASL_PLAINTEXT), or use the port of its SSL listener."
)
_WANTS_CERTIFICATE: Final = (
    "Where that is so every time, it may want a certificate of ours, or another one: see ssl.keystore.location."
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
"""OpenSSL's reason → what to say after naming the node."""
_OURS: Final = frozenset(reason for reason, text in _FINAL.items() if text is _OURS_REFUSED)
_PASSING: Final = frozenset({"TLSV1_ALERT_INTERNAL_ERROR", "TLSV1_ALERT_USER_CANCELLED"})
"""Alerts by which a peer says that it could not, rather than that it would not."""


def handshake_failure(error: OSError, description: str, host: str, has_spoken: bool) -> KafkaError:
    """`description` names the node; `host` is whom its certificate should be for; `has_spoken`: it sent anything."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return SslAuthenticationError(f"{description} is not to be trusted: {_distrust(error, host)}")
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    if reason in _FINAL:
        return SslAuthenticationError(f"{description} {_FINAL[reason].format(reason=_words(reason))}")
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)) or not isinstance(error, ssl.SSLError):
        hint = _WANTS_CERTIFICATE if has_spoken else _SAID_NOTHING
        return DisconnectError(f"{description} ended the connection during the TLS handshake. {hint}")
    if reason in _PASSING:
        return DisconnectError(f"{description} broke the TLS handshake off ({_words(reason)}).")
    return SslAuthenticationError(f"{description}: the TLS handshake failed ({_words(reason)}).")


def later_failure(error: OSError, description: str) -> KafkaError:
    """After our side of the handshake: in TLS 1.3 the peer looks at our certificate only then."""
    if not isinstance(error, ssl.SSLError):
        return DisconnectError(f"{description}: {error.strerror or error}.")
    if error.reason in _OURS:
        return SslAuthenticationError(f"{description} {_OURS_REFUSED.format(reason=_words(error.reason))}")
    return DisconnectError(f"{description}: TLS failed ({_words(error.reason)}).")


def _distrust(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code in _WRONG_NAME:
        return (
            f"its certificate is not for {host}. Connect by a name that is in it (bootstrap.servers, and the broker's"
            f" advertised.listeners), or have one issued with {host} among its alternative names; the common name does"
            " not count. An empty ssl.endpoint.identification.algorithm turns the check off."
        )
    if error.verify_code == _EXPIRED:
        return (
            "its certificate, or that of an authority above it, has expired. Have it renewed, here too if it is in"
            " ssl.truststore.location or ssl.truststore.certificates, if this machine's clock is right."
        )
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate, or that of an authority above it, is not valid yet. Is this machine's clock right?"
    if error.verify_code in _UNKNOWN_AUTHORITY:
        return (
            f"its certificate is of an authority that we do not know ({error.verify_message}). Put that authority's"
            " certificate into ssl.truststore.location or ssl.truststore.certificates."
        )
    return f"its certificate does not do ({error.verify_message})."


def _words(reason: str | None) -> str:
    return (reason or "no reason given").replace("_", " ").lower()
