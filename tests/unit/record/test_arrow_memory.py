"""The memory of what is sent: a pool that keeps little of the freed memory."""

from __future__ import annotations

import gc
import os

import pyarrow as pa
import pytest

from spark_kafka_sink.record import arrow
from spark_kafka_sink.record.arrow import LARGE_RECORD, SENT_POOL, pool_for
from spark_kafka_sink.record.codecs import codec_for

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""The names in malloc.h."""


def test_zstd_batch_is_in_the_pool_for_sent_batches() -> None:
    assert SENT_POOL is not None, "the wheels of pyarrow for Linux have jemalloc"
    gc.collect()  # memory of other tests goes now, not between two measurements
    plain = memoryview(os.urandom(200_000))
    default = pa.default_memory_pool().bytes_allocated()
    before = SENT_POOL.bytes_allocated()
    compressed = codec_for("zstd").compress([plain])
    assert SENT_POOL.bytes_allocated() - before >= 200_000
    assert pa.default_memory_pool().bytes_allocated() == default
    del compressed
    assert SENT_POOL.bytes_allocated() == before


def test_small_records_use_that_pool_and_large_ones_the_systems() -> None:
    rows = 100
    assert pool_for(rows * (LARGE_RECORD - 1), rows) is SENT_POOL
    large = pool_for(rows * LARGE_RECORD, rows)
    assert large is not None
    assert large.backend_name == "system"


def test_freed_pieces_up_to_4_mb_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(arrow, "_mallopt", lambda name, value: calls.append((name, value)))
    arrow.keep_freed_heap()
    pool_for(LARGE_RECORD - 1, 1)
    assert calls == [(M_MMAP_THRESHOLD, 4 << 20), (M_TRIM_THRESHOLD, 8 << 20)]
    calls.clear()
    pool_for(LARGE_RECORD, 1)
    assert calls == [(M_MMAP_THRESHOLD, 128 << 10), (M_TRIM_THRESHOLD, 256 << 10)]


def test_c_library_without_mallopt_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_mallopt", None)
    arrow.keep_freed_heap()
