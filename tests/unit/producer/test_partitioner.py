"""The sticky partitioner: how long it keeps a partition, which one is next, and which ones it avoids (KIP-480,
KIP-794).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from spark_kafka_sink.common.cluster import Cluster, Node, PartitionInfo, TopicPartition
from spark_kafka_sink.producer.partitioner import (
    NodeAvailability,
    Partitioners,
    PartitionLoads,
    RoomOf,
    StickyPartitioner,
)
from spark_kafka_sink.producer.producer_batch import BatchSizes
from spark_kafka_sink.record.block import Block
from spark_kafka_sink.record.columns import RecordColumns

TOPIC = "flights"
NODE = Node(0, "a", 1)


def cluster_of(*has_leader: bool) -> Cluster:
    infos = tuple(PartitionInfo(TOPIC, index, NODE if led else None) for index, led in enumerate(has_leader))
    return Cluster(nodes=(NODE,), partitions=infos)


def nothing_open(_: TopicPartition) -> int:
    """Let no partition have an open batch."""
    return 0


def partitioner(
    sticky_bytes: int = 100, *, is_adaptive: bool = True, seed: int = 3, room_of: RoomOf = nothing_open
) -> StickyPartitioner:
    return StickyPartitioner(TOPIC, BatchSizes(sticky_bytes), is_adaptive, random.Random(seed), room_of)


def draws(made: StickyPartitioner, cluster: Cluster, count: int, size: int = 100) -> Counter[int]:
    return Counter(made.take(size, cluster, len(cluster.partitions)) for _ in range(count))


def test_partition_changes_after_batch_size_bytes() -> None:
    made, cluster = partitioner(100), cluster_of(True, True, True)
    taken = [made.take(50, cluster, 3) for _ in range(40)]
    assert taken[0::2] == taken[1::2]
    assert all(one != two for one, two in pairwise(taken[0::2]))


def test_partition_stays_longer_if_batches_hold_more() -> None:
    class Learning(BatchSizes):
        def capacity(self, topic: str) -> int:
            assert topic == TOPIC
            return 300

    made = StickyPartitioner(TOPIC, Learning(100), True, random.Random(3), nothing_open)
    cluster = cluster_of(True, True, True)
    taken = [made.take(100, cluster, 3) for _ in range(30)]
    assert taken[0::3] == taken[1::3] == taken[2::3]
    assert all(one != two for one, two in pairwise(taken[0::3]))
    block = Block(RecordColumns.from_rows([bytes(90)] * 9), 0, 0)
    assert [end - start for _, start, end in made.assign(block, cluster, 3)] == [2, 2, 2, 2, 1]
    assert [end - start for _, start, end in partitioner(100).assign(block, cluster, 3)] == [1] * 9


def test_partition_changes_after_twice_batch_size() -> None:
    """This happens if batches held more when the partition was chosen (BuiltInPartitioner.updatePartitionInfo)."""
    cluster = cluster_of(True, True, True)
    made = partitioner(100, room_of=lambda _: 10_000)
    taken = [made.take(50, cluster, 3) for _ in range(40)]
    assert taken[0::4] == taken[1::4] == taken[2::4] == taken[3::4]
    assert all(one != two for one, two in pairwise(taken[0::4]))
    block = Block(RecordColumns.from_rows([bytes(40)] * 12), 0, 0)
    groups = partitioner(100, room_of=lambda _: 10_000).assign(block, cluster, 3)
    most = max(block.size(start, end) for _, start, end in groups)
    assert 100 < most < 200 + block.size(0, 1)


@pytest.mark.parametrize(("room", "is_kept"), [(0, False), (59, False), (60, True), (10_000, True)])
def test_record_beyond_batch_size_stays_in_open_batch(room: int, is_kept: bool) -> None:
    """The second half of KIP-794."""
    made, cluster = partitioner(100, room_of=lambda _: room), cluster_of(True, True)
    first = made.take(60, cluster, 2)
    assert (made.take(60, cluster, 2) == first) is is_kept


def test_the_choice_is_uniform_without_loads() -> None:
    counts = draws(partitioner(), cluster_of(True, True, True, True), 4_000)
    assert set(counts) == {0, 1, 2, 3}
    assert all(850 <= count <= 1_150 for count in counts.values())


def test_partitions_without_a_leader_are_avoided_and_left_at_once() -> None:
    made = partitioner(1_000)
    first = made.take(1, cluster_of(True, True, True), 3)
    led = [index != first for index in range(3)]
    taken = {made.take(1, cluster_of(*led), 3) for _ in range(5)}
    assert first not in taken
    assert len(taken) == 1


def test_without_any_leader_any_partition_is_chosen_and_kept() -> None:
    made, cluster = partitioner(1_000), cluster_of(False, False)
    assert len(draws(made, cluster, 20, size=10)) == 1
    assert set(draws(partitioner(), cluster, 100)) == {0, 1}


def test_choice_reads_few_of_many_partitions() -> None:
    class Many(tuple[PartitionInfo, ...]):
        looks = 0

        def __iter__(self) -> Iterator[PartitionInfo]:
            for info in super().__iter__():
                Many.looks += 1
                yield info

        def __getitem__(self, index: int) -> PartitionInfo:  # type: ignore[override]
            Many.looks += 1
            return super().__getitem__(index)

    cluster = cluster_of(*[True] * 5_000)
    vars(cluster)["_available_partitions_by_topic"] = {TOPIC: Many(cluster.partitions)}
    made = partitioner()
    assert draws(made, cluster, 100).total() == 100
    assert Many.looks < 100 * 20
    made.update_loads({**dict.fromkeys(range(5_000), 3), 7: 0}, 5_000)
    assert draws(made, cluster, 100).total() == 100
    assert Many.looks < 200 * 20


def test_every_other_partition_is_equally_likely() -> None:
    """Also if some have no leader: then the index among partitions with a leader is not the partition."""
    cluster = cluster_of(False, True, True, False, True, True)
    made = partitioner()
    taken = [made.take(100, cluster, 6) for _ in range(4_000)]
    assert all(one != two for one, two in pairwise(taken))
    counts = Counter(pairwise(taken))
    assert len(counts) == 12
    assert all(260 <= count <= 410 for count in counts.values())


def test_a_single_partition_is_kept() -> None:
    assert draws(partitioner(), cluster_of(True), 10) == {0: 10}


def test_deleted_partition_is_left() -> None:
    made = partitioner(1_000_000)
    big = cluster_of(False, False, True)
    assert made.take(1, big, 3) == 2
    assert made.take(1, cluster_of(True, True), 2) in {0, 1}


def test_deleted_partition_is_left_without_any_other_leader() -> None:
    """As after a topic was created again: records for a partition that it does not have could only expire."""
    made = partitioner(1_000_000)
    assert made.take(1, cluster_of(False, False, True), 3) == 2
    taken = draws(made, cluster_of(False, False), 20, size=10)
    assert set(taken) in ({0}, {1})


def test_the_longer_a_queue_the_less_often_it_is_drawn() -> None:
    """Queues of 0, 3, 1 give weights of 4, 1, 3, as in Kafka's own example."""
    loads = PartitionLoads({0: 0, 1: 3, 2: 1})
    rng = random.Random(5)
    counts = Counter(loads.draw(rng) for _ in range(8_000))
    assert 3_800 <= counts[0] <= 4_200
    assert 850 <= counts[1] <= 1_150
    assert 2_800 <= counts[2] <= 3_200


def test_every_number_drawn_has_its_partition() -> None:
    class Fixed(random.Random):
        value = 0

        def randrange(self, stop: int) -> int:  # type: ignore[override]
            assert stop == 8
            return self.value

    rng = Fixed()
    loads = PartitionLoads({7: 0, 8: 3, 9: 1})
    drawn = []
    for rng.value in range(8):
        drawn.append(loads.draw(rng))
    assert drawn == [7, 7, 7, 7, 8, 9, 9, 9]


def test_loads_steer_the_choice() -> None:
    made = partitioner()
    made.update_loads({0: 0, 1: 99}, 2)
    counts = draws(made, cluster_of(True, True), 2_000)
    assert counts[0] > 1_900


def test_equal_loads_do_not_change_the_choice() -> None:
    made = partitioner()
    for loads in ({0: 4, 1: 4}, {}):
        made.update_loads({0: 0, 1: 99}, 2)
        made.update_loads(loads, 2)
        counts = draws(made, cluster_of(True, True), 2_000)
        assert 800 < counts[0] < 1_200


def test_skipped_partition_is_not_drawn_with_equal_queues() -> None:
    made = partitioner()
    made.update_loads({0: 1, 2: 1}, 3)
    assert set(draws(made, cluster_of(True, True, True), 300)) == {0, 2}
    made.update_loads({1: 5}, 3)
    assert set(draws(made, cluster_of(True, True, True), 300)) == {1}


def test_loads_are_ignored_without_adaptive_partitioning() -> None:
    made = partitioner(is_adaptive=False)
    made.update_loads({0: 0, 1: 99}, 2)
    assert draws(made, cluster_of(True, True), 100)[1] > 30


def test_leaderless_choice_by_old_loads_falls_back_to_a_leader() -> None:
    made = partitioner()
    made.update_loads({1: 0}, 2)
    assert set(draws(made, cluster_of(True, False), 20)) == {0}


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_a_block_is_cut_into_groups_of_about_batch_size(rows: int) -> None:
    block = Block(RecordColumns.from_rows([bytes(40)] * rows), 0, 1)
    one = block.size(0, 1)
    made = partitioner(one * 5)
    groups = made.assign(block, cluster_of(True, True, True), 3)
    assert groups[0][1] == 0
    assert groups[-1][2] == rows
    assert all(group[2] == following[1] for group, following in pairwise(groups))
    assert all(block.size(start, end) <= one * 5 for _, start, end in groups)
    assert all(group[0] != following[0] for group, following in pairwise(groups))
    assert all(end - start == 5 for _, start, end in groups[:-1])


def test_row_without_room_goes_to_next_partition() -> None:
    block = Block(RecordColumns.from_rows([bytes(40)] * 6), 0, 1)
    one = block.size(0, 1)
    groups = partitioner(one * 5 // 2).assign(block, cluster_of(True, True), 2)
    assert [(start, end) for _, start, end in groups] == [(0, 2), (2, 4), (4, 6)]
    assert all(group[0] != following[0] for group, following in pairwise(groups))


def test_next_block_continues_with_the_same_partition() -> None:
    block = Block(RecordColumns.from_rows([bytes(40)] * 3), 0, 1)
    one = block.size(0, 1)
    made = partitioner(one * 4, room_of=lambda _: one)
    ((first, _, _),) = partitioner(one * 4).assign(block, cluster_of(True, True), 2)
    assert made.take(3 * one, cluster_of(True, True), 2) == first
    groups = made.assign(block, cluster_of(True, True), 2)
    assert [(partition, end) for partition, _, end in groups] == [(first, 1), (1 - first, 3)]


def test_row_larger_than_batch_size_is_one_group() -> None:
    block = Block(RecordColumns.from_rows([bytes(500), bytes(500)]), 0, 1)
    groups = partitioner(100).assign(block, cluster_of(True, True), 2)
    assert [(start, end) for _, start, end in groups] == [(0, 1), (1, 2)]


# ---- which brokers keep up -------------------------------------------------------------------------------------------


def test_node_is_unavailable_after_the_timeout() -> None:
    availability = NodeAvailability(500)
    availability.update(1, False, 1_000)
    availability.update(1, False, 1_400)
    assert 1 not in availability.unavailable(1_499)
    assert 1 in availability.unavailable(1_500)
    assert 2 not in availability.unavailable(1_500)
    availability.update(1, True, 1_600)
    assert 1 not in availability.unavailable(9_000)


def test_node_without_waiting_records_is_available_again() -> None:
    availability = NodeAvailability(500)
    availability.update(1, False, 1_000)
    availability.update(2, False, 1_000)
    availability.keep({2})
    assert 1 not in availability.unavailable(2_000)
    assert 2 in availability.unavailable(2_000)


def test_no_time_limit_means_always_available() -> None:
    availability = NodeAvailability(0)
    availability.update(1, False, 0)
    assert 1 not in availability.unavailable(10**9)


def test_topic_has_one_partitioner_made_on_demand() -> None:
    made = Partitioners(BatchSizes(100), True, random.Random(3), nothing_open)
    made.update_loads(TOPIC, {0: 5, 1: 0}, 2)
    assert made.loaded({TOPIC}) == set()
    assert not made
    assert made[TOPIC] is made[TOPIC]
    assert made.loaded({TOPIC, "keyed"}) == {TOPIC}
    assert made.loaded(set()) == set()
    assert made[TOPIC] is not made["others"]


def test_loads_are_not_used_if_choices_do_not_adapt() -> None:
    made = Partitioners(BatchSizes(100), False, random.Random(3), nothing_open)
    assert made[TOPIC]
    assert made.loaded({TOPIC}) == set()


def test_loads_of_a_topic_go_to_its_partitioner() -> None:
    made, cluster = Partitioners(BatchSizes(100), True, random.Random(3), nothing_open), cluster_of(True, True)
    of_topic = made[TOPIC]
    made.update_loads(TOPIC, {1: 0}, 2)
    assert set(draws(of_topic, cluster, 20)) == {1}
