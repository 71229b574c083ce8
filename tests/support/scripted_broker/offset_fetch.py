"""OffsetFetch: one group up to version 7, several from 8 on. With `require_stable` offsets in open transactions make
the partition's answer UNSTABLE_OFFSET_COMMIT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from support.scripted_broker.exchange import Answer, Exchange

if TYPE_CHECKING:
    from support.scripted_broker.cluster import ScriptedCluster

_FIRST_BATCHED = 8


def respond(cluster: ScriptedCluster, exchange: Exchange) -> Answer:
    return Answer(_answer(exchange, [_group(cluster, exchange, group) for group in _groups(exchange)]))


def refuse(cluster: ScriptedCluster, exchange: Exchange, error_code: int) -> Mapping[str, Any]:
    return _answer(exchange, [_refused(group, error_code) for group in _groups(exchange)])


def _groups(exchange: Exchange) -> tuple[Any, ...]:
    request = exchange.request
    return request.groups if exchange.version >= _FIRST_BATCHED else (request,)


def _answer(exchange: Exchange, groups: list[dict[str, Any]]) -> Mapping[str, Any]:
    return {"groups": groups} if exchange.version >= _FIRST_BATCHED else groups[0]


def _refused(group: Any, error_code: int) -> dict[str, Any]:
    """Versions before 2 have no place for the error but the partitions."""
    topics = [
        {
            "name": topic.name,
            "partitions": [_values(int(index), error_code) for index in topic.partition_indexes],
        }
        for topic in group.topics or ()
    ]
    return {"group_id": group.group_id, "topics": topics, "error_code": error_code}


def _group(cluster: ScriptedCluster, exchange: Exchange, group: Any) -> dict[str, Any]:
    group_id = str(group.group_id)
    if cluster.coordinator_id(group_id) != exchange.node_id:
        return _refused(group, ErrorCode.not_coordinator)
    coordinator = cluster.transactions
    committed = coordinator.offsets.get(group_id, {})
    unstable: set[tuple[str, int]] = set()
    if getattr(exchange.request, "require_stable", False):
        for transaction in coordinator.transactions.values():
            unstable.update(transaction.pending_offsets.get(group_id, {}))
    requested = _requested(group, [*committed, *unstable])
    topics: dict[str, list[dict[str, Any]]] = {}
    for topic, index in requested:
        values = _values(index, ErrorCode.unstable_offset_commit if (topic, index) in unstable else 0)
        commit = committed.get((topic, index))
        if commit is not None and not values["error_code"]:
            values |= {"committed_offset": commit.offset, "metadata": commit.metadata or ""}
            values["committed_leader_epoch"] = commit.leader_epoch
        topics.setdefault(topic, []).append(values)
    listed = [{"name": topic, "partitions": partitions} for topic, partitions in topics.items()]
    return {"group_id": group_id, "topics": listed, "error_code": 0}


def _requested(group: Any, known: list[tuple[str, int]]) -> list[tuple[str, int]]:
    if group.topics is None:
        return sorted(set(known))
    return [(str(topic.name), int(index)) for topic in group.topics for index in topic.partition_indexes]


def _values(index: int, error_code: int) -> dict[str, Any]:
    return {
        "partition_index": index,
        "error_code": error_code,
        "committed_offset": -1,
        "committed_leader_epoch": -1,
        "metadata": "",
    }
