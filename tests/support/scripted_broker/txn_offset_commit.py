"""TxnOffsetCommit: offsets that count when the transaction commits. Version 5 (transaction version 2) adds the group
to the transaction by itself. Generations and members are not looked at: no group here has any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange, refused_partitions
from support.scripted_broker.transaction_coordinator import Commit

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

MAX_METADATA = 4096
_FIRST_OF_VERSION_2 = 5


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    request = exchange.request
    group = str(request.group_id)
    if cluster.coordinator_id(group) != exchange.node_id:
        return Answer(refuse(cluster, exchange, ErrorCode.not_coordinator))
    key, has_implicit_add = request.transactional_id, exchange.version >= _FIRST_OF_VERSION_2
    refused = cluster.transactions.check(key, request.producer_id, request.producer_epoch)
    if not refused and not has_implicit_add and group not in cluster.transactions.transactions[key].groups:
        refused = ErrorCode.invalid_txn_state
    if refused:
        return Answer(refuse(cluster, exchange, refused))
    held = cluster.transactions.begin(key, exchange.now_ms, 2 if has_implicit_add else 1)
    held.groups.add(group)
    pending = held.pending_offsets.setdefault(group, {})
    topics = []
    for topic in request.topics:
        partitions = []
        for each in topic.partitions:
            error_code = _refusal(cluster, str(topic.name), each)
            if not error_code:
                epoch = getattr(each, "committed_leader_epoch", -1)
                commit = Commit(int(each.committed_offset), each.committed_metadata, int(epoch))
                pending[str(topic.name), int(each.partition_index)] = commit
            partitions.append({"partition_index": each.partition_index, "error_code": error_code})
        topics.append({"name": topic.name, "partitions": partitions})
    return Answer({"throttle_time": cluster.throttle_ms, "topics": topics})


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return refused_partitions(exchange, error_code)


def _refusal(cluster: ScriptedCluster, topic: str, requested: Any) -> int:
    if cluster.partition(topic, requested.partition_index) is None:
        return ErrorCode.unknown_topic_or_partition
    return ErrorCode.offset_metadata_too_large if len(requested.committed_metadata or "") > MAX_METADATA else 0
