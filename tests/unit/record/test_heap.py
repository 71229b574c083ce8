"""Where the memory of what is sent comes from: a pool that keeps little of what was freed."""

from __future__ import annotations

import gc
import os

import pyarrow as pa

from spark_kafka_sink.record.codecs import codec_for
from spark_kafka_sink.record.heap import LARGE_RECORD, SENT_POOL, pool_for


def test_a_batch_compressed_by_zstd_lives_in_the_pool_of_what_is_sent() -> None:
    assert SENT_POOL is not None, "the wheels of pyarrow for Linux have jemalloc"
    gc.collect()  # what other tests left to it goes now, not between two looks
    plain = memoryview(os.urandom(200_000))
    default = pa.default_memory_pool().bytes_allocated()
    before = SENT_POOL.bytes_allocated()
    compressed = codec_for("zstd").compress([plain])
    assert SENT_POOL.bytes_allocated() - before >= 200_000
    assert pa.default_memory_pool().bytes_allocated() == default
    del compressed
    assert SENT_POOL.bytes_allocated() == before


def test_blocks_of_small_records_come_from_it_and_large_ones_from_the_system() -> None:
    rows = 100
    assert pool_for(rows * (LARGE_RECORD - 1), rows) is SENT_POOL
    large = pool_for(rows * LARGE_RECORD, rows)
    assert large is not None
    assert large.backend_name == "system"
