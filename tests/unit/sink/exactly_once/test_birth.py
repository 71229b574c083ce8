"""The record of a prefix's birth: what it says, and what is refused."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.sink.exactly_once.birth import Birth, birth_key, prefix_of

BIRTH = Birth(1_700_000_000_000, 16, 3, "an id", is_adopted=True)


def test_birth_comes_back_as_it_was_written() -> None:
    for birth in (BIRTH, Birth(0, 1, 1)):
        assert Birth.from_bytes(birth.to_bytes(), "here") == birth


def test_key_of_a_birth_is_no_prefix_and_names_its_own() -> None:
    assert prefix_of(birth_key(b"orders")) == b"orders"
    assert prefix_of(b"orders") is None
    assert not birth_key(b"orders").decode().isprintable()  # as every transactional.id.prefix is


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"version": 2}, "has version 2, and this release knows only 1"),
        ({"version": "\x1b[2J"}, r"has version '\\x1b\[2J'"),
        ({"time_ms": 10**400}, "out of range"),
        ({"time_ms": -1}, "out of range"),
        ({"partitions": "16"}, "out of range"),
        ({"replicas": True}, "out of range"),
        ({"topic_id": None, "checksum": 1}, "checksum"),
    ],
    ids=str,
)
def test_birth_of_other_content_is_refused_by_name(changed: dict[str, Any], text: str) -> None:
    content = json.loads(BIRTH.to_bytes()) | changed
    if "checksum" not in changed:
        del content["checksum"]
        content["checksum"] = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(ProtocolError, match=f"^here: .*{text}"):
        Birth.from_bytes(json.dumps(content).encode(), "here")


def test_error_about_a_birth_is_short_whatever_version_it_names() -> None:
    with pytest.raises(ProtocolError) as error:
        Birth.from_bytes(json.dumps({"checksum": 1, "version": "\x1b[2J" * 10_000}).encode(), "here")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"checksum":1}'])
def test_what_is_no_birth_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^here: this is not a birth record: \w+\.$"):
        Birth.from_bytes(data, "here")
