"""Memory of a buffer pool in tests that count bytes without a batch that holds them."""

from __future__ import annotations

from spark_kafka_sink.producer.buffer_pool import BufferPool, Grant


def give_back(pool: BufferPool, size: int) -> None:
    """Give back `size` bytes that were allocated."""
    grant = Grant()
    grant.size = size
    pool.take_back(grant)
