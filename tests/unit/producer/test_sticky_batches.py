"""The number of batches of unkeyed records, compared with the Java client's rule on the same arrivals (KIP-794)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.producer_harness import TOPIC, ProducerHarness

from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.columns import RecordColumns

ROUNDS = 40
PARTITIONS = 6
LINGER_MS = 500
ROWS_OF_A_BATCH = 170
MOST = 1.05
"""Times the batches of the Java client."""


def batches_of_java(rounds: int, per_round: int, size: int, batch_size: int) -> int:
    """Return the batches of Kafka 4's BuiltInPartitioner and RecordAccumulator. All batches are sent between two
    rounds.
    """
    batches, produced, filled = 0, 0, 0
    for _ in range(rounds):
        filled = 0  # no batch of the round before is left, so every batch counts as full
        for _ in range(per_round):
            if produced >= batch_size and (filled == 0 or filled >= batch_size):
                produced, filled = 0, 0
            if filled == 0 or filled + size > batch_size:
                batches, filled = batches + 1, 0
            filled += size
            produced += size
            if produced >= 2 * batch_size:
                produced, filled = 0, 0
    return batches


def harness(batch_size: int | None) -> ProducerHarness:
    settings = {"linger.ms": LINGER_MS} | ({} if batch_size is None else {"batch.size": batch_size})
    made = ProducerHarness(settings, topics={TOPIC: PARTITIONS}, node_count=3)
    made.warm_up()
    return made


@pytest.mark.parametrize("share", [0.3, 0.5, 0.67, 0.75, 0.9, 1.3])
@pytest.mark.parametrize("calls", [0, 1, 4], ids=["rows", "columns", "columns in four calls"])
def test_rounds_of_any_size_make_no_more_batches_than_java(calls: int, share: float) -> None:
    """`calls`: the `send_columns` calls of each round; 0 sends every row by itself."""
    bench = harness(None if calls else 16_384)
    batch_size = bench.config.batch_size
    value = bytes(batch_size // ROWS_OF_A_BATCH)
    size = Block(RecordColumns.from_rows([value]), 0, 0).size(0, 1)
    per_round = int(share * batch_size / size)
    ends = [per_round * number // calls for number in range(calls + 1)] if calls else []
    parts = [RecordColumns.from_rows([value] * (end - start)) for start, end in pairwise(ends)]
    before = bench.sent_batches()
    for _ in range(ROUNDS):
        for part in parts:
            bench.send_columns(part)
        for _ in range(0 if calls else per_round):
            bench.send(value)
        bench.run_for(2 * LINGER_MS)
    bench.settle()
    assert bench.sent_batches() - before <= MOST * batches_of_java(ROUNDS, per_round, size, batch_size)
    used = [len(bench.values(partition=partition)) for partition in range(PARTITIONS)]
    assert min(used) > 0, "every partition gets rows"


def test_twelve_kilobytes_a_linger_make_one_batch_each() -> None:
    """Java's own case: without the second half of KIP-794, batches of 12 and 4 KB alternate."""
    bench = harness(16_384)
    before = bench.sent_batches()
    for _ in range(ROUNDS):
        for _ in range(12):
            bench.send(bytes(1_000))
        bench.run_for(2 * LINGER_MS)
    assert bench.sent_batches() - before == ROUNDS
