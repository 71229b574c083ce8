"""The cluster view: frozen, indexed, and empty before the first answer."""

from __future__ import annotations

import dataclasses
import pickle
from uuid import UUID

import pytest

from spark_kafka_sink.common.cluster import Cluster, Node, PartitionInfo, PartitionMetadata, TopicPartition

A, B = Node(0, "a", 9092, "rack"), Node(1, "b", 9093)
INFOS = (
    PartitionInfo("t", 2, A, (A, B), (A,), (B,)),
    PartitionInfo("t", 0, B),
    PartitionInfo("t", 1, None),
    PartitionInfo("u", 0, None),
)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("id", (A, B), INFOS, frozenset({"bad"}), frozenset({"no"}), A, {"t": UUID(int=5)})


def test_partitions_are_found_by_topic_in_their_order(cluster: Cluster) -> None:
    assert [info.partition for info in cluster.partitions_for_topic("t")] == [0, 1, 2]
    assert cluster.partitions_for_topic("none") == ()
    assert cluster.partition_count_for_topic("t") == 3
    assert cluster.partition_count_for_topic("none") is None
    assert cluster.topics == {"t", "u"}


def test_only_partitions_with_a_leader_are_available(cluster: Cluster) -> None:
    assert [info.partition for info in cluster.available_partitions_for_topic("t")] == [0, 2]
    assert cluster.available_partitions_for_topic("u") == ()
    assert cluster.available_partitions_for_topic("none") == ()


def test_leaders_are_those_of_partitions_that_have_one(cluster: Cluster) -> None:
    assert cluster.leaders == {TopicPartition("t", 2): A, TopicPartition("t", 0): B}


def test_id_string_follows_the_id_and_is_not_compared() -> None:
    assert (A.id_string, Node(-1, "x", 1).id_string) == ("0", "-1")
    assert dataclasses.replace(A, id=7).id_string == "7"
    assert pickle.loads(pickle.dumps(A)).id_string == "0"
    assert pickle.loads(pickle.dumps(A)) == A
    assert "id_string" not in repr(A)


def test_leader_that_is_not_among_the_nodes_is_found_too() -> None:
    stranger = Node(5, "s", 1)
    cluster = Cluster(partitions=(PartitionInfo("t", 0, stranger),))
    assert cluster.leader_for(TopicPartition("t", 0)) is stranger


def test_partitions_and_leaders_are_found_by_name(cluster: Cluster) -> None:
    assert cluster.partition_info(TopicPartition("t", 2)) is INFOS[0]
    assert cluster.partition_info(TopicPartition("t", 9)) is None
    assert cluster.leader_for(TopicPartition("t", 0)) is B
    assert cluster.leader_for(TopicPartition("t", 1)) is None
    assert cluster.leader_for(TopicPartition("none", 0)) is None


def test_node_shows_its_id_and_address() -> None:
    assert A.id_string == "0"
    assert str(B) == "b:9093 (id 1)"


def test_bootstrap_addresses_are_nodes_with_negative_ids_and_no_topics() -> None:
    cluster = Cluster.bootstrap([("x", 1), ("y", 2)])
    assert cluster.nodes == (Node(-1, "x", 1), Node(-2, "y", 2))
    assert cluster.is_bootstrap_configured
    assert cluster.topics == frozenset()
    assert not Cluster.empty().is_bootstrap_configured
    assert Cluster.empty().nodes == ()


def test_snapshot_does_not_change(cluster: Cluster) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.nodes = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        A.port = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        PartitionMetadata(TopicPartition("t", 0), 1).leader_id = 2  # type: ignore[misc]


def test_topic_partition_is_hashable_and_prints_as_in_kafka() -> None:
    place = TopicPartition("t", 4)
    assert {place: 1}[TopicPartition("t", 4)] == 1
    assert str(place) == "t-4"
    assert pickle.loads(pickle.dumps(place)) == place


def test_names_from_peers_stay_on_one_line() -> None:
    """Bug: a host or topic with a line break forged lines of the log."""
    name = "evil\n2026 CRITICAL\x1b[2J"
    for text in (str(Node(1, name, 9092)), str(TopicPartition(name, 0))):
        assert text.isprintable()
