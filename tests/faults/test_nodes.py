"""Rows 1 to 5, 26 and 32: brokers are killed, suspended, restarted, and down for long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
from support.cluster_admin import active_controller, coordinator_partition
from support.fault_stage import FaultStage
from support.history import Sent
from support.lateness import Lateness, Stopwatch
from support.transactional_workload import TransactionalWorkload, finish_transactions
from support.workload import Place, Workload, draw_settings, finish

from spark_kafka_sink.common.errors import KafkaTimeoutError
from spark_kafka_sink.producer.kafka_producer import KafkaProducer

StartProducer = Callable[..., KafkaProducer]


def transactions(
    stage: FaultStage, start_producer: StartProducer, places: Sequence[Place], rng: random.Random
) -> TransactionalWorkload:
    name = f"id-{places[0][0]}"
    settings = draw_settings(rng) | {"transactional.id": name, "max.block.ms": 20_000}
    return TransactionalWorkload(name, lambda: start_producer(stage.direct, **settings), places, rng, pause_s=0.02)


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
    three_nodes.note(finish(three_nodes.direct, work))


def test_row_02_leader_suspended(three_nodes: FaultStage, start_producer: StartProducer, seed: int) -> None:
    rng = random.Random(seed)
    places = three_nodes.new_topic(partitions=2)
    producer = start_producer(three_nodes.direct, **draw_settings(rng))
    with Workload(producer, places, rng) as work:
        work.await_acknowledged(50)
        leader = three_nodes.leader(rng.choice(places))
        three_nodes.suspend(leader)
        work.await_acknowledged(50)
        three_nodes.note("acknowledged by other nodes, while that one is silent")
        time.sleep(rng.uniform(0, 2))
        three_nodes.resume(leader)
        work.await_acknowledged(200)
    three_nodes.note(finish(three_nodes.direct, work))


def test_row_03_active_controller_killed(three_nodes: FaultStage, start_producer: StartProducer, seed: int) -> None:
    rng = random.Random(seed)
    places = three_nodes.new_topic(partitions=3)
    controller = active_controller(three_nodes.direct)
    others = [place for place in places if three_nodes.leader(place) != controller]
    producer = start_producer(three_nodes.direct, **draw_settings(rng))
    with Workload(producer, places, rng) as work:
        work.await_acknowledged(50)
        three_nodes.note(f"node {controller} is the active controller")
        three_nodes.kill(controller)
        work.await_acknowledged(20, others)
        work.await_acknowledged(50)
        assert active_controller(three_nodes.direct) != controller
        three_nodes.start(controller)
        work.await_acknowledged(50)
    three_nodes.note(finish(three_nodes.direct, work))


def test_row_04_rolling_restart(three_nodes: FaultStage, start_producer: StartProducer, seed: int) -> None:
    rng = random.Random(seed)
    places, others = three_nodes.new_topic(partitions=2), three_nodes.new_topic(partitions=2)
    producer = start_producer(three_nodes.direct, **draw_settings(rng))
    with (
        Workload(producer, places, rng) as work,
        transactions(three_nodes, start_producer, others, rng) as transacting,
    ):
        transacting.await_committed(5)
        for node_id in rng.sample((1, 2, 3), 3):
            work.await_acknowledged(50)
            three_nodes.restart(node_id)
            three_nodes.await_in_sync(places[0][0])
            three_nodes.await_in_sync(others[0][0])
            transacting.await_committed(5)
        work.await_acknowledged(50)
    three_nodes.note(finish(three_nodes.direct, work))
    three_nodes.note(finish_transactions(three_nodes.direct, transacting))
    assert {type(error) for error in transacting.errors} <= {KafkaTimeoutError}, transacting.errors


@pytest.mark.parametrize("delivery_timeout_ms", [60_000, 3_000], ids=["up_in_time", "up_too_late"])
def test_row_05_all_nodes_down(
    three_nodes: FaultStage, start_producer: StartProducer, seed: int, delivery_timeout_ms: int
) -> None:
    rng = random.Random(seed)
    places = three_nodes.new_topic(partitions=2)
    settings = draw_settings(rng) | {"delivery.timeout.ms": delivery_timeout_ms}
    producer = start_producer(three_nodes.direct, **settings)
    is_late = delivery_timeout_ms < 10_000
    with Lateness() as lateness, Workload(producer, places, rng) as work:
        work.await_acknowledged(50)
        three_nodes.kill(*rng.sample((1, 2, 3), 3))
        time.sleep(delivery_timeout_ms / 1000 + 1 if is_late else rng.uniform(0, 3))
        three_nodes.start(1, 2, 3)
        work.await_acknowledged(50)
        three_nodes.note("acknowledged again, by the same producer")
        if is_late:  # the first records after the start may be late too
            work.await_acknowledged(1_000)
    three_nodes.note(finish(three_nodes.direct, work, may_fail=is_late))
    assert {type(error) for error in work.ledger.errors} == ({KafkaTimeoutError} if is_late else set())
    latest_s = max((late for late in work.ledger.failed_after_s), default=0)
    limit_s = delivery_timeout_ms / 1000 * 1.1
    late_s = lateness.worst_s(limit_s)  # the start of the nodes takes both cores of a small machine
    three_nodes.note(
        f"the latest failure came {latest_s:.2f} s after its send; any thread of ours was {late_s:.2f} s late"
    )
    assert latest_s <= limit_s + late_s


@pytest.mark.parametrize("in_sync", [3, 2], ids=["one_of_three_down", "two_of_three_down"])
def test_row_26_too_few_replicas(
    three_nodes: FaultStage, start_producer: StartProducer, seed: int, in_sync: int
) -> None:
    """With one node down of the three that must be in sync, the leader refuses. With two down there is no quorum that
    could remove them from the set, and the leader waits for them.
    """
    rng = random.Random(seed)
    places = three_nodes.new_topic(**{"min.insync.replicas": in_sync})
    followers = [node_id for node_id in (1, 2, 3) if node_id != three_nodes.leader(places[0])]
    doomed = followers[: 1 if in_sync == 3 else 2]
    settings = {"request.timeout.ms": 1_000, "delivery.timeout.ms": 4_000, "linger.ms": 0}
    patient = start_producer(three_nodes.direct, **settings | {"delivery.timeout.ms": 60_000})
    with Workload(patient, places, rng) as work:
        work.await_acknowledged(50)
        three_nodes.kill(*doomed)
        hasty = start_producer(three_nodes.direct, **settings)
        with Stopwatch() as watch, pytest.raises(KafkaTimeoutError) as caught:
            hasty.send(places[0][0], b"refused", partition=0).result(30)
        three_nodes.note(f"after {watch.took_s:.2f} s: {caught.value}")
        assert watch.took_s >= 3.9
        assert watch.own_s <= 4.4
        before = work.acknowledged()
        three_nodes.start(*doomed)
        work.await_acknowledged(50)
        assert work.acknowledged() > before
    three_nodes.note(finish(three_nodes.direct, work, sent_besides=[Sent("refused", *places[0])]))


def test_row_32_coordinator_moves(three_nodes: FaultStage, start_producer: StartProducer, seed: int) -> None:
    rng = random.Random(seed)
    places = three_nodes.new_topic(partitions=2)
    with transactions(three_nodes, start_producer, places, rng) as transacting:
        transacting.await_committed(3)
        states = three_nodes.kafka.describe_topic("__transaction_state").partitions
        place = ("__transaction_state", coordinator_partition(transacting.ledger.name, len(states)))
        for _ in range(2):
            coordinator = three_nodes.leader(place)
            three_nodes.note(f"node {coordinator} is the coordinator")
            three_nodes.kill(coordinator)
            transacting.await_committed(5)
            assert three_nodes.leader(place) != coordinator
            three_nodes.start(coordinator)
            three_nodes.await_in_sync(place[0])
            three_nodes.await_in_sync(places[0][0])
    three_nodes.note(finish_transactions(three_nodes.direct, transacting))
    assert {type(error) for error in transacting.errors} <= {KafkaTimeoutError}, transacting.errors
