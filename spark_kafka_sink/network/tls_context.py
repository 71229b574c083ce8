"""What the settings of TLS mean to OpenSSL: one context a client, made before any connection. Reads files; no sockets.

Verification is always on: of the certificate against the authorities given, or else the system's, and of the name,
unless ssl.endpoint.identification.algorithm says otherwise. TLS below 1.2 cannot be had.
"""

from __future__ import annotations

import logging
import ssl
from typing import Final

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.security import SecurityConfig
from spark_kafka_sink.network.tls_stores import Identity, client_identity, file_in_memory, trusted_certificates

_log = logging.getLogger(__name__)

_VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}


def tls_context(config: SecurityConfig) -> ssl.SSLContext:
    """Raises ConfigError, naming the setting, where a file or text cannot be read or used; it shows no secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False  # Java falls back to it; RFC 6125 and browsers have given it up
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate in the truststore will do, as in Java
    if not config.ssl_endpoint_identification_algorithm:
        context.check_hostname = False
        _log.warning(
            "ssl.endpoint.identification.algorithm is empty: any host with a certificate of a trusted authority passes"
            " for a broker."
        )
    _set_versions(context, config)
    _trust(context, config)
    identity = client_identity(config)
    if identity is not None:
        _identify(context, identity)
    return context


def _set_versions(context: ssl.SSLContext, config: SecurityConfig) -> None:
    choice = config.tls_choice
    if choice.older_suites:
        context.set_ciphers(":".join(choice.older_suites))
    context.minimum_version = _VERSIONS[choice.versions[0]]
    context.maximum_version = _VERSIONS[choice.versions[-1]]


def _trust(context: ssl.SSLContext, config: SecurityConfig) -> None:
    trusted = trusted_certificates(config)
    if trusted is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return
    try:
        context.load_verify_locations(cadata=trusted.pem)
    except (ssl.SSLError, ValueError, TypeError) as error:
        # A ValueError is that of no whole block, a TypeError that of letters beyond ASCII.
        reason = _reason(error) if isinstance(error, ssl.SSLError) else "no pem"
        raise ConfigError(f"{trusted.setting}: the certificates cannot be read ({reason}).") from None


def _identify(context: ssl.SSLContext, identity: Identity) -> None:
    def password() -> str:
        # Asked for an encrypted key alone. Without an answer of ours OpenSSL would ask the terminal.
        if identity.password is None:
            raise ConfigError(f"{identity.setting}: the private key is encrypted. Give its password: ssl.key.password.")
        return identity.password.reveal()

    with file_in_memory(identity.pem) as path:
        try:
            context.load_cert_chain(path, password=password)
        except (ssl.SSLError, ValueError) as error:
            # A ValueError is that of a password longer than OpenSSL takes.
            reason = _reason(error) if isinstance(error, ssl.SSLError) else "ssl.key.password is too long"
            raise ConfigError(
                f"{identity.setting}: private key and certificate cannot be used ({reason}). Is ssl.key.password right,"
                " is the key encrypted by PBES2 (as by openssl pkcs8 -topk8; OpenSSL 3 reads nothing older but 3DES),"
                " and is the certificate the key's?"
            ) from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no PEM").replace("_", " ").lower()
