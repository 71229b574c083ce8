"""Bytes that are written without being joined: record batches pass from the encoder to the socket as the buffers they
were made in.

kio's writers ask a bytes field for nothing but its length and hand it to the buffer's `write`, so an object that
knows both can pass.
"""

from __future__ import annotations

from collections.abc import Iterable


class RecordChunks:
    """The records of one partition in a produce request: whole record batches (format v2), in as many pieces as they
    were made of.
    """

    __slots__ = ("buffers", "size")

    def __init__(self, buffers: Iterable[memoryview], size: int | None = None) -> None:
        """`size`: their bytes, where the caller knows it."""
        self.buffers: tuple[memoryview, ...] = tuple(buffers)
        self.size = sum(buffer.nbytes for buffer in self.buffers) if size is None else size

    def __len__(self) -> int:
        """Total bytes, which kio asks for so."""
        return self.size

    def __repr__(self) -> str:
        return f"RecordChunks({self.size} bytes in {len(self.buffers)} buffers)"


class GatherBuffer:
    """Collects what a kio writer writes as a list of buffers: small pieces together, `RecordChunks` spliced in as
    they are.
    """

    __slots__ = ("_buffers", "_small")

    def __init__(self, reserved: int = 0) -> None:
        """The first `reserved` bytes are left for the caller to fill in."""
        self._buffers: list[memoryview] = []
        self._small = bytearray(reserved)

    def write(self, data: bytes | RecordChunks) -> None:
        if isinstance(data, RecordChunks):
            self._buffers.append(memoryview(self._small))
            self._small = bytearray()
            self._buffers.extend(data.buffers)
        else:
            self._small += data

    def finish(self) -> list[memoryview]:
        """Everything written, in order, without empty buffers."""
        if self._small:
            self._buffers.append(memoryview(self._small))
            self._small = bytearray()
        return [buffer for buffer in self._buffers if buffer.nbytes]
