"""The security of an embedded broker: listeners with TLS or login, users, permissions. No I/O.

The broker keeps its PLAINTEXT listener beside them, for the nodes and for administration: it listens only on the
loopback interface. A broker that is tuned for a fast start, the default, is slow at TLS: about 15 MB/s.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from spark_kafka_sink.common.errors import LocalBrokerError

_PROTOCOLS: Final = frozenset({"SSL", "SASL_PLAINTEXT", "SASL_SSL"})
_WITH_TLS: Final = frozenset({"SSL", "SASL_SSL"})
_SCRAM: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
SCRAM_ITERATIONS: Final = 4096
"""Kafka's minimum."""
_MODULE: Final = "org.apache.kafka.common.security"
_OWN_LISTENERS: Final = frozenset({"PLAINTEXT", "CONTROLLER", "PROXIED"})


@dataclass(frozen=True, slots=True)
class BrokerKerberos:
    """The brokers' Kerberos identity: a principal such as `kafka/127.0.0.1@REALM`, with its keytab and a krb5.conf."""

    principal: str
    keytab: Path
    configuration: Path

    @property
    def jaas(self) -> str:
        keytab = _quoted(str(self.keytab.absolute()))
        module = "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true"
        return f"{module} keyTab={keytab} principal={_quoted(self.principal)};"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSecurity:
    """What to secure. Raises LocalBrokerError if something is missing.

    - `listeners`: name (in capitals, such as MTLS) → SSL, SASL_PLAINTEXT or SASL_SSL. Each has its own port on every
      node: `EmbeddedKafka.secured_servers(name)`.
    - `keystore`: file of the brokers' private key (PKCS#8, not encrypted) and certificate chain, in PEM.
    - `truststore`: file of the authorities of clients' certificates, in PEM.
    - `requires_certificate`: listeners that accept only clients with a certificate.
    - `mechanisms`: the mechanisms of the SASL listeners.
    - `users`: names and passwords, for PLAIN and SCRAM.
    - `token_keys`: file or URL of a JWKS with the keys that sign OAUTHBEARER tokens. Without it, the broker accepts
      unsigned tokens.
    - `token_audience`: the audience that signed tokens must have.
    - `kerberos`: must be given if GSSAPI is one of the mechanisms.
    - `authorizes`: clients may do only what was granted (`AccessAdmin.grant`), except for `super_users` ("User:admin")
      and clients of the PLAINTEXT listener.
    """

    listeners: Mapping[str, str]
    keystore: Path | None = None
    truststore: Path | None = None
    requires_certificate: frozenset[str] = frozenset()
    mechanisms: tuple[str, ...] = ("PLAIN", *_SCRAM, "OAUTHBEARER")
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    token_keys: Path | str | None = None
    token_audience: str | None = None
    kerberos: BrokerKerberos | None = None
    authorizes: bool = False
    super_users: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, protocol in self.listeners.items():
            if protocol not in _PROTOCOLS or name != name.upper() or name in _OWN_LISTENERS:
                raise LocalBrokerError(
                    f"The listener {name}: {protocol} is not possible: a protocol is one of "
                    f"{', '.join(sorted(_PROTOCOLS))}, and a name is in capitals and not one of "
                    f"{', '.join(sorted(_OWN_LISTENERS))}."
                )
            if protocol != "SASL_PLAINTEXT" and self.keystore is None:
                raise LocalBrokerError(f"The listener {name} needs a `keystore`: TLS needs a certificate.")
        self._check_certificates()
        self._check_logins()

    def _check_certificates(self) -> None:
        if without := sorted(name for name in self.requires_certificate if self.listeners.get(name) not in _WITH_TLS):
            raise LocalBrokerError(
                f"`requires_certificate` names {', '.join(without)}: only a listener of `listeners` with SSL or"
                " SASL_SSL takes certificates."
            )
        if self.requires_certificate and self.truststore is None:
            raise LocalBrokerError(
                "`requires_certificate` needs a `truststore` with the authorities of the certificates."
            )

    def _check_logins(self) -> None:
        known = ("PLAIN", *_SCRAM, "OAUTHBEARER", "GSSAPI")
        if unknown := sorted(set(self.mechanisms).difference(known)):
            raise LocalBrokerError(f"`mechanisms` has {', '.join(unknown)}: a mechanism is one of {', '.join(known)}.")
        if "GSSAPI" in self.mechanisms and self.kerberos is None:
            raise LocalBrokerError("The mechanism GSSAPI needs `kerberos`: the identity of the brokers.")
        if self.token_audience is not None and self.token_keys is None:
            raise LocalBrokerError("`token_audience` needs `token_keys`: without keys every token is accepted.")

    def properties(self) -> dict[str, str | int]:
        """Return the properties of every node, without the listeners' ports."""
        found: dict[str, str | int] = {"sasl.enabled.mechanisms": ",".join(self.mechanisms)}
        for purpose, store in (("keystore", self.keystore), ("truststore", self.truststore)):
            if store is not None:
                found |= {f"ssl.{purpose}.type": "PEM", f"ssl.{purpose}.location": str(store.absolute())}
        for name in self.requires_certificate:
            found[f"listener.name.{name.lower()}.ssl.client.auth"] = "required"
        for name, protocol in self.listeners.items():
            if protocol != "SSL":
                found |= self._logins(f"listener.name.{name.lower()}")
        if self.kerberos is not None:
            found["sasl.kerberos.service.name"] = self.kerberos.principal.partition("/")[0]
        if self.authorizes:
            found["authorizer.class.name"] = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
            found["super.users"] = ";".join(("User:ANONYMOUS", *self.super_users))
        return found

    def system_properties(self) -> dict[str, str]:
        """Return the system properties of the JVM."""
        found = {}
        if self.token_keys is not None:
            found["org.apache.kafka.sasl.oauthbearer.allowed.urls"] = _url(self.token_keys)
        if self.kerberos is not None:
            found["java.security.krb5.conf"] = str(self.kerberos.configuration.absolute())
        return found

    def format_arguments(self) -> list[str]:
        """Return the arguments of the tool that formats a data folder: the users of SCRAM."""
        offered = [mechanism for mechanism in self.mechanisms if mechanism in _SCRAM]
        return [
            part
            for name, password in self.users.items()
            for mechanism in offered
            for part in ("--add-scram", _credential(name, password, mechanism))
        ]

    def _logins(self, listener: str) -> dict[str, str]:
        entries = {
            "PLAIN": f"{_MODULE}.plain.PlainLoginModule required{self._plain_users()};",
            "OAUTHBEARER": f"{_MODULE}.oauthbearer.OAuthBearerLoginModule required "
            'unsecuredLoginStringClaim_sub="broker";',
            **dict.fromkeys(_SCRAM, f"{_MODULE}.scram.ScramLoginModule required;"),
            "GSSAPI": self.kerberos.jaas if self.kerberos is not None else "",
        }
        found = {
            f"{listener}.{mechanism.lower()}.sasl.jaas.config": entries[mechanism] for mechanism in self.mechanisms
        }
        if self.token_keys is not None and "OAUTHBEARER" in self.mechanisms:
            prefix = f"{listener}.oauthbearer.sasl"
            found |= {
                f"{prefix}.server.callback.handler.class": (
                    f"{_MODULE}.oauthbearer.OAuthBearerValidatorCallbackHandler"
                ),
                f"{prefix}.oauthbearer.jwks.endpoint.url": _url(self.token_keys),
            }
            if self.token_audience is not None:
                found[f"{prefix}.oauthbearer.expected.audience"] = self.token_audience
        return found

    def _plain_users(self) -> str:
        return "".join(f" {_quoted(f'user_{name}')}={_quoted(password)}" for name, password in self.users.items())


def salted_password(password: str, mechanism: str, salt: bytes, iterations: int = SCRAM_ITERATIONS) -> bytes:
    """Return the value that a broker stores for a password (RFC 5802, Hi)."""
    return hashlib.pbkdf2_hmac(_SCRAM[mechanism], password.encode(), salt, iterations)


def _quoted(text: str) -> str:
    """Quote a text for a login configuration. Its parser in Java knows all escapes of JSON except \\u."""
    return json.dumps(text, ensure_ascii=False)


def _url(keys: Path | str) -> str:
    return keys if isinstance(keys, str) else keys.absolute().as_uri()


def _credential(name: str, password: str, mechanism: str) -> str:
    """Return a user's credential for the tool. It is salted here, because the tool cuts a password at its commas. `ps`
    shows the tool's command, and a salted password is enough to log in: do not use a real password for a test broker.
    """
    salt = os.urandom(16)
    text = {
        "name": name,
        "iterations": str(SCRAM_ITERATIONS),
        "salt": f'"{base64.b64encode(salt).decode()}"',
        "saltedpassword": f'"{base64.b64encode(salted_password(password, mechanism, salt)).decode()}"',
    }
    return f"{mechanism}=[{','.join(f'{key}={value}' for key, value in text.items())}]"
