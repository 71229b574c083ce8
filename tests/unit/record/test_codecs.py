from __future__ import annotations

import gzip
import pickle
import random
import struct
import tracemalloc

import cramjam
import lz4.frame
import pyarrow as pa
import pytest

from spark_kafka_sink.common.errors import ConfigError, CorruptBatchError
from spark_kafka_sink.record.codecs import codec_by_id, codec_for

COMPRESSING = ["gzip", "snappy", "lz4", "zstd"]
PAYLOADS = {
    "one byte": [b"x"],
    "random": [random.Random(1).randbytes(300_000)],
    "repeating": [b"0123456789" * 50_000],
    "many chunks": [b"chunk %d " % index * (index % 50) for index in range(400)],
    "block edge": [bytes(65536), b"a"],
    "large chunks": [random.Random(2).randbytes(50_000) * 2, b"0123456789" * 20_001, bytes(70_001)],
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
@pytest.mark.parametrize("name", ["none", *COMPRESSING])
def test_compressed_bytes_decompress_to_the_same_bytes(name: str, payload: list[bytes]) -> None:
    codec = codec_for(name)
    plain = b"".join(payload)
    compressed = codec.compress([memoryview(chunk) for chunk in payload])
    assert codec.decompress(compressed, len(plain)) == plain
    assert len(memoryview(compressed)) == len(bytes(compressed))


@pytest.mark.parametrize("name", COMPRESSING)
def test_decompression_stops_at_the_limit(name: str) -> None:
    codec = codec_for(name)
    bomb = codec.compress([bytes(50_000_000)])
    assert len(memoryview(bomb)) < 3_000_000
    for limit in (0, 1000, 49_999_999):
        with pytest.raises(CorruptBatchError, match=f"compressed with {name} take more than {limit} bytes"):
            codec.decompress(bomb, limit)


@pytest.mark.parametrize("name", COMPRESSING)
def test_decompression_takes_no_memory_beyond_the_limit(name: str) -> None:
    codec = codec_for(name)
    bomb = bytes(codec.compress([bytes(50_000_000)]))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatchError):
            codec.decompress(bomb, 100_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.parametrize("name", COMPRESSING)
def test_truncated_or_longer_bytes_are_refused(name: str) -> None:
    codec = codec_for(name)
    compressed = bytes(codec.compress([random.Random(2).randbytes(100_000)]))
    for wrong in (compressed[:-1], compressed[:-5000], compressed + b"more", b"\xff" * 40):
        with pytest.raises(CorruptBatchError, match=f"do not decompress as {name}"):
            codec.decompress(wrong, 1 << 20)


@pytest.mark.parametrize("name", ["snappy", "lz4"])
def test_no_bytes_at_all_are_refused(name: str) -> None:
    with pytest.raises(CorruptBatchError, match=f"do not decompress as {name}"):
        codec_for(name).decompress(b"", 100)


def test_lz4_frames_have_independent_blocks_and_no_content_checksum() -> None:
    for payload in PAYLOADS.values():
        info = lz4.frame.get_frame_info(bytes(codec_for("lz4").compress(payload)))
        assert (info["block_linked"], info["content_checksum"], info["content_size"]) == (False, False, 0)


def test_gzip_is_one_member_that_every_reader_reads() -> None:
    assert gzip.decompress(bytes(codec_for("gzip").compress([b"a", b"b" * 1000]))) == b"a" + b"b" * 1000


def test_gzip_members_in_a_row_are_read_as_one() -> None:
    assert codec_for("gzip").decompress(gzip.compress(b"one") + gzip.compress(b"two"), 6) == b"onetwo"


def test_snappy_is_framed_like_snappy_java_and_raw_blocks_decode() -> None:
    plain = b"some text, some text, some text" * 5000
    framed = bytes(codec_for("snappy").compress([plain]))
    assert framed[:16] == b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    (size,) = struct.unpack_from(">i", framed, 16)
    assert pa.Codec("snappy").decompress(framed[20 : 20 + size], 65536, asbytes=True) == plain[:65536]
    raw = pa.Codec("snappy").compress(plain, asbytes=True)
    assert codec_for("snappy").decompress(raw, len(plain)) == plain


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [([100_000, 65_536], [65_536, 34_464, 65_536]), ([40_000] * 4, [65_536, 65_536, 28_928]), ([1] * 3, [3])],
    ids=["large", "small", "tiny"],
)
def test_snappy_joins_small_chunks_and_keeps_large_ones(sizes: list[int], blocks: list[int]) -> None:
    framed = bytes(codec_for("snappy").compress([bytes(size) for size in sizes]))
    found, position = [], 16
    while position < len(framed):
        (size,) = struct.unpack_from(">i", framed, position)
        found.append(len(cramjam.snappy.decompress_raw(framed[position + 4 : position + 4 + size])))
        position += 4 + size
    assert found == blocks


def test_snappy_block_of_impossible_length_is_refused_without_allocation() -> None:
    claim = b"\xff\xff\xff\xff\x07" + bytes(20)  # 2 GiB - 1
    with pytest.raises(CorruptBatchError, match="a block of 25 bytes claims to hold 2147483647"):
        codec_for("snappy").decompress(claim, 2**31)
    with pytest.raises(CorruptBatchError, match="a block of 1000000 bytes where 3 are left"):
        codec_for("snappy").decompress(b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, 1_000_000) + b"abc", 2**31)


@pytest.mark.parametrize(("name", "low", "high"), [("gzip", 1, 9), ("zstd", 1, 19), ("lz4", 9, 17)])
def test_higher_level_compresses_more(name: str, low: int, high: int) -> None:
    rng = random.Random(3)
    words = [rng.randbytes(6) for _ in range(500)]
    plain = b"".join(rng.choice(words) for _ in range(40_000))
    sizes = [len(memoryview(codec_for(name, level).compress([plain]))) for level in (low, high)]
    assert sizes[1] < sizes[0]
    for level in (low, high):
        codec = codec_for(name, level)
        assert codec.decompress(codec.compress([plain]), len(plain)) == plain


def test_lz4s_default_level_is_the_fast_compressor_as_in_java() -> None:
    plain = [b"abcabcabd" * 999]
    assert codec_for("lz4", 9).compress(plain) == codec_for("lz4").compress(plain)
    assert codec_for("lz4", 1).compress(plain) == codec_for("lz4", 3).compress(plain)


def test_gzips_default_level_can_be_named() -> None:
    assert codec_for("gzip", -1) == codec_for("gzip")


@pytest.mark.parametrize(
    ("name", "level", "message"),
    [
        ("brotli", None, "compression.type is 'brotli'; it must be one of none, gzip, snappy, lz4, zstd"),
        ("gzip", 0, "compression.gzip.level is 0; it must be from 1 to 9"),
        ("lz4", 18, "compression.lz4.level is 18; it must be from 1 to 17"),
        ("zstd", 23, "compression.zstd.level is 23; it must be from -131072 to 22"),
        ("snappy", 1, "compression.type 'snappy' has no levels"),
    ],
)
def test_wrong_setting_is_refused_by_name(name: str, level: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codec_for(name, level)


def test_ids_are_kafkas() -> None:
    assert [codec_by_id(codec_id).name for codec_id in range(5)] == ["none", *COMPRESSING]
    assert all(codec_for(name).id == codec_id for codec_id, name in enumerate(["none", *COMPRESSING]))
    with pytest.raises(CorruptBatchError, match="compression codec 5"):
        codec_by_id(5)


def test_codec_pickles() -> None:
    assert pickle.loads(pickle.dumps(codec_for("zstd", 7))) == codec_for("zstd", 7)


def test_gzip_stream_of_many_members_is_refused() -> None:
    """Bug: each member cost a copy of what followed it: 3.3 s for 2 MiB of empty members."""
    codec = codec_for("gzip")
    member = bytes(codec.compress([b"a"]))
    assert codec.decompress(member * 64, 1_000) == b"a" * 64
    with pytest.raises(CorruptBatchError, match="more than 64 gzip members"):
        codec.decompress(member * 65, 1_000)
