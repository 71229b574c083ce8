"""The OpenSSL context of a client, from the TLS settings, made once and before any connection. Reads files; no sockets.

Certificates and keys come from files or as text, in PEM or PKCS12. PEM text may have lost its line breaks on the way
through a properties file. Kafka accepts that and OpenSSL does not, so such text gets its line breaks again.

A client that is kept for long asks by `are_renewed` whether other files have taken the place of those that it read.

The context always verifies the certificate, against the given authorities or the system's. It verifies the host name
too, unless ssl.endpoint.identification.algorithm is empty. TLS below 1.2 is not possible.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.security import SecurityConfig, store_refusal
from spark_kafka_sink.common.texts import Secret

_BEGIN: Final = re.compile(r"-----BEGIN ([A-Z0-9 ]{1,64})-----")
_LINE: Final = 64
_MOST_LABELS: Final = 16
"""Labels without an END, after which no other label is searched for. A store has a few labels."""
_LARGEST_STORE: Final = 16 * 1024 * 1024
"""Bytes. A file of all public authorities has 250,000."""


class Trusted(NamedTuple):
    pem: str
    setting: str
    """Its setting, for errors."""


class Identity:
    """A client's private key and certificate chain. Its repr shows neither."""

    __slots__ = ("password", "pem", "setting")

    def __init__(self, pem: str, password: Secret | None, setting: str) -> None:
        self.pem = pem
        self.password = password
        self.setting = setting


def trusted_certificates(config: SecurityConfig) -> Trusted | None:
    """Return the configured authorities, or None to trust the system's. Raises ConfigError."""
    if config.ssl_truststore_certificates is not None:
        return Trusted(_normalized(config.ssl_truststore_certificates.reveal()), "ssl.truststore.certificates")
    if config.ssl_truststore_location is None:
        return None
    setting = f"ssl.truststore.location={config.ssl_truststore_location}"
    data = _read(config.ssl_truststore_location, setting)
    _check_type("truststore", config.ssl_truststore_type, config.ssl_truststore_location)
    if config.ssl_truststore_type == "PKCS12":
        store = _pkcs12(data, config.ssl_truststore_password, setting, "ssl.truststore.password")
        pem = "".join(_certificate_pem(each.certificate) for each in (store.cert, *store.additional_certs) if each)
    else:
        pem = _normalized(data.decode("ascii", "replace"), "CERTIFICATE")
    if not pem:
        raise ConfigError(f"{setting}: there is no certificate in it. Its type is {config.ssl_truststore_type}.")
    return Trusted(pem, setting)


def client_identity(config: SecurityConfig) -> Identity | None:
    """Return this client's key and certificate, or None if none is configured. Raises ConfigError."""
    password = config.ssl_key_password
    if config.ssl_keystore_key is not None and config.ssl_keystore_certificate_chain is not None:
        pem = _normalized(config.ssl_keystore_key.reveal()) + _normalized(
            config.ssl_keystore_certificate_chain.reveal()
        )
        return Identity(pem, password, "ssl.keystore.key")
    if config.ssl_keystore_location is None:
        return None
    setting = f"ssl.keystore.location={config.ssl_keystore_location}"
    data = _read(config.ssl_keystore_location, setting)
    _check_type("keystore", config.ssl_keystore_type, config.ssl_keystore_location)
    if config.ssl_keystore_type == "PKCS12":
        store = _pkcs12(data, config.ssl_keystore_password or password, setting, "ssl.keystore.password")
        return Identity(_identity_pem(store, setting), None, setting)
    pem = _normalized(data.decode("ascii", "replace"))
    if "PRIVATE KEY-----" not in pem or "CERTIFICATE-----" not in pem:
        raise ConfigError(f"{setting} must contain a private key and its certificate in PEM, one after the other.")
    return Identity(pem, password, setting)


@contextlib.contextmanager
def file_in_memory(text: str) -> Iterator[str]:
    """Return a path to read `text` from, because OpenSSL reads keys only from files. The file is in memory if the
    system has such files. Otherwise it is on disk for a moment, and only this user can read it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
        path = f"/proc/self/fd/{descriptor}"
    else:
        descriptor, path = tempfile.mkstemp(suffix=".pem")
    try:
        with os.fdopen(descriptor, "w", encoding="ascii", errors="replace") as file:
            file.write(text)
            file.flush()
            yield path
    finally:
        if not path.startswith("/proc/"):
            os.unlink(path)


def _check_type(store: str, type_: str, location: str) -> None:
    """Check the file's type again, by its content. The driver may not have the file, and checks only its name."""
    if text := store_refusal(store, type_, location, has_password=False):
        raise ConfigError(text)


def _read(location: str, setting: str) -> bytes:
    try:
        with Path(location).open("rb") as file:
            data = file.read(_LARGEST_STORE + 1)
    except (OSError, ValueError) as error:  # ValueError: there is a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{setting} cannot be read: {reason}. It must be there on every machine that connects."
        ) from None
    if len(data) > _LARGEST_STORE:
        raise ConfigError(f"{setting} has more than {_LARGEST_STORE} bytes: it is not a file of certificates or keys.")
    return data


def _normalized(text: str, *labels: str) -> str:
    """Return the PEM blocks of the text, in lines that OpenSSL reads. If labels are given, only blocks with one of
    them.
    """
    return "".join(
        f"-----BEGIN {label}-----\n{_lines(body)}\n-----END {label}-----\n"
        for label, body in _blocks(text)
        if not labels or label in labels
    )


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield label and body of each PEM block, in time that grows linearly with the text, whatever it is."""
    position = 0
    without_end: set[str] = set()
    while (begin := _BEGIN.search(text, position)) is not None:
        label, position = begin[1], begin.end()
        if label in without_end or len(without_end) > _MOST_LABELS:
            continue
        end = text.find(f"-----END {label}-----", position)
        if end < 0:
            without_end.add(label)
            continue
        yield label, text[position:end]
        position = end


def _lines(body: str) -> str:
    if ":" in body:  # headers of an old encrypted key, which need their own lines
        return body.strip()
    data = re.sub(r"\s|\\n", "", body)
    return "\n".join(data[at : at + _LINE] for at in range(0, len(data), _LINE))


def _pkcs12(data: bytes, password: Secret | None, setting: str, password_setting: str) -> Any:
    try:
        from cryptography.hazmat.primitives.serialization import pkcs12
    except ModuleNotFoundError:
        raise ConfigError(
            f"{setting}: PKCS12 stores are read by the package cryptography, which is not installed:"
            " pip install 'spark-kafka-sink[pkcs12]', or convert the store: openssl pkcs12 -in <store> -out <file>.pem"
        ) from None
    try:
        return pkcs12.load_pkcs12(data, password.reveal().encode() if password is not None else None)
    except (ValueError, TypeError):
        raise ConfigError(f"{setting}: this is no PKCS12 store, or {password_setting} is wrong.") from None


def _certificate_pem(certificate: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return str(certificate.public_bytes(Encoding.PEM).decode())


def _identity_pem(store: Any, setting: str) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    if store.key is None or store.cert is None:
        raise ConfigError(f"{setting}: there is no private key with its certificate in it.")
    key = store.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    chain = (store.cert, *store.additional_certs)
    return str(key + "".join(_certificate_pem(each.certificate) for each in chain))


# ---- the context -----------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

_warned: Final[set[str]] = set()
"""Warnings that this process has logged: each task asks again."""

_VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}


def tls_context(config: SecurityConfig) -> ssl.SSLContext:
    """Return the context. Raises ConfigError, naming the setting and showing no secret, if a file or text cannot be
    used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False  # Java still accepts it; RFC 6125 and browsers do not
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate in the truststore is enough, as in Java
    if not config.ssl_endpoint_identification_algorithm:
        context.check_hostname = False
        _log.warning(
            "ssl.endpoint.identification.algorithm is empty: any host with a certificate of a trusted authority is"
            " accepted as a broker."
        )
    _set_versions(context, config)
    _trust(context, config)
    identity = client_identity(config)
    if identity is not None:
        _identify(context, identity)
    return context


FileStates = tuple[tuple[int, int, int] | None, ...]
"""Of each file: the time of its last change in ns, its size and inode; None if it is missing."""


def file_states(config: SecurityConfig) -> FileStates:
    """Return the states of the truststore and the keystore. To be called before a client reads them: then a change
    during the reading is seen later.
    """
    locations = (config.ssl_truststore_location, config.ssl_keystore_location)
    return tuple(_state(location) for location in locations if location is not None)


def _state(location: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(location)
    except (OSError, ValueError):  # ValueError: there is a NUL in the path
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def are_renewed(config: SecurityConfig, read: FileStates) -> bool:
    """Return whether the files are others than those that were read, and can be used.

    Files that are missing or half written are not: a client that has read good files goes on with them until a broker
    refuses it. A warning says so.
    """
    if file_states(config) == read:
        return False
    try:
        tls_context(config)
    except ConfigError as error:
        _warn(f"{error} The file has changed since it was read: connections go on with what was read before.")
        return False
    return True


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


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
        # ValueError: there is no whole block. TypeError: there are letters beyond ASCII.
        reason = _reason(error) if isinstance(error, ssl.SSLError) else "no pem"
        raise ConfigError(f"{trusted.setting}: the certificates cannot be read ({reason}).") from None


def _identify(context: ssl.SSLContext, identity: Identity) -> None:
    def password() -> str:
        # OpenSSL calls it only for an encrypted key. Without a password it would ask at the terminal.
        if identity.password is None:
            raise ConfigError(f"{identity.setting}: the private key is encrypted. Give its password: ssl.key.password.")
        return identity.password.reveal()

    with file_in_memory(identity.pem) as path:
        try:
            context.load_cert_chain(path, password=password)
        except (ssl.SSLError, ValueError) as error:
            # ValueError: the password is longer than OpenSSL takes.
            reason = _reason(error) if isinstance(error, ssl.SSLError) else "ssl.key.password is too long"
            raise ConfigError(
                f"{identity.setting}: private key and certificate cannot be used ({reason}). Is ssl.key.password right,"
                " is the key encrypted by PBES2 (as by openssl pkcs8 -topk8; OpenSSL 3 reads nothing older but 3DES),"
                " and is the certificate the key's?"
            ) from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no PEM").replace("_", " ").lower()
