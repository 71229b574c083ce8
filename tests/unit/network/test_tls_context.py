"""How the settings of TLS are used: versions, suites, stores of every form, and refusals that show no secret."""

from __future__ import annotations

import os
import shutil
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from support.certificates import Authority

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.network.tls_context import (
    are_renewed,
    client_identity,
    file_in_memory,
    file_states,
    tls_context,
    trusted_certificates,
)

AUTHORITY = Authority()
CLIENT = AUTHORITY.issue(common_name="client")
PASSWORD = "hunter2"


def settings_of(**settings: Any) -> ProducerConfig:
    """Return settings with underscores for dots, added to those that trust AUTHORITY. None removes a setting."""
    return ProducerConfig.from_mapping(AUTHORITY.settings(**settings))


def context_of(**settings: Any) -> ssl.SSLContext:
    return tls_context(settings_of(**settings))


def test_certificates_and_names_are_verified_by_default(caplog: pytest.LogCaptureFixture) -> None:
    context = context_of()
    assert caplog.text == ""
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert not context.hostname_checks_common_name
    assert (context.minimum_version, context.maximum_version) == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.options & ssl.OP_NO_COMPRESSION
    unchecked = context_of(ssl_endpoint_identification_algorithm="")
    assert "any host with a certificate of a trusted authority is accepted as a broker" in caplog.text
    assert unchecked.verify_mode is ssl.CERT_REQUIRED
    assert not unchecked.check_hostname


def test_keys_of_a_connection_are_written_to_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys.log"))
    assert context_of().keylog_filename is None


def test_without_a_truststore_the_systems_authorities_are_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = tmp_path / "system.pem"
    store.write_text(AUTHORITY.certificate_pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(store))
    trusted = context_of(ssl_truststore_certificates=None).get_ca_certs(binary_form=True)
    assert ssl.PEM_cert_to_DER_cert(AUTHORITY.certificate_pem) in trusted


def test_with_a_truststore_the_systems_authorities_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(Authority("system").write(tmp_path / "system.pem")))
    assert context_of().get_ca_certs(binary_form=True) == [AUTHORITY.certificate.public_bytes(Encoding.DER)]


@pytest.mark.parametrize(
    ("settings", "lowest", "highest"),
    [
        ({"ssl_enabled_protocols": "TLSv1.3"}, "TLSv1_3", "TLSv1_3"),
        ({"ssl_enabled_protocols": "TLSv1.2"}, "TLSv1_2", "TLSv1_2"),
        ({"ssl_protocol": "TLSv1.2"}, "TLSv1_2", "TLSv1_2"),
        ({"ssl_protocol": "TLS"}, "TLSv1_2", "TLSv1_3"),
        ({"ssl_cipher_suites": "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"}, "TLSv1_2", "TLSv1_2"),
        (
            {
                "ssl_cipher_suites": "TLS_AES_256_GCM_SHA384,TLS_AES_128_GCM_SHA256,TLS_CHACHA20_POLY1305_SHA256",
            },
            "TLSv1_3",
            "TLSv1_3",
        ),
        (
            {
                "ssl_cipher_suites": "TLS_AES_256_GCM_SHA384,TLS_AES_128_GCM_SHA256,TLS_CHACHA20_POLY1305_SHA256,"
                "ECDHE-RSA-AES128-GCM-SHA256",
            },
            "TLSv1_2",
            "TLSv1_3",
        ),
    ],
)
def test_versions_are_those_enabled_for_which_a_suite_is_left(
    settings: dict[str, str], lowest: str, highest: str
) -> None:
    context = context_of(**settings)
    assert (context.minimum_version.name, context.maximum_version.name) == (lowest, highest)


@pytest.mark.parametrize(
    ("suite", "number"),
    [
        ("TLS_DHE_RSA_WITH_AES_128_GCM_SHA256", 0x009E),
        ("TLS_DHE_RSA_WITH_AES_256_GCM_SHA384", 0x009F),
        ("TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256", 0xC023),
        ("TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA384", 0xC024),
        ("TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256", 0xC027),
        ("TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA384", 0xC028),
        ("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", 0xC02B),
        ("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", 0xC02C),
        ("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", 0xC02F),
        ("TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", 0xC030),
        ("TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", 0xCCA8),
        ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256", 0xCCA9),
    ],
)
def test_suites_standard_name_is_that_suite(suite: str, number: int) -> None:
    """By IANA's numbers, which are sent."""
    ciphers = context_of(ssl_cipher_suites=suite).get_ciphers()
    assert [each["id"] & 0xFFFF for each in ciphers if each["protocol"] != "TLSv1.3"] == [number]


def test_suites_of_tls_1_2_are_those_named() -> None:
    context = context_of(ssl_cipher_suites="TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,ECDHE-ECDSA-AES256-GCM-SHA384")
    older = {each["name"] for each in context.get_ciphers() if each["protocol"] != "TLSv1.3"}
    assert older == {"ECDHE-RSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"ssl_truststore_certificates": "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----"},
            "cannot be read",
        ),
        (
            {"ssl_truststore_certificates": "-----BEGIN CERTIFICATE-----\nMIIB"},
            r"^ssl\.truststore\.certificates: .* cannot be read",
        ),
        (
            {"ssl_truststore_certificates": AUTHORITY.certificate_pem.replace("MI", "M\u2013I", 1)},
            r"^ssl\.truststore\.certificates: .* cannot be read",
        ),
        ({"ssl_keystore_location": "/no\0/file"}, r"^ssl\.keystore\.location=.* cannot be read: embedded null byte"),
        (
            {"ssl_truststore_certificates": None, "ssl_truststore_location": "/no/such/file"},
            "ssl.truststore.location=/no/such/file cannot be read: No such file",
        ),
        ({"ssl_keystore_location": "/no/such/file"}, "ssl.keystore.location=/no/such/file cannot be read"),
    ],
)
def test_unusable_file_is_refused_with_its_setting(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        context_of(**settings)


# ---- stores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["lines", "spaces", "escapes", "one line", "indented", "windows"])
def test_pem_text_may_have_lost_its_line_breaks(form: str) -> None:
    def mangled(pem: str) -> str:
        if form == "one line":
            first, *body, last = pem.strip().split("\n")
            return f"{first} {''.join(body)} {last}"
        breaks = {"lines": "\n", "spaces": " ", "escapes": "\\n", "indented": "\n    ", "windows": "\r\n"}
        return pem.replace("\n", breaks[form])

    context = context_of(
        ssl_truststore_certificates="Zertifikat für alles\n" + mangled(AUTHORITY.certificate_pem),
        ssl_keystore_certificate_chain=mangled(CLIENT.certificate_pem),
        ssl_keystore_key=mangled(CLIENT.key_pem(PASSWORD)),
        ssl_key_password=PASSWORD,
    )
    assert context.cert_store_stats()["x509_ca"] == 1


def test_old_encrypted_key_keeps_its_header_lines() -> None:
    secret = BestAvailableEncryption(PASSWORD.encode())
    key = CLIENT.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, secret).decode()
    assert "DEK-Info:" in key
    context_of(ssl_keystore_certificate_chain=CLIENT.certificate_pem, ssl_keystore_key=key, ssl_key_password=PASSWORD)


@pytest.mark.parametrize("password", [None, PASSWORD])
def test_pem_file_holds_key_and_chain_in_either_order(tmp_path: Path, password: str | None) -> None:
    for parts in (
        (CLIENT.key_pem(password), CLIENT.certificate_pem),
        (CLIENT.certificate_pem, CLIENT.key_pem(password)),
    ):
        file = tmp_path / "client.pem"
        file.write_text("".join(parts))
        settings = settings_of(ssl_keystore_location=str(file), ssl_key_password=password)
        tls_context(settings)
        identity = client_identity(settings)
        assert identity is not None
        assert identity.pem == "".join(parts)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "the private key is encrypted. Give its password: ssl.key.password"),
        ({"ssl_key_password": "wrong"}, "Is ssl.key.password right"),
        ({"ssl_key_password": PASSWORD * 300}, "ssl.key.password is too long"),
        (
            {"ssl_key_password": PASSWORD, "ssl_keystore_certificate_chain": AUTHORITY.issue().certificate_pem},
            "key values mismatch",
        ),
        (
            {
                "ssl_key_password": PASSWORD,
                "ssl_keystore_certificate_chain": CLIENT.certificate_pem.replace("MI", "M\u2013I", 1),
            },
            "cannot be used",
        ),
    ],
)
def test_key_that_cannot_be_used_is_refused_and_not_shown(settings: dict[str, str], text: str) -> None:
    given = {
        "ssl_keystore_certificate_chain": CLIENT.certificate_pem,
        "ssl_keystore_key": CLIENT.key_pem(PASSWORD),
        **settings,
    }
    with pytest.raises(ConfigError, match=text) as refusal:
        context_of(**given)
    assert str(refusal.value).startswith("ssl.keystore.key: ")
    assert PASSWORD not in str(refusal.value)
    assert refusal.value.__cause__ is None


OLD_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIGwMBsGCSqGSIb3DQEFAzAOBAhTbISDhMyPMwICCAAEgZAZOvXWU+XXlxWlWtu/
+unqItVBNqjWCkxsGJ5fNsSUJhIe76k0haaBcvIkEK6hfBRqtnO7I8vTIYKWMKqr
37U2yGpmt3I3YtRcJYhUrec0TRNEuu7qntSJg2Yj1CKHLIbDWZICDvCPgoq6wGSE
aMrAukUOWTR0difzAMEwWHCGno1DFkym6CjuDpjMU0fnq+g=
-----END ENCRYPTED PRIVATE KEY-----
"""
"""Encrypted by `openssl pkcs8 -v1 PBE-MD5-DES -passout pass:pw`, which OpenSSL 3 no longer reads, but Java does."""


def test_old_key_encryption_is_named_as_a_possible_cause() -> None:
    with pytest.raises(
        ConfigError, match=r"Is ssl\.key\.password right, is the key encrypted by PBES2 .*openssl pkcs8 -topk8"
    ):
        context_of(
            ssl_keystore_key=OLD_KEY, ssl_key_password="pw", ssl_keystore_certificate_chain=CLIENT.certificate_pem
        )


@pytest.mark.parametrize("content", ["", CLIENT.certificate_pem, CLIENT.key_pem()])
def test_keystore_file_without_key_or_certificate_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "client.pem"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"must contain a private key and its certificate in PEM"):
        context_of(ssl_keystore_location=str(file))


def test_truststore_file_with_other_text_gives_its_certificates(tmp_path: Path) -> None:
    file = tmp_path / "trust.pem"
    file.write_text(CLIENT.key_pem() + AUTHORITY.certificate_pem)
    trusted = trusted_certificates(settings_of(ssl_truststore_certificates=None, ssl_truststore_location=str(file)))
    assert trusted is not None
    assert trusted.pem == AUTHORITY.certificate_pem


def test_truststore_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trust.pem"
    file.write_bytes(bytes(100))
    with pytest.raises(ConfigError, match=r"there is no certificate in it. Its type is PEM"):
        context_of(ssl_truststore_certificates=None, ssl_truststore_location=str(file))


@pytest.mark.parametrize("store", ["truststore", "keystore"])
def test_store_on_the_executor_is_checked_by_its_bytes(tmp_path: Path, store: str) -> None:
    file = tmp_path / "store"
    settings = settings_of(**{"ssl_truststore_certificates": None, f"ssl_{store}_location": str(file)})
    file.write_bytes(b"\xfe\xed\xfe\xed" + bytes(100))
    with pytest.raises(ConfigError, match=rf"ssl\.{store}\.location is a JKS store.*keytool"):
        _ = trusted_certificates(settings), client_identity(settings)


@pytest.mark.parametrize("name", ["store.p12", "store.jks"])
def test_java_store_is_read_with_the_advised_type(tmp_path: Path, name: str) -> None:
    settings = pkcs12_settings(tmp_path)
    file = Path(settings["ssl_truststore_location"]).rename(tmp_path / name)
    settings |= {"ssl_truststore_location": str(file), "ssl_truststore_type": None}
    with pytest.raises(ConfigError, match=r"set ssl\.truststore\.type=PKCS12"):
        settings_of(**settings)
    assert context_of(**{**settings, "ssl_truststore_type": "PKCS12"}).cert_store_stats()["x509_ca"] == 1


def pkcs12_files(folder: Path) -> tuple[Path, Path]:
    secret = BestAvailableEncryption(PASSWORD.encode())
    trust, own = folder / "trust.p12", folder / "own.p12"
    certificate = pkcs12.PKCS12Certificate(AUTHORITY.certificate, b"authority")
    trust.write_bytes(pkcs12.serialize_java_truststore([certificate], secret))
    own.write_bytes(
        pkcs12.serialize_key_and_certificates(b"me", CLIENT.key, CLIENT.certificate, [AUTHORITY.certificate], secret)
    )
    return trust, own


def pkcs12_settings(folder: Path) -> dict[str, Any]:
    trust, own = pkcs12_files(folder)
    return {
        "ssl_truststore_certificates": None,
        "ssl_truststore_type": "PKCS12",
        "ssl_truststore_location": str(trust),
        "ssl_truststore_password": PASSWORD,
        "ssl_keystore_type": "PKCS12",
        "ssl_keystore_location": str(own),
        "ssl_keystore_password": PASSWORD,
    }


def test_stores_of_java_in_pkcs12_are_read(tmp_path: Path) -> None:
    assert context_of(**pkcs12_settings(tmp_path)).cert_store_stats()["x509_ca"] == 1


def test_pkcs12_truststore_trusts_the_certificate_of_a_key_too(tmp_path: Path) -> None:
    _, own = pkcs12_files(tmp_path)
    context = context_of(**{**pkcs12_settings(tmp_path), "ssl_truststore_location": str(own)})
    assert context.cert_store_stats()["x509"] == 2


def test_keystore_without_own_password_uses_the_key_password(tmp_path: Path) -> None:
    settings = {**pkcs12_settings(tmp_path), "ssl_keystore_password": None, "ssl_key_password": PASSWORD}
    identity = client_identity(settings_of(**settings))
    assert identity is not None
    assert identity.pem.endswith(CLIENT.certificate_pem + AUTHORITY.certificate_pem)


@pytest.mark.parametrize("purpose", ["truststore", "keystore"])
def test_pkcs12_store_that_cannot_be_opened_is_refused(tmp_path: Path, purpose: str) -> None:
    with pytest.raises(ConfigError, match=f"ssl.{purpose}.location=.* or ssl.{purpose}.password is wrong") as refusal:
        context_of(**{**pkcs12_settings(tmp_path), f"ssl_{purpose}_password": "other"})
    assert "other" not in str(refusal.value)


def test_pkcs12_store_without_a_key_is_refused(tmp_path: Path) -> None:
    settings = pkcs12_settings(tmp_path)
    with pytest.raises(ConfigError, match="no private key with its certificate"):
        context_of(**{**settings, "ssl_keystore_location": settings["ssl_truststore_location"]})


def test_pkcs12_store_with_a_key_but_no_certificate_is_refused(tmp_path: Path) -> None:
    settings = pkcs12_settings(tmp_path)
    secret = BestAvailableEncryption(PASSWORD.encode())
    own = pkcs12.serialize_key_and_certificates(b"me", CLIENT.key, None, None, secret)
    Path(settings["ssl_keystore_location"]).write_bytes(own)
    with pytest.raises(ConfigError, match="no private key with its certificate"):
        context_of(**settings)


def test_pkcs12_store_may_have_no_password(tmp_path: Path) -> None:
    settings = {**pkcs12_settings(tmp_path), "ssl_truststore_password": None}
    certificate = pkcs12.PKCS12Certificate(AUTHORITY.certificate, b"authority")
    open_store = pkcs12.serialize_java_truststore([certificate], NoEncryption())
    Path(settings["ssl_truststore_location"]).write_bytes(open_store)
    assert context_of(**settings).cert_store_stats()["x509_ca"] == 1


def test_without_the_extra_pkcs12_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = pkcs12_settings(tmp_path)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.serialization", None)
    with pytest.raises(ConfigError, match=r"pip install 'spark-kafka-sink\[pkcs12\]'"):
        context_of(**settings)


@pytest.mark.parametrize("has_memory_files", [True, False])
def test_key_file_is_private_and_removed(has_memory_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_memory_files:
        monkeypatch.delattr(os, "memfd_create")
    with file_in_memory("private") as path:
        assert Path(path).read_text() == "private"
        if not has_memory_files:
            assert Path(path).stat().st_mode & 0o777 == 0o600
    assert not Path(path).exists()
    with pytest.raises(RuntimeError), file_in_memory("private") as path:
        raise RuntimeError
    assert not Path(path).exists()


def test_started_programs_do_not_inherit_the_key() -> None:
    with file_in_memory("private") as path:
        assert path.startswith("/proc/self/fd/")
        assert not os.get_inheritable(int(path.rpartition("/")[2]))


def test_intermediate_authority_in_the_truststore_is_enough() -> None:
    assert context_of().verify_flags & ssl.VERIFY_X509_PARTIAL_CHAIN


def test_endless_truststore_file_is_refused() -> None:
    """Bug: reading it filled all memory."""
    with pytest.raises(ConfigError, match="more than 16777216 bytes"):
        trusted_certificates(settings_of(ssl_truststore_certificates=None, ssl_truststore_location="/dev/zero"))


def certificates_in(text: str) -> str:
    trusted = trusted_certificates(settings_of(ssl_truststore_certificates=text))
    assert trusted is not None
    return trusted.pem


@pytest.mark.parametrize("labels", [1, 20_000])
def test_blocks_without_an_end_take_linear_time(labels: int) -> None:
    """Bug: 540 KB of them took a minute."""
    begins = "".join(f"-----BEGIN L{number % labels}-----\n" for number in range(20_000))
    text = f"{begins}-----BEGIN CERTIFICATE-----\n"
    started = time.process_time()
    assert certificates_in(text) == ""
    assert time.process_time() - started < 2


def test_blocks_after_one_without_an_end_are_found() -> None:
    block = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    assert certificates_in(f"-----BEGIN A-----\n{block}") == block


@pytest.fixture
def in_files(tmp_path: Path) -> ProducerConfig:
    return settings_of(
        ssl_truststore_certificates=None,
        ssl_truststore_location=str(AUTHORITY.write(tmp_path / "ca.pem")),
        ssl_keystore_location=str(CLIENT.write(tmp_path / "client.pem")),
    )


@pytest.mark.parametrize("name", ["ca.pem", "client.pem"])
@pytest.mark.parametrize("what", ["time", "size", "inode"])
def test_each_sign_of_a_renewed_file_is_seen(in_files: ProducerConfig, tmp_path: Path, name: str, what: str) -> None:
    path = tmp_path / name
    before, read = path.stat(), file_states(in_files)
    assert not are_renewed(in_files, read)
    if what == "inode":
        os.replace(shutil.copy2(path, tmp_path / "new"), path)
    elif what == "size":
        path.write_text(path.read_text() + "\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + (what == "time")))
    assert are_renewed(in_files, read)
    assert not are_renewed(in_files, file_states(in_files))


@pytest.mark.parametrize("name", ["ca.pem", "client.pem"])
@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read: No such file"), ("-----BEGIN CERTIFICATE-----\nMII", "certificate")]
)
def test_files_that_cannot_be_used_are_not_renewed(
    in_files: ProducerConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: str | None,
    reason: str,
) -> None:
    """A tool may remove a file before it writes the new one. A query must not end because of that moment."""
    path, read = tmp_path / name, file_states(in_files)
    whole = path.read_text()
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    for _ in range(2):
        assert not are_renewed(in_files, read)
    (warning,) = caplog.messages
    assert f"={path}" in warning
    assert reason in warning
    assert warning.endswith("connections go on with what was read before.")
    path.write_text(whole)
    os.utime(path, ns=(0, 0))
    assert are_renewed(in_files, read)


def test_settings_without_files_are_never_renewed() -> None:
    config = settings_of()
    assert file_states(config) == ()
    assert not are_renewed(config, ())
