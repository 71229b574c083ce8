"""The golden vectors of the Java client, and records in one plain form for all readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from kio.records.readers import read_batch

from spark_kafka_sink.record.decoder import DecodedBatch

GOLDEN = Path(__file__).parents[1] / "golden"


class PlainRecord(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def load(name: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    return loaded


def from_hex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def described_headers(record: dict[str, Any]) -> list[tuple[str, bytes | None]]:
    return [(name, from_hex(value)) for name, value in record["headers"]]


def plain(batch: DecodedBatch) -> list[PlainRecord]:
    return [PlainRecord(r.offset, r.key, r.value, r.headers) for r in batch.records]


def read_by_kio(data: bytes) -> list[PlainRecord]:
    """Return the records of one uncompressed batch, read by kio, which supports no timestamps below zero."""
    batch, size = read_batch(data, 0)
    assert size == len(data)
    return [
        PlainRecord(r.offset, r.key, r.value, tuple(((h.key or b"").decode(), h.value) for h in r.headers))
        for r in batch.records
    ]
