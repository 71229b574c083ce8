"""The type of a TLS store against what its file holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.common.errors import ConfigError
from spark_kafka_sink.common.security import kind_at, kind_of

JKS = bytes.fromhex("feedfeed00000002") + bytes(60)
PKCS12 = bytes.fromhex("308204d3020103308204")
PEM = b"subject=CN = ca\n-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
DER_CERTIFICATE = bytes.fromhex("308202233082018ca003020102")
STORES = ["truststore", "keystore"]


def check(store: str, location: str | Path, **settings: str) -> None:
    given = {f"ssl.{store}.{key}": value for key, value in {"location": str(location), **settings}.items()}
    ProducerConfig.from_mapping({"bootstrap.servers": "h:1", "security.protocol": "SSL", **given})


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (JKS, "JKS"),
        (PKCS12, "PKCS12"),
        (bytes.fromhex("3080020103308006"), "PKCS12"),
        (PEM, "PEM"),
        (DER_CERTIFICATE, None),
        (b"", None),
    ],
)
def test_first_bytes_give_the_kind_of_a_store(data: bytes, kind: str | None) -> None:
    assert kind_of(data) == kind


@pytest.mark.parametrize(
    ("name", "kind"), [("t.jks", "JKS"), ("T.JKS", "JKS"), ("t.p12", "PKCS12"), ("t.pfx", "PKCS12"), ("t.pem", None)]
)
def test_name_gives_the_kind_of_a_missing_file(name: str, kind: str | None, tmp_path: Path) -> None:
    assert kind_at(str(tmp_path / name)) == (kind, False)


def test_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.jks")
    assert kind_at(str(tmp_path / "t.jks")) == ("JKS", False)


def test_name_with_a_nul_does_not_crash() -> None:
    assert kind_at("t\0.pem") == (None, False)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("settings", [{}, {"password": "hunter2"}, {"type": "JKS", "password": "hunter2"}])
@pytest.mark.parametrize("is_there", [True, False])
def test_jks_store_is_refused_with_the_command_that_converts_it(
    store: str, settings: dict[str, str], is_there: bool, tmp_path: Path
) -> None:
    file = tmp_path / "store.jks"
    if is_there:
        file.write_bytes(JKS)
    with pytest.raises(ConfigError, match=rf"only Java reads.*keytool -importkeystore.*ssl\.{store}\.type=PKCS12") as e:
        check(store, file, **settings)
    assert "hunter2" not in str(e.value)


def test_jks_bytes_are_refused_with_any_name_and_type(tmp_path: Path) -> None:
    file = tmp_path / "store.p12"
    file.write_bytes(JKS)
    with pytest.raises(ConfigError, match="location is a JKS store, which only Java reads"):
        check("truststore", file, type="PKCS12", password="x")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", ["store.p12", "store.pfx"])
def test_pkcs12_store_without_a_type_is_refused_with_the_type(store: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"is a PKCS12 file: set ssl\.{store}\.type=PKCS12"):
        check(store, tmp_path / name, password="x")
    check(store, tmp_path / name, password="x", type="PKCS12")


@pytest.mark.parametrize("settings", [{}, {"password": "x"}, {"type": "JKS", "password": "x"}])
def test_pkcs12_in_a_file_named_jks_only_needs_the_type(settings: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "store.jks"
    file.write_bytes(PKCS12)
    with pytest.raises(ConfigError, match=r"is a PKCS12 file: set ssl\.truststore\.type=PKCS12"):
        check("truststore", file, **settings)
    check("truststore", file, **{**settings, "type": "PKCS12"})


def test_missing_file_named_jks_may_be_pkcs12(tmp_path: Path) -> None:
    check("truststore", tmp_path / "store.jks", type="PKCS12", password="x")


@pytest.mark.parametrize("type_", ["JKS", "PKCS12"])
@pytest.mark.parametrize(
    ("store", "also"),
    [("truststore", "leave ssl.truststore.password out"), ("keystore", "as ssl.key.password instead of")],
)
def test_pem_with_another_type_is_refused_with_every_change(store: str, also: str, type_: str, tmp_path: Path) -> None:
    file = tmp_path / "store.pem"
    file.write_bytes(PEM)
    with pytest.raises(ConfigError, match=rf"is a PEM file: set ssl\.{store}\.type=PEM, and .*{also}"):
        check(store, file, type=type_, password="x")
    check(store, file, type="PEM")


@pytest.mark.parametrize(("store", "also"), [("truststore", "Leave ssl"), ("keystore", "as ssl.key.password")])
def test_password_of_a_pem_store_is_refused(store: str, also: str, tmp_path: Path) -> None:
    file = tmp_path / "store"
    file.write_bytes(PEM)
    with pytest.raises(ConfigError, match=also) as refusal:
        check(store, file, password="x")
    assert "PKCS12" not in str(refusal.value)


def test_password_of_an_unknown_store_names_each_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"If the store is PEM, .* If it is PKCS12, set .* If it is JKS: .*keytool"):
        check("truststore", tmp_path / "store", password="x")
