"""Kafka's compression codecs over the records of a batch, in framings that every client reads.

Holds no state; any thread. Every call into a codec releases the GIL.

gzip: one member, written chunk by chunk. snappy: the framing of snappy-java (a header, then length-prefixed blocks),
because the Java client writes only this one. Brokers and clients read a raw block too, but a Java reader then has to
hold all of it in memory. lz4: frames with independent blocks and no content checksum, because Kafka's
Lz4BlockInputStream refuses linked blocks and computes another content checksum than the frame format. zstd: one frame
that states its content size.

Chunks are joined first, which is one copy of the uncompressed records, except for gzip and large chunks of snappy. By
chunks python-lz4 would fragment the heap.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import lz4.frame
import pyarrow as pa

from spark_kafka_sink.common.errors import ConfigError, CorruptBatchError
from spark_kafka_sink.record.arrow import SENT_POOL

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

Bytes = bytes | memoryview
"""Compressed bytes: contiguous, read only."""

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_XERIAL_HEADER = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK = 64 * 1024
"""The bytes that snappy compresses at a time. Larger blocks compress no better."""
_SNAPPY_MAX_RATIO = 64
"""More than a snappy block can expand to: its longest copy gives 64 bytes for 3."""
_LZ4_JAVA_DEFAULT_LEVEL = 9
_LZ4_LEAST_HIGH_LEVEL = 3
_ZSTD_LEVEL = 3
_READ_STEP = 1 << 20
_MOST_MEMBERS = 64
"""Members of a gzip stream. Writers make one; each further one costs a copy of the bytes after it."""


@dataclass(frozen=True)
class Codec:
    """A compression.type with its level. `id` stands in the attributes of a batch. See `codec_for`, `codec_by_id`."""

    name: str
    id: int
    level: int | None = None

    def compress(self, chunks: Sequence[SizedBuffer]) -> Bytes:
        """Return the chunks, one after the other, compressed."""
        return _FORMATS[self.name].compress(chunks, self.level)

    def decompress(self, data: Bytes, max_size: int) -> bytes:
        """Return the decompressed bytes.

        Raises CorruptBatchError for bytes that are not from this codec, or for a result of more than `max_size` bytes.
        """
        try:
            plain = _FORMATS[self.name].decompress(data, max_size)
        except (OSError, RuntimeError, ValueError, zlib.error, EOFError, struct.error) as error:
            raise CorruptBatchError(f"The records do not decompress as {self.name}: {error}") from error
        if len(plain) > max_size:
            raise _too_large(self.name, max_size)
        return plain


class _Format(NamedTuple):
    id: int
    compress: Callable[[Sequence[SizedBuffer], int | None], Bytes]
    decompress: Callable[[Bytes, int], bytes]
    levels: tuple[int, int] | None
    """The lowest and highest compression.<name>.level, or None if the codec has no levels."""


def codec_for(name: str, level: int | None = None) -> Codec:
    """Return the codec of a compression.type. Level None means the default of Kafka. Raises ConfigError with the
    option.
    """
    known = _FORMATS.get(name)
    if known is None:
        raise ConfigError(f"compression.type is '{name}'; it must be one of {', '.join(_FORMATS)}.")
    if level is None or (name == "gzip" and level == zlib.Z_DEFAULT_COMPRESSION):
        return Codec(name, known.id)
    if known.levels is None:
        raise ConfigError(f"compression.type '{name}' has no levels; leave the level out.")
    low, high = known.levels
    if not low <= level <= high:
        raise ConfigError(f"compression.{name}.level is {level}; it must be from {low} to {high}.")
    return Codec(name, known.id, level)


def codec_by_id(codec_id: int) -> Codec:
    """Return the codec by the lowest three bits of a batch's attributes. Raises CorruptBatchError for 5 to 7."""
    codec = _BY_ID.get(codec_id)
    if codec is None:
        raise CorruptBatchError(f"The batch names compression codec {codec_id}; the known ones are 0 to {max(_BY_ID)}.")
    return codec


def _joined(chunks: Sequence[SizedBuffer]) -> SizedBuffer:
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(name: str, max_size: int) -> CorruptBatchError:
    return CorruptBatchError(f"The records compressed with {name} take more than {max_size} bytes when decompressed.")


# ---- none ------------------------------------------------------------------------------------------------


def _keep(chunks: Sequence[SizedBuffer], _level: int | None) -> Bytes:
    return memoryview(_joined(chunks))


def _kept(data: Bytes, _max_size: int) -> bytes:
    return bytes(data)


# ---- gzip ------------------------------------------------------------------------------------------------


def _gzip(chunks: Sequence[SizedBuffer], level: int | None) -> Bytes:
    stream = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION if level is None else level, wbits=_GZIP_WINDOW)
    return b"".join([*map(stream.compress, chunks), stream.flush()])


def _gunzip(data: Bytes, max_size: int) -> bytes:
    parts: list[bytes] = []
    room = max_size + 1
    members = 0
    while data and room > 0:
        members += 1
        if members > _MOST_MEMBERS:
            raise ValueError(f"there are more than {_MOST_MEMBERS} gzip members")
        stream = zlib.decompressobj(wbits=_GZIP_WINDOW)
        parts.append(stream.decompress(data, room))
        room -= len(parts[-1])
        if not stream.eof and room > 0:
            raise EOFError("the gzip member is cut off")
        data = stream.unused_data
    return b"".join(parts)


# ---- snappy ----------------------------------------------------------------------------------------------


def _snappy(chunks: Sequence[SizedBuffer], _level: int | None) -> Bytes:
    # Large chunks are not joined, to save a copy. Small chunks are: small blocks compress badly.
    is_large = sum(map(len, chunks)) >= _XERIAL_BLOCK * len(chunks)
    codec = pa.Codec("snappy")
    parts: list[Any] = [_XERIAL_HEADER]
    for piece in chunks if is_large else [_joined(chunks)]:
        view = memoryview(piece)
        for start in range(0, len(view), _XERIAL_BLOCK):
            block = codec.compress(view[start : start + _XERIAL_BLOCK], memory_pool=SENT_POOL)
            parts += (block.size.to_bytes(4, "big"), block)
    return b"".join(parts)


def _unsnappy(data: Bytes, max_size: int) -> bytes:
    view = memoryview(data)
    blocks = _xerial_blocks(view) if view[:8] == _XERIAL_HEADER[:8] else iter([view])
    codec = pa.Codec("snappy")
    parts: list[bytes] = []
    room = max_size
    for block in blocks:
        size = _snappy_size(block)
        if size > room:
            raise _too_large("snappy", max_size)
        if size > _SNAPPY_MAX_RATIO * len(block):
            raise ValueError(f"a block of {len(block)} bytes claims to hold {size}")
        parts.append(codec.decompress(block, size, asbytes=True))
        room -= size
    return b"".join(parts)


def _xerial_blocks(view: memoryview) -> Iterator[memoryview]:
    position = len(_XERIAL_HEADER)
    while position < len(view):
        (size,) = struct.unpack_from(">i", view, position)
        position += 4
        if not 0 < size <= len(view) - position:
            raise ValueError(f"a block of {size} bytes where {len(view) - position} are left")
        yield view[position : position + size]
        position += size


def _snappy_size(block: memoryview) -> int:
    """Return the uncompressed length at the start of a snappy block, a varint of up to five bytes."""
    size = 0
    for index, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return size
    raise ValueError("a block without its length")


# ---- lz4 -------------------------------------------------------------------------------------------------


def _lz4(chunks: Sequence[SizedBuffer], level: int | None) -> Bytes:
    # Level 9, the default in Java, is the fast compressor, every other level the high one (KIP-390).
    fast = level is None or level == _LZ4_JAVA_DEFAULT_LEVEL
    compressed: bytes = lz4.frame.compress(
        _joined(chunks),
        compression_level=0 if fast else max(level or 0, _LZ4_LEAST_HIGH_LEVEL),
        block_size=lz4.frame.BLOCKSIZE_MAX64KB,
        block_linked=False,
        content_checksum=False,
        store_size=False,
    )
    return compressed


def _unlz4(data: Bytes, max_size: int) -> bytes:
    stream = lz4.frame.LZ4FrameDecompressor()
    plain: bytes = stream.decompress(data, max_length=max_size + 1)
    if len(plain) <= max_size and not stream.eof:
        raise EOFError("the lz4 frame is cut off")
    if stream.unused_data:
        raise ValueError("bytes after the lz4 frame")
    return plain


# ---- zstd ------------------------------------------------------------------------------------------------


def _zstd(chunks: Sequence[SizedBuffer], level: int | None) -> Bytes:
    codec = pa.Codec("zstd", compression_level=_ZSTD_LEVEL if level is None else level)
    compressed = codec.compress(_joined(chunks), memory_pool=SENT_POOL)
    # A view of the buffer would have its length before it was cut to the compressed size.
    return memoryview(compressed.slice(0, compressed.size))


def _unzstd(data: Bytes, max_size: int) -> bytes:
    parts: list[bytes] = []
    room = max_size + 1
    with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), "zstd") as stream:
        while room > 0 and (part := stream.read(min(room, _READ_STEP))):
            parts.append(part)
            room -= len(part)
    return b"".join(parts)


_FORMATS = {
    "none": _Format(0, _keep, _kept, None),
    "gzip": _Format(1, _gzip, _gunzip, (1, 9)),
    "snappy": _Format(2, _snappy, _unsnappy, None),
    "lz4": _Format(3, _lz4, _unlz4, (1, 17)),
    "zstd": _Format(4, _zstd, _unzstd, (-131072, 22)),
}
_BY_ID = {entry.id: Codec(name, entry.id) for name, entry in _FORMATS.items()}
