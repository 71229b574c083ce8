from __future__ import annotations

import logging
import pickle
import random
import threading
from collections.abc import Iterable
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from spark_kafka_sink.client.metadata import LeaderAndEpoch, LeaderIdAndEpoch, Metadata
from spark_kafka_sink.client.metadata import log as metadata_log
from spark_kafka_sink.client.metadata_view import MetadataResponse, TopicMetadata
from spark_kafka_sink.common.cluster import Cluster, Node, PartitionMetadata, TopicPartition
from spark_kafka_sink.common.errors import (
    ClusterAuthorizationError,
    IllegalStateError,
    InvalidTopicError,
    TopicAuthorizationError,
)
from spark_kafka_sink.protocol.metadata import MetadataRequest

BACKOFF_MS = 100
BACKOFF_MAX_MS = 1_000
EXPIRE_MS = 300_000
NODES = {index: Node(index, f"broker-{index}", 9092) for index in range(3)}
ID_A = UUID(int=1)
ID_B = UUID(int=2)
T0 = TopicPartition("t", 0)


class SomeTopics(Metadata):
    """Requests the topics in `requested`. Those in `new` are requested in partial updates."""

    def __init__(self, requested: Iterable[str] = ("t", "u")) -> None:
        super().__init__(BACKOFF_MS, BACKOFF_MAX_MS, EXPIRE_MS, random.Random(1))
        self.requested = set(requested)
        self.new: tuple[str, ...] = ()

    def retain_topic(self, topic: str, now_ms: int) -> bool:
        return topic in self.requested

    def new_metadata_request_builder_for_new_topics(self) -> MetadataRequest | None:
        return MetadataRequest(self.new) if self.new else None


def partition(
    topic: str = "t", number: int = 0, leader: int | None = 0, epoch: int | None = 5, error: int = 0
) -> PartitionMetadata:
    return PartitionMetadata(TopicPartition(topic, number), leader, epoch, (0, 1, 9), (0, 1), (9,), error)


def topic(
    name: str = "t", *partitions: PartitionMetadata, error: int = 0, topic_id: UUID | None = None
) -> TopicMetadata:
    return TopicMetadata(name, error, topic_id, partitions)


def response(*topics: TopicMetadata, reliable: bool = True, cluster_id: str = "c") -> MetadataResponse:
    return MetadataResponse(dict(NODES), topics, cluster_id, 1, reliable)


def update(metadata: Metadata, answer: MetadataResponse, now_ms: int = 1_000, is_partial: bool = False) -> None:
    version = metadata.new_metadata_request_and_version(now_ms).request_version
    metadata.update(version, answer, is_partial, now_ms)


@pytest.fixture
def metadata() -> SomeTopics:
    return SomeTopics()


# ---- bootstrap and reading ---------------------------------------------------------------------------------------


def test_bootstrap_gives_nodes_with_negative_ids_and_asks_for_everything(metadata: SomeTopics) -> None:
    metadata.bootstrap([("a", 1), ("b", 2)])
    assert metadata.fetch().nodes == (Node(-1, "a", 1), Node(-2, "b", 2))
    assert metadata.fetch().is_bootstrap_configured
    assert metadata.update_version == 1
    assert metadata.update_requested()
    assert metadata.time_to_next_update(0) == 0
    assert not metadata.new_metadata_request_and_version(0).is_partial


def test_rebootstrap_begins_again_from_the_same_addresses(metadata: SomeTopics) -> None:
    metadata.bootstrap([("a", 1)])
    update(metadata, response(topic("t", partition())))
    assert metadata.fetch().topics == {"t"}
    metadata.rebootstrap()
    assert metadata.fetch().nodes == (Node(-1, "a", 1),)
    assert metadata.fetch().topics == frozenset()
    assert metadata.update_requested()


def test_update_becomes_the_cluster_view(metadata: SomeTopics) -> None:
    metadata.bootstrap([("a", 1)])
    update(metadata, response(topic("t", partition(), partition(number=1, leader=None, epoch=3), topic_id=ID_A)))
    cluster = metadata.fetch()
    assert not cluster.is_bootstrap_configured
    assert cluster.cluster_id == "c"
    assert cluster.controller == NODES[1]
    assert set(cluster.nodes) == set(NODES.values())
    assert cluster.partition_count_for_topic("t") == 2
    assert cluster.topic_ids == {"t": ID_A}
    info = cluster.partition_info(T0)
    assert info is not None
    assert info.leader == NODES[0]
    assert info.replicas == (NODES[0], NODES[1], Node(9, "", -1))
    assert info.in_sync_replicas == (NODES[0], NODES[1])
    assert info.offline_replicas == (Node(9, "", -1),)
    assert [each.partition for each in cluster.available_partitions_for_topic("t")] == [0]
    assert metadata.cache.topic_ids == {"t": ID_A}
    assert metadata.cache.leader_epoch(T0) == 5
    assert metadata.cache.leader_epoch(TopicPartition("x", 0)) is None


def test_replicas_that_partitions_have_in_common_are_looked_up_once(metadata: SomeTopics) -> None:
    """They are half of the work of a new view, and each new topic and each leader change makes a view."""
    update(metadata, response(topic("t", partition(), partition(number=1, leader=1))))
    first, second = metadata.fetch().partitions_for_topic("t")
    assert first.replicas is second.replicas
    assert first.in_sync_replicas is second.in_sync_replicas


def test_leader_without_a_known_address_is_not_a_leader(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(leader=77))))
    assert metadata.fetch().leader_for(T0) is None
    assert metadata.current_leader(T0) == LeaderAndEpoch(None, 5)


# ---- when to fetch -----------------------------------------------------------------------------------------------


def test_metadata_is_fetched_again_when_it_is_too_old(metadata: SomeTopics) -> None:
    update(metadata, response())
    assert not metadata.update_requested()
    assert metadata.time_to_next_update(1_000) == EXPIRE_MS
    assert metadata.time_to_next_update(1_000 + EXPIRE_MS - 1) == 1
    assert metadata.time_to_next_update(1_000 + EXPIRE_MS) == 0
    assert metadata.last_successful_refresh_ms == 1_000


def test_update_request_waits_for_the_backoff(metadata: SomeTopics) -> None:
    update(metadata, response())
    assert metadata.request_update() == 1
    assert metadata.update_requested()
    wait_ms = metadata.time_to_next_update(1_000)
    assert 80 <= wait_ms <= 120
    assert metadata.time_to_next_update(1_000) == wait_ms, "a second call gives the same answer"
    assert metadata.time_to_next_update(1_000 + wait_ms) == 0


def test_update_backoff_grows_and_resets_after_a_success(metadata: SomeTopics) -> None:
    metadata.bootstrap([("a", 1)])
    waits = []
    for _ in range(8):
        metadata.failed_update(1_000)
        waits.append(metadata.time_to_next_update(1_000))
    for failures, wait_ms in enumerate(waits):
        assert min(0.8 * BACKOFF_MS * 2**failures, 800) - 1 <= wait_ms <= min(1.2 * BACKOFF_MS * 2**failures, 1_000)
    assert waits[-1] >= 800
    update(metadata, response())
    metadata.request_update()
    assert metadata.time_to_next_update(1_000) <= 120


def test_updates_without_changes_slow_down(metadata: SomeTopics) -> None:
    waits = []
    for _ in range(6):
        update(metadata, response(topic("t", partition())))
        metadata.request_update(reset_equivalent_backoff=False)
        waits.append(metadata.time_to_next_update(1_000))
    assert waits[0] <= 120, "the first brought the partition's epoch"
    assert waits[-1] >= 800
    metadata.request_update()
    assert metadata.time_to_next_update(1_000) <= 120, "a new request starts over"


@pytest.mark.parametrize("stale", [topic("t", error=5), topic("t", partition(error=5))], ids=["topic", "partition"])
def test_leaderless_partition_is_requested_more_and_more_slowly(metadata: SomeTopics, stale: TopicMetadata) -> None:
    for _ in range(6):
        update(metadata, response(stale))
    assert metadata.update_requested()
    assert metadata.time_to_next_update(1_000) >= 800


def test_without_epochs_every_response_is_new(metadata: SomeTopics) -> None:
    for _ in range(6):
        update(metadata, response(topic("t", partition()), reliable=False))
    metadata.request_update(reset_equivalent_backoff=False)
    assert metadata.time_to_next_update(1_000) <= 120


def test_newer_epoch_is_reported_as_a_change(metadata: SomeTopics) -> None:
    for epoch in range(6):
        update(metadata, response(topic("t", partition(epoch=epoch))))
    metadata.request_update(reset_equivalent_backoff=False)
    assert metadata.time_to_next_update(1_000) <= 120


def test_failure_restarts_the_wait_for_changes(metadata: SomeTopics) -> None:
    for _ in range(6):
        update(metadata, response(topic("t", partition())))
    metadata.failed_update(1_000)
    metadata.request_update(reset_equivalent_backoff=False)
    assert metadata.time_to_next_update(1_000) <= 120


def test_update_for_age_does_not_wait_for_changes(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition())))
    now_ms = 1_000 + EXPIRE_MS
    for _ in range(6):
        update(metadata, response(topic("t", partition())), now_ms - 1, is_partial=True)
    metadata.request_update(reset_equivalent_backoff=False)
    assert metadata.time_to_next_update(now_ms - 1) >= 800
    assert metadata.time_to_next_update(now_ms) <= 120


def test_new_topics_are_requested_at_once_and_without_others(metadata: SomeTopics) -> None:
    update(metadata, response())
    metadata.new = ("u",)
    assert metadata.request_update_for_new_topics() == 1
    assert metadata.time_to_next_update(1_000) == 0
    asked = metadata.new_metadata_request_and_version(1_000)
    assert asked.is_partial
    assert asked.request == MetadataRequest(("u",))
    assert asked.request_version == 1


def test_full_update_that_is_due_covers_new_topics_too(metadata: SomeTopics) -> None:
    update(metadata, response())
    metadata.new = ("u",)
    metadata.request_update_for_new_topics()
    metadata.request_update()
    assert not metadata.new_metadata_request_and_version(1_000).is_partial


def test_expired_view_is_asked_for_in_full(metadata: SomeTopics) -> None:
    update(metadata, response())
    metadata.new = ("u",)
    metadata.request_update_for_new_topics()
    assert metadata.new_metadata_request_and_version(1_000 + EXPIRE_MS - 1).is_partial
    assert not metadata.new_metadata_request_and_version(1_000 + EXPIRE_MS).is_partial


def test_topics_added_during_an_update_stay_requested(metadata: SomeTopics) -> None:
    metadata.request_update_for_new_topics()
    asked = metadata.new_metadata_request_and_version(1_000)
    metadata.request_update_for_new_topics()
    metadata.update(asked.request_version, response(), True, 1_000)
    assert metadata.update_requested()
    metadata.update(asked.request_version + 1, response(), True, 1_000)
    assert not metadata.update_requested()


def test_partial_update_does_not_satisfy_a_full_one(metadata: SomeTopics) -> None:
    update(metadata, response())
    metadata.request_update()
    update(metadata, response(), now_ms=5_000, is_partial=True)
    assert metadata.update_requested()
    assert metadata.last_successful_refresh_ms == 1_000
    update(metadata, response(), now_ms=6_000)
    assert not metadata.update_requested()
    assert metadata.last_successful_refresh_ms == 6_000


def test_every_answered_update_counts_in_the_version(metadata: SomeTopics) -> None:
    update(metadata, response())
    update(metadata, response(), is_partial=True)
    assert metadata.update_version == 2
    metadata.failed_update(1_000)
    assert metadata.update_version == 2


def test_without_subclass_all_topics_are_asked_for_and_kept() -> None:
    metadata = Metadata(BACKOFF_MS, BACKOFF_MAX_MS, EXPIRE_MS, random.Random(1))
    assert metadata.new_metadata_request_and_version(0).request == MetadataRequest(None)
    update(metadata, response(topic("any", partition("any"))))
    metadata.request_update_for_new_topics()
    assert not metadata.new_metadata_request_and_version(1_000).is_partial
    assert metadata.fetch().topics == {"any"}


# ---- what a response changes -------------------------------------------------------------------------------------


def test_topics_that_are_not_requested_are_not_kept(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(), topic_id=ID_A), topic("x", partition("x"), topic_id=ID_B)))
    assert metadata.fetch().topics == {"t"}
    assert metadata.cache.topic_ids == {"t": ID_A}
    assert metadata.current_leader(TopicPartition("x", 0)).epoch is None


def test_epochs_of_topics_no_longer_requested_are_forgotten(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition())))
    metadata.requested.discard("t")
    update(metadata, response())
    assert metadata.current_leader(T0).epoch is None


def test_full_update_replaces_and_partial_update_merges(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(), topic_id=ID_A)))
    update(metadata, response(topic("u", partition("u"), topic_id=ID_B)), is_partial=True)
    assert metadata.fetch().topics == {"t", "u"}
    assert metadata.cache.topic_ids == {"t": ID_A, "u": ID_B}
    update(metadata, response(topic("u", partition("u"))))
    assert metadata.fetch().topics == {"u"}
    assert metadata.cache.topic_ids == {}


def test_partial_update_replaces_its_topics(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(), partition(number=1), topic_id=ID_A)))
    update(metadata, response(topic("t", partition())), is_partial=True)
    assert metadata.fetch().partition_count_for_topic("t") == 1
    assert metadata.cache.topic_ids == {}, "the latest answer had no id"
    update(metadata, response(topic("t", error=3)), is_partial=True)
    assert metadata.fetch().partition_count_for_topic("t") is None


def test_partial_update_has_all_brokers(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition())))
    nodes = {4: Node(4, "new", 9092)}
    update(metadata, MetadataResponse(nodes, (topic("u"),), "another", 4), is_partial=True)
    cluster = metadata.fetch()
    assert cluster.nodes == tuple(nodes.values())
    assert (cluster.cluster_id, cluster.controller) == ("another", nodes[4])
    assert cluster.partition_count_for_topic("t") == 1


def test_partial_update_drops_topics_that_are_not_retained(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(), topic_id=ID_A), topic("u", error=17)))
    metadata.requested.clear()
    update(metadata, response(), is_partial=True)
    assert metadata.fetch().topics == frozenset()
    assert metadata.cache.topic_ids == {}
    assert metadata.fetch().invalid_topics == frozenset()


def test_new_topics_are_added_to_the_view(metadata: SomeTopics) -> None:
    """Consecutive sends bring topics one by one. A new view of all topics for each took most of the time."""
    metadata.requested = {"t", "u", "v"}
    of_t = topic("t", partition(), partition(number=1, leader=None), topic_id=ID_A)
    of_u = topic("u", partition("u", leader=1), topic_id=ID_B)
    update(metadata, response(of_t))
    known = metadata.fetch().partitions
    update(metadata, response(of_u), is_partial=True)
    update(metadata, response(topic("v", error=3)), is_partial=True)
    added = metadata.fetch()
    assert all(one is other for one, other in zip(added.partitions, known, strict=False))
    whole = SomeTopics(metadata.requested)
    update(whole, response(of_t, of_u, topic("v", error=3)))
    expected = whole.fetch()
    assert added == expected
    for name in ("_info_by_topic_partition", "_partitions_by_topic", "_available_partitions_by_topic"):
        assert name in vars(added)
        assert getattr(added, name) == getattr(expected, name)
    assert added.leaders == expected.leaders


def test_moved_node_has_its_new_address_in_known_topics(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition())))
    assert metadata.fetch().leader_for(T0) == NODES[0]
    nodes = NODES | {0: Node(0, "elsewhere", 9092)}
    update(metadata, MetadataResponse(nodes, (topic("u", partition("u")),), "c", 1), is_partial=True)
    assert metadata.fetch().leader_for(T0) == nodes[0]
    assert metadata.fetch().leader_for(TopicPartition("u", 0)) == nodes[0]


def test_invalid_and_unauthorized_topics_survive_a_partial_update(
    metadata: SomeTopics,
) -> None:
    metadata.requested = {"bad name", "secret", "other"}
    update(metadata, response(topic("bad name", error=17), topic("secret", error=29)))
    update(metadata, response(topic("other", partition("other"))), is_partial=True)
    cluster = metadata.fetch()
    assert cluster.invalid_topics == {"bad name"}
    assert cluster.unauthorized_topics == {"secret"}


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.replica_not_available,
        ErrorCode.kafka_storage_error,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_topic_id,
        ErrorCode.inconsistent_topic_id,
    ],
)
def test_stale_metadata_error_asks_for_a_full_update(metadata: SomeTopics, code: int) -> None:
    update(metadata, response(topic("t", error=code)))
    assert metadata.update_requested()
    assert not metadata.new_metadata_request_and_version(1_000).is_partial


def test_partition_without_leader_asks_for_a_full_update(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(leader=None, error=5))))
    assert metadata.update_requested()
    assert metadata.fetch().partition_count_for_topic("t") == 1


@pytest.mark.parametrize(
    "code", [ErrorCode.invalid_topic_exception, ErrorCode.topic_authorization_failed, ErrorCode.unknown_server_error]
)
def test_other_topic_errors_request_no_update(metadata: SomeTopics, code: int) -> None:
    update(metadata, response(topic("t", error=code)))
    assert not metadata.update_requested()


def test_error_of_an_unrequested_topic_requests_no_update(metadata: SomeTopics) -> None:
    update(metadata, response(topic("x", error=3)))
    assert not metadata.update_requested()


# ---- epochs and ids ----------------------------------------------------------------------------------------------


def test_older_epoch_never_replaces_a_newer_one(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(leader=0, epoch=5), topic_id=ID_A)))
    update(metadata, response(topic("t", partition(leader=1, epoch=4), topic_id=ID_A)))
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[0], 5)
    assert metadata.current_leader(T0).epoch == 5
    update(metadata, response(topic("t", partition(leader=1, epoch=5), topic_id=ID_A)))
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[1], 5)
    update(metadata, response(topic("t", partition(leader=2, epoch=6), topic_id=ID_A)))
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[2], 6)


@pytest.mark.parametrize("is_by_hint", [False, True])
def test_fifth_older_epoch_in_a_row_is_accepted(metadata: SomeTopics, is_by_hint: bool) -> None:
    """Bug: brokers before 2.8 do not show that a topic was created again, and then its leader was never found. The same
    after a hint about the leader of before.
    """
    older = response(topic("t", partition(leader=1, epoch=0), topic_id=ID_A))
    update(metadata, response(topic("t", partition(leader=0, epoch=0 if is_by_hint else 5), topic_id=ID_A)))
    if is_by_hint:
        metadata.update_partition_leadership({T0: LeaderIdAndEpoch(0, 5)}, [])
    for _ in range(4):
        update(metadata, older)
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[0], 5)
    update(metadata, response(topic("t", partition(leader=0, epoch=5), topic_id=ID_A)))
    for _ in range(4):
        update(metadata, older)
        assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[0], 5)
    update(metadata, older)
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[1], 0)


@pytest.mark.parametrize("error", [3, 5], ids=["deleted and made again", "without leaders"])
def test_older_epoch_of_an_uncached_partition_is_accepted(metadata: SomeTopics, error: int) -> None:
    update(metadata, response(topic("t", partition(epoch=5), partition(number=1, epoch=5))))
    update(metadata, response(topic("t", error=error)))
    update(metadata, response(topic("t", partition(leader=1, epoch=4), partition(number=1, epoch=5))))
    assert metadata.fetch().partition_count_for_topic("t") == 2
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[1], 4)


def test_rebootstrap_leaves_no_partition_out(metadata: SomeTopics) -> None:
    metadata.bootstrap([("a", 1)])
    update(metadata, response(topic("t", partition(epoch=5), partition(number=1, epoch=5))))
    metadata.rebootstrap()
    update(metadata, response(topic("t", partition(epoch=4), partition(number=1, epoch=5))))
    assert metadata.fetch().partition_count_for_topic("t") == 2


def test_topic_created_again_starts_from_a_lower_epoch(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(leader=0, epoch=9), topic_id=ID_A)))
    update(metadata, response(topic("t", error=3)))
    update(metadata, response(topic("t", partition(leader=1, epoch=0), topic_id=ID_B)))
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[1], 0)
    assert metadata.cache.topic_ids == {"t": ID_B}


@pytest.mark.parametrize(
    ("old_id", "new_id", "new_epoch", "leader", "epoch"),
    [
        (ID_A, ID_B, 2, 1, 2),
        (None, None, 2, 0, 9),
        (ID_A, None, 2, 0, 9),
        (None, None, None, 1, None),
    ],
    ids=["another topic id", "no topic ids", "no id in the second answer", "no epoch in the second answer"],
)
def test_leader_after_an_answer_with_lower_or_no_epoch(
    metadata: SomeTopics,
    old_id: UUID | None,
    new_id: UUID | None,
    new_epoch: int | None,
    leader: int,
    epoch: int | None,
) -> None:
    update(metadata, response(topic("t", partition(leader=0, epoch=9), topic_id=old_id)))
    update(metadata, response(topic("t", partition(leader=1, epoch=new_epoch), topic_id=new_id)))
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[leader], epoch)


def test_unreliable_epochs_are_not_used(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(leader=0, epoch=9))))
    update(metadata, response(topic("t", partition(leader=1, epoch=2)), reliable=False))
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[1], None)
    update(metadata, response(topic("t", partition(leader=2, epoch=3))))
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[2], 3)


# ---- leader hints ------------------------------------------------------------------------------------------------


def test_newer_leader_hint_is_applied_without_an_update(metadata: SomeTopics) -> None:
    metadata.bootstrap([("a", 1)])
    update(metadata, response(topic("t", partition(leader=0, epoch=5), partition(number=1), topic_id=ID_A)))
    new_node = Node(8, "broker-8", 9092)
    changed = metadata.update_partition_leadership({T0: LeaderIdAndEpoch(8, 6)}, [new_node])
    assert changed == {T0}
    assert metadata.current_leader(T0) == LeaderAndEpoch(new_node, 6)
    cluster = metadata.fetch()
    assert cluster.leader_for(T0) == new_node
    assert cluster.leader_for(TopicPartition("t", 1)) == NODES[0]
    assert set(cluster.nodes) == {*NODES.values(), new_node}
    assert (cluster.cluster_id, cluster.controller, cluster.topic_ids) == ("c", NODES[1], {"t": ID_A})
    assert not metadata.update_requested()
    update(metadata, response(topic("t", partition(leader=0, epoch=5), topic_id=ID_A)))
    assert metadata.cache.partitions[T0].leader_id == 8, "the hint's epoch counts against an older answer"


def test_leader_hint_is_applied_if_no_epoch_is_known(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(leader=0)), reliable=False))
    assert metadata.update_partition_leadership({T0: LeaderIdAndEpoch(1, 0)}, []) == {T0}
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[1], 0)


@pytest.mark.parametrize(
    "hint",
    [
        LeaderIdAndEpoch(1, 5), LeaderIdAndEpoch(1, 4), LeaderIdAndEpoch(None, 6), LeaderIdAndEpoch(1, None),
        LeaderIdAndEpoch(77, 6),
    ],
)  # fmt: skip
def test_stale_or_incomplete_leader_hint_is_ignored(metadata: SomeTopics, hint: LeaderIdAndEpoch) -> None:
    update(metadata, response(topic("t", partition(leader=0, epoch=5))))
    assert metadata.update_partition_leadership({T0: hint}, []) == set()
    assert metadata.current_leader(T0) == LeaderAndEpoch(NODES[0], 5)


def test_leader_hint_for_an_uncached_partition_is_ignored(metadata: SomeTopics) -> None:
    update(metadata, response())
    assert metadata.update_partition_leadership({T0: LeaderIdAndEpoch(1, 6)}, []) == set()
    assert metadata.current_leader(T0).epoch is None


# ---- the log, errors, close --------------------------------------------------------------------------------------


def test_change_of_the_cluster_id_is_logged_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    metadata = Metadata(BACKOFF_MS, BACKOFF_MAX_MS, EXPIRE_MS, random.Random(1))
    with caplog.at_level("INFO"):
        for cluster_id in ("one", "c\n2026-01-01 CRITICAL root: forged\x1b[2J", "two", "two"):
            update(metadata, response(cluster_id=cluster_id))
    assert caplog.messages == ["Cluster id: c?2026-01-01 CRITICAL root: forged?[2J", "Cluster id: two"]


def test_log_handler_may_use_the_metadata_during_a_rebootstrap(
    metadata: SomeTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the line was logged under the lock. A handler that sends through the producer needs that lock, and an
    application thread that logs has the handler's own lock then: the two threads waited for each other forever.
    """
    was_free: list[bool] = []

    class Sending(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sender = threading.Thread(target=metadata.request_update, daemon=True)
            sender.start()
            sender.join(5)
            was_free.append(not sender.is_alive())

    monkeypatch.setattr(metadata_log, "handlers", [Sending()])
    monkeypatch.setattr(metadata_log, "level", logging.INFO)
    metadata.rebootstrap()
    assert was_free == [True]


def test_error_of_a_topic_is_raised_once_and_names_it(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", error=29), topic("u", error=17)))
    with pytest.raises(TopicAuthorizationError, match=r"\bt\b.*grant") as caught:
        metadata.maybe_raise_any_error()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    metadata.maybe_raise_any_error()


def test_invalid_topics_are_named_with_their_blanks(metadata: SomeTopics) -> None:
    metadata.requested = {"t\t", "u "}
    update(metadata, response(topic("t\t", error=17), topic("u ", error=17)))
    with pytest.raises(InvalidTopicError, match=r"^Topic 't\\t', 'u ': "):
        metadata.maybe_raise_any_error()


def test_error_of_one_topic_does_not_concern_another(metadata: SomeTopics) -> None:
    """The same update wakes threads that wait for other topics, and they may look first."""
    update(metadata, response(topic("t", error=29), topic("u", error=17)))
    metadata.maybe_raise_error_for_topic("other")
    with pytest.raises(InvalidTopicError):
        metadata.maybe_raise_error_for_topic("u")
    with pytest.raises(TopicAuthorizationError):
        metadata.maybe_raise_error_for_topic("t")
    metadata.maybe_raise_any_error()


def test_next_answer_clears_the_errors_of_topics(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", error=29)))
    update(metadata, response(topic("t", partition())))
    metadata.maybe_raise_any_error()


def test_fatal_error_goes_first_and_is_raised_once(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", error=29)))
    error = ClusterAuthorizationError()
    metadata.fatal_error(error)
    with pytest.raises(ClusterAuthorizationError):
        metadata.maybe_raise_fatal_error()
    metadata.maybe_raise_fatal_error()
    metadata.fatal_error(error)
    with pytest.raises(ClusterAuthorizationError):
        metadata.maybe_raise_error_for_topic("t")
    metadata.maybe_raise_any_error()


@pytest.mark.parametrize("change", ["update", "fatal_error", "close"])
def test_waiting_thread_is_woken_by_each_change(
    metadata: SomeTopics, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "update": lambda: update(metadata, response()),
        "fatal_error": lambda: metadata.fatal_error(ClusterAuthorizationError()),
        "close": metadata.close,
    }
    woken: list[bool] = []
    monkeypatch.setattr(metadata.condition, "notify_all", lambda: woken.append(True))
    changes[change]()
    assert woken == [True]


def test_update_after_close_raises(metadata: SomeTopics) -> None:
    metadata.close()
    assert metadata.is_closed
    with pytest.raises(IllegalStateError):
        update(metadata, response())


def test_cause_of_failed_connections_is_kept_until_metadata_arrives(metadata: SomeTopics) -> None:
    assert metadata.connection_failure is None
    metadata.note_connection_failure("-1", "refused")
    assert metadata.connection_failure == "refused"
    update(metadata, response())
    assert metadata.connection_failure is None


def test_cause_of_a_nodes_lost_connection_is_kept_until_it_is_ready_or_gone(metadata: SomeTopics) -> None:
    update(metadata, response())
    for node_id in ("1", "2", "9"):
        metadata.note_connection_failure(node_id, f"refused by {node_id}")
    metadata.note_reachable("2")
    update(metadata, response())
    assert [metadata.node_failure(node_id) for node_id in ("1", "2", "9")] == ["refused by 1", None, None]
    metadata.rebootstrap()  # the node is still away
    assert metadata.node_failures == {"1": "refused by 1"}


# ---- leaders unknown to the brokers, and readers beside the writer
# -----------------------------------------------------


def test_leader_of_a_newer_epoch_ends_with_its_broker(metadata: SomeTopics) -> None:
    update(metadata, response(topic("t", partition(leader=2, epoch=10))))
    stale = MetadataResponse({0: NODES[0], 1: NODES[1]}, (topic("t", partition(leader=0, epoch=9)),), "c", 1, True)
    update(metadata, stale)
    assert metadata.cache.leader_epoch(T0) == 10, "the older epoch did not replace it"
    assert metadata.fetch().leader_for(T0) is None
    assert metadata.current_leader(T0).leader is None


def test_leader_hint_changes_only_its_partition(metadata: SomeTopics) -> None:
    update(
        metadata,
        response(
            topic("t", partition(leader=0), partition(number=1, leader=1), topic_id=ID_A),
            topic("u", partition("u", leader=1), topic_id=ID_B),
        ),
    )
    before = metadata.fetch()
    metadata.update_partition_leadership({T0: LeaderIdAndEpoch(2, 6)}, [NODES[2]])
    after = metadata.fetch()
    assert after.leader_for(T0) == NODES[2]
    for other in (TopicPartition("t", 1), TopicPartition("u", 0)):
        assert after.partition_info(other) == before.partition_info(other)
    assert after.topic_ids == before.topic_ids == {"t": ID_A, "u": ID_B}


class SeenByReaders(SomeTopics):
    """Keeps every view that a reader beside the writer could have seen, because readers take no lock."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_cache":
            self.__dict__.setdefault("views", []).append(self.fetch())


def test_readers_beside_the_writer_see_whole_views_only() -> None:
    """MetadataTest.testConcurrentUpdateAndFetchForSnapshotAndCluster: each view is of one update, and has the broker of
    each leader.
    """
    metadata = SeenByReaders()
    both = [T0, TopicPartition("t", 1)]

    def led_by(leader: int, epoch: int) -> MetadataResponse:
        partitions = (partition(number=each.partition, leader=leader, epoch=epoch) for each in both)
        return MetadataResponse({leader: NODES[leader]}, (topic("t", *partitions),), "c", leader, True)

    update(metadata, led_by(0, epoch=1))
    before: list[Cluster] = metadata.__dict__.pop("views")
    update(metadata, led_by(1, epoch=2))
    update(metadata, led_by(2, epoch=3), is_partial=True)
    metadata.update_partition_leadership(dict.fromkeys(both, LeaderIdAndEpoch(0, 4)), [NODES[0]])
    views: list[Cluster] = metadata.__dict__["views"]
    assert [[view.leader_for(each) for each in both] for view in views] == [[NODES[leader]] * 2 for leader in (1, 2, 0)]
    assert all(view.controller in view.nodes for view in (before[-1], *views))
