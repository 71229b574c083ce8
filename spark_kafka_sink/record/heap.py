"""What the process keeps of the memory that blocks took, once they are done with it.

Settings of the C library's allocator hold for the whole process; any thread may call. Two needs stand against each
other. Small records: a block's scratch arrays and buffers come again with every block, and giving them back to the
kernel costs a page fault per 4 KiB of the next one (measured: 60 ns per record). Large ones: pieces of up to a
megabyte leave holes that nothing of another size fits into, 25 MB of them in a worker with values of 900 KB, and
Arrow's own pool keeps as much again; faults are nothing beside what such records cost anyhow.
"""

from __future__ import annotations

import ctypes
from typing import Final

import pyarrow as pa

LARGE_RECORD: Final = 64 << 10
"""Bytes of an average record from which on memory counts for more than page faults."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
_KEPT: Final = 4 << 20
_KEPT_OF_LARGE: Final = 128 << 10
SENT_POOL: Final = pa.jemalloc_memory_pool() if "jemalloc" in pa.supported_memory_backends() else None
"""For what lives until a broker has acknowledged it: blocks of small records, megabytes each, and compressed batches.
Of 32 MB of blocks Arrow's default, mimalloc, makes 60 in a worker, jemalloc 35; of 4 MB of zstd's output mimalloc makes
30."""


def keep_freed_heap() -> None:
    """Keep freed pieces of up to 4 MiB for the next block; glibc alone by itself begins to do so at 128 KiB."""
    _set_thresholds(_KEPT)


def pool_for(num_bytes: int, rows: int) -> pa.MemoryPool | None:
    """Where Arrow should take a block of this size from; None: its own default pool. From the first block of large
    records on, the process gives large pieces back to the kernel at once.
    """
    if num_bytes < LARGE_RECORD * rows:
        return SENT_POOL
    _set_thresholds(_KEPT_OF_LARGE)
    return pa.system_memory_pool()


def _set_thresholds(mapped: int) -> None:
    """mallopt(3): pieces from `mapped` bytes on are mapped one by one, and the heap's free end is cut at twice that.
    Other C libraries than glibc have no such settings; then nothing is done.
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, mapped)
        _mallopt(_M_TRIM_THRESHOLD, 2 * mapped)
