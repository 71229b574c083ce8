"""Tell JKS, PKCS12 and PEM stores apart, and say what to change where the type that is set does not fit.

Java's default type is JKS, and its stores are mostly given without a type. Sources: sun.security.provider.JavaKeyStore
(magic FEEDFEED), RFC 7292 (PFX begins with version 3), RFC 7468 (PEM).
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Final, Literal

Kind = Literal["JKS", "PKCS12", "PEM"]

_JKS_MAGIC: Final = b"\xfe\xed\xfe\xed"
_DER_SEQUENCE: Final = 0x30
_VERSION_3: Final = b"\x02\x01\x03"
_START: Final = 4096
"""Bytes that are read: PEM files may have text before the first block."""
_BY_SUFFIX: Final[dict[str, Kind]] = {".jks": "JKS", ".p12": "PKCS12", ".pfx": "PKCS12"}


def kind_of(data: bytes) -> Kind | None:
    """Return the kind of the store that begins with `data`. None if the bytes do not say."""
    if data.startswith(_JKS_MAGIC):
        return "JKS"
    if data and data[0] == _DER_SEQUENCE and _VERSION_3 in data[2:9]:
        return "PKCS12"
    return "PEM" if b"-----BEGIN " in data else None


def kind_at(location: str) -> tuple[Kind | None, bool]:
    """Return the kind of the store at `location`, and whether its bytes say so.

    The name says so where this machine cannot read the file, because the file may be on the executors only.
    """
    try:
        if Path(location).is_file():
            with Path(location).open("rb") as file:
                return kind_of(file.read(_START)), True
    except (OSError, ValueError):  # a ValueError is that of a NUL in the path
        pass
    return _BY_SUFFIX.get(PurePath(location).suffix.lower()), False


def store_refusal(store: str, type_: str, location: str | None, *, has_password: bool) -> str | None:
    """Say what is wrong with the type of `store`, truststore or keystore, and what to change. None if nothing is."""
    kind, is_sure = (None, False) if location is None else kind_at(location)
    if kind == "JKS" and not is_sure and type_ == "PKCS12":
        return None  # keytool of Java 9 and later writes PKCS12 into files that are named .jks
    if kind == "JKS":
        return f"ssl.{store}.location is a JKS store, which only Java reads. {_convert(store)}"
    if kind is not None and kind != type_:
        return _other_type(store, kind, has_password=has_password)
    if type_ == "JKS":
        return f"ssl.{store}.type=JKS: only Java reads JKS stores. {_convert(store)}"
    if type_ == "PEM" and has_password:
        text = f"ssl.{store}.password does not go with ssl.{store}.type=PEM, the default. "
        if kind == "PEM" or location is None:
            return f"{text}{_OF_PEM[store].capitalize()}."
        other = f"If it is PKCS12, set ssl.{store}.type=PKCS12. If it is JKS: {_convert(store)}"
        return f"{text}If the store is PEM, {_OF_PEM[store]}. {other}"
    return None


def _other_type(store: str, kind: Kind, *, has_password: bool) -> str:
    also = f", and {_OF_PEM[store]}" if kind == "PEM" and has_password else ""
    return f"ssl.{store}.location is a {kind} file: set ssl.{store}.type={kind}{also}."


_OF_PEM: Final = {
    "truststore": "leave ssl.truststore.password out",
    "keystore": "give the password of the key as ssl.key.password instead of ssl.keystore.password",
}


def _convert(store: str) -> str:
    return (
        "Convert it: keytool -importkeystore -srckeystore <store>.jks -destkeystore <store>.p12 -deststoretype PKCS12."
        f" Then set ssl.{store}.type=PKCS12 and ssl.{store}.location to the new file."
    )
