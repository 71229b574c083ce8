"""A certificate authority for one test, and its certificates: for brokers, for clients, and some to be refused."""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.x509.oid import NameOID

_NOW = datetime.datetime.now(datetime.UTC)
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Identity:
    """A private key and the certificate for it."""

    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | dsa.DSAPrivateKey
    certificate: x509.Certificate

    @cached_property
    def certificate_pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def key_pem(self, password: str | None = None) -> str:
        """PKCS#8, encrypted if a password is given."""
        encryption = (
            serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        )
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        ).decode()

    def write(self, path: Path, password: str | None = None) -> Path:
        """Write key and certificate into one file."""
        path.write_text(self.key_pem(password) + self.certificate_pem)
        return path


class Authority:
    """Signs certificates that are valid for a day, by default for `localhost` and 127.0.0.1."""

    def __init__(self, name: str = "test authority", not_after: datetime.datetime = _NOW + _DAY) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key.public_key(), not_after).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
            decipher_only=False,
        )  # fmt: skip
        self.certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.certificate_pem = self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def write(self, path: Path) -> Path:
        path.write_text(self.certificate_pem)
        return path

    def renew(self, path: Path) -> Path:
        """Put another file with its certificate in the place of the one there, as tools that renew certificates do."""
        os.replace(self.write(path.with_suffix(".new")), path)
        return path

    def issue(
        self,
        *names: str,
        common_name: str = "broker",
        not_after: datetime.datetime = _NOW + _DAY,
        not_before: datetime.datetime = _NOW - 2 * _DAY,
        key: rsa.RSAPrivateKey | None = None,
    ) -> Identity:
        """Return a certificate for host names and IP addresses, as alternative names; with only "" it has no names.
        Makes a short key if none is given.
        """
        own: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey = key or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        alternatives = [_alternative(name) for name in names or ("localhost", "127.0.0.1") if name]
        builder = self._builder(subject, own.public_key(), not_after, not_before)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return Identity(own, builder.sign(self._key, hashes.SHA256()))

    def issue_dsa(self) -> Identity:
        """Return a certificate with a DSA key, which browsers and OpenSSL no longer accept."""
        key = dsa.generate_private_key(2048)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
        builder = self._builder(subject, key.public_key(), _NOW + _DAY)
        alternatives = x509.SubjectAlternativeName([_alternative("127.0.0.1")])
        return Identity(key, builder.add_extension(alternatives, critical=False).sign(self._key, hashes.SHA256()))

    @classmethod
    def expired(cls) -> Authority:
        """Return an authority with an expired certificate; the certificates that it issues are valid."""
        return cls("expired authority", _NOW - datetime.timedelta(hours=1))

    def settings(self, servers: str = "localhost:1", **more: Any) -> dict[str, Any]:
        """Return settings that trust this authority, and `more`, with underscores for dots."""
        trusting = {"security.protocol": "SSL", "ssl.truststore.certificates": self.certificate_pem}
        return {"bootstrap.servers": servers, **trusting, **{key.replace("_", "."): more[key] for key in more}}

    def issue_expired(self) -> Identity:
        return self.issue(not_after=_NOW - datetime.timedelta(hours=1))

    def issue_not_yet_valid(self) -> Identity:
        return self.issue(not_before=_NOW + datetime.timedelta(hours=1))

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey | dsa.DSAPublicKey,
        not_after: datetime.datetime,
        not_before: datetime.datetime = _NOW - 2 * _DAY,
    ) -> x509.CertificateBuilder:
        return x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=not_before,
            not_valid_after=not_after,
        )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
