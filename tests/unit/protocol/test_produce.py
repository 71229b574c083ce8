"""The Produce request that is written without kio, compared with that of kio."""

from __future__ import annotations

import struct
from random import Random

import pytest

from spark_kafka_sink.common.errors import ProtocolError
from spark_kafka_sink.protocol.framing import RecordChunks, encode_request
from spark_kafka_sink.protocol.produce import ProduceRequest
from spark_kafka_sink.protocol.versions import SUPPORTED_VERSIONS, ApiKey

OLDEST, LATEST = SUPPORTED_VERSIONS[ApiKey.PRODUCE]
VERSIONS = range(OLDEST, LATEST + 1)
MIB = memoryview(bytes(2**20))


def chunks(*sizes: int) -> RecordChunks:
    return RecordChunks([memoryview(bytes([65 + place % 26]) * size) for place, size in enumerate(sizes)])


SEVERAL = {
    "flights": [(0, chunks(61, 1000)), (7, chunks(61, 5)), (2**31 - 1, chunks(61))],
    "t": [(3, chunks(127 - 61, 61))],
    "größer": [(1, chunks(61, 16_383 - 61)), (2, chunks(61, 16_384))],
}
REQUESTS = {
    "one batch": ProduceRequest(-1, 30_000, {"t": [(0, chunks(61, 200))]}),
    "several": ProduceRequest(-1, 30_000, SEVERAL),
    "one ack": ProduceRequest(1, 1, SEVERAL),
    "no ack": ProduceRequest(0, 2**31 - 1, SEVERAL),
    "a transaction": ProduceRequest(-1, 30_000, SEVERAL, "täglich-7"),
    "an empty id": ProduceRequest(-1, 30_000, SEVERAL, ""),
    "many partitions": ProduceRequest(-1, 30_000, {"t": [(index, chunks(61, index)) for index in range(300)]}),
    "many topics": ProduceRequest(-1, 30_000, {f"t{index}": [(index, chunks(61))] for index in range(200)}),
    "a long name": ProduceRequest(-1, 30_000, {"x" * 249: [(0, chunks(61, 1))]}),
    "2 MiB": ProduceRequest(-1, 30_000, {"t": [(0, RecordChunks([MIB, MIB]))]}),
    "no topic": ProduceRequest(-1, 30_000, {}),
    "no partition": ProduceRequest(-1, 30_000, {"t": []}),
    "no records": ProduceRequest(-1, 30_000, {"t": [(0, chunks()), (1, chunks(0))]}),
}


@pytest.mark.parametrize("client_id", ["sink", "", "größer", None])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=REQUESTS.keys())
def test_frame_has_the_bytes_that_kio_writes(request_of: ProduceRequest, version: int, client_id: str | None) -> None:
    expected = b"".join(encode_request(request_of.build(version), 2**31 - 9, client_id))
    assert b"".join(request_of.encode(version, 2**31 - 9, client_id)) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_any_frame_has_the_bytes_that_kio_writes(version: int) -> None:
    random = Random(version)
    for _ in range(50):
        batches = {
            "ab"[place % 2] * random.randrange(1, 300) + str(place): [
                (random.randrange(2**31), chunks(*(random.randrange(1, 300) for _ in range(random.randrange(4)))))
                for _ in range(random.randrange(4))
            ]
            for place in range(random.randrange(4))
        }
        transactional_id = random.choice([None, "", "t" * random.randrange(1, 300)])
        produce = ProduceRequest(random.choice([-1, 0, 1]), random.randrange(2**31), batches, transactional_id)
        correlation_id = random.randrange(2**31)
        expected = b"".join(encode_request(produce.build(version), correlation_id, "sink"))
        assert b"".join(produce.encode(version, correlation_id, "sink")) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_record_batches_are_sent_without_a_copy(version: int) -> None:
    pieces = [memoryview(bytearray(61)), memoryview(bytearray(b"x" * 1000)), memoryview(bytearray(b"y" * 5))]
    produce = ProduceRequest(-1, 1000, {"t": [(0, RecordChunks(pieces[:2])), (1, RecordChunks(pieces[2:]))]})
    frame = produce.encode(version, 1, None)
    assert [piece.obj for piece in frame if any(piece.obj is each.obj for each in pieces)] == [
        each.obj for each in pieces
    ]
    joined = b"".join(frame)
    assert struct.unpack_from(">i", joined) == (len(joined) - 4,)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("produce", "text"),
    [
        pytest.param(ProduceRequest(2**15, 1, {}), "-32768", id="acks"),
        pytest.param(ProduceRequest(1, 2**31, {}), "format requires", id="timeout"),
        pytest.param(ProduceRequest(1, 1, {"t": [(2**31, chunks(1))]}), "format requires", id="partition"),
        pytest.param(ProduceRequest(1, 1, {"a" * 40_000: []}), "'aaaa.* has 40000 bytes.*32767", id="topic"),
        pytest.param(ProduceRequest(1, 1, {}, "b" * 32_768), "'bbbb.* has 32768 bytes", id="transactional id"),
        pytest.param(ProduceRequest(1, 1, {"\ud800": []}), "surrogates", id="no UTF-8"),
    ],
)
def test_value_beyond_its_field_is_a_protocol_error(produce: ProduceRequest, text: str, version: int) -> None:
    with pytest.raises(ProtocolError, match=f"Produce cannot be encoded: .*{text}"):
        produce.encode(version, 1, None)


@pytest.mark.parametrize("version", VERSIONS)
def test_frame_above_2_gib_is_refused(version: int) -> None:
    half = RecordChunks([MIB] * 1024)
    with pytest.raises(ProtocolError, match=r"Produce is 2147483\d+ bytes; a frame holds at most 2147483647"):
        ProduceRequest(1, 1, {"t": [(0, half), (1, half)]}).encode(version, 1, None)


def test_given_size_of_chunks_is_not_computed_again() -> None:
    assert len(RecordChunks([memoryview(b"abc")])) == 3
    assert len(RecordChunks([memoryview(b"abc"), memoryview(b"d")], 4)) == 4
