"""The check before kio reads: it accepts all that the schema allows, and refuses bytes that would break kio."""

from __future__ import annotations

import struct
from random import Random

import pytest
from kio.serial import entity_reader
from support.random_entities import random_entity, response_payload

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.protocol.framing import parse_response
from spark_kafka_sink.protocol.layout import Edit, apply_edits, layout_of, read_varint, write_varint
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, request_type, response_type

RESPONSES = [
    pytest.param(api_key, version, id=f"{api_key.name}-{version}")
    for api_key, versions in SUPPORTED_VERSIONS.items()
    for version in range(versions.oldest, versions.latest + 1)
]


@pytest.mark.parametrize(("api_key", "version"), RESPONSES)
def test_every_valid_message_passes_unedited_to_its_last_byte(api_key: int, version: int) -> None:
    entity_type = response_type(api_key, version)
    for seed in range(25):
        entity = random_entity(entity_type, Random(seed))
        payload = response_payload(entity, correlation_id=seed)
        edits: list[Edit] = []
        at = layout_of(entity_type.__header_schema__)(payload, 0, edits)
        assert layout_of(entity_type)(payload, at, edits) == len(payload)
        assert {edit.code for edit in edits} <= {-1}, "UNKNOWN_SERVER_ERROR is noted and not changed"
        assert apply_edits(payload, edits) == payload
        assert entity_reader(entity_type)(payload, at) == (entity, len(payload) - at)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2**28 - 1, 2**28, 2**31 - 1])
def test_varint_reads_back(value: int) -> None:
    encoded = write_varint(value)
    assert read_varint(b"\xff" + encoded + b"\xff", 1) == (value, 1 + len(encoded))


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        (b"\xff\xff\xff\xff\xff\x01", "past five bytes"),
        (b"\x80\x80\x80\x80\x08", "beyond 31 bits"),
        (b"\xff\xff\xff\xff\x7f", "beyond 31 bits"),
    ],
)
def test_varint_that_is_too_long_or_too_large_is_refused(encoded: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        read_varint(encoded, 0)


def test_varint_that_ends_early_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        read_varint(b"\x80\x80", 0)


@pytest.mark.parametrize("count", [2**31 - 1, 2**30, 1000, 2])
def test_count_is_checked_against_the_bytes_before_kio_reads_it(count: int) -> None:
    walk = layout_of(response_type(0, 3))
    with pytest.raises(ProtocolError, match=f"a count of {count} with 4 bytes left"):
        walk(struct.pack(">i", count) + b"\0" * 4, 0, [])


def test_count_below_null_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a count of -2"):
        layout_of(response_type(1, 4))(struct.pack(">ii", 0, -2), 0, [])


@pytest.mark.parametrize(("sent_ms", "read_ms"), [(-1, 0), (0, 0), (1_700_000_000_123, 1_700_000_000_123)])
def test_missing_time_is_read_as_the_epoch(sent_ms: int, read_ms: int) -> None:
    """A transaction that never began has no start time, and kio accepts no negative time."""
    state = b"\0\0" + b"\x02t" + b"\x06Empty" + struct.pack(">iqqh", 60_000, sent_ms, 7, 3) + b"\x01\0"
    payload = struct.pack(">i", 9) + b"\0" + struct.pack(">i", 0) + b"\x03" + state * 2 + b"\0"
    _, response = parse_response(request_type(65, 0), payload)
    for described in response.transaction_states:
        assert described.transaction_start_time.timestamp() == read_ms / 1000
        assert (described.transactional_id, described.producer_id, described.producer_epoch) == ("t", 7, 3)
    with pytest.raises(ProtocolError):
        parse_response(request_type(65, 0), payload[:-20])
