"""Frames that are sent and received."""

from __future__ import annotations

import dataclasses
import logging
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader
from support.random_entities import random_entity, response_payload, varint
from support.scripted_broker.responses import RawErrorCode

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.protocol.framing import RecordChunks, correlation_id_of, encode_request, parse_response
from spark_kafka_sink.protocol.handshake import ApiVersionsRequest
from spark_kafka_sink.protocol.metadata import MetadataRequest
from spark_kafka_sink.protocol.produce import ProduceRequest
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey, request_type, response_type

LATEST = [pytest.param(api_key, versions.latest, id=api_key.name) for api_key, versions in SUPPORTED_VERSIONS.items()]
OLDEST = [
    pytest.param(api_key, versions.oldest, id=f"{api_key.name}-oldest")
    for api_key, versions in SUPPORTED_VERSIONS.items()
]


def full_entity(entity_type: object) -> object:
    """Return the largest of many random messages, which has every kind of part."""
    candidates = [random_entity(entity_type, Random(seed)) for seed in range(20)]
    return max(candidates, key=lambda entity: min(600, len(response_payload(entity, 1))))


# ---- requests --------------------------------------------------------------------------------------------------------


def test_frame_is_size_header_and_body() -> None:
    entity = MetadataRequest(("flights",)).build(12)
    frame = b"".join(encode_request(entity, correlation_id=77, client_id="sink"))
    assert struct.unpack_from(">i", frame) == (len(frame) - 4,)
    header, header_size = entity_reader(type(entity).__header_schema__)(frame, 4)
    body, body_size = entity_reader(type(entity))(frame, 4 + header_size)
    assert (header.correlation_id, header.client_id) == (77, "sink")
    assert (header.request_api_key, header.request_api_version) == (3, 12)
    assert body == entity
    assert 4 + header_size + body_size == len(frame)


@pytest.mark.parametrize("version", [3, 8, 9, 12])
def test_record_batches_are_sent_without_a_copy(version: int) -> None:
    chunks = [memoryview(bytearray(61)), memoryview(bytearray(b"x" * 1000)), memoryview(bytearray(b"y" * 5))]
    request = ProduceRequest(-1, 1000, {"t": [(0, RecordChunks(chunks[:2])), (1, RecordChunks(chunks[2:]))]})
    frame = encode_request(request.build(version), 1, None)
    for chunk in chunks:
        assert any(piece.obj is chunk.obj for piece in frame), "a chunk was copied"
    chunks[1][:] = b"z" * 1000
    joined = b"".join(frame)
    assert b"z" * 1000 in joined
    assert struct.unpack_from(">i", joined) == (len(joined) - 4,)


def test_partition_with_empty_records_leaves_no_empty_buffer() -> None:
    frame = encode_request(ProduceRequest(1, 1, {"t": [(0, RecordChunks([memoryview(b"")]))]}).build(9), 1, None)
    assert all(piece.nbytes for piece in frame)


def test_value_beyond_its_field_names_the_request() -> None:
    with pytest.raises(ProtocolError, match="Metadata cannot be encoded"):
        encode_request(MetadataRequest(("a" * 40_000,)).build(4), 1, None)
    with pytest.raises(ProtocolError, match="Produce cannot be encoded"):
        encode_request(ProduceRequest(2**20, 1, {}).build(9), 1, None)


def test_frame_above_2_gib_is_refused() -> None:
    two_mib = memoryview(bytes(2 * 1024 * 1024))
    with pytest.raises(ProtocolError, match=r"Produce is 2147483\d+ bytes"):
        encode_request(ProduceRequest(1, 1, {"t": [(0, RecordChunks([two_mib] * 1024))]}).build(9), 1, None)


def test_repr_of_chunks_shows_size_not_contents() -> None:
    chunks = RecordChunks([memoryview(b"secret"), memoryview(b"x")])
    assert repr(chunks) == "RecordChunks(7 bytes in 2 buffers)"


# ---- responses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))])
def test_response_is_read_from_any_buffer(buffer: type) -> None:
    entity = full_entity(response_type(ApiKey.PRODUCE, 12))
    payload = buffer(response_payload(entity, 5))
    assert parse_response(request_type(ApiKey.PRODUCE, 12), payload) == (5, entity)


@pytest.mark.parametrize(("api_key", "version"), LATEST + OLDEST)
def test_response_cut_short_anywhere_is_a_protocol_error(api_key: int, version: int) -> None:
    payload = response_payload(full_entity(response_type(api_key, version)), 1)
    for length in range(len(payload)):
        with pytest.raises(ProtocolError):
            parse_response(request_type(api_key, version), payload[:length])


@pytest.mark.parametrize(("api_key", "version"), LATEST + OLDEST)
def test_bytes_after_a_response_are_ignored(api_key: int, version: int, caplog: pytest.LogCaptureFixture) -> None:
    payload = response_payload(full_entity(response_type(api_key, version)), 1)
    meant = parse_response(request_type(api_key, version), payload)
    for more in (b"\0", b"\xff" * 200):
        assert parse_response(request_type(api_key, version), payload + more) == meant
    assert not caplog.records
    with caplog.at_level(logging.DEBUG):
        parse_response(request_type(api_key, version), payload + b"\0")
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "has 1 bytes more than it needs; they are ignored." in caplog.text


def test_length_beyond_the_end_is_an_early_end() -> None:
    payload = struct.pack(">ihhi", 1, 0, -1, 5) + b"four"
    with pytest.raises(ProtocolError, match="ends too early"):
        parse_response(request_type(ApiKey.SASL_AUTHENTICATE, 0), payload)


@pytest.mark.parametrize(("api_key", "version"), LATEST + OLDEST)
def test_flipped_bytes_give_an_entity_or_a_protocol_error(api_key: int, version: int) -> None:
    random = Random(int(api_key) * 100 + version)
    payload = response_payload(full_entity(response_type(api_key, version)), 1)
    logging.disable(logging.WARNING)
    try:
        for _ in range(400):
            broken = bytearray(payload)
            for _ in range(random.choice((1, 1, 2, 8))):
                broken[random.randrange(4, len(broken))] = random.choice((0, 0x7F, 0x80, 0xFF, random.randrange(256)))
            try:
                _, entity = parse_response(request_type(api_key, version), broken)
            except ProtocolError:
                continue
            assert type(entity) in {
                response_type(api_key, version),
                response_type(api_key, 0) if api_key == ApiKey.API_VERSIONS else None,
            }
    finally:
        logging.disable(logging.NOTSET)


def test_error_code_unknown_to_kio_is_kept_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    payload = struct.pack(">iihqh", 1, 0, 999, 7, 3)
    _, response = parse_response(request_type(ApiKey.INIT_PRODUCER_ID, 1), payload)
    assert response.error_code == 999
    assert (response.producer_id, response.producer_epoch) == (7, 3)
    assert "unknown error code 999" in caplog.text


def places_of_codes(entity: Any) -> Iterator[tuple[Any, str]]:
    """Return the error code fields of an entity in order, without those inside tags."""
    for declared in dataclasses.fields(entity):
        value = getattr(entity, declared.name)
        if declared.metadata.get("kafka_type") == "error_code":
            yield entity, declared.name
        elif "tag" not in declared.metadata:
            for item in value if isinstance(value, tuple) else (value,):
                yield from places_of_codes(item) if dataclasses.is_dataclass(item) else ()


@pytest.mark.parametrize(("api_key", "version"), LATEST + OLDEST)
def test_codes_unknown_to_kio_keep_their_places(api_key: int, version: int) -> None:
    """In addition to known codes, also UNKNOWN_SERVER_ERROR."""
    for seed in range(20):
        random = Random(seed)
        entity = random_entity(response_type(api_key, version), random)
        sent = []
        for owner, name in places_of_codes(entity):
            sent.append(random.choice((999, 12_345, -7, -1, 0, 87)))
            object.__setattr__(owner, name, RawErrorCode(sent[-1]))
        _, parsed = parse_response(request_type(api_key, version), response_payload(entity, 1))
        assert [int(getattr(owner, name)) for owner, name in places_of_codes(parsed)] == sent


def test_response_with_many_unknown_codes_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: a response of 2 MiB was logged in 69,905 warnings."""
    partition = struct.pack(">ihqq", 0, 999, 7, -1)
    payload = struct.pack(">iih", 1, 1, 1) + b"t" + struct.pack(">i", 50) + partition * 50 + struct.pack(">i", 0)
    parse_response(request_type(ApiKey.PRODUCE, 3), payload)
    (record,) = caplog.records
    assert "and 49 more such places" in record.getMessage()


def test_tags_unknown_to_kio_are_skipped_on_every_level() -> None:
    unknown = varint(90) + varint(3) + b"abc"
    leader = varint(0) + varint(9 + len(unknown)) + struct.pack(">ii", 4, 17) + b"\x01" + unknown
    partition = struct.pack(">ihqqq", 6, 6, -1, -1, -1) + b"\x01\x00" + b"\x02" + leader + unknown
    topic = varint(2) + b"t" + varint(2) + partition + b"\x01" + unknown
    payload = struct.pack(">i", 8) + b"\x01" + unknown + varint(2) + topic + struct.pack(">i", 250) + b"\x01" + unknown
    correlation_id, response = parse_response(request_type(ApiKey.PRODUCE, 10), payload)
    (found,) = response.responses[0].partition_responses
    assert correlation_id == 8
    assert (found.index, found.current_leader.leader_id, found.current_leader.leader_epoch) == (6, 4, 17)
    assert response.throttle_time.total_seconds() == 0.25


def test_unknown_error_code_in_a_tag_changes_its_size() -> None:
    """No response has a code in a tag yet: the features of ApiVersions stand in, with an unknown tag inside."""
    feature = varint(3) + b"tv" + struct.pack(">hh", 2, 2) + b"\x01" + varint(40) + varint(1) + b"?"
    content = varint(2) + feature
    tags = b"\x01" + varint(2) + varint(len(content)) + content
    payload = struct.pack(">ih", 3, 0) + varint(1) + struct.pack(">i", 0) + tags
    _, response = parse_response(request_type(ApiKey.API_VERSIONS, 3), payload)
    assert [(feature.name, feature.max_version_level) for feature in response.finalized_features] == [("tv", 2)]


def test_fields_after_an_unknown_nested_tag_are_read() -> None:
    features = [varint(3) + name + struct.pack(">hh", 2, 2) for name in (b"kv", b"tv")]
    content = varint(3) + features[0] + b"\x01" + varint(40) + varint(1) + b"?" + features[1] + b"\x00"
    tags = b"\x02" + varint(1) + varint(8) + struct.pack(">q", 5) + varint(2) + varint(len(content)) + content
    payload = struct.pack(">ih", 3, 0) + varint(1) + struct.pack(">i", 0) + tags
    _, response = parse_response(request_type(ApiKey.API_VERSIONS, 3), payload)
    assert [feature.name for feature in response.finalized_features] == ["kv", "tv"]
    assert response.finalized_features_epoch == 5


def test_tag_shorter_than_its_size_is_a_protocol_error() -> None:
    leader = varint(0) + varint(10) + struct.pack(">ii", 4, 17) + b"\x00" + b"\x00"
    partition = struct.pack(">ihqqq", 6, 6, -1, -1, -1) + b"\x01\x00" + b"\x01" + leader
    payload = struct.pack(">i", 8) + b"\x00" + varint(2) + varint(2) + b"t" + varint(2) + partition + b"\x00" * 6
    with pytest.raises(ProtocolError, match="tag 0 does not fill its 10 bytes"):
        parse_response(request_type(ApiKey.PRODUCE, 10), payload)


def test_null_in_a_field_without_nulls_is_a_protocol_error() -> None:
    """Bug: the text had no full stop, and the sentence after it, about the port, was joined to it."""
    payload = struct.pack(">i", 1) + b"\x00" + varint(0) + struct.pack(">i", 0) + b"\x00"
    with pytest.raises(ProtocolError, match=r"a count of -1\.$"):
        parse_response(request_type(ApiKey.PRODUCE, 9), payload)


def test_date_beyond_the_calendar_is_a_protocol_error() -> None:
    partition = struct.pack(">ihqq", 0, 0, 5, 2**62)
    topics = struct.pack(">ih", 1, 1) + b"t" + struct.pack(">i", 1) + partition
    with pytest.raises(ProtocolError, match="does not parse"):
        parse_response(request_type(ApiKey.PRODUCE, 3), struct.pack(">i", 1) + topics + struct.pack(">i", 0))


@pytest.mark.parametrize("count", [33, 34, 35])
def test_response_with_many_topics_is_not_read_as_api_versions(count: int) -> None:
    """After the header, 34 topics begin like the error code 35, UNSUPPORTED_VERSION."""
    topic = varint(2) + b"t" + varint(1) + b"\x00"
    payload = struct.pack(">i", 1) + b"\x00" + varint(count + 1) + topic * count + struct.pack(">i", 0) + b"\x00"
    _, response = parse_response(request_type(ApiKey.PRODUCE, 9), payload)
    assert len(response.responses) == count


def test_error_names_the_request_and_the_version() -> None:
    with pytest.raises(ProtocolError, match=r"InitProducerId's response \(version 1, 6 bytes\) ends too early"):
        parse_response(request_type(ApiKey.INIT_PRODUCER_ID, 1), b"\0" * 6)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_unsupported_api_versions_answer_is_read_in_version_0(version: int) -> None:
    payload = struct.pack(">ihihhh", 12, 35, 1, 18, 0, 2)
    correlation_id, response = parse_response(type(ApiVersionsRequest("s", "1").build(version)), payload)
    assert (correlation_id, response.error_code) == (12, ErrorCode.unsupported_version)
    assert [(each.api_key, each.min_version, each.max_version) for each in response.api_keys] == [(18, 0, 2)]


@pytest.mark.parametrize("payload", [b"", b"\0\0\0"])
def test_response_without_correlation_id_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="too short for a correlation id"):
        correlation_id_of(payload)
