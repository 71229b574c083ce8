"""Rows 1 to 5 and 26: brokers that die, freeze, restart and are gone for long. Every acknowledged record is there once,
in order.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from support.fault_stage import FaultStage
from support.workload import Workload, assert_kept, draw_settings, history_of

from spark_kafka_sink.producer.kafka_producer import KafkaProducer

StartProducer = Callable[..., KafkaProducer]


def finish(stage: FaultStage, work: Workload, *, may_fail: bool = False, **promise: bool) -> None:
    """Wait for every outcome, and compare with what consumers read."""
    work.stop()
    work.producer.flush(90_000)
    ledger = work.ledger
    stage.note(
        f"{len(ledger.sent)} records, {len(ledger.errors)} failed; the longest silence {work.longest_silence_s():.1f} s"
    )
    assert may_fail or not ledger.errors, ledger.errors[:3]
    partitions: dict[str, int] = {}
    for topic, partition in ledger.by_place:
        partitions[topic] = max(partitions.get(topic, 0), partition + 1)
    assert_kept(history_of(stage.direct, partitions, ledger.sent), **promise)


def test_row_01_leader_killed_five_times(three_nodes: FaultStage, start_producer: StartProducer, seed: int) -> None:
    rng = random.Random(seed)
    places = three_nodes.new_topic(partitions=rng.choice((1, 3)))
    producer = start_producer(three_nodes.direct, **draw_settings(rng))
    with Workload(producer, places, rng) as work:
        for _ in range(5):
            work.await_acknowledged(50)
            leader = three_nodes.leader(rng.choice(places))
            three_nodes.kill(leader)
            work.await_acknowledged(50)
            three_nodes.start(leader)
            three_nodes.await_in_sync(places[0][0])
    finish(three_nodes, work)
