"""The faults of a simulation: a table with weights, and the end of all faults."""

from __future__ import annotations

import random
from collections.abc import Callable

from kio.schema.errors import ErrorCode
from support.scripted_broker import faults
from support.scripted_broker.cluster import NO_LEADER, ScriptedCluster
from support.scripted_broker.exchange import Answer, Exchange
from support.scripted_broker.faults import Hook
from support.scripted_broker.versions import KAFKA_2_1, KAFKA_3_0, KAFKA_4_1
from support.simulation import hooks
from support.simulation.world import World

from spark_kafka_sink.common.errors import ClusterAuthorizationError
from spark_kafka_sink.protocol.versions import ApiKey

Fault = Callable[["Troubles"], str]
"""Makes the fault, and returns its description."""

_NOT_APPENDED = (
    ErrorCode.corrupt_message,
    ErrorCode.unknown_topic_or_partition,
    ErrorCode.leader_not_available,
    ErrorCode.not_leader_or_follower,
    ErrorCode.request_timed_out,
    ErrorCode.not_enough_replicas,
    ErrorCode.kafka_storage_error,
    ErrorCode.fenced_leader_epoch,
    ErrorCode.unknown_leader_epoch,
)
"""Retriable codes of Produce."""
_REFUSED = (
    ErrorCode.record_list_too_large,
    ErrorCode.invalid_required_acks,
    ErrorCode.topic_authorization_failed,
    ErrorCode.invalid_timestamp,
    ErrorCode.unsupported_compression_type,
    ErrorCode.invalid_record,
    ErrorCode.invalid_request,
    ErrorCode.unknown_server_error,
)
_PERHAPS_APPENDED = (
    ErrorCode.request_timed_out,
    ErrorCode.not_enough_replicas_after_append,
    ErrorCode.unknown_server_error,
)
_SEQUENCE_ERRORS = (ErrorCode.out_of_order_sequence_number, ErrorCode.unknown_producer_id)


class Troubles:
    """Makes faults in a world, and ends them."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.cluster, self.network = world.cluster, world.network
        self.rng = rng
        self.has_been_fatal = False
        """A broker caused a final failure of the producer."""
        self.has_denied_topics = False
        """Metadata has said that a topic does not exist."""
        self.has_moved_nodes = False
        """Nodes had the addresses of others, or versions without reliable leader epochs."""
        self._snapshots = [hooks.snapshot(self.cluster)]
        # A run has few kinds of faults, each often: they then come together more often than with all kinds.
        kinds = rng.choices(list(_TABLE), list(_TABLE.values()), k=rng.choice((2, 4, 6, 10)))
        self._faults = [*dict.fromkeys(kinds), *([_flipped_answer] if world.plan.is_hostile else [])]

    def add_fault(self) -> None:
        """Make one more fault, or several at a time."""
        for fault in self.rng.choices(self._faults, k=self.rng.choice((1, 1, 1, 3))):
            self.world.timeline.note("!! %s", fault(self))

    def end_one_fault(self) -> None:
        """End one lasting fault."""
        self._end_one()

    def heal(self) -> None:
        """End all faults."""
        cluster, network = self.cluster, self.network
        cluster.scripts.clear()
        cluster.throttle_ms = 0
        for road in (network.refusing, network.hanging, network.stalled, network.held):
            road.clear()
        cluster.live_node_ids.update(cluster.nodes)
        for topic in cluster.topics.values():
            topic.is_visible, topic.max_message_bytes = True, self.world.plan.max_message_bytes
            for index, partition in enumerate(topic.partitions):
                if partition.leader_id == NO_LEADER:
                    cluster.move_leader(topic.name, index, self.rng.choice(sorted(cluster.nodes)))
        self.world.timeline.note("-- all faults have ended")

    def remember(self) -> None:
        """Keep the current metadata for a broker with old metadata."""
        self._snapshots.append(hooks.snapshot(self.cluster))

    # ---- parts of faults ---------------------------------------------------------------------------------------------

    def script(self, api_key: int, hook: Hook, what: str) -> str:
        times, skip = self.rng.choice((1, 2, 3, 6)), self.rng.choice((0, 0, 1, 2))
        node_id = self.rng.choice((None, self.any_node()))
        self.cluster.on(api_key, hook, times=times, skip=skip, node_id=node_id)
        where = "any node" if node_id is None else f"node {node_id}"
        return f"{ApiKey(api_key).name} at {where}: {what}, {times} times after {skip}"

    def any_node(self) -> int:
        return self.rng.choice(sorted(self.cluster.nodes))

    def any_partition(self) -> tuple[str, int]:
        topic = self.rng.choice(sorted(self.cluster.topics))
        return topic, self.rng.randrange(len(self.cluster.topics[topic].partitions))

    def old_metadata(self) -> Hook:
        return hooks.stale(self.rng.choice(self._snapshots))

    def _end_one(self) -> None:
        network = self.network
        for road in (network.stalled, network.held, network.hanging):
            if road:
                node_id = self.rng.choice(sorted(road))
                road.discard(node_id)
                self.world.timeline.note("-- node %d works again", node_id)
                return
        down = sorted(network.refusing)
        if down:
            network.start(self.rng.choice(down))
            self.world.timeline.note("-- a node runs again")
            return
        hidden = [topic for topic in self.cluster.topics.values() if not topic.is_visible]
        if hidden:
            hidden[0].is_visible = True
            self.world.timeline.note("-- %s is in metadata again", hidden[0].name)


# ---- responses to Produce --------------------------------------------------------------------------------------------


def _refuse(codes: tuple[int, ...]) -> Fault:
    def fault(troubles: Troubles) -> str:
        code, share = troubles.rng.choice(codes), troubles.rng.choice((0.5, 1.0))
        more = {"record_errors": [{"batch_index": 0, "batch_index_error_message": "odd"}]} if code == 87 else None
        hook = hooks.refuse_some(code, hooks.any_of(troubles.rng, share), more)
        return troubles.script(ApiKey.PRODUCE, hook, f"{share:.0%} of the batches refused with {code}")

    return fault


def _lose_state(troubles: Troubles) -> str:
    code = troubles.rng.choice(_SEQUENCE_ERRORS)
    hook = hooks.refuse_some(code, hooks.new_ones(troubles.cluster), {"log_start_offset": 0})
    return troubles.script(ApiKey.PRODUCE, hook, f"new batches refused with {code}")


def _appended_but(codes: tuple[int, ...]) -> Fault:
    def fault(troubles: Troubles) -> str:
        code = troubles.rng.choice(codes)
        return troubles.script(ApiKey.PRODUCE, hooks.answer_with(code), f"appended but answered with {code}")

    return fault


def _odd_answer(troubles: Troubles) -> str:
    what, hook = troubles.rng.choice(
        (
            ("partitions left out", hooks.leave_out(troubles.rng)),
            ("partitions listed twice", hooks.list_twice()),
            ("another topic's partition too", hooks.answer_for_another_topic()),
        )
    )
    return troubles.script(ApiKey.PRODUCE, hook, what)


def _lose_answers(troubles: Troubles) -> int:
    """Append the next few batches, and lose their responses."""
    count = troubles.rng.choice((1, 2, 3, 5))
    hook = troubles.rng.choice((faults.lose_response(), hooks.answer_with(7), hooks.answer_with(20)))
    troubles.cluster.on(ApiKey.PRODUCE, hook, times=count)
    return count


def _lose_answers_then_refuse(troubles: Troubles) -> str:
    """Lose the responses of some batches; then they, or later ones, get a final error."""
    count, code = _lose_answers(troubles), troubles.rng.choice(_REFUSED)
    hook = hooks.refuse_some(code, hooks.any_of(troubles.rng, 0.7))
    troubles.cluster.on(ApiKey.PRODUCE, hook, times=troubles.rng.choice((1, 2)))
    return f"{count} answers to PRODUCE lost, then refused with {code}"


def _lose_answers_then_move(troubles: Troubles) -> str:
    """Lose the responses of some batches; then the leader moves while their outcome is not known."""
    count = _lose_answers(troubles)
    return f"{count} answers to PRODUCE lost, then {' and '.join(_move_leader(troubles) for _ in range(2))}"


def _lose_answers_then_restart(troubles: Troubles) -> str:
    """Lose the responses of some batches; then all leaders know only the last batch of each producer."""
    count, cluster, world = _lose_answers(troubles), troubles.cluster, troubles.world

    def restart() -> None:
        for topic in cluster.topics.values():
            for partition in topic.partitions:
                partition.log.restart_leader()
        world.timeline.note("-- leaders have been restarted")

    world.selector.at(world.now_ms + troubles.rng.choice((1, 5, 20, 100, 500)), restart)
    return f"{count} answers to PRODUCE lost, then leaders are restarted"


# ---- responses to anything -------------------------------------------------------------------------------------------

_ANY_API = (
    ApiKey.PRODUCE,
    ApiKey.PRODUCE,
    ApiKey.PRODUCE,
    ApiKey.METADATA,
    ApiKey.INIT_PRODUCER_ID,
    ApiKey.API_VERSIONS,
)


def _no_answer(troubles: Troubles) -> str:
    what, hook = hooks.no_answer(troubles.rng)
    return troubles.script(troubles.rng.choice(_ANY_API), hook, what)


def _late_answer(troubles: Troubles) -> str:
    what, hook = hooks.late_answer(troubles.rng)
    return troubles.script(troubles.rng.choice(_ANY_API), hook, what)


def _garbled_answer(troubles: Troubles) -> str:
    what, hook = troubles.rng.choice(
        (
            ("frame of -1 bytes", faults.frame_length(-1)),
            ("frame of 2 GB", faults.frame_length(2**31 - 1)),
            ("next correlation id", faults.wrong_correlation_id(1)),
            ("next but one correlation id", faults.wrong_correlation_id(2)),
            ("cut short", faults.truncate(troubles.rng.choice((1, 2, 5)))),
        )
    )
    return troubles.script(troubles.rng.choice(_ANY_API), hook, what)


def _flipped_answer(troubles: Troubles) -> str:
    return troubles.script(troubles.rng.choice(_ANY_API), hooks.flip_bytes(troubles.rng), "bytes flipped")


# ---- metadata and producer ids ---------------------------------------------------------------------------------------


def _old_metadata(troubles: Troubles) -> str:
    return troubles.script(ApiKey.METADATA, troubles.old_metadata(), "a broker with old metadata")


def _bad_metadata(troubles: Troubles) -> str:
    # A broker does not call a valid name invalid.
    code = troubles.rng.choice(
        (ErrorCode.unknown_topic_or_partition, ErrorCode.leader_not_available, ErrorCode.topic_authorization_failed)
    )
    troubles.has_denied_topics = True
    what, hook = troubles.rng.choice(
        ((f"topics refused with {code}", hooks.refuse_topics(code)), ("names no broker", hooks.no_other_broker()))
    )
    return troubles.script(ApiKey.METADATA, hook, what)


def _no_producer_id(troubles: Troubles) -> str:
    code = troubles.rng.choice(
        (
            ErrorCode.coordinator_load_in_progress,
            ErrorCode.coordinator_not_available,
            ErrorCode.request_timed_out,
            ErrorCode.concurrent_transactions,
        )
    )
    return troubles.script(ApiKey.INIT_PRODUCER_ID, faults.fail_with(code), f"refused with {code}")


def _never_a_producer_id(troubles: Troubles) -> str:
    troubles.has_been_fatal = True
    return troubles.script(ApiKey.INIT_PRODUCER_ID, faults.fail_with(ClusterAuthorizationError), "refused permanently")


# ---- the cluster's state ---------------------------------------------------------------------------------------------


def _move_leader(troubles: Troubles) -> str:
    troubles.remember()
    (topic, partition), node_id = troubles.any_partition(), troubles.any_node()
    troubles.cluster.move_leader(topic, partition, node_id)
    return f"{topic}-{partition} is led by node {node_id}"


def _lose_leader(troubles: Troubles) -> str:
    topic, partition = troubles.any_partition()
    troubles.cluster.move_leader(topic, partition, NO_LEADER)
    world = troubles.world

    def elect() -> None:
        if troubles.cluster.topics[topic].partitions[partition].leader_id == NO_LEADER:
            node_id = troubles.any_node()
            troubles.cluster.move_leader(topic, partition, node_id)
            world.timeline.note("-- %s-%d is led by node %d", topic, partition, node_id)

    world.selector.at(world.now_ms + troubles.rng.choice((100, 1_000, 5_000)), elect)
    return f"{topic}-{partition} has no leader"


def _hide_topic(troubles: Troubles) -> str:
    topic = troubles.rng.choice(sorted(troubles.cluster.topics))
    troubles.cluster.topics[topic].is_visible = False
    troubles.has_denied_topics = True
    world = troubles.world

    def show() -> None:
        troubles.cluster.topics[topic].is_visible = True
        world.timeline.note("-- %s is in metadata again", topic)

    world.selector.at(world.now_ms + troubles.rng.choice((100, 600, 3_000)), show)
    return f"{topic} vanishes from metadata"


def _create_again(troubles: Troubles) -> str:
    """A topic is deleted and created again, with a batch refused or its answer lost meanwhile."""
    topic = troubles.rng.choice(sorted(troubles.cluster.topics))
    refuse = troubles.rng.choice(
        (faults.fail_with(3), faults.fail_with(6), faults.lose_request(), faults.close_before(), faults.close_after())
    )
    world = troubles.world

    def create_again(cluster: ScriptedCluster, exchange: Exchange, proceed: faults.Proceed) -> Answer:
        world.cluster.create_again(topic)
        world.timeline.note("-- %s is created again", topic)
        return refuse(cluster, exchange, proceed)

    troubles.cluster.on(ApiKey.PRODUCE, create_again, skip=troubles.rng.choice((0, 0, 1, 2)))
    if troubles.rng.random() < 0.5:
        _lose_answers(troubles)
    return f"{topic} is created again at a PRODUCE"


def _add_partition(troubles: Troubles) -> str:
    topic = troubles.rng.choice(sorted(troubles.cluster.topics))
    troubles.cluster.add_partitions(topic, 1)
    return f"{topic} has one more partition"


def _change_size(troubles: Troubles) -> str:
    """A batch may be too large when it is sent again, although it is in the log."""
    topic = troubles.rng.choice(sorted(troubles.cluster.topics))
    troubles.cluster.topics[topic].max_message_bytes = size = troubles.rng.choice((1_048_588, 250, 400, 900))
    return f"max.message.bytes={size} of {topic}"


def _lose_answers_then_change_size(troubles: Troubles) -> str:
    return f"{_lose_answers(troubles)} answers to PRODUCE lost, then {_change_size(troubles)}"


def _change_versions(troubles: Troubles) -> str:
    """A node is replaced by one of another release."""
    node_id, versions = troubles.any_node(), troubles.rng.choice((KAFKA_2_1, KAFKA_3_0, KAFKA_4_1))
    troubles.cluster.node_versions[node_id] = versions
    troubles.has_moved_nodes |= versions is KAFKA_2_1
    troubles.network.cut(node_id)
    return f"node {node_id} has Produce {versions[ApiKey.PRODUCE]}"


def _swap_addresses(troubles: Troubles) -> str:
    """Two nodes start again, each at the address of the other."""
    troubles.has_moved_nodes = True
    one, other = (troubles.cluster.nodes[troubles.any_node()] for _ in range(2))
    one.host, other.host = other.host, one.host
    for node in (one, other):
        troubles.network.cut(node.id)
    return f"nodes {one.id} and {other.id} swap their addresses"


def _throttle(troubles: Troubles) -> str:
    troubles.cluster.throttle_ms = troubles.rng.choice((0, 20, 300))
    return f"throttled for {troubles.cluster.throttle_ms} ms"


# ---- the network -----------------------------------------------------------------------------------------------------


def _cut(troubles: Troubles) -> str:
    node_id = troubles.any_node()
    troubles.network.cut(node_id)
    return f"connections to node {node_id} cut"


def _block_connection(troubles: Troubles) -> str:
    node_id, network = troubles.any_node(), troubles.network
    what, road = troubles.rng.choice(
        (
            ("takes no bytes", network.stalled),
            ("holds its responses back", network.held),
            ("does not finish a connect", network.hanging),
        )
    )
    road.add(node_id)
    return f"node {node_id} {what}"


def _stop_node(troubles: Troubles) -> str:
    node_id = troubles.any_node()
    troubles.network.stop(node_id)
    moved = troubles.rng.random() < 0.7
    others = [other for other in sorted(troubles.cluster.live_node_ids) if other != node_id]
    if moved and others:
        troubles.remember()
        for topic in troubles.cluster.topics.values():
            for index, partition in enumerate(topic.partitions):
                if partition.leader_id == node_id:
                    troubles.cluster.move_leader(topic.name, index, troubles.rng.choice(others))
    return f"node {node_id} stops, its partitions {'move' if moved and others else 'stay'}"


_TABLE: dict[Fault, float] = {
    _refuse(_NOT_APPENDED): 10,
    _refuse(_REFUSED): 5,
    _lose_state: 4,
    _appended_but(_PERHAPS_APPENDED): 4,
    _appended_but((ErrorCode.duplicate_sequence_number,)): 1,
    _lose_answers_then_refuse: 5,
    _lose_answers_then_move: 5,
    _lose_answers_then_restart: 4,
    _odd_answer: 4,
    _no_answer: 10,
    _late_answer: 5,
    _garbled_answer: 4,
    _old_metadata: 5,
    _bad_metadata: 2,
    _no_producer_id: 1,
    _never_a_producer_id: 0.4,
    _move_leader: 8,
    _lose_leader: 2,
    _hide_topic: 3,
    _create_again: 3,
    _add_partition: 0.5,
    _change_size: 3,
    _lose_answers_then_change_size: 3,
    _change_versions: 2,
    _swap_addresses: 2,
    _throttle: 2,
    _cut: 6,
    _block_connection: 4,
    _stop_node: 3,
}
