"""The learnt compression: the capacity of a batch, and its expected size in a request."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_kafka_sink.common.cluster import TopicPartition
from spark_kafka_sink.common.config import ProducerConfig
from spark_kafka_sink.producer.producer_batch import LEAST_SHARE, BatchSizes, ProducerBatch
from spark_kafka_sink.record.batch import HEADER_SIZE
from spark_kafka_sink.record.codecs import codec_for

BATCH_SIZE = 10_000
SAME, NOISE = b"again and again ", random.Random(3).randbytes(16)
CODEC = codec_for("zstd")


def batch_of(size: int, noise: float = 0.0, topic: str = "flights") -> ProducerBatch:
    """Return a batch of about `size` bytes. The share `noise` of them is random."""
    batch = ProducerBatch(TopicPartition(topic, 0), 0, 10 * BATCH_SIZE, 0)
    source = random.Random(size)
    noisy = int(size * noise)
    value = source.randbytes(noisy) + bytes(size - noisy)
    batch.append_row(None, value, (), 0, size, None)
    return batch


def learn(sizes: BatchSizes, noise: float, size: int = BATCH_SIZE, topic: str = "flights") -> float:
    """Report such a batch; return its compressed share."""
    batch = batch_of(size, noise, topic)
    batch.seal(CODEC)
    sizes.learn(batch)
    return batch.wire_size / batch.size


def test_no_compression_is_expected_at_first() -> None:
    sizes = BatchSizes(BATCH_SIZE)
    assert sizes.capacity("flights") == BATCH_SIZE
    assert sizes.on_wire(batch_of(5_000)) == 5_000 + HEADER_SIZE


def test_better_ratio_counts_by_half_and_worse_at_once() -> None:
    sizes = BatchSizes(BATCH_SIZE)
    ratio = learn(sizes, 0.5)
    assert 0.45 < ratio < 0.55
    expected = (1 + ratio) / 2
    assert sizes.capacity("flights") == int(BATCH_SIZE / (expected * 1.05))
    learn(sizes, 0.5)
    expected = (expected + ratio) / 2
    assert sizes.capacity("flights") == int(BATCH_SIZE / (expected * 1.05))
    worse = learn(sizes, 0.9)
    assert sizes.capacity("flights") == int(BATCH_SIZE / (worse * 1.05))


def test_size_in_a_request_is_expected_until_sealed_then_exact() -> None:
    sizes = BatchSizes(BATCH_SIZE)
    for _ in range(20):
        ratio = learn(sizes, 0.5)
    batch = batch_of(8_000, 0.9)
    assert sizes.on_wire(batch) == pytest.approx(batch.size * ratio * 1.05, rel=0.01)
    batch.seal(CODEC)
    assert sizes.on_wire(batch) == batch.wire_size > 7_000


def test_small_batches_are_not_learnt_from() -> None:
    sizes = BatchSizes(BATCH_SIZE)
    learn(sizes, 0.0, size=BATCH_SIZE // 4 - 100)
    assert sizes.capacity("flights") == BATCH_SIZE
    learn(sizes, 0.0, size=BATCH_SIZE // 4)
    assert sizes.capacity("flights") > BATCH_SIZE


def test_ratio_is_learnt_for_each_topic() -> None:
    sizes = BatchSizes(BATCH_SIZE)
    learn(sizes, 0.0, topic="flights")
    assert sizes.capacity("flights") > sizes.capacity("noise") == BATCH_SIZE


def test_no_compression_is_expected_after_a_too_large_batch() -> None:
    sizes = BatchSizes(BATCH_SIZE)
    learn(sizes, 0.0)
    sizes.refused("flights")
    assert sizes.capacity("flights") == BATCH_SIZE
    learn(sizes, 0.0)
    assert sizes.capacity("flights") == BATCH_SIZE
    assert sizes.on_wire(batch_of(5_000)) == 5_000 + HEADER_SIZE


def test_incompressible_batch_of_default_size_fits_the_brokers_limit() -> None:
    sizes = BatchSizes(ProducerConfig.from_mapping({"bootstrap.servers": "unused:1"}).batch_size)
    for _ in range(30):
        learn(sizes, 0.0, size=250_000)
    most = sizes.capacity("flights") + HEADER_SIZE
    assert most > 800_000
    for name in ("none", "gzip", "snappy", "lz4", "zstd"):
        batch = batch_of(most - HEADER_SIZE, 1.0)
        batch.seal(codec_for(name))
        assert batch.wire_size <= 1_048_588


@given(st.lists(st.floats(0, 1), max_size=30))
def test_capacity_lies_between_batch_size_and_the_least_share(
    noises: list[float],
) -> None:
    sizes = BatchSizes(1_000)
    for noise in noises:
        learn(sizes, noise, size=1_000)
        assert 1_000 <= sizes.capacity("flights") <= 1_000 / LEAST_SHARE
