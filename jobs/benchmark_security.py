"""The certificate of the benchmark's own broker, for its listener that speaks TLS."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from spark_kafka_sink.local import BrokerSecurity


def secured_listener(folder: Path) -> BrokerSecurity:
    """A listener SSL. Its key and certificate, for the loopback interface and for a day, are written to `folder`; the
    certificate stands for itself, and so `truststore` is what clients are to trust.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    keystore, truststore = folder / "broker.pem", folder / "authority.pem"
    keystore.touch(mode=0o600)
    keystore.write_bytes(private + certificate)
    truststore.write_bytes(certificate)
    return BrokerSecurity(listeners={"SSL": "SSL"}, keystore=keystore, truststore=truststore)
